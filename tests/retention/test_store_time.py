"""Whose clock counts: the store's where it tells the time, and otherwise those of the machines."""

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from kept_runs import assert_rebuilt, later, new_run, rebuilt, tag_unseen, versions_stored

from patchstore.bucket import history, kept, notes
from patchstore.bucket.manifest_json import time_of
from patchstore.bucket.notes import GRACE, spelled
from patchstore.errors import UsageError, VersionRetired
from patchstore.ops.compact.service import Compactor
from patchstore.ops.retention import Retention, collect, delete_tag, retire, tag
from patchstore.publish import commit as committer
from patchstore.stores import layout, open_store
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.copies import Dated
from tests.support.weights import Run

ONE = Retention(keep_last=1)


class Silent(MemoryStore):
    """A store that does not tell the time."""

    def stored_at(self, key: str) -> datetime | None:
        super().stored_at(key)
        return None


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else open_store(str(tmp_path / "bucket"))


@pytest.fixture
def day_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let publishers say that their versions were created a day ago."""
    monkeypatch.setattr(committer, "now", lambda: later(-24)().strftime("%Y-%m-%dT%H:%M:%SZ"))


def retired_at(store: Store) -> datetime:
    at = store.stored_at("retired/00000000.json")
    assert at is not None
    return at


@pytest.mark.usefixtures("day_old")
def test_a_machine_whose_clock_is_behind_gives_the_full_grace_period(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(store, 6)
    monkeypatch.setattr(kept, "utc_now", later(-23))
    found = retire(store, ONE, dry_run=False)
    assert found.not_before is not None
    assert time_of(found.not_before) - retired_at(store) > GRACE - timedelta(minutes=10)
    # And one that is ahead gives no less.
    monkeypatch.setattr(kept, "utc_now", later(48))
    assert collect(run.store, dry_run=False).num_waiting == found.num_retired
    assert list(store.list("probes/")) == []


@pytest.mark.usefixtures("day_old")
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_clock_that_is_given_is_refused_if_it_is_behind_the_stores(store: Store, dry_run: bool) -> None:
    run = new_run(store, 6)
    with pytest.raises(UsageError, match="clock"):
        retire(run.store, ONE, dry_run=dry_run, clock=later(-23))
    retire(run.store, ONE, dry_run=False)
    with pytest.raises(UsageError, match="clock"):
        collect(run.store, dry_run=dry_run, clock=later(-23))


def test_a_retirement_counts_from_when_the_store_had_it(store: Store) -> None:
    run = new_run(store, 6)
    found = history.read_manifest(store, 5)
    # The clock of the machine was behind, or it slept before it stored the record.
    notes.retire(store, found.run_id, range(4), later(-30)())
    assert collect(run.store, dry_run=False).num_waiting == 4
    assert collect(run.store, dry_run=False, clock=later(23.9)).num_objects == 0
    assert collect(run.store, dry_run=False, clock=later(24.1)).num_versions == 4


def test_an_added_anchor_counts_from_when_the_store_had_its_record() -> None:
    store = Dated()
    new_run(store, 14, anchor_every=None)
    assert list(Compactor(store, anchor_every=4).compact())
    found = history.read_manifest(store, 13)
    notes.retire(store, found.run_id, range(12), later(-30)())
    store.times["retired/00000000.json"] = later(-30)()
    # The compactor slept for 30 hours before it stored these.
    keys = [key for key in store.list(layout.SHORTCUTS) if key.endswith("-anchor.json")]
    for key in keys:
        record = json.loads(store.get(key)) | {"created_at": spelled(later(-30)())}
        store.put(key, json.dumps(record).encode())
    assert collect(store).num_versions == 0
    store.times |= dict.fromkeys(keys, later(-30)())
    assert collect(store).num_versions == 12


def tagged_and_retired(version: int = 6) -> Run:
    """Return a run of which only a tag keeps a version: both came at the moment of its retirement."""
    run = new_run(MemoryStore(), 14)
    retire(run.store, Retention(keep_last=3), dry_run=False)
    tag_unseen(run.store, "best", version)
    return run


MONTH_H = 24.0 * 30


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_a_version_that_its_tag_leaves_has_the_full_grace_period_from_then(how: str, tmp_path: Path) -> None:
    run = tagged_and_retired()
    at = later(MONTH_H)
    assert collect(run.store, dry_run=False, clock=at).num_objects
    assert_rebuilt(run, [6], tmp_path)
    if how == "moved":
        tag(run.store, "best", 13, clock=at)
        # What moves on does not shorten it.
        tag(run.store, "best", 12, clock=later(MONTH_H + 1))
    else:
        delete_tag(run.store, "best", clock=at)
    with pytest.raises(VersionRetired):
        rebuilt(run.store, 6, tmp_path / "late")
    for hours in (0, 1.5, 23.9):
        assert collect(run.store, dry_run=False, clock=later(MONTH_H + hours)).num_objects == 0
    assert collect(run.store, dry_run=False, clock=later(MONTH_H + 24.1)).num_versions == 3


def test_a_tag_that_moved_long_ago_does_not_keep_what_it_left() -> None:
    run = tagged_and_retired()
    tag(run.store, "best", 13)
    for hours in (30, 40, 50):
        tag(run.store, "best", 12 if hours == 40 else 13, clock=later(hours))
    watched = FaultyStore(run.store)
    collect(watched, dry_run=False, clock=later(55))
    assert versions_stored(run.store) == {8, 9, 10, 11, 12, 13}
    # Of the records of the tag, those are read that count, and one more.
    assert ("get", "tags/best/00000003.json") in watched.calls
    assert ("get", "tags/best/00000000.json") not in watched.calls


def test_a_reader_that_began_before_the_tag_moved_goes_on(tmp_path: Path) -> None:
    run = tagged_and_retired()
    at = later(MONTH_H)

    def move() -> None:
        tag(run.store, "best", 13, clock=at)
        collect(run.store, dry_run=False, clock=at)

    slow = FaultyStore(run.store, Fault(verb="get", key="anchors/*", effect="delay"), sleep=lambda _: move())
    found = rebuilt(slow, "best", tmp_path)
    assert found.keys() == run.history[6].keys()
    with pytest.raises(VersionRetired):
        rebuilt(run.store, 6, tmp_path / "late")


def test_where_a_store_does_not_tell_the_clocks_of_the_machines_count() -> None:
    run = new_run(Silent(), 6)
    with pytest.raises(UsageError, match="clock"):
        retire(run.store, ONE, dry_run=False, clock=later(-3))
    assert retire(run.store, ONE, dry_run=False, clock=later(-1)).num_retired == 4
    assert collect(run.store, dry_run=False, clock=later(22.9)).num_objects == 0
    assert collect(run.store, dry_run=False, clock=later(23.1)).num_versions == 4


def test_a_time_object_that_may_not_be_deleted_harms_nothing_and_goes_a_day_later() -> None:
    run = new_run(MemoryStore(), 6)
    fixed = FaultyStore(run.store, Fault(verb="delete", effect="fail-before", times=None))
    assert retire(fixed, ONE, dry_run=False).num_retired == 4
    left = set(run.store.list("probes/"))
    run.store.put("probes/of-others", b"")
    collect(run.store, dry_run=False, clock=later(23))
    assert left and left <= set(run.store.list("probes/"))
    assert collect(run.store, dry_run=False, clock=later(25)).num_versions == 4
    assert list(run.store.list("probes/")) == ["probes/of-others"]
