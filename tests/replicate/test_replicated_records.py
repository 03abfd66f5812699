"""Tags and retirements of a replica, and what is deleted there."""

from pathlib import Path

import pytest
from replicas import give_up, go_back, replicate

from patchstore import replay
from patchstore.bucket import history, notes
from patchstore.errors import CorruptObject, PatchstoreError, VersionRetired
from patchstore.ops.compact.service import Compactor
from patchstore.ops.replicate.replicator import Replicator
from patchstore.ops.retention import Retention, collect, delete_tag, retire, tag
from patchstore.signing import KeySigner, RequiredKeys, statement
from patchstore.stores import layout
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.retention.kept_runs import later, new_run, rebuilt
from tests.support.keys import key_pair
from tests.support.weights import Run, assert_same_bits, newest


@pytest.fixture
def run() -> Run:
    """Versions 0 to 9, with anchors at 0, 4 and 8."""
    return new_run(MemoryStore("memory://source"), 10)


def versions_of(store: MemoryStore) -> dict[str, int | None]:
    return {name: each.version for name, each in notes.newest_tags(store).items()}


def test_tags_follow_those_of_the_source_and_ones_own_stay(run: Run, target: MemoryStore) -> None:
    tag(run.store, "best", 3)
    tag(run.store, "last", 9)
    replicate(run.store, target)
    assert versions_of(target) == {"best": 3, "last": 9}
    tag(target, "mine", 5)
    tag(run.store, "best", 6)
    delete_tag(run.store, "last")
    replicate(run.store, target)
    assert versions_of(target) == {"best": 6, "last": None, "mine": 5}
    before = set(target.list(""))
    replicate(run.store, target)
    assert set(target.list("")) == before


def test_a_retirement_comes_after_its_versions_and_gives_readers_here_their_day(run, target, tmp_path):
    tag(run.store, "best", 6)
    retire(run.store, Retention(keep_last=1), dry_run=False)
    replicator = Replicator(run.store, target)
    replicator.open()
    versions = replicator.versions()
    while next(versions).manifest.version < 4:
        pass
    versions.close()
    replicator.copy_records()
    last = replicator.newest
    assert last is not None and last.version < 9
    # Neither the newest version here, nor what is not here yet.
    assert notes.retirements(target).up_to(100).keys() == set(range(last.version)) - {4, 6}
    assert all(layout.manifest_key(v) in set(target.list("")) for v in notes.retirements(target).up_to(100))
    replicate(run.store, target)
    assert notes.retirements(target).up_to(100).keys() == notes.retirements(run.store).up_to(100).keys()
    (ours, *_), (theirs, *_) = notes.retirements(target).records, notes.retirements(run.store).records
    assert ours.not_before > theirs.not_before
    with pytest.raises(VersionRetired):
        replay(target, 2, out=tmp_path / "2")


def test_a_replica_is_collected_by_itself_and_keeps_what_it_tagged(run, target, tmp_path):
    replicate(run.store, target)
    tag(target, "mine", 2)
    retire(run.store, Retention(keep_last=1), dry_run=False)
    replicate(run.store, target)
    assert collect(target, dry_run=False, clock=later(23)).num_objects == 0
    assert collect(target, dry_run=False, clock=later(25)).num_objects > 0
    assert collect(run.store, clock=later(25)).num_objects > 0
    for version in (2, 8, 9):
        assert_same_bits(rebuilt(target, version, tmp_path), run.history[version])
    replicate(run.store, target)
    assert collect(target, clock=later(25)).num_objects == 0


def test_a_tag_of_a_version_that_the_replica_gave_up_is_not_set(run: Run, target: MemoryStore) -> None:
    replicate(run.store, target)
    retire(target, Retention(keep_last=1), dry_run=False)
    tag(run.store, "best", 3)
    replicate(run.store, target)
    assert versions_of(target) == {}


def test_if_nothing_is_new_no_record_is_read_again(run: Run, target: MemoryStore) -> None:
    tag(run.store, "best", 3)
    source = FaultyStore(run.store)
    replicator = Replicator(source, target)
    replicator.open()
    list(replicator.versions())
    assert replicator.copy_records() == 1
    source.calls.clear()
    assert replicator.copy_records() == 0
    assert source.calls == [("list", layout.TAGS), ("list", layout.RETIRED)]


@pytest.mark.parametrize("anchor_every", [4, None])
def test_a_replica_may_be_begun_after_payloads_were_deleted(target, tmp_path, anchor_every):
    run = new_run(MemoryStore("memory://source"), 20, anchor_every=anchor_every)
    if anchor_every is None:
        list(Compactor(run.store, anchor_every=8).compact())
    tag(run.store, "best", 10)
    # A branch that is given up is left out.
    branch = go_back(run, 15, 5)
    give_up(run.store)
    seen: list[int] = []

    class Watched(FaultyStore):
        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            super().put(key, data, if_absent=if_absent)
            if key == layout.HEAD:
                seen.append(history.head(target).version)

    replicate(run.store, Watched(target))
    assert seen[-1] == branch[-1]
    assert_same_bits(newest(target), run.history[branch[-1]])
    for version in (10, *branch[-2:]):
        assert_same_bits(rebuilt(target, version, tmp_path), run.history[version])
    with pytest.raises(VersionRetired, match="nearest kept version"):
        replay(target, 3, out=tmp_path / "3")
    assert notes.retirements(target).up_to(100).keys() == notes.retirements(run.store).up_to(100).keys()
    # It is a bucket like any other: nothing is missing that a kept version needs.
    assert collect(target, clock=later(60)).num_versions == 0


def test_versions_that_lost_payloads_become_visible_with_one_that_can_be_rebuilt(run, target):
    give_up(run.store, 1)
    replicator = Replicator(run.store, target)
    replicator.open()
    versions = replicator.versions()
    assert next(versions).manifest.version == 0
    assert history.head(target).version == 8
    assert_same_bits(newest(target), run.history[8])
    assert [each.manifest.version for each in versions] == list(range(1, 10))


def test_what_is_lost_and_not_retired_is_still_an_error(run: Run, target: MemoryStore) -> None:
    give_up(run.store, 1)
    (key,) = run.store.list("deltas/00000009")
    run.store.delete(key)
    with pytest.raises(CorruptObject, match=key):
        replicate(run.store, target)
    assert history.head(target).version == 8


def test_with_required_keys_nothing_is_given_up(run: Run, target: MemoryStore, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    header = history.read_header(run.store)
    for version in range(10):
        statement.sign_version(run.store, KeySigner(private), header, version)
    give_up(run.store, 1)
    with pytest.raises(VersionRetired):
        replicate(run.store, target, RequiredKeys.of([public]))
    assert history.head(target) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("effect", ["fail-before", "fail-after"])
def test_killed_at_any_call_within_a_gap_the_next_one_completes_it(run, effect, monkeypatch):
    give_up(run.store, 1)
    gone = notes.retirements(run.store).up_to(100).keys()
    for skip in range(0, 2000, 5):
        target = MemoryStore("memory://target")
        fault = Fault(verb="*", effect=effect, skip=skip, times=None)
        try:
            replicate(run.store, FaultyStore(target, fault))
        except PatchstoreError:
            replicate(run.store, target)
        else:
            break
        assert notes.retirements(target).up_to(100).keys() == gone
        assert_same_bits(newest(target), run.history[9])
        assert collect(target, clock=later(60)).num_versions == 0
    assert skip > 50
