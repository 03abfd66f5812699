"""What `patchstore follow` counts and measures, in Prometheus' format."""

import logging
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from patchstore.errors import PatchstoreError
from patchstore.format import lineage
from patchstore.serve.desired import HeadWatcher
from patchstore.serve.fleet_status import FleetStatus
from patchstore.serve.reconcile import StepResult
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)

_STAGE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_APPLY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counters of steps, and gauges that are read when a scraper asks."""

    def __init__(self, watcher: HeadWatcher) -> None:
        self._watcher = watcher
        self._registry = CollectorRegistry()
        self._num_bytes = _cost(watcher.store)
        self._status: Callable[[], FleetStatus] | None = None
        self._servers: set[str] = set()
        each = ("server",)
        self._updates = Counter("patchstore_updates", "Versions applied.", each, registry=self._registry)
        self._bytes = Counter(
            "patchstore_payload_bytes",
            "Bytes of the payloads that lead to the versions applied. The servers of a host read them once.",
            each,
            registry=self._registry,
        )
        self._stage = Histogram(
            "patchstore_stage_seconds",
            "Fetching and verifying a version, while generation goes on.",
            each,
            buckets=_STAGE_S,
            registry=self._registry,
        )
        self._apply = Histogram(
            "patchstore_apply_seconds",
            "From the pause, if any, until generation goes on with a version.",
            each,
            buckets=_APPLY_S,
            registry=self._registry,
        )
        self._verifications = Counter(
            "patchstore_verifications",
            "Verifications that found a server's weights to be its version's.",
            each,
            registry=self._registry,
        )
        self._failures = Counter(
            "patchstore_failures",
            "Steps and verifications that failed, by the error's kind.",
            ("server", "kind"),
            registry=self._registry,
        )
        self._store_failures = Counter(
            "patchstore_store_failures",
            "Looks at the store, or at the file of servers, that failed, by the error's kind.",
            ("kind",),
            registry=self._registry,
        )

    def observe(self, server: str | None, done: StepResult) -> None:
        """Count a step; a server of None stands for the store. For any thread."""
        if server is None:
            if done.error is not None:
                self._store_failures.labels(done.error.kind).inc()
            return
        self._servers.add(server)
        if done.error is not None:
            self._failures.labels(server, done.error.kind).inc()
        if done.outcome == "verified":
            self._verifications.labels(server).inc()
        if done.timings is not None and done.version is not None:
            self._updates.labels(server).inc()
            self._stage.labels(server).observe(done.timings.stage_s)
            self._apply.labels(server).observe(done.timings.apply_s)
            if done.before is not None:
                num_bytes = self._num_bytes(done.before.run_id, done.before.serving, done.version)
                self._bytes.labels(server).inc(num_bytes)

    def watch(self, status: Callable[[], FleetStatus]) -> None:
        """Let `expose` also return a fleet's status."""
        self._status = status
        self._registry.register(_Now(status, self._watcher))

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """Return all figures in a format that a scraper accepts, and its content type."""
        self._forget()
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _forget(self) -> None:
        """Drop the counters of servers that are no longer followed, so that they do not grow for ever."""
        if self._status is None:
            return
        gone = self._servers - {view.url for view in self._status().servers}
        self._servers -= gone
        each = (self._updates, self._bytes, self._stage, self._apply, self._verifications, self._failures)
        for server in gone:
            for metric in each:
                metric.remove_by_labels({"server": server})


class _Now(Collector):
    """Gauges of the state at the time of reading."""

    def __init__(self, status: Callable[[], FleetStatus], watcher: HeadWatcher) -> None:
        self._status = status
        self._watcher = watcher

    def describe(self) -> Iterable[Metric]:
        # Otherwise they would be collected to learn their names.
        return ()

    def collect(self) -> Iterable[Metric]:
        fleet, now = self._status(), datetime.now(UTC)
        head = None if fleet.head is None else fleet.head.version

        store_up = _gauge("patchstore_store_up", "Whether the last look at the store succeeded.")
        store_up.add_metric((), fleet.looked is not None and fleet.failure is None)
        yield store_up
        heads = _gauge("patchstore_head_version", "The store's newest version.")
        age = _gauge("patchstore_head_age_seconds", "Since the head was created, by the trainer's clock.")
        target = _gauge("patchstore_target_version", "What servers should serve: the head, or their pin.")
        pinned = _gauge("patchstore_pinned", "Whether servers are pinned to a version, whatever the head is.")
        pinned.add_metric((), fleet.pin is not None)
        yield pinned
        if head is not None:
            heads.add_metric((), head)
            yield heads
        if fleet.head_age_s is not None:
            age.add_metric((), fleet.head_age_s)
            yield age
        old = _gauge("patchstore_head_old", "Whether the head is older than --max-head-age allows.")
        old.add_metric((), fleet.is_head_old)
        yield old
        if fleet.target is not None:
            target.add_metric((), fleet.target.version)
            yield target

        each = ("server",)
        up = _gauge("patchstore_up", "Whether the server answered in the last step.", each)
        serving = _gauge(
            "patchstore_serving_version", "What the server serves; absent without a version.", each
        )
        lag = _gauge("patchstore_lag_versions", "Versions between what it serves and the head.", each)
        lag_s = _gauge(
            "patchstore_lag_seconds",
            "Time since the first version that the server lacks was created, by the trainer's clock.",
            each,
        )
        half = _gauge("patchstore_half_applied", "Whether the server has parts of two versions.", each)
        engines = _gauge("patchstore_engines", "Data-parallel engines behind the server.", each)
        differ = _gauge("patchstore_engines_differ", "Whether they serve different versions.", each)
        for view in fleet.servers:
            label = (view.url,)
            up.add_metric(label, view.is_up)
            half.add_metric(label, view.half_applied)
            engines.add_metric(label, view.num_engines)
            differ.add_metric(label, view.engines_differ)
            if view.serving is not None:
                serving.add_metric(label, view.serving)
            if head is not None:
                has = -1 if view.serving is None else view.serving
                lag.add_metric(label, max(0, head - has))
                since = self._watcher.first_missing_at(has)
                late_s = 0.0 if since is None else max(0.0, (now - since).total_seconds())
                lag_s.add_metric(label, late_s)
        yield from (up, serving, lag, lag_s, half, engines, differ)


def _gauge(name: str, about: str, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, labels=labels)


def _cost(store: Store) -> Callable[[str | None, int | None, int], int]:
    """Bytes of the payloads from one version of a run to another, kept for all servers."""

    @lru_cache(maxsize=1024)
    def cost(_run_id: str | None, start: int | None, target: int) -> int:
        try:
            return lineage.read(store, target, start).plan().num_bytes
        except PatchstoreError as exc:
            # The server was updated; that the store is gone since then is reported elsewhere.
            logger.info("bytes from version %s to %d are not known: %s", start, target, exc)
            return 0

    return cost
