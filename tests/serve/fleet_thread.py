"""A fleet that runs while a test changes the world around it, and what it answers over HTTP."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from patchstore.errors import StoreUnavailable
from patchstore.follow.desired import DesiredVersion, HeadWatcher, check_kind
from patchstore.follow.fleet import Fleet, FollowEvent
from patchstore.follow.http_api import Control
from patchstore.follow.metrics import Metrics
from patchstore.follow.settings import Settings
from patchstore.ops.report.page import Report
from patchstore.stores.base import Store
from tests.support.adapter_stub import AdapterStub
from tests.support.vllm_stub import StubServer


@contextmanager
def silent(store: Store) -> Iterator[None]:
    """Have a store not answer inside of the block."""

    def unreachable(*_: object) -> bytes:
        raise StoreUnavailable("no route")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store, "get", unreachable)
        yield


class EventThread:
    """Events that are taken on a thread, until it is told to end."""

    def __init__(self, events: Iterator[FollowEvent], stop: threading.Event) -> None:
        self.told: list[FollowEvent] = []
        self._events, self._stop = events, stop
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for told in self._events:
            with self._changed:
                self.told.append(told)
                self._changed.notify_all()

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for events until something is the case."""
        with self._changed:
            assert self._changed.wait_for(is_so, timeout=60), self.told

    def did(self, server: str | None) -> list[str]:
        return [told.step.outcome for told in self.told if told.server == server]

    def kinds(self, server: str | None) -> list[str]:
        """Of the failures that were told."""
        told = [each.step.error for each in self.told if each.server == server]
        return [each.kind for each in told if each is not None]

    def applied(self, server: str, version: int) -> bool:
        return any(
            told.server == server and told.step.outcome == "applied" and told.step.version == version
            for told in self.told
        )

    def until_all(self, version: int, stubs: Sequence[StubServer | AdapterStub]) -> None:
        """Wait until each was brought to a version."""
        self.until(lambda: all(self.applied(stub.url, version) for stub in stubs))

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


class FleetThread(EventThread):
    """A fleet on a thread, and what it told."""

    def __init__(
        self,
        store,
        urls,
        *,
        grace_s=30.0,
        min_poll_interval_s=0.01,
        max_poll_interval_s=0.05,
        max_head_age_s=None,
        run_id=None,
        servers_file=None,
        pin_file=None,
        is_observed=True,
        adapter=None,
        keep=2,
    ) -> None:
        watcher = HeadWatcher(store, run_id=run_id, recheck_s=0)
        self.desired = DesiredVersion(
            watcher,
            pin_file=pin_file,
            max_head_age_s=max_head_age_s,
            check_run=lambda header: check_kind(store, header, adapter),
        )
        self.metrics = Metrics(watcher)
        settings = Settings(
            servers=urls,
            servers_file=servers_file,
            run_id=run_id,
            timeout_s=30,
            min_poll_interval_s=min_poll_interval_s,
            max_poll_interval_s=max_poll_interval_s,
            adapter=adapter,
            keep=keep,
        )
        self.fleet = Fleet(self.desired, settings, observe=self.metrics.observe if is_observed else None)
        self.metrics.watch(self.fleet.status)
        self.stop = threading.Event()
        super().__init__(self.fleet.run(self.stop, grace_s=grace_s), self.stop)


@contextmanager
def running(*args, **options) -> Iterator[FleetThread]:
    fleet = FleetThread(*args, **options)
    try:
        yield fleet
    finally:
        fleet.end()


class Service:
    """A fleet with its listener."""

    def __init__(self, fleet: FleetThread, control: Control) -> None:
        self.fleet, self.url = fleet, control.url
        self._http = httpx.Client(base_url=control.url, timeout=60, verify=False)

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self._http.post(path, json=body, **options)

    def problems(self) -> set[tuple[str, str]]:
        return {(each["problem"], each["of"]) for each in self.get("/healthz").json()["problems"]}

    def figures(self) -> dict[tuple[str, ...], float]:
        """Name and labels' values -> value."""
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(self.get("/metrics").text)
            for sample in family.samples
        }

    def ready(self, query: str = "") -> tuple[int, dict[str, Any]]:
        answer = self.get(f"/readyz{query}")
        return answer.status_code, answer.json()

    def until_ready(self, query: str = "") -> Self:
        while self.ready(query)[0] != 200:
            pass
        return self


@contextmanager
def listening(store, urls, *, unhealthy_after_s: float = 0.0, **options) -> Iterator[Service]:
    with (
        running(store, urls, **options) as fleet,
        Control(
            ("127.0.0.1", 0),
            fleet.fleet,
            fleet.desired,
            fleet.metrics,
            Report(store, has_layers=False),
            unhealthy_after_s=unhealthy_after_s,
        ) as control,
    ):
        yield Service(fleet, control)
