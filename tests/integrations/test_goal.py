"""Which version servers should hold: the newest of whichever run there is, or one that somebody chose."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from manifests import begin_run, commit, commit_at_no_time

from patchstore import layout
from patchstore.errors import CorruptObject, StoreReplaced, StoreUnavailable, UsageError, VersionNotFound
from patchstore.integrations.goal import Goal, Newest
from patchstore.stores.memory import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore("memory://goal")
    begin_run(store)
    for version in range(4):
        commit(store, version)
    return store


def empty(store: MemoryStore) -> None:
    for key in list(store.list()):
        store.delete(key)


def spelled(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")


def look(goal: Goal | Newest) -> tuple[str, int] | None:
    found = goal.look()
    return None if found is None else (found.run_id, found.version)


def test_the_newest_is_found_and_then_only_what_follows_it(store, monkeypatch):
    newest = Newest(store)
    assert look(newest) == ("run", 3)
    commit(store, 4)
    commit(store, 5)
    get, reads = store.get, []
    monkeypatch.setattr(store, "get", lambda key, *span: reads.append(key) or get(key, *span))
    assert look(newest) == ("run", 5)
    assert reads == [layout.manifest_key(version) for version in (4, 5, 6)]


@pytest.mark.parametrize("last", [0, 3, 6])
def test_a_bucket_that_was_emptied_and_begun_anew_is_noticed(store, last):
    newest = Newest(store, recheck_s=0)
    look(newest)
    empty(store)
    assert look(newest) is None
    begin_run(store, "another")
    for version in range(last + 1):
        commit(store, version, "another")
    assert look(newest) == ("another", last)


def test_a_longer_run_in_the_old_ones_place_is_noticed_at_once(store):
    newest = Newest(store, recheck_s=10_000)
    look(newest)
    empty(store)
    begin_run(store, "another")
    for version in range(9):
        commit(store, version, "another")
    assert look(newest) == ("another", 8)


def test_whether_it_is_another_run_is_asked_seldom(store, monkeypatch):
    newest = Newest(store, recheck_s=10_000)
    look(newest)
    get, reads = store.get, []
    monkeypatch.setattr(store, "get", lambda key, *span: reads.append(key) or get(key, *span))
    look(newest)
    assert reads == [layout.manifest_key(4)]


def test_a_store_that_does_not_answer_changes_nothing(store, monkeypatch):
    newest = Newest(store, recheck_s=0)
    look(newest)

    def unreachable(key, start=0, end=None):
        raise StoreUnavailable("no route")

    with monkeypatch.context() as patch:
        patch.setattr(store, "get", unreachable)
        with pytest.raises(StoreUnavailable):
            newest.look()
    assert look(newest) == ("run", 3)


def test_how_late_a_server_is_counts_from_the_first_version_that_it_lacks():
    store = MemoryStore("memory://late")
    begin_run(store)
    begun = datetime(2026, 1, 1, tzinfo=UTC)
    newest = Newest(store)
    for version in range(3):
        commit(store, version, created_at=spelled(begun + timedelta(hours=version)))
        newest.look()
    assert newest.created(1) == begun + timedelta(hours=1)
    assert newest.outdated(0) == begun + timedelta(hours=1)
    assert newest.outdated(2) is None
    assert newest.created(7) is None


@pytest.mark.parametrize("said", ["yesterday", "2026-01-01T00:00:00", "2026-01-01T00:00:00+00:00"])
def test_a_version_without_a_time_in_utc_is_refused_and_the_one_before_stays(store, said):
    newest = Newest(store)
    look(newest)
    before = newest.created(3)
    commit_at_no_time(store, 4, said)
    with pytest.raises(CorruptObject, match="created_at"):
        newest.look()
    assert newest.created(3) == before
    assert newest.created(4) is None


def test_servers_are_held_at_a_version_and_released(store):
    goal = Goal(Newest(store))
    assert look(goal) == ("run", 3)
    goal.hold(1)
    commit(store, 4)
    assert (look(goal), goal.head.version, goal.hold_at.version) == (("run", 1), 4, 1)
    goal.release()
    assert (look(goal), goal.hold_at) == (("run", 4), None)


def test_an_unknown_version_is_refused_and_nothing_changes(store):
    goal = Goal(Newest(store))
    with pytest.raises(VersionNotFound):
        goal.hold(12)
    assert look(goal) == ("run", 3)


def test_a_version_that_is_to_come_is_waited_for(store):
    goal = Goal(Newest(store), at=4)
    with pytest.raises(VersionNotFound):
        goal.look()
    commit(store, 4)
    commit(store, 5)
    assert look(goal) == ("run", 4)


def test_a_version_of_a_run_that_is_gone_is_never_mistaken_for_another_runs(store):
    goal = Goal(Newest(store, recheck_s=0), at=2)
    look(goal)
    empty(store)
    begin_run(store, "another")
    for version in range(4):
        commit(store, version, "another")
    with pytest.raises(UsageError, match="run run"):
        goal.look()
    goal.hold(2)
    assert look(goal) == ("another", 2)


def test_what_was_said_last_outlives_the_process(store, tmp_path: Path):
    state = tmp_path / "state.json"
    goal = Goal(Newest(store), at=1, state=state)
    assert look(goal) == ("run", 1)
    goal.hold(2)
    assert look(Goal(Newest(store), at=1, state=state)) == ("run", 2)
    goal.release()
    assert look(Goal(Newest(store), at=1, state=state)) == ("run", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_state_that_cannot_be_written_changes_nothing(store, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    goal = Goal(Newest(store), state=tmp_path / "folder" / "state.json")
    (tmp_path / "folder").rmdir()
    with pytest.raises(OSError, match="folder"):
        goal.hold(1)
    assert look(goal) == ("run", 3)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"hold": 3}', '{"hold": {"version": true, "run_id": null}}', "\x00"]
)
def test_a_state_that_says_nothing_is_refused(store, tmp_path: Path, text: str):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(UsageError, match=r"state\.json"):
        Goal(Newest(store), state=tmp_path / "state.json")


def test_a_process_killed_while_it_writes_leaves_the_old_state(store, tmp_path: Path, monkeypatch):
    goal = Goal(Newest(store), state=tmp_path / "state.json")
    goal.hold(1)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", killed)
        with pytest.raises(KeyboardInterrupt):
            goal.hold(2)
    assert look(Goal(Newest(store), state=tmp_path / "state.json")) == ("run", 1)


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_newest_version_that_is_gone_or_another_is_said_until_it_is_back(store, change):
    newest = Newest(store, recheck_s=0)
    look(newest)
    key = layout.manifest_key(3)
    before = store.get(key)
    if change == "removed":
        store.delete(key)
    else:
        store.put(key, before.replace(b'"step": 3', b'"step": 9'))
    for _ in range(2):
        with pytest.raises(StoreReplaced, match="version 3 of run run"):
            newest.look()
    store.put(key, before)
    assert look(newest) == ("run", 3)
    commit(store, 4)
    assert look(newest) == ("run", 4)
