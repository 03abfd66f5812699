"""Anchors that `compact` added take the place of what versions were rebuilt from, and never too early."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kept_runs import assert_rebuilt, later, rebuilt, versions_stored

from patchstore import Replica, verify
from patchstore.bucket import history, shortcuts
from patchstore.bucket.records import Ends
from patchstore.errors import CorruptObject, StateMismatch, StoreUnavailable, UsageError, VersionRetired
from patchstore.ops.compact.service import Compactor
from patchstore.ops.retention import Retention, collect, retire, tag
from patchstore.read.whole_run import WholeRun
from patchstore.signing import KeySigner
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.copies import copy_of_run
from tests.support.damage import flip, forge, remove
from tests.support.keys import key_pair
from tests.support.weights import Run, State, assert_same_bits

KEPT = [32, 38, 39, 40]
DAY_H = 25.0
RECORD = layout.shortcut_key(32, None)


def compacted(store: Store, every: int = 16) -> set[Ends]:
    return {each for done in Compactor(store, anchor_every=every).compact() for each in done.added}


@pytest.fixture(scope="module")
def made() -> Run:
    """Versions 0 to 40, of which 0 has the only anchor of its own; 16 and 32 have one among the shortcuts."""
    return new_run()


@pytest.fixture
def run(made: Run) -> Run:
    """The same in a store of its own."""
    return copy_of_run(made)


def new_run(count: int = 41, *, is_compacted: bool = True, **options: object) -> Run:
    torch.manual_seed(0)
    run = Run(MemoryStore())
    run.publish_and_close(count, anchor_every=None, **options)
    assert not is_compacted or {Ends(16, None), Ends(32, None)} <= compacted(run.store)
    return run


def test_what_led_to_an_added_anchor_is_deleted_with_the_shortcuts_over_it(run: Run, tmp_path: Path) -> None:
    found = retire(run.store, Retention(keep_last=3), dry_run=False)
    assert found.kept == ((32, 32), (38, 40))
    would = collect(run.store, clock=later(DAY_H))
    done = collect(run.store, dry_run=False, clock=later(DAY_H))
    assert (would.num_objects, would.num_proved) == (done.num_objects, done.num_proved)
    assert done.num_proved == 1
    # 33 to 37 are on the way to 38.
    assert versions_stored(run.store) == set(range(32, 41))
    assert shortcuts.listed(run.store) == {Ends(32, None)}
    assert_rebuilt(run, KEPT, tmp_path)
    for version in KEPT:
        assert verify(run.store, version).version == version
    with pytest.raises(VersionRetired):
        rebuilt(run.store, 37, tmp_path)
    again = collect(run.store, dry_run=False, clock=later(DAY_H))
    assert (again.num_objects, again.num_proved) == (0, 0)
    # Nothing that was deleted is made again, also with anchors at other places.
    assert compacted(run.store) == set()
    assert {each.version for each in compacted(run.store, every=4)} <= set(range(32, 41))
    assert_rebuilt(run, KEPT, tmp_path / "later")


def test_rollups_over_deleted_versions_go_and_others_stay(run: Run, tmp_path: Path) -> None:
    compacted(run.store, every=8)
    assert {Ends(16, 0), Ends(32, 16), Ends(8, 0), Ends(40, 32)} <= shortcuts.listed(run.store)
    retire(run.store, Retention(keep_last=9, keep_every=16), dry_run=False)
    collect(run.store, dry_run=False, clock=later(DAY_H))
    anchors = {Ends(version, None) for version in (16, 32, 40)}
    assert shortcuts.listed(run.store) == {*anchors, Ends(40, 32)}
    assert_rebuilt(run, [0, 16, *range(32, 41)], tmp_path)


def test_an_anchor_counts_a_day_after_it_was_added(run: Run) -> None:
    retire(run.store, Retention(keep_last=3), dry_run=False)
    record = json.loads(run.store.get(RECORD))
    added_at = record["created_at"]
    for created_at in (later(2)().strftime("%Y-%m-%dT%H:%M:%S.000Z"), None):
        record.pop("created_at", None)
        if created_at is not None:
            record["created_at"] = created_at
        run.store.put(RECORD, json.dumps(record).encode())
        found = collect(run.store, clock=later(DAY_H))
        # Version 16 has the nearest anchor that counts; 16 and 24 lose rollups.
        gone = {layout.attempt_of(each)[0] for each in found.keys}  # type: ignore[index]
        assert gone == {*range(16), 16, 24}
        assert not any(each.startswith("anchors/00000016") for each in found.keys)
    run.store.put(RECORD, json.dumps({**record, "created_at": added_at}).encode())
    assert collect(run.store, clock=later(DAY_H)).num_objects > found.num_objects


def test_an_anchor_on_a_way_stays_also_if_this_collector_does_not_count_it(tmp_path: Path) -> None:
    """Another collector, which sees all of it, may have deleted what the way around it needs."""
    run = new_run(is_compacted=False)
    retire(run.store, Retention(keep_last=1), dry_run=False)
    assert {each for each in compacted(run.store) if each.parent is None} == {Ends(16, None), Ends(32, None)}
    (payload,) = run.store.list("anchors/00000032-")

    class Lagging(FaultyStore):
        def list(self, prefix: str = "") -> Iterator[str]:
            return (key for key in super().list(prefix) if key != payload)

    assert collect(run.store, dry_run=False, clock=later(DAY_H)).num_versions == 31
    assert collect(Lagging(run.store), dry_run=False, clock=later(DAY_H)).num_objects == 0
    assert_rebuilt(run, [40], tmp_path)


@pytest.mark.parametrize("damage", ["flip", "remove", "state"])
def test_a_wrong_anchor_takes_the_place_of_nothing(run: Run, damage: str) -> None:
    retire(run.store, Retention(keep_last=3), dry_run=False)
    if damage == "state":
        # Whole, and of the right run, but with other weights: those of version 16.
        (each,) = shortcuts.read(run.store, Ends(16, None)).payloads
        record = json.loads(run.store.get(RECORD))
        record["anchor"]["payloads"] = [{"key": each.key, "size": each.size, "digest": each.digest}]
        run.store.put(RECORD, json.dumps(record).encode())
    else:
        {"flip": flip, "remove": remove}[damage](run.store, Ends(32, None))
    before = set(run.store.list(""))
    if damage == "remove":
        # It does not count, so version 16 has the nearest one.
        assert collect(run.store, dry_run=False, clock=later(DAY_H)).num_proved == 1
        assert 16 in versions_stored(run.store)
        return
    with pytest.raises(CorruptObject, match="added to version 32 is wrong, so nothing was changed"):
        collect(run.store, dry_run=False, clock=later(DAY_H))
    assert set(run.store.list("")) == before


def test_readers_that_began_earlier_or_may_not_list_go_another_way(run: Run) -> None:
    class CannotList(FaultyStore):
        def list(self, prefix: str = "") -> Iterator[str]:
            raise UsageError(f"{self.url}: list {prefix}: access denied")

    class SeesNoShortcutsAtFirst(FaultyStore):
        num = 0

        def list(self, prefix: str = "") -> Iterator[str]:
            self.num += prefix == layout.SHORTCUTS
            return iter(()) if prefix == layout.SHORTCUTS and self.num == 1 else super().list(prefix)

    behind: State = {}
    held = Replica(run.store, behind)
    held.update(3)
    retire(run.store, Retention(keep_last=3), dry_run=False)
    collect(run.store, dry_run=False, clock=later(DAY_H))
    held.update(40)
    assert_same_bits(behind, run.history[40])
    for store in (CannotList(run.store), SeesNoShortcutsAtFirst(run.store)):
        tensors: State = {}
        Replica(store, tensors).update(39)
        assert_same_bits(tensors, run.history[39])


def test_all_versions_are_verified_from_added_anchors_and_these_are_proved(run: Run) -> None:
    retire(run.store, Retention(keep_last=12), dry_run=False)
    collect(run.store, dry_run=False, clock=later(DAY_H))
    header = history.read_header(run.store)
    assert header is not None
    watched = FaultyStore(run.store)
    whole = WholeRun(watched, header, 40, is_collected=True)
    wrong = {each.version for each in whole.verify() if each.error is not None}
    # The delta of 16 leads from 15, which is gone; its anchor is right, and so is all behind it.
    assert wrong == set(range(17))
    read = sorted(key[:16] for verb, key in watched.calls if verb == "get" and key.startswith("anchors/"))
    assert read == ["anchors/00000000", "anchors/00000016", "anchors/00000032"]
    flip(run.store, Ends(32, None))
    whole = WholeRun(run.store, header, 40, is_collected=True)
    assert {each.version for each in whole.verify() if each.error is not None} == {*range(17), *range(32, 41)}


def test_a_branch_that_was_left_needs_no_anchor_of_the_other_one(tmp_path: Path) -> None:
    run = new_run(12, is_compacted=False)
    compacted(run.store, every=8)
    run.go_back(5)
    run.publish_and_close(20, resume=5, anchor_every=None)
    tag(run.store, "left", 10)
    compacted(run.store, every=8)
    retire(run.store, Retention(keep_last=2), dry_run=False)
    collect(run.store, dry_run=False, clock=later(DAY_H))
    newest = max(run.history)
    assert_rebuilt(run, [8, 10, newest - 1, newest], tmp_path)
    # 9 is on the way to 10. The other branch begins at 5, and needs neither.
    assert versions_stored(run.store) & set(range(12)) == {8, 9, 10}


def test_a_signed_version_keeps_a_way_that_its_signature_covers(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    run = new_run(signer=KeySigner(private))
    retire(run.store, Retention(keep_last=1), dry_run=False)
    assert collect(run.store, dry_run=False, clock=later(DAY_H)).num_versions == 0
    assert verify(run.store, 40, required_keys=[public]).version == 40
    for key in run.store.list("signatures/"):
        if layout.signed_version(key) == 40:
            kept = key, run.store.get(key)
        run.store.delete(key)
    assert collect(run.store, dry_run=False, clock=later(DAY_H)).num_versions == 31
    assert_rebuilt(run, [40], tmp_path)
    run.store.put(*kept)
    with pytest.raises(CorruptObject, match="sign before you prune"):
        verify(run.store, 40, required_keys=[public])
    with pytest.raises(CorruptObject, match="sign before you prune"):
        Replica(run.store, {}, required_keys=[public]).update(40)


# They are relied on only after they were read.


@pytest.mark.parametrize("damage", ["flip", "forge"])
def test_a_wrong_anchor_retires_nothing(run: Run, damage: str) -> None:
    {"flip": flip, "forge": forge}[damage](run.store, Ends(32, None))
    before = set(run.store.list(""))
    assert retire(run.store, Retention(keep_last=3)).num_retired
    with pytest.raises(StateMismatch if damage == "forge" else CorruptObject, match=f"Delete {RECORD}"):
        retire(run.store, Retention(keep_last=3), dry_run=False)
    assert set(run.store.list("")) == before
    # What the error says.
    run.store.delete(RECORD)
    compacted(run.store)
    assert retire(run.store, Retention(keep_last=3), dry_run=False).kept == ((32, 32), (38, 40))


@pytest.mark.parametrize("what", ["payload", "time"])
def test_an_anchor_whose_payload_or_time_is_gone_does_not_count(run: Run, what: str) -> None:
    if what == "payload":
        remove(run.store, Ends(32, None))
    else:
        record = json.loads(run.store.get(RECORD))
        del record["created_at"]
        run.store.put(RECORD, json.dumps(record).encode())
    for dry_run in (True, False):
        found = retire(run.store, Retention(keep_last=3), dry_run=dry_run)
        assert found.kept == ((16, 16), (38, 40))
    assert collect(run.store, clock=later(DAY_H)).num_proved == 1


def test_a_record_that_cannot_be_read_is_named_with_what_to_do(run: Run) -> None:
    run.store.put(RECORD, b"garbage")
    for what in (lambda: retire(run.store, Retention(keep_last=3)), lambda: collect(run.store)):
        with pytest.raises(CorruptObject, match=rf"{RECORD}.*delete this record, run `patchstore compact`"):
            what()


def test_only_what_is_relied_on_is_read(run: Run) -> None:
    store = FaultyStore(run.store)
    retire(store, Retention(keep_last=3), dry_run=False)
    read = {key.split("-")[0] for verb, key in store.calls if verb == "get" and key.startswith("anchors/")}
    assert read == {"anchors/00000032"}
    # All that it replaces is retired by now.
    store.calls.clear()
    retire(store, Retention(keep_last=1), dry_run=False)
    assert not [key for verb, key in store.calls if verb == "get" and key.startswith("anchors/")]
    retire(store, Retention(keep_last=1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("effect", ["fail-before", "fail-after"])
def test_a_collector_that_is_killed_at_any_call_leaves_a_way(run: Run, effect: str, tmp_path: Path) -> None:
    original = run
    retire(original.store, Retention(keep_last=3), dry_run=False)
    for skip in range(0, 1000, 3):
        run = copy_of_run(original)
        fault = Fault(verb="*", effect=effect, skip=skip, times=None)  # type: ignore[arg-type]
        try:
            collect(FaultyStore(run.store, fault), dry_run=False, clock=later(DAY_H))
        except StoreUnavailable:
            assert_rebuilt(run, KEPT, tmp_path / str(skip))
        else:
            break
    assert skip > 30
