"""Which versions are retired, what readers hear of it, and which payloads are deleted."""

from pathlib import Path

import pytest
from kept_runs import assert_rebuilt, later, new_run, rebuilt

from patchstore import Replica, verify
from patchstore.errors import (
    CorruptObject,
    UnsupportedFormat,
    UsageError,
    VersionNotFound,
    VersionRetired,
)
from patchstore.format import history, layout, planning, records, retired, tags
from patchstore.format.times import CLOCK_MARGIN
from patchstore.retention import Retention, collect, delete_tag, retire, tag
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import FaultyStore
from tests.support.weights import State, assert_same_bits, newest


def objects(store: MemoryStore) -> set[str]:
    return set(store.list(""))


def test_retiring_writes_only_if_it_is_told_to() -> None:
    run = new_run(MemoryStore(), 6)
    before = objects(run.store)
    found = retire(run.store, Retention(keep_last=1))
    assert found.retired == ((0, 3),)
    assert found.not_before is None
    assert objects(run.store) == before
    again = retire(run.store, Retention(keep_last=1), dry_run=False)
    assert (again.retired, again.num_retired) == (((0, 3),), 4)
    assert objects(run.store) - before == {"retired/00000000.json"}
    assert retire(run.store, Retention(keep_last=1), dry_run=False).num_retired == 0
    assert objects(run.store) - before == {"retired/00000000.json"}


def test_the_head_tagged_versions_and_the_anchors_of_what_is_kept_are_never_retired() -> None:
    run = new_run(MemoryStore(), 15)
    tag(run.store, "best", 6)
    found = retire(run.store, Retention(keep_last=2, keep_every=9), dry_run=False)
    # 14 and 13 with anchor 12; 9 with anchor 8; 0; 6 with anchor 4.
    assert found.kept == ((0, 0), (4, 4), (6, 6), (8, 9), (12, 14))
    assert found.retired == ((1, 3), (5, 5), (7, 7), (10, 11))


def test_versions_of_the_last_days_are_kept() -> None:
    run = new_run(MemoryStore(), 6)
    assert retire(run.store, Retention(keep_days=1), clock=later(25)).num_retired == 0
    assert retire(run.store, Retention(keep_days=1), clock=later(26.5)).retired == ((0, 3),)


def test_a_policy_that_keeps_nothing_or_says_nonsense_is_refused() -> None:
    for rules in ({}, {"keep_last": 0}, {"keep_last": True}, {"keep_every": -1}, {"keep_days": float("nan")}):
        with pytest.raises(UsageError):
            Retention(**rules)  # type: ignore[arg-type]


def test_a_policy_without_tags_refuses_rather_than_retire_a_tagged_version() -> None:
    run = new_run(MemoryStore(), 6)
    tag(run.store, "best", 1)
    with pytest.raises(UsageError, match="best"):
        retire(run.store, Retention(keep_last=1, keep_tags=False), dry_run=False)
    assert retired.read(run.store).records == ()


def test_a_retired_version_is_refused_with_the_nearest_one_that_is_kept(tmp_path: Path) -> None:
    run = new_run(MemoryStore(), 14)
    retire(run.store, Retention(keep_last=3), dry_run=False)
    for version, nearest in ((0, 8), (7, 8), (9, 8), (10, 11)):
        with pytest.raises(VersionRetired, match=f"nearest kept version is {nearest}$"):
            rebuilt(run.store, version, tmp_path)
        with pytest.raises(VersionRetired):
            verify(run.store, version)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(VersionRetired):
        tag(run.store, "late", 3)
    assert tags.read_all(run.store) == {}


def test_what_is_collected_is_what_no_kept_version_needs(tmp_path: Path) -> None:
    run = new_run(MemoryStore(), 14)
    tag(run.store, "best", 6)
    retire(run.store, Retention(keep_last=3), dry_run=False)
    before = objects(run.store)
    assert collect(run.store, dry_run=False, clock=later(23)).num_objects == 0
    found = collect(run.store, dry_run=False, clock=later(24.1))
    assert objects(run.store) == before - set(found.keys)
    gone = {layout.attempt_of(key)[0] for key in found.keys}  # type: ignore[index]
    # 5 is on the way to the tag, 9 and 10 on the way to 11.
    assert gone == {0, 1, 2, 3, 7}
    assert_rebuilt(run, [4, 6, 8, 11, 12, 13], tmp_path)
    for version in (4, 6, 8, 11, 12, 13):
        verify(run.store, version)
    assert {layout.manifest_key(version) for version in range(14)} <= objects(run.store)
    assert collect(run.store, dry_run=False, clock=later(24.1)).num_objects == 0


def test_a_replica_behind_retired_versions_goes_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "REQUEST_BYTES", 0)
    monkeypatch.setattr(records, "REQUEST_BYTES", 0)
    run = new_run(MemoryStore(), 10)
    tensors: State = {}
    replica = Replica(run.store, tensors)
    replica.update(1)
    # The deltas cost less than the anchor of version 8, and most of them are deleted.
    assert replica.stage(9).plan.anchor is None
    retire(run.store, Retention(keep_last=1), dry_run=False)
    collect(run.store, dry_run=False, clock=later(25))
    staged = replica.stage(9)
    assert staged.plan.anchor is not None
    head = replica.update()
    assert_same_bits(tensors, run.history[head.version])
    with pytest.raises(VersionRetired):
        replica.update(2)
    assert replica.held == head.version
    assert_same_bits(tensors, run.history[head.version])


def test_a_payload_that_is_lost_without_a_retirement_is_still_corrupt(tmp_path: Path) -> None:
    run = new_run(MemoryStore(), 14)
    retire(run.store, Retention(keep_last=3), dry_run=False)
    found = history.read_manifest(run.store, 12)
    assert found.anchor is not None
    run.store.delete(found.anchor.payloads[0].key)
    with pytest.raises(CorruptObject):
        rebuilt(run.store, 13, tmp_path)


def test_a_follower_of_the_head_asks_for_no_more_than_before() -> None:
    run = new_run(MemoryStore(), 6)
    retire(run.store, Retention(keep_last=1), dry_run=False)
    watched = FaultyStore(run.store)
    tensors: State = {}
    Replica(watched, tensors).update()
    assert_same_bits(tensors, newest(run.store))
    asked = {key.partition("/")[0] for _, key in watched.calls}
    assert asked.isdisjoint({"retired", "tags", "leases"})
    assert {key for verb, key in watched.calls if verb == "list"} <= {"shortcuts/"}


def test_a_tag_stands_for_its_version_and_moves(tmp_path: Path) -> None:
    run = new_run(MemoryStore(), 3)
    tag(run.store, "best", 1)
    assert_same_bits(rebuilt(run.store, "best", tmp_path), run.history[1])
    assert verify(run.store, "best").version == 1
    tag(run.store, "best", 2)
    assert tags.version_of(run.store, "best") == 2
    assert delete_tag(run.store, "best").version == 2
    with pytest.raises(VersionNotFound, match="best"):
        verify(run.store, "best")
    with pytest.raises(VersionNotFound):
        delete_tag(run.store, "best")
    tag(run.store, "best", 0)
    assert {name: each.version for name, each in tags.read_all(run.store).items()} == {"best": 0}


@pytest.mark.parametrize(
    "name", ["", "12", "-1", "head", "HEAD", "a/b", "a b", "é", ".", "1e5", "x" * 101, "a\n"]
)
def test_a_name_that_could_mean_something_else_is_refused(name: str) -> None:
    run = new_run(MemoryStore(), 1)
    with pytest.raises(UsageError):
        tag(run.store, name, 0)
    assert list(run.store.list("tags/")) == []


def test_a_tag_of_a_version_that_does_not_exist_is_refused() -> None:
    run = new_run(MemoryStore(), 1)
    with pytest.raises(VersionNotFound):
        tag(run.store, "best", 1)
    with pytest.raises(UsageError):
        tag(run.store, "best", "0")  # type: ignore[arg-type]


def test_attempts_that_no_manifest_names_are_noted_and_deleted_in_a_later_pass() -> None:
    run = new_run(MemoryStore(), 4)
    lost = {
        "deltas/00000002-lost/00001-of-00001.safetensors",
        "states/00000002-lost.sums",
        "pieces/00000003-x/1",
    }
    # A publisher that sleeps may still commit this one.
    coming = {"deltas/00000004-next/00001-of-00001.safetensors", "states/00000004-next.sums"}
    odd = {"deltas/odd/file"}
    for key in lost | coming | odd:
        run.store.put(key, b"x")
    assert collect(run.store).num_noted == 3
    assert not list(run.store.list("unnamed/"))
    first = collect(run.store, dry_run=False)
    assert (first.num_objects, first.num_noted) == (0, 3)
    margin_h = CLOCK_MARGIN.total_seconds() / 3600
    assert collect(run.store, dry_run=False, clock=later(23.9 + margin_h)).num_objects == 0
    last = collect(run.store, dry_run=False, clock=later(24.1 + margin_h))
    assert set(last.keys) == lost
    assert last.num_unnamed == 3
    assert coming | odd <= objects(run.store)
    collect(run.store, dry_run=False, clock=later(24.1 + margin_h))
    assert not list(run.store.list("unnamed/"))


def test_a_payload_that_an_object_of_an_unknown_kind_names_stays() -> None:
    run = new_run(MemoryStore(), 6)
    manifest = history.read_manifest(run.store, 2)
    assert manifest.delta is not None
    kept = manifest.delta.payloads[0].key
    run.store.put("shortcuts/00000002.json", f'{{"a": [{{"key": "{kept}"}}]}}'.encode())
    run.store.put("shortcuts/rollup.safetensors", b"\0" * 2_000_000)
    retire(run.store, Retention(keep_last=1), dry_run=False)
    found = collect(run.store, dry_run=False, clock=later(25))
    assert found.num_objects
    assert kept in objects(run.store)


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("retired/00000000.json", b"{}"),
        ("retired/00000000.json", b'{"format_version": 2}'),
        ("retired/other.json", b"{}"),
        ("tags/best/1.json", b"{}"),
        ("tags/12/00000000.json", b"{}"),
        ("leases/x/notes.txt", b""),
        ("leases/x/00000000.json", b'{"format_version": 1, "kind": "promise", "run_id": "r"}'),
        ("unnamed/00000000.json", b"[]"),
        ("unnamed/new/00000000.json", b"{}"),
    ],
)
def test_a_record_that_cannot_be_understood_stops_the_collector(key: str, data: bytes) -> None:
    run = new_run(MemoryStore(), 6)
    run.store.put(key, data)
    before = objects(run.store)
    with pytest.raises((CorruptObject, UnsupportedFormat)):
        collect(run.store, dry_run=False, clock=later(100))
    assert objects(run.store) == before


def test_a_missing_manifest_stops_both() -> None:
    run = new_run(MemoryStore(), 6)
    run.store.delete(layout.manifest_key(2))
    with pytest.raises(CorruptObject, match="version 2"):
        retire(run.store, Retention(keep_last=1), dry_run=False)
    with pytest.raises(CorruptObject, match="version 2"):
        collect(run.store, dry_run=False)


def test_a_clock_that_is_far_behind_is_refused_and_an_hour_is_not() -> None:
    run = new_run(MemoryStore(), 6)
    retire(run.store, Retention(keep_last=1), dry_run=False, clock=later(-1))
    with pytest.raises(UsageError, match="clock"):
        retire(run.store, Retention(keep_last=1), clock=later(-3))
    with pytest.raises(UsageError, match="clock"):
        collect(run.store, clock=later(-3))
