"""`patchstore compact`: anchors and rollups that a run lacks."""

from pathlib import Path
from typing import Annotated

import typer

from patchstore.cli import output
from patchstore.cli.options import Json, StorageOption, StoreUrl
from patchstore.cli.stores import open_with
from patchstore.cli.watching import KeepFollowing, LogOption, set_up_log, shown


def compact(
    store: StoreUrl,
    *,
    follow: KeepFollowing = False,
    anchor_every: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Deltas between two anchors; auto: until they have the size of an anchor.",
        ),
    ] = "64",
    encoding: Annotated[
        str, typer.Option(help="Of rollups: gap, or context, which is smaller and takes more CPU time.")
    ] = "gap",
    scratch: Annotated[
        Path | None,
        typer.Option(help="Folder for temporary files: the deltas between two anchors; by default /tmp."),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.1, help="With --follow, seconds between two looks at the store.")
    ] = 30.0,
    log_format: LogOption = None,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Add anchors, and rollups of many deltas, so that servers that are late or far behind read less."""
    from patchstore.serve.service import stop_on_signals

    bucket = open_with(store, option)
    # Imports torch, which takes seconds: after the checks of what was asked for.
    from patchstore.compact import service

    compactor = service.Compactor(bucket, anchor_every=anchor_every, encoding=encoding, scratch=scratch)
    set_up_log(log_format, service.__name__)
    if follow:
        events = service.follow(compactor, stop_on_signals(), interval_s=interval)
    else:
        events = compactor.compact()
    num_added = sum(len(event.added) for event in shown(events, log_format, as_json=as_json))
    if not follow and not as_json:
        output.print_line(f"{bucket.url}: {num_added} shortcuts were added")
