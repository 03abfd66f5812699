"""`patchstore follow`, `wait` and `pin`: keep servers at a version, wait for them, steer them."""

import logging
import time
from pathlib import Path
from typing import Annotated

import typer

from patchstore.bucket import notes
from patchstore.cli import output
from patchstore.cli.loops import LogOption, MaxHeadAge, MaxPollInterval, UnhealthyAfter, set_up_log, shown
from patchstore.cli.options import (
    AllowRollback,
    Json,
    RequireSignature,
    ServerHeader,
    StorageOption,
    StoreUrl,
    number_or_tag,
    open_with,
    parsed,
    server_headers,
    version_named,
)
from patchstore.follow.settings import DEFAULTS, PauseMode, PrefixCache, Settings
from patchstore.signing.required import RequiredKeys
from patchstore.support import tracing

Adapter = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The name by which requests to servers ask for the adapter."),
]

_LISTENER = "http://127.0.0.1:9464"


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
    server_header: ServerHeader = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="The run to follow, also if servers have another one from this store."
        ),
    ] = DEFAULTS.run_id,
    at: Annotated[
        str | None,
        typer.Option(help="Pin servers to this version or tag, instead of following the newest."),
    ] = None,
    pin_file: Annotated[
        Path | None, typer.Option(help="A file that stores the pin, for the next start.")
    ] = DEFAULTS.pin_file,
    adapter: Adapter = DEFAULTS.adapter,
    keep: Annotated[
        int, typer.Option(min=1, help="With --adapter: how many versions a server holds, if none is in use.")
    ] = DEFAULTS.keep,
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
    from patchstore.follow import loop, service

    set_up_log(log_format, service.__name__)
    tracing.export()
    bucket = open_with(store, option)
    settings = Settings(
        servers=server or [],
        servers_file=servers_file,
        headers=server_headers(server_header),
        required_keys=RequiredKeys.of(require_signature or None),
        floor_file=floor_file,
        run_id=run,
        allow_rollback=allow_rollback,
        storage_options=parsed(option),
        at=version_named(bucket, at),
        pin_file=pin_file,
        adapter=adapter,
        keep=keep,
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
    stop = loop.stop_on_signals()
    for _ in shown(service.follow(bucket, settings, stop), log_format, as_json=as_json):
        pass


def wait(
    version: Annotated[str, typer.Argument(metavar="VERSION", help="A number, or a tag.")],
    *,
    store: Annotated[
        str | None, typer.Option("--store", metavar="STORE", help="The store that has the tag.")
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="URL", help="A vLLM server to ask itself; repeatable."),
    ] = None,
    follow: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where patchstore follow listens, to ask for all its servers."),
    ] = None,
    adapter: Adapter = None,
    server_header: ServerHeader = None,
    exactly: Annotated[bool, typer.Option("--exactly", help="A later version does not count.")] = False,
    run: Annotated[
        str | None, typer.Option(metavar="RUN", help="The run of the version; patchstore log shows it.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0, help="How long to wait, in seconds.")] = 600.0,
    patience: Annotated[
        float, typer.Option(min=0, help="How long a server may be gone, or serve another run, in seconds.")
    ] = 120.0,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Wait until all servers serve a version, or a later one; exit code 6 if they do not in time."""
    from patchstore.follow import wait as waiting

    if server and follow:
        raise typer.BadParameter("name servers, or a follow, and not both")
    if adapter is not None and not server:
        raise typer.BadParameter("--adapter is of use only with --server: a follow knows its adapter")
    wanted = number_or_tag(version)
    if isinstance(wanted, str):
        if store is None:
            raise typer.BadParameter(f"{wanted!r} is a tag: name the store that has it, with --store")
        wanted = notes.version_of(open_with(store, option), wanted)
    asked = None if server else follow or _LISTENER
    began = time.monotonic()
    # Somebody looks on.
    waiting.logger.setLevel(logging.INFO)
    served = waiting.wait_until(
        wanted,
        servers=server or (),
        follow=asked,
        adapter=adapter,
        exactly=exactly,
        run_id=run,
        timeout_s=timeout,
        patience_s=patience,
        headers=server_headers(server_header),
    )
    if as_json:
        output.print_json({"version": wanted, "servers": served, "seconds": time.monotonic() - began})
        return
    for url, serving in served.items():
        output.print_line(f"{url} serves version {serving}")


def pin(
    version: Annotated[
        str | None, typer.Argument(metavar="VERSION", help="A number, or a tag; none with --off.")
    ] = None,
    *,
    off: Annotated[bool, typer.Option("--off", help="Bring servers to the newest version again.")] = False,
    allow_rollback: AllowRollback = False,
    follow: Annotated[str, typer.Option(metavar="URL", help="Where patchstore follow listens.")] = _LISTENER,
    server_header: ServerHeader = None,
    as_json: Json = False,
) -> None:
    """Have a running follow bring its servers to a version, older or newer, and keep them there."""
    from patchstore.follow.http_client import FollowClient

    if off == (version is not None):
        raise typer.BadParameter("name the VERSION to keep servers at, or give --off, and not both")
    with FollowClient(follow, headers=server_headers(server_header)) as client:
        if version is None:
            client.unpin()
            number = None
        else:
            number = client.pin(number_or_tag(version), allow_rollback=allow_rollback)
    if as_json:
        output.print_json({"pinned": number})
    elif number is None:
        output.print_line("servers follow the newest version")
    else:
        where = "" if follow == _LISTENER else f" --follow {follow}"
        output.print_line(f"servers go to version {number}: patchstore wait {number} --exactly{where}")
