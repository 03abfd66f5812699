"""A real vLLM server on the CPU, on a port of its own, which ends with its test module or by itself."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import torch

from examples.processes import free_port
from patchstore.follow.vllm_protocol import Connection
from patchstore.follow.vllm_server import VllmServer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL_NAME = "tiny"

_START_S = 900.0
_LIFE_S = 1800
"""A server that was not ended, because the tests were killed, ends itself."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # On a GPU the first start would compile this sampler, for minutes; the tests' answers are greedy.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]),
}


def connection(server: VllmServer) -> Connection:
    """For calls that `VllmServer` has no method for; they raise its errors."""
    return Connection(server.url, timeout_s=120, headers=server.headers)


def call(server: VllmServer, method: str, *args: object) -> list:
    """Call a method of the worker extension in every rank, and return the answers."""
    body = {"method": method, "args": list(args)}
    return connection(server).post("/collective_rpc", body)["results"]


def live(server: VllmServer) -> dict[str, str]:
    """Fingerprint of what versions change, not of buffers that vLLM makes, by names without adapters."""
    (fingerprint,) = server.fingerprint()
    bare = {name.replace(".base_layer.", "."): digest for name, digest in fingerprint.items()}
    return {name: digest for name, digest in bare.items() if name.endswith(".weight")}


class ServerProcess:
    """Starts, kills and restarts one server under one URL."""

    command = "vllm.entrypoints.cli.main"
    """What the `vllm` command runs, also where it was not installed as a script."""

    def __init__(
        self, log: Path, *arguments: str, eager: bool = True, environment: Mapping[str, str] | None = None
    ) -> None:
        """Choose a port.

        Args:
            eager: False to let vLLM compile the model and capture graphs.
            environment: in addition to that of every server.
        """
        self._environment = ENVIRONMENT | dict(environment or {})
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.arguments = (*(["--enforce-eager"] if eager else []), *arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self.exit_code: int | None = None
        """Of a server that ended before it was healthy."""

    def start(self, model: Path | str) -> None:
        """Serve a checkpoint folder, or a store; returns when the server is healthy."""
        command = [*("timeout", "--kill-after=10", str(_LIFE_S)), sys.executable, *self.program(model)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=os.environ | self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.log.parent,
            )
        RUNNING.append(self)
        deadline = time.monotonic() + _START_S
        with httpx.Client(timeout=5) as client:
            while time.monotonic() < deadline and self._process.poll() is None:
                try:
                    if client.get(f"{self.url}/health").is_success:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.25)
        self.exit_code = self._process.poll()
        self.stop()
        raise RuntimeError(f"the server did not start:\n{self.log_tail()}")

    @contextmanager
    def serving(self, model: Path | str) -> Iterator["ServerProcess"]:
        """Serve a checkpoint folder inside of the block."""
        self.start(model)
        try:
            yield self
        finally:
            self.stop()

    def program(self, model: Path | str) -> list[str]:
        """What Python runs, with its arguments."""
        return [
            *("-m", self.command, "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL_NAME),
            *("--max-model-len", "256", "--block-size", "32"),
            *("--kv-cache-memory-bytes", "67108864", "--gpu-memory-utilization", "0.1"),
            *("--enable-prompt-tokens-details", "--seed", "0"),
            *("--worker-extension-cls", "failing_extension.FailingExtension"),
            *("--weight-transfer-config", '{"backend": "delta"}'),
            *self.arguments,
        ]

    def stop(self) -> None:
        """Kill the server and all processes it started. It has nothing to save."""
        if self._process is not None:
            with suppress(ProcessLookupError):  # It has ended, with all of them.
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            RUNNING.remove(self)

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-80:])


class ForkingServer(ServerProcess):
    """Takes less of this machine's CPU: see `forking_server`."""

    command = "forking_server" if not torch.cuda.is_available() else ServerProcess.command


RUNNING: list[ServerProcess] = []
"""The report of a test that failed shows their logs."""
