"""A real vLLM server on the CPU, on a port of its own, which ends with its test module or by itself."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL_NAME = "tiny"

_START_S = 900.0
_LIFE_S = 1800
"""A server that was not ended, because the tests were killed, ends itself."""
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # On a GPU the first start would compile this sampler, for minutes; the tests' answers are greedy.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]),
}


class ServerProcess:
    """Starts, kills and restarts one server under one URL."""

    def __init__(
        self, log: Path, *arguments: str, eager: bool = True, environment: Mapping[str, str] | None = None
    ) -> None:
        """Choose a port.

        Args:
            eager: False to let vLLM compile the model and capture graphs.
            environment: in addition to that of every server.
        """
        self._environment = _ENVIRONMENT | dict(environment or {})
        self.log = log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.arguments = (*(["--enforce-eager"] if eager else []), *arguments)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, model: Path) -> None:
        """Serve a checkpoint folder; returns when the server is healthy."""
        command = [
            *("timeout", "--kill-after=10", str(_LIFE_S)),
            # What the `vllm` command runs, also where it was not installed as a script.
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(self._port), "--served-model-name", MODEL_NAME),
            *("--max-model-len", "256", "--block-size", "32"),
            *("--kv-cache-memory-bytes", "67108864", "--gpu-memory-utilization", "0.1"),
            *("--enable-prompt-tokens-details", "--seed", "0"),
            *("--worker-extension-cls", "failing_extension.FailingExtension"),
            *("--weight-transfer-config", '{"backend": "delta"}'),
            *self.arguments,
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=os.environ | self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.log.parent,
            )
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        self.stop()
        raise RuntimeError(f"the server did not start:\n{self.log_tail()}")

    def stop(self) -> None:
        """Kill the server and all processes it started. It has nothing to save."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-80:])


RUNNING: list[ServerProcess] = []
"""Servers of fixtures; the report of a test that failed shows their logs."""
