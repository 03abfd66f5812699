"""The HTTP calls of one update. Each waits for the engine's current step, so none is made without need."""

from itertools import groupby
from typing import Any

import pytest

from patchstore.serve.reconcile import Reconciler
from patchstore.serve.settings import PauseMode, PrefixCache
from patchstore.serve.vllm_server import VllmServer
from patchstore.stores.memory import MemoryStore
from patchstore.testing.vllm_stub import StubServer
from tests.support.manifests import commit

STAGE = ["/start_weight_update", "/update_weights"]
SWITCH = ["delta_pause", "/finish_weight_update", "/resume", "delta_switch"]
WITH_PAUSE = ["delta_prefetch", "/is_paused", *STAGE, *SWITCH]
WITHOUT_PAUSE = ["delta_prefetch", *STAGE, "/finish_weight_update", "/reset_prefix_cache", "delta_switch"]


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore("memory://calls")
    commit(store, 0)
    return store


@pytest.fixture
def asked(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of all calls, and the methods of collective ones, in order."""
    calls: list[str] = []
    answer = stub.answer

    def noting(path: str, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        calls.append(body.get("method", path))
        return answer(path, query, body)

    monkeypatch.setattr(stub, "answer", noting)
    return calls


def once(calls: list[str]) -> list[str]:
    """Calls without those that repeat the one before, as polls do."""
    return [call for call, _ in groupby(calls)]


@pytest.mark.parametrize(
    ("pause_mode", "prefix_cache", "expected"),
    [
        (PauseMode.KEEP, PrefixCache.RESET, WITH_PAUSE),
        (PauseMode.KEEP, PrefixCache.KEEP, WITH_PAUSE),
        (PauseMode.NONE, PrefixCache.RESET, WITHOUT_PAUSE),
        (PauseMode.KEEP, PrefixCache.VERSION, WITH_PAUSE),
        (PauseMode.ABORT, PrefixCache.RESET, ["/pause" if c == "delta_pause" else c for c in WITH_PAUSE]),
        (PauseMode.NONE, PrefixCache.VERSION, [c for c in WITHOUT_PAUSE if c != "/reset_prefix_cache"]),
    ],
)
def test_one_update_asks_nothing_twice(stub, store, asked, pause_mode, prefix_cache, expected):
    with VllmServer(stub.url, timeout_s=30, pause_mode=pause_mode, prefix_cache=prefix_cache) as server:
        follow = Reconciler(store, server)
        assert [follow.step().outcome for _ in range(3)] == ["initialised", "applied", "nothing"]
        commit(store, 1)
        asked.clear()
        assert follow.step().outcome == "applied"
    assert once(asked) == expected
    assert len(expected) <= 8


def test_engines_beside_the_first_one_are_compared_twice_in_an_update(stub, server, store, asked):
    stub.num_engines = 2
    follow = Reconciler(store, server)
    assert [follow.step().outcome for _ in range(3)] == ["initialised", "applied", "nothing"]
    commit(store, 1)
    asked.clear()
    assert follow.step().outcome == "applied"
    assert asked.count("delta_expect") == 2
    assert "/get_world_size" not in asked


def test_engines_are_counted_again_after_a_call_that_failed(stub, server, store, asked):
    follow = Reconciler(store, server)
    assert [follow.step().outcome for _ in range(3)] == ["initialised", "applied", "nothing"]
    asked.clear()
    follow.step()
    assert "/get_world_size" not in asked
    stub.down = True
    assert follow.step().outcome == "failed"
    stub.down = False
    asked.clear()
    follow.step()
    assert asked.count("/get_world_size") == 1


def test_engines_are_counted_again_after_a_restart_that_no_call_noticed(stub, server, store):
    follow = Reconciler(store, server)
    assert [follow.step().outcome for _ in range(3)] == ["initialised", "applied", "nothing"]
    stub.num_engines = 2
    assert [follow.step().outcome for _ in range(3)] == ["initialised", "applied", "nothing"]
    assert server.status().num_engines == 2
    stub.engines[1].held = None
    assert [follow.step().outcome for _ in range(2)] == ["applied", "nothing"]
