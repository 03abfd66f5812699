"""The loop of `mirror`, `replicate` and `compact`: look, do what there is to do, wait, and look again.

`Loop` repeats the work, backs off, counts what was done, and answers for it over HTTP.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import Counter, Gauge
from prometheus_client.exposition import choose_encoder

from patchstore.errors import InternalError, PatchstoreError, UsageError
from patchstore.follow.backoff import OngoingFailure, Pauses, ongoing
from patchstore.follow.http_api import Answer, Listener, usual_answer
from patchstore.follow.logs import utc
from patchstore.follow.metrics import registry
from patchstore.stores.base import Store
from patchstore.support.arguments import number_in

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that was done, or failed."""

    outcome: str
    """`waiting` (the store has no version yet), `failed`, or what was done."""
    version: int | None = None
    num_bytes: int | None = None
    """Of payloads that were moved for it; None where that is not counted."""
    seconds: float = 0.0
    error: PatchstoreError | None = None
    detail: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further JSON values."""
    num_times: int = 1
    """How often this failure came in a row. Only the 1st, 2nd, 4th, 8th ... is reported."""
    time: str = field(default_factory=lambda: utc(time.time()))
    """When it ended: UTC, ISO 8601."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without fields that do not apply."""
        found: dict[str, Any] = {"time": self.time, "event": self.outcome, "version": self.version}
        if self.error is not None:
            return found | {"error": {"kind": self.error.kind, "message": str(self.error)}}
        if self.num_bytes is not None:
            found["bytes"] = self.num_bytes
        if self.version is not None:
            found["seconds"] = round(self.seconds, 3)
        if self.detail is not None:
            found["detail"] = self.detail
        return found | dict(self.more)

    def __str__(self) -> str:
        if self.error is not None:
            again = f", {self.num_times} times in a row" if self.num_times > 1 else ""
            return f"{self.time} failed{again}: [{self.error.kind}] {self.error}"
        if self.version is None:
            return f"{self.time} {self.outcome}: the store holds no version yet"
        moved = "" if self.num_bytes is None else f"{self.num_bytes:,} bytes in "
        detail = "" if self.detail is None else f"; {self.detail}"
        return f"{self.time} {self.outcome} version {self.version}: {moved}{self.seconds:.2f} s{detail}"


Work = Callable[[], Iterator[Event]]
"""Does all that there is to do now, and yields each part when it is done. Called again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How to loop; times are seconds."""

    listen: str | None = None
    """`[HOST:]PORT` for figures and health; None for no listener."""
    unhealthy_after_s: float = 60.0
    """How long failures may last before `/healthz` reports them."""
    min_poll_interval_s: float = 0.1
    """Wait between two looks at the store after something was done; doubled by each look that finds nothing,
    and by each failure."""
    max_poll_interval_s: float = 2.0
    """Longest wait, also if the store reports changes."""


class Loop:
    """Repeats work while a store gets new versions; what it did, as figures and as health."""

    def __init__(
        self,
        name: str,
        store: Store,
        settings: LoopSettings,
        *,
        most_after_failures_s: float | None = None,
    ) -> None:
        """Prepare. Figures are named `patchstore_NAME_version`; new versions appear in `store`.

        `most_after_failures_s` is the longest wait after failures in a row, if another one.
        """
        self._name, self._store, self._settings = name, store, settings
        self._most_after_failures_s = most_after_failures_s
        self._registry = registry()
        self._versions = self._counter("versions", "Versions done by this process.")
        self._bytes = self._counter("bytes", "Bytes of payloads moved for them.")
        self._failures = self._counter("failures", "Failures, by the error's kind.", "kind")
        self._version = self._gauge("version", "The newest version done; -1 for none.")
        self._version.set(-1)
        text = "Since all versions of the store were done, or since the begin; 0 while they are."
        self._gauge("behind_seconds", text).set_function(
            lambda: 0.0 if self._is_current else time.monotonic() - self._current
        )
        self._gauge("up", "Whether the last try succeeded.").set_function(lambda: self._failure is None)
        self._is_head_old: Callable[[], bool] | None = None
        self._done: int | None = None
        self._is_current = False
        self._current = time.monotonic()
        self._failure: OngoingFailure | None = None

    def _counter(self, what: str, text: str, *labels: str) -> Counter:
        return Counter(f"patchstore_{self._name}_{what}", text, labels, registry=self._registry)

    def _gauge(self, what: str, text: str) -> Gauge:
        return Gauge(f"patchstore_{self._name}_{what}", text, registry=self._registry)

    def stands_at(self, version: int | None) -> None:
        """Take note of the newest version that is done, also by an earlier process."""
        self._done = version
        self._version.set(-1 if version is None else version)

    def watch_head(self, is_old: Callable[[], bool]) -> None:
        """Report whether the store's newest version is older than it may be; `is_old` is for any thread."""
        self._is_head_old = is_old
        text = "Whether the store's newest version is older than --max-head-age allows."
        self._gauge("head_old", text).set_function(lambda: float(is_old()))

    def run(self, work: Work, stop: threading.Event) -> Generator[Event]:
        """Do the work until `stop` is set; yield and log what is to be reported. Failures are tried again."""
        wake, settings = threading.Event(), self._settings
        with ExitStack() as stack:
            if settings.listen is not None:
                listener = stack.enter_context(Listener(address_of(settings.listen), self._answer))
                fields = {"event": "listening", "url": listener.url}
                logger.info("listening at %s", listener.url, extra=fields)
            if (unsubscribe := self._store.subscribe(wake.set)) is not None:
                stack.callback(unsubscribe)
            pauses = Pauses(
                settings.min_poll_interval_s,
                settings.max_poll_interval_s,
                most_after_failures_s=self._most_after_failures_s,
            )
            is_waiting = False
            while not stop.is_set():
                wake.clear()
                num_done = 0
                for event in self._once(work):
                    if event.outcome == "waiting" and is_waiting:
                        continue
                    is_waiting = event.outcome == "waiting"
                    num_done += event.error is None and not is_waiting
                    if event.error is None or (self._failure is not None and self._failure.is_reported):
                        self._log(event)
                        yield event
                is_failed = self._failure is not None
                _wait(stop, wake, pauses.after(is_new=num_done > 0, is_failed=is_failed))

    def _once(self, work: Work) -> Iterator[Event]:
        try:
            for event in work():
                self._is_current = self._is_current and event.outcome == "waiting"
                if event.outcome != "waiting":
                    self._versions.inc()
                    self._bytes.inc(event.num_bytes or 0)
                    self.stands_at(event.version)
                yield event
        except PatchstoreError as exc:
            yield self._failed(exc)
        except Exception as exc:
            logger.exception("internal error")
            yield self._failed(InternalError(f"{type(exc).__name__}: {exc}"))
        else:
            self._failure, self._is_current, self._current = None, True, time.monotonic()

    def _failed(self, error: PatchstoreError) -> Event:
        self._failures.labels(error.kind).inc()
        self._is_current = False
        self._failure = ongoing(self._failure, error)
        assert self._failure is not None
        return Event(outcome="failed", error=error, num_times=self._failure.num_times)

    def _log(self, event: Event) -> None:
        fields = {
            "event": event.outcome,
            "store": self._store.url,
            "version": event.version,
            "seconds": round(event.seconds, 3),
            "kind": None if event.error is None else event.error.kind,
            "num_times": event.num_times if event.error is not None else None,
        }
        level = logging.INFO if event.error is None else logging.WARNING
        logger.log(level, "%s", str(replace(event, time=""))[1:], extra=fields)

    def _answer(self, method: str, path: str, _query: str, accept: str, _body: bytes) -> Answer:
        return usual_answer(method, path, accept, self._expose, self.describe)

    def _expose(self, accept: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def describe(self) -> dict[str, Any]:
        """Return the state as JSON values; `problems` is empty if all is well. For any thread."""
        failure, problems = self._failure, []
        if failure is not None:
            seconds = time.monotonic() - failure.since
            if seconds > self._settings.unhealthy_after_s:
                problems.append({"problem": "failing", "seconds": seconds, "kind": failure.error.kind})
        if self._is_head_old is not None and self._is_head_old():
            problems.append({"problem": "old-head"})
        return {
            "problems": problems,
            "store": self._store.url,
            "version": self._done,
            "is_current": self._is_current,
            "error": failure and {"kind": failure.error.kind, "message": str(failure.error)},
        }


def _wait(stop: threading.Event, wake: threading.Event, seconds: float) -> None:
    """Wait, until woken by the store, or until the end is asked for, which is looked for twice a second."""
    end = time.monotonic() + seconds
    while not stop.is_set() and not wake.is_set():
        left_s = end - time.monotonic()
        if left_s <= 0:
            return
        wake.wait(min(0.5, left_s))


def address_of(listen: str) -> tuple[str, int]:
    """Return the host and port of `[HOST:]PORT`; the host is 127.0.0.1 by default."""
    host, _, port = listen.rpartition(":")
    number = number_in(port)
    if number is None or number > 65_535:
        raise UsageError(f"{listen!r:.100} is no place to listen at: give PORT, or HOST:PORT")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", number


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set; a second one ends the process. For the main thread."""
    stop = threading.Event()

    def set_once(number: int, _frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, set_once)
    return stop
