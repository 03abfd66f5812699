"""`patchstore follow`: keep servers at a version."""

from pathlib import Path
from typing import Annotated

import typer

from patchstore.cli.options import AllowRollback, Json, RequireSignature, StorageOption, StoreUrl, parsed
from patchstore.cli.stores import open_with, version_named
from patchstore.cli.watching import LogOption, MaxHeadAge, MaxPollInterval, UnhealthyAfter, set_up_log, shown
from patchstore.serve.settings import DEFAULTS, PauseMode, PrefixCache, Settings
from patchstore.signing.required import RequiredKeys


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
        str | None,
        typer.Option(help="Pin servers to this version or tag, instead of following the newest."),
    ] = None,
    pin_file: Annotated[
        Path | None, typer.Option(help="A file that stores the pin, for the next start.")
    ] = DEFAULTS.pin_file,
    pause_mode: Annotated[
        PauseMode,
        typer.Option(help="During the write keep, wait for or abort running requests; or do not pause."),
    ] = DEFAULTS.pause_mode,
    require_signature: RequireSignature = None,
    floor_file: Annotated[
        Path | None,
        typer.Option(help="A file that stores the newest signed version, for the next start."),
    ] = DEFAULTS.floor_file,
    allow_rollback: AllowRollback = DEFAULTS.allow_rollback,
    prefix_cache: Annotated[
        PrefixCache,
        typer.Option(help="Which requests reuse keys and values that older weights computed."),
    ] = DEFAULTS.prefix_cache,
    update_interval: Annotated[
        float, typer.Option(min=0, help="Least seconds between two updates of a server.")
    ] = DEFAULTS.update_interval_s,
    verify_every: Annotated[
        float | None, typer.Option(min=1, help="Seconds between verifications of each server's weights.")
    ] = DEFAULTS.verify_every_s,
    listen: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="Serve metrics, health, readiness and pins; on 127.0.0.1."),
    ] = DEFAULTS.listen,
    max_head_age: MaxHeadAge = DEFAULTS.max_head_age_s,
    unhealthy_after: UnhealthyAfter = DEFAULTS.unhealthy_after_s,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that updates under way may take after SIGTERM.")
    ] = DEFAULTS.grace_s,
    max_poll_interval: MaxPollInterval = DEFAULTS.max_poll_interval_s,
    timeout: Annotated[
        float, typer.Option(min=1, help="Longest time for one call to a server, or for fetching a version.")
    ] = DEFAULTS.timeout_s,
    log_format: LogOption = None,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Keep servers at the newest version, or pin them to one, until SIGTERM or Ctrl-C."""
    from patchstore.serve import service

    set_up_log(log_format, service.__name__)
    bucket = open_with(store, option)
    settings = Settings(
        servers=server or [],
        servers_file=servers_file,
        required_keys=RequiredKeys.of(require_signature or None),
        floor_file=floor_file,
        allow_rollback=allow_rollback,
        storage_options=parsed(option),
        at=version_named(bucket, at),
        pin_file=pin_file,
        pause_mode=pause_mode,
        prefix_cache=prefix_cache,
        update_interval_s=update_interval,
        verify_every_s=verify_every,
        listen=listen,
        max_head_age_s=max_head_age,
        unhealthy_after_s=unhealthy_after,
        grace_s=grace,
        timeout_s=timeout,
        max_poll_interval_s=max_poll_interval,
    )
    stop = service.stop_on_signals()
    for _ in shown(service.follow(bucket, settings, stop), log_format, as_json=as_json):
        pass
