"""What `patchstore follow` counts and measures, in Prometheus' format."""

import logging
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from patchstore import lineage, log
from patchstore.errors import PatchstoreError
from patchstore.integrations.fleet import Survey
from patchstore.integrations.follow import Step
from patchstore.integrations.goal import Newest
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)

_STAGE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_COMMIT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counts steps as they are made; what can be seen at any moment is read when it is asked for."""

    def __init__(self, newest: Newest) -> None:
        self._newest = newest
        self._registry = CollectorRegistry()
        self._num_bytes = _cost(newest.store)
        self._survey: Callable[[], Survey] | None = None
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
            "Fetching and proving a version, while generation goes on.",
            each,
            buckets=_STAGE_S,
            registry=self._registry,
        )
        self._commit = Histogram(
            "patchstore_commit_seconds",
            "From the pause, if any, until generation goes on with a version.",
            each,
            buckets=_COMMIT_S,
            registry=self._registry,
        )
        self._proofs = Counter(
            "patchstore_proofs",
            "Proofs that a server's weights are its version's.",
            each,
            registry=self._registry,
        )
        self._failures = Counter(
            "patchstore_failures",
            "Steps that failed, and proofs, by the error's kind.",
            ("server", "kind"),
            registry=self._registry,
        )
        self._store_failures = Counter(
            "patchstore_store_failures",
            "Looks at the store, or at the file of servers, that failed, by the error's kind.",
            ("kind",),
            registry=self._registry,
        )

    def observe(self, server: str | None, done: Step) -> None:
        """Count a step; a server of None stands for the store. For any thread."""
        if server is None:
            if done.error is not None:
                self._store_failures.labels(done.error.kind).inc()
            return
        self._servers.add(server)
        if done.error is not None:
            self._failures.labels(server, done.error.kind).inc()
        if done.did == "proved":
            self._proofs.labels(server).inc()
        if done.switched is not None and done.version is not None:
            self._updates.labels(server).inc()
            self._stage.labels(server).observe(done.switched.stage_s)
            self._commit.labels(server).observe(done.switched.commit_s)
            if done.before is not None:
                num_bytes = self._num_bytes(done.before.run_id, done.before.held, done.version)
                self._bytes.labels(server).inc(num_bytes)

    def watch(self, survey: Callable[[], Survey]) -> None:
        """Have `expose` also say what a fleet's survey says."""
        self._survey = survey
        self._registry.register(_Now(survey, self._newest))

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """Return all figures, and their content type, for what a scraper accepts."""
        self._forget()
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _forget(self) -> None:
        """Drop what was counted of servers that nobody follows any more, lest it grow for ever."""
        if self._survey is None:
            return
        gone = self._servers - {view.url for view in self._survey().servers}
        self._servers -= gone
        each = (self._updates, self._bytes, self._stage, self._commit, self._proofs, self._failures)
        for server in gone:
            for metric in each:
                metric.remove_by_labels({"server": server})


class _Now(Collector):
    """Gauges of what is the case when they are read."""

    def __init__(self, survey: Callable[[], Survey], newest: Newest) -> None:
        self._survey = survey
        self._newest = newest

    def describe(self) -> Iterable[Metric]:
        # Otherwise they would be collected to learn their names.
        return ()

    def collect(self) -> Iterable[Metric]:
        survey, now = self._survey(), datetime.now(UTC)
        head = None if survey.head is None else survey.head.version
        created = None if head is None else self._newest.created(head)

        store_up = _gauge("patchstore_store_up", "Whether the last look at the store succeeded.")
        store_up.add_metric((), survey.looked is not None and survey.trouble is None)
        yield store_up
        heads = _gauge("patchstore_head_version", "The store's newest version.")
        age = _gauge("patchstore_head_age_seconds", "Since the head was created, by the trainer's clock.")
        target = _gauge("patchstore_target_version", "What servers should hold: the head, or where held.")
        held_at = _gauge("patchstore_on_hold", "Whether servers are held at a version, whatever the head is.")
        held_at.add_metric((), survey.hold is not None)
        yield held_at
        if head is not None:
            heads.add_metric((), head)
            yield heads
        if created is not None:
            age.add_metric((), max(0.0, (now - created).total_seconds()))
            yield age
        if survey.target is not None:
            target.add_metric((), survey.target.version)
            yield target

        each = ("server",)
        up = _gauge("patchstore_up", "Whether the server answered in the last step.", each)
        held = _gauge("patchstore_held_version", "What the server holds; absent where it holds none.", each)
        lag = _gauge("patchstore_lag_versions", "Versions between what it holds and the head.", each)
        lag_s = _gauge(
            "patchstore_lag_seconds",
            "Time since the first version that the server lacks was created, by the trainer's clock.",
            each,
        )
        torn = _gauge("patchstore_torn", "Whether the server has parts of two versions.", each)
        engines = _gauge("patchstore_engines", "Data-parallel engines behind the server.", each)
        differ = _gauge("patchstore_engines_differ", "Whether they hold different versions.", each)
        for view in survey.servers:
            label = (view.url,)
            up.add_metric(label, view.is_up)
            torn.add_metric(label, view.torn)
            engines.add_metric(label, view.num_engines)
            differ.add_metric(label, view.engines_differ)
            if view.held is not None:
                held.add_metric(label, view.held)
            if head is not None:
                has = -1 if view.held is None else view.held
                lag.add_metric(label, max(0, head - has))
                since = self._newest.outdated(has)
                late_s = 0.0 if since is None else max(0.0, (now - since).total_seconds())
                lag_s.add_metric(label, late_s)
        yield from (up, held, lag, lag_s, torn, engines, differ)


def _gauge(name: str, about: str, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, about, labels=labels)


def _cost(store: Store) -> Callable[[str | None, int | None, int], int]:
    """What leads from one version of a run to another, in bytes; for all servers that go that way."""

    @lru_cache(maxsize=1024)
    def cost(_run_id: str | None, held: int | None, target: int) -> int:
        try:
            return lineage.plan(log.read_lineage(store, target, held), held, target).num_bytes
        except PatchstoreError as exc:
            # The server went that way; that the store is gone since then is said elsewhere.
            logger.info("bytes from version %s to %d are not known: %s", held, target, exc)
            return 0

    return cost
