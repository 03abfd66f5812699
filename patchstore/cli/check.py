"""`patchstore verify` and `doctor`: check a store, a version, a server."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

# torch takes seconds to import, so commands that need it import it themselves.
from patchstore.cli import check_all, output
from patchstore.cli.options import Json, RequireSignature, StorageOption, StoreUrl, Version, parsed
from patchstore.cli.stores import head, header, open_with, version_named
from patchstore.errors import UsageError
from patchstore.format import history
from patchstore.signing.required import RequiredKeys
from patchstore.stores import Store


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
    required = RequiredKeys.of(require_signature or None)
    if server is not None:
        _verify_server(store, version, server, option, as_json=as_json)
        return
    if store is None:
        raise typer.BadParameter("name a store, or a server with --server")
    bucket = open_with(store, option)
    header(bucket)
    if every:
        check_all.verify_all(bucket, resume=resume, required=required, as_json=as_json)
        history.check_newest(bucket, history.head(bucket))
    elif sample is not None:
        history.check_newest(bucket, head(bucket))
        check_all.verify_sample(bucket, sample, required=required, as_json=as_json)
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
    store: str | None, version: str | None, server: str, option: list[str] | None, *, as_json: bool
) -> None:
    from patchstore.serve.verify import verify_server
    from patchstore.serve.vllm_server import VllmServer

    with VllmServer(server) as inference:
        url = store or inference.status().store
        if url is None:
            raise UsageError(f"{server} follows no store; name one")
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


def doctor(
    store: StoreUrl,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="URL", help="vLLM server to check; repeatable."),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Leave out checks that write to the store.")
    ] = False,
    size: Annotated[int, typer.Option(min=1, help="Megabytes of the object that measures throughput.")] = 32,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Check store, run and servers before you train; exit code 1 if there is a problem."""
    from patchstore.doctor import examine

    found = []
    examination = examine(
        store,
        server or [],
        storage_options=parsed(option),
        read_only=read_only,
        num_bytes=size * 1_000_000,
    )
    # Closed also if the reader of the output went away, so that no test object is left behind.
    with closing(examination) as findings:
        for finding in findings:
            found.append(finding)
            if as_json:
                output.print_json(finding.to_dict())
    if not as_json:
        output.out.print(output.findings_table(found))
    if any(finding.level == "problem" for finding in found):
        raise typer.Exit(1)
