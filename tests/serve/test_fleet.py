"""Many servers and one store: no server waits for another, and events say what happens."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fleet_thread import FleetThread, running, silent

from patchstore.errors import UsageError
from patchstore.follow.desired import DesiredVersion, HeadWatcher
from patchstore.follow.fleet import Fleet
from patchstore.follow.settings import Settings
from patchstore.stores.memory import MemoryStore
from tests.support.manifests import begin_run, commit
from tests.support.vllm_stub import StubServer, serving

UNREACHABLE = "http://127.0.0.1:9"


class FeedStore(MemoryStore):
    """Says when something changed, as some stores do."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.wake: Callable[[], None] | None = None

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        self.wake = wake
        return self._unsubscribe

    def _unsubscribe(self) -> None:
        self.wake = None


@pytest.fixture
def store() -> FeedStore:
    store = FeedStore("memory://fleet")
    begin_run(store)
    commit(store, 0)
    return store


@pytest.fixture
def stubs() -> Iterator[list[StubServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(StubServer())) for _ in range(3)]


def urls(stubs: list[StubServer]) -> list[str]:
    return [stub.url for stub in stubs]


def test_the_store_is_read_once_for_all(store, stubs, monkeypatch):
    readers = set()
    get = store.get

    def noting(key, *span):
        readers.add(threading.current_thread().name)
        return get(key, *span)

    # With waits this long, three servers would ask three times. Figures count the bytes of versions.
    with running(store, urls(stubs), max_poll_interval_s=1000, is_observed=False) as fleet:
        fleet.until_all(0, stubs)
        commit(store, 1)
        monkeypatch.setattr(store, "get", noting)
        store.wake()
        fleet.until_all(1, stubs)
    assert readers == {"follow-store"}


def test_a_stores_feed_ends_the_wait_of_the_store_and_of_every_server(store, stubs):
    for stub in stubs:
        stub.opened = {"store": store.url}
        stub.engines[0].initialised, stub.engines[0].held, stub.engines[0].run_id = True, 0, "run"
    # The fleet does not look again without being told.
    with running(store, urls(stubs), min_poll_interval_s=1000, max_poll_interval_s=1000) as fleet:
        while store.wake is None:
            time.sleep(0.01)
        for version in range(1, 4):
            commit(store, version)
            store.wake()
            fleet.until_all(version, stubs)


def test_servers_that_hang_or_are_gone_hold_up_no_other(store, stubs):
    slow, *others = stubs
    go_on = slow.block("delta_prove")
    with running(store, [UNREACHABLE, *urls(stubs)]) as fleet:
        try:
            assert slow.entered["delta_prove"].wait(60)
            for version in range(1, 4):
                commit(store, version)
                fleet.until_all(version, others)
            assert slow.held is None
        finally:
            go_on.set()
        fleet.until_all(3, [slow])
    assert slow.history == [0, 3]
    assert set(fleet.did(UNREACHABLE)) == {"failed"}


def test_all_servers_go_back_and_return_when_they_are_told(store, stubs):
    commit(store, 1)
    with running(store, urls(stubs)) as fleet:
        fleet.until_all(1, stubs)
        fleet.desired.pin(0)
        fleet.fleet.wake()
        fleet.until_all(0, stubs)
        commit(store, 2)
        fleet.desired.unpin()
        fleet.fleet.wake()
        fleet.until_all(2, stubs)
    assert [stub.history for stub in stubs] == [[1, 0, 2]] * 3
    assert [each.serving for each in fleet.fleet.status().servers] == [2] * 3
    assert store.wake is None


def test_a_pin_of_a_run_that_is_gone_leaves_servers_as_they_are(store, stubs):
    with running(store, urls(stubs)) as fleet:
        fleet.desired.pin(0)
        fleet.until_all(0, stubs)
        for key in list(store.list()):
            store.delete(key)
        begin_run(store, "another")
        commit(store, 0, "another")
        fleet.until(lambda: "store-replaced" in fleet.kinds(None))
        fleet.desired.unpin()
        fleet.fleet.wake()
        fleet.until(lambda: fleet.kinds(None).count("store-replaced") > 4)
        assert [stub.history for stub in stubs] == [[0]] * 3


def test_a_store_that_does_not_answer_is_told_and_the_servers_are_still_looked_after(store, stubs):
    with running(store, urls(stubs)) as fleet:
        fleet.until_all(0, stubs)
        with silent(store):
            fleet.until(lambda: "failed" in fleet.did(None))
            assert fleet.fleet.status().failure.error.kind == "store-unavailable"
            stubs[0].restart()
            fleet.until(lambda: fleet.did(stubs[0].url).count("applied") == 2)
        commit(store, 1)
        fleet.until_all(1, stubs)


def test_of_one_failure_again_and_again_fewer_and_fewer_are_told(store):
    with running(store, [UNREACHABLE]) as fleet:
        fleet.until(lambda: len(fleet.told) == 5)
    assert [told.num_times for told in fleet.told][:5] == [1, 2, 4, 8, 16]


def test_a_store_without_a_version_is_told_once_and_waited_for(stubs):
    store = MemoryStore("memory://empty")
    with running(store, urls(stubs)) as fleet:
        fleet.until(lambda: "waiting" in fleet.did(None))
        begin_run(store)
        commit(store, 0)
        fleet.until_all(0, [stubs[0]])
    assert fleet.did(None) == ["waiting"]


def test_servers_of_a_file_come_and_go(store, stubs, tmp_path: Path):
    listed = tmp_path / "servers"
    listed.write_text(f"# the first\n{stubs[0].url}/  # with a slash\n\n")
    with running(store, [stubs[1].url], servers_file=listed) as fleet:
        fleet.until_all(0, stubs[:2])
        listed.write_text(stubs[2].url)
        fleet.until_all(0, [stubs[2]])
        assert {each.url for each in fleet.fleet.status().servers} == {stubs[1].url, stubs[2].url}
        commit(store, 1)
        fleet.until_all(1, stubs[1:])
        assert stubs[0].history == [0]

        listed.write_text("nonsense")
        fleet.until(lambda: "failed" in fleet.did(None))
        commit(store, 2)
        fleet.until_all(2, stubs[1:])

        listed.write_text(f"{stubs[0].url}\n{stubs[2].url}")
        fleet.until_all(2, [stubs[0]])
        num_failed = fleet.did(None).count("failed")
        listed.unlink()
        fleet.until(lambda: fleet.did(None).count("failed") > num_failed)
        commit(store, 3)
        fleet.until_all(3, stubs)


def test_a_file_that_is_read_while_it_is_written_lets_go_of_no_server(store, stubs, tmp_path, monkeypatch):
    """A program that writes a file empties it first."""
    monkeypatch.setattr("patchstore.follow.fleet.SETTLED_S", 600.0)
    listed = tmp_path / "servers"
    listed.write_text(stubs[0].url)
    reads, read_text = [], Path.read_text
    with running(store, [stubs[1].url], servers_file=listed) as fleet:
        fleet.until_all(0, stubs[:2])
        before = dict(fleet.fleet.workers)
        monkeypatch.setattr(
            Path, "read_text", lambda path, *args: reads.append(path) or read_text(path, *args)
        )
        listed.write_text("")
        while len(reads) < 4:
            time.sleep(0.01)
        assert fleet.fleet.workers == before
        listed.write_text(stubs[0].url)
        commit(store, 1)
        fleet.until_all(1, stubs[:2])
        assert fleet.fleet.workers == before
    assert stubs[0].calls.count("/init_weight_transfer_engine") == 1


def test_no_server_to_follow_is_a_mistake(store, tmp_path: Path):
    desired = DesiredVersion(HeadWatcher(store))
    (tmp_path / "servers").write_text("localhost")
    for settings, message in (
        (Settings(), "name a server"),
        (Settings(servers=["localhost"]), "not the URL"),
        (Settings(servers_file=tmp_path / "none"), "cannot be read"),
        (Settings(servers_file=tmp_path / "servers"), f"{tmp_path}/servers: 'localhost' is not the URL"),
    ):
        with pytest.raises(UsageError, match=message):
            Fleet(desired, settings)


def test_what_is_only_being_fetched_is_left_at_once(store, stubs):
    stub = stubs[0]
    fetching = threading.Event()
    stub.on_call = lambda path: fetching.set() if "delta_prefetch" in stub.calls else None
    fleet = FleetThread(store, [stub.url])
    try:
        stub.engines[0].prefetches[0] = -(10**9)
        assert fetching.wait(60)
    finally:
        fleet.end()
    assert (stub.held, stub.paused, stub.switch) == (None, False, None)
    assert "delta_prove" not in stub.calls


def test_a_server_that_was_let_go_on_is_not_written_to_when_its_pause_ends_after_all(store, stubs):
    stub = stubs[0]
    go_on = stub.block("delta_pause")
    stub.on_call = lambda path: go_on.set() if path == "delta_resume" else None
    try:
        with running(store, [stub.url], grace_s=0.0) as fleet:
            assert stub.entered["delta_pause"].wait(60)
            (worker,) = fleet.fleet.workers.values()
        worker.thread.join()
    finally:
        go_on.set()
    assert (stub.history, stub.paused, stub.switch) == ([], False, None)
    assert "/finish_weight_update" not in stub.calls


def test_a_server_that_does_not_let_go_is_named_at_the_end(store, stubs):
    stub = stubs[0]
    go_on = stub.block("delta_pause")
    stub.failures["delta_resume"] = ["busy"]
    try:
        with running(store, [stub.url], grace_s=0.0) as fleet:
            assert stub.entered["delta_pause"].wait(60)
        # The mark stays, so the next process ends it.
        assert (fleet.fleet.left, stub.switch) == ([stub.url], "resume")
    finally:
        go_on.set()


def test_a_reader_that_goes_away_ends_the_fleet_well(store, stubs):
    fleet = Fleet(DesiredVersion(HeadWatcher(store)), Settings(servers=urls(stubs)))
    events = fleet.run(threading.Event())
    next(events)
    events.close()
    left = [thread for thread in threading.enumerate() if thread.name.startswith("follow-")]
    # No server is in its hands any more. What asks the store ends behind its present request.
    assert {thread.name for thread in left} <= {"follow-store"}
    for thread in left:
        thread.join(60)
        assert not thread.is_alive()
