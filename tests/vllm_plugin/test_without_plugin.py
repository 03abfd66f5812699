"""A server whose engine core did not load patchstore's plugin, as `VLLM_PLUGINS` can have it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess

from patchstore.errors import UsageError
from patchstore.follow.reconcile import Reconciler
from vllm_plugin import plugin

# Warnings are of vLLM's, where this test is the first to import it.
pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def process(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    """Such a server, whose worker has a process of its own."""
    # The process that starts the server may have used vLLM with the plugin.
    plugin.load()
    monkeypatch.setenv("VLLM_PLUGINS", "none_of_ours")
    process = ServerProcess(tmp_path / "vllm.log", "--distributed-executor-backend", "mp")
    with process.serving(model):
        yield process


def test_a_worker_in_another_process_is_not_updated_and_every_way_to_an_update_says_so(server, new_trainer):
    trainer = new_trainer()
    trainer.publish()
    failed = Reconciler(trainer.store, server).step()
    assert failed.error is not None and failed.error.kind == UsageError.kind
    assert "did not load patchstore's plugin" in str(failed.error)
    # Also a driver that does not ask first.
    for info in ({"store": trainer.url}, {"store": trainer.url, "prefix_cache": "keep"}):
        body = {"init_info": info}
        answer = httpx.post(f"{server.url}/init_weight_transfer_engine", json=body, timeout=120)
        assert answer.status_code == 500
        assert "did not load patchstore's plugin" in answer.text


def test_a_worker_in_the_process_of_the_engine_core_brings_the_plugin_itself():
    code = """
from vllm.v1.engine.core import EngineCore
assert not hasattr(EngineCore.collective_rpc, "__wrapped__")
from vllm_plugin import DeltaWorkerExtension
assert hasattr(EngineCore.collective_rpc, "__wrapped__")
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
