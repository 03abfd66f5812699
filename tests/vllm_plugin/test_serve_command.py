"""`patchstore serve`: one command starts vLLM, has it serve the newest version, and ends both."""

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import tiny_adapter
from asking import ask, question
from server_process import MODEL_NAME, RUNNING, ServerProcess, call
from trainer import Trainer

from patchstore import Publisher, wait_until
from patchstore.errors import ServerUnavailable
from patchstore.follow.verify import verify_server
from patchstore.follow.vllm_server import VllmServer
from patchstore.stores import open_store


class ServeCommand(ServerProcess):
    """Starts the command in the place of vLLM."""

    def __init__(self, log: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        # The command sets it.
        super().__init__(log, *arguments, environment={"VLLM_SERVER_DEV_MODE": "0", **(environment or {})})

    def program(self, model: Path) -> list[str]:
        return [
            *("-m", "patchstore", "serve", str(model), "--port", str(self.port)),
            *("--served-model-name", MODEL_NAME, "--max-model-len", "256", "--block-size", "32"),
            *("--kv-cache-memory-bytes", "67108864", "--gpu-memory-utilization=0.1", "--seed", "0"),
            *self.arguments,
        ]

    def started(self, process: int) -> bool:
        """Whether the command, or what it started, has started a process."""
        assert self._process is not None
        while process > 1 and process != self._process.pid:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        return process == self._process.pid

    def end(self) -> int:
        """End the command as a service manager does; return its exit code, once it has ended."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        os.kill(int(children), signal.SIGTERM)
        return self.wait(120)

    def wait(self, timeout_s: float) -> int:
        """Return its exit code, once it has ended."""
        assert self._process is not None
        code = self._process.wait(timeout_s)
        self._process = None
        RUNNING.remove(self)
        return code


@pytest.mark.timeout(1800)
def test_one_command_serves_the_newest_version_and_goes_on_following(
    model: Path, tmp_path: Path, new_trainer: Callable[..., Trainer]
) -> None:
    trainer = new_trainer()
    trainer.publish()
    trainer.step()
    command = ServeCommand(tmp_path / "serve.log", "--store", trainer.url)
    with command.serving(model):
        with VllmServer(command.url) as server:
            for version in (1, 2):
                wait_until(version, servers=command.url, exactly=True)
                assert verify_server(trainer.store, server).manifest.version == version
                ask(command.url)
                trainer.step()
        assert command.end() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{command.url}/health")
    log = command.log.read_text()
    assert f"VLLM_SERVER_DEV_MODE=1 {sys.executable} -m vllm.entrypoints.cli.main serve {model}" in log
    assert "applied version 2" in log


@pytest.mark.timeout(1800)
@pytest.mark.exhaustive
def test_a_server_whose_engine_dies_in_a_call_is_ended(
    model: Path, tmp_path: Path, new_trainer: Callable[..., Trainer]
) -> None:
    trainer = new_trainer()
    trainer.publish()
    command = ServeCommand(tmp_path / "serve.log", "--store", trainer.url)
    with command.serving(model):
        wait_until(0, servers=command.url, exactly=True)
        (core,) = [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/comm")
            if path.read_text().startswith("VLLM::EngineCor") and command.started(int(path.parent.name))
        ]
        os.kill(core, signal.SIGSTOP)
        with VllmServer(command.url, timeout_s=300) as server, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(call, server, "delta_status")
            # By then vLLM has taken the call.
            time.sleep(5)
            os.kill(core, signal.SIGKILL)
            with pytest.raises(ServerUnavailable, match="closed its port"):
                asked.result()
        assert command.wait(120) == 128 + signal.SIGKILL
    assert "vLLM closed its port and did not end, so it was killed" in command.log.read_text()


@pytest.mark.timeout(1800)
@pytest.mark.exhaustive
def test_a_run_of_adapters_is_served_under_its_name(model: Path, tmp_path: Path) -> None:
    store, tensors = open_store(tmp_path / "store"), tiny_adapter.tensors()
    files, scratch = tiny_adapter.config(tmp_path / "config"), tmp_path / "tmp"
    scratch.mkdir()
    with Publisher(store, tensors, adapter="default", files=files, dtype=None) as publisher:
        publisher.publish_patch(0).result()
        arguments = ("--store", store.url, "--adapter", "policy", "--api-key", "a-key")
        key = {"Authorization": "Bearer a-key"}
        command = ServeCommand(tmp_path / "serve.log", *arguments, environment={"TMPDIR": str(scratch)})
        with command.serving(model):
            for version in range(2):
                wait_until(version, servers=command.url, adapter="policy", exactly=True, headers=key)
                asked = question(model=f"policy@{version}", max_tokens=1)
                url = f"{command.url}/v1/completions"
                httpx.post(url, json=asked, headers=key, timeout=120).raise_for_status()
                for tensor in tensors.values():
                    tensor.mul_(-1.5)
                publisher.publish_patch(version + 1).result()
            assert command.end() == 0
