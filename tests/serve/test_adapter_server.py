"""A server that is kept at a version of an adapter: by the class, by `follow`, and waited for."""

import dataclasses
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fleet_thread import FleetThread, listening, running
from follow_process import Following

from patchstore import open_store, wait_until
from patchstore.bucket import history
from patchstore.bucket.records import Adapter, Base
from patchstore.errors import (
    DriverConflict,
    OtherRun,
    PatchstoreError,
    RollbackRefused,
    ServerUnavailable,
    StateMismatch,
    StoreReplaced,
    Unsigned,
    UsageError,
    VersionNotFound,
    WaitTimeout,
)
from patchstore.follow.adapter_server import AdapterServer
from patchstore.follow.desired import DesiredVersion, HeadWatcher, check_kind
from patchstore.follow.fleet import Fleet
from patchstore.follow.reconcile import Reconciler
from patchstore.follow.settings import Settings
from patchstore.signing import KeySigner, RequiredKeys
from patchstore.signing.statement import sign_version
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from tests.support.adapter_stub import LOAD, MODELS, UNLOAD, AdapterStub, Refused, serving
from tests.support.commands import Cli
from tests.support.keys import key_pair
from tests.support.manifests import begin_run, commit
from tests.support.pages import code_of
from tests.support.vllm_stub import StubServer
from tests.support.vllm_stub import serving as serving_whole

ADAPTER = Adapter(base=Base(name="base", revision=None, state=None))
OLD = "2026-01-01T00:00:00.000Z"


def begun(store: Store, num_versions: int, run_id: str = "run") -> Store:
    """Have a store hold a run of adapters."""
    begin_run(store, run_id, adapter=ADAPTER)
    for version in range(num_versions):
        commit(store, version, run_id)
    return store


@pytest.fixture
def store() -> Store:
    return begun(MemoryStore("memory://adapter"), 1)


@pytest.fixture
def stub(store: Store) -> Iterator[AdapterStub]:
    with serving(AdapterStub(store)) as stub:
        yield stub


@pytest.fixture
def server(stub: AdapterStub, store: Store) -> Iterator[AdapterServer]:
    with AdapterServer(stub.url, "policy", store, timeout_s=30) as client:
        yield client


@pytest.fixture
def follow(store: Store, server: AdapterServer) -> Reconciler:
    return Reconciler(store, server)


def did(follow: Reconciler, num_steps: int) -> list[str]:
    return [follow.step().outcome for _ in range(num_steps)]


def failed(follow: Reconciler) -> PatchstoreError:
    """The error of a step that fails."""
    done = follow.step()
    assert done.error is not None, done
    return done.error


def replace(store: Store, version: int) -> None:
    """Put another version in the place of one."""
    store.delete(layout.manifest_key(version))
    commit(store, version, created_at=OLD)


# Updates.


def test_a_version_is_loaded_and_then_chosen(server, stub, store):
    commit(store, 1)
    assert server.status().serving is None
    timings = server.apply(1)
    assert stub.calls == ["load policy@1", "choose policy@1"]
    status = server.status()
    assert (status.serving, status.run_id, status.may_answer) == (1, "run", True)
    assert timings.stage_s > 0 and timings.apply_s > 0


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    (code,) = code_of("docs/follow.md", "Adapters")
    with serving(AdapterStub(begun(open_store(tmp_path), 1))) as stub:
        given = {"http://10.0.0.1:8000": stub.url, "s3://bucket/my-lora": str(tmp_path), "(12)": "(0)"}
        for shown, value in given.items():
            assert shown in code
            code = code.replace(shown, value)
        exec(code, {})
        assert stub.serving() == 0


def test_it_follows_the_newest_and_skips_those_between(follow, store, stub):
    assert did(follow, 2) == ["applied", "nothing"]
    for version in (1, 2, 3):
        commit(store, version)
    done = follow.step()
    assert (done.outcome, done.version, done.before.serving) == ("applied", 3, 0)
    assert (stub.history, stub.serving()) == ([0, 3], 3)
    stub.calls.clear()
    assert did(follow, 3) == ["nothing"] * 3
    assert stub.calls == []


def test_nothing_is_asked_without_need(follow, store, stub):
    did(follow, 2)
    commit(store, 1)
    asked: list[str] = []
    stub.on_call = asked.append
    assert did(follow, 1) == ["applied"]
    assert asked == [MODELS, LOAD, MODELS, LOAD, MODELS]
    asked.clear()
    assert did(follow, 1) == ["nothing"]
    assert asked == [MODELS]


def test_what_a_request_pulled_is_not_loaded_again(follow, store, stub):
    did(follow, 1)
    commit(store, 1)
    stub.pull("policy@1")
    stub.calls.clear()
    assert did(follow, 1) == ["applied"]
    assert stub.calls == ["choose policy@1"]


def test_a_server_that_answers_by_the_newest_is_told_to_stay_there(follow, store, stub):
    # As after a restart: no one chose, and a request pulled what it would be brought to.
    stub.pull("policy@0")
    assert did(follow, 2) == ["nothing", "nothing"]
    assert stub.history == [0]
    commit(store, 1)
    stub.pull("policy@1")
    assert stub.serving() == 0


def test_a_server_that_restarted_is_given_the_version_again(follow, stub):
    did(follow, 2)
    stub.restart()
    assert did(follow, 2) == ["applied", "nothing"]
    stub.down = True
    assert did(follow, 1) == ["failed"]
    stub.down = False
    stub.restart()
    stub.pull("policy@0")
    assert did(follow, 1) == ["nothing"]
    assert (stub.history, stub.chosen) == ([0, 0, 0], {"policy": "policy@0"})


@pytest.mark.parametrize("path", [LOAD, MODELS])
def test_an_update_that_failed_is_tried_again_and_the_server_keeps_its_version(follow, store, stub, path):
    did(follow, 1)
    commit(store, 1)
    stub.failures[path] = [Refused(500, "[corrupt-object] bad bytes")]
    assert failed(follow).kind == "corrupt-object"
    assert stub.serving() == 0
    assert did(follow, 2) == ["applied", "nothing"]


def test_answers_that_are_lost_change_nothing(follow, store, stub):
    stub.loses_answers = True
    # The load took place, and so does the choice, of which the next step hears.
    assert failed(follow).kind == "server-unavailable"
    stub.loses_answers = False
    assert did(follow, 2) == ["nothing", "nothing"]
    assert stub.calls == ["load policy@0", "choose policy@0", "choose policy@0"]


def test_a_version_that_the_server_does_not_find_is_told_with_both_places(follow, store, stub):
    stub.failures[LOAD] = [Refused(404, "[version-not-found] nothing there")]
    error = failed(follow)
    assert isinstance(error, VersionNotFound)
    assert "this process reads memory://adapter too" in str(error)


def test_another_base_is_not_taken_for_a_wrapped_model(stub):
    store = MemoryStore("memory://adapter")
    begin_run(store, tensors=("base_model.model.a.lora_A.weight",), adapter=ADAPTER)
    commit(store, 0)
    said = "memory://adapter has adapters of the base base, but this server serves another"
    stub.failures[LOAD] = [Refused(400, f"[schema-mismatch] {said}")]
    with AdapterServer(stub.url, "policy", store) as server:
        error = failed(Reconciler(store, server))
    assert error.kind == "schema-mismatch" and str(error).endswith(said)


# What is kept.


def test_old_versions_are_unloaded_but_the_newest_few(follow, store, stub):
    for version in (1, 2, 3):
        did(follow, 1)
        commit(store, version)
    did(follow, 1)
    assert stub.versions() == [2, 3]


@pytest.mark.parametrize(("keep", "left"), [(1, [3]), (3, [1, 2, 3]), (9, [0, 1, 2, 3])])
def test_it_is_said_how_many_are_kept(store, stub, keep, left):
    for version in (1, 2, 3):
        commit(store, version)
    with AdapterServer(stub.url, "policy", store, keep=keep) as server:
        for version in range(4):
            server.apply(version)
    assert stub.versions() == left


def test_what_requests_use_is_unloaded_when_they_ended(follow, store, stub):
    for version in (1, 2, 3):
        did(follow, 1)
        stub.used = {"policy@0"}
        commit(store, version)
    assert did(follow, 3) == ["applied", "nothing", "nothing"]
    assert stub.versions() == [0, 2, 3]
    stub.used.clear()
    assert did(follow, 1) == ["nothing"]
    assert stub.versions() == [2, 3]


def test_what_cannot_be_unloaded_is_told_and_the_version_is_served(follow, store, stub):
    for version in (1, 2):
        did(follow, 1)
        commit(store, version)
    stub.failures[UNLOAD] = [Refused(500, "out of order")] * 2
    assert did(follow, 1) == ["applied"]
    assert "out of order" in str(failed(follow))
    assert (did(follow, 1), stub.versions()) == (["nothing"], [1, 2])


def test_other_adapters_and_tags_stay_as_they_are(follow, store, stub):
    stub.statics = {"judge": "/judge", "policy@best": stub.pull("policy@0") or stub.held["policy@0"]}
    for version in (1, 2, 3):
        commit(store, version)
        stub.pull(f"policy2@{version}")
        did(follow, 1)
    assert (stub.versions(), stub.versions("policy2")) == ([2, 3], [1, 2, 3])
    # What has another name does not count as loaded.
    assert "load policy@3" in stub.calls
    assert not [call for call in stub.calls if "best" in call or "judge" in call]


# Other runs, other drivers.


def test_another_run_under_the_name_is_refused_unless_it_is_named(store, stub, server):
    server.apply(0)
    # The number is the same, the weights are others.
    other = begun(MemoryStore("memory://adapter"), 1, "another")
    stub.store = other
    with AdapterServer(stub.url, "policy", other) as unnamed:
        error = failed(Reconciler(other, unnamed))
    assert isinstance(error, OtherRun)
    assert "of run run" in str(error) and "run another" in str(error) and "--run another" in str(error)
    assert stub.history == [0]
    stub.chosen.clear()
    commit(other, 1, "another")
    with AdapterServer(stub.url, "policy", other, run_id="another") as named:
        follow = Reconciler(other, named, Settings(run_id="another"))
        assert did(follow, 2) == ["applied", "nothing"]
        assert named.status().run_id == "another"
        named.apply(0)
    assert (stub.history, stub.versions()) == ([0, 1, 0], [0, 1])
    assert all("another" in root for root in stub.held.values())


def test_a_name_that_is_taken_is_refused(follow, stub):
    stub.statics = {"policy": "/adapters/mine"}
    error = failed(follow)
    assert isinstance(error, UsageError) and "'/adapters/mine'" in str(error)


def test_a_version_that_was_replaced_is_not_chosen(follow, store, stub, server):
    did(follow, 1)
    commit(store, 1)
    there = MemoryStore("memory://adapter")
    begun(there, 1)
    commit(there, 1, created_at=OLD)
    stub.store = there
    assert isinstance(failed(follow), StoreReplaced)
    assert (stub.serving(), stub.versions()) == (0, [0])
    stub.store = store
    assert did(follow, 1) == ["applied"]


def test_a_server_that_serves_what_was_replaced_is_left_as_it_is(store, stub, server):
    server.apply(0)
    replace(store, 0)
    with AdapterServer(stub.url, "policy", store) as restarted:
        error = failed(Reconciler(store, restarted))
    assert isinstance(error, StoreReplaced)
    assert stub.calls == ["load policy@0", "choose policy@0"]


def test_two_drivers_of_one_name_are_noticed(follow, store, stub, server):
    commit(store, 1)
    did(follow, 2)
    with AdapterServer(stub.url, "policy", store) as other:
        other.apply(0)
    assert isinstance(failed(follow), DriverConflict)
    assert did(follow, 2) == ["applied", "nothing"]


def test_a_choice_that_another_server_heard_is_noticed(store, server, stub, monkeypatch):
    with serving(AdapterStub(store)) as behind:
        monkeypatch.setattr(behind, "held", stub.held)
        # One address, two servers: the second is asked what it has.
        monkeypatch.setattr(stub, "models", behind.models)
        stub.pull("policy@0")
        commit(store, 1)
        server.apply(1)
        behind.chosen["policy"] = "policy@0"
        with pytest.raises(DriverConflict, match="do several servers answer"):
            server.apply(1)


def test_two_processes_may_drive_two_names(follow, store, stub):
    other = begun(MemoryStore("memory://adapter"), 3, "judges")
    did(follow, 1)
    stub.store = other
    with AdapterServer(stub.url, "judge", other) as judge:
        assert did(Reconciler(other, judge), 2) == ["applied", "nothing"]
    assert (stub.serving("policy"), stub.serving("judge")) == (0, 2)
    stub.store = store
    assert did(follow, 1) == ["nothing"]


# Wrong servers, wrong runs, wrong names.


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"is_vllm": False}, "unlike vLLM"),
        ({"may_update": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"has_lora": False}, "start vllm serve with --enable-lora"),
        ({"has_plugin": False}, "install patchstore"),
        ({"down": True}, "/v1/models"),
    ],
)
def test_a_server_that_lacks_something_is_told_what(follow, stub, facts, says):
    for name, value in facts.items():
        setattr(stub, name, value)
    error = failed(follow)
    assert isinstance(error, ServerUnavailable)
    assert says in str(error) and "DEV_MODE" not in str(error)
    for name, value in facts.items():
        setattr(stub, name, not value)
    assert did(follow, 1) == ["applied"]


def test_a_run_of_the_other_kind_is_refused_before_a_server_is_asked(store, stub):
    whole = MemoryStore("memory://whole")
    begin_run(whole)
    commit(whole, 0)
    with running(whole, [stub.url], adapter="policy") as fleet:
        fleet.until(lambda: "usage" in fleet.kinds(None))
    assert "leave out --adapter" in str(fleet.told[0].step.error)
    with serving_whole(StubServer()) as server, running(store, [server.url]) as fleet:
        fleet.until(lambda: "usage" in fleet.kinds(None))
    assert "--adapter NAME" in str(fleet.told[0].step.error)
    assert (stub.calls, server.calls) == ([], [])
    with AdapterServer(stub.url, "policy", whole) as client, pytest.raises(UsageError, match="whole weights"):
        client.apply(0)


@pytest.mark.parametrize(
    "arguments", [("",), ("policy@1",), ("a\nb",), ("policy", None, 0), ("policy", None, True)]
)
def test_impossible_arguments_are_refused(arguments: tuple[Any, ...]) -> None:
    name, *rest = arguments
    with pytest.raises(UsageError):
        AdapterServer("http://127.0.0.1:9", name, **dict(zip(["store", "keep"], rest, strict=False)))


def test_without_a_store_a_server_can_only_be_asked(stub):
    stub.pull("policy@0")
    with AdapterServer(stub.url, "policy") as client:
        assert client.status().serving == 0
        with pytest.raises(UsageError, match="name the store"):
            client.apply(0)


# Verification.


def test_what_is_served_is_compared_with_the_folder_and_the_store(store, stub, server):
    with pytest.raises(UsageError, match="serves no version as policy"):
        server.verify(store)
    commit(store, 1)
    server.apply(0)
    server.apply(1)
    assert server.verify(store) == 1
    stub.differing = [[], ["model.b", "model.a"]]
    with pytest.raises(StateMismatch, match=r"2 modules differ from its folder, such as model\.a, model\.b"):
        server.verify(store)
    stub.differing = [[]]
    replace(store, 1)
    with pytest.raises(StateMismatch, match="memory://adapter has version 1"):
        server.verify(store)
    stub.is_dev = False
    server.apply(0)
    with pytest.raises(ServerUnavailable, match="VLLM_SERVER_DEV_MODE=1"):
        server.verify(store)


def test_the_command_verifies_an_adapter(tmp_path: Path, patchstore: Cli) -> None:
    store = begun(open_store(tmp_path), 1)
    with serving(AdapterStub(store)) as stub:
        asked = ("verify", tmp_path, "--server", stub.url, "--adapter", "policy")
        with AdapterServer(stub.url, "policy", store) as server:
            server.apply(0)
        code, out, _ = patchstore(*asked)
        assert (code, out.startswith(f"{stub.url} serves version 0 as policy, state ")) == (0, True)
        code, out, _ = patchstore(*asked, "--json")
        said = json.loads(out)
        assert (said["version"], said["adapter"], said["verified"]) == (0, "policy", True)
        stub.differing = [["a"]]
        code, _, said = patchstore(*asked)
        assert code != 0 and "1 modules differ" in said
    for wrong in (asked[:1] + asked[2:], asked[:2] + asked[4:], (*asked[:2], 0, *asked[2:])):
        assert patchstore(*wrong)[0] == 2


def test_a_fleet_verifies_from_time_to_time(store, server, stub, monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    follow = Reconciler(store, server, Settings(verify_every_s=10))
    assert did(follow, 2) == ["applied", "nothing"]
    now = 10.0
    assert did(follow, 2) == ["verified", "nothing"]
    now, stub.differing = 20.0, [["a"]]
    assert isinstance(failed(follow), StateMismatch)
    assert did(follow, 1) == ["nothing"]
    now, stub.differing = 30.0, [[]]
    assert did(follow, 1) == ["verified"]


# Signatures.


def test_only_what_a_required_key_signed_is_chosen(store, stub, tmp_path):
    private, public = key_pair(tmp_path)
    signer, required = KeySigner(private), RequiredKeys.of(public)
    with AdapterServer(stub.url, "policy", store, required_keys=required) as client:
        with pytest.raises(Unsigned):
            client.apply(0)
        assert stub.calls == []
        sign_version(store, signer, history.run_header(store), 0)
        client.apply(0)
        commit(store, 1)
        sign_version(store, signer, history.run_header(store), 1)
        # The server is offered another version 1 than this process.
        there = begun(MemoryStore("memory://adapter"), 1)
        commit(there, 1, created_at=OLD)
        stub.store = there
        with pytest.raises(StoreReplaced):
            client.apply(1)
        assert (stub.versions(), stub.serving()) == ([0], 0)
        stub.store = store
        settings = Settings(required_keys=required)
        assert did(Reconciler(store, client, settings), 1) == ["applied"]
        # Numbers of another run say nothing about age.
        other = begun(MemoryStore("memory://adapter"), 1, "another")
        sign_version(other, signer, history.run_header(other), 0)
        stub.store = other
        with AdapterServer(stub.url, "policy", other, run_id="another", required_keys=required) as named:
            following = Reconciler(other, named, Settings(run_id="another", required_keys=required))
            assert did(following, 1) == ["applied"]
        stub.restart()
        stub.store = store
        client.apply(1)
        older = Reconciler(store, client, settings, desired=lambda: history.read_manifest(store, 0))
        assert isinstance(failed(older), RollbackRefused)


# A fleet, and the commands.


def driving(store: Store, *stubs: AdapterStub, **options: Any) -> Any:
    return running(store, [stub.url for stub in stubs], adapter="policy", **options)


def test_servers_go_back_to_an_older_version_and_return(store, stub):
    commit(store, 1)
    with serving(AdapterStub(store)) as other, driving(store, stub, other) as fleet:
        stubs = [stub, other]
        fleet.until_all(1, stubs)
        fleet.desired.pin(0)
        fleet.fleet.wake()
        fleet.until_all(0, stubs)
        commit(store, 2)
        fleet.desired.unpin()
        fleet.fleet.wake()
        fleet.until_all(2, stubs)
    assert [each.history for each in stubs] == [[1, 0, 2]] * 2


def test_each_server_of_a_fleet_has_its_keys_and_its_run(store, stub, server, tmp_path):
    other = begun(MemoryStore("memory://adapter"), 2, "another")
    server.apply(0)
    stub.store = other
    desired = DesiredVersion(HeadWatcher(other), check_run=lambda header: check_kind(other, header, "policy"))
    named = Settings(servers=[stub.url], adapter="policy", run_id="another", keep=1)
    with closing(Fleet(desired, named).begin(stub.url, threading.Event()).server) as client:
        client.apply(1)
    assert (stub.serving(), stub.versions()) == (1, [1])
    signed = dataclasses.replace(named, required_keys=RequiredKeys.of(key_pair(tmp_path)[1]))
    with (
        closing(Fleet(desired, signed).begin(stub.url, threading.Event()).server) as client,
        pytest.raises(Unsigned),
    ):
        client.apply(0)
    assert stub.serving() == 1


def test_a_load_that_takes_long_delays_neither_other_servers_nor_the_end(store, stub):
    with serving(AdapterStub(store)) as other:
        go_on = stub.block(LOAD)
        try:
            with driving(store, stub, other, grace_s=1000) as fleet:
                assert stub.entered[LOAD].wait(60)
                commit(store, 1)
                fleet.until_all(1, [other])
            assert (fleet.fleet.left, fleet.did(stub.url)) == ([], [])
        finally:
            go_on.set()
    assert stub.history == []


def test_a_stop_after_the_load_chooses_nothing(store, stub):
    stop = threading.Event()
    stub.on_call = lambda path: stop.set() if path == LOAD else None
    with AdapterServer(stub.url, "policy", store, stop=stop) as server:
        assert server.apply(0) is None
    assert stub.history == []


def test_readiness_and_figures_are_right_at_once(store, stub):
    with listening(store, [stub.url], adapter="policy", max_poll_interval_s=1000) as service:
        fleet: FleetThread = service.fleet
        fleet.until_all(0, [stub])
        assert service.ready()[0] == 200
        figures = service.figures()
        described = service.get("/healthz").json()
    assert figures["patchstore_serving_version", stub.url] == 0
    assert figures["patchstore_updates_total", stub.url] == 1
    assert described["servers"][stub.url]["run_id"] == "run"


def test_waiting_asks_for_the_adapter(store, stub, server, patchstore: Cli):
    commit(store, 1)
    server.apply(0)
    with pytest.raises(WaitTimeout, match="serves version 0 of run run"):
        wait_until(1, servers=stub.url, adapter="policy", timeout_s=0)
    with pytest.raises(WaitTimeout, match="serves no version"):
        wait_until(0, servers=stub.url, adapter="judge", timeout_s=0)
    server.apply(1)
    assert wait_until(1, servers=stub.url, adapter="policy") == {stub.url: 1}
    code, out, _ = patchstore("wait", "1", "--server", stub.url, "--adapter", "policy")
    assert (code, out) == (0, f"{stub.url} serves version 1\n")
    assert patchstore("wait", "1", "--adapter", "policy")[0] == 2
    with pytest.raises(UsageError, match="leave out adapter"):
        wait_until(1, follow="http://127.0.0.1:9", adapter="policy")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Following]]:
    started: list[Following] = []

    def start(*options: object) -> Following:
        started.append(Following(tmp_path, *options, "--json"))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


def test_a_follow_that_was_killed_is_gone_on_with(tmp_path: Path, start: Callable[..., Following]) -> None:
    store = begun(open_store(tmp_path), 1)
    with serving(AdapterStub(store)) as stub:
        go_on = stub.block(LOAD)
        killed = start("--server", stub.url, "--adapter", "policy")
        assert stub.entered[LOAD].wait(60)
        killed.end(signal.SIGKILL)
        stub.entered[LOAD].clear()
        following = start("--server", stub.url, "--adapter", "policy", "--keep", 1)
        # The server still loads for the one that is gone, and has the version then.
        assert stub.entered[LOAD].wait(60)
        go_on.set()
        event = following.event()
        assert (event["event"], event["version"]) == ("applied", 0)
        for version in (1, 2):
            commit(store, version)
            assert following.event()["version"] == version
        assert following.end()[0] == 0
        assert (stub.serving(), stub.versions()) == (2, [2])


@pytest.mark.parametrize(
    "options",
    [
        ("--adapter", "policy", "--pause-mode", "abort"),
        ("--adapter", "policy", "--prefix-cache", "keep"),
        ("--adapter", "policy@1"),
        ("--keep", 3),
    ],
)
def test_a_wrong_call_ends_at_once(start: Callable[..., Following], options: tuple[object, ...]) -> None:
    following = start("--server", "http://127.0.0.1:9", *options)
    out, _ = following.process.communicate(timeout=60)
    assert (following.process.returncode, json.loads(out)["error"]["kind"]) == (2, "usage")
