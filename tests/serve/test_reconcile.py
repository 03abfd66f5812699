"""The loop that keeps a server at the head, one step at a time."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchstore.errors import (
    SchemaMismatch,
    ServerUnavailable,
    StateMismatch,
    StoreUnavailable,
    VersionNotFound,
)
from patchstore.format import history, layout
from patchstore.format.records import Schema, StoreHeader, TensorSpec
from patchstore.serve.desired import HeadWatcher
from patchstore.serve.reconcile import Reconciler
from patchstore.stores.memory import MemoryStore
from tests.support.manifests import begin_run, commit


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore("memory://follow")
    commit(store, 0)
    return store


@pytest.fixture
def follow(store, server) -> Reconciler:
    return Reconciler(
        store, server, storage_options={"key": "x"}, min_poll_interval_s=1, max_poll_interval_s=8
    )


def did(follow: Reconciler, num_steps: int) -> list[str]:
    return [follow.step().outcome for _ in range(num_steps)]


def test_it_initialises_then_applies_then_waits(follow, stub):
    assert did(follow, 3) == ["initialised", "applied", "nothing"]
    assert stub.held == 0
    assert stub.opened == {"store": "memory://follow", "storage_options": {"key": "x"}}


def test_it_goes_to_the_head_directly(follow, store, stub):
    did(follow, 2)
    for version in (1, 2, 3):
        commit(store, version)
    done = follow.step()
    assert (done.outcome, done.version, stub.held) == ("applied", 3, 3)
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


def test_a_server_whose_desired_version_calls_is_asked_seldom_and_after_a_failure_soon(store, server, stub):
    head = history.head(store)
    follow = Reconciler(store, server, desired=lambda: head, min_poll_interval_s=1, max_poll_interval_s=64)
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
    assert Reconciler(store, server).step().outcome == "nothing"
    assert stub.calls == []


def test_a_wrong_label_of_answers_is_corrected(follow, stub):
    did(follow, 2)
    stub.weight_version = "6"
    assert did(follow, 2) == ["labelled", "nothing"]
    assert stub.weight_version == "0"


def test_another_driver_of_the_server_is_noticed_and_what_it_did_is_undone(follow, store, stub):
    commit(store, 1)
    assert did(follow, 3) == ["initialised", "applied", "nothing"]
    stub.held = 0
    conflict = follow.step()
    assert (conflict.outcome, conflict.error.kind) == ("failed", "driver-conflict")
    assert "serves version 0" in str(conflict.error)
    assert did(follow, 2) == ["applied", "nothing"]
    assert stub.held == 1


def test_another_driver_that_opens_another_store_is_noticed(follow, stub):
    did(follow, 2)
    stub.opened = {"store": "memory://another"}
    conflict = follow.step()
    assert (conflict.outcome, conflict.error.kind) == ("failed", "driver-conflict")
    assert "memory://another" in str(conflict.error)
    assert follow.step().outcome == "initialised"
    assert did(follow, 2)[-1] == "nothing"


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


def test_a_switch_that_a_killed_driver_left_is_ended(follow, stub):
    did(follow, 2)
    stub.switch, stub.paused, stub.stale_prefixes = "resume", True, True
    assert did(follow, 2) == ["resumed", "nothing"]
    assert (stub.paused, stub.stale_prefixes) == (False, False)


@pytest.mark.parametrize("error", [StoreUnavailable("no route"), VersionNotFound("not yet"), None])
def test_a_switch_that_a_killed_driver_left_is_ended_though_no_version_is_desired(
    follow, server, stub, error
):
    did(follow, 2)

    def desired():
        if error is not None:
            raise error

    restarted = Reconciler(follow.store, server, desired=desired)
    stub.switch, stub.paused, stub.stale_prefixes = "resume", True, True
    assert restarted.step().outcome == "resumed"
    assert (stub.paused, stub.stale_prefixes, stub.switch) == (False, False, None)
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


def test_engines_that_agree_need_no_other_update(follow, stub):
    stub.num_engines = 2
    assert did(follow, 3) == ["initialised", "applied", "nothing"]
    stub.switch, stub.paused, stub.stale_prefixes = "resume", True, True
    assert did(follow, 2) == ["resumed", "nothing"]
    assert (stub.paused, stub.stale_prefixes) == (False, False)


@pytest.mark.parametrize(
    ("name", "value"), [("held", 7), ("half_applied", True), ("switch", "resume"), ("update_open", True)]
)
def test_an_engine_that_differs_is_brought_back_although_the_first_one_holds_the_head(
    follow, stub, name, value
):
    stub.num_engines = 3
    did(follow, 2)
    setattr(stub.engines[2], name, value)

    assert did(follow, 2) == ["applied", "nothing"]

    assert [(each.held, each.half_applied, each.switch, each.update_open) for each in stub.engines] == [
        (0, False, None, False)
    ] * 3


def test_an_engine_that_follows_another_run_has_the_store_opened_again(follow, stub):
    stub.num_engines = 2
    did(follow, 2)
    stub.engines[1].run_id = "another"
    stub.engines[1].held = 0
    assert did(follow, 3) == ["initialised", "applied", "nothing"]


def test_engines_of_which_one_failed_stay_paused_until_the_next_step_fixes_them(follow, store, stub):
    stub.num_engines = 2
    did(follow, 2)
    commit(store, 1)
    stub.failures["/finish_weight_update"] = ["[load-failed] in the engine that does not answer"]
    stub.failing_engine = 1
    assert follow.step().error.kind == "load-failed"
    assert ([each.held for each in stub.engines], stub.paused) == ([1, 0], True)

    assert did(follow, 2) == ["applied", "nothing"]
    assert ([each.held for each in stub.engines], stub.paused) == ([1, 1], False)


def test_a_failed_update_is_tried_again_with_growing_waits_and_never_skipped(follow, store, stub):
    did(follow, 2)
    commit(store, 1)
    stub.failures["/update_weights"] = ["[corrupt-object] bad bytes"] * 3
    waits = []
    for _ in range(3):
        done = follow.step()
        assert (done.outcome, done.version, done.error.kind) == ("failed", 1, "corrupt-object")
        waits.append(follow.interval_s)
    assert waits == [2, 4, 8]
    assert stub.held == 0
    assert follow.step().outcome == "applied"
    assert (stub.held, follow.interval_s) == (1, 1)


def test_a_half_applied_server_is_updated_though_it_was_at_the_head(follow, stub):
    did(follow, 2)
    stub.half_applied, stub.held = True, None
    assert did(follow, 2) == ["applied", "nothing"]
    assert not stub.half_applied


def test_ranks_that_differ_are_brought_together(follow, stub):
    stub.num_ranks = 2
    did(follow, 2)
    stub.held_by_rank = {1: 7}
    done = follow.step()
    stub.held_by_rank = {}
    assert (done.outcome, done.version) == ("applied", 0)


def test_a_server_on_another_run_is_brought_to_this_one(follow, stub):
    did(follow, 2)
    stub.engines[0].run_id = "another"
    assert follow.step().outcome == "initialised"


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
    stub.failures["/update_weights"] = [f"[{kind}] refused"]
    restarted = Reconciler(store, server, storage_options={"key": "rotated"})
    assert did(restarted, 4) == ["failed", "initialised", "applied", "nothing"]
    assert stub.opened["storage_options"] == {"key": "rotated"}


def test_a_store_that_fails_again_and_again_is_opened_once_until_an_update_succeeds(follow, store, stub):
    did(follow, 2)
    for version in (1, 2):
        commit(store, version)
        stub.calls.clear()
        stub.failures["/update_weights"] = ["[store-unavailable] no route"] * 4
        assert did(follow, 6) == ["failed", "initialised", "failed", "failed", "failed", "applied"]
        assert stub.calls.count("/init_weight_transfer_engine") == 1


def test_a_server_that_cannot_open_the_store_again_is_updated_as_it_has_it_open(follow, store, stub):
    did(follow, 2)
    commit(store, 1)
    stub.failures["/update_weights"] = ["[store-unavailable] no route"]
    stub.failures["/init_weight_transfer_engine"] = ["[usage] wrong credentials"]
    assert did(follow, 4) == ["failed", "failed", "applied", "nothing"]
    assert (stub.held, stub.calls.count("/init_weight_transfer_engine")) == (1, 2)


def test_a_server_for_which_the_url_is_another_place_is_told_apart_and_not_asked_at_every_turn(follow, stub):
    stub.run_id = "another"
    done = follow.step()
    assert (done.outcome, done.error.kind, follow.interval_s) == ("failed", "usage", 2)
    assert "run another" in str(done.error)


def test_a_store_that_does_not_answer_is_a_failure_and_not_the_end(follow, store, stub, monkeypatch):
    did(follow, 2)

    def unreachable(key, start=0, end=None):
        raise StoreUnavailable("no route")

    with monkeypatch.context() as patch:
        patch.setattr(store, "get", unreachable)
        assert follow.step().error.kind == "store-unavailable"
    assert follow.step().outcome == "nothing"


def test_one_new_slot_is_all_that_is_read_while_waiting(follow, store, monkeypatch):
    did(follow, 2)
    get, reads = store.get, []
    monkeypatch.setattr(store, "get", lambda key, *span: reads.append(key) or get(key, *span))
    follow.step()
    assert reads == [layout.manifest_key(1)]


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
    follow = Reconciler(store, server, update_interval_s=1000)
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
    follow = Reconciler(store, server, update_interval_s=5, min_poll_interval_s=1, max_poll_interval_s=64)
    did(follow, 2)
    commit(store, 1)
    now = 102.0
    did(follow, 4)
    assert follow.interval_s == 3
    now = 105.0
    assert follow.step().version == 1


def test_weights_that_diverged_are_replaced_and_verified_again(store, server, stub, monkeypatch):
    answers = [StateMismatch("1 tensors differ"), None]

    def verify_server(*_: object) -> None:
        found = answers.pop(0)
        if found is not None:
            raise found

    monkeypatch.setattr("patchstore.serve.verify.verify_server", verify_server)
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    begin_run(store)
    follow = Reconciler(store, server, verify_every_s=10)
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
    code = "import sys, patchstore.serve.service; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


# What a server refuses, and this process knows more of.


def test_a_server_that_has_another_place_open_under_the_runs_number_is_said_to(follow, store, stub):
    stub.spelled = "/copy"
    did(follow, 2)
    commit(store, 1)
    stub.failures["/update_weights"] = ["[version-not-found] /copy has no version 1"]
    error = follow.step().error
    assert isinstance(error, VersionNotFound)
    assert "the server has /copy open, and this process reads memory://follow" in str(error)


def test_a_server_that_finds_nothing_at_the_same_url_is_said_to(follow, stub):
    stub.failures["/init_weight_transfer_engine"] = ["[version-not-found] memory://follow holds no run"]
    error = follow.step().error
    assert isinstance(error, VersionNotFound)
    assert "this process reads memory://follow too" in str(error)


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/update_weights"])
def test_a_run_of_a_wrapped_model_is_explained_in_a_line(server, stub, path):
    store = MemoryStore("memory://wrapped")
    names = ("_orig_mod.module.a", "_orig_mod.module.b")
    schema = Schema(tensors=tuple(TensorSpec(name=name, dtype="BF16", shape=(2,)) for name in names))
    history.create_header(store, StoreHeader(run_id="run", created_at="2026-01-01T00:00:00Z", schema=schema))
    commit(store, 0)
    every = ", ".join(f"'layers.{number}.weight'" for number in range(1000))
    stub.failures[path] = [f"[schema-mismatch] no '_orig_mod' in Model, which has {every}"]
    follow = Reconciler(store, server)
    while (done := follow.step()).outcome != "failed":
        pass
    assert isinstance(done.error, SchemaMismatch)
    assert "published from a wrapped model" in str(done.error)
    assert "Publish model._orig_mod.module" in str(done.error)
    assert "layers." not in str(done.error)


def test_another_mismatch_keeps_what_the_server_says_without_all_its_names(follow, store, stub):
    begin_run(store)
    every = ", ".join(f"'layers.{number}.weight'" for number in range(1000))
    said = f"[schema-mismatch] no 'scale' in Model, which has {every}"
    stub.failures["/init_weight_transfer_engine"] = [said]
    error = follow.step().error
    assert isinstance(error, SchemaMismatch)
    assert "no 'scale' in Model" in str(error)
    assert len(str(error)) < 400


def test_an_emptied_store_is_an_error_while_a_server_serves_from_it(follow, store, stub):
    did(follow, 2)
    saved = {key: store.get(key) for key in store.list()}
    for key in saved:
        store.delete(key)
    follow._desired = HeadWatcher(store, recheck_s=0).refresh
    done = follow.step()
    assert (done.outcome, done.error.kind, stub.held) == ("failed", "store-replaced", 0)
    for key, data in saved.items():
        store.put(key, data)
    assert did(follow, 1) == ["nothing"]
