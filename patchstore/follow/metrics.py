"""What `patchstore follow` counts and measures, in Prometheus' format."""

import logging
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import patchstore
from patchstore.bucket import lineage
from patchstore.bucket.records import Manifest
from patchstore.errors import PatchstoreError
from patchstore.follow.desired import HeadWatcher
from patchstore.follow.fleet import FleetStatus
from patchstore.follow.reconcile import StepResult
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)

_STAGE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_APPLY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


def registry() -> CollectorRegistry:
    """Return a registry that says which patchstore this is."""
    found = CollectorRegistry()
    Info("patchstore_build", "This patchstore.", registry=found).info({"version": patchstore.__version__})
    return found


class Metrics:
    """Counters of steps, and gauges that are read when a scraper asks."""

    def __init__(self, watcher: HeadWatcher) -> None:
        self._watcher = watcher
        self._registry = registry()
        self._num_bytes = _cost(watcher.store)
        self._status: Callable[[], FleetStatus] | None = None
        self._servers: set[str] = set()
        self._updates = self._counter("patchstore_updates", "Versions applied.")
        self._bytes = self._counter(
            "patchstore_payload_bytes",
            "Bytes of the payloads that lead to the versions applied. The servers of a host read them once.",
        )
        self._stage = self._histogram(
            "patchstore_stage_seconds",
            "Fetching and verifying a version, while generation goes on.",
            _STAGE_S,
        )
        self._apply = self._histogram(
            "patchstore_apply_seconds",
            "From the pause, if any, until generation goes on with a version.",
            _APPLY_S,
        )
        self._verifications = self._counter(
            "patchstore_verifications", "Verifications that found a server's weights to be its version's."
        )
        self._failures = self._counter(
            "patchstore_failures",
            "Steps and verifications that failed, by the error's kind.",
            "server",
            "kind",
        )
        self._store_failures = self._counter(
            "patchstore_store_failures",
            "Looks at the store, or at the file of servers, that failed, by the error's kind.",
            "kind",
        )

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, labels or ("server",), registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, about, ("server",), buckets=buckets, registry=self._registry)

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
        head = fleet.head

        is_up = fleet.looked is not None and fleet.failure is None
        yield _gauge("patchstore_store_up", "Whether the last look at the store succeeded.", is_up)
        is_pinned = fleet.pin is not None
        about = "Whether servers are pinned to a version, whatever the head is."
        yield _gauge("patchstore_pinned", about, is_pinned)
        about = "Whether the head is older than --max-head-age allows."
        yield _gauge("patchstore_head_old", about, fleet.is_head_old)
        yield _of("patchstore_head_version", "The store's newest version.", head, lambda it: it.version)
        yield _of("patchstore_head_step", "The trainer's step at the head.", head, lambda it: it.step)
        yield _of("patchstore_head_bytes", "Bytes of the head's payloads.", head, lambda it: it.num_bytes)
        about = "Share of elements in which the head differs from the version before, if known."
        yield _of("patchstore_head_share_changed", about, head, lambda _: fleet.head_share)
        about = "Since the head was created, by the trainer's clock."
        yield _of("patchstore_head_age_seconds", about, head, lambda _: fleet.head_age_s)
        about = "What servers should serve: the head, or their pin."
        yield _of("patchstore_target_version", about, fleet.target, lambda it: it.version)

        up = _per_server("patchstore_up", "Whether the server answered in the last step.")
        serving = _per_server(
            "patchstore_serving_version", "What the server serves; absent without a version."
        )
        lag = _per_server("patchstore_lag_versions", "Versions between what it serves and the head.")
        lag_s = _per_server(
            "patchstore_lag_seconds",
            "Time since the first version that the server lacks was created, by the trainer's clock.",
        )
        half = _per_server("patchstore_half_applied", "Whether the server has parts of two versions.")
        engines = _per_server("patchstore_engines", "Data-parallel engines behind the server.")
        differ = _per_server("patchstore_engines_differ", "Whether they serve different versions.")
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
                lag.add_metric(label, max(0, head.version - has))
                since = self._watcher.first_missing_at(has)
                late_s = 0.0 if since is None else max(0.0, (now - since).total_seconds())
                lag_s.add_metric(label, late_s)
        yield from (up, serving, lag, lag_s, half, engines, differ)


def _gauge(name: str, about: str, value: float | None) -> GaugeMetricFamily:
    """One figure, without a sample where it is not known."""
    found = GaugeMetricFamily(name, about)
    if value is not None:
        found.add_metric((), value)
    return found


def _of(
    name: str, about: str, version: Manifest | None, value: Callable[[Manifest], float | None]
) -> GaugeMetricFamily:
    """One figure of a version, labelled with its run; without a sample where it is not known."""
    found = GaugeMetricFamily(name, about, labels=("run",))
    if version is not None and (known := value(version)) is not None:
        found.add_metric((version.run_id,), known)
    return found


def _per_server(name: str, about: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, labels=("server",))


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
