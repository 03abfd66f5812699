"""Keep many servers at one version: one thread polls the store for all, and each server has a thread.

No server waits for another. A server that does not answer delays its own thread alone.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from patchstore.errors import InternalError, PatchstoreError, UsageError
from patchstore.format.records import Manifest
from patchstore.serve.desired import DesiredVersion
from patchstore.serve.fleet_status import FleetStatus, FollowEvent, OngoingFailure, ServerView
from patchstore.serve.reconcile import Outcome, Reconciler, StepResult
from patchstore.serve.settings import DEFAULTS
from patchstore.serve.vllm_http import check_url
from patchstore.serve.vllm_server import VllmServer

logger = logging.getLogger(__name__)

_RESCUE_S = 5.0
"""Limit for one call to a server that did not finish within the grace period."""

SETTLED_S = 0.5
"""A file of servers counts when it had the same content for so long. A program that writes it empties it
first, and the servers that it is about to list again must not be let go of."""

Begin = Callable[[str, Callable[[], Manifest | None], threading.Event], Reconciler]
"""Makes the reconciler of a server's URL. Gets a function that returns the desired version, and an event that
is set when no update may begin any more."""


class _Worker:
    """The thread of one server."""

    def __init__(self, url: str, fleet: "Fleet", begin: Begin) -> None:
        self.view = ServerView(url=url)
        self.stop = threading.Event()
        self.wake = threading.Event()
        self._fleet = fleet
        self.reconciler = begin(url, lambda: fleet.target, self.stop)
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
        failure = _ongoing(self.view.failure, done)
        serving, status = done.version, done.before
        if done.outcome == "failed":
            serving = None if status is None else status.serving
        if serving is None and status is None:
            serving = self.view.serving
        is_current = done.outcome == "applied" or (target is not None and serving == target.version)
        self.view = ServerView(
            url=self.view.url,
            is_up=status is not None,
            serving=serving,
            # Before it opened the store, it may have followed another run.
            run_id=None if status is None or done.outcome == "initialised" else status.run_id,
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
        begin: Begin,
        servers: Sequence[str],
        *,
        servers_file: Path | None = None,
        observe: Callable[[str | None, StepResult], None] | None = None,
        min_poll_interval_s: float = DEFAULTS.min_poll_interval_s,
        max_poll_interval_s: float = DEFAULTS.max_poll_interval_s,
    ) -> None:
        """Prepare; only the file of servers is read.

        Args:
            servers_file: one URL per line, `#` begins a comment; read again when it changes, for servers that
                come and go; a change counts after `SETTLED_S`.
            observe: called with every step, on the thread that made it; None stands for the store.
            min_poll_interval_s: wait after the store had something new, doubled by each poll that finds
                nothing.
            max_poll_interval_s: the longest time between polls, also if the store reports changes.

        Raises:
            UsageError: there is no server, or a server's name is no URL.
        """
        self._desired = desired
        self._begin = begin
        self._named = tuple(check_url(url) for url in servers)
        self._servers = tuple(dict.fromkeys(self._named))
        self._file = servers_file
        self._observe = observe
        self._min_poll_interval_s = min_poll_interval_s
        self._max_poll_interval_s = max_poll_interval_s
        self._events: SimpleQueue[FollowEvent | None] = SimpleQueue()
        self._wake = threading.Event()
        self._workers: dict[str, _Worker] = {}
        self._leaving: list[_Worker] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.left: list[str] = []
        """After `run`: servers that may be left paused, because they did not answer during an update. Their
        status says so, and the next process that follows them ends the update."""
        self.target: Manifest | None = None
        """The desired version; None while it is not known."""
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
        """Follow until `stop` is set, and yield what is done; then let updates under way end.

        Args:
            grace_s: how long these may take. Downloads are not waited for.
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

    def wake(self) -> None:
        """Poll the store now, because another version may be desired."""
        self._wake.set()

    def tell(self, server: str | None, done: StepResult, failure: OngoingFailure | None) -> None:
        if self._observe is not None:
            self._observe(server, done)
        num_times = 1 if failure is None else failure.num_times
        is_power_of_two = num_times & (num_times - 1) == 0
        if done.outcome == "nothing" or not is_power_of_two:
            return
        self._events.put(FollowEvent(server=server, step=done, num_times=num_times))

    def status(self) -> FleetStatus:
        """Return the present state. For any thread."""
        with self._lock:
            workers = list(self._workers.values())
        return FleetStatus(
            store=self._desired.watcher.store.url,
            head=self._desired.head,
            target=self.target,
            pin=self._desired.pinned,
            is_alive=self._poller.is_alive(),
            interval_s=self._max_poll_interval_s,
            looked=self._looked,
            failure=self._failure,
            head_age_s=self._desired.head_age_s(),
            is_head_old=self._desired.is_head_old(),
            servers=tuple(replace(each.view, is_alive=each.thread.is_alive()) for each in workers),
        )

    # The store, and the list of servers.

    def _poll(self) -> None:
        interval_s = self._min_poll_interval_s
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
            self._failure = _ongoing(self._failure, done)
            self.tell(None, done, self._failure)
            is_new = self.target != before
            interval_s = (
                self._min_poll_interval_s if is_new else min(2 * interval_s, self._max_poll_interval_s)
            )
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
                self.target = None
            raise
        self._looked = time.monotonic()
        if target != self.target:
            self.target = target
            with self._lock:
                for worker in self._workers.values():
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
                for url in self._workers.keys() - set(self._servers):
                    worker = self._workers.pop(url)
                    worker.end()
                    self._leaving.append(worker)
                for url in self._servers:
                    if url not in self._workers and url not in busy and not self._stop.is_set():
                        self._workers[url] = worker = _Worker(url, self, self._begin)
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
            workers = [*self._workers.values(), *self._leaving]
            for worker in workers:
                worker.end()
        logger.info("stopping within %.0f s", grace_s, extra={"event": "stopping"})
        for worker in workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
        self.left = [
            worker.view.url for worker in workers if worker.thread.is_alive() and not _release(worker)
        ]
        self._events.put(None)


def _release(worker: _Worker) -> bool:
    """Resume a server whose step does not end. False if it may be left paused."""
    # First, so that the step writes nothing after the server was resumed.
    worker.reconciler.server.abandoned.set()
    switch = worker.reconciler.server.switching
    if switch is None:
        return True
    with suppress(PatchstoreError), VllmServer(worker.view.url, timeout_s=_RESCUE_S) as server:
        status = server.status()
        if not status.may_answer:
            # A half-applied server must not answer requests.
            return False
        server.end_switch(switch)
        return True
    return False


def _tried(what: Callable[[], None]) -> PatchstoreError | None:
    try:
        what()
    except PatchstoreError as exc:
        return exc
    except Exception as exc:
        logger.exception("following the store failed")
        return InternalError(f"{type(exc).__name__}: {exc}")
    return None


def _ongoing(before: OngoingFailure | None, done: StepResult) -> OngoingFailure | None:
    if done.error is None:
        return None
    if before is None:
        return OngoingFailure(error=done.error, since=time.monotonic(), num_times=1)
    is_same = before.error.kind == done.error.kind
    return replace(before, error=done.error, num_times=before.num_times + 1 if is_same else 1)
