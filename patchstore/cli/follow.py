"""`patchstore follow`: keep servers at a version."""

import logging
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from patchstore.cli import output
from patchstore.cli.options import Json, StorageOption, StoreUrl, parsed
from patchstore.cli.stores import open_with
from patchstore.serve.settings import DEFAULTS, PauseMode, PrefixCache, Settings


class LogFormat(StrEnum):
    """The form of the log."""

    TEXT = "text"
    JSON = "json"


def follow(
    store: StoreUrl,
    *,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="URL", help="A vLLM server with the delta backend; repeatable."),
    ] = None,
    servers_file: Annotated[
        Path | None,
        typer.Option(help="A file with one server URL per line, read again when it changes."),
    ] = DEFAULTS.servers_file,
    at: Annotated[
        int | None, typer.Option(min=0, help="Pin servers to this version, instead of following the newest.")
    ] = DEFAULTS.at,
    pin_file: Annotated[
        Path | None, typer.Option(help="A file that stores the pin, for the next start.")
    ] = DEFAULTS.pin_file,
    pause_mode: Annotated[
        PauseMode,
        typer.Option(help="During the write keep, wait for or abort running requests; or do not pause."),
    ] = DEFAULTS.pause_mode,
    prefix_cache: Annotated[
        PrefixCache, typer.Option(help="Reset or keep keys and values that older weights computed.")
    ] = DEFAULTS.prefix_cache,
    update_interval: Annotated[
        float, typer.Option(min=0, help="Least seconds between two updates of a server.")
    ] = DEFAULTS.update_interval_s,
    verify_every: Annotated[
        float | None, typer.Option(min=1, help="Seconds between verifications of each server's weights.")
    ] = DEFAULTS.verify_every_s,
    listen: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="Serve /metrics, /healthz and /pin; on 127.0.0.1."),
    ] = DEFAULTS.listen,
    unhealthy_after: Annotated[
        float, typer.Option(min=0, help="Seconds a failure may last before /healthz reports it.")
    ] = DEFAULTS.unhealthy_after_s,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that updates under way may take after SIGTERM.")
    ] = DEFAULTS.grace_s,
    max_poll_interval: Annotated[
        float, typer.Option(min=0.01, help="Longest time between polls, in seconds.")
    ] = DEFAULTS.max_poll_interval_s,
    timeout: Annotated[
        float, typer.Option(min=1, help="Longest time for one call to a server, or for fetching a version.")
    ] = DEFAULTS.timeout_s,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(help="Log all events to standard error, instead of lines on standard output."),
    ] = None,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Keep servers at the newest version, or pin them to one, until SIGTERM or Ctrl-C."""
    from patchstore.serve import logs, service

    if log_format is not None:
        logs.configure(as_json=log_format is LogFormat.JSON)
    elif logging.getLogger().level > logging.INFO:
        # All events are on standard output already.
        logging.getLogger(service.__name__).setLevel(logging.CRITICAL)
    settings = Settings(
        servers=server or [],
        servers_file=servers_file,
        storage_options=parsed(option),
        at=at,
        pin_file=pin_file,
        pause_mode=pause_mode,
        prefix_cache=prefix_cache,
        update_interval_s=update_interval,
        verify_every_s=verify_every,
        listen=listen,
        unhealthy_after_s=unhealthy_after,
        grace_s=grace,
        timeout_s=timeout,
        max_poll_interval_s=max_poll_interval,
    )
    bucket, stop = open_with(store, option), service.stop_on_signals()
    # Closed also if the reader of the output went away, so that updates under way are ended.
    with closing(service.follow(bucket, settings, stop)) as events:
        for event in events:
            if as_json:
                output.print_json(event.to_dict())
            elif log_format is None:
                output.print_line(str(event))
