"""Collectors that are killed, that run at the same time, or whose clocks are wrong: nothing kept is lost."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kept_runs import assert_rebuilt, later, new_run, rebuilt, tag_unseen, versions_stored

from patchstore.bucket import notes
from patchstore.errors import StoreUnavailable, VersionRetired
from patchstore.ops.retention import Retention, collect, retire, tag
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.copies import copy_of
from tests.support.weights import Run, assert_same_bits, newest

KEPT = [4, 6, 8, 11, 12, 13]
STRAY = "deltas/00000002-0a57da7a0a57da7a/00001-of-00001.safetensors"


def retired_run() -> Run:
    """14 versions of which some are retired, with an attempt that a first pass noted."""
    run = new_run(MemoryStore(), 14)
    run.store.put(STRAY, b"x")
    tag(run.store, "best", 6)
    retire(run.store, Retention(keep_last=3), dry_run=False)
    collect(run.store, dry_run=False)
    return run


@pytest.mark.parametrize("effect", ["fail-before", "fail-after"])
def test_a_collector_that_is_killed_at_any_call_loses_nothing_and_is_finished_by_the_next(
    effect: str, tmp_path: Path
) -> None:
    run = retired_run()
    original = run.store
    whole = copy_of(original)
    watched = FaultyStore(whole)
    collect(watched, dry_run=False, clock=later(27))
    expected = set(whole.list(""))
    assert STRAY not in expected
    for skip in range(len(watched.calls)):
        store = copy_of(original)
        fault = Fault(verb="*", effect=effect, skip=skip, times=None)  # type: ignore[arg-type]
        with pytest.raises(StoreUnavailable):
            collect(FaultyStore(store, fault), dry_run=False, clock=later(27))
        assert expected <= set(store.list(""))
        collect(store, dry_run=False, clock=later(27))
        collect(store, dry_run=False, clock=later(27))
        # A killed one leaves the object whose time it asked for.
        passing = ("unnamed/", "probes/")
        left = {key for key in store.list("") if not key.startswith(passing)}
        assert left == {key for key in expected if not key.startswith(passing)}
    run.store = whole
    assert_rebuilt(run, KEPT, tmp_path)


def test_a_retirement_that_is_killed_at_any_call_is_finished_by_the_next() -> None:
    run = new_run(MemoryStore(), 10)
    whole = copy_of(run.store)
    watched = FaultyStore(whole)
    retire(watched, Retention(keep_last=2), dry_run=False)
    expected = notes.retirements(whole).up_to(9).keys()
    assert expected
    for effect in ("fail-before", "fail-after"):
        for skip in range(len(watched.calls)):
            store = copy_of(run.store)
            fault = Fault(verb="*", effect=effect, skip=skip)  # type: ignore[arg-type]
            try:
                retire(FaultyStore(store, fault), Retention(keep_last=2), dry_run=False)
            except StoreUnavailable:
                retire(store, Retention(keep_last=2), dry_run=False)
            assert notes.retirements(store).up_to(9).keys() == expected


def test_two_collectors_and_two_retirements_at_once_do_what_one_does(tmp_path: Path) -> None:
    run = new_run(MemoryStore(), 14)
    run.store.put(STRAY, b"x")
    tag(run.store, "best", 6)

    def both(act: Callable[[Store], object]) -> None:
        barrier = threading.Barrier(2)

        def work(_: int) -> None:
            barrier.wait()
            act(run.store)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, range(2)))

    both(lambda store: retire(store, Retention(keep_last=3), dry_run=False))
    both(lambda store: collect(store, dry_run=False, clock=later(0)))
    both(lambda store: collect(store, dry_run=False, clock=later(27)))
    assert STRAY not in set(run.store.list(""))
    assert_rebuilt(run, KEPT, tmp_path)
    assert versions_stored(run.store) == {4, 5, 6, 8, 9, 10, 11, 12, 13}


@pytest.mark.parametrize("retirer_h", [-1, 1])
@pytest.mark.parametrize("collector_h", [-1, 1])
def test_clocks_that_are_an_hour_wrong_leave_a_reader_most_of_a_day(
    retirer_h: float, collector_h: float
) -> None:
    run = new_run(MemoryStore(), 6)
    retire(run.store, Retention(keep_last=1), dry_run=False, clock=later(retirer_h))
    assert collect(run.store, dry_run=False, clock=later(21.9 + collector_h)).num_objects == 0
    assert collect(run.store, dry_run=False, clock=later(26.1 + collector_h)).num_objects > 0


def test_a_replay_that_loses_its_payloads_says_that_the_version_was_retired(tmp_path: Path) -> None:
    run = new_run(MemoryStore(), 10)
    hidden = FaultyStore(
        run.store,
        # The record comes after this reader looked for it.
        Fault(verb="list", key="retired/", effect="stale"),
    )
    retire(run.store, Retention(keep_last=1), dry_run=False)
    collect(run.store, dry_run=False, clock=later(25))
    with pytest.raises(VersionRetired, match="nearest kept version is 8"):
        rebuilt(hidden, 5, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_tag_and_a_retirement_at_the_same_moment_leave_the_version_readable_or_untagged(
    tmp_path: Path,
) -> None:
    run = new_run(MemoryStore(), 10)
    # The tag does not see the record, and the retirement did not see the tag.
    retire(run.store, Retention(keep_last=1), dry_run=False)
    tag_unseen(run.store, "best", 6)
    collect(run.store, dry_run=False, clock=later(25))
    assert_same_bits(rebuilt(run.store, "best", tmp_path), run.history[6])
    late = FaultyStore(run.store, Fault(verb="list", key="retired/", effect="stale", times=1))
    with pytest.raises(VersionRetired):
        tag(late, "lost", 2)
    with pytest.raises(VersionRetired):
        rebuilt(run.store, 2, tmp_path)


@pytest.mark.parametrize("anchor_every", [None, 2], ids=["delta", "anchor"])
def test_payloads_of_a_version_that_does_not_exist_yet_stay(anchor_every: int | None) -> None:
    inner, deleted = MemoryStore(), []

    class Sleeps(FaultyStore):
        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            if key == layout.manifest_key(4):
                deleted.extend(
                    collect(inner, dry_run=False, clock=later(hours)).num_unnamed for hours in (27, 54, 81)
                )
            super().put(key, data, if_absent=if_absent)

    run = Run(Sleeps(inner))
    run.publish_and_close(6, anchor_every=anchor_every)
    assert deleted == [0, 0, 0]
    assert_same_bits(newest(inner), run.history[5])
