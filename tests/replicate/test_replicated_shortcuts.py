"""Shortcuts of a replica."""

import threading

import pytest

from patchstore import Replica
from patchstore.compact.service import Compactor
from patchstore.errors import StoreUnavailable
from patchstore.format import history, layout, lineage, shortcuts
from patchstore.format.shortcuts import Ends
from patchstore.replicate import copying, service
from patchstore.replicate.replicator import Replicator
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.weights import Run, State, assert_same_bits

NUM_VERSIONS = 20


@pytest.fixture
def source(run: Run, monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    monkeypatch.setattr(copying, "_FIRST_PAUSE_S", 0.0)
    run.open(anchor_every=1000)
    for number in range(NUM_VERSIONS):
        run.train()
        run.publish(number)
    run.close()
    list(Compactor(run.store, anchor_every=16).compact())
    return run.store


@pytest.fixture
def target() -> MemoryStore:
    return MemoryStore("memory://target")


def test_a_replica_has_the_shortcuts_of_its_source(
    source: MemoryStore, target: MemoryStore, run: Run
) -> None:
    list(service.replicate(source, target, threading.Event()))
    assert shortcuts.listed(target) == shortcuts.listed(source) != frozenset()
    assert lineage.read(target, 19).plan() == lineage.read(source, 19).plan()
    tensors: State = {}
    Replica(target, tensors).update(19)
    assert_same_bits(tensors, run.history[19])
    calls = FaultyStore(source)
    replicator = Replicator(calls, target)
    replicator.open()
    assert replicator.copy_shortcuts() == 0
    assert not [key for verb, key in calls.calls if verb == "get" and key.startswith(layout.SHORTCUTS)]


def test_shortcuts_of_versions_that_are_not_here_yet_wait(source: MemoryStore, target: MemoryStore) -> None:
    replicator = Replicator(source, target)
    replicator.open()
    versions = replicator.versions()
    while next(versions).manifest.version < 10:
        pass
    versions.close()
    replicator.copy_shortcuts()
    newest = history.head(target).version
    assert {each for each in shortcuts.listed(source) if each.version <= newest} == shortcuts.listed(target)
    assert newest < NUM_VERSIONS - 1


def test_a_record_comes_after_its_payloads(source: MemoryStore, target: MemoryStore) -> None:
    ours = FaultyStore(target)
    list(service.replicate(source, ours, threading.Event()))
    stored = [key for verb, key in ours.calls if verb in {"put", "upload"}]
    for each in shortcuts.listed(source):
        way = shortcuts.read(source, each).way
        part = way.anchor if each.parent is None else way.delta
        at = stored.index(layout.shortcut_key(each.version, each.parent))
        assert {payload.key for payload in part.payloads} <= set(stored[:at])


def test_what_cannot_be_understood_or_went_away_is_left_out(
    source: MemoryStore, target: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    key = layout.shortcut_key(16, None)
    source.put(key, b"{}")
    list(service.replicate(source, target, threading.Event()))
    assert shortcuts.listed(source) - shortcuts.listed(target) == {Ends(16, None)}
    assert f"a shortcut to version 16 is not copied: {key}" in caplog.text


def test_a_store_that_does_not_answer_is_an_error(source: MemoryStore, target: MemoryStore) -> None:
    theirs = FaultyStore(source, Fault(verb="get", key="shortcuts/*", effect="fail-before", times=None))
    with pytest.raises(StoreUnavailable):
        list(service.replicate(theirs, target, threading.Event()))
    assert history.head(target).version == NUM_VERSIONS - 1
