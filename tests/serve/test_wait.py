"""Waiting until servers serve a version, asked themselves or through a follow, and the commands for that."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from fleet_thread import listening, silent

from patchstore import Publisher, wait_until
from patchstore.errors import OtherRun, ServerUnavailable, UsageError, WaitTimeout
from patchstore.follow import wait as waiting
from patchstore.follow.http_client import FollowClient
from patchstore.stores.memory import MemoryStore
from tests.support.commands import Cli
from tests.support.manifests import commit
from tests.support.pages import code_of
from tests.support.vllm_stub import StubServer, serving

UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture
def other() -> Iterator[StubServer]:
    with serving(StubServer()) as stub:
        yield stub


def give(stub: StubServer, version: int | None, run_id: str = "run") -> None:
    """Let a server without a follow serve a version."""
    for engine in stub.engines:
        engine.initialised, engine.held, engine.run_id = True, version, run_id


def later(stub: StubServer, num_calls: int, act: Callable[[], None]) -> None:
    """Do something when the server was asked so often."""
    count = iter(range(num_calls))

    def on_call(_path: str) -> None:
        if next(count, None) is None:
            stub.on_call = None
            act()

    stub.on_call = on_call


# Servers that are asked themselves.


def test_it_ends_when_all_servers_serve_the_version_or_a_later_one(stub, other):
    give(stub, 5)
    give(other, 1)
    later(other, 4, lambda: give(other, 3))
    assert wait_until(3, servers=[stub.url, other.url]) == {stub.url: 5, other.url: 3}


def test_exactly_means_that_a_later_version_does_not_count(stub):
    give(stub, 5)
    with pytest.raises(WaitTimeout, match=rf"{stub.url} serves version 5 of run run"):
        wait_until(3, servers=stub.url, exactly=True, timeout_s=0)
    later(stub, 4, lambda: give(stub, 3))
    assert wait_until(3, servers=stub.url, exactly=True) == {stub.url: 3}


@pytest.mark.parametrize("version", [None, 2])
def test_a_server_that_is_late_is_named_when_time_is_up(stub, other, version):
    give(stub, 3)
    give(other, version)
    with pytest.raises(WaitTimeout) as failed:
        wait_until(3, servers=[stub.url, other.url], timeout_s=0.3)
    assert isinstance(failed.value, TimeoutError)
    assert f"{other.url} serves {'no version' if version is None else 'version 2'}" in str(failed.value)
    assert stub.url not in str(failed.value)


@pytest.mark.parametrize(("name", "value", "right"), [("held", 2, 3), ("half_applied", True, False)])
def test_engines_that_differ_or_have_parts_of_two_versions_do_not_serve_one(name, value, right):
    with serving(StubServer(num_engines=2)) as stub:
        give(stub, 3)
        setattr(stub.engines[1], name, value)
        with pytest.raises(WaitTimeout, match="serves no version"):
            wait_until(3, servers=stub.url, timeout_s=0)
        setattr(stub.engines[1], name, right)
        assert wait_until(3, servers=stub.url, timeout_s=0) == {stub.url: 3}


def test_a_server_that_restarts_is_waited_for(stub):
    give(stub, 3)
    stub.down = True
    threading.Timer(0.5, lambda: setattr(stub, "down", False)).start()
    assert wait_until(3, servers=stub.url) == {stub.url: 3}


def test_a_server_that_is_gone_ends_the_wait_when_patience_ends(stub):
    give(stub, 3)
    with pytest.raises(ServerUnavailable, match=rf"{UNREACHABLE} is gone for 0.3 s"):
        wait_until(3, servers=[stub.url, UNREACHABLE], patience_s=0.3)


def test_another_run_ends_the_wait_when_patience_ends(stub):
    give(stub, 3, "old")
    with pytest.raises(OtherRun, match="serves version 3 of run old, but version 3 is of run new"):
        wait_until(3, servers=stub.url, run_id="new", patience_s=0.3)


def test_servers_of_two_runs_never_serve_one_version(stub, other):
    give(stub, 3, "old")
    give(other, 3, "new")
    with pytest.raises(OtherRun, match="of run new and old"):
        wait_until(3, servers=[stub.url, other.url], patience_s=0)


def test_a_server_that_changes_to_the_run_in_time_is_waited_for(stub):
    give(stub, 9, "old")
    later(stub, 4, lambda: give(stub, 0, "new"))
    assert wait_until(0, servers=stub.url, run_id="new") == {stub.url: 0}


@pytest.mark.parametrize(
    ("version", "options"),
    [
        (-1, {"servers": UNREACHABLE}),
        (True, {"servers": UNREACHABLE}),
        ("3", {"servers": UNREACHABLE}),
        (3, {}),
        (3, {"servers": []}),
        (3, {"servers": [None]}),
        (3, {"servers": "localhost:8000"}),
        (3, {"servers": UNREACHABLE, "follow": UNREACHABLE}),
        (3, {"servers": UNREACHABLE, "timeout_s": -1}),
        (3, {"servers": UNREACHABLE, "timeout_s": float("nan")}),
        (3, {"servers": UNREACHABLE, "patience_s": "1"}),
        (3, {"follow": "localhost:9464"}),
    ],
)
def test_a_wrong_call_is_refused_at_once(version, options, monkeypatch):
    monkeypatch.setattr(waiting.VllmServer, "status", None)
    monkeypatch.setattr(FollowClient, "state", None)
    with pytest.raises(UsageError):
        wait_until(version, **options)


# Through a follow.


def test_a_follow_tells_when_all_its_servers_serve_a_version(serve, store, stub, other):
    with serve(stub.url, other.url) as service:
        assert wait_until(0, follow=service.url) == {stub.url: 0, other.url: 0}
        with pytest.raises(WaitTimeout, match="version 1 or a later one"):
            wait_until(1, follow=service.url, timeout_s=0.3)
        threading.Timer(0.3, commit, (store, 1)).start()
        assert wait_until(1, follow=service.url, run_id="run") == {stub.url: 1, other.url: 1}


def test_the_code_of_the_page_runs(stub):
    store = MemoryStore("memory://page")
    (code,) = code_of("docs/follow.md", "Wait until servers serve a version")
    with Publisher(store, {"w": torch.zeros(8)}) as publisher:
        stub.run_id = publisher.run_id
        with listening(store, [stub.url]) as service:
            assert "http://127.0.0.1:9464" in code
            code = code.replace("http://127.0.0.1:9464", service.url)
            exec(code, {"publisher": publisher, "step": 0})
            assert stub.held == 0


def test_a_pin_that_keeps_servers_from_the_version_is_named(serve, store, stub):
    commit(store, 1)
    with serve(stub.url) as service, FollowClient(service.url) as client:
        client.pin(0)
        wait_until(0, follow=service.url, exactly=True)
        with pytest.raises(WaitTimeout, match="They are pinned to version 0"):
            wait_until(1, follow=service.url, timeout_s=0)
        client.unpin()
        assert wait_until(1, follow=service.url) == {stub.url: 1}


def test_a_server_that_a_follow_cannot_reach_is_named(serve, stub):
    with (
        serve(stub.url, UNREACHABLE) as service,
        pytest.raises(ServerUnavailable, match=f"{UNREACHABLE} is gone"),
    ):
        wait_until(0, follow=service.url, patience_s=0.3)


def test_the_run_of_the_store_is_the_run_of_the_version(serve, stub):
    with serve(stub.url) as service, pytest.raises(OtherRun, match="of run run, but version 0 is of run new"):
        wait_until(0, follow=service.url, run_id="new", patience_s=0.3)


@pytest.mark.parametrize("page", [b"<html>", b"[]", b'{"servers": []}', b'{"servers": {"a": {}}}'])
def test_something_else_at_the_address_is_said_so(stub, page):
    stub.page = page
    with pytest.raises(ServerUnavailable, match="patchstore follow"):
        wait_until(0, follow=stub.url, patience_s=0)


# The gate of routers.


def test_a_server_is_ready_only_while_it_serves_the_version_that_is_desired_or_asked_for(serve, store, stub):
    with serve(stub.url) as service:
        service.until_ready()
        go_on = stub.block("delta_prove")
        commit(store, 1)
        try:
            assert stub.entered["delta_prove"].wait(60)
            status, gate = service.ready()
            assert (status, gate["target"]) == (503, 1)
            assert gate["reasons"] == [f"{stub.url} serves version 0; version 1 is desired"]
            assert service.ready("?max_lag=1")[0] == 200
            # Whatever is desired.
            assert [service.ready(f"?version={each}")[0] for each in ("=0", ">=0", "%3E%3D0")] == [200] * 3
            (reason,) = service.ready("?version=>=1")[1]["reasons"]
            assert reason == f"{stub.url} serves version 0; version 1 or a later one is asked for"
        finally:
            go_on.set()
        service.until_ready("?version=>=1")
        assert service.ready("?version==0")[0] == 503


def test_a_server_ahead_of_its_pin_is_not_ready_whatever_the_lag(serve, store, stub):
    commit(store, 1)
    with serve(stub.url) as service:
        service.until_ready()
        go_on = stub.block("delta_prove")
        try:
            service.fleet.desired.pin(0)
            service.fleet.fleet.wake()
            assert stub.entered["delta_prove"].wait(60)
            assert service.ready("?max_lag=9")[0] == 503
        finally:
            go_on.set()
        service.until_ready()


def test_one_server_can_be_asked_about(serve, stub):
    with serve(stub.url, UNREACHABLE) as service:
        service.until_ready(f"?server={stub.url}")
        service.until_ready(f"?server={stub.url}/")
        service.fleet.until(lambda: service.fleet.did(UNREACHABLE))
        status, gate = service.ready()
        assert status == 503
        assert [reason.partition(":9 ")[2].partition(":")[0] for reason in gate["reasons"]] == [
            "does not answer"
        ]
        status, gate = service.ready("?server=http://elsewhere")
        assert (status, gate["error"]["kind"]) == (404, "not-found")


def test_a_server_that_is_gone_or_whose_weights_are_in_parts_is_not_ready(serve, store, stub):
    with serve(stub.url) as service:
        service.until_ready()
        stub.down = True
        service.fleet.until(lambda: "failed" in service.fleet.did(stub.url))
        assert "does not answer" in service.ready()[1]["reasons"][0]
        stub.failures["delta_prove"] = ["[load-failed] no"] * 10_000
        stub.half_applied, stub.held, stub.down = True, None, False
        while "parts of two versions" not in "".join(service.ready()[1]["reasons"]):
            pass


def test_a_store_without_a_version_makes_nothing_ready(stub):
    with listening(MemoryStore("memory://empty"), [stub.url]) as service:
        service.fleet.until(lambda: "waiting" in service.fleet.did(None))
        status, gate = service.ready()
    assert (status, gate["target"]) == (503, None)
    assert gate["reasons"] == ["the desired version is not known: memory://empty has no version yet"]


def test_a_store_that_does_not_answer_leaves_servers_ready(serve, store, stub):
    with serve(stub.url) as service:
        service.until_ready()
        with silent(store):
            service.fleet.until(lambda: "failed" in service.fleet.did(None))
            assert service.ready()[0] == 200


def test_a_server_of_another_run_is_not_ready(serve, store, stub):
    with serve(stub.url) as service:
        service.until_ready()
        stub.failures["/init_weight_transfer_engine"] = ["no"] * 10_000
        for engine in stub.engines:
            engine.run_id = "old"
        while "of run old; run run is desired" not in "".join(service.ready()[1]["reasons"]):
            pass


@pytest.mark.parametrize(
    "query",
    [
        *(
            "?max_lag=-1",
            "?max_lag=x",
            "?max_lag=",
            f"?max_lag={10**30}",
            "?max_lag=1&max_lag=2",
            "?lag=1",
            "?&",
        ),
        *("?version=1", "?version=", "?version=>=x", "?version==1&max_lag=1", "?version==1&version==2"),
    ],
)
def test_parameters_that_are_wrong_are_refused(serve, stub, query):
    with serve(stub.url) as service:
        status, gate = service.ready(query)
    assert (status, gate["error"]["kind"]) == (400, "usage")


# The commands.


@pytest.fixture
def told(patchstore: Cli) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run a command; returns its exit code, and what it prints as JSON."""

    def call(*args: object) -> tuple[int, dict[str, Any]]:
        code, out, _ = patchstore(*args, "--json")
        return code, json.loads(out)

    return call


def test_commands_pin_wait_and_unpin(serve, store, stub, told):
    commit(store, 1)
    with serve(stub.url) as service:
        follow = ("--follow", service.url)
        code, waited = told("wait", 1, *follow)
        assert (code, waited["version"], waited["servers"]) == (0, 1, {stub.url: 1})
        assert told("pin", 0, *follow) == (0, {"pinned": 0})
        assert told("wait", 0, "--exactly", *follow)[1]["servers"] == {stub.url: 0}
        assert told("wait", 0, "--server", stub.url)[1]["servers"] == {stub.url: 0}
        code, said = told("wait", 1, "--timeout", 0, *follow)
        assert (code, said["error"]["kind"]) == (6, "wait-timeout")
        assert told("pin", "--off", *follow) == (0, {"pinned": None})
        assert told("wait", 1, *follow)[0] == 0
        code, said = told("pin", 12, *follow)
        assert (code, said["error"]["kind"]) == (2, "version-not-found")
        assert service.fleet.desired.pinned is None


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [
        (("pin", 0, "--follow", UNREACHABLE), 4, "server-unavailable"),
        (("pin", "--off", "--follow", UNREACHABLE), 4, "server-unavailable"),
        (("pin", "--off", "--follow", "localhost"), 2, "usage"),
        (("pin", -1), 2, "usage"),
        (("pin", "--follow", UNREACHABLE), 2, "usage"),
        (("wait", 1, "--server", UNREACHABLE, "--patience", 0), 4, "server-unavailable"),
        (("wait", 1, "--server", UNREACHABLE, "--follow", UNREACHABLE), 2, "usage"),
        (("wait", 1, "--server", "STUB", "--run", "new", "--patience", 0), 1, "other-run"),
    ],
)
def test_commands_that_fail_say_why(stub, told, call, code, kind):
    give(stub, 1, "old")
    found, said = told(*(stub.url if each == "STUB" else each for each in call))
    assert (found, said["error"]["kind"]) == (code, kind)


def test_the_command_says_soon_what_it_waits_for_and_then_seldom(told, caplog, monkeypatch):
    monkeypatch.setattr(waiting, "SAY_AFTER_S", 0.0)
    assert told("wait", 7, "--follow", UNREACHABLE, "--timeout", 1)[0] == 6
    (said,) = (each for each in caplog.messages if each.startswith("waiting"))
    assert f"not all servers serve version 7 or a later one: {UNREACHABLE} does not answer" in said


def test_servers_are_asked_at_once_and_each_once_a_round():
    with ExitStack() as stack:
        stubs = [stack.enter_context(serving(StubServer())) for _ in range(20)]
        for stub in stubs:
            give(stub, 1)
        urls = [stub.url for stub in stubs]
        assert wait_until(1, servers=[*urls, *urls]) == dict.fromkeys(urls, 1)
