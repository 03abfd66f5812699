"""Shortcuts lead to the same bits as the versions' own deltas, and cost readers less."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from patchstore import Replica, open_store, replay, verify
from patchstore.bucket import history, lineage, shortcuts
from patchstore.bucket.records import Ends, Plan
from patchstore.cli.main import app
from patchstore.errors import CorruptObject, PublishFailed, StoreUnavailable, UsageError, VersionNotFound
from patchstore.follow.loop import LoopSettings
from patchstore.ops.compact import build, service
from patchstore.ops.compact.service import Compactor
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.copies import before, copy_of, long_run
from tests.support.weights import Run, State, assert_same_bits, rebuilt

NUM_VERSIONS = 41
EVERY = 16


@pytest.fixture
def long(run: Run) -> Run:
    """A run of some versions, one of which changes nothing, with an anchor at version 0 alone."""
    run.open(anchor_every=1000)
    for number in range(NUM_VERSIONS):
        if number != 5:
            run.train()
        run.publish(number)
    run.close()
    return run


def compacted(store: Store, every: int | str = EVERY, **options: str) -> list[Ends]:
    compactor = Compactor(store, anchor_every=every, **options)
    return [each for done in compactor.compact() for each in done.added]


def plan(store: Store, held: int | None, target: int) -> Plan:
    return lineage.read(store, target, held).plan()


@pytest.mark.parametrize("encoding", ["gap", "context", "raw"])
def test_every_way_over_shortcuts_leads_to_the_bits_of_the_version(long: Run, encoding: str) -> None:
    assert len(compacted(long.store, encoding=encoding)) > 5
    for held, target in [(None, 40), (None, 16), (None, 15), (1, 16), (3, 40), (7, 31), (0, 32), (33, 40)]:
        long.assert_reached(target, held)


def test_a_reader_that_came_over_shortcuts_goes_on_with_deltas(long: Run) -> None:
    compacted(long.store)
    tensors: State = {}
    replica = Replica(long.store, tensors)
    for target in (16, 17, 31, 40, 12):
        assert replica.update(target) == history.read_manifest(long.store, target)
        assert_same_bits(tensors, long.history[target])


def test_the_deltas_that_shortcuts_replace_are_verified_still(long: Run) -> None:
    compacted(long.store)
    for target in (16, 32):
        key = history.read_manifest(long.store, target).delta.payloads[0].key
        right = long.store.get(key)
        long.store.put(key, right[:-1] + bytes([right[-1] ^ 1]))
        with pytest.raises(CorruptObject, match=key):
            verify(long.store, target)
        long.store.put(key, right)
        assert verify(long.store, target) == history.read_manifest(long.store, target)


def test_a_late_reader_needs_the_newest_anchor_and_what_came_since(long: Run) -> None:
    before = plan(long.store, None, 40)
    compacted(long.store)
    after = plan(long.store, None, 40)
    assert (before.anchor.version, len(before.deltas)) == (0, 40)
    assert after.anchor.version == 32
    assert [each.version for each in after.deltas] == list(range(33, 41))
    assert plan(long.store, None, 32).deltas == ()


def test_a_reader_far_behind_asks_for_few_objects_and_no_more_bytes(store: MemoryStore) -> None:
    run = long_run(store, 130)
    before = plan(run.store, 1, 128)
    compacted(run.store, every=128)
    watched = FaultyStore(store)
    after = plan(watched, 1, 128)
    assert before.num_requests > 250
    assert after.num_requests <= 40
    assert after.num_bytes <= before.num_bytes
    # What planning asked for: near versions, one listing, and records.
    assert len(watched.calls) <= 60
    run.assert_reached(128, 1)


def test_a_reader_that_is_near_asks_for_no_shortcut(long: Run) -> None:
    compacted(long.store)
    store = FaultyStore(long.store)
    plan(store, 37, 40)
    assert not [key for _, key in store.calls if key.startswith(layout.SHORTCUTS)]


def test_a_reader_that_may_not_list_goes_without_shortcuts(long: Run) -> None:
    compacted(long.store)

    def denied() -> None:
        raise UsageError("access denied")

    assert_same_bits(rebuilt(before(long.store, "list", "*", denied), 40), long.history[40])


def test_again_nothing_is_added_and_new_versions_are(long: Run) -> None:
    compactor = Compactor(long.store, anchor_every=EVERY)
    assert list(compactor.compact())
    assert list(compactor.compact()) == []
    assert compacted(long.store) == []
    long.open(resume=True, anchor_every=1000)
    long.train_versions(10)
    long.close()
    (done,) = compactor.compact()
    assert (done.first, done.last) == (32, 48)
    assert Ends(48, None) in done.added


def test_anchors_are_folders_that_replay_as_they_are(long: Run, tmp_path: Path) -> None:
    compacted(long.store)
    manifest = replay(long.store, 32, out=tmp_path / "out")
    assert manifest.version == 32
    assert verify(long.store, 40).version == 40
    anchor = shortcuts.read(long.store, Ends(32, None)).way.anchor
    assert [each.key.rpartition("/")[2] for each in anchor.payloads] == ["model.safetensors"]


def test_files_beside_the_weights_are_in_each_anchor(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "x"}')
    run.open(files=folder, anchor_every=1000)
    run.train_versions(10)
    run.close()
    assert Ends(8, None) in compacted(run.store, every=8)
    replay(run.store, 8, out=tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "x"}'


def test_the_versions_that_a_trainer_left_are_not_compacted(run: Run) -> None:
    run.open(anchor_every=1000)
    run.train_versions(12)
    run.close()
    left = history.head(run.store).version
    run.go_back(4)
    run.open(resume=4, anchor_every=1000)
    run.train_versions(12)
    run.close()
    compacted(run.store, every=8)
    found = shortcuts.listed(run.store)
    assert found
    assert not [each for each in found if 4 < each.version <= left]
    head = history.head(run.store).version
    run.assert_reached(head, 2)


def test_auto_adds_an_anchor_when_the_deltas_have_its_size(long: Run) -> None:
    size = history.read_manifest(long.store, 0).anchor.num_bytes
    added = compacted(long.store, every="auto")
    anchors = sorted(each.version for each in added if each.parent is None)
    assert anchors
    spent = [history.read_manifest(long.store, v).delta.num_bytes for v in range(1, anchors[0] + 1)]
    assert sum(spent) >= size > sum(spent[:-1])


def test_a_publisher_without_periodic_anchors_leaves_them_to_the_compactor(store: MemoryStore) -> None:
    run = long_run(store, 70)
    assert [each.version for each in history.read_back(run.store, 69) if each.anchor is not None] == [0]
    assert Ends(64, None) in compacted(run.store, every=64)
    run.open(resume="auto", anchor_every=16)
    run.train_versions(10)
    # Counted from version 64, whose anchor is a shortcut.
    anchors = [each.version for each in history.read_back(run.store, 80) if each.anchor is not None]
    assert anchors == [80, 0]


# Killed, at once, and damaged.


@pytest.mark.exhaustive
def test_killed_at_any_write_nothing_is_wrong_and_the_next_completes_it(
    long: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = set(compacted(copy_of(long.store)))
    monkeypatch.setattr("patchstore.stores.tries.ATTEMPTS", 1)
    for at in range(1, 200):
        store = copy_of(long.store)
        faults = [
            Fault(verb=verb, effect="fail-before", times=None, skip=at)
            for verb in ("put", "upload", "delete")
        ]
        try:
            compacted(FaultyStore(store, *faults))
        except (PublishFailed, StoreUnavailable):
            pass
        else:
            break
        for target in (16, 40):
            long.assert_reached(target, 3, store)
        compacted(store)
        assert shortcuts.listed(store) == expected
    assert at > 5


def test_two_at_once_add_each_shortcut_once_and_leave_no_other_object(long: Run) -> None:
    start = threading.Barrier(2)

    def work(_: int) -> set[Ends]:
        start.wait()
        return set(compacted(long.store))

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(work, range(2))
    assert first | second == shortcuts.listed(long.store)
    assert not first & second
    named = set()
    for each in shortcuts.listed(long.store):
        way = shortcuts.read(long.store, each).way
        part = way.anchor if each.parent is None else way.delta
        named |= {payload.key for payload in part.payloads}
    for version in range(NUM_VERSIONS):
        manifest = history.read_manifest(long.store, version)
        for part in (manifest.anchor, manifest.delta):
            named |= {payload.key for payload in part.payloads} if part else set()
    assert named == {key for key in long.store.list() if key.startswith(("anchors/", "deltas/"))}
    assert_same_bits(rebuilt(long.store, 40), long.history[40])


def test_a_wrong_byte_in_a_delta_ends_it_before_a_record_is_created(long: Run) -> None:
    key = history.read_manifest(long.store, 3).delta.payloads[0].key
    data = bytearray(long.store.get(key))
    data[-1] ^= 1
    long.store.put(key, bytes(data))
    with pytest.raises(CorruptObject, match=key):
        compacted(long.store)
    assert shortcuts.listed(long.store) == frozenset()


def test_rollups_that_save_too_little_are_left_out(long: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "WORTH", 0.0)
    assert {each.parent for each in compacted(long.store)} == {None}


# As users call it.


def test_followed_it_waits_for_a_run_and_outlives_a_store_that_fails(run: Run) -> None:
    store = FaultyStore(run.store, Fault(verb="list", key="shortcuts/*", effect="fail-before"))
    stop, settings = threading.Event(), LoopSettings(min_poll_interval_s=0.001, max_poll_interval_s=0.002)
    events = service.follow(Compactor(store, anchor_every=8), stop, settings)
    assert next(events).outcome == "waiting"
    run.open(anchor_every=None)
    run.publish_versions(10)
    assert next(events).outcome == "failed"
    done = next(events)
    assert (done.outcome, done.version) == ("compacted", 8)
    assert {"version": 8, "parent": None} in done.to_dict()["added"]
    stop.set()
    assert list(events) == []


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Store]:
    store = open_store(str(tmp_path / "bucket"))
    long_run(store, 18)
    yield store
    store.close()


def test_the_command_adds_shortcuts(folder: Store, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compact", str(tmp_path / "bucket"), "--anchor-every", "8", "--json"])
    assert done.exit_code == 0, done.output
    events = [json.loads(line) for line in done.output.splitlines()]
    assert [(event["first"], event["last"]) for event in events] == [(0, 8), (8, 16)]
    assert {"version": 16, "parent": None} in events[1]["added"]
    done = CliRunner().invoke(app, ["compact", str(tmp_path / "bucket"), "--anchor-every", "8"])
    assert "0 shortcuts were added" in done.output


@pytest.mark.parametrize("every", ["1", "0", "-3", "x", "", "5000"])
def test_impossible_intervals_are_refused(every: str) -> None:
    with pytest.raises(UsageError, match="every 2 to 4096 deltas, or `auto`"):
        Compactor(MemoryStore(), anchor_every=every)


def test_a_run_that_has_no_version_yet_is_compacted_once_it_has_some(run: Run) -> None:
    run.open(anchor_every=1000)
    compactor = Compactor(run.store, anchor_every=EVERY)
    assert list(compactor.compact()) == []
    run.train_versions(EVERY + 1)
    assert [each for done in compactor.compact() for each in done.added]


def test_an_empty_place_has_nothing_to_compact() -> None:
    with pytest.raises(VersionNotFound, match="holds no run"):
        list(Compactor(MemoryStore()).compact())


def test_other_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="encoding must be one of"):
        Compactor(MemoryStore(), encoding="zip")
    with pytest.raises(UsageError, match="is no folder"):
        Compactor(MemoryStore(), scratch=tmp_path / "none")


def test_tensors_without_bits_of_their_own_are_compared_as_bits(run: Run) -> None:
    """NaN and -0.0 that come and go between the ends of a rollup."""
    run.open(anchor_every=1000)
    for number in range(9):
        with torch.no_grad():
            run.model["embed.weight"][0, number % 3] = [float("nan"), -0.0, 0.0][number % 3]
            run.model["embed.weight"][1, number] = float("nan")
        run.publish(number)
    run.close()
    compacted(run.store, every=8)
    run.assert_reached(8, 0)
