"""A service that does again and again what a store's new versions ask for: `replicate` and `mirror`.

`Progress` runs the work, counts it, and answers for it over HTTP.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import choose_encoder

from patchstore.errors import InternalError, NotFound, PatchstoreError
from patchstore.serve.http_api import Answer, Listener
from patchstore.serve.logs import utc
from patchstore.serve.service import address_of
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that was done, or failed."""

    outcome: str
    """`waiting` (the store has no version yet), `failed`, or what was done."""
    version: int | None = None
    num_bytes: int = 0
    """Of payloads that were moved for it."""
    seconds: float = 0.0
    error: PatchstoreError | None = None
    detail: str | None = None
    num_times: int = 1
    """How often this failure came in a row. Only the 1st, 2nd, 4th, 8th ... is reported."""
    time: str = field(default_factory=lambda: utc(time.time()))
    """When it ended: UTC, ISO 8601."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without fields that do not apply."""
        found: dict[str, Any] = {"time": self.time, "event": self.outcome, "version": self.version}
        if self.error is not None:
            return found | {"error": {"kind": self.error.kind, "message": str(self.error)}}
        if self.version is not None:
            found |= {"bytes": self.num_bytes, "seconds": round(self.seconds, 3)}
        return found if self.detail is None else found | {"detail": self.detail}

    def __str__(self) -> str:
        if self.error is not None:
            again = f", {self.num_times} times in a row" if self.num_times > 1 else ""
            return f"{self.time} failed{again}: [{self.error.kind}] {self.error}"
        if self.version is None:
            return f"{self.time} {self.outcome}: the store holds no version yet"
        return (
            f"{self.time} {self.outcome} version {self.version}: {self.num_bytes:,} bytes in "
            f"{self.seconds:.2f} s{f'; {self.detail}' if self.detail else ''}"
        )


Work = Callable[[], Iterator[Event]]
"""Does all that there is to do now, and yields each part when it is done. Called again and again."""


class Progress:
    """Repeats work while a store gets new versions; what it did, as figures and as health."""

    def __init__(self, name: str, store: Store, *, unhealthy_after_s: float) -> None:
        """Prepare.

        Args:
            name: begins the names of the figures, as `patchstore_NAME_version`.
            store: where new versions appear.
            unhealthy_after_s: how long work may fail before `/healthz` reports it.
        """
        self._store, self._unhealthy_after_s = store, unhealthy_after_s
        self._registry = CollectorRegistry()
        self._versions = Counter(
            f"patchstore_{name}_versions", "Versions done by this process.", registry=self._registry
        )
        self._bytes = Counter(
            f"patchstore_{name}_bytes", "Bytes of payloads moved for them.", registry=self._registry
        )
        self._failures = Counter(
            f"patchstore_{name}_failures",
            "Failures, by the error's kind.",
            ("kind",),
            registry=self._registry,
        )
        self._version = Gauge(
            f"patchstore_{name}_version", "The newest version done; -1 for none.", registry=self._registry
        )
        self._version.set(-1)
        behind = Gauge(
            f"patchstore_{name}_behind_seconds",
            "Since all versions of the store were done, or since the begin; 0 while they are.",
            registry=self._registry,
        )
        behind.set_function(lambda: 0.0 if self._is_current else time.monotonic() - self._current)
        up = Gauge(f"patchstore_{name}_up", "Whether the last try succeeded.", registry=self._registry)
        up.set_function(lambda: self._failure is None)
        self._name = name
        self._is_head_old: Callable[[], bool] | None = None
        self._done: int | None = None
        self._is_current = False
        self._current = time.monotonic()
        self._failure: Event | None = None
        self._failing_since = 0.0

    def stands_at(self, version: int | None) -> None:
        """Take note of the newest version that is done, also by an earlier process."""
        self._done = version
        self._version.set(-1 if version is None else version)

    def watch_head(self, is_old: Callable[[], bool]) -> None:
        """Report whether the store's newest version is older than it may be.

        Args:
            is_old: is called from any thread.
        """
        self._is_head_old = is_old
        old = Gauge(
            f"patchstore_{self._name}_head_old",
            "Whether the store's newest version is older than --max-head-age allows.",
            registry=self._registry,
        )
        old.set_function(lambda: float(is_old()))

    def repeat(
        self,
        work: Work,
        stop: threading.Event,
        *,
        min_interval_s: float,
        max_interval_s: float,
        listen: str | None,
        max_failure_interval_s: float | None = None,
    ) -> Generator[Event]:
        """Do the work until `stop` is set, and yield what is to be reported.

        Args:
            min_interval_s: wait after something was done, doubled each time there is nothing, or it fails.
            max_interval_s: the longest wait, also if the store reports changes.
            listen: `[HOST:]PORT` for figures and health.
            max_failure_interval_s: the longest wait after failures in a row, if another one.

        Raises:
            UsageError: it cannot listen there.
        """
        wake = threading.Event()
        with ExitStack() as stack:
            if listen is not None:
                listener = stack.enter_context(Listener(address_of(listen), self._answer))
                logger.info(
                    "listening at %s", listener.url, extra={"event": "listening", "url": listener.url}
                )
            if (unsubscribe := self._store.subscribe(wake.set)) is not None:
                stack.callback(unsubscribe)
            interval_s, is_waiting = min_interval_s, False
            while not stop.is_set():
                wake.clear()
                num_done = 0
                for event in self._once(work):
                    if event.outcome == "waiting" and is_waiting:
                        continue
                    is_waiting = event.outcome == "waiting"
                    num_done += event.error is None and not is_waiting
                    if event.num_times & (event.num_times - 1) == 0:
                        self._log(event)
                        yield event
                limit_s = max_interval_s
                if self._failure is not None and max_failure_interval_s is not None:
                    limit_s = max_failure_interval_s
                interval_s = min_interval_s if num_done else min(2 * interval_s, limit_s)
                _wait(stop, wake, interval_s)

    def _once(self, work: Work) -> Iterator[Event]:
        try:
            for event in work():
                self._is_current = self._is_current and event.outcome == "waiting"
                if event.outcome != "waiting":
                    self._versions.inc()
                    self._bytes.inc(event.num_bytes)
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
        before = self._failure
        num_times = 1
        if before is not None and before.error is not None and before.error.kind == error.kind:
            num_times = before.num_times + 1
        if before is None:
            self._failing_since = time.monotonic()
        self._failures.labels(error.kind).inc()
        self._is_current = False
        self._failure = Event(outcome="failed", error=error, num_times=num_times)
        return self._failure

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
        match method, path:
            case "GET", "/metrics":
                encode, content_type = choose_encoder(accept)
                return HTTPStatus.OK, encode(self._registry), content_type
            case "GET", "/healthz":
                found = self.describe()
                return _json(HTTPStatus.SERVICE_UNAVAILABLE if found["problems"] else HTTPStatus.OK, found)
            case "GET", "/livez":
                return _json(HTTPStatus.OK, {})
        error = {"kind": NotFound.kind, "message": f"there is no {method} {path}"}
        return _json(HTTPStatus.NOT_FOUND, {"error": error})

    def describe(self) -> dict[str, Any]:
        """Return the state as JSON values; `problems` is empty if all is well. For any thread."""
        failure, now = self._failure, time.monotonic()
        error = None if failure is None else failure.error
        problems = []
        if error is not None and now - self._failing_since > self._unhealthy_after_s:
            problems.append({"problem": "failing", "seconds": now - self._failing_since, "kind": error.kind})
        if self._is_head_old is not None and self._is_head_old():
            problems.append({"problem": "old-head"})
        return {
            "problems": problems,
            "store": self._store.url,
            "version": self._done,
            "is_current": self._is_current,
            "error": error and {"kind": error.kind, "message": str(error)},
        }


def _json(status: HTTPStatus, value: dict[str, Any]) -> Answer:
    return status, json.dumps(value).encode() + b"\n", "application/json"


def _wait(stop: threading.Event, wake: threading.Event, seconds: float) -> None:
    """Wait, until woken by the store, or until the end is asked for, which is looked for twice a second."""
    end = time.monotonic() + seconds
    while not stop.is_set() and not wake.is_set():
        left_s = end - time.monotonic()
        if left_s <= 0:
            return
        wake.wait(min(0.5, left_s))
