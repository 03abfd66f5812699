"""Random histories of a run against a model of what must be readable: the weights of each version, which
versions are retired, and which have a tag.
"""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kept_runs import later, rebuilt

from patchstore import Publisher
from patchstore.compact.service import Compactor
from patchstore.errors import StoreUnavailable, VersionRetired
from patchstore.format import history
from patchstore.retention import Retention, collect, delete_tag, retire, tag
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.weights import State, assert_same_bits, served

DAY_H = 27
"""Hours after which all that may be deleted may be deleted."""


class Keeping(RuleBasedStateMachine):
    """One run with a trainer, an operator, and collectors that may be killed."""

    @initialize(anchor_every=st.none() | st.integers(1, 4))
    def create(self, anchor_every: int | None) -> None:
        torch.manual_seed(0)
        self.store = MemoryStore()
        self.anchor_every = anchor_every
        self.model = {"weight": torch.randn(40), "other": torch.randn(8)}
        self.weights: dict[int, State] = {}
        self.retired: set[int] = set()
        self.tags: dict[str, int] = {}
        self.hours = 0.0
        self.publisher = Publisher(self.store, self.model, anchor_every=anchor_every)
        self.publish(4)

    @rule(count=st.integers(1, 4))
    def publish(self, count: int) -> None:
        for _ in range(count):
            self.model["weight"][torch.randint(40, (3,))] += 1
            manifest = self.publisher.publish_patch(len(self.weights)).result()
            self.weights[manifest.version] = served(self.model)

    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        self.publisher.close()
        version = data.draw(st.sampled_from(sorted(self.kept)))
        for name, tensor in self.weights[version].items():
            self.model[name].copy_(tensor)
        self.publisher = Publisher(self.store, self.model, anchor_every=self.anchor_every, resume=version)
        head = history.head(self.store)
        assert head is not None
        self.weights[head.version] = served(self.model)

    @rule(name=st.sampled_from(["best", "last"]), data=st.data())
    def set_tag(self, name: str, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.weights)))
        if version in self.kept:
            tag(self.store, name, version)
            self.tags[name] = version
        else:
            try:
                tag(self.store, name, version)
            except VersionRetired:
                return
            raise AssertionError(f"version {version} was tagged")

    @rule(name=st.sampled_from(["best", "last"]))
    def remove_tag(self, name: str) -> None:
        if self.tags.pop(name, None) is not None:
            delete_tag(self.store, name)

    @rule(keep_last=st.integers(1, 5), keep_every=st.none() | st.integers(2, 6))
    def retire_some(self, keep_last: int, keep_every: int | None) -> None:
        policy = Retention(keep_last=keep_last, keep_every=keep_every)
        found = retire(self.store, policy, dry_run=False, clock=later(self.hours))
        gone = {version for first, last in found.retired for version in range(first, last + 1)}
        newest = max(self.weights)
        wanted = set(range(newest - keep_last + 1, newest + 1)) | set(self.tags.values())
        assert gone.isdisjoint(wanted | self.retired)
        self.retired |= gone

    @rule(anchor_every=st.integers(2, 6))
    def add_shortcuts(self, anchor_every: int) -> None:
        list(Compactor(self.store, anchor_every=anchor_every).compact())

    @rule(hours=st.sampled_from([1.0, float(DAY_H)]))
    def wait(self, hours: float) -> None:
        self.hours += hours

    @rule(killed_after=st.none() | st.integers(0, 60))
    def collect_some(self, killed_after: int | None) -> None:
        store = self.store
        if killed_after is not None:
            fault = Fault(verb="*", effect="fail-before", skip=killed_after, times=None)
            store = FaultyStore(store, fault)  # type: ignore[assignment]
        try:
            collect(store, dry_run=False, clock=later(self.hours))
        except StoreUnavailable:
            assert killed_after is not None

    @property
    def kept(self) -> set[int]:
        return (self.weights.keys() - self.retired) | set(self.tags.values()) | {max(self.weights)}

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self.check(data.draw(st.sampled_from(sorted(self.weights))))

    def check(self, version: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = rebuilt(self.store, version, Path(folder))
            except VersionRetired:
                assert version not in self.kept
            else:
                assert version in self.kept
                assert_same_bits(found, self.weights[version])

    @invariant()
    def the_newest_can_be_rebuilt(self) -> None:
        self.check(max(self.weights))

    def teardown(self) -> None:
        if hasattr(self, "publisher"):
            self.publisher.close()
            for version in self.kept:
                self.check(version)


_SETTINGS = settings(
    max_examples=4,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
Keeping.TestCase.settings = _SETTINGS
TestKeeping = Keeping.TestCase


class KeepingForLong(Keeping):
    """The same, longer."""


KeepingForLong.TestCase.settings = settings(_SETTINGS, max_examples=100)
TestKeepingForLong = pytest.mark.exhaustive(KeepingForLong.TestCase)
