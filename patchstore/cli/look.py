"""`patchstore log` and `show`: the versions of a store."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated

import typer

from patchstore.cli import output
from patchstore.cli.failures import EXIT_CODES
from patchstore.cli.options import Json, StorageOption, StoreUrl, Version
from patchstore.cli.stores import head, header, newest_slot, open_with, version_named
from patchstore.errors import DataError, VersionNotFound
from patchstore.format import history
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
    with ThreadPoolExecutor(history.READ_AHEAD, thread_name_prefix="patchstore-log") as pool:
        versions = list(pool.map(partial(_slot, bucket), range(newest, max(-1, newest - limit), -1)))
    if as_json:
        for found in versions:
            output.print_json(
                found.to_dict() if isinstance(found, output.Unreadable) else output.summary(found)
            )
    else:
        output.print_log(run, versions)
    unreadable = [found for found in versions if isinstance(found, output.Unreadable)]
    for each in unreadable:
        output.print_error(each.error.kind, str(each.error))
    if unreadable:
        raise typer.Exit(EXIT_CODES[DataError])


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
