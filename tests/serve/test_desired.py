"""Which version servers should hold: the newest of one run, or one that a user pinned."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fleet_thread import silent

from patchstore.errors import CorruptObject, StoreReplaced, StoreUnavailable, UsageError, VersionNotFound
from patchstore.follow.desired import DesiredVersion, HeadWatcher
from patchstore.stores import layout
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import FaultyStore
from tests.support.manifests import begin_run, commit, commit_at_no_time


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore("memory://goal")
    begin_anew(store, "run", 4)
    return store


def begin_anew(store: MemoryStore, run_id: str, num_versions: int) -> None:
    """Empty a bucket, and begin a run in it."""
    for key in list(store.list()):
        store.delete(key)
    begin_run(store, run_id)
    for version in range(num_versions):
        commit(store, version, run_id)


def spelled(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")


def look(desired: DesiredVersion | HeadWatcher) -> tuple[str, int] | None:
    found = desired.refresh()
    return None if found is None else (found.run_id, found.version)


def test_the_newest_is_found_and_then_only_what_follows_it_is_read(store):
    watched = FaultyStore(store)
    # Whether it is another run is asked seldom.
    watcher = HeadWatcher(watched, recheck_s=10_000)
    assert look(watcher) == ("run", 3)
    commit(store, 4)
    commit(store, 5)
    watched.calls.clear()
    assert look(watcher) == ("run", 5)
    assert watched.calls == [("get", layout.manifest_key(version)) for version in (4, 5, 6)]
    with silent(store), pytest.raises(StoreUnavailable):
        watcher.refresh()
    assert look(watcher) == ("run", 5)


@pytest.mark.parametrize("last", [0, 3, 6])
def test_a_bucket_that_was_emptied_and_begun_anew_is_noticed(store, last):
    watcher = HeadWatcher(store, recheck_s=0)
    look(watcher)
    for key in list(store.list()):
        store.delete(key)
    assert look(watcher) is None
    begin_anew(store, "another", last + 1)
    for _ in range(2):
        with pytest.raises(StoreReplaced, match="has run another now, and had run run"):
            watcher.refresh()
    # What a user says who names that run.
    assert look(HeadWatcher(store, run_id="another")) == ("another", last)


def test_a_longer_run_in_the_old_ones_place_is_noticed_at_once(store):
    watcher = HeadWatcher(store, recheck_s=10_000)
    look(watcher)
    begin_anew(store, "another", 9)
    for _ in range(2):
        with pytest.raises(StoreReplaced, match="has run another now"):
            watcher.refresh()
    # It is put back.
    begin_anew(store, "run", 5)
    assert look(watcher) == ("run", 4)


def test_a_manifest_of_another_run_among_those_of_this_one_is_passed(store):
    watcher = HeadWatcher(store, recheck_s=10_000)
    look(watcher)
    commit(store, 4, "another")
    for each in (watcher, HeadWatcher(store)):
        assert look(each) == ("run", 3)
    commit(store, 5)
    for each in (watcher, HeadWatcher(store)):
        assert look(each) == ("run", 5)


def test_a_run_that_is_named_is_not_mistaken_for_the_one_that_is_there(store):
    with pytest.raises(StoreReplaced, match="has run run now, and had run another"):
        HeadWatcher(store, run_id="another").refresh()


def test_how_late_a_server_is_counts_from_the_first_version_that_it_lacks():
    store = MemoryStore("memory://late")
    begin_run(store)
    begun = datetime(2026, 1, 1, tzinfo=UTC)
    watcher = HeadWatcher(store)
    for version in range(3):
        commit(store, version, created_at=spelled(begun + timedelta(hours=version)))
        watcher.refresh()
    assert watcher.first_missing_at(0) == begun + timedelta(hours=1)
    assert watcher.first_missing_at(2) is None


@pytest.mark.parametrize("said", ["yesterday", "2026-01-01T00:00:00", "2026-01-01T00:00:00+00:00"])
def test_a_version_without_a_time_in_utc_is_refused_and_the_one_before_stays(store, said):
    watcher = HeadWatcher(store)
    look(watcher)
    before = watcher.first_missing_at(2)
    commit_at_no_time(store, 4, said)
    with pytest.raises(CorruptObject, match="created_at"):
        watcher.refresh()
    assert watcher.first_missing_at(2) == before
    assert watcher.first_missing_at(3) is None


def test_servers_are_pinned_to_a_version_that_there_is_and_unpinned(store):
    desired = DesiredVersion(HeadWatcher(store))
    assert look(desired) == ("run", 3)
    with pytest.raises(VersionNotFound):
        desired.pin(12)
    assert look(desired) == ("run", 3)
    desired.pin(1)
    commit(store, 4)
    assert (look(desired), desired.head.version, desired.pinned.version) == (("run", 1), 4, 1)
    desired.unpin()
    assert (look(desired), desired.pinned) == (("run", 4), None)


def test_a_version_that_is_to_come_is_waited_for(store):
    desired = DesiredVersion(HeadWatcher(store), at=4)
    with pytest.raises(VersionNotFound):
        desired.refresh()
    commit(store, 4)
    commit(store, 5)
    assert look(desired) == ("run", 4)


def test_a_version_of_a_run_that_is_gone_is_never_mistaken_for_another_runs(store):
    desired = DesiredVersion(HeadWatcher(store, recheck_s=0), at=2)
    look(desired)
    begin_anew(store, "another", 4)
    with pytest.raises(StoreReplaced, match="had run run"):
        desired.refresh()
    with pytest.raises(StoreReplaced, match="had run run"):
        desired.pin(2)
    assert desired.pinned.version == 2


def test_a_pin_that_an_earlier_process_set_is_of_its_run(store, tmp_path: Path):
    desired = DesiredVersion(HeadWatcher(store), pin_file=tmp_path / "pin.json")
    desired.pin(2)
    begin_anew(store, "another", 4)
    desired = DesiredVersion(HeadWatcher(store), pin_file=tmp_path / "pin.json")
    with pytest.raises(UsageError, match="run run"):
        desired.refresh()
    desired.pin(2)
    assert look(desired) == ("another", 2)


def test_what_was_said_last_outlives_the_process(store, tmp_path: Path):
    pin_file = tmp_path / "pin.json"
    desired = DesiredVersion(HeadWatcher(store), at=1, pin_file=pin_file)
    assert look(desired) == ("run", 1)
    desired.pin(2)
    assert look(DesiredVersion(HeadWatcher(store), at=1, pin_file=pin_file)) == ("run", 2)
    desired.unpin()
    assert look(DesiredVersion(HeadWatcher(store), at=1, pin_file=pin_file)) == ("run", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["pin.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"pin": 3}', '{"pin": {"version": true, "run_id": null}}', "\x00"]
)
def test_a_pin_file_that_says_nothing_is_refused(store, tmp_path: Path, text: str):
    (tmp_path / "pin.json").write_text(text)
    with pytest.raises(UsageError, match=r"pin\.json"):
        DesiredVersion(HeadWatcher(store), pin_file=tmp_path / "pin.json")


def test_a_process_killed_while_it_writes_leaves_the_old_state(store, tmp_path: Path, monkeypatch):
    desired = DesiredVersion(HeadWatcher(store), pin_file=tmp_path / "pin.json")
    desired.pin(1)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            desired.pin(2)
    assert look(DesiredVersion(HeadWatcher(store), pin_file=tmp_path / "pin.json")) == ("run", 1)


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_newest_version_that_is_gone_or_another_is_said_until_it_is_back(store, change):
    watcher = HeadWatcher(store, recheck_s=0)
    look(watcher)
    key = layout.manifest_key(3)
    before = store.get(key)
    if change == "removed":
        store.delete(key)
    else:
        store.put(key, before.replace(b'"step": 3', b'"step": 9'))
    for _ in range(2):
        with pytest.raises(StoreReplaced, match="version 3 of run run"):
            watcher.refresh()
    store.put(key, before)
    assert look(watcher) == ("run", 3)
    commit(store, 4)
    assert look(watcher) == ("run", 4)
