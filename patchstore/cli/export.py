"""`patchstore replay` and `transcode`: write a version, or its delta, to files."""

from typing import Annotated

import typer

# torch takes seconds to import, so commands that need it import it themselves.
from patchstore.cli import output
from patchstore.cli.options import Json, RequireSignature, StorageOption, StoreUrl, Version, check_out
from patchstore.cli.stores import head, header, open_with, version_named
from patchstore.signing.required import RequiredKeys


def replay(
    store: StoreUrl,
    out: Annotated[str, typer.Argument(metavar="OUT", help="A folder that does not exist yet.")],
    version: Version = None,
    require_signature: RequireSignature = None,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Write a version as a checkpoint folder for transformers and vLLM."""
    check_out(out)
    from patchstore.read import replay

    required = RequiredKeys.of(require_signature or None)
    bucket = open_with(store, option)
    header(bucket)
    with output.progress("replay", shown=not as_json) as progress:
        wanted = version_named(bucket, version)
        found = replay.replay(bucket, wanted, out=out, progress=progress, required_keys=required)
    if as_json:
        output.print_json({**output.summary(found), "out": out})
    else:
        output.print_line(
            f"version {found.version}, step {found.step}: {out}, state {output.short(found.state.total)}"
        )


def transcode(
    store: StoreUrl,
    out: Annotated[str, typer.Argument(metavar="OUT", help="A file that does not exist yet.")],
    version: Version = None,
    encoding: Annotated[str, typer.Option("--encoding", "-e", help="raw, gap or context.")] = "gap",
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Write a version's delta to a file, in another encoding."""
    check_out(out)
    from patchstore.read.transcode import transcode

    bucket = open_with(store, option)
    header(bucket)
    number = version_named(bucket, version)
    wanted = head(bucket).version if number is None else number
    found, num_bytes = transcode(bucket, wanted, encoding=encoding, out=out)
    if as_json:
        output.print_json({**output.summary(found), "out": out, "size": num_bytes, "as": encoding})
    else:
        assert found.delta is not None
        output.print_line(
            f"version {found.version}: {out}, {encoding}, {num_bytes:,} bytes "
            f"({found.delta.encoding}: {found.delta.num_bytes:,})"
        )
