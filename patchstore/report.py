"""What the command line shows: versions as tables for people and as JSON lines for programs."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from patchstore import manifest as manifests
from patchstore.model import Manifest, StoreHeader
from patchstore.sums import Sums

if TYPE_CHECKING:
    from patchstore.integrations.doctor import Finding

out = Console()
err = Console(stderr=True)


def print_json(value: Any) -> None:
    """One JSON value on one line of standard output, at once."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


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


def full(found: Manifest, sums: Mapping[str, Sums] | None) -> dict[str, Any]:
    """A version with all that its manifest says, and with each tensor's digest sums if they are given."""
    record: dict[str, Any] = json.loads(manifests.to_json(found))
    if sums is not None:
        record["state"]["tensors"] = {name: each.hex() for name, each in sums.items()}
    return record


_LOG_COLUMNS = ("version", "step", "changed", "delta", "B/change", "anchor", "state")


def print_log(header: StoreHeader, versions: Iterable[Manifest]) -> None:
    """Versions, a line each, in the order given. Thousands of them: rich takes 1.5 ms to lay out each."""
    schema, num_elements = header.schema, header.schema.num_elements
    rows = [_LOG_COLUMNS, *(_log_row(found, num_elements) for found in versions)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(
        f"run {header.run_id}: {len(schema.tensors)} tensors, {num_elements:,} elements, "
        f"{decimal(schema.num_bytes)}"
    )
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _log_row(found: Manifest, num_elements: int) -> tuple[str, ...]:
    delta, anchor = found.delta, found.anchor
    changed = rate = size = "-"
    if delta is not None:
        changed = f"{100 * delta.num_changed / max(1, num_elements):.3f} %"
        size = decimal(delta.num_bytes)
        rate = f"{delta.num_bytes / delta.num_changed:.2f}" if delta.num_changed else "-"
    return (
        str(found.version),
        str(found.step),
        changed,
        size,
        rate,
        "-" if anchor is None else decimal(anchor.num_bytes),
        short(found.state.total),
    )


def show_table(found: Manifest, sums: Mapping[str, Sums] | None) -> Table:
    """One version, a field a line."""
    table = Table(title=f"version {found.version}", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary(found).items():
        table.add_row(name, "-" if value is None else str(value))
    table.add_row("write_id", found.writer.write_id)
    table.add_row("parent_digest", found.parent_digest or "-")
    delta = found.delta.payloads if found.delta else ()
    state = (found.state.sums,)
    anchor = (*found.anchor.payloads, *found.anchor.files) if found.anchor else ()
    for part, payloads in (("delta", delta), ("anchor", anchor), ("sums", state)):
        for payload in payloads:
            table.add_row(part, f"{payload.key}\n{payload.size:,} bytes, {payload.digest}")
    for name, each in (sums or {}).items():
        table.add_row(each.hex(), Text(name))
    return table


_COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def findings_table(findings: Iterable["Finding"]) -> Table:
    """What an examination found, under what it is about, and below what is not well what to do."""
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for about, each in groupby(findings, lambda finding: finding.about):
        table.add_section()
        table.add_row("", "", Text(about, style="bold"))
        for finding in each:
            text = Text(finding.found)
            if finding.advice is not None:
                text.append(f"\n-> {finding.advice}", style="italic")
            table.add_row(Text(finding.level, style=_COLOURS[finding.level]), finding.kind, text)
    return table


def short(digest: str) -> str:
    """The first digits of a digest, enough to compare by eye."""
    return digest.removeprefix("blake3:")[:12]


@contextmanager
def progress(what: str, *, shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar of bytes on standard error while the block runs, where that is a terminal."""
    if not (shown and err.is_terminal):
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
