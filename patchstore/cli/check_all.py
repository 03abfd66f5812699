"""`patchstore verify --all`: all versions in one pass, resumable, with one report."""

import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from patchstore.cli import output
from patchstore.cli.failures import EXIT_CODES
from patchstore.cli.stores import header, newest_slot
from patchstore.errors import DataError, HostError, PatchstoreError, UsageError
from patchstore.format import kept
from patchstore.format.json_fields import Record
from patchstore.format.manifest_json import dump
from patchstore.format.records import FORMAT_VERSION
from patchstore.signing.required import RequiredKeys
from patchstore.stores import Store

if TYPE_CHECKING:
    from patchstore.read.whole_run import Verdict


def verify_all(bucket: Store, *, resume: Path | None, required: RequiredKeys | None, as_json: bool) -> None:
    """Verify every version, also those after a damaged one, and print a report.

    Args:
        resume: a file that remembers what was verified, also if this is interrupted.

    Raises:
        typer.Exit: something is wrong.
        UsageError: the file is of another run, or is none of ours.
    """
    from patchstore.read.whole_run import WholeRun

    found = header(bucket)
    known = {} if resume is None else _read(resume, found.run_id)
    newest = newest_slot(bucket)
    gone = kept.retired_versions(bucket, newest)
    with output.progress("all versions", shown=not as_json) as progress:
        whole = WholeRun(
            *(bucket, found, newest),
            required=required,
            known=known,
            is_collected=bool(gone),
            progress=progress,
        )
        note = None if resume is None else _Note(resume, found.run_id)
        verdicts = list(whole.verify(note))
    left = [each for each in verdicts if each.version not in gone]
    if gone:
        # What led to a version may be deleted, and shortcuts lead to it now: ask for each that failed.
        left = [next(_each(bucket, [each.version], required)) if each.error else each for each in left]
    _report(left, as_json=as_json, num_retired=len(gone))


def verify_sample(bucket: Store, count: int, *, required: RequiredKeys | None, as_json: bool) -> None:
    """Verify the newest version, and others that are chosen at random; `count` in all."""
    newest = newest_slot(bucket)
    gone = kept.retired_versions(bucket, newest)
    left = [version for version in range(newest) if version not in gone]
    chosen = random.SystemRandom().sample(left, min(count - 1, len(left)))
    verdicts = []
    with output.versions_progress("versions", shown=not as_json, total=len(chosen) + 1) as advance:
        for each in _each(bucket, sorted([*chosen, newest]), required):
            verdicts.append(each)
            advance()
    _report(verdicts, as_json=as_json, num_all=len(left) + 1, num_retired=len(gone))


def _each(bucket: Store, versions: list[int], required: RequiredKeys | None) -> "Iterator[Verdict]":
    from patchstore.read import replay
    from patchstore.read.run_paths import blamed
    from patchstore.read.whole_run import Verdict

    for version in versions:
        error: PatchstoreError | None = None
        manifest = None
        try:
            manifest = replay.verify(bucket, version, required_keys=required)
        except PatchstoreError as exc:
            error = blamed(exc)
        yield Verdict(version=version, manifest=manifest, digest=None, error=error)


def _report(
    verdicts: "list[Verdict]", *, as_json: bool, num_all: int | None = None, num_retired: int = 0
) -> None:
    wrong = [each for each in verdicts if each.error is not None]
    for each in verdicts if as_json else ():
        if each.error is not None:
            damaged = output.Unreadable(version=each.version, error=each.error)
            output.print_json({**damaged.to_dict(), "verified": False})
        elif each.manifest is not None:
            output.print_json({**output.summary(each.manifest), "verified": True})
    if as_json:
        for each in wrong:
            assert each.error is not None
            output.print_error(each.error.kind, f"version {each.version}: {each.error}")
    else:
        if wrong:
            output.print_table(output.wrong_table(wrong))
        if forks := [each for each in verdicts if each.is_fork and each.manifest is not None]:
            listed = ", ".join(f"{each.version} on {each.manifest.parent}" for each in forks if each.manifest)
            output.print_line(f"versions that build on another than the one before: {listed}")
        if num_known := sum(each.is_known for each in verdicts):
            output.print_line(f"{num_known} of them were verified before, and were not read again")
        also = f"; {num_retired:,} are retired" if num_retired else ""
        of = "" if num_all is None else f", chosen from {num_all}"
        output.print_line(f"{len(verdicts) - len(wrong)} of {len(verdicts)} versions verified{of}{also}")
    if wrong:
        raise typer.Exit(EXIT_CODES[DataError])


class _Note:
    """Writes the file that `--resume` names."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path, self._run_id = path, run_id
        self._written = 0

    def __call__(self, verified: Mapping[int, str]) -> None:
        if len(verified) == self._written:
            return
        record = {
            "format_version": FORMAT_VERSION,
            "run_id": self._run_id,
            "verified": {str(version): digest for version, digest in verified.items()},
        }
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        try:
            draft.write_bytes(dump(record))
            draft.replace(self._path)
        except OSError as exc:
            raise HostError(f"{self._path} cannot be written: {exc}") from exc
        finally:
            draft.unlink(missing_ok=True)
        self._written = len(verified)


def _read(path: Path, run_id: str) -> dict[int, str]:
    """Read which versions were verified: version -> digest of its manifest."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise UsageError(f"{path} cannot be made: {path.parent} is no folder") from None
        return {}
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc}") from exc
    try:
        record = Record.parse(str(path), data)
        found, verified = record.text("run_id"), record.item("verified")
        known = {int(version): verified.digest(version) for version in verified.value}
    except (DataError, ValueError) as exc:
        raise UsageError(
            f"{path} does not say what was verified: name another file, or remove it ({exc})"
        ) from exc
    if found != run_id:
        raise UsageError(f"{path} is about run {found}, but this store has run {run_id}: name another file")
    return known
