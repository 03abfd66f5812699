"""After each update answers are those of a server that never had other weights, whatever connectors keep."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from asking import ask, post
from server_process import ServerProcess

from patchstore.errors import StaleCaches, UsageError
from patchstore.follow.reconcile import Reconciler
from patchstore.follow.settings import PauseMode, PrefixCache
from patchstore.follow.vllm_server import VllmServer
from patchstore.ops.doctor import examine

pytestmark = pytest.mark.exhaustive


@contextmanager
def serving(
    model: Path, log: Path, connector: str, module: str | None, **extra: object
) -> Iterator[ServerProcess]:
    """A server with a connector."""
    config = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if module is not None:
        config["kv_connector_module_path"] = module
    with ServerProcess(log, "--kv-transfer-config", json.dumps(config)).serving(model) as process:
        yield process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the connector keeps keys and values."""
    return tmp_path_factory.mktemp("kv") / "kept"


@pytest.fixture(scope="module")
def process(model: Path, folder: Path) -> Iterator[ServerProcess]:
    folder.mkdir()
    log, kept = folder.with_suffix(".log"), str(folder)
    with serving(model, log, "ForgettingConnector", "connectors", shared_storage_path=kept) as process:
        yield process


@pytest.fixture
def right(server: VllmServer, trainer, folder: Path) -> dict[int, list[int]]:
    """What versions 0 and 1 answer, where nothing is kept; version 0 is served, and kept."""
    trainer.step(density=0.5)
    answers = {}
    for version in (1, 0):
        server.apply(version)
        assert [*folder.iterdir()] == []
        post(server.url, "/reset_prefix_cache", reset_running_requests="true")
        answers[version] = ask(server.url).tokens
    assert [*folder.iterdir()] != []
    assert answers[0] != answers[1]
    assert ask(server.url).tokens == answers[0]
    return answers


def test_the_connector_answers_for_older_weights_so_that_these_tests_can_fail(server, right, folder):
    with VllmServer(server.url, timeout_s=120, prefix_cache=PrefixCache.KEEP) as keeps:
        keeps.apply(1)
    post(server.url, "/reset_prefix_cache", reset_running_requests="true")
    # Its prompt is found in the folder.
    assert [*folder.iterdir()] != []
    assert ask(server.url).tokens != right[1]


@pytest.mark.parametrize("pause_mode", [*PauseMode])
def test_no_connector_answers_for_older_weights(server, right, pause_mode):
    with VllmServer(server.url, timeout_s=120, pause_mode=pause_mode) as driver:
        driver.apply(1)
    assert ask(server.url).tokens == right[1]


@pytest.mark.parametrize("clears", ["true", "false"])
def test_nor_does_one_of_a_server_that_another_client_paused(server, right, clears):
    post(server.url, "/pause", mode="keep", clear_cache=clears)
    server.apply(1)
    assert server.is_paused()
    post(server.url, "/resume")
    assert ask(server.url).tokens == right[1]


def test_nor_does_one_of_a_server_that_is_updated_by_the_routes_of_vllm_alone(server, right):
    for path, body in (
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"version": 1}}),
        ("/finish_weight_update", {"weight_version": "1"}),
    ):
        assert post(server.url, path, body).is_success
    assert ask(server.url).tokens == right[1]


@pytest.mark.parametrize("pause_mode", [PauseMode.KEEP, PauseMode.NONE])
def test_nothing_is_generated_until_the_connector_forgets(server, right, folder, pause_mode):
    folder.with_suffix(".answers").write_text("true false false false")
    with VllmServer(server.url, timeout_s=120, pause_mode=pause_mode) as driver:
        with pytest.raises(StaleCaches, match="version 1 is served, but"):
            driver.apply(1)
        assert driver.is_paused()
        assert driver.status().ranks[0]["stale"]
        with pytest.raises(StaleCaches):
            driver.end_switch(driver.status().switch)
        assert driver.is_paused()
        driver.end_switch(driver.status().switch)
        assert not driver.is_paused()
    assert ask(server.url).tokens == right[1]


def forgetting(folder: Path) -> dict:
    folder.mkdir()
    return {
        "kv_connector": "ForgettingConnector",
        "kv_connector_module_path": "connectors",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def test_each_of_several_connectors_forgets(model, tmp_path, new_trainer):
    folders = [tmp_path / "a", tmp_path / "b"]
    connectors = [{"kv_role": "kv_both"} | forgetting(folder) for folder in folders]
    trainer = new_trainer()
    for _ in range(2):
        trainer.step(density=0.5)
    multiple = serving(model, tmp_path / "vllm.log", "MultiConnector", None, connectors=connectors)
    with multiple as process, VllmServer(process.url, timeout_s=120) as server:
        server.init_weight_transfer(trainer.url)
        right = {}
        for version in (1, 0):
            server.apply(version)
            post(server.url, "/reset_prefix_cache", reset_running_requests="true")
            right[version] = ask(server.url).tokens
            assert all(any(folder.iterdir()) for folder in folders)
        assert right[0] != right[1]
        for version, pause_mode in ((1, PauseMode.NONE), (0, PauseMode.KEEP), (1, PauseMode.ABORT)):
            with VllmServer(process.url, timeout_s=120, pause_mode=pause_mode) as driver:
                driver.apply(version)
            assert not any(any(folder.iterdir()) for folder in folders)
            assert ask(server.url).tokens == right[version]
        # vLLM takes what one of them did not do for success.
        folders[1].with_suffix(".answers").write_text("none")
        with pytest.raises(StaleCaches, match="ForgettingConnector"):
            server.apply(0)
        assert (server.status().serving, ask(server.url).tokens) == (1, right[1])


@pytest.fixture
def forgetful(model: Path, tmp_path: Path) -> Iterator[str]:
    """The URL of a server whose connector has no way to forget."""
    kept = str(tmp_path / "kept")
    with serving(model, tmp_path / "vllm.log", "ExampleConnector", None, shared_storage_path=kept) as process:
        yield process.url


def test_a_connector_without_a_way_to_forget_is_refused_at_opening(forgetful, new_trainer):
    trainer = new_trainer()
    trainer.publish()
    for mode in (PrefixCache.RESET, PrefixCache.VERSION):
        with VllmServer(forgetful, timeout_s=120, prefix_cache=mode) as driver:
            for act in (lambda: driver.init_weight_transfer(trainer.url), lambda: driver.update_weights(0)):
                with pytest.raises(UsageError, match=r"ExampleConnector .*reset_cache"):
                    act()
            driver.start_weight_update()
            with pytest.raises(UsageError, match="ExampleConnector"):
                driver.update_weights(0)
            assert not driver.status().update_open
            done = Reconciler(trainer.store, driver).step()
            assert (done.outcome, done.error.kind) == ("failed", "usage")
    assert "caches-kept" in {each.kind for each in examine(trainer.url, [forgetful], read_only=True)}
    with VllmServer(forgetful, timeout_s=120) as driver:
        with pytest.raises(UsageError, match=r"ExampleConnector .*--kv-transfer-config"):
            driver.init_weight_transfer(trainer.url)
        answer = post(driver.url, "/init_weight_transfer_engine", {"init_info": {"store": trainer.url}})
        assert answer.status_code == 500
        assert "ExampleConnector" in answer.text
