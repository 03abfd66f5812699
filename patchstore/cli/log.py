"""`patchstore log` and `diff`: the versions of a store, all about one, and what differs between two."""

from typing import Annotated

import typer

from patchstore.bucket import history
from patchstore.bucket.records import StoreHeader
from patchstore.cli import output
from patchstore.cli.options import (
    Json,
    RequireSignature,
    StorageOption,
    StoreUrl,
    newest_slot,
    number_or_tag,
    open_with,
    version_named,
)
from patchstore.errors import DataError
from patchstore.read.run import Run
from patchstore.read.versions import Marks, Unreadable, Version, read_versions
from patchstore.signing.required import RequiredKeys
from patchstore.stores import Store


def log(
    store: StoreUrl,
    version: Annotated[
        str | None,
        typer.Argument(metavar="VERSION", help="Show all about this one, a number or a tag."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="Number of versions to list; 20 by default.")
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="With VERSION, also show each tensor's digest sums.")
    ] = False,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """List versions, newest first; or show one: its parent, payloads and digests."""
    if version is None and tensors:
        raise typer.BadParameter("--tensors is of use only with a VERSION")
    if version is not None and limit is not None:
        raise typer.BadParameter("--limit is of use only without a VERSION")
    bucket = open_with(store, option)
    run = history.run_header(bucket)
    number = version_named(bucket, version)
    if number is None:
        _list(bucket, run, 20 if limit is None else limit, as_json=as_json)
        return
    found = history.read_manifest(bucket, number)
    sums = None
    if tensors:
        from patchstore.bucket.state_sums import by_name, read_sums

        sums = by_name(run.schema, read_sums(bucket, run.schema, found))
    if as_json:
        output.print_json(output.full(found, sums))
    else:
        output.print_table(output.version_table(found, sums))


def diff(
    store: StoreUrl,
    before: Annotated[str, typer.Argument(metavar="A", help="A version, a number or a tag.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Another one, older or newer.")],
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="Number of tensors to show; --json shows all.")
    ] = 20,
    require_signature: RequireSignature = None,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Compare two versions bit by bit: which tensors differ, in how many elements, and by how much."""
    wanted = number_or_tag(before), number_or_tag(after)
    required = RequiredKeys.of(require_signature or None)
    with Run.open(open_with(store, option), required) as run:
        with output.progress("diff", shown=not as_json) as progress:
            found = run.diff(*wanted, progress=progress)
        if as_json:
            output.print_diff_json(found)
        else:
            output.print_diff(found, limit)


def _list(bucket: Store, run: StoreHeader, limit: int, *, as_json: bool) -> None:
    newest = newest_slot(bucket)
    marks, wrong = None, None
    try:
        marks = Marks.read(bucket, newest)
    except DataError as exc:
        wrong = exc
    versions = read_versions(bucket, run, newest, last=limit, marks=lambda: marks)[::-1]
    if as_json:
        for found in versions:
            output.print_json(output.listed(found) if isinstance(found, Version) else found.to_dict())
    else:
        output.print_log(run, versions, newest + 1)
    unreadable = [found.error for found in versions if isinstance(found, Unreadable)]
    for error in [*unreadable, *([] if wrong is None else [wrong])]:
        output.print_error(error.kind, str(error))
    if unreadable or wrong is not None:
        raise typer.Exit(output.EXIT_CODES[DataError])
