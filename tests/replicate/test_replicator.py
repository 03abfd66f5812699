"""A bucket that is kept equal to another."""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from replicas import assert_equal, assert_whole, objects

from patchstore import Publisher, Replica, verify
from patchstore.bucket import history, notes
from patchstore.errors import (
    CorruptObject,
    IsReplica,
    PatchstoreError,
    RunExists,
    StoreReplaced,
    StoreUnavailable,
    UnsupportedFormat,
    UsageError,
    VersionConflict,
    VersionNotFound,
)
from patchstore.ops.replicate import copying
from patchstore.ops.replicate.copying import Stopped
from patchstore.ops.replicate.replicator import Replicator
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.weights import Run, assert_same_bits

NOW = "2026-01-31T12:00:00.000Z"


def replicated(source: Store, target: Store) -> list[int]:
    """Copy what the target lacks; returns the versions."""
    replicator = Replicator(source, target)
    replicator.open()
    found = [done.manifest.version for done in replicator.versions()]
    replicator.check_source()
    return found


def test_a_replica_has_every_version_and_nothing_that_no_version_names(source, target, run: Run) -> None:
    assert replicated(source, target) == [0, 1, 2, 3, 4, 5]
    assert_equal(source, target)
    for version, state in run.history.items():
        tensors: dict[str, torch.Tensor] = {}
        Replica(target, tensors).update(version)
        assert_same_bits(tensors, state)
    assert verify(target).version == 5
    assert replicated(source, target) == []


def test_bytes_and_versions_are_told(source, target) -> None:
    replicator = Replicator(source, target)
    replicator.open()
    copied = replicator.versions()
    done = [next(copied)]
    # head.json of the source names version 5, and the next slot, 1, is there: that is no gap.
    replicator.check_source()
    done += copied
    sizes = [sum(each.size for each in found.manifest.objects) for found in done]
    assert [found.num_bytes for found in done[:4]] == sizes[:4]
    # Version 5, a claim, names the sums of its parent. Whichever asked first has their bytes.
    assert done[5].manifest.objects == [done[4].manifest.state.sums]
    assert done[4].num_bytes + done[5].num_bytes == sizes[4]


def test_each_payload_is_read_once_and_each_manifest_comes_after_all_it_names(source, target) -> None:
    theirs, ours = FaultyStore(source), FaultyStore(target)
    replicated(theirs, ours)
    reads = Counter(key for verb, key in theirs.calls if verb == "get")
    payloads = {each.key for m in history.read_back(source, 5) for each in m.objects}
    assert {reads[key] for key in payloads} == {1}
    assert {reads[layout.manifest_key(version)] for version in range(1, 5)} == {1}
    stored = [key for verb, key in ours.calls if verb in {"put", "upload"}]
    for version in range(6):
        at = stored.index(layout.manifest_key(version))
        assert {each.key for each in history.read_manifest(source, version).objects} <= set(stored[:at])
    # The mark is there before anything that a publisher would take for a run.
    kept = [key for key in stored if not key.startswith(layout.PROBES)]
    assert kept[:2] == [layout.REPLICA, layout.HEADER]


def test_a_new_version_costs_a_replica_what_it_has_and_nothing_costs_one_read(source, target, run) -> None:
    theirs = FaultyStore(source)
    replicator = Replicator(theirs, target)
    replicator.open()
    list(replicator.versions())
    theirs.calls.clear()
    assert list(replicator.versions()) == []
    assert theirs.calls == [("get", layout.manifest_key(6))]
    run.open(resume=True)
    run.train()
    run.publish(9)
    assert [done.manifest.version for done in replicator.versions()] == [6, 7]
    assert_equal(source, target)


# Killed, lost and wrong.


class Killed(BaseException):
    """The process is gone."""


class Mortal(FaultyStore):
    """A store whose user is killed when it writes ``key``, before or after that is done.

    Several threads write objects, so their order differs from run to run. ``written`` lists the keys.
    """

    def __init__(self, inner: Store, key: str | None, *, after: bool) -> None:
        super().__init__(inner)
        self.key, self.after = key, after
        self.written: list[str] = []
        self.dead = False
        self.guard = threading.Lock()

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self._maybe(key, lambda: super(Mortal, self).put(key, data, if_absent=if_absent))

    def upload(self, key: str, chunks) -> None:
        self._maybe(key, lambda: super(Mortal, self).upload(key, chunks))

    def _maybe(self, key: str, act: Callable[[], None]) -> None:
        with self.guard:
            if self.dead or (key == self.key and not self.after):
                self.dead = True
                raise Killed
            act()
            self.written.append(key)
            if key == self.key:
                self.dead = True
                raise Killed


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_write_a_replica_is_whole_and_is_completed(source, after: bool, monkeypatch) -> None:
    monkeypatch.setattr("patchstore.ops.replicate.replicator.check_create_only", lambda store: None)
    unharmed = Mortal(MemoryStore(f"memory://unharmed-{after}"), None, after=after)
    replicated(source, unharmed)
    keys = list(dict.fromkeys(unharmed.written))
    assert len(keys) >= 20
    seen = set()
    for number, key in enumerate(keys):
        target = MemoryStore(f"memory://killed-{after}-{number}")
        with pytest.raises(Killed):
            replicated(source, Mortal(target, key, after=after))
        seen.add(assert_whole(source, target))
        with pytest.raises(IsReplica) if layout.REPLICA in objects(target) else nullcontext():
            notes.check_writable(target)
        replicated(source, target)
        assert_equal(source, target)
    assert seen == {0, 1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("seed", range(12))
def test_a_replica_becomes_equal_over_stores_that_fail_and_spoil(source, target, seed: int) -> None:
    theirs = FaultyStore(
        source,
        Fault(verb="get", effect="fail-before", times=None, chance=0.1),
        Fault(verb="get", key="*/*/*", effect="flip", times=None, chance=0.1),
        Fault(verb="get", key="*/*/*", effect="truncate", times=None, chance=0.05),
        seed=seed,
    )
    ours = FaultyStore(
        target,
        Fault(verb="put", key="[!p]*", effect="fail-before", times=None, chance=0.1),
        Fault(verb="put", key="[!p]*", effect="fail-after", times=None, chance=0.1),
        Fault(verb="put", key="[!ph]*", effect="exists", times=None, chance=0.1),
        Fault(verb="upload", effect="fail-after", times=None, chance=0.1),
        Fault(verb="upload", effect="truncate", times=2, chance=0.1),
        Fault(verb="size", effect="fail-before", times=None, chance=0.05),
        seed=seed + 100,
    )
    for _ in range(200):
        try:
            replicated(theirs, ours)
            break
        except (StoreUnavailable, CorruptObject):
            # A truncated upload may be seen for a moment, but no version names it.
            versions = [v for v in map(layout.manifest_version, objects(target)) if v is not None]
            for version in versions:
                for wanted in history.read_manifest(target, version).objects:
                    assert target.get(wanted.key) == source.get(wanted.key)
    assert_equal(source, target)


FIRST, SECOND = "anchors/00000000", "deltas/00000002"


@pytest.mark.parametrize(
    ("key", "change", "error", "says", "newest"),
    [
        (FIRST, None, CorruptObject, FIRST, None),
        (FIRST, lambda data: data + b"x", CorruptObject, FIRST, None),
        (FIRST, lambda data: data[:-1], CorruptObject, FIRST, None),
        (
            SECOND,
            lambda data: bytes([data[0] ^ 1]) + data[1:],
            CorruptObject,
            f"memory://.*{SECOND}.* should have digest",
            1,
        ),
        (
            layout.manifest_key(3),
            lambda data: data.replace(b'"format_version": 1', b'"format_version": 2'),
            UnsupportedFormat,
            "format version 2",
            2,
        ),
        (
            layout.manifest_key(2),
            lambda data: data.replace(b'"step": 2', b'"step": 3'),
            CorruptObject,
            "not the manifest that version 3 names",
            2,
        ),
        (layout.manifest_key(3), None, CorruptObject, "versions were removed", 2),
    ],
)
def test_what_is_wrong_at_the_source_is_never_stored_and_later_versions_wait(
    source, target, key, change, error, says, newest
) -> None:
    (key,) = [each for each in source.list(key) if b"of a killed" not in source.get(each)]
    right = source.get(key)
    source.delete(key)
    if change is not None:
        source.put(key, change(right))
    with pytest.raises(error, match=says):
        replicated(source, target)
    head = history.head(target)
    assert (None if head is None else head.version) == newest
    assert key not in objects(target) or layout.manifest_version(key) == newest
    source.put(key, right)
    if layout.manifest_version(key) != newest:
        assert replicated(source, target)[-1] == 5
        assert_equal(source, target)


def test_what_the_target_has_is_verified_and_only_replaced_if_it_is_wrong(source, target) -> None:
    first = history.read_manifest(source, 0)
    anchor, sums = first.anchor.payloads[0], first.state.sums
    target.put(anchor.key, b"x" * anchor.size)
    target.put(sums.key, source.get(sums.key))
    theirs = FaultyStore(source)
    replicated(theirs, target)
    assert ("get", anchor.key) in theirs.calls
    assert ("get", sums.key) not in theirs.calls
    assert_equal(source, target)


def test_half_an_upload_that_the_store_kept_does_not_stop_the_next_replicator(source, target) -> None:
    broken = FaultyStore(target, Fault(verb="upload", key="anchors/*", effect="truncate", times=None))
    with pytest.raises(StoreUnavailable, match="are stored"):
        replicated(source, broken)
    assert history.head(target) is None
    replicated(source, target)
    assert_equal(source, target)


def test_fields_of_later_releases_are_copied_byte_for_byte(source, target) -> None:
    # The last one: its digest is named by none.
    key = layout.manifest_key(5)
    source.put(key, source.get(key).replace(b"{", b'{"added_later": [1, 2],', 1))
    replicated(source, target)
    assert target.get(key) == source.get(key)


@pytest.mark.parametrize("threads", [2, 5])
def test_replicators_that_write_at_once_do_no_harm(source, target, threads: int) -> None:
    start = threading.Barrier(threads)
    errors: list[BaseException] = []

    def work() -> None:
        start.wait()
        try:
            replicated(source, target)
        except BaseException as exc:  # noqa: BLE001
            errors.append(exc)

    every = [threading.Thread(target=work) for _ in range(threads)]
    for each in every:
        each.start()
    for each in every:
        each.join()
    assert errors == []
    assert_equal(source, target)


def test_a_stop_ends_a_copy_between_two_parts(source, target, monkeypatch) -> None:
    stop = threading.Event()
    replicator = Replicator(source, target, stop=stop)
    replicator.open()
    real = copying.until_stopped

    def until(event, chunks):
        stop.set()
        return real(event, chunks)

    monkeypatch.setattr(copying, "until_stopped", until)
    with pytest.raises(Stopped):
        list(replicator.versions())
    assert assert_whole(source, target) == 0
    replicated(source, target)
    assert_equal(source, target)


# What is refused.


def another_run(store: Store) -> None:
    with Publisher(store, {"w": torch.zeros(3)}) as publisher:
        publisher.publish_patch(0).result()


def hold_another_run(source: Store, target: Store) -> None:
    another_run(target)


def hold_a_copy(source: Store, target: Store) -> None:
    for key, data in objects(source).items():
        target.put(key, data)


def be_another_replica(source: Store, target: Store) -> None:
    other = MemoryStore("memory://other")
    another_run(other)
    replicated(other, target)


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (hold_another_run, r"memory://target holds run .* already and is no replica"),
        # Without a mark.
        (hold_a_copy, "holds this run already and is no replica"),
        (be_another_replica, r"is a replica of run .* \(from memory://other\)"),
    ],
)
def test_a_place_that_holds_something_else_is_refused_and_left_as_it_is(source, target, prepare, says):
    prepare(source, target)
    before = objects(target)
    with pytest.raises(RunExists, match=says):
        replicated(source, target)
    assert objects(target) == before


def test_a_source_without_a_run_and_a_source_that_is_the_target_are_refused(source, target) -> None:
    with pytest.raises(VersionNotFound, match="holds no run"):
        replicated(target, MemoryStore("memory://empty"))
    assert objects(target) == {}
    with pytest.raises(UsageError, match="cannot be a replica of itself"):
        Replicator(source, source)


def test_a_publisher_refuses_a_replica_and_writes_nothing_there(source, target, run: Run) -> None:
    replicated(source, target)
    before = objects(target)
    for resume in (False, True, "auto", "anchor", 3):
        with pytest.raises(IsReplica, match="is a replica of memory://: publish there"):
            Publisher(target, run.model, resume=resume)
    assert objects(target) == before


def test_a_promoted_replica_is_published_to_and_replicated_to_no_more(source, target, run: Run) -> None:
    replicated(source, target)
    mark, newest = notes.promote(target, NOW, dry_run=False)
    assert (mark.promoted_at, newest.version) == (NOW, 5)
    # Again, as after a lost answer: the time stays.
    assert notes.promote(target, "2027-01-01T00:00:00.000Z", dry_run=False)[0] == mark
    publisher = Publisher(target, run.model, resume=True)
    run.train()
    assert publisher.publish_patch(9).result().version == 7
    publisher.close()
    assert verify(target).version == 7
    with pytest.raises(UsageError, match=f"was promoted at {NOW}"):
        replicated(source, target)
    # The source may be replicated elsewhere, and so may the promoted one.
    again = MemoryStore("memory://again")
    replicated(target, again)
    assert_equal(target, again)
    assert notes.read_mark(again).source == "memory://target"


def test_a_replicator_whose_target_is_promoted_meanwhile_commits_nothing_more(source, target, run) -> None:
    replicator = Replicator(source, target)
    replicator.open()
    copied = replicator.versions()
    assert [next(copied).manifest.version for _ in range(2)] == [0, 1]
    notes.promote(target, NOW, dry_run=False)
    with pytest.raises(UsageError, match="was promoted"):
        next(copied)
    assert history.head(target).version == 1
    with Publisher(target, run.model, resume="anchor") as publisher:
        publisher.publish_patch(9).result()
    # It has versions of its own now, which says nothing of the source.
    with pytest.raises(UsageError, match="was promoted"):
        replicator.check_source()


def test_a_version_that_a_publisher_took_in_the_target_ends_the_replicator(source, target, run: Run) -> None:
    replicator = Replicator(source, target)
    replicator.open()
    copied = replicator.versions()
    assert [next(copied).manifest.version for _ in range(2)] == [0, 1]
    # As if it was promoted between the replicator's look at the mark and its commit.
    mark = target.get(layout.REPLICA)
    notes.promote(target, NOW, dry_run=False)
    with Publisher(target, run.model, resume="anchor"):
        pass
    target.put(layout.REPLICA, mark)
    with pytest.raises(VersionConflict, match="another version 2 than memory://: a publisher wrote there"):
        list(copied)
    assert history.read_manifest(target, 2).writer.epoch == 2


def test_only_a_replica_with_a_version_is_promoted(source, target) -> None:
    with pytest.raises(UsageError, match="is no replica"):
        notes.promote(source, NOW, dry_run=False)
    with pytest.raises(UsageError, match="is no replica"):
        notes.promote(target, NOW, dry_run=False)
    Replicator(source, target).open()
    with pytest.raises(UsageError, match="without a version"):
        notes.promote(target, NOW, dry_run=False)
    with pytest.raises(IsReplica):
        notes.check_writable(target)


# Sources that are not what they were.


@pytest.mark.parametrize("what", ["emptied", "set back", "another run"])
def test_a_source_that_was_emptied_or_set_back_leaves_the_replica(source, target, what: str) -> None:
    replicated(source, target)
    before = objects(target)
    for key in list(source.list()):
        if what != "set back" or key in {layout.HEAD, layout.manifest_key(5)}:
            source.delete(key)
    if what == "another run":
        another_run(source)
    expected: type[PatchstoreError]
    expected = {"emptied": VersionNotFound, "set back": StoreReplaced, "another run": RunExists}[what]
    with pytest.raises(expected):
        replicated(source, target)
    assert objects(target) == before


def test_a_source_that_is_emptied_and_begun_anew_meanwhile_is_noticed(source, target) -> None:
    replicator = Replicator(source, target)
    replicator.open()
    copied = replicator.versions()
    next(copied)
    copied.close()
    for key in list(source.list()):
        source.delete(key)
    assert list(replicator.versions()) == []
    with pytest.raises(StoreReplaced, match="lacks version 0"):
        replicator.check_source()
    with Publisher(source, {"w": torch.zeros(3)}) as publisher:
        for step in range(2):
            publisher.publish_patch(step).result()
    with pytest.raises(StoreReplaced, match="and had run"):
        list(replicator.versions())
    assert history.head(target).version == 0


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", CorruptObject),
        (b"[]", CorruptObject),
        (b"{}", CorruptObject),
        (b"x" * 200_000, CorruptObject),
        (b'{"format_version": 2}', UnsupportedFormat),
        (b'{"format_version": 1, "run_id": 5, "source": "x", "created_at": "y"}', CorruptObject),
    ],
)
def test_a_mark_that_cannot_be_understood_is_refused_by_all(source, target, data: bytes, error) -> None:
    replicated(source, target)
    target.put(layout.REPLICA, data)
    with pytest.raises(error, match=r"replica\.json"):
        replicated(source, target)
    with pytest.raises(error, match=r"replica\.json"):
        Publisher(target, {"w": torch.zeros(3)}, resume=True)
    with pytest.raises(error, match=r"replica\.json"):
        notes.promote(target, NOW, dry_run=False)
