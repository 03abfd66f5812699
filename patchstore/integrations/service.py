"""`patchstore follow` as a whole: the parts put together, and what each event becomes."""

import logging
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchstore.errors import ServerUnavailable, UsageError
from patchstore.integrations.control import Control
from patchstore.integrations.fleet import Fleet, Told
from patchstore.integrations.follow import Follow
from patchstore.integrations.goal import Goal, Newest
from patchstore.integrations.metrics import Metrics
from patchstore.integrations.vllm_server import Commit, PrefixCache, VllmServer
from patchstore.model import Manifest
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to follow; times are seconds."""

    servers: Sequence[str] = ()
    servers_file: Path | None = None
    """See `Fleet`."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """What servers need to open the store."""
    at: int | None = None
    """See `Goal`."""
    state: Path | None = None
    commit: Commit = "keep"
    """See `VllmServer`, as for `prefix_cache`."""
    prefix_cache: PrefixCache = "reset"
    commit_interval_s: float = 0.0
    """Least time between two versions of one server."""
    prove_every_s: float | None = None
    """How often a server's weights are proved; None for never."""
    listen: str | None = None
    """`HOST:PORT` or `PORT` for metrics, health and control; None for no listener."""
    patience_s: float = 60.0
    """How long something may go wrong until `/healthz` says so."""
    grace_s: float = 30.0
    """How long steps under way may take at the end."""
    timeout_s: float = 600.0
    """How long one call to a server may take."""
    max_interval_s: float = 2.0
    """Longest wait between looks at the store, and at a server."""


def follow(store: Store, settings: Settings, stop: threading.Event) -> Generator[Told]:
    """Follow until `stop` is set, yielding and logging what was done.

    Raises:
        UsageError: something in the settings cannot be; nothing was done.
        ServerUnavailable: at the end, a server did not let go, and may be paused.
    """
    newest = Newest(store)
    goal = Goal(newest, at=settings.at, state=settings.state)
    metrics = Metrics(newest)

    def begin(url: str, target: Callable[[], Manifest | None], stop: threading.Event) -> Follow:
        return Follow(
            store,
            VllmServer(
                url,
                timeout_s=settings.timeout_s,
                commit=settings.commit,
                prefix_cache=settings.prefix_cache,
                stop=stop,
            ),
            goal=target,
            storage_options=settings.storage_options,
            commit_interval_s=settings.commit_interval_s,
            prove_every_s=settings.prove_every_s,
            max_interval_s=settings.max_interval_s,
        )

    fleet = Fleet(
        goal,
        begin,
        settings.servers,
        servers_file=settings.servers_file,
        observe=metrics.observe,
        max_interval_s=settings.max_interval_s,
    )
    metrics.watch(fleet.survey)
    with ExitStack() as stack:
        if settings.listen is not None:
            # What waits for its turn is not late.
            patience_s = settings.patience_s + settings.commit_interval_s
            control = Control(_address(settings.listen), fleet, goal, metrics, patience_s=patience_s)
            stack.enter_context(control)
            logger.info("listening at %s", control.url, extra={"event": "listening", "url": control.url})
        if goal.hold_at is not None:
            fields = {"event": "held", "version": goal.hold_at.version}
            logger.info("servers are held at version %d", goal.hold_at.version, extra=fields)
        for told in fleet.run(stop, grace_s=settings.grace_s):
            _log(told, store.url)
            yield told
    if fleet.left:
        raise ServerUnavailable(
            f"{', '.join(fleet.left)}: a switch did not end in time, so generation may be paused; follow "
            "again to end it"
        )


def _log(told: Told, store: str) -> None:
    done = told.step
    fields = {
        "event": done.did,
        "server": told.server,
        "store": store if told.server is None else None,
        "version": done.version,
        "seconds": round(done.seconds, 3),
        "kind": None if done.error is None else done.error.kind,
        "num_times": told.num_times if done.did == "failed" else None,
    }
    level = logging.INFO if done.error is None else logging.WARNING
    logger.log(level, "%s: %s", told.server or store, done, extra=fields)


def _address(listen: str) -> tuple[str, int]:
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
