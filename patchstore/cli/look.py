"""`patchstore log` and `show`: the versions of a store."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated

import typer

from patchstore.cli import output
from patchstore.cli.failures import EXIT_CODES
from patchstore.cli.options import Json, StorageOption, StoreUrl, Version
from patchstore.cli.stores import head, header, newest_slot, open_with, version_named
from patchstore.errors import DataError, UsageError, VersionNotFound
from patchstore.format import history, retired, shortcuts, tags
from patchstore.format.records import Manifest
from patchstore.format.state_sums import read_sums
from patchstore.stores import Store


def log(
    store: StoreUrl,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Number of versions to list.")] = 20,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """List versions, newest first."""
    bucket = open_with(store, option)
    run = header(bucket)
    newest = newest_slot(bucket)
    marks, wrong = _marks(bucket, newest)
    with ThreadPoolExecutor(history.READ_AHEAD, thread_name_prefix="patchstore-log") as pool:
        versions = list(pool.map(partial(_slot, bucket), range(newest, max(-1, newest - limit), -1)))
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
        raise typer.Exit(EXIT_CODES[DataError])


def _marks(store: Store, newest: int) -> tuple[output.Marks | None, DataError | None]:
    """Return what records beside the versions say of them, or why that is not known.

    Neither where this user may not list the store.
    """
    try:
        tagged = tags.read_all(store)
        gone = retired.read(store).up_to(newest - 1).keys() - {tag.version for tag in tagged.values()}
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


def show(
    store: StoreUrl,
    version: Version = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Also show each tensor's digest sums.")] = False,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Show one version: its parent, payloads and digests."""
    bucket = open_with(store, option)
    run = header(bucket)
    number = version_named(bucket, version)
    found = head(bucket) if number is None else history.read_manifest(bucket, number)
    sums = read_sums(bucket, run.schema, found) if tensors else None
    if as_json:
        output.print_json(output.full(found, sums))
    else:
        output.print_table(output.show_table(found, sums))
