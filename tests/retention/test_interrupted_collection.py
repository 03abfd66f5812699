"""Collectors that are killed, that run at the same time, or whose clocks are wrong: nothing kept is lost."""

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from kept_runs import assert_rebuilt, later, new_run, rebuilt

from patchstore.errors import PatchstoreError, StoreUnavailable, VersionRetired
from patchstore.format import history, layout, leases, retired
from patchstore.format.times import GRACE
from patchstore.retention import Lease, Retention, collect, retire, tag
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.weights import Run, assert_same_bits

KEPT = [4, 6, 8, 11, 12, 13]
STRAY = "deltas/00000002-lost/00001-of-00001.safetensors"


def copy_of(store: MemoryStore) -> MemoryStore:
    copy = MemoryStore()
    copy._objects = dict(store._objects)
    return copy


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
    assert isinstance(original, MemoryStore)
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
        assert {key for key in store.list("") if not key.startswith("unnamed/")} == {
            key for key in expected if not key.startswith("unnamed/")
        }
    run.store = whole
    assert_rebuilt(run, KEPT, tmp_path)


def test_a_retirement_that_is_killed_at_any_call_is_finished_by_the_next() -> None:
    run = new_run(MemoryStore(), 10)
    assert isinstance(run.store, MemoryStore)
    whole = copy_of(run.store)
    watched = FaultyStore(whole)
    retire(watched, Retention(keep_last=2), dry_run=False)
    expected = retired.read(whole).up_to(9).keys()
    assert expected
    for effect in ("fail-before", "fail-after"):
        for skip in range(len(watched.calls)):
            store = copy_of(run.store)
            fault = Fault(verb="*", effect=effect, skip=skip)  # type: ignore[arg-type]
            try:
                retire(FaultyStore(store, fault), Retention(keep_last=2), dry_run=False)
            except StoreUnavailable:
                retire(store, Retention(keep_last=2), dry_run=False)
            assert retired.read(store).up_to(9).keys() == expected


def test_two_collectors_and_two_retirements_at_once_do_what_one_does(tmp_path: Path) -> None:
    run = new_run(MemoryStore(), 14)
    run.store.put(STRAY, b"x")
    tag(run.store, "best", 6)

    def both(hours: float, *, is_collection: bool) -> None:
        barrier = threading.Barrier(2)
        errors = []

        def work() -> None:
            barrier.wait()
            try:
                if is_collection:
                    collect(run.store, dry_run=False, clock=later(hours))
                else:
                    retire(run.store, Retention(keep_last=3), dry_run=False)
            except PatchstoreError as exc:
                errors.append(exc)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []

    both(0, is_collection=False)
    both(0, is_collection=True)
    both(27, is_collection=True)
    assert STRAY not in set(run.store.list(""))
    assert_rebuilt(run, KEPT, tmp_path)
    gone = {found[0] for key in run.store.list("") if (found := layout.attempt_of(key)) is not None}
    assert gone == {4, 5, 6, 8, 9, 10, 11, 12, 13}


@pytest.mark.parametrize("retirer_h", [-1, 1])
@pytest.mark.parametrize("collector_h", [-1, 1])
def test_clocks_that_are_an_hour_wrong_leave_a_reader_most_of_a_day(
    retirer_h: float, collector_h: float
) -> None:
    run = new_run(MemoryStore(), 6)
    retire(run.store, Retention(keep_last=1), dry_run=False, clock=later(retirer_h))
    assert collect(run.store, dry_run=False, clock=later(21.9 + collector_h)).num_objects == 0
    assert collect(run.store, dry_run=False, clock=later(26.1 + collector_h)).num_objects > 0


def test_what_a_lease_holds_stays_until_it_ends_or_expires() -> None:
    run = new_run(MemoryStore(), 14)
    now_h = 25.0
    run_id = run_id_of(run)
    with Lease(run.store, run_id, [6], after=timedelta()) as lease:
        assert lease.num_records == 1
    assert list(run.store.list("leases/")) == []

    lease = Lease(run.store, run_id, [6], clock=later(now_h - 1))
    retire(run.store, Retention(keep_last=3), dry_run=False)
    assert lease.renew()
    found = collect(run.store, dry_run=False, clock=later(now_h))
    assert found.num_leased == 1
    gone = {layout.attempt_of(key)[0] for key in found.keys}  # type: ignore[index]
    assert gone == {0, 1, 2, 3, 7}
    # It expired at 28, and two hours later no clock counts it.
    assert collect(run.store, dry_run=False, clock=later(29.9)).num_objects == 0
    assert collect(run.store, dry_run=False, clock=later(30.1)).num_objects > 0
    assert list(run.store.list("leases/"))
    collect(run.store, dry_run=False, clock=later(28 + GRACE.total_seconds() / 3600 + 2.1))
    assert list(run.store.list("leases/")) == []


def run_id_of(run: Run) -> str:
    header = history.read_header(run.store)
    assert header is not None
    return header.run_id


def test_a_lease_renews_itself_at_half_its_life() -> None:
    run = new_run(MemoryStore(), 1)
    short = timedelta(milliseconds=40)
    with Lease(run.store, run_id_of(run), [0], after=timedelta(milliseconds=1), lifetime=short) as lease:
        while lease.num_records < 3:
            pass
        newest, _ = leases.read_newest(run.store, run_id_of(run))
        assert newest[0].versions == (0,)
    assert list(run.store.list("leases/")) == []


@pytest.mark.parametrize("verb", ["put", "delete"])
def test_a_lease_that_cannot_be_written_does_not_fail_its_reader(verb: str) -> None:
    run = new_run(MemoryStore(), 1)
    store = FaultyStore(run.store, Fault(verb=verb, effect="fail-before", times=None))  # type: ignore[arg-type]
    with Lease(store, run_id_of(run), [0], after=timedelta()):
        pass
    assert len(list(run.store.list("leases/"))) == (verb == "delete")


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
    blind = FaultyStore(run.store, Fault(verb="list", key="retired/", effect="stale", times=2))
    tag(blind, "best", 6)
    collect(run.store, dry_run=False, clock=later(25))
    assert_same_bits(rebuilt(run.store, "best", tmp_path), run.history[6])
    late = FaultyStore(run.store, Fault(verb="list", key="retired/", effect="stale", times=1))
    with pytest.raises(VersionRetired):
        tag(late, "lost", 2)
    with pytest.raises(VersionRetired):
        rebuilt(run.store, 2, tmp_path)
