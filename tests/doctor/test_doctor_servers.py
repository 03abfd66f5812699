"""What `patchstore doctor` finds of servers."""

from collections.abc import Iterator
from typing import Any

import pytest
from findings import found, wrong

from examples.processes import free_port
from patchstore.bucket import history
from patchstore.ops.doctor import Finding, examine
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.manifests import begin_run, commit
from tests.support.vllm_stub import Engine, StubServer, serving
from tests.support.weights import Run


class StubVllm(StubServer):
    """A stub that also says which vLLM it is, and whether its model takes a run."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.version = "0.32.0"
        self.is_healthy = True
        self.extra: dict[str, Any] = {"release": "0.1.0"}
        """What each rank says besides."""
        self.failure: dict[str, Any] | None = None
        """Why its model does not take a run."""
        self.fits: dict[str, Any] = {}
        """What else each rank says of a run that it does not follow; of older releases nothing."""
        header = history.read_header(store)
        self.run_id, self.opened = header.run_id, {"store": "/bucket"}
        self.open(held=5)

    def open(self, held: int) -> None:
        """Follow the run, in all engines."""
        for engine in self.engines:
            engine.initialised, engine.run_id, engine.held = True, self.run_id, held

    def status(self, rank: int, engine: Engine) -> dict[str, Any]:
        return {**super().status(rank, engine), **self.extra}

    def answer(self, path: str, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        match path:
            case "/version" if path not in self.lacking:
                return {"version": self.version}
            case "/health" if not self.is_healthy:
                raise ValueError("engine is dead")
            case "/collective_rpc" if body["method"] == "delta_fits":
                assert '"run_id"' in body["args"][0]
                return {"results": [{"failure": self.failure, **self.fits}] * self.num_ranks}
        return super().answer(path, query, body)


@pytest.fixture
def vllm(run: Run) -> Iterator[StubVllm]:
    with serving(StubVllm(run.store)) as stub:
        yield stub


def of_server(run: Run, url: str) -> dict[str, Finding]:
    """What is found of a server, in the order in which it is found."""
    return {
        finding.kind: finding
        for finding in examine(FolderLike(run.store), [url], read_only=True)
        if finding.about == url
    }


class FolderLike(FaultyStore):
    """A store whose URL says nothing against a server here."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.url = "/bucket"


WELL = ["server", "delta", "following", "tensors"]
NEW = ["server", "delta", "following-nothing", "tensors"]
"""Of a server that follows nothing yet."""
NAMES = " ".join(f"'layers.{number}.weight'" for number in range(1000))
APP = {"/server_info", "/version"}
"""What an app of one's own may lack."""
WIDER = "layers.*.gate.bias"


def unfit(message: str, kind: str = "schema-mismatch") -> dict[str, Any]:
    """What a server says that follows nothing yet and whose model does not take the run."""
    return {"initialised": False, "failure": {"rank": 0, "kind": kind, "message": message}}


LEFT = {"half_applied": True, "held": None, "switch": "resume", "paused": True, "update_open": True}
LAST_ERROR = {"rank": 0, "kind": "half-applied", "message": "parts"}
CASES: dict[str, tuple[dict[str, Any], list[str], dict[str, list[str]]]] = {
    "at the head": ({}, WELL, {}),
    "HTML": ({"page": b"<html>"}, ["not-vllm"], {}),
    "another JSON": ({"page": b'{"version": null}'}, ["not-vllm"], {}),
    "a list": ({"page": b"[]"}, ["not-vllm"], {}),
    "another version": (
        {"version": "0.25.1"},
        ["server-version"],
        {"server-version": ["pip install 'vllm<0.34,>=0.26'"]},
    ),
    "sick": ({"version": "0.32.1rc1.dev3+cpu", "is_healthy": False}, ["server-unhealthy"], {}),
    "without routes for development": (
        {"is_dev": False},
        ["server", "dev-mode-off"],
        {"dev-mode-off": ["VLLM_SERVER_DEV_MODE=1"]},
    ),
    "an app": (
        {"lacking": {*APP, "/health"}, "extra": {"release": "0.1.0", "vllm": "0.32.0"}},
        WELL,
        {"server": ["vLLM 0.32.0, in an app of its own"]},
    ),
    "an app of another version": (
        {"lacking": {*APP, "/health"}, "extra": {"release": "0.1.0", "vllm": "0.25.1"}},
        ["server-version"],
        {},
    ),
    "a sick app": ({"lacking": APP, "is_healthy": False}, ["server-unhealthy"], {}),
    "an app without a route": (
        {"lacking": {*APP, "/collective_rpc"}},
        ["routes-missing"],
        {"routes-missing": ["does not serve POST /collective_rpc", "rpc.api_router"]},
    ),
    "an app without any": ({"lacking": {*APP, "/collective_rpc"}, "is_dev": False}, ["not-vllm"], {}),
    # Its ranks are not asked.
    "without the extension": (
        {
            "config": {"parallel_config": {"worker_extension_cls": ""}, "weight_transfer_config": None},
            "status": None,
        },
        ["server", "no-extension", "no-delta-backend"],
        {"no-extension": ["--worker-extension-cls"], "no-delta-backend": ["--weight-transfer-config"]},
    ),
    "silent on how it was started": (
        {"config": {}},
        ["server", "check-failed"],
        {"check-failed": ["/server_info"]},
    ),
    "behind": (
        {"held": 3},
        ["server", "delta", "behind", "tensors"],
        {"behind": ["serves version 3; the newest is 5", "patchstore follow /bucket --server http://127"]},
    ),
    "a connector that cannot forget": (
        {"uncovered": {"reset": "ExampleConnector has no reset_cache"}},
        ["server", "delta", "caches-kept", "following", "tensors"],
        {"caches-kept": ["ExampleConnector", "--prefix-cache keep"]},
    ),
    "half-applied and left in a switch": (
        LEFT | {"extra": {"release": "0.1.0", "asleep": True, "last_error": LAST_ERROR}},
        [
            *("server", "delta", "server-half-applied", "server-asleep", "switch-open", "update-open"),
            *("server-paused", "server-last-error", "behind", "tensors"),
        ],
        {
            "server-half-applied": ["patchstore follow"],
            "server-asleep": ["/wake_up"],
            "server-paused": ["/resume"],
            "server-last-error": ["[half-applied] parts"],
        },
    ),
    "another run": (
        {"run_id": "another"},
        ["server", "delta", "other-run", "tensors"],
        {"other-run": ["follows run another"]},
    ),
    "new": ({"initialised": False}, NEW, {}),
    "unfit": (
        unfit("no parameter named scale"),
        [*NEW[:-1], "tensors-unfit"],
        {"tensors-unfit": ["[schema-mismatch] no parameter named scale", "vllm serve"]},
    ),
    "with many parameters": (
        unfit(f"no 'scale', but {NAMES}"),
        [*NEW[:-1], "tensors-unfit"],
        {"tensors-unfit": ["no 'scale', but 'layers.0.weight'"]},
    ),
    "asleep": (
        unfit("was asked", "internal") | {"extra": {"release": "0.1.0", "asleep": True}},
        ["server", "delta", "server-asleep", "following-nothing", "tensors-unknown"],
        {},
    ),
    "of an old release": (
        unfit("was asked", "internal") | {"extra": {}},
        [*NEW[:-1], "tensors-unknown"],
        {},
    ),
    "in FP8": (
        {"initialised": False, "extra": {"release": "0.1.0", "form": "fp8-block"}},
        NEW,
        {"delta": ["on 1 rank, fp8-block"]},
    ),
    # It knows only what it does not take.
    "quantized by vLLM": (
        {"initialised": False, "extra": {"release": "0.1.0", "form": "calculated"}},
        [*NEW[:-1], "tensors-unknown"],
        {"delta": ["on 1 rank, quantized by vLLM"], "tensors-unknown": ["quantizes what it loads"]},
    ),
    "quantized by vLLM, and unfit": (
        unfit("the run publishes FP8") | {"extra": {"release": "0.1.0", "form": "calculated"}},
        [*NEW[:-1], "tensors-unfit"],
        {"tensors-unfit": ["the run publishes FP8"]},
    ),
    "wider": (
        {"extra": {"release": "0.1.0", "map": {"num_wider": 1, "widened_apart": WIDER, "num_absent": 2}}},
        [*WELL, "tensors-wider"],
        {"tensors": ["2 absent, 1 wider"], "tensors-wider": [f"lost in them: {WIDER}"]},
    ),
    "wider in all": (
        {"extra": {"release": "0.1.0", "map": {"num_wider": 1, "widened_apart": "", "num_absent": 2}}},
        WELL,
        {},
    ),
    "new and wider": (
        {"initialised": False, "fits": {"widened_apart": WIDER}},
        [*NEW, "tensors-wider"],
        {"tensors-wider": [f"lost in them: {WIDER}"]},
    ),
    "new and not wider": ({"initialised": False, "fits": {"widened_apart": ""}}, NEW, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_server_is_examined_and_not_touched(run: Run, vllm: StubVllm, case: str) -> None:
    has, kinds, says = CASES[case]
    for name, value in has.items():
        setattr(vllm, name, value)
    if "run_id" in has:
        vllm.open(held=5)
    findings = of_server(run, vllm.url)
    assert [*findings] == kinds
    for kind, texts in says.items():
        said = f"{findings[kind].found} -> {findings[kind].advice}"
        assert [text for text in texts if text not in said] == []
    assert all(len(each.found) < 400 for each in findings.values())
    assert vllm.calls == []


def test_a_server_that_is_down_is_unreachable(run: Run) -> None:
    findings = of_server(run, f"http://127.0.0.1:{free_port()}")
    assert [*findings] == ["server-unreachable"]
    assert "--server" in str(findings["server-unreachable"].advice)


def test_ranks_and_engines_that_differ_are_warnings(run: Run, vllm: StubVllm) -> None:
    vllm.num_engines = 3
    vllm.open(held=5)
    vllm.num_ranks, vllm.held_by_rank, vllm.engines[2].half_applied = 2, {1: 4}, True
    findings = of_server(run, vllm.url)
    assert "4, 5" in findings["server-ranks-differ"].found
    assert "2 ranks; 3 engines" in findings["delta"].found
    assert "patchstore follow" in str(findings["server-engines-differ"].advice)


def test_a_run_of_a_wrapped_model_is_told_what_to_publish(vllm: StubVllm) -> None:
    store = MemoryStore("memory://wrapped")
    # A publisher refuses such names; another writer may not.
    begin_run(store, tensors=("module.b", "module.model.w"))
    commit(store, 0)
    vllm.initialised = False
    vllm.failure = unfit(f"ValueError: no 'module', but {NAMES}")["failure"]
    finding = found(store, vllm.url, read_only=True)["tensors-unfit"]
    assert "wrapped model: its names have 'module.'" in finding.found
    assert "layers." not in finding.found
    assert "publish model.module" in str(finding.advice)


def test_a_store_that_a_server_cannot_open_is_a_warning(run: Run, vllm: StubVllm) -> None:
    assert "this process only" in found(run.store, vllm.url)["store-not-shared"].found


@pytest.mark.parametrize("as_url", [False, True])
def test_a_folder_is_not_on_another_machine_however_it_is_written(tmp_path, vllm, as_url):
    # An address of this machine which does not look like one.
    elsewhere = vllm.url.replace("127.0.0.1", "127.1")
    folder = tmp_path / "bucket"
    findings = found(folder.as_uri() if as_url else str(folder), elsewhere, read_only=True)
    assert f"{folder} is a folder" in findings["store-not-shared"].found
    assert "store-not-shared" not in found(str(folder), vllm.url, read_only=True)


def test_a_server_is_examined_though_the_store_cannot_be_opened(vllm: StubVllm) -> None:
    assert wrong(found("nosuch://place", vllm.url)) == ["store-url"]


def test_servers_are_examined_though_the_store_is_down(vllm: StubVllm) -> None:
    dead = FaultyStore(MemoryStore(), Fault(verb="*", effect="fail-before", times=None))
    findings = found(dead, vllm.url)
    assert wrong(findings) == ["store-unreachable", "store-not-shared"]
    assert {"server", "delta", "following"} < {*findings}
