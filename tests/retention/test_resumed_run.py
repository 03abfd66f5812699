"""A publisher that goes on from an older version, while others retire and collect at any moment.

Every version that it acknowledges can be rebuilt, whatever sleeps between which two requests.
"""

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kept_runs import assert_rebuilt, later, new_run, tag_unseen, versions_stored

from patchstore import Replica
from patchstore.bucket import history, kept, notes
from patchstore.errors import ResumeMismatch, VersionRetired
from patchstore.ops.compact.service import Compactor
from patchstore.ops.retention import Retention, collect, delete_tag, retire
from patchstore.signing import KeySigner
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.copies import copy_of
from tests.support.keys import key_pair
from tests.support.weights import Run, State, assert_same_bits, newest

SOME = pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
"""Of how many requests each is slept before one."""
OLD = 6
"""The version to go on from: behind anchor 4, and before the newest one, 11."""
BUT_PROBES = "[!p]*"
"""Keys that do not begin with `probes/`."""


@pytest.fixture(scope="module")
def before() -> Run:
    return new_run(MemoryStore(), 12)


def went_back(before: Run, store: Store, version: int = OLD) -> Run:
    """Return a trainer that has the weights of an older version, and has not opened a publisher yet."""
    run = Run(store)
    run.model = {
        name: each.float() if each.is_floating_point() else each.clone()
        for name, each in before.history[version].items()
    }
    run.model["head.weight"] = run.model["embed.weight"]
    return run


def published(run: Run, resume: Any) -> list[int]:
    """Go on with the run; return the versions that the publisher acknowledged."""
    run.open(resume=resume, anchor_every=None)
    run.train()
    versions = [each.version for each in run.publish_versions(3)]
    run.close()
    return versions


def interrupted(store: Store, interrupt: Callable[[], object], *, at: int) -> FaultyStore:
    """Return the same store, where something else happens before a call."""
    fault = Fault(verb="*", key=BUT_PROBES, effect="delay", skip=at)
    return FaultyStore(store, fault, sleep=lambda _: interrupt())


def give_up(store: Store) -> None:
    """Retire the old version, and collect a day later."""
    retire(store, Retention(keep_last=4), dry_run=False)
    collect(store, dry_run=False, clock=later(27))


@SOME
@pytest.mark.parametrize(
    "resume", ["auto", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (OLD, True))]
)
def test_what_is_acknowledged_can_be_rebuilt_wherever_the_publisher_sleeps_for_a_day(
    before: Run, resume: Any, every: int, tmp_path: Path
) -> None:
    parents = set()
    # It reads ahead in threads, so how often it asks is known only when it has asked.
    for at in itertools.count(step=every):
        store, slept, woken = copy_of(before.store), threading.Event(), threading.Event()

        def interrupt(
            store: Store = store, slept: threading.Event = slept, woken: threading.Event = woken
        ) -> None:
            slept.set()
            give_up(store)
            woken.set()

        run = went_back(before, interrupted(store, interrupt, at=at))
        try:
            versions = published(run, resume)
        except VersionRetired:
            assert resume == OLD
            parents.add(None)
            continue
        except ResumeMismatch:
            assert resume is True
            parents.add(None)
            continue
        if not slept.is_set():
            break
        # What is read ahead may be asked for, and not be waited for.
        assert woken.wait(60)
        assert notes.retirements(store).find(OLD) is not None
        parents.add(history.read_manifest(store, versions[0] - 1).parent)
        (tmp_path / str(at)).mkdir()
        run.store = store
        assert_rebuilt(run, versions, tmp_path / str(at))
        # A pass that sees all of it deletes nothing of it.
        collect(store, dry_run=False, clock=later(60))
        assert_same_bits(newest(store), run.history[versions[-1]])
    # Both happened: it heard of the retirement in time, and it was too late for that.
    assert parents >= {OLD}
    assert len(parents) == 2


Act = Callable[[Store], object]


def retire_all(store: Store) -> None:
    retire(store, Retention(keep_last=2), dry_run=False)


def collect_tomorrow(store: Store) -> None:
    collect(store, dry_run=False, clock=later(27))


class Sleeping:
    """A command that sleeps before one of its calls until it is woken."""

    def __init__(self, act: Act, store: Store, *, at: int) -> None:
        self._asleep, self._woken = threading.Event(), threading.Event()
        fault = Fault(verb="*", effect="delay", skip=at)
        self._store = FaultyStore(store, fault, sleep=lambda _: self._sleep())
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(act,))
        self._thread.start()
        self._asleep.wait()

    def _run(self, act: Act) -> None:
        try:
            act(self._store)
        except BaseException as exc:  # noqa: BLE001 -- raised by `wake`
            self._error = exc
        finally:
            self._asleep.set()

    def _sleep(self) -> None:
        self._asleep.set()
        self._woken.wait()

    def wake(self) -> None:
        self._woken.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


def num_calls_of(act: Act, before: Run, *first: Act) -> int:
    store = copy_of(before.store)
    for each in first:
        each(store)
    watched = FaultyStore(store)
    act(watched)
    return len(watched.calls)


def before_the_claim(store: Store, interrupt: Callable[[], object]) -> FaultyStore:
    fault = Fault(verb="put", key=layout.manifest_key(12), effect="delay")
    return FaultyStore(store, fault, sleep=lambda _: interrupt())


@SOME
def test_a_collector_that_sleeps_while_the_publisher_goes_on_leaves_what_it_needs(
    before: Run, every: int, tmp_path: Path
) -> None:
    for at in range(0, num_calls_of(collect_tomorrow, before, retire_all), every):
        store, asleep = copy_of(before.store), []

        def interrupt(store: Store = store, asleep: list[Sleeping] = asleep, at: int = at) -> None:
            # The publisher looked, and sleeps for a day. It goes on while a collector sleeps.
            retire_all(store)
            asleep.append(Sleeping(collect_tomorrow, store, at=at))

        run = went_back(before, before_the_claim(store, interrupt))
        versions = published(run, OLD)
        asleep.pop().wake()
        (tmp_path / str(at)).mkdir()
        run.store = store
        assert_rebuilt(run, versions, tmp_path / str(at))
        assert history.read_manifest(store, 12).parent == OLD


@SOME
def test_a_retirement_that_sleeps_while_the_publisher_goes_on_takes_nothing_that_it_needs(
    before: Run, every: int, tmp_path: Path
) -> None:
    for at in range(0, num_calls_of(retire_all, before), every):
        store = copy_of(before.store)
        asleep = Sleeping(retire_all, store, at=at)
        run = went_back(before, store)
        if notes.retirements(store).find(OLD) is not None:
            # It is written, and sleeps before it reads it back.
            with pytest.raises(VersionRetired):
                published(run, OLD)
            asleep.wake()
            continue
        versions = published(run, OLD)
        asleep.wake()
        collect_tomorrow(store)
        (tmp_path / str(at)).mkdir()
        run.store = store
        # It has seen the versions so far, and may have retired all but the newest of them.
        gone = kept.retired_versions(store, versions[-1])
        assert OLD in gone
        assert_rebuilt(run, set(versions) - gone, tmp_path / str(at))


@SOME
def test_what_a_signed_run_needs_stays_if_the_collector_listed_it_before_the_signature(
    every: int, tmp_path: Path
) -> None:
    private, public = key_pair(tmp_path)
    first = Run(MemoryStore())
    first.publish_and_close(12, anchor_every=8, signer=KeySigner(private))
    # An anchor of version 4, which readers that require keys do not use.
    assert list(Compactor(first.store, anchor_every=4).compact())
    for at in range(0, num_calls_of(collect_tomorrow, first, retire_all), every):
        store, asleep = copy_of(first.store), []

        def interrupt(store: Store = store, asleep: list[Sleeping] = asleep, at: int = at) -> None:
            retire_all(store)
            asleep.append(Sleeping(collect_tomorrow, store, at=at))

        # Before the signature of the claim, which comes before its manifest.
        fault = Fault(verb="put", key="signatures/00000012-*", effect="delay")
        slow = FaultyStore(store, fault, sleep=lambda _, interrupt=interrupt: interrupt())
        run = went_back(first, slow)
        run.open(resume=OLD, anchor_every=None, signer=KeySigner(private))
        version = run.publish().version
        run.close()
        asleep.pop().wake()
        tensors: State = {}
        Replica(store, tensors, required_keys=public).update(version)
        assert_same_bits(tensors, run.history[version])


@pytest.mark.parametrize("resume", [OLD, "auto"])
def test_a_version_that_only_a_tag_keeps_is_not_built_on(before: Run, resume: Any, tmp_path: Path) -> None:
    store = copy_of(before.store)
    # Both at the same moment: neither sees the other.
    retire(store, Retention(keep_last=2), dry_run=False)
    tag_unseen(store, "best", OLD)
    run = went_back(before, store)
    if resume == OLD:
        with pytest.raises(VersionRetired, match="only a tag"):
            published(run, resume)
        assert list(store.list("reservations/")) == []
        return
    versions = published(run, resume)
    assert history.read_manifest(store, versions[0]).kind == "anchor"
    delete_tag(store, "best")
    collect(store, dry_run=False, clock=later(24 * 30))
    assert_rebuilt(run, versions, tmp_path)


def test_the_reservation_of_a_publisher_that_is_killed_ends_with_the_next_version(before: Run) -> None:
    store = copy_of(before.store)
    header = history.read_header(store)
    assert header is not None
    key = notes.reserve(store, header.run_id, OLD, 12)
    retire(store, Retention(keep_last=2), dry_run=False)
    found = collect(store, dry_run=False, clock=later(24 * 365))
    assert found.num_reserved == 1
    assert {layout.attempt_of(each)[0] for each in found.keys} == {0, 1, 2, 3, 7}  # type: ignore[index]
    assert key in store.list("reservations/")
    other = went_back(before, store, 11)
    published(other, True)
    collect(store, dry_run=False, clock=later(24 * 365))
    assert list(store.list("reservations/")) == []
    assert OLD not in versions_stored(store)


def test_going_on_from_the_newest_version_asks_for_no_more_than_before(before: Run) -> None:
    watched = FaultyStore(copy_of(before.store))
    published(went_back(before, watched, 11), True)
    assert {key.partition("/")[0] for _, key in watched.calls}.isdisjoint({"retired", "tags", "reservations"})
