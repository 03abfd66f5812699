"""`patchstore replicate` and `promote`: a bucket in another place, and what to do when the first is lost."""

import threading
import time
from typing import Annotated

import typer

from patchstore.cli import output
from patchstore.cli.options import Json, RequireSignature, StorageOption, parsed
from patchstore.cli.stores import open_with
from patchstore.cli.watching import (
    KeepFollowing,
    Listen,
    LogOption,
    MaxPollInterval,
    UnhealthyAfter,
    set_up_log,
    shown,
)
from patchstore.signing.required import RequiredKeys
from patchstore.stores import open_store


def replicate(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The store that the trainer writes.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="An empty place, or a replica of SOURCE.")],
    *,
    follow: KeepFollowing = False,
    source_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Storage option of SOURCE; values may be JSON; repeatable."),
    ] = None,
    target_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="The same of TARGET."),
    ] = None,
    require_signature: RequireSignature = None,
    listen: Listen = None,
    unhealthy_after: UnhealthyAfter = 60.0,
    max_poll_interval: MaxPollInterval = 2.0,
    log_format: LogOption = None,
    as_json: Json = False,
) -> None:
    """Copy all versions to another place, verified, so that servers there read a near bucket."""
    from patchstore.replicate import service
    from patchstore.serve import progress
    from patchstore.serve.service import stop_on_signals

    if listen is not None and not follow:
        raise typer.BadParameter("--listen is of use only with --follow")
    set_up_log(log_format, progress.__name__)
    required = RequiredKeys.of(require_signature or None)
    theirs, ours = open_store(source, **parsed(source_option)), open_store(target, **parsed(target_option))
    # Without --follow Ctrl-C and SIGTERM end the command at once, as they end any other.
    stop = stop_on_signals() if follow else threading.Event()
    events = (
        service.follow(
            theirs,
            ours,
            stop,
            required=required,
            listen=listen,
            unhealthy_after_s=unhealthy_after,
            max_poll_interval_s=max_poll_interval,
        )
        if follow
        else service.replicate(theirs, ours, stop, required=required)
    )
    num_versions, num_bytes = 0, 0
    for event in shown(events, log_format, as_json=as_json):
        num_versions += event.outcome == "copied"
        num_bytes += event.num_bytes
    if not follow and not as_json:
        output.print_line(
            f"{ours.url} is equal to {theirs.url}: {num_versions} versions copied, {num_bytes:,} bytes"
        )


def promote(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A replica.")],
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Make a replica a place that publishers write to, after its source was lost."""
    from patchstore.format import replica_mark
    from patchstore.serve.logs import utc

    bucket = open_with(target, option)
    mark, newest = replica_mark.promote(bucket, utc(time.time()))
    if as_json:
        record = {"run_id": mark.run_id, "source": mark.source, "promoted_at": mark.promoted_at}
        output.print_json({**output.summary(newest), **record})
    else:
        output.print_line(
            f"{bucket.url} is open to publishers since {mark.promoted_at}. Its newest version is "
            f"{newest.version} (step {newest.step}); later versions of {mark.source} are not here. Stop the "
            'replicator, and open the publisher here with resume="auto"'
        )
