"""The client of a vLLM server: the order of its calls, and what it makes of refusals."""

import re
import threading

import httpx
import pytest

from patchstore.errors import (
    CorruptObject,
    DeviceMemoryShort,
    HalfApplied,
    LoadFailed,
    PatchstoreError,
    ServerUnavailable,
    StaleCaches,
    UsageError,
    VersionNotFound,
    WrongParent,
)
from patchstore.follow.vllm_protocol import ROUTES, NoSuchRoute, refusal
from patchstore.follow.vllm_server import VllmServer

APPLY = [
    "delta_prefetch",
    "delta_prove",
    "delta_pause",
    "/finish_weight_update",
    "delta_resume",
]


@pytest.mark.parametrize("version", [-1, 2**63, pytest.param(10**5000, id="huge"), True, 1.0, "1", None])
@pytest.mark.parametrize("method", ["apply", "prefetch", "update_weights"])
def test_what_is_no_version_is_refused_before_any_call(stub, server, method, version):
    with pytest.raises(UsageError, match="version"):
        getattr(server, method)(version)
    assert stub.calls == []


def test_a_refusal_of_a_rank_has_the_kind_that_it_names(stub, server):
    stub.collective = lambda *_: [{"error": "[usage] versions count from 0"}]
    with pytest.raises(UsageError, match="answered delta_prefetch: versions count from 0"):
        server.prefetch(1)


@pytest.mark.parametrize(
    ("left", "calls", "is_paused"),
    [
        # By another client.
        ({"paused": True}, [*APPLY[:2], "/finish_weight_update", "delta_switch"], True),
        # By a driver that was killed.
        ({"update_open": True}, APPLY, False),
        ({"switch": "resume", "paused": True, "stale_prefixes": True}, [APPLY[-1], *APPLY], False),
    ],
)
def test_what_others_left_of_a_server(stub, server, left, calls, is_paused):
    for name, value in left.items():
        setattr(stub, name, value)
    server.apply(12)
    assert (stub.calls, stub.paused, stub.stale_prefixes, stub.switch) == (calls, is_paused, False, None)


def test_a_failed_fetch_pauses_nothing(stub, server):
    stub.failures["delta_prove"] = ["[corrupt-object] deltas/x should have digest y"]
    with pytest.raises(CorruptObject, match=r"/collective_rpc: deltas/x should have digest y$"):
        server.apply(12)
    assert stub.calls == APPLY[:2]


def test_a_way_that_is_too_far_for_the_gpus_memory_is_gone_in_steps(stub, server):
    server.apply(0)
    stub.calls.clear()
    short = "[device-memory] more than the 3 GiB that are free"
    stub.failures["delta_prove"] = [short, short]
    assert server.apply(8) is not None
    assert (stub.held, stub.paused, stub.switch) == (8, False, None)
    # 8 and 4 are too far; then 2, 4 and 8.
    assert stub.calls.count("delta_prove") == 5
    assert stub.calls.count("/finish_weight_update") == 3


@pytest.mark.parametrize("held", [None, 7])
def test_memory_that_is_short_for_one_version_is_an_error(stub, server, held):
    stub.held = held
    stub.failures["delta_prove"] = ["[device-memory] more than the 3 GiB that are free"]
    with pytest.raises(DeviceMemoryShort, match="3 GiB"):
        server.apply(8)
    assert stub.held == held


@pytest.mark.parametrize(("path", "held"), [("/pause", None), ("/resume", 12)])
def test_a_switch_that_failed_leaves_a_mark_and_is_ended_by_the_next_apply(stub, path, held):
    # Also where ending it at once fails.
    stub.num_engines = 2
    stub.failures |= {path: ["engine is busy"], "/resume": ["engine is busy"] * 2}
    with VllmServer(stub.url, timeout_s=30) as server:
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


@pytest.fixture
def asked(stub):
    """The paths of all calls, in order."""
    paths = []
    stub.on_call = paths.append
    return paths


WITHOUT_BACKEND = {"weight_transfer_config": {"backend": "nccl"}}


@pytest.mark.parametrize(
    ("config", "is_dev", "advice"),
    [
        (WITHOUT_BACKEND, True, "nccl weight transfer backend.*--weight-transfer-config"),
        ({"parallel_config": {"worker_extension_cls": ""}}, True, "--worker-extension-cls"),
        ({}, False, "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_ranks_that_would_raise_are_not_asked(stub, server, asked, config, is_dev, advice):
    stub.config, stub.is_dev = stub.config | config, is_dev
    for _ in range(2):
        with pytest.raises(ServerUnavailable, match=advice):
            server.status()
    assert (asked.count("/server_info"), asked.count("/collective_rpc")) == (2, 0)


INFO = "/server_info"
RPC = "vllm.entrypoints.serve.dev.rpc.api_router"
RL = "vllm.entrypoints.rl.online.api_router"


@pytest.mark.parametrize(
    ("lacking", "routers"),
    [
        (["/collective_rpc"], {RPC}),
        (["/pause", "/is_paused"], {RL}),
        (["/collective_rpc", "/update_weights", "/version"], {RPC, RL}),
    ],
)
def test_an_app_of_ones_own_is_told_the_routes_that_it_lacks(stub, server, asked, lacking, routers):
    stub.lacking = {INFO, *lacking}
    with pytest.raises(ServerUnavailable) as caught:
        server.status()
    said = str(caught.value)
    named = {path for path in stub.lacking | {route.split()[1] for route in ROUTES} if f" {path}" in said}
    assert named == {*lacking} - {"/version"}
    assert {router for router in (RPC, RL) if router in said} == routers
    assert "VLLM_SERVER_DEV_MODE" not in said
    # Nothing was called to find that out.
    assert {path for path in asked if not path.startswith("OPTIONS ")} == {INFO}


@pytest.mark.parametrize("has_version", [True, False])
def test_a_server_without_any_of_the_routes_is_told_all_ways_to_have_them(stub, server, has_version):
    stub.is_dev, stub.lacking = False, set() if has_version else {"/version"}
    with pytest.raises(ServerUnavailable) as caught:
        server.status()
    said = str(caught.value)
    assert ("unlike vLLM" not in said, "own address" not in said) == (has_version, has_version)
    for each in ("VLLM_SERVER_DEV_MODE=1", RPC, RL, *(route.split()[1] for route in ROUTES)):
        assert each in said


def test_an_app_with_the_routes_of_an_update_alone_is_updated(stub, server, asked):
    stub.lacking = {INFO, "/version", "/health", "/weight_info", "/update_weight_version"}
    server.init_weight_transfer("store")
    server.apply(12)
    assert (server.status().serving, server.weight_version()) == (12, None)
    assert [path for path in asked if path.startswith("OPTIONS ")] == [
        f"OPTIONS {route.split()[1]}" for route in ROUTES
    ]


def test_an_update_needs_no_route_but_those_that_are_asked_for(stub, server, asked):
    server.init_weight_transfer("store")
    server.apply(12)
    with VllmServer(server.url, timeout_s=30, pause_mode="wait") as other:
        other.apply(13)
    stub.num_engines = 2
    server.status()
    server.init_weight_transfer("store")
    server.apply(14)
    assert [each["mode"] for each in stub.pauses] == ["wait", "keep"]
    paths = {each for each in asked if each.startswith("/")}
    assert paths <= {INFO, *(route.split()[1] for route in ROUTES)}


@pytest.mark.parametrize("status", [401, 403, 500, 503])
def test_a_gateway_that_refuses_is_not_told_what_vllm_needs(stub, server, monkeypatch, status):
    refuse = stub.answer

    def gateway(path, query, body):
        if path == "/collective_rpc":
            raise ValueError(f"gateway says {status}")
        return refuse(path, query, body)

    monkeypatch.setattr(stub, "answer", gateway)
    monkeypatch.setattr(stub, "options", lambda _: status)
    stub.lacking = {INFO}
    with pytest.raises(ServerUnavailable) as caught:
        server.status()
    said = "wants credentials" if status in {401, 403} else f"HTTP 500: .*gateway says {status}"
    assert re.search(said, str(caught.value))
    assert "VLLM_SERVER_DEV_MODE" not in str(caught.value)


def test_a_server_that_answered_once_is_asked_how_it_was_started_when_it_fails(stub, server, asked):
    server.status()
    server.status()
    assert asked.count("/server_info") == 1
    stub.failures["delta_status"] = ["EngineCore died"]
    with pytest.raises(ServerUnavailable, match="EngineCore died"):
        server.status()
    stub.config |= WITHOUT_BACKEND
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
    assert server.missing() is None
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


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize("cache", ["reset", "keep", "version"])
def test_generation_is_paused_in_the_way_that_was_chosen(stub, mode, cache):
    with VllmServer(stub.url, timeout_s=30, pause_mode=mode, prefix_cache=cache) as server:
        server.apply(12)
    # The engine core pauses by itself for "keep". The write empties caches, in the same call.
    assert ("delta_pause" in stub.calls) == (mode == "keep")
    assert stub.pauses == ([] if mode == "keep" else [{"mode": mode, "clear_cache": "false"}])
    assert (stub.held, stub.paused, stub.stale_prefixes, stub.switch) == (12, False, cache == "keep", None)
    assert [each.caches for each in stub.engines] == [cache]


@pytest.mark.parametrize("status", [404, 405])
def test_a_route_that_went_away_is_told_what_has_it(stub, server, monkeypatch, status):
    refused = httpx.Response(status, json={"detail": "of an app with files at /"})
    assert isinstance(refusal("POST http://host/pause", refused), NoSuchRoute)


def test_an_old_vllm_without_weight_versions_has_none(stub, server, monkeypatch):
    answer = stub.answer

    def old(path, query, body):
        if "version" in path or path == "/weight_info":
            raise KeyError(path)
        return answer(path, query, body)

    monkeypatch.setattr(stub, "answer", old)
    server.set_weight_version("3")
    assert server.weight_version() is None


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("kind", ["load-failed", "half-applied"])
def test_engines_that_all_failed_alike_go_on_with_what_they_had(stub, server, num_engines, kind):
    stub.num_engines = num_engines
    server.init_weight_transfer("store")
    stub.failures["/finish_weight_update"] = [f"[{kind}] in all"]
    with pytest.raises(PatchstoreError) as failed:
        server.apply(1)
    assert (failed.value.kind, stub.paused, stub.switch) == (kind, False, None)
    assert (server.status().engines_differ, stub.weight_version) == (False, "default")


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


def test_a_server_without_the_plugin_is_refused_before_anything_is_changed(stub):
    stub.has_plugin = False
    with VllmServer(stub.url, timeout_s=30) as server:
        for _ in range(2):
            with pytest.raises(ServerUnavailable, match="did not load the plugin"):
                server.apply(12)
        assert (stub.calls, stub.held) == ([], None)
        stub.has_plugin = True
        server.apply(12)
    assert stub.held == 12


def test_several_engines_are_paused_by_vllm_since_a_call_cannot_be_meant_for_each(stub):
    stub.num_engines = 2
    with VllmServer(stub.url, timeout_s=30) as server:
        server.apply(12)
    assert "delta_pause" not in stub.calls
    assert stub.pauses == [{"mode": "keep", "clear_cache": "false"}]
    assert [each.held for each in stub.engines] == [12, 12]


@pytest.mark.parametrize("answer", [[], [None], ["paused"], [{}, {}], [{"error": "no", "kind": "new"}]])
def test_nothing_is_written_where_it_is_unknown_whether_the_core_paused(stub, monkeypatch, answer):
    core = stub.core
    monkeypatch.setattr(
        stub, "core", lambda method, *rest: answer if method == "delta_pause" else core(method, *rest)
    )
    found = pytest.raises(ServerUnavailable, match="answered delta_pause with")
    with VllmServer(stub.url, timeout_s=30) as server, found:
        server.apply(12)
    assert stub.held is None
    assert "/finish_weight_update" not in stub.calls


def test_a_server_that_cannot_do_it_to_its_caches_is_refused_and_serves_what_it_did(stub):
    with VllmServer(stub.url, timeout_s=30) as server:
        server.apply(11)
    stub.uncovered["version"] = "a connector finds what it keeps by tokens"
    calls = len(stub.calls)
    with VllmServer(stub.url, timeout_s=30, prefix_cache="version") as server:
        for _ in range(2):
            with pytest.raises(UsageError, match="by tokens"):
                server.apply(12)
            with pytest.raises(UsageError, match="by tokens"):
                server.init_weight_transfer("store")
        assert not {"delta_pause", "/finish_weight_update"} & {*stub.calls[calls:]}
        # To ask it is no update.
        assert server.status().serving == stub.held == 11
    with VllmServer(stub.url, timeout_s=30) as server:
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


@pytest.mark.parametrize("mode", ["keep", "none"])
def test_a_server_that_cannot_empty_its_caches_generates_nothing_until_it_can(stub, mode):
    stub.is_stuck = True
    with VllmServer(stub.url, timeout_s=30, pause_mode=mode) as server:
        with pytest.raises(StaleCaches):
            server.apply(12)
        assert (stub.held, stub.paused, stub.stale_prefixes) == (12, True, True)
        assert server.status().switch == ("resume" if mode == "keep" else "stay-paused")
        stub.is_stuck = False
        server.apply(13)
    assert (stub.held, stub.stale_prefixes, stub.switch) == (13, False, None)


@pytest.mark.parametrize("cache", ["reset", "version"])
def test_pause_mode_none_pauses_nothing(stub, cache):
    with VllmServer(stub.url, timeout_s=30, pause_mode="none", prefix_cache=cache) as server:
        server.apply(12)
        assert (stub.pauses, stub.held, stub.stale_prefixes, stub.switch) == ([], 12, False, None)
        # The mark that a killed driver left is ended without waking what others paused.
        stub.switch, stub.paused = "stay-paused", True
        server.end_switch("stay-paused")
        assert (stub.paused, stub.switch) == (True, None)


@pytest.mark.parametrize("mode", ["keep", "none"])
def test_what_is_half_applied_stays_paused_until_an_update_fixes_it(stub, mode):
    with VllmServer(stub.url, timeout_s=30, pause_mode=mode) as server:
        stub.tears = True
        with pytest.raises(HalfApplied):
            server.apply(12)
        assert (stub.half_applied, stub.paused, stub.switch) == (True, True, "resume")
        server.apply(12)
        assert (stub.half_applied, stub.paused, stub.switch, stub.held) == (False, False, None, 12)


def test_no_switch_begins_once_we_are_to_stop_and_what_was_fetched_stays(stub):
    stop = threading.Event()
    with VllmServer(stub.url, timeout_s=30, stop=stop) as server:
        stub.engines[0].prefetches[12] = -(10**9)
        stub.on_call = lambda path: stop.set() if stub.calls == ["delta_prefetch"] else None
        assert server.apply(12) is None
        assert set(stub.calls) == {"delta_prefetch"}
        stop.clear()
        stub.engines[0].prefetches.clear()
        stub.on_call = lambda path: stop.set() if path == "delta_prove" else None
        assert server.apply(12) is None
        assert "delta_pause" not in stub.calls
        assert (stub.switch, server.switching) == (None, None)
        stop.clear()
        stub.on_call = lambda path: stop.set() if path == "/finish_weight_update" else None
        assert server.apply(12) is not None
    assert (stub.held, stub.paused, stub.switch) == (12, False, None)


def test_what_is_abandoned_in_its_pause_writes_nothing_and_goes_on(stub):
    with VllmServer(stub.url, timeout_s=30, pause_mode="wait") as server:
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
