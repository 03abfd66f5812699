"""Shortcuts of a replica. A record there names no payloads that a collector of the replica has deleted."""

from datetime import UTC, datetime, timedelta

import pytest
from replicas import replicate

from patchstore import Replica
from patchstore.bucket import history, lineage, notes, shortcuts
from patchstore.bucket.records import Ends
from patchstore.errors import StoreUnavailable
from patchstore.ops.compact.service import Compactor
from patchstore.ops.replicate import copying
from patchstore.ops.replicate.replicator import Replicator
from patchstore.ops.retention import collect
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.weights import Run, State, assert_same_bits

ANCHOR = Ends(16, None)
RECORD = layout.shortcut_key(16, None)


class Clock:
    """The time, which jumps, for collectors and replicators."""

    def __init__(self) -> None:
        self.hours = 0

    def __call__(self) -> datetime:
        return datetime.now(UTC) + timedelta(hours=self.hours)


@pytest.fixture
def source(run: Run) -> MemoryStore:
    run.open(anchor_every=None)
    run.publish_versions(20)
    run.close()
    list(Compactor(run.store, anchor_every=16).compact())
    return run.store


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(copying, "utc_now", clock)
    monkeypatch.setattr(notes.Began.__init__, "__defaults__", (clock,))
    return clock


def assert_readable(target: Store, run: Run) -> None:
    """Each record names objects that are there, and readers come to the newest version."""
    for ends in shortcuts.listed(target):
        assert not shortcuts.absent(target, shortcuts.read(target, ends).payloads), ends
    tensors: State = {}
    Replica(target, tensors).update(19)
    assert_same_bits(tensors, run.history[19])


def test_a_replica_has_the_shortcuts_of_its_source(source, target, run):
    replicate(source, target)
    assert shortcuts.listed(target) == shortcuts.listed(source) != frozenset()
    assert lineage.read(target, 19).plan() == lineage.read(source, 19).plan()
    assert_readable(target, run)
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
    assert newest < 19


def test_a_record_comes_after_its_payloads(source: MemoryStore, target: MemoryStore) -> None:
    ours = FaultyStore(target)
    replicate(source, ours)
    stored = [key for verb, key in ours.calls if verb in {"put", "upload"}]
    for each in shortcuts.listed(source):
        way = shortcuts.read(source, each).way
        part = way.anchor if each.parent is None else way.delta
        at = stored.index(layout.shortcut_key(each.version, each.parent))
        assert {payload.key for payload in part.payloads} <= set(stored[:at])


def test_what_cannot_be_understood_or_went_away_is_left_out(source, target, caplog):
    source.put(RECORD, b"{}")
    replicate(source, target)
    assert shortcuts.listed(source) - shortcuts.listed(target) == {ANCHOR}
    assert f"a shortcut to version 16 is not copied: {RECORD}" in caplog.text


def test_a_store_that_does_not_answer_is_an_error(source: MemoryStore, target: MemoryStore) -> None:
    theirs = FaultyStore(source, Fault(verb="get", key="shortcuts/*", effect="fail-before", times=None))
    with pytest.raises(StoreUnavailable):
        replicate(theirs, target)
    assert history.head(target).version == 19


# A collector of the replica.


def test_a_replicator_that_slept_before_the_record_copies_the_shortcut_anew(source, target, run, clock):
    class Sleeps(FaultyStore):
        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            if key == RECORD and not clock.hours:
                for _ in range(2):
                    clock.hours += 27
                    collect(target, dry_run=False, clock=clock)
            super().put(key, data, if_absent=if_absent)

    replicate(source, Sleeps(target))
    assert_readable(target, run)
    for _ in range(3):
        collect(target, dry_run=False, clock=clock)
        replicate(source, target)
        assert_readable(target, run)
        clock.hours += 27
    assert shortcuts.listed(target) == shortcuts.listed(source)


def test_what_a_killed_replicator_left_is_not_named_while_a_collector_deletes_it(source, target, run, clock):
    killed = FaultyStore(target, Fault(verb="put", key=RECORD, effect="fail-before", times=None))
    with pytest.raises(StoreUnavailable):
        replicate(source, killed)
    assert collect(target, dry_run=False, clock=clock).num_noted
    clock.hours = 27
    restarted = []

    class Deletes(FaultyStore):
        def delete(self, key: str) -> None:
            if not restarted:
                restarted.append(key)
                replicate(source, target)
            super().delete(key)

    assert collect(Deletes(target), dry_run=False, clock=clock).num_unnamed
    assert restarted
    assert_readable(target, run)
    assert ANCHOR not in shortcuts.listed(target)
    # The next collector forgets what it noted, and then the shortcut is copied.
    for _ in range(2):
        clock.hours += 27
        collect(target, dry_run=False, clock=clock)
        replicate(source, target)
        assert_readable(target, run)
    assert ANCHOR in shortcuts.listed(target)


def test_a_copy_that_takes_more_than_a_day_gets_no_record(source, target, run, clock, caplog):
    (payload,) = source.list("anchors/00000016-")

    class Slow(FaultyStore):
        def upload(self, key: str, *args: object, **options: object) -> None:
            clock.hours += 25 * (key == payload)
            super().upload(key, *args, **options)

    replicate(source, Slow(target))
    assert ANCHOR not in shortcuts.listed(target)
    assert "is copied again later" in caplog.text
    replicate(source, target)
    assert ANCHOR in shortcuts.listed(target)
    assert_readable(target, run)


@pytest.mark.parametrize("damage", ["remove", "garble", "replaced"])
def test_a_shortcut_whose_payload_is_gone_is_copied_again(source, target, run, damage):
    replicate(source, target)
    (payload,) = target.list("anchors/00000016-")
    match damage:
        case "remove":
            target.delete(payload)
        case "garble":
            target.put(RECORD, b"garbage")
        case _:
            # The source's own was made anew, under another name.
            target.delete(payload)
            source.delete(payload)
            list(Compactor(source, anchor_every=16).compact())
            assert source.get(RECORD) != target.get(RECORD)
    replicate(source, target)
    assert target.get(RECORD) == source.get(RECORD)
    assert shortcuts.listed(target) == shortcuts.listed(source)
    assert_readable(target, run)


def test_a_record_that_a_collector_deletes_before_it_is_read_back_is_no_failure(source, target, run):
    fault = Fault(verb="get", key=RECORD, effect="delay")
    deleting = FaultyStore(target, fault, sleep=lambda _: target.delete(RECORD))
    replicate(source, deleting)
    assert RECORD not in target.list("shortcuts/")
    replicate(source, target)
    assert RECORD in target.list("shortcuts/")
    assert_readable(target, run)
