"""The loop that keeps a server at the head, one step at a time."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from patchstore import layout, log
from patchstore.errors import StoreUnavailable
from patchstore.integrations.follow import Follow
from patchstore.model import Anchor, Manifest, StateDigest, Writer
from patchstore.stores.memory import MemoryStore


def commit(store: MemoryStore, version: int, run_id: str = "run") -> None:
    """Commit a version with an empty anchor: nobody here reads payloads."""
    digest = "blake3:" + "0" * 64
    log.commit(
        store,
        Manifest(
            version=version,
            parent=None,
            parent_digest=None,
            run_id=run_id,
            step=version,
            created_at="2026-01-01T00:00:00.000Z",
            writer=Writer(id="test", epoch=1, write_id="w"),
            state=StateDigest(total=digest, tensors=()),
            delta=None,
            anchor=Anchor(payloads=(), files=()),
        ),
    )


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore("memory://follow")
    commit(store, 0)
    return store


@pytest.fixture
def follow(store, server) -> Follow:
    return Follow(store, server, storage_options={"key": "x"}, min_interval_s=1, max_interval_s=8)


def did(follow: Follow, num_steps: int) -> list[str]:
    return [follow.step().did for _ in range(num_steps)]


def test_it_initialises_then_applies_then_waits(follow, stub):
    assert did(follow, 3) == ["initialised", "applied", "nothing"]
    assert stub.held == 0
    assert stub.opened == {"store": "memory://follow", "storage_options": {"key": "x"}}


def test_it_goes_to_the_head_directly(follow, store, stub):
    did(follow, 2)
    for version in (1, 2, 3):
        commit(store, version)
    done = follow.step()
    assert (done.did, done.version, stub.held) == ("applied", 3, 3)
    assert stub.calls.count("/update_weights") == 2


def test_a_server_that_has_the_head_is_only_told_its_number(follow, stub):
    stub.found = 0
    assert did(follow, 2) == ["initialised", "nothing"]
    assert stub.weight_version == "0"
    assert "/update_weights" not in stub.calls


def test_waiting_grows_while_nothing_happens_and_shrinks_with_news(follow, store):
    did(follow, 2)
    assert follow.interval_s == 1
    waits = []
    for _ in range(5):
        follow.step()
        waits.append(follow.interval_s)
    assert waits == [2, 4, 8, 8, 8]
    commit(store, 1)
    follow.step()
    assert follow.interval_s == 1


def test_an_empty_store_is_waited_for(server, stub):
    store = MemoryStore("memory://empty")
    follow = Follow(store, server)
    assert did(follow, 2) == ["nothing", "nothing"]
    commit(store, 0)
    assert did(follow, 2) == ["initialised", "applied"]


def test_a_restarted_server_is_initialised_and_brought_back(follow, store, stub):
    commit(store, 1)
    did(follow, 2)
    stub.down = True
    assert did(follow, 2) == ["failed", "failed"]
    stub.restart()
    stub.down = False
    assert did(follow, 3) == ["initialised", "applied", "nothing"]
    assert stub.held == 1


def test_a_restarted_follower_finds_everything_as_it_was(follow, store, server, stub):
    did(follow, 2)
    stub.calls.clear()
    assert Follow(store, server).step().did == "nothing"
    assert stub.calls == []


def test_a_switch_that_a_killed_follower_left_is_ended(follow, stub):
    did(follow, 2)
    stub.switch, stub.paused, stub.stale_prefixes = "resume", True, True
    assert did(follow, 2) == ["resumed", "nothing"]
    assert (stub.paused, stub.stale_prefixes) == (False, False)


def test_engines_that_may_differ_are_brought_to_one_version_before_they_go_on(follow, stub):
    # The engine that answers holds the head; of the other nobody knows.
    stub.num_engines = 2
    did(follow, 2)
    stub.calls.clear()
    stub.switch, stub.paused = "resume", True

    assert follow.step().did == "applied"

    assert "/finish_weight_update" in stub.calls
    assert (stub.paused, stub.switch) == (False, None)


def test_a_failed_update_is_tried_again_with_growing_waits_and_never_skipped(follow, store, stub):
    did(follow, 2)
    commit(store, 1)
    stub.failures["/update_weights"] = ["[corrupt-object] bad bytes"] * 3
    waits = []
    for _ in range(3):
        done = follow.step()
        assert (done.did, done.version, done.error.kind) == ("failed", 1, "corrupt-object")
        waits.append(follow.interval_s)
    assert waits == [2, 4, 8]
    assert stub.held == 0
    assert follow.step().did == "applied"
    assert (stub.held, follow.interval_s) == (1, 1)


def test_a_torn_server_is_updated_though_it_was_at_the_head(follow, stub):
    did(follow, 2)
    stub.torn, stub.held = True, None
    assert did(follow, 2) == ["applied", "nothing"]
    assert not stub.torn


def test_ranks_that_differ_are_brought_together(follow, stub):
    stub.num_ranks = 2
    did(follow, 2)
    stub.held_by_rank = {1: 7}
    done = follow.step()
    stub.held_by_rank = {}
    assert (done.did, done.version) == ("applied", 0)


def test_a_server_on_another_run_is_brought_to_this_one(follow, stub):
    did(follow, 2)
    stub.run_id = "another"
    assert follow.step().did == "initialised"


def test_a_store_that_does_not_answer_is_a_failure_and_not_the_end(follow, store, stub, monkeypatch):
    did(follow, 2)

    def unreachable(key, start=0, end=None):
        raise StoreUnavailable("no route")

    with monkeypatch.context() as patch:
        patch.setattr(store, "get", unreachable)
        assert follow.step().error.kind == "store-unavailable"
    assert follow.step().did == "nothing"


def test_one_new_slot_is_all_that_is_read_while_waiting(follow, store, monkeypatch):
    did(follow, 2)
    get, reads = store.get, []
    monkeypatch.setattr(store, "get", lambda key, *span: reads.append(key) or get(key, *span))
    follow.step()
    assert reads == [layout.manifest_key(1)]


def test_running_tells_every_change_in_one_line_and_stops_when_told(follow, stub, caplog, monkeypatch):
    stop = threading.Event()
    waits = []
    monkeypatch.setattr(stop, "wait", waits.append)
    stub.failures["/update_weights"] = ["[corrupt-object] bad bytes"]

    told = []
    with caplog.at_level("INFO", logger="patchstore"):
        for done in follow.run(stop):
            told.append(done)
            if done.did == "applied":
                stop.set()

    assert [done.did for done in told] == ["initialised", "failed", "applied"]
    assert told[2].timings == {"fetch": 0.5}
    assert told[1].to_dict()["error"]["kind"] == "corrupt-object"
    said = [record.message.removeprefix(f"{stub.url}: ") for record in caplog.records]
    said = [line for line in said if not line.startswith("HTTP Request")]
    assert said[0] == "initialised the server, which holds no version"
    assert said[1].startswith("version 0 failed: [corrupt-object]")
    assert said[1].endswith("next try in 2.0 s")
    assert said[2:] == ["applied version 0"]
    assert waits == [1, 2, 1]


def test_following_needs_no_torch():
    code = "import sys, patchstore.integrations.follow; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
