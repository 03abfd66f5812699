"""`patchstore follow` as a whole: connects its parts, and logs and yields events."""

import logging
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack

from patchstore.errors import ServerUnavailable, UsageError
from patchstore.format.records import Manifest
from patchstore.serve.desired import DesiredVersion, HeadWatcher
from patchstore.serve.fleet import Fleet
from patchstore.serve.fleet_status import FollowEvent
from patchstore.serve.http_api import Control
from patchstore.serve.metrics import Metrics
from patchstore.serve.reconcile import Reconciler
from patchstore.serve.settings import Settings
from patchstore.serve.vllm_server import VllmServer
from patchstore.signing.floor import Floor
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)


def follow(store: Store, settings: Settings, stop: threading.Event) -> Generator[FollowEvent]:
    """Follow until `stop` is set, and yield and log what is done.

    Raises:
        UsageError: a setting is impossible; nothing was done.
        ServerUnavailable: an update of a server did not end in time, so the server may be paused.
    """
    watcher = HeadWatcher(store)
    if settings.floor_file is not None and settings.required_keys is None:
        raise UsageError(
            "a floor file is of use only where signatures are required: name the public keys too"
        )
    desired = DesiredVersion(
        watcher,
        at=settings.at,
        pin_file=settings.pin_file,
        required=settings.required_keys,
        floor=Floor(settings.floor_file),
        allow_rollback=settings.allow_rollback,
        max_head_age_s=settings.max_head_age_s,
    )
    metrics = Metrics(watcher)

    def begin(url: str, target: Callable[[], Manifest | None], stop: threading.Event) -> Reconciler:
        return Reconciler(
            store,
            VllmServer(
                url,
                timeout_s=settings.timeout_s,
                pause_mode=settings.pause_mode,
                prefix_cache=settings.prefix_cache,
                stop=stop,
            ),
            desired=target,
            storage_options=settings.storage_options,
            update_interval_s=settings.update_interval_s,
            verify_every_s=settings.verify_every_s,
            min_poll_interval_s=settings.min_poll_interval_s,
            max_poll_interval_s=settings.max_poll_interval_s,
            is_signed=settings.required_keys is not None,
            allow_rollback=lambda: desired.allows_rollback,
        )

    fleet = Fleet(
        desired,
        begin,
        settings.servers,
        servers_file=settings.servers_file,
        observe=metrics.observe,
        min_poll_interval_s=settings.min_poll_interval_s,
        max_poll_interval_s=settings.max_poll_interval_s,
    )
    metrics.watch(fleet.status)
    with ExitStack() as stack:
        stack.callback(desired.close)
        if settings.listen is not None:
            # A server that waits for `update_interval_s` is not late.
            unhealthy_after_s = settings.unhealthy_after_s + settings.update_interval_s
            address = address_of(settings.listen)
            control = Control(address, fleet, desired, metrics, unhealthy_after_s=unhealthy_after_s)
            stack.enter_context(control)
            logger.info("listening at %s", control.url, extra={"event": "listening", "url": control.url})
        if desired.pinned is not None:
            version = desired.pinned.version
            fields = {"event": "pinned", "version": version}
            logger.info("servers are pinned to version %d", version, extra=fields)
        for event in fleet.run(stop, grace_s=settings.grace_s):
            _log(event, store.url)
            yield event
    if fleet.left:
        raise ServerUnavailable(
            f"{', '.join(fleet.left)}: an update did not end in time, so generation may be paused; start "
            "patchstore follow again to end it"
        )


def _log(event: FollowEvent, store: str) -> None:
    done = event.step
    fields = {
        "event": done.outcome,
        "server": event.server,
        "store": store if event.server is None else None,
        "version": done.version,
        "seconds": round(done.seconds, 3),
        "kind": None if done.error is None else done.error.kind,
        "num_times": event.num_times if done.outcome == "failed" else None,
    }
    is_well = done.error is None and done.outcome != "old-head"
    level = logging.INFO if is_well else logging.WARNING
    logger.log(level, "%s: %s", event.server or store, done, extra=fields)


def address_of(listen: str) -> tuple[str, int]:
    """Return the host and port of `[HOST:]PORT`; the host is 127.0.0.1 by default.

    Raises:
        UsageError: it is none.
    """
    host, _, port = listen.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise UsageError(f"{listen!r} is no place to listen at: give PORT, or HOST:PORT")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set; a second one ends the process. For the main thread."""
    stop = threading.Event()

    def set_once(number: int, _frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, set_once)
    return stop
