"""Keep many servers at one version: one thread polls the store for all, and each server has a thread.

No server waits for another. A server that does not answer delays its own thread alone.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from patchstore.bucket.records import Manifest
from patchstore.errors import InternalError, PatchstoreError, UsageError
from patchstore.follow.adapter_server import AdapterServer
from patchstore.follow.backoff import OngoingFailure, Pauses, ongoing
from patchstore.follow.desired import DesiredVersion, NotKnown, Pin
from patchstore.follow.http_client import check_url
from patchstore.follow.logs import utc
from patchstore.follow.reconcile import Outcome, Reconciler, StepResult
from patchstore.follow.server import Server
from patchstore.follow.settings import Settings
from patchstore.follow.vllm_protocol import Driver
from patchstore.follow.vllm_server import VllmServer

logger = logging.getLogger(__name__)

SETTLED_S = 0.5
"""A file of servers counts when it had the same content for so long. A program that writes it empties it
first, and the servers that it is about to list again must not be let go of."""

_LEAST_DRIVER_S = 10.0
"""A server remembers this process at least that long, so that a pause between two polls is no departure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowEvent:
    """Something that happened and is reported."""

    server: str | None
    """URL; None for an event of the store."""
    step: StepResult
    num_times: int = 1
    """How often this failure came in a row. Only the 1st, 2nd, 4th, 8th ... is reported."""
    time: str = field(default_factory=lambda: utc(time.time()))
    """When the step ended: UTC, ISO 8601."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"time": self.time, "server": self.server, **self.step.to_dict()}

    def __str__(self) -> str:
        return f"{self.time} {self.server or 'store'}: {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """One server, as its last step found it. Times are seconds of the monotonic clock."""

    url: str
    is_alive: bool = True
    """Whether its thread runs."""
    is_up: bool = False
    """Whether it answered."""
    serving: int | None = None
    run_id: str | None = None
    """The run of that version; None if it serves none, or opened the store just now."""
    num_engines: int = 1
    engines_differ: bool = False
    half_applied: bool = False
    current: float | None = None
    """When it last served the desired version, or came a version nearer; None for never."""
    failure: OngoingFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The state of store and servers at one moment."""

    store: str
    head: Manifest | None
    target: Manifest | None
    """The desired version: the head, or the version that servers are pinned to."""
    pin: Pin | None
    is_alive: bool
    """Whether the thread that polls the store runs."""
    interval_s: float
    """Longest time between two polls of the store."""
    looked: float | None
    """When the store last answered, in seconds of the monotonic clock; None for never."""
    failure: OngoingFailure | None
    """Of the store, or of the file of servers."""
    head_age_s: float | None = None
    """Seconds since the head was created, by the trainer's clock."""
    is_head_old: bool = False
    """Whether it is older than it may be."""
    head_share: float | None = None
    """The share of elements in which it differs from the version before; None where it is not known."""
    servers: tuple[ServerView, ...]


class _Worker:
    """The thread of one server."""

    def __init__(self, url: str, fleet: "Fleet") -> None:
        self.view = ServerView(url=url)
        self.stop = threading.Event()
        self.wake = threading.Event()
        self._fleet = fleet
        self.reconciler = fleet.begin(url, self.stop)
        # A daemon: at the end of the process a server may not have answered in time.
        self.thread = threading.Thread(target=self._run, name=f"follow-{url}", daemon=True)

    def _run(self) -> None:
        try:
            while not self.stop.is_set():
                self.wake.clear()
                target = self._fleet.target
                done = self.reconciler.step()
                self._see(done, target)
                self.wake.wait(0 if self.stop.is_set() else self.reconciler.interval_s)
        finally:
            self.reconciler.server.close()

    def _see(self, done: StepResult, target: Manifest | None) -> None:
        failure = ongoing(self.view.failure, done.error)
        serving, status = done.version, done.before
        if done.outcome == "failed":
            serving = None if status is None else status.serving
        if serving is None and status is None:
            serving = self.view.serving
        is_current = done.outcome == "applied" or (target is not None and serving == target.version)
        # Before it opened the store, or was given an adapter from there, it may have had another run.
        run_id = None if status is None or done.outcome == "initialised" else status.run_id
        if target is not None and (done.outcome, serving) == ("applied", target.version):
            run_id = target.run_id
        self.view = ServerView(
            url=self.view.url,
            is_up=status is not None,
            serving=serving,
            run_id=run_id,
            num_engines=self.view.num_engines if status is None else status.num_engines,
            engines_differ=status is not None and status.engines_differ and done.outcome != "applied",
            half_applied=status is not None and status.half_applied and done.outcome != "applied",
            current=time.monotonic() if is_current and failure is None else self.view.current,
            failure=failure,
        )
        self._fleet.tell(self.view.url, done, failure)

    def end(self) -> None:
        """Begin no other step, and no update in the step under way."""
        self.stop.set()
        self.wake.set()


class Fleet:
    """Brings servers to the desired version, and yields what it does."""

    def __init__(
        self,
        desired: DesiredVersion,
        settings: Settings,
        *,
        observe: Callable[[str | None, StepResult], None] | None = None,
    ) -> None:
        """Prepare; only the file of servers is read. `observe` is called with every step, on the thread that
        made it; None stands for the store.

        The file has one URL per line, and `#` begins a comment. It is read again when it changes, for servers
        that come and go; a change counts after `SETTLED_S`.
        """
        self._desired = desired
        self._settings = settings
        self._named = tuple(check_url(url) for url in settings.servers)
        self._servers = tuple(dict.fromkeys(self._named))
        for url in self._servers:
            # Refuses what this process cannot send, or not to there, before anything is done.
            self._client(url, threading.Event()).close()
        self._file = settings.servers_file
        self._observe = observe
        self._events: SimpleQueue[FollowEvent | None] = SimpleQueue()
        self._wake = threading.Event()
        self.workers: dict[str, _Worker] = {}
        self._leaving: list[_Worker] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.left: list[str] = []
        """After `run`: servers that may be left paused, because they did not answer during an update. Their
        status says so, and the next process that follows them ends the update."""
        self.target: Manifest | None = None
        """The desired version; None while it is not known, or the store has none."""
        self._is_known = False
        self._looked: float | None = None
        self._is_old = False
        """Whether an event said that the newest version is too old."""
        self._is_waiting = False
        """Whether an event said that the store has no version yet."""
        self._failure: OngoingFailure | None = None
        self._poller = threading.Thread(target=self._poll, name="follow-store", daemon=True)
        self._listed: str | None = None
        """The content of the file that counts."""
        self._changing: tuple[str, float] | None = None
        """Another content, and when it was first read."""
        if self._file is not None:
            self._read_file(self._file)
        elif not self._servers:
            raise UsageError("name a server, or a file of them")

    def run(self, stop: threading.Event, *, grace_s: float = 30.0) -> Iterator[FollowEvent]:
        """Follow until `stop` is set, and yield what is done; then let updates under way end, for up to
        `grace_s`. Downloads are not waited for.
        """
        closer = threading.Thread(target=self._close, args=(stop, grace_s), name="follow-stop", daemon=True)
        closer.start()
        unsubscribe = self._desired.watcher.store.subscribe(self._wake.set)
        self._poller.start()
        try:
            while (told := self._events.get()) is not None:
                yield told
        finally:
            if unsubscribe is not None:
                unsubscribe()
            # Also if the caller takes no more events.
            stop.set()
            closer.join()

    def desired(self) -> Manifest | NotKnown | None:
        """Return the desired version, as of the last poll of the store. For any thread."""
        target = self.target
        return target if target is not None or self._is_known else NotKnown.NOT_KNOWN

    def begin(self, url: str, stop: threading.Event) -> Reconciler:
        """Return what brings a server to the desired version; no update begins once `stop` is set."""
        return Reconciler(
            self._desired.watcher.store,
            self._client(url, stop),
            self._settings,
            desired=self.desired,
            allow_rollback=lambda: self._desired.allows_rollback,
        )

    def _client(self, url: str, stop: threading.Event) -> Server:
        settings = self._settings
        if settings.adapter is not None:
            return AdapterServer(
                url,
                settings.adapter,
                self._desired.watcher.store,
                run_id=settings.run_id,
                required_keys=settings.required_keys,
                keep=settings.keep,
                timeout_s=settings.timeout_s,
                stop=stop,
                headers=settings.headers,
            )
        return VllmServer(
            url,
            timeout_s=settings.timeout_s,
            pause_mode=settings.pause_mode,
            prefix_cache=settings.prefix_cache,
            driver=Driver(wants=self._wants, seconds=max(_LEAST_DRIVER_S, 5 * settings.max_poll_interval_s)),
            stop=stop,
            headers=settings.headers,
        )

    def _wants(self) -> str | None:
        """What other drivers of a server hear."""
        found, pin = self.desired(), self._desired.pinned
        if not isinstance(found, Manifest):
            return None
        return f"{'the newest version' if pin is None else f'version {pin.version}'} of run {found.run_id}"

    def wake(self) -> None:
        """Poll the store now, because another version may be desired."""
        self._wake.set()

    def tell(self, server: str | None, done: StepResult, failure: OngoingFailure | None) -> None:
        if self._observe is not None:
            self._observe(server, done)
        if done.outcome == "nothing" or not (failure is None or failure.is_reported):
            return
        num_times = 1 if failure is None else failure.num_times
        self._events.put(FollowEvent(server=server, step=done, num_times=num_times))

    def status(self) -> FleetStatus:
        """Return the present state. For any thread."""
        with self._lock:
            workers = list(self.workers.values())
        return FleetStatus(
            store=self._desired.watcher.store.url,
            head=self._desired.head,
            target=self.target,
            pin=self._desired.pinned,
            is_alive=self._poller.is_alive(),
            interval_s=self._settings.max_poll_interval_s,
            looked=self._looked,
            failure=self._failure,
            head_age_s=self._desired.head_age_s(),
            is_head_old=self._desired.is_head_old(),
            head_share=self._desired.head_share(),
            servers=tuple(replace(each.view, is_alive=each.thread.is_alive()) for each in workers),
        )

    # The store, and the list of servers.

    def _poll(self) -> None:
        pauses = Pauses(self._settings.min_poll_interval_s, self._settings.max_poll_interval_s)
        while not self._stop.is_set():
            self._wake.clear()
            began, before = time.monotonic(), self.target
            # If one fails, the other is still done.
            errors = [
                error for error in (_tried(self._sync_workers), _tried(self._refresh)) if error is not None
            ]
            error = errors[-1] if errors else None
            seconds = time.monotonic() - began
            news, version = ("nothing", None) if error else self._news()
            done = StepResult(
                outcome="failed" if error else news, version=version, error=error, seconds=seconds
            )
            self._failure = ongoing(self._failure, done.error)
            self.tell(None, done, self._failure)
            interval_s = pauses.after(is_new=self.target != before)
            wait_s = interval_s if self._changing is None else min(interval_s, SETTLED_S)
            self._wake.wait(0 if self._stop.is_set() else wait_s)

    def _news(self) -> tuple[Outcome, int | None]:
        """Return what is to be reported once of the newest version, and its number."""
        head = self._desired.head
        was_waiting, self._is_waiting = self._is_waiting, head is None
        if head is None:
            return "nothing" if was_waiting else "waiting", None
        was_old, self._is_old = self._is_old, self._desired.is_head_old()
        if was_old == self._is_old:
            return "nothing", None
        return "old-head" if self._is_old else "new-head", head.version

    def _refresh(self) -> None:
        """Find the desired version, and wake all workers if it changed."""
        try:
            target = self._desired.refresh()
        except PatchstoreError:
            head = self._desired.head
            if head is not None and self.target is not None and head.run_id != self.target.run_id:
                # No server can reach a version of a run that is gone.
                self._is_known = False
                self.target = None
            raise
        self._looked = time.monotonic()
        is_new, self.target = target != self.target, target
        # After the target, which other threads read.
        was_known, self._is_known = self._is_known, True
        if is_new or not was_known:
            with self._lock:
                for worker in self.workers.values():
                    worker.wake.set()

    def _sync_workers(self) -> None:
        """Start a worker for each listed server, and stop those of servers that are no longer listed."""
        try:
            if self._file is not None:
                self._read_file(self._file)
        finally:
            self._leaving = [worker for worker in self._leaving if worker.thread.is_alive()]
            busy = {worker.view.url for worker in self._leaving}
            with self._lock:
                for url in self.workers.keys() - set(self._servers):
                    worker = self.workers.pop(url)
                    worker.end()
                    self._leaving.append(worker)
                for url in self._servers:
                    if url not in self.workers and url not in busy and not self._stop.is_set():
                        self.workers[url] = worker = _Worker(url, self)
                        worker.thread.start()

    def _read_file(self, path: Path) -> None:
        try:
            listed = path.read_text()
        except (OSError, ValueError) as exc:
            raise UsageError(f"{path} cannot be read, so the list of servers stays as it was: {exc}") from exc
        if listed == self._listed:
            self._changing = None
        elif self._listed is None or self._has_settled(listed):
            lines = [line.partition("#")[0].strip() for line in listed.splitlines()]
            try:
                urls = [check_url(line) for line in lines if line]
            except UsageError as exc:
                raise UsageError(f"{path}: {exc}") from exc
            self._servers, self._listed = tuple(dict.fromkeys([*self._named, *urls])), listed

    def _has_settled(self, listed: str) -> bool:
        now = time.monotonic()
        if self._changing is None or self._changing[0] != listed:
            self._changing = listed, now
        return now - self._changing[1] >= SETTLED_S

    # The end.

    def _close(self, stop: threading.Event, grace_s: float) -> None:
        stop.wait()
        deadline = time.monotonic() + grace_s
        self._stop.set()
        self._wake.set()
        with self._lock:
            workers = [*self.workers.values(), *self._leaving]
            for worker in workers:
                worker.end()
        logger.info("stopping within %.0f s", grace_s, extra={"event": "stopping"})
        for worker in workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
        self.left = [
            worker.view.url
            for worker in workers
            if worker.thread.is_alive() and not worker.reconciler.server.release()
        ]
        self._events.put(None)


def _tried(what: Callable[[], None]) -> PatchstoreError | None:
    try:
        what()
    except PatchstoreError as exc:
        return exc
    except Exception as exc:
        logger.exception("following the store failed")
        return InternalError(f"{type(exc).__name__}: {exc}")
    return None
