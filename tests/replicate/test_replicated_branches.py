"""Replicas that gave up versions by themselves, and a trainer that goes back to one of these."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from replicas import give_up, go_back, replicate

from patchstore import Replica
from patchstore.bucket import history, notes, shortcuts
from patchstore.errors import CorruptObject, PatchstoreError, VersionRetired
from patchstore.ops.compact.service import Compactor
from patchstore.ops.mirror.place import Place
from patchstore.ops.mirror.service import Mirror
from patchstore.ops.replicate.replicator import Replicator
from patchstore.ops.retention import Retention, collect, retire
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.retention.kept_runs import later, new_run, rebuilt
from tests.support.copies import copy_of
from tests.support.weights import Run, assert_same_bits, newest


@pytest.fixture
def run() -> Run:
    """Versions 0 to 9, with anchors at 0, 4 and 8."""
    return new_run(MemoryStore("memory://source"), 10)


@pytest.fixture
def target(run: Run) -> MemoryStore:
    """A replica that kept versions 8 and 9 alone."""
    store = MemoryStore("memory://target")
    replicate(run.store, store)
    give_up(store)
    return store


def held_at(store: Store, run: Run, version: int) -> Replica:
    """A reader that holds a version."""
    tensors = {name: tensor.clone() for name, tensor in run.history[version].items()}
    return Replica(store, tensors, held=version)


def test_a_trainer_that_goes_back_is_followed_and_each_new_version_can_be_rebuilt(run, target, tmp_path):
    reader = held_at(target, run, 9)
    branch = go_back(run, 6)
    events = replicate(run.store, target)
    assert [event.version for event in events] == branch
    # The anchor at 4, and the deltas behind it.
    assert events[0].num_bytes > history.read_manifest(run.store, 4).num_bytes
    reader.update()
    assert_same_bits(dict(reader.tensors), run.history[branch[-1]])
    for version in (8, *branch):
        assert_same_bits(rebuilt(target, version, tmp_path), run.history[version])
    # Version 6 stays retired here, and keeps what the new versions need.
    with pytest.raises(VersionRetired):
        rebuilt(target, 6, tmp_path)
    give_up(target, keep_last=1)
    assert_same_bits(newest(target), run.history[branch[-1]])
    assert replicate(run.store, target) == []


def test_what_a_branch_needs_stays_if_it_was_only_retired(run: Run) -> None:
    target = MemoryStore("memory://target")
    replicate(run.store, target)
    retire(target, Retention(keep_last=2), dry_run=False)
    calls = FaultyStore(target)
    branch = go_back(run, 6)
    replicate(run.store, calls)
    assert not [key for verb, key in calls.calls if verb == "upload" and layout.attempt_of(key)[0] < 10]
    collect(target, dry_run=False, clock=later(25))
    assert_same_bits(newest(target), run.history[branch[-1]])


def test_a_replica_of_such_a_replica_has_the_same_versions(run, target, tmp_path):
    branch = go_back(run, 6)
    replicate(run.store, target)
    third = MemoryStore("memory://third")
    replicate(target, third)
    for version in (9, *branch):
        assert_same_bits(rebuilt(third, version, tmp_path), run.history[version])
    assert collect(third, clock=later(25)).num_versions == 0
    # The third one gives up versions of its own, and the trainer goes back once more.
    give_up(third, keep_last=1)
    again = go_back(run, 9)
    replicate(run.store, target)
    replicate(target, third)
    for store in (target, third):
        assert_same_bits(newest(store), run.history[again[-1]])


def test_a_mirror_of_such_a_replica_is_made(run: Run, target: MemoryStore, tmp_path: Path) -> None:
    with closing(Place(tmp_path / "mirror")) as place:
        list(Mirror(target, place).work())
    branch = go_back(run, 6)
    replicate(run.store, target)
    with closing(Place(tmp_path / "mirror")) as place:
        (event,) = Mirror(target, place).work()
    assert event.version == branch[-1]


def test_an_anchor_that_the_source_added_takes_the_place_of_what_it_deleted(tmp_path: Path) -> None:
    run = new_run(MemoryStore("memory://source"), 12, anchor_every=None)
    target = MemoryStore("memory://target")
    replicate(run.store, target)
    list(Compactor(run.store, anchor_every=4).compact())
    retire(target, Retention(keep_last=1), dry_run=False)
    # At the source 9 is kept, and rebuilt from the anchor that was added to 8. Here all begins at 0.
    retire(run.store, Retention(keep_last=3), dry_run=False)
    collect(run.store, dry_run=False, clock=later(25))
    for key in [*target.list("deltas/00000009"), *target.list("deltas/00000007")]:
        target.delete(key)
    branch = go_back(run, 9)
    replicate(run.store, target)
    for version in branch:
        assert_same_bits(rebuilt(target, version, tmp_path), run.history[version])
    assert layout.shortcut_key(8, None) in set(target.list())


@pytest.mark.parametrize("effect", ["fail-before", "fail-after"])
def test_killed_at_any_call_the_newest_version_can_be_rebuilt(run, target, effect, monkeypatch):
    branch = go_back(run, 6, count=1)
    for skip in range(0, 1000, 3):
        store = copy_of(target)
        fault = Fault(verb="*", effect=effect, skip=skip, times=None)
        try:
            replicate(run.store, FaultyStore(store, fault))
        except PatchstoreError:
            found = history.head(store)
            assert_same_bits(newest(store), run.history[found.version])
            replicate(run.store, store)
        else:
            break
        assert_same_bits(newest(store), run.history[branch[-1]])
    assert skip > 30


class Collected(MemoryStore):
    """A store in which a collector works that had looked before."""

    def __init__(self, before: MemoryStore, when: Callable[[str], bool], keys: list[str]) -> None:
        super().__init__(before.url)
        self._when, self._keys = when, list[str]()
        for key in before.list():
            self.put(key, before.get(key))
        self._keys = keys

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        super().put(key, data, if_absent=if_absent)
        if self._keys and self._when(key):
            keys, self._keys = self._keys, []
            for each in keys:
                self.delete(each)


def test_what_a_collector_deletes_that_looked_before_is_copied_again(run: Run, target: MemoryStore) -> None:
    branch = go_back(run, 6)
    keys = [key for key in run.store.list("deltas/") if layout.attempt_of(key)[0] in {5, 6}]
    # At the commit of the first version of the branch: the copy of what it needs was over.
    store = Collected(target, lambda key: key == layout.manifest_key(branch[0]), keys)
    replicate(run.store, store)
    assert_same_bits(newest(store), run.history[branch[-1]])
    # Much later, while a replicator goes on.
    store = Collected(target, lambda key: key == layout.manifest_key(branch[2]), keys)
    replicator = Replicator(run.store, store)
    replicator.open()
    list(replicator.versions())
    with pytest.raises(CorruptObject):
        newest(store)
    replicator.check_way()
    assert_same_bits(newest(store), run.history[branch[-1]])
    # An anchor ends that: nothing is looked at again.
    anchored = go_back(run, branch[-1], count=4, anchor_every=2)
    list(replicator.versions())
    calls = FaultyStore(store)
    replicator.target = calls
    replicator.check_way()
    assert calls.calls == []
    assert_same_bits(newest(store), run.history[anchored[-1]])


def test_what_neither_place_has_is_never_reported_as_copied(run: Run, target: MemoryStore) -> None:
    branch = go_back(run, 6)
    (key,) = run.store.list("deltas/00000006")
    data = run.store.get(key)
    run.store.delete(key)
    for _ in range(2):
        with pytest.raises(CorruptObject, match=f"{key} is missing from memory://source"):
            replicate(run.store, target)
        assert history.head(target).version == 9
        assert_same_bits(newest(target), run.history[9])
    run.store.put(key, data)
    replicate(run.store, target)
    assert_same_bits(newest(target), run.history[branch[-1]])


def test_a_newest_version_that_cannot_be_rebuilt_is_repaired_or_an_error(run, target):
    (key,) = target.list("deltas/00000009")
    target.delete(key)
    replicate(run.store, target)
    assert target.get(key) == run.store.get(key)
    target.delete(key)
    run.store.delete(key)
    for _ in range(2):
        with pytest.raises(CorruptObject, match=key):
            replicate(run.store, target)
    for name, tensor in run.history[9].items():
        run.model[name].copy_(tensor)
    run.open(resume="anchor")
    run.publish(10)
    run.close()
    # The source is damaged before the anchor, and these versions were not given up.
    with pytest.raises(CorruptObject, match=key):
        replicate(run.store, target)
    retire(run.store, Retention(keep_last=1), dry_run=False)
    replicate(run.store, target)
    assert_same_bits(newest(target), run.history[max(run.history)])


def test_anchors_of_versions_that_the_replica_gave_up_are_not_copied_again_and_again(target: Store) -> None:
    run = new_run(MemoryStore("memory://source"), 20, anchor_every=None)
    target = MemoryStore("memory://target")
    list(Compactor(run.store, anchor_every=4).compact())
    replicate(run.store, target)
    assert shortcuts.listed(target) == shortcuts.listed(run.store)
    give_up(target, keep_last=1)
    kept = shortcuts.listed(target)
    assert kept < shortcuts.listed(run.store)
    replicate(run.store, target)
    assert shortcuts.listed(target) == kept
    assert notes.retirements(target).find(4) is not None
    assert_same_bits(newest(target), run.history[19])


def test_a_manifest_of_another_run_is_not_copied_as_the_newest(run: Run, target: Store) -> None:
    values = json.loads(run.store.get(layout.manifest_key(9)))
    run.store.put(layout.manifest_key(10), json.dumps(values | {"version": 10, "run_id": "another"}).encode())
    with pytest.raises(CorruptObject, match="version 10 is of run another"):
        replicate(run.store, target)
    assert_same_bits(newest(target), run.history[9])
