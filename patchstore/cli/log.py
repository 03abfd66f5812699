"""`patchstore log`: the versions of a store, or all about one."""

from functools import partial
from typing import Annotated

import typer

from patchstore.bucket import history, kept, notes, shortcuts
from patchstore.bucket.records import Manifest, StoreHeader
from patchstore.cli import output
from patchstore.cli.options import (
    Json,
    StorageOption,
    StoreUrl,
    newest_slot,
    open_with,
    version_named,
)
from patchstore.errors import DataError, UsageError, VersionNotFound
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


def _list(bucket: Store, run: StoreHeader, limit: int, *, as_json: bool) -> None:
    newest = newest_slot(bucket)
    marks, wrong = _marks(bucket, newest)
    versions = history.read_many(partial(_slot, bucket), range(newest, max(-1, newest - limit), -1))
    if as_json:
        for found in versions:
            is_read = not isinstance(found, output.Unreadable)
            shown = output.summary(found) if isinstance(found, Manifest) else found.to_dict()
            output.print_json({**shown, **(marks.of(found.version) if is_read and marks else {})})
    else:
        output.print_log(run, versions, marks)
    unreadable = [found.error for found in versions if isinstance(found, output.Unreadable)]
    for error in [*unreadable, *([] if wrong is None else [wrong])]:
        output.print_error(error.kind, str(error))
    if unreadable or wrong is not None:
        raise typer.Exit(output.EXIT_CODES[DataError])


def _marks(store: Store, newest: int) -> tuple[output.Marks | None, DataError | None]:
    """Return what records beside the versions say of them, or why that is not known.

    Neither where this user may not list the store.
    """
    try:
        tagged = notes.read_tags(store)
        gone = kept.retired_versions(store, newest)
        added = {each.version for each in shortcuts.listed(store) if each.parent is None}
    except UsageError:
        return None, None
    except DataError as exc:
        return None, exc
    names: dict[int, list[str]] = {}
    for name, tag in tagged.items():
        if tag.version is not None:
            names.setdefault(tag.version, []).append(name)
    return output.Marks(retired=gone, added=added, tags=names), None


def _slot(store: Store, version: int) -> Manifest | output.Unreadable:
    try:
        return history.read_manifest(store, version)
    except (DataError, VersionNotFound) as exc:
        return output.Unreadable(version=version, error=exc)
