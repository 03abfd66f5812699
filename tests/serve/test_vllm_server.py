"""The client of a vLLM server: the order of its calls, and what it makes of refusals."""

import threading

import pytest

from patchstore.errors import (
    CorruptObject,
    DeviceMemoryShort,
    HalfApplied,
    LoadFailed,
    PatchstoreError,
    ServerUnavailable,
    UsageError,
    VersionNotFound,
    WrongParent,
)
from patchstore.serve.vllm_server import VllmServer

APPLY = [
    *["delta_prefetch"] * 3,
    "/start_weight_update",
    "/update_weights",
    "delta_pause",
    "/finish_weight_update",
    "/resume",
    "delta_switch",
]


def test_apply_fetches_first_and_pauses_only_to_switch(stub, server):
    server.apply(12)
    assert stub.calls == APPLY
    assert (stub.held, stub.weight_version, server.weight_version()) == (12, "12", "12")
    assert (stub.paused, stub.stale_prefixes, stub.switch) == (False, False, None)


def test_a_server_that_another_client_paused_stays_paused(stub, server):
    stub.paused = True
    server.apply(12)
    assert stub.paused
    assert not stub.stale_prefixes
    assert "/resume" not in stub.calls


def test_an_update_that_a_killed_driver_left_open_is_begun_anew(stub, server):
    stub.update_open = True
    server.apply(12)
    assert stub.calls == APPLY


def test_a_switch_that_a_killed_driver_left_is_ended_first(stub, server):
    stub.switch, stub.paused, stub.stale_prefixes = "resume", True, True
    server.apply(12)
    assert stub.calls == ["/reset_prefix_cache", *APPLY[-2:], *APPLY]
    assert not stub.paused


def test_a_half_applied_server_stays_paused_until_an_update_fixes_it(stub, server):
    stub.tears = True
    with pytest.raises(HalfApplied):
        server.apply(12)
    assert (stub.half_applied, stub.paused, stub.switch) == (True, True, "resume")
    server.apply(12)
    assert (stub.half_applied, stub.paused, stub.switch, stub.held) == (False, False, None, 12)


def test_what_is_not_vllm_is_said(server, stub):
    stub.page = b"<html>Welcome</html>"
    with pytest.raises(ServerUnavailable, match="unlike vLLM"):
        server.status()
    with pytest.raises(UsageError):
        VllmServer("localhost:8000")


def test_a_failed_fetch_pauses_nothing(stub, server):
    stub.failures["/update_weights"] = ["[corrupt-object] deltas/x should have digest y"]
    with pytest.raises(CorruptObject, match=r"/update_weights: deltas/x should have digest y$"):
        server.apply(12)
    assert stub.calls == APPLY[:5]


def test_a_failed_switch_lets_generation_go_on(stub, server):
    stub.failures["/finish_weight_update"] = ["[half-applied] half of it"]
    with pytest.raises(HalfApplied):
        server.apply(12)
    assert (stub.paused, stub.switch, stub.weight_version) == (False, None, "default")


def test_a_way_that_is_too_far_for_the_gpus_memory_is_gone_in_steps(stub, server):
    server.apply(0)
    stub.calls.clear()
    short = "[device-memory] more than the 3 GiB that are free"
    stub.failures["/update_weights"] = [short, short]
    switched = server.apply(8)
    assert switched is not None
    assert (stub.held, stub.paused, stub.switch) == (8, False, None)
    # 8 and 4 are too far; then 2, 4 and 8.
    assert stub.calls.count("/update_weights") == 5
    assert stub.calls.count("/finish_weight_update") == 3


@pytest.mark.parametrize("held", [None, 7])
def test_memory_that_is_short_for_one_version_is_an_error(stub, server, held):
    stub.held = held
    stub.failures["/update_weights"] = ["[device-memory] more than the 3 GiB that are free"]
    with pytest.raises(DeviceMemoryShort, match="3 GiB"):
        server.apply(8)
    assert stub.held == held


@pytest.mark.parametrize(("path", "held"), [("/pause", None), ("/resume", 12)])
def test_a_switch_that_failed_leaves_a_mark_and_is_ended_by_the_next_apply(stub, server, path, held):
    stub.has_plugin = False
    # Also where ending it at once fails.
    stub.failures |= {path: ["engine is busy"], "/reset_prefix_cache": ["blocks are busy"]}
    with pytest.raises(ServerUnavailable, match="engine is busy"):
        server.apply(12)
    assert (stub.held, stub.paused, server.status().switch) == (held, held is not None, "resume")
    stub.failures.clear()

    server.apply(13)

    assert (stub.held, stub.paused, stub.stale_prefixes, stub.switch) == (13, False, False, None)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("[version-not-found] no version 7", VersionNotFound),
        ("[wrong-parent] version 18 builds on 17", WrongParent),
        ("[half-applied] rank 0: half; [data] rank 1: bad", HalfApplied),
        ("[load-failed] the loader raised", LoadFailed),
        ("[no-such-kind] of a later release", ServerUnavailable),
        ("index out of range", ServerUnavailable),
    ],
)
def test_a_refusal_becomes_the_error_whose_kind_it_names(stub, server, message, error):
    stub.failures["/start_weight_update"] = [message]
    with pytest.raises(PatchstoreError) as caught:
        server.start_weight_update()
    assert type(caught.value) is error
    assert message.partition("] ")[2] in str(caught.value)


def test_a_server_that_is_down_is_unavailable(stub, server):
    stub.down = True
    with pytest.raises(ServerUnavailable):
        server.status()


@pytest.fixture
def asked(stub):
    """The paths of all calls, in order."""
    paths = []
    stub.on_call = paths.append
    return paths


def without_backend(stub):
    stub.config["weight_transfer_config"] = {"backend": "nccl"}


def without_extension(stub):
    stub.config["parallel_config"]["worker_extension_cls"] = ""


def without_routes(stub):
    stub.is_dev = False


@pytest.mark.parametrize(
    ("start", "advice"),
    [
        (without_backend, "nccl weight transfer backend.*--weight-transfer-config"),
        (without_extension, "--worker-extension-cls"),
        (without_routes, "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_ranks_that_would_raise_are_not_asked(stub, server, asked, start, advice):
    start(stub)
    for _ in range(2):
        with pytest.raises(ServerUnavailable, match=advice):
            server.status()
    assert (asked.count("/server_info"), asked.count("/collective_rpc")) == (2, 0)


def test_a_server_that_answered_once_is_asked_how_it_was_started_when_it_fails(stub, server, asked):
    server.status()
    server.status()
    assert asked.count("/server_info") == 1
    stub.failures["/collective_rpc"] = ["EngineCore died"]
    with pytest.raises(ServerUnavailable, match="EngineCore died"):
        server.status()
    without_backend(stub)
    asked.clear()
    with pytest.raises(ServerUnavailable, match="--weight-transfer-config"):
        server.status()
    assert asked == ["/server_info"]


@pytest.mark.parametrize(
    "config",
    [
        "VllmConfig(...)",
        {},
        {"parallel_config": {}},
        {"parallel_config": None},
        ValueError("not serialisable"),
    ],
)
def test_a_server_that_does_not_tell_how_it_was_started_is_let_pass(stub, server, monkeypatch, config):
    answer = stub.answer

    def other(path, query, body):
        if path != "/server_info":
            return answer(path, query, body)
        if isinstance(config, ValueError):
            raise config
        return {"vllm_config": config}

    monkeypatch.setattr(stub, "answer", other)
    stub.held = 5
    assert server.configuration() is None
    assert server.status().serving == 5


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_without_the_backend_answer_why(stub, server, monkeypatch, num_ranks):
    stub.num_ranks = num_ranks
    monkeypatch.setattr(stub, "collective", lambda *_: [{"error": "start vllm with it"}] * num_ranks)
    for call in (server.status, lambda: server.end_switch("resume"), lambda: server.sums(0, 1)):
        with pytest.raises(ServerUnavailable, match=r"answered delta_[a-z]+: start vllm with it$"):
            call()


def test_ranks_that_differ_serve_no_version(stub, server):
    stub.num_ranks, stub.held = 2, 5
    assert server.status().serving == 5
    stub.held_by_rank = {1: 4}
    assert server.status().serving is None
    assert [rank["serving"] for rank in server.status().ranks] == [5, 4]


def test_a_missing_route_is_told_from_a_server_that_is_down(server):
    with pytest.raises(ServerUnavailable, match="VLLM_SERVER_DEV_MODE"):
        server._http.post("/no_such_route", {})


def test_an_old_vllm_without_weight_versions_has_none(stub, server, monkeypatch):
    answer = stub.answer

    def old(path, query, body):
        if "version" in path or path == "/weight_info":
            raise KeyError(path)
        return answer(path, query, body)

    monkeypatch.setattr(stub, "answer", old)
    server.set_weight_version("3")
    assert server.weight_version() is None


def test_a_port_without_a_server_is_unavailable():
    with VllmServer("http://127.0.0.1:1") as server, pytest.raises(ServerUnavailable):
        server.status()


def test_engines_of_which_one_failed_stay_paused_until_all_have_one_version(stub, server):
    stub.num_engines = 2
    server.init_weight_transfer("store")
    stub.failures["/finish_weight_update"] = ["[load-failed] in the engine that does not answer"]
    stub.failing_engine = 1
    with pytest.raises(LoadFailed):
        server.apply(1)
    status = server.status()
    assert (stub.paused, status.engines_differ, status.serving, status.initialised) == (
        True,
        True,
        None,
        True,
    )

    stub.failures["/update_weights"] = ["[corrupt-object] and again"]
    with pytest.raises(CorruptObject):
        server.apply(1)
    assert stub.paused

    server.apply(1)
    assert (stub.paused, server.status().serving, stub.switch) == (False, 1, None)


def test_engines_that_all_failed_alike_go_on_with_what_they_had(stub, server):
    stub.num_engines = 2
    server.init_weight_transfer("store")
    stub.failures["/finish_weight_update"] = ["[load-failed] in both"]
    with pytest.raises(LoadFailed):
        server.apply(1)
    assert (stub.paused, server.status().engines_differ) == (False, False)


def test_all_engines_have_fetched_before_generation_waits_for_the_rest(stub, server):
    stub.num_engines = 2
    stub.engines[1].prefetches[5] = -10
    server.prefetch(5)
    assert stub.engines[1].prefetches[5] >= 3


def test_an_engine_of_another_run_makes_the_server_one_without_a_run(stub, server):
    stub.num_engines = 2
    server.init_weight_transfer("store")
    assert server.status().run_id == "run"
    stub.engines[1].run_id = "another"
    status = server.status()
    assert (status.initialised, status.run_id, status.engines_differ) == (False, None, True)


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize(("cache", "clear"), [("reset", "true"), ("keep", "false")])
def test_generation_is_paused_in_the_way_that_was_chosen(stub, mode, cache, clear):
    stub.has_plugin = False
    with VllmServer(stub.url, timeout_s=30, pause_mode=mode, prefix_cache=cache) as server:
        server.apply(12)
    assert stub.pauses == [{"mode": mode, "clear_cache": clear}]
    assert (stub.held, stub.paused, stub.stale_prefixes) == (12, False, cache == "keep")


@pytest.mark.parametrize("cache", ["reset", "keep"])
def test_the_engine_core_pauses_where_it_has_the_plugin(stub, cache):
    with VllmServer(stub.url, timeout_s=30, prefix_cache=cache) as server:
        server.apply(12)
    assert "delta_pause" in stub.calls
    assert (stub.pauses, stub.held, stub.paused, stub.stale_prefixes) == ([], 12, False, cache == "keep")


def test_a_server_without_the_plugin_is_asked_once_whether_its_core_pauses(stub, caplog):
    caplog.set_level("INFO")
    stub.has_plugin = False
    with VllmServer(stub.url, timeout_s=30) as server:
        server.apply(12)
        server.apply(13)
        assert (stub.calls.count("delta_pause"), len(stub.pauses)) == (1, 2)
        assert caplog.text.count("20 ms longer: the engine core did not load the plugin") == 1
        # What comes back at this address may be another server.
        stub.down = True
        with pytest.raises(ServerUnavailable):
            server.status()
        stub.down, stub.has_plugin = False, True
        server.status()
        server.apply(14)
    assert (stub.calls.count("delta_pause"), len(stub.pauses), stub.held) == (2, 2, 14)


def test_several_engines_are_paused_by_vllm_since_one_of_them_may_lack_the_plugin(stub):
    stub.num_engines = 2
    with VllmServer(stub.url, timeout_s=30) as server:
        server.apply(12)
    assert "delta_pause" not in stub.calls
    assert stub.pauses == [{"mode": "keep", "clear_cache": "true"}]
    assert [each.held for each in stub.engines] == [12, 12]


@pytest.mark.parametrize("answer", [[], [None], ["paused"], [{}, {}], [{"error": "no", "kind": "new"}]])
def test_nothing_is_written_where_it_is_unknown_whether_the_core_paused(stub, monkeypatch, answer):
    monkeypatch.setattr(stub, "core", lambda *_: answer)
    found = pytest.raises(ServerUnavailable, match="answered delta_pause with")
    with VllmServer(stub.url, timeout_s=30) as server, found:
        server.apply(12)
    assert stub.held is None
    assert "/finish_weight_update" not in stub.calls


@pytest.mark.parametrize(
    ("mode", "pauses"),
    [
        ("keep", []),
        ("wait", [{"mode": "wait", "clear_cache": "false"}]),
        ("abort", [{"mode": "abort", "clear_cache": "false"}]),
        ("none", []),
    ],
)
def test_prefixes_are_told_apart_in_each_mode_and_nothing_is_reset(stub, mode, pauses):
    with VllmServer(stub.url, timeout_s=30, pause_mode=mode, prefix_cache="version") as server:
        server.apply(12)
    assert stub.pauses == pauses
    assert ("delta_pause" in stub.calls) == (mode == "keep")
    assert "/reset_prefix_cache" not in stub.calls
    assert (stub.held, stub.paused, stub.stale_prefixes, stub.switch) == (12, False, False, None)


def test_a_server_that_cannot_tell_prefixes_apart_is_refused_and_serves_what_it_did(stub):
    with VllmServer(stub.url, timeout_s=30) as server:
        server.apply(11)
    stub.has_plugin = False
    calls = len(stub.calls)
    with VllmServer(stub.url, timeout_s=30, prefix_cache="version") as server:
        for _ in range(2):
            with pytest.raises(ServerUnavailable, match="did not load the plugin"):
                server.apply(12)
        assert set(stub.calls[calls:]) == {"delta_prefixes"}
        assert stub.held == 11
        stub.has_plugin = True
        server.apply(12)
    assert stub.held == 12


def test_a_server_that_restarts_without_the_plugin_is_noticed(stub):
    with VllmServer(stub.url, timeout_s=30, prefix_cache="version") as server:
        server.apply(11)
        stub.down = True
        with pytest.raises(ServerUnavailable):
            server.status()
        stub.restart()
        stub.down, stub.has_plugin = False, False
        with pytest.raises(ServerUnavailable, match="did not load the plugin"):
            server.apply(12)
    assert stub.held is None


def test_prefixes_are_renewed_where_another_driver_left_a_switch(stub):
    with VllmServer(stub.url, timeout_s=30, prefix_cache="version") as server:
        stub.switch, stub.paused, stub.stale_prefixes = "resume", True, True
        server.end_switch("resume")
    assert (stub.paused, stub.stale_prefixes, stub.switch) == (False, False, None)
    assert "/reset_prefix_cache" not in stub.calls


def test_pause_mode_none_pauses_nothing(stub):
    with VllmServer(stub.url, timeout_s=30, pause_mode="none") as server:
        server.apply(12)
        assert (stub.pauses, stub.held, stub.stale_prefixes, stub.switch) == ([], 12, False, None)

        # The mark that a killed driver would have left is ended without waking what others paused.
        stub.failures["/reset_prefix_cache"] = ["blocks are busy"]
        with pytest.raises(ServerUnavailable):
            server.apply(13)
        assert stub.switch == "stay-paused"
        stub.paused = True
        server.end_switch("stay-paused")
        assert (stub.paused, stub.stale_prefixes, stub.switch) == (True, False, None)


def test_what_was_half_applied_without_a_pause_waits_until_it_is_fixed(stub):
    with VllmServer(stub.url, timeout_s=30, pause_mode="none") as server:
        stub.tears = True
        with pytest.raises(HalfApplied):
            server.apply(12)
        assert (stub.half_applied, stub.paused, stub.switch) == (True, True, "resume")
        server.apply(12)
        assert (stub.half_applied, stub.paused, stub.switch, stub.held) == (False, False, None, 12)


def test_no_switch_begins_once_we_are_to_stop_and_what_was_fetched_stays(stub):
    stub.has_plugin = False
    stop = threading.Event()
    with VllmServer(stub.url, timeout_s=30, stop=stop) as server:
        stub.on_call = lambda path: stop.set() if stub.calls == ["delta_prefetch"] else None
        assert server.apply(12) is None
        assert set(stub.calls) == {"delta_prefetch"}
        stop.clear()
        stub.on_call = lambda path: stop.set() if path == "/update_weights" else None
        assert server.apply(12) is None
        assert "/pause" not in stub.calls
        assert (stub.switch, server.switching) == (None, None)
        stop.clear()
        stub.on_call = lambda path: stop.set() if path == "/pause" else None
        assert server.apply(12) is not None
    assert (stub.held, stub.paused, stub.switch) == (12, False, None)


def test_what_is_abandoned_in_its_pause_writes_nothing_and_goes_on(stub, server):
    stub.has_plugin = False
    stub.on_call = lambda path: server.abandoned.set() if path == "/pause" else None
    assert server.apply(12) is None
    assert (stub.held, stub.paused, stub.switch, stub.history) == (None, False, None, [])


def test_what_is_half_applied_stays_paused_also_when_its_fix_is_abandoned(stub, server):
    stub.tears = True
    with pytest.raises(HalfApplied):
        server.apply(12)
    server.abandoned.set()
    assert server.apply(12) is None
    assert (stub.half_applied, stub.paused, stub.switch) == (True, True, "resume")


def test_a_pause_that_forgets_prefixes_needs_no_second_reset(stub, server):
    stub.stale_prefixes = True
    server.apply(12)
    assert "/reset_prefix_cache" not in stub.calls
    assert not stub.stale_prefixes


def test_prefixes_that_a_pause_of_another_client_kept_are_forgotten(stub, server):
    stub.paused, stub.has_no_prefixes = True, False
    server.apply(12)
    assert "/reset_prefix_cache" in stub.calls
    assert not stub.stale_prefixes
