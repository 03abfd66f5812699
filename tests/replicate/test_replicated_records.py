"""Tags and retirements of a replica, and what is deleted there."""

import threading
from pathlib import Path

import pytest

from patchstore import Replica, replay
from patchstore.compact.service import Compactor
from patchstore.errors import CorruptObject, PatchstoreError, VersionRetired
from patchstore.format import history, layout, retired, tags
from patchstore.replicate import copying, service
from patchstore.replicate import replicator as replicators
from patchstore.replicate.replicator import Replicator
from patchstore.retention import Retention, collect, delete_tag, retire, tag
from patchstore.signing import KeySigner, RequiredKeys, stored
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.retention.kept_runs import later, new_run, rebuilt
from tests.support.keys import key_pair
from tests.support.weights import Run, State, assert_same_bits


@pytest.fixture
def run() -> Run:
    """Versions 0 to 9, with anchors at 0, 4 and 8."""
    return new_run(MemoryStore("memory://source"), 10)


@pytest.fixture
def target() -> MemoryStore:
    return MemoryStore("memory://target")


def replicate(source: MemoryStore, target: MemoryStore) -> None:
    list(service.replicate(source, target, threading.Event()))


def versions_of(store: MemoryStore) -> dict[str, int | None]:
    return {name: each.version for name, each in tags.read_newest(store).items()}


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


def test_a_retirement_comes_after_its_versions_and_gives_readers_here_their_day(
    run: Run, target: MemoryStore, tmp_path: Path
) -> None:
    tag(run.store, "best", 6)
    retire(run.store, Retention(keep_last=1), dry_run=False)
    replicator = Replicator(run.store, target)
    replicator.open()
    versions = replicator.versions()
    while next(versions).manifest.version < 4:
        pass
    versions.close()
    replicator.copy_records()
    newest = replicator.newest
    assert newest is not None and newest.version < 9
    # Neither the newest version here, nor what is not here yet.
    assert retired.read(target).up_to(100).keys() == set(range(newest.version)) - {4, 6}
    assert all(layout.manifest_key(v) in set(target.list("")) for v in retired.read(target).up_to(100))
    replicate(run.store, target)
    assert retired.read(target).up_to(100).keys() == retired.read(run.store).up_to(100).keys()
    (ours, *_), (theirs, *_) = retired.read(target).records, retired.read(run.store).records
    assert ours.not_before > theirs.not_before
    with pytest.raises(VersionRetired):
        replay(target, 2, out=tmp_path / "2")


def test_a_replica_is_collected_by_itself_and_keeps_what_it_tagged(
    run: Run, target: MemoryStore, tmp_path: Path
) -> None:
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


def test_what_is_far_behind_holds_a_lease_on_what_it_has_to_copy(
    run: Run, target: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicators, "_LEASE_AFTER_S", -1.0)
    replicator = Replicator(run.store, target)
    replicator.open()
    versions = replicator.versions()
    next(versions)
    assert len(list(run.store.list("leases/"))) == 1
    # Retired at the source long ago, as it seems, and collected while this copies.
    found = history.read_manifest(run.store, 9)
    retired.put(run.store, found.run_id, range(8), later(-30)())
    assert collect(run.store, dry_run=False, clock=later(1)).num_leased == 8
    assert len(list(versions)) == 9
    assert list(run.store.list("leases/")) == []


def newest_of(store: MemoryStore) -> State:
    tensors: State = {}
    Replica(store, tensors).update()
    return tensors


@pytest.mark.parametrize("anchor_every", [4, None])
def test_a_replica_may_be_begun_after_payloads_were_deleted(
    target: MemoryStore, tmp_path: Path, anchor_every: int | None
) -> None:
    run = new_run(MemoryStore("memory://source"), 20, anchor_every=anchor_every)
    if anchor_every is None:
        list(Compactor(run.store, anchor_every=8).compact())
    tag(run.store, "best", 10)
    retire(run.store, Retention(keep_last=2), dry_run=False)
    collect(run.store, dry_run=False, clock=later(25))
    seen: list[int] = []

    class Watched(FaultyStore):
        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            super().put(key, data, if_absent=if_absent)
            if key == layout.HEAD:
                seen.append(history.head(target).version)  # type: ignore[union-attr]

    list(service.replicate(run.store, Watched(target), threading.Event()))
    assert seen[-1] == 19
    assert_same_bits(newest_of(target), run.history[19])
    for version in (10, 18, 19):
        assert_same_bits(rebuilt(target, version, tmp_path), run.history[version])
    with pytest.raises(VersionRetired, match="nearest kept version"):
        replay(target, 3, out=tmp_path / "3")
    assert retired.read(target).up_to(100).keys() == retired.read(run.store).up_to(100).keys()
    # It is a bucket like any other: nothing is missing that a kept version needs.
    assert collect(target, clock=later(60)).num_versions == 0


def test_versions_that_lost_payloads_become_visible_with_one_that_can_be_rebuilt(
    run: Run, target: MemoryStore
) -> None:
    retire(run.store, Retention(keep_last=1), dry_run=False)
    collect(run.store, dry_run=False, clock=later(25))
    replicator = Replicator(run.store, target)
    replicator.open()
    versions = replicator.versions()
    assert next(versions).manifest.version == 0
    newest = history.head(target)
    assert newest is not None and newest.version == 8
    assert_same_bits(newest_of(target), run.history[8])
    assert [each.manifest.version for each in versions] == list(range(1, 10))


def test_a_branch_that_was_given_up_is_left_out(target: MemoryStore, tmp_path: Path) -> None:
    run = new_run(MemoryStore("memory://source"), 8, anchor_every=100)
    for name, tensor in run.history[3].items():
        run.model[name].copy_(tensor)
    run.open(resume=3, anchor_every=100)
    run.publish_versions(3)
    run.close()
    newest = max(run.history)
    retire(run.store, Retention(keep_last=2), dry_run=False)
    collect(run.store, dry_run=False, clock=later(25))
    replicate(run.store, target)
    assert_same_bits(rebuilt(target, newest, tmp_path), run.history[newest])


def test_what_is_lost_and_not_retired_is_still_an_error(run: Run, target: MemoryStore) -> None:
    retire(run.store, Retention(keep_last=1), dry_run=False)
    collect(run.store, dry_run=False, clock=later(25))
    (key,) = run.store.list("deltas/00000009")
    run.store.delete(key)
    with pytest.raises(CorruptObject, match=key):
        replicate(run.store, target)
    newest = history.head(target)
    assert newest is not None and newest.version == 8


def test_with_required_keys_nothing_is_given_up(run: Run, target: MemoryStore, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    header = history.read_header(run.store)
    assert header is not None
    for version in range(10):
        stored.sign_version(run.store, KeySigner(private), header, version)
    retire(run.store, Retention(keep_last=1), dry_run=False)
    collect(run.store, dry_run=False, clock=later(25))
    with pytest.raises(VersionRetired):
        list(service.replicate(run.store, target, threading.Event(), required=RequiredKeys.of([public])))
    assert history.head(target) is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("effect", ["fail-before", "fail-after"])
def test_killed_at_any_call_within_a_gap_the_next_one_completes_it(
    run: Run, effect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_FIRST_PAUSE_S", 0.0)
    retire(run.store, Retention(keep_last=1), dry_run=False)
    collect(run.store, dry_run=False, clock=later(25))
    gone = retired.read(run.store).up_to(100).keys()
    for skip in range(0, 2000, 5):
        target = MemoryStore("memory://target")
        fault = Fault(verb="*", effect=effect, skip=skip, times=None)  # type: ignore[arg-type]
        try:
            list(service.replicate(run.store, FaultyStore(target, fault), threading.Event()))
        except PatchstoreError:
            replicate(run.store, target)
        else:
            break
        assert retired.read(target).up_to(100).keys() == gone
        assert_same_bits(newest_of(target), run.history[9])
        assert collect(target, clock=later(60)).num_versions == 0
    assert skip > 50
