"""The loop that keeps a server at the head, one step at a time."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleet_thread import silent

from patchstore.bucket import history
from patchstore.errors import (
    SchemaMismatch,
    ServerUnavailable,
    StateMismatch,
    StoreUnavailable,
    VersionNotFound,
)
from patchstore.follow.desired import HeadWatcher
from patchstore.follow.reconcile import Reconciler
from patchstore.follow.settings import PauseMode, PrefixCache, Settings
from patchstore.follow.vllm_server import VllmServer
from patchstore.stores import layout
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import FaultyStore
from tests.support.copies import objects_of
from tests.support.manifests import begin_run, commit
from tests.support.vllm_stub import StubServer

NAMES = ", ".join(f"'layers.{number}.weight'" for number in range(1000))


@pytest.fixture
def follow(store, server) -> Reconciler:
    settings = Settings(storage_options={"key": "x"}, min_poll_interval_s=1, max_poll_interval_s=8)
    return Reconciler(FaultyStore(store), server, settings)


def did(follow: Reconciler, num_steps: int) -> list[str]:
    return [follow.step().outcome for _ in range(num_steps)]


def test_it_initialises_then_applies_then_waits(follow, store, stub):
    assert did(follow, 3) == ["initialised", "applied", "nothing"]
    assert stub.held == 0
    assert stub.opened == {"store": "memory://follow", "storage_options": {"key": "x"}}
    # All that is read while it waits.
    follow.store.calls.clear()
    follow.step()
    assert follow.store.calls == [("get", layout.manifest_key(1))]


def server_has(**facts: Any) -> Callable[[StubServer], None]:
    return lambda stub: [setattr(stub, name, value) for name, value in facts.items()] and None


def last_engine_has(**facts: Any) -> Callable[[StubServer], None]:
    return lambda stub: [setattr(stub.engines[-1], name, value) for name, value in facts.items()] and None


@pytest.mark.parametrize(
    ("num_engines", "happens", "steps", "says"),
    [
        (1, StubServer.restart, ["initialised", "applied"], ""),
        (1, server_has(weight_version="6"), ["labelled"], ""),
        # A switch that a killed driver left.
        *((num, server_has(switch="resume", paused=True), ["resumed"], "") for num in (1, 2)),
        *((num, last_engine_has(half_applied=True, held=None), ["applied"], "") for num in (1, 3)),
        *((num, last_engine_has(run_id="another", held=0), ["initialised", "applied"], "") for num in (1, 2)),
        # The first one has the head.
        (3, last_engine_has(held=7), ["applied"], ""),
        (3, last_engine_has(switch="resume"), ["applied"], ""),
        (3, last_engine_has(update_open=True), ["applied"], ""),
        # What another driver does.
        (1, server_has(held=7), ["failed", "applied"], "serves version 7"),
        (1, server_has(opened={"store": "memory://b"}), ["failed", "initialised", "applied"], "memory://b"),
    ],
)
def test_what_happened_to_a_server_is_repaired(follow, stub, num_engines, happens, steps, says):
    stub.num_engines = num_engines
    did(follow, 2)
    happens(stub)
    found = [follow.step() for _ in range(len(steps) + 1)]
    assert [each.outcome for each in found] == [*steps, "nothing"]
    if says:
        assert (found[0].error.kind, says in str(found[0].error)) == ("driver-conflict", True)
    for each in stub.engines:
        assert (each.held, each.half_applied, each.switch, each.update_open) == (0, False, None, False)
    assert (stub.paused, stub.weight_version, stub.opened["store"]) == (False, "0", "memory://follow")


def test_it_goes_to_the_head_directly(follow, store, stub):
    did(follow, 2)
    for version in (1, 2, 3):
        commit(store, version)
    done = follow.step()
    assert (done.outcome, done.version, stub.held) == ("applied", 3, 3)
    assert stub.calls.count("delta_prove") == 2


def test_a_server_that_has_the_head_is_only_told_its_number(follow, stub):
    stub.found = 0
    assert did(follow, 2) == ["initialised", "nothing"]
    assert stub.weight_version == "0"
    assert "delta_prove" not in stub.calls


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


def test_a_server_whose_desired_version_calls_is_asked_seldom_and_after_a_failure_soon(store, server, stub):
    head = history.head(store)
    settings = Settings(min_poll_interval_s=1, max_poll_interval_s=64)
    follow = Reconciler(store, server, settings, desired=lambda: head)
    waits = []
    for _ in range(3):
        follow.step()
        waits.append(follow.interval_s)
    stub.down = True
    for _ in range(3):
        follow.step()
        waits.append(follow.interval_s)
    # Initialised, applied, nothing, and three failures.
    assert waits == [1, 64, 64, 2, 4, 8]


def test_an_empty_store_is_waited_for(server, stub):
    store = MemoryStore("memory://empty")
    follow = Reconciler(store, server)
    assert did(follow, 2) == ["nothing", "nothing"]
    begin_run(store)
    commit(store, 0)
    assert did(follow, 2) == ["initialised", "applied"]


def test_an_update_whose_answer_was_lost_is_no_other_drivers(follow, store, server, stub, monkeypatch):
    did(follow, 2)
    commit(store, 1)
    apply = server.apply

    def losing(version, status, **options):
        apply(version, status, **options)
        raise ServerUnavailable("the answer was lost")

    with monkeypatch.context() as patched:
        patched.setattr(server, "apply", losing)
        assert follow.step().outcome == "failed"
    commit(store, 2)
    assert stub.held == 1
    assert did(follow, 1) == ["applied"]


@pytest.mark.parametrize("error", [StoreUnavailable("no route"), VersionNotFound("not yet"), None])
def test_a_switch_that_a_killed_driver_left_is_ended_though_no_version_is_desired(
    follow, server, stub, error
):
    did(follow, 2)

    def desired():
        if error is not None:
            raise error

    restarted = Reconciler(follow.store, server, desired=desired)
    stub.switch, stub.paused = "resume", True
    assert restarted.step().outcome == "resumed"
    assert (stub.paused, stub.switch) == (False, None)
    assert restarted.step().outcome == "failed"


@pytest.mark.parametrize("num_engines", [1, 2])
def test_what_is_half_applied_or_differs_stays_paused_while_no_version_is_desired(server, stub, num_engines):
    stub.num_engines = num_engines
    server.init_weight_transfer("memory://follow")
    stub.held, stub.switch, stub.paused = 0, "resume", True
    if num_engines == 1:
        stub.half_applied, stub.held = True, None
    else:
        stub.engines[1].held = 1
    assert (
        Reconciler(MemoryStore("memory://follow"), server, desired=lambda: None).step().outcome == "nothing"
    )
    assert (stub.paused, stub.switch) == (True, "resume")


def test_a_failed_update_is_tried_again_with_growing_waits_and_never_skipped(follow, store, stub):
    did(follow, 2)
    commit(store, 1)
    stub.failures["delta_prove"] = ["[corrupt-object] bad bytes"] * 3
    waits = []
    for _ in range(3):
        done = follow.step()
        assert (done.outcome, done.version, done.error.kind) == ("failed", 1, "corrupt-object")
        waits.append(follow.interval_s)
    assert waits == [2, 4, 8]
    assert stub.held == 0
    assert follow.step().outcome == "applied"
    assert (stub.held, follow.interval_s) == (1, 1)


def test_a_server_that_has_the_run_open_at_another_place_is_brought_to_this_one(follow, server, stub):
    server.init_weight_transfer("s3://moved/follow")
    stub.held = 0
    assert did(follow, 3) == ["initialised", "applied", "nothing"]
    assert stub.opened["store"] == "memory://follow"


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_server_that_calls_the_same_place_otherwise_opens_it_only_once(follow, store, stub, num_engines):
    stub.num_engines = num_engines
    stub.spelled = "/mnt/follow"
    assert did(follow, 3) == ["initialised", "applied", "nothing"]
    commit(store, 1)
    assert did(follow, 2) == ["applied", "nothing"]
    assert stub.calls.count("/init_weight_transfer_engine") == 1


@pytest.mark.parametrize(
    "kind", ["usage", "unsupported-store", "store-unavailable", "not-found", "version-not-found"]
)
def test_a_restarted_follower_brings_its_credentials_to_a_server_whose_own_fail(
    follow, store, server, stub, kind
):
    did(follow, 2)
    commit(store, 1)
    stub.failures["delta_prove"] = [f"[{kind}] refused"]
    restarted = Reconciler(store, server, Settings(storage_options={"key": "rotated"}))
    assert did(restarted, 4) == ["failed", "initialised", "applied", "nothing"]
    assert stub.opened["storage_options"] == {"key": "rotated"}


def test_a_store_that_fails_again_and_again_is_opened_once_until_an_update_succeeds(follow, store, stub):
    did(follow, 2)
    for version in (1, 2):
        commit(store, version)
        stub.calls.clear()
        stub.failures["delta_prove"] = ["[store-unavailable] no route"] * 4
        assert did(follow, 6) == ["failed", "initialised", "failed", "failed", "failed", "applied"]
        assert stub.calls.count("/init_weight_transfer_engine") == 1


def test_a_server_that_cannot_open_the_store_again_is_updated_as_it_has_it_open(follow, store, stub):
    did(follow, 2)
    commit(store, 1)
    stub.failures["delta_prove"] = ["[store-unavailable] no route"]
    stub.failures["/init_weight_transfer_engine"] = ["[usage] wrong credentials"]
    assert did(follow, 4) == ["failed", "failed", "applied", "nothing"]
    assert (stub.held, stub.calls.count("/init_weight_transfer_engine")) == (1, 2)


def test_a_version_is_gone_back_to_directly(store, server, stub):
    for version in (1, 2, 3):
        commit(store, version)
    wanted = 3
    follow = Reconciler(store, server, desired=lambda: history.read_manifest(store, wanted))
    did(follow, 2)
    wanted = 1
    assert did(follow, 2) == ["applied", "nothing"]
    assert (stub.history, stub.weight_version) == ([3, 1], "1")


def test_versions_of_one_server_keep_their_distance_but_a_server_without_one_does_not_wait(
    store, server, stub
):
    follow = Reconciler(store, server, Settings(update_interval_s=1000))
    did(follow, 2)
    commit(store, 1)
    assert did(follow, 2) == ["nothing", "nothing"]
    assert stub.held == 0
    stub.half_applied, stub.held = True, None
    assert did(follow, 2) == ["applied", "nothing"]
    assert stub.held == 1


def test_the_wait_ends_when_the_distance_is_kept(store, server, stub, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    follow = Reconciler(
        store, server, Settings(update_interval_s=5, min_poll_interval_s=1, max_poll_interval_s=64)
    )
    did(follow, 2)
    commit(store, 1)
    now = 102.0
    did(follow, 4)
    assert follow.interval_s == 3
    now = 105.0
    assert follow.step().version == 1


def test_weights_that_diverged_are_replaced_and_verified_again(store, server, stub, monkeypatch):
    answers = [StateMismatch("1 tensors differ"), None]

    def verify(*_: object) -> int:
        found = answers.pop(0)
        if found is not None:
            raise found
        return 0

    monkeypatch.setattr(server, "verify", verify)
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    follow = Reconciler(store, server, Settings(verify_every_s=10))
    assert did(follow, 3) == ["initialised", "applied", "nothing"]
    now = 10.0
    diverged = follow.step()
    assert (diverged.outcome, diverged.error.kind, diverged.version) == ("diverged", "state-mismatch", None)
    assert did(follow, 2) == ["applied", "nothing"]
    now = 20.0
    assert did(follow, 2) == ["verified", "nothing"]


def test_an_unexpected_exception_is_a_failure_too(follow, stub, caplog):
    did(follow, 2)
    stub.status = lambda rank, engine: {}
    done = follow.step()
    assert (done.outcome, done.error.kind) == ("failed", "internal")
    assert "Traceback" in caplog.text


def test_following_needs_no_torch():
    code = "import sys, patchstore.follow.service; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


@pytest.mark.parametrize(
    ("path", "refusal", "says"),
    [
        (
            "delta_prove",
            "[version-not-found] /copy has no version 1",
            "the server has /copy open, and this process reads memory://follow",
        ),
        (
            "/init_weight_transfer_engine",
            "[version-not-found] memory://follow holds no run",
            "this process reads memory://follow too",
        ),
        (
            "/init_weight_transfer_engine",
            f"[schema-mismatch] no 'scale' in Model, which has {NAMES}",
            "no 'scale' in Model",
        ),
    ],
)
def test_what_a_server_refuses_is_said_with_what_this_process_knows(follow, store, stub, path, refusal, says):
    if path == "delta_prove":
        stub.spelled = "/copy"
        did(follow, 2)
        commit(store, 1)
    stub.failures[path] = [refusal]
    found = follow.step().error
    assert f"[{found.kind}]" == refusal.partition(" ")[0]
    assert says in str(found)
    assert len(str(found)) < 400


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "delta_prove"])
def test_a_run_of_a_wrapped_model_is_explained_in_a_line(server, stub, path):
    store = MemoryStore("memory://wrapped")
    begin_run(store, tensors=("_orig_mod.module.a", "_orig_mod.module.b"))
    commit(store, 0)
    stub.failures[path] = [f"[schema-mismatch] no '_orig_mod' in Model, which has {NAMES}"]
    follow = Reconciler(store, server)
    while (done := follow.step()).outcome != "failed":
        pass
    assert isinstance(done.error, SchemaMismatch)
    assert "published from a wrapped model" in str(done.error)
    assert "Publish model._orig_mod.module" in str(done.error)
    assert "layers." not in str(done.error)


def test_a_store_that_does_not_answer_was_emptied_or_is_of_another_run_is_a_failure_and_not_the_end(
    store, server, stub
):
    settings = Settings(min_poll_interval_s=1, max_poll_interval_s=8)
    follow = Reconciler(store, server, settings, desired=HeadWatcher(store, recheck_s=0).refresh)
    stub.run_id = "another"
    done = follow.step()
    assert (done.outcome, done.error.kind, "run another" in str(done.error)) == ("failed", "usage", True)
    # It is not asked at every turn.
    assert follow.interval_s == 2
    stub.run_id = "run"
    did(follow, 2)
    with silent(store):
        assert follow.step().error.kind == "store-unavailable"
    assert follow.step().outcome == "nothing"
    saved = objects_of(store)
    for key in saved:
        store.delete(key)
    done = follow.step()
    assert (done.outcome, done.error.kind, stub.held) == ("failed", "store-replaced", 0)
    for key, data in saved.items():
        store.put(key, data)
    assert did(follow, 1) == ["nothing"]


# The HTTP calls of one update. Each waits for the engine's current step, so none is made without need.


@pytest.fixture
def asked(stub: StubServer) -> list[str]:
    """Paths of all calls, and the methods of collective ones, in order."""
    calls: list[str] = []
    stub.on_call = calls.append
    return calls


WITH_PAUSE = ["delta_prefetch", "delta_prove", "delta_pause", "/finish_weight_update", "delta_resume"]
WITHOUT_PAUSE = ["delta_prefetch", "delta_prove", "/finish_weight_update", "delta_switch"]


@pytest.mark.parametrize(
    ("pause_mode", "prefix_cache", "expected"),
    [
        (PauseMode.KEEP, PrefixCache.RESET, WITH_PAUSE),
        (PauseMode.KEEP, PrefixCache.KEEP, WITH_PAUSE),
        (PauseMode.NONE, PrefixCache.RESET, WITHOUT_PAUSE),
        (PauseMode.KEEP, PrefixCache.VERSION, WITH_PAUSE),
        (PauseMode.ABORT, PrefixCache.RESET, ["/pause" if c == "delta_pause" else c for c in WITH_PAUSE]),
        (PauseMode.NONE, PrefixCache.VERSION, WITHOUT_PAUSE),
    ],
)
def test_one_update_asks_nothing_twice(stub, store, asked, pause_mode, prefix_cache, expected):
    with VllmServer(stub.url, timeout_s=30, pause_mode=pause_mode, prefix_cache=prefix_cache) as server:
        follow = Reconciler(store, server)
        assert did(follow, 3) == ["initialised", "applied", "nothing"]
        commit(store, 1)
        asked.clear()
        assert follow.step().outcome == "applied"
    # The status comes with the first question, and the end of the fetch with the second.
    assert asked == ["delta_prefetch", *expected]


def test_engines_beside_the_first_one_are_compared_twice_in_an_update(follow, stub, store, asked):
    stub.num_engines = 2
    assert did(follow, 3) == ["initialised", "applied", "nothing"]
    commit(store, 1)
    asked.clear()
    assert follow.step().outcome == "applied"
    assert asked.count("delta_expect") == 2
    updating = ["/is_paused", "/start_weight_update", "/update_weights", "/pause"]
    ending = ["/finish_weight_update", "/resume", "delta_switch"]
    assert [call for call in asked if call not in {"delta_prefetch", "delta_expect"}] == [*updating, *ending]
    assert "/get_world_size" not in asked


def test_engines_are_counted_again_after_a_call_that_failed(follow, stub, asked):
    assert did(follow, 3) == ["initialised", "applied", "nothing"]
    asked.clear()
    follow.step()
    assert "/get_world_size" not in asked
    stub.down = True
    assert follow.step().outcome == "failed"
    stub.down = False
    asked.clear()
    follow.step()
    assert asked.count("/get_world_size") == 1


def test_engines_are_counted_again_after_a_restart_that_no_call_noticed(follow, stub, server):
    assert did(follow, 3) == ["initialised", "applied", "nothing"]
    stub.num_engines = 2
    assert did(follow, 3) == ["initialised", "applied", "nothing"]
    assert server.status().num_engines == 2
    stub.engines[1].held = None
    assert did(follow, 2) == ["applied", "nothing"]
