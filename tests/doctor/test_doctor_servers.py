"""What `patchstore doctor` finds of servers."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from findings import found, wrong

from patchstore.doctor import Finding, examine
from patchstore.format import history
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from patchstore.testing.vllm_stub import Engine, StubServer, serving
from tests.support.manifests import begin_run, commit
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
        header = history.read_header(store)
        assert header is not None
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
            case "/version":
                return {"version": self.version}
            case "/health" if not self.is_healthy:
                raise ValueError("engine is dead")
            case "/collective_rpc" if body["method"] == "delta_fits":
                assert '"run_id"' in body["args"][0]
                return {"results": [{"failure": self.failure}] * self.num_ranks}
        return super().answer(path, query, body)


@pytest.fixture
def vllm(run: Run) -> Iterator[StubVllm]:
    with serving(StubVllm(run.store)) as stub:
        yield stub  # type: ignore[misc]


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


def test_a_server_at_the_head_is_well_and_was_not_touched(run: Run, vllm: StubVllm) -> None:
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server", "delta", "following", "tensors"]
    assert vllm.calls == []


def test_a_server_that_is_down_is_unreachable(run: Run) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        findings = of_server(run, url)
    assert [*findings] == ["server-unreachable"]
    assert "--server" in str(findings["server-unreachable"].advice)


@pytest.mark.parametrize("page", [b"<html>", b'{"version": null}', b"[]"])
def test_a_server_that_is_not_vllm_is_told_apart(run: Run, vllm: StubVllm, page: bytes) -> None:
    vllm.page = page
    assert [*of_server(run, vllm.url)] == ["not-vllm"]


def test_a_server_that_is_sick_or_of_another_version_is_a_problem(run: Run, vllm: StubVllm) -> None:
    vllm.version = "0.25.1"
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server-version"]
    assert "pip install 'vllm<0.34,>=0.26'" in str(findings["server-version"].advice)
    vllm.version, vllm.is_healthy = "0.32.1rc1.dev3+cpu", False
    assert [*of_server(run, vllm.url)] == ["server-unhealthy"]


def test_a_server_without_development_routes_is_told_the_variable(run: Run, vllm: StubVllm) -> None:
    vllm.is_dev = False
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server", "dev-mode-off"]
    assert "VLLM_SERVER_DEV_MODE=1" in str(findings["dev-mode-off"].advice)


def test_a_server_without_the_extension_is_told_the_options_and_its_ranks_are_not_asked(
    run: Run, vllm: StubVllm
) -> None:
    vllm.config["parallel_config"]["worker_extension_cls"] = ""
    vllm.config["weight_transfer_config"] = None
    vllm.status = None  # type: ignore[assignment, method-assign]
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server", "no-extension", "no-delta-backend"]
    assert "--worker-extension-cls" in str(findings["no-extension"].advice)
    assert "--weight-transfer-config" in str(findings["no-delta-backend"].advice)


def test_a_server_behind_the_head_is_told_the_command(run: Run, vllm: StubVllm) -> None:
    vllm.held = 3
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server", "delta", "behind", "tensors"]
    assert "serves version 3; the newest is 5" in findings["behind"].found
    assert f"patchstore follow /bucket --server {vllm.url}" in str(findings["behind"].advice)


def test_a_half_applied_server_that_was_left_in_a_switch_says_all_of_it(run: Run, vllm: StubVllm) -> None:
    vllm.half_applied, vllm.held, vllm.switch, vllm.paused, vllm.update_open = (
        True,
        None,
        "resume",
        True,
        True,
    )
    vllm.extra["last_error"] = {"rank": 0, "kind": "half-applied", "message": "parts of two versions"}
    vllm.extra["asleep"] = True
    findings = of_server(run, vllm.url)
    told = [
        "server-half-applied",
        "server-asleep",
        "switch-open",
        "update-open",
        "server-paused",
        "server-last-error",
    ]
    assert [*findings] == ["server", "delta", *told, "behind", "tensors"]
    assert "patchstore follow" in str(findings["server-half-applied"].advice)
    assert "/wake_up" in str(findings["server-asleep"].advice)
    assert "/resume" in str(findings["server-paused"].advice)
    assert "[half-applied] parts of two versions" in findings["server-last-error"].found


def test_ranks_and_engines_that_differ_are_warnings(run: Run, vllm: StubVllm) -> None:
    vllm.num_engines = 3
    vllm.open(held=5)
    vllm.num_ranks, vllm.held_by_rank, vllm.engines[2].half_applied = 2, {1: 4}, True
    findings = of_server(run, vllm.url)
    assert "4, 5" in findings["server-ranks-differ"].found
    assert "2 ranks; 3 engines" in findings["delta"].found
    assert "patchstore follow" in str(findings["server-engines-differ"].advice)


def test_tensors_are_compared_though_the_server_follows_nothing_yet(run: Run, vllm: StubVllm) -> None:
    vllm.initialised = False
    assert [*of_server(run, vllm.url)] == ["server", "delta", "following-nothing", "tensors"]
    vllm.failure = {"rank": 0, "kind": "schema-mismatch", "message": "no parameter named scale"}
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server", "delta", "following-nothing", "tensors-unfit"]
    assert "[schema-mismatch] no parameter named scale" in findings["tensors-unfit"].found
    assert "vllm serve" in str(findings["tensors-unfit"].advice)
    assert vllm.calls == []


def test_a_run_of_a_wrapped_model_is_told_what_to_publish(vllm: StubVllm) -> None:
    store = MemoryStore("memory://wrapped")
    # A publisher refuses such names; another writer may not.
    begin_run(store, tensors=("module.b", "module.model.w"))
    commit(store, 0)
    vllm.initialised = False
    every = " ".join(f"'layers.{number}.weight'" for number in range(1000))
    vllm.failure = {"rank": 0, "kind": "schema-mismatch", "message": f"ValueError: no 'module', but {every}"}
    finding = found(store, vllm.url, read_only=True)["tensors-unfit"]
    assert "wrapped model: its names have 'module.'" in finding.found
    assert "layers." not in finding.found
    assert "publish model.module" in str(finding.advice)


def test_a_servers_long_list_of_its_parameters_is_cut(run: Run, vllm: StubVllm) -> None:
    vllm.initialised = False
    every = " ".join(f"'layers.{number}.weight'" for number in range(1000))
    vllm.failure = {"rank": 0, "kind": "schema-mismatch", "message": f"no 'scale', but {every}"}
    finding = of_server(run, vllm.url)["tensors-unfit"]
    assert "no 'scale', but 'layers.0.weight'" in finding.found
    assert len(finding.found) < 400


def test_a_server_on_another_run_is_told_apart(run: Run, vllm: StubVllm) -> None:
    vllm.run_id = "another"
    vllm.open(held=5)
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server", "delta", "other-run", "tensors"]
    assert "follows run another" in findings["other-run"].found


def test_a_server_that_cannot_tell_about_tensors_is_not_asked(run: Run, vllm: StubVllm) -> None:
    vllm.initialised = False
    vllm.failure = {"rank": 0, "kind": "internal", "message": "was asked"}
    vllm.extra = {"release": "0.1.0", "asleep": True}
    assert "tensors-unknown" in of_server(run, vllm.url)
    vllm.extra = {}
    assert "tensors-unknown" in of_server(run, vllm.url)


def test_the_form_that_a_server_serves_is_said(run: Run, vllm: StubVllm) -> None:
    vllm.initialised = False
    vllm.extra["form"] = "fp8-block"
    findings = of_server(run, vllm.url)
    assert findings["delta"].found.endswith("on 1 rank, fp8-block")
    assert "tensors" in findings


def test_a_server_that_quantises_by_itself_knows_only_what_it_does_not_take(run: Run, vllm: StubVllm) -> None:
    vllm.initialised = False
    vllm.extra["form"] = "calculated"
    findings = of_server(run, vllm.url)
    assert findings["delta"].found.endswith("on 1 rank, quantised by vLLM")
    assert "quantises what it loads" in findings["tensors-unknown"].found
    vllm.failure = {"rank": 0, "kind": "schema-mismatch", "message": "the run publishes FP8"}
    assert "the run publishes FP8" in of_server(run, vllm.url)["tensors-unfit"].found


def test_a_store_that_a_server_cannot_open_is_a_warning(run: Run, vllm: StubVllm) -> None:
    assert "this process only" in found(run.store, vllm.url)["store-not-shared"].found


@pytest.mark.parametrize("as_url", [False, True])
def test_a_folder_is_not_on_another_machine_however_it_is_written(
    tmp_path: Path, vllm: StubVllm, as_url: bool
) -> None:
    # An address of this machine which does not look like one.
    elsewhere = vllm.url.replace("127.0.0.1", "127.1")
    folder = tmp_path / "bucket"
    findings = found(folder.as_uri() if as_url else str(folder), elsewhere, read_only=True)
    assert f"{folder} is a folder" in findings["store-not-shared"].found
    assert "store-not-shared" not in found(str(folder), vllm.url, read_only=True)


def test_a_server_is_examined_though_the_store_cannot_be_opened(vllm: StubVllm) -> None:
    assert wrong(found("nosuch://place", vllm.url)) == ["store-url"]


def test_a_server_that_does_not_tell_how_it_was_started_is_not_asked_further(
    run: Run, vllm: StubVllm
) -> None:
    vllm.config = {}
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server", "check-failed"]
    assert "/server_info" in findings["check-failed"].found


def test_servers_are_examined_though_the_store_is_down(vllm: StubVllm) -> None:
    dead = FaultyStore(MemoryStore(), Fault(verb="*", effect="fail-before", times=None))
    findings = found(dead, vllm.url)
    assert wrong(findings) == ["store-unreachable", "store-not-shared"]
    assert {"server", "delta", "following"} < {*findings}


def test_a_server_whose_model_has_more_bits_than_the_run_names_the_tensors(run: Run, vllm: StubVllm) -> None:
    mapped = {"num_wider": 1, "widened_apart": "layers.*.gate.bias", "num_absent": 2}
    status = vllm.status
    vllm.status = lambda rank, engine: status(rank, engine) | {"map": mapped}  # type: ignore[method-assign]
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server", "delta", "following", "tensors", "tensors-wider"]
    assert "2 absent, 1 wider" in findings["tensors"].found
    assert findings["tensors-wider"].level == "warning"
    assert "lost in them: layers.*.gate.bias" in findings["tensors-wider"].found
    mapped["widened_apart"] = ""
    assert "tensors-wider" not in of_server(run, vllm.url)
