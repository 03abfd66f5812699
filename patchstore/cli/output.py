"""What the command line shows: versions as tables for people and as JSON lines for programs.

All that it writes goes through here, or through the log (`patchstore.follow.logs`). Keys, names and errors
come from stores and servers, so each value is shown on one line, without control characters.
"""

import json
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import groupby
from math import isfinite
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from patchstore.bucket import manifest_json as manifests
from patchstore.bucket.records import Manifest, StoreHeader
from patchstore.errors import (
    DataError,
    NotFound,
    PatchstoreError,
    ServerUnavailable,
    StoreUnavailable,
    UsageError,
    VersionConflict,
    WaitTimeout,
    WrongParent,
)
from patchstore.read.versions import Unreadable, Version
from patchstore.support.printable import duration, escaped, json_line

if TYPE_CHECKING:
    from patchstore.bucket.state_sums import Sums
    from patchstore.ops.doctor import Finding
    from patchstore.read.diff import Diff
    from patchstore.read.whole_run import Verdict

out = Console()
err = Console(stderr=True)


def print_json(value: Any) -> None:
    """Print one JSON value on one line of standard output, and flush."""
    print(json_line(value), flush=True)


def print_line(text: str) -> None:
    """Print one line on standard output: brackets are no markup, and nothing is wrapped."""
    out.print(escaped(text), markup=False, highlight=False, soft_wrap=True)


def print_error(kind: str, message: str) -> None:
    """Print an error on one line of standard error."""
    err.print(Text.assemble(("error", "bold red"), escaped(f" ({kind}): {message}")), soft_wrap=True)


def _cell(value: str, style: str = "") -> Text:
    """What a table shows of a text: no markup, and no control characters, which may come from a store."""
    return Text(escaped(value), style)


def print_table(table: Table) -> None:
    """Print a table on standard output; in a file or a pipe as wide as its content."""
    console = out if _has_edge() else Console(width=_natural_width(table))
    console.print(table)


def _has_edge() -> bool:
    """Whether lines have a limit: on a terminal, or if the caller sets one."""
    return out.is_terminal or "COLUMNS" in os.environ


def _natural_width(table: Table) -> int:
    return Measurement.get(out, out.options.update(width=10_000), table).maximum


def summary(found: Manifest) -> dict[str, Any]:
    """A version in a few fields."""
    return {
        "version": found.version,
        "kind": found.kind,
        "parent": found.parent,
        "step": found.step,
        "created_at": found.created_at,
        "writer": found.writer.id,
        "epoch": found.writer.epoch,
        "encoding": found.delta and found.delta.encoding,
        "num_changed": found.delta and found.delta.num_changed,
        "delta_bytes": found.delta and found.delta.num_bytes,
        "anchor_bytes": found.anchor and found.anchor.num_bytes,
        "state": found.state.total,
    }


def full(found: Manifest, sums: "Mapping[str, Sums] | None") -> dict[str, Any]:
    """A version with its whole manifest, and with each tensor's digest sums if they are given."""
    record: dict[str, Any] = json.loads(manifests.to_json(found))
    if sums is not None:
        record["state"]["tensors"] = {name: each.hex() for name, each in sums.items()}
    return record


_COLUMNS = ("version", "parent", "step", "age", "changed", "delta", "B/change", "anchor", "state", "marks")
_LEFT_OUT_FIRST = ("B/change", "state", "step", "anchor", "age", "delta", "marks")
"""Columns in the order in which a narrow terminal leaves them out."""
_IF_ANY = ("parent", "marks")
"""Columns that are shown only if a version has something there."""
_TEXTS = ("tensor", "server", "what")
"""Columns that begin at the left."""
_BETWEEN = " │ "


def listed(found: Version) -> dict[str, Any]:
    """A version in a few fields, and what records beside the versions say of it, if that is known."""
    shown = {**summary(found.manifest), "share_changed": found.share_changed, "resumed": found.is_resumed}
    if found.marks is None:
        return shown
    added = found.marks.has_added_anchor(found.number)
    marks = {"retired": found.is_retired, "added_anchor": added, "tags": found.tags}
    return {**shown, **marks, "signed_by": found.signed_by}


def print_log(header: StoreHeader, versions: Sequence[Version | Unreadable], num_all: int) -> None:
    """Print versions of so many, one per line, in the given order.

    A parent is shown if it is not the version before.
    """
    schema, now = header.schema, datetime.now(UTC)
    title = (
        f"run {header.run_id}: {len(schema.tensors)} tensors, {schema.num_elements:,} elements, "
        f"{decimal(schema.num_bytes)}{'' if header.adapter is None else f'; {header.adapter}'}"
    )
    part = f"{len(versions):,} of {num_all:,} versions; -n shows more" if len(versions) < num_all else None
    _print_columns(title, _COLUMNS, [_row(each, now) for each in versions], _LEFT_OUT_FIRST, part)


def print_diff_json(found: "Diff") -> None:
    """Print what differs between two versions, and then each tensor that does."""
    print_json(
        {
            "before": found.before.version,
            "after": found.after.version,
            "tensors_changed": len(found.tensors),
            "num_tensors": found.num_tensors,
            "num_changed": found.num_changed,
            "share_changed": found.share_changed,
        }
    )
    for each in found.tensors:
        # JSON has no infinite number.
        largest = each.largest_change if isfinite(each.largest_change) else None
        shown = {"tensor": each.name, "num_changed": each.num_changed, "num_elements": each.num_elements}
        print_json({**shown, "share_changed": each.share_changed, "largest_change": largest})


def print_diff(found: "Diff", limit: int) -> None:
    """Print the tensors that differ most between two versions, by the share of their elements."""
    title = (
        f"versions {found.before.version} and {found.after.version} differ in {found.num_changed:,} elements "
        f"({_percent(found.share_changed)}), in {len(found.tensors):,} of {found.num_tensors:,} tensors"
    )
    most = sorted(found.tensors, key=lambda each: each.share_changed, reverse=True)[:limit]
    rows = [
        {
            "changed": f"{each.num_changed:,}",
            "share": _percent(each.share_changed),
            "largest change": f"{each.largest_change:.3g}",
            "tensor": each.name,
        }
        for each in most
    ]
    num_all = len(found.tensors)
    part = f"{len(rows):,} of {num_all:,} tensors; -n shows more" if len(rows) < num_all else None
    if rows:
        _print_columns(title, tuple(rows[0]), rows, part=part)
    else:
        print_line(title)


def _percent(share: float) -> str:
    return f"{100 * share:.3f} %"


def print_status(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Print what is known of a store, and of servers, one per line."""
    if rows:
        _print_columns(title, tuple(rows[0]), rows)
    else:
        print_line(title)


def _print_columns(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Mapping[str, str]],
    left_out_first: Sequence[str] = (),
    part: str | None = None,
) -> None:
    """Print rows, one per line, and leave out columns where a terminal is narrow.

    Not a table of rich, which takes 1.5 ms to lay out a line: a log may have thousands.
    """
    widths = {name: max(len(name), *(len(row.get(name, "")) for row in rows), 0) for name in columns}
    shown = [name for name in columns if name not in _IF_ANY or any(name in row for row in rows)]
    left_out = []
    for name in left_out_first if _has_edge() else ():
        if sum(widths[each] for each in shown) + len(_BETWEEN) * (len(shown) - 1) <= out.width:
            break
        if name in shown:
            shown.remove(name)
            left_out.append(name)

    def line(cells: Mapping[str, str]) -> str:
        aligned = (
            cells.get(name, "").ljust(widths[name])
            if name in _TEXTS
            else cells.get(name, "").rjust(widths[name])
            for name in shown
        )
        return _BETWEEN.join(aligned).rstrip()

    lines = [line({name: name for name in shown}), *map(line, rows)]
    feet = [f"not shown in so few columns: {', '.join(left_out)}"] if left_out else []
    feet += [] if part is None else [part]
    width = out.width if _has_edge() else max(map(len, [title, *feet]))
    wrapped = [line for foot in feet for line in textwrap.wrap(foot, width)]
    print("\n".join(map(escaped, [*textwrap.wrap(title, width), *lines, *wrapped])))


def _row(listed: Version | Unreadable, now: datetime) -> dict[str, str]:
    if isinstance(listed, Unreadable):
        return {"version": str(listed.number), "changed": "unreadable"}
    found = listed.manifest
    delta, anchor = found.delta, found.anchor
    row = {"version": str(found.version), "step": str(found.step), "state": short(found.state.total)}
    row |= {"changed": "-", "delta": "-", "B/change": "-"}
    row["age"] = duration((now - listed.time).total_seconds())
    row["anchor"] = decimal(anchor.num_bytes) if anchor is not None else "added" if listed.has_anchor else "-"
    if found.version > 0 and found.parent != found.version - 1:
        row["parent"] = "none" if found.parent is None else str(found.parent)
    if delta is not None:
        row["changed"] = _percent(listed.share_changed or 0)
        row["delta"] = decimal(delta.num_bytes)
        row["B/change"] = f"{delta.num_bytes / delta.num_changed:.2f}" if delta.num_changed else "-"
    if listed.words:
        row["marks"] = ", ".join(listed.words)
    return row


def version_table(found: Manifest, sums: "Mapping[str, Sums] | None") -> Table:
    """One version, one field per line."""
    table = Table(title=f"version {found.version}", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary(found).items():
        table.add_row(name, "-" if value is None else _cell(str(value)))
    table.add_row("write_id", _cell(found.writer.write_id))
    table.add_row("parent_digest", found.parent_digest or "-")
    delta = found.delta.payloads if found.delta else ()
    state = (found.state.sums,)
    anchor = (*found.anchor.payloads, *found.anchor.files) if found.anchor else ()
    for part, payloads in (("delta", delta), ("anchor", anchor), ("sums", state)):
        for payload in payloads:
            said = f"\n{payload.size:,} bytes, {payload.digest}"
            table.add_row(part, _cell(payload.key).append(said))
    for name, each in (sums or {}).items():
        table.add_row(each.hex(), _cell(name))
    return table


_NARROW = 60
"""Characters below which a column for kinds would leave too few for sentences."""
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def findings_table(findings: Iterable["Finding"]) -> Table:
    """Findings, grouped by what they are about; below each warning or problem what to do."""
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    is_narrow = out.width < _NARROW
    if not is_narrow:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for about, each in groupby(findings, lambda finding: finding.about):
        table.add_section()
        table.add_row(*("" for _ in table.columns[1:]), _cell(about, "bold"))
        for finding in each:
            text = _cell(f"{finding.kind}: {finding.found}" if is_narrow else finding.found)
            if finding.advice is not None:
                text.append("\n-> " + escaped(finding.advice), style="italic")
            kind = () if is_narrow else (finding.kind,)
            table.add_row(_cell(finding.level, _COLOURS[finding.level]), *kind, text)
    return table


def wrong_table(verdicts: "Iterable[Verdict]") -> Table:
    """Versions that are wrong, and why; neighbours of which the same is said share a row."""
    table = Table(title="what is wrong")
    for name in ("version", "kind"):
        table.add_column(name, no_wrap=True)
    table.add_column("what", overflow="fold")
    alike = groupby(enumerate(verdicts), lambda each: (each[1].version - each[0], str(each[1].error)))
    for _, group in alike:
        (_, first), *rest = group
        assert first.error is not None
        versions = f"{first.version} to {rest[-1][1].version}" if rest else str(first.version)
        table.add_row(versions, _cell(first.error.kind, "bold red"), _cell(str(first.error)))
    return table


def short(digest: str) -> str:
    """The first digits of a digest, enough to compare by eye."""
    return digest.removeprefix("blake3:")[:12]


@contextmanager
def _bar(what: str, shown: bool, *columns: ProgressColumn) -> Iterator[tuple[Progress, TaskID] | None]:
    """Show a bar on standard error while the block runs, where that is a terminal."""
    if not (shown and err.is_terminal):
        yield None
        return
    every = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    # What is printed meanwhile goes where it belongs, also if that is no terminal.
    with Progress(*every, console=err, transient=True, redirect_stdout=out.is_terminal) as bars:
        yield bars, bars.add_task(what, total=None)


@contextmanager
def progress(what: str, *, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar of bytes."""
    with _bar(what, shown, DownloadColumn(), TransferSpeedColumn()) as bar:
        yield bar and (lambda done, total: bar[0].update(bar[1], completed=done, total=total))


@contextmanager
def waiting(what: str, *, shown: bool) -> Iterator[None]:
    """Show a bar that moves, of what is done in one go."""
    with _bar(what, shown):
        yield


@contextmanager
def versions_progress(what: str, *, shown: bool, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar of versions."""
    with _bar(what, shown, MofNCompleteColumn()) as bar:
        yield lambda: None if bar is None else bar[0].update(bar[1], advance=1, total=total)


# Failures: one line, and an exit code.

EXIT_CODES: dict[type[PatchstoreError], int] = {
    UsageError: 2,
    NotFound: 2,
    DataError: 3,
    WrongParent: 3,
    StoreUnavailable: 4,
    ServerUnavailable: 4,
    VersionConflict: 5,
    WaitTimeout: 6,
}


def exit_code(error: PatchstoreError) -> int:
    """Return the exit code of a command that ended with an error."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


WRONG_CALL = typer.BadParameter.__mro__[1]
"""The base class of typer's errors about a wrong call; typer does not export it."""

_HINTS = {
    "--version": "the version is an argument without a name: patchstore replay STORE OUT 12",
    "-v": "the version is an argument without a name: patchstore replay STORE OUT 12",
    "--verbose": "it comes before the command: patchstore --verbose doctor STORE",
}


def explain_call(exc: Any, *, as_json: bool) -> None:
    """Report a wrong call, for which typer raised `exc`."""
    message = exc.format_message()
    if not message:
        # There were no arguments, and the help was shown instead.
        return
    # Releases of typer and click write it differently.
    if given := re.match(r"No such option:? '?(-[^\s']*[^\s'.])", message):
        is_number = given[1][1:].isdecimal()
        hint = "versions count from 0" if is_number else _HINTS.get(given[1])
        message = message if hint is None else f"No such option: {given[1]}; {hint}"
    if exc.ctx is not None:
        # On one line, also if typer wrapped it for a narrow terminal.
        usage = " ".join(exc.ctx.get_usage().split())
        message = message if message.endswith("?") else f"{message.rstrip('.')}."
        message = f"{message} {usage}; --help says more"
    explain(UsageError.kind, message, as_json=as_json)


def explain(kind: str, message: str, *, as_json: bool) -> None:
    """Report an error on standard error, and with `--json` on standard output too."""
    if as_json:
        # Standard output itself may be what failed.
        with suppress(OSError):
            print_json({"error": {"kind": kind, "message": message}})
    print_error(kind, message)
