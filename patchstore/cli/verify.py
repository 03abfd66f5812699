"""`patchstore verify` and `doctor`: check a version or all of them, a store, a server."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchstore.bucket import history, kept
from patchstore.bucket.manifest_json import Record, dump
from patchstore.bucket.records import FORMAT_VERSION

# torch takes seconds to import, so commands that need it import it themselves.
from patchstore.cli import output
from patchstore.cli.options import (
    Json,
    RequireSignature,
    ServerHeader,
    StorageOption,
    StoreUrl,
    Version,
    head,
    newest_slot,
    open_with,
    parsed,
    server_headers,
    version_named,
)
from patchstore.errors import DataError, HostError, PatchstoreError, UsageError
from patchstore.read.versions import Unreadable
from patchstore.signing.required import RequiredKeys
from patchstore.stores import Store, layout
from patchstore.support.host import replace_text

if TYPE_CHECKING:
    from patchstore.read.whole_run import Verdict, WholeRun


def verify(
    store: Annotated[
        str | None,
        typer.Argument(metavar="STORE", help="With --server, by default the store that it follows."),
    ] = None,
    version: Version = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Verify every version, in one pass.")] = False,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Verify so many versions: the newest, and others at random.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --all: remember here what was verified, and go on from it."),
    ] = None,
    require_signature: RequireSignature = None,
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="URL", help="Verify the live weights of this server."),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --server: verify what it serves as this adapter.")
    ] = None,
    server_header: ServerHeader = None,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Rebuild a version in memory, tensor by tensor, and check every digest; or verify a server's weights."""
    if sum((every, sample is not None, version is not None or server is not None)) > 1:
        raise typer.BadParameter("name a version or a server, or give --all or --sample, not two of them")
    if resume is not None and not every:
        raise typer.BadParameter("--resume is of use only with --all")
    if server is not None and require_signature:
        raise typer.BadParameter("--require-signature is for stores; `patchstore follow` has it for servers")
    if server_header and server is None:
        raise typer.BadParameter("--server-header is of use only with --server")
    if adapter is not None and (server is None or store is None or version is not None):
        raise typer.BadParameter("--adapter is of use only with --server and a store, and without a version")
    required = RequiredKeys.of(require_signature or None)
    if server is not None and store is not None and adapter is not None:
        _verify_adapter(
            open_with(store, option), server, adapter, server_headers(server_header), as_json=as_json
        )
        return
    if server is not None:
        _verify_server(store, version, server, server_headers(server_header), option, as_json=as_json)
        return
    if store is None:
        raise typer.BadParameter("name a store, or a server with --server")
    bucket = open_with(store, option)
    history.run_header(bucket)
    if every:
        _verify_all(bucket, resume=resume, required=required, as_json=as_json)
        history.check_newest(bucket, history.head(bucket))
    elif sample is not None:
        history.check_newest(bucket, head(bucket))
        _verify_sample(bucket, sample, required=required, as_json=as_json)
    elif version is not None:
        _verify_version(bucket, version_named(bucket, version) or 0, required, as_json=as_json)
    else:
        newest = head(bucket)
        history.check_newest(bucket, newest)
        _verify_version(bucket, newest.version, required, as_json=as_json)


def _verify_version(bucket: Store, version: int, required: RequiredKeys | None, *, as_json: bool) -> None:
    from patchstore.read import replay

    with output.progress(f"version {version}", shown=not as_json) as progress:
        found = replay.verify(bucket, version, progress=progress, required_keys=required)
    if as_json:
        output.print_json({**output.summary(found), "verified": True})
    else:
        signed = "" if required is None else ", signed by a required key"
        output.print_line(
            f"version {version}: payloads and state {output.short(found.state.total)} verified{signed}"
        )


def _verify_server(
    store: str | None,
    version: str | None,
    server: str,
    headers: dict[str, str],
    option: list[str] | None,
    *,
    as_json: bool,
) -> None:
    from patchstore.follow.verify import verify_server
    from patchstore.follow.vllm_server import VllmServer

    with VllmServer(server, headers=headers) as inference:
        url = store or inference.status().store
        if url is None:
            raise UsageError(f"{server} follows no store; name it: patchstore verify STORE --server {server}")
        bucket = open_with(url, option)
        found = verify_server(bucket, inference, version_named(bucket, version))
    rest = {"computed": len(found.computed), "unverified": len(found.unverified)}
    if as_json:
        served = {"server": inference.url, "num_verified": found.num_verified, **rest, "verified": True}
        served["num_engines"] = found.num_engines
        output.print_json({**output.summary(found.manifest), **served})
        return
    unseen = "".join(f", {count} {kind}" for kind, count in rest.items() if count)
    if found.num_engines > 1:
        unseen += f", in each of {found.num_engines} engines"
    output.print_line(
        f"{inference.url} serves version {found.manifest.version}, state "
        f"{output.short(found.manifest.state.total)}: {found.num_verified} tensors verified{unseen}"
    )


def _verify_adapter(
    bucket: Store, server: str, adapter: str, headers: dict[str, str], *, as_json: bool
) -> None:
    from patchstore.follow.adapter_server import AdapterServer

    with AdapterServer(server, adapter, bucket, headers=headers) as inference:
        found = history.read_manifest(bucket, inference.verify(bucket))
    if as_json:
        served = {"server": inference.url, "adapter": adapter, "verified": True}
        output.print_json({**output.summary(found), **served})
        return
    state = output.short(found.state.total)
    output.print_line(f"{inference.url} serves version {found.version} as {adapter}, state {state}: verified")


# All versions in one pass, resumable, with one report.


def _verify_all(bucket: Store, *, resume: Path | None, required: RequiredKeys | None, as_json: bool) -> None:
    """Verify every version, also those after a damaged one, and print a report."""
    from patchstore.read.whole_run import WholeRun

    found = history.run_header(bucket)
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
        note = None if resume is None else _noting(resume, found.run_id)
        verdicts = list(whole.verify(note))
    left = [each for each in verdicts if each.version not in gone]
    if gone:
        # What led to a version may be deleted, and shortcuts lead to it now: ask for each that failed.
        left = [next(_each(bucket, [each.version], required)) if each.error else each for each in left]
    _report(left, as_json=as_json, num_retired=len(gone), shortcuts=whole)


def _verify_sample(bucket: Store, count: int, *, required: RequiredKeys | None, as_json: bool) -> None:
    """Verify the newest version, and others that are chosen at random; `count` in all."""
    newest = newest_slot(bucket)
    gone = kept.retired_versions(bucket, newest)
    # Of numbers that are not listed one by one: any writer of the bucket can name the newest.
    drawn = random.SystemRandom().sample(range(newest), min(count - 1 + len(gone), newest))
    chosen = [version for version in drawn if version not in gone][: count - 1]
    verdicts = []
    with output.versions_progress("versions", shown=not as_json, total=len(chosen) + 1) as advance:
        for each in _each(bucket, sorted([*chosen, newest]), required):
            verdicts.append(each)
            advance()
    _report(verdicts, as_json=as_json, num_all=newest - len(gone) + 1, num_retired=len(gone))


def _each(bucket: Store, versions: list[int], required: RequiredKeys | None) -> "Iterator[Verdict]":
    from patchstore.read import replay
    from patchstore.read.whole_run import Verdict, blamed

    for version in versions:
        error: PatchstoreError | None = None
        manifest = None
        try:
            manifest = replay.verify(bucket, version, required_keys=required)
        except PatchstoreError as exc:
            error = blamed(exc)
        yield Verdict(version=version, manifest=manifest, error=error)


def _report(
    verdicts: "list[Verdict]",
    *,
    as_json: bool,
    num_all: int | None = None,
    num_retired: int = 0,
    shortcuts: "WholeRun | None" = None,
) -> None:
    wrong = [each for each in verdicts if each.error is not None]
    for each in verdicts if as_json else ():
        if each.error is not None:
            damaged = Unreadable(number=each.version, error=each.error)
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
    num_damaged = 0 if shortcuts is None else _report_shortcuts(shortcuts, as_json=as_json)
    if wrong or num_damaged:
        raise typer.Exit(output.EXIT_CODES[DataError])


def _report_shortcuts(found: "WholeRun", *, as_json: bool) -> int:
    """Print which shortcuts are damaged, and what to do; return how many."""
    for ends, error in sorted(found.wrong.items(), key=lambda each: (each[0].version, each[0].parent or -1)):
        key = layout.shortcut_key(ends.version, ends.parent)
        if as_json:
            damaged = Unreadable(number=ends.version, error=error)
            output.print_json(
                {"shortcut": key, "parent": ends.parent, **damaged.to_dict(), "verified": False}
            )
        output.print_error(
            error.kind,
            f"{key}: {error}. Put back what is damaged, or delete this record and run `patchstore compact` "
            "(in a replica: `patchstore replicate`)",
        )
    if found.num_shortcuts and not as_json:
        output.print_line(
            f"{found.num_shortcuts - len(found.wrong)} of {found.num_shortcuts} shortcuts verified"
        )
    return len(found.wrong)


def _noting(path: Path, run_id: str) -> Callable[[Mapping[int, str]], None]:
    """Return what writes the file that `--resume` names."""
    written = 0

    def note(verified: Mapping[int, str]) -> None:
        nonlocal written
        if len(verified) == written:
            return
        found = {str(version): digest for version, digest in verified.items()}
        try:
            record = {"format_version": FORMAT_VERSION, "run_id": run_id, "verified": found}
            replace_text(path, dump(record).decode())
        except OSError as exc:
            raise HostError(f"{path} cannot be written: {exc}") from exc
        written = len(verified)

    return note


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


def doctor(
    store: StoreUrl,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="URL", help="vLLM server to check; repeatable."),
    ] = None,
    server_header: ServerHeader = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Leave out checks that write to the store.")
    ] = False,
    size: Annotated[int, typer.Option(min=1, help="Megabytes of the object that measures throughput.")] = 32,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Check store, run and servers before you train; exit code 1 if there is a problem."""
    from patchstore.ops.doctor import examine

    found = []
    examination = examine(
        store,
        server or [],
        storage_options=parsed(option),
        headers=server_headers(server_header),
        read_only=read_only,
        num_bytes=size * 1_000_000,
    )
    # Closed also if the reader of the output went away, so that no test object is left behind.
    with closing(examination) as findings, output.waiting("doctor", shown=not as_json):
        for finding in findings:
            found.append(finding)
            if as_json:
                output.print_json(finding.to_dict())
    if not as_json:
        output.out.print(output.findings_table(found))
    if any(finding.level == "problem" for finding in found):
        raise typer.Exit(1)
