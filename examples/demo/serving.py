"""The server's side: a bucket, a real vLLM server, and the process that keeps it at the bucket's head."""

import json
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from examples.demo.processes import Program, free_port
from patchstore.format import hashing
from patchstore.serve.vllm_protocol import ServerStatus
from patchstore.serve.vllm_server import VllmServer
from patchstore.tensors.bits import raw_bytes

MODEL = "demo"
_START_S = 600.0
_FOLLOW_S = 60.0


class S3Server(Program):
    """An S3 server with one bucket, in memory: what is stored ends with it."""

    def __init__(self, log: Path) -> None:
        port = free_port()
        super().__init__([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], log=log)
        self.url = "s3://demo/run"
        self.options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "demo", "secret": "demo"}

    def create_bucket(self) -> None:
        """Wait until the server answers, and create the bucket."""
        _wait_for(self, f"{self.options['endpoint_url']}/moto-api/")
        httpx.put(f"{self.options['endpoint_url']}/demo").raise_for_status()


class HubServer(Program):
    """A Hugging Face Hub with one bucket, on this machine: what is stored ends with it."""

    def __init__(self, log: Path) -> None:
        super().__init__(
            [sys.executable, "-m", "patchstore.testing.hub", "--bucket", "demo/bucket"],
            log=log,
            piped=True,
            owned=True,
        )
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().strip()
        if not self.endpoint:
            self.process.wait()
            self.check_alive()
        self.url = "hf://buckets/demo/bucket/run"
        self.options = {
            "endpoint": self.endpoint,
            "token": "hf_test",
            # The Hub's S3 gateway, which alone can create an object only once.
            "gateway_url": f"{self.endpoint}/s3/demo",
            "gateway_key": "HFAKTEST",
            "gateway_secret": "gateway-secret",
        }


class Vllm(Program):
    """`vllm serve` on the CPU, with the delta backend."""

    def __init__(self, checkpoint: Path, log: Path, hub: str | None = None) -> None:
        """Start it; of all Hugging Face Hubs it may ask only the one at this endpoint, or none."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            *(str(Path(sys.executable).with_name("vllm")), "serve", str(checkpoint)),
            *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
            *("--worker-extension-cls", "vllm_plugin.DeltaWorkerExtension"),
            *("--weight-transfer-config", '{"backend": "delta"}'),
            *("--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", str(256 << 20)),
            *("--gpu-memory-utilization", "0.1"),
        ]
        environment = {
            # Serves the routes that update weights.
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            **({"HF_ENDPOINT": hub} if hub else {"HF_HUB_OFFLINE": "1"}),
        }
        super().__init__(command, log=log, environment=environment)
        self._api = VllmServer(self.url)

    def wait_until_healthy(self) -> None:
        _wait_for(self, f"{self.url}/health")

    def status(self) -> ServerStatus:
        """Ask the server which version it holds, and its state digest."""
        return self._api.status()

    def holds(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Whether the live parameters have the bits of these checkpoint weights, by their digests.

        vLLM keeps q, k and v in one parameter, and gate and up in another.
        """
        live = dict(weights)
        for parts, fused in (
            (("q_proj", "k_proj", "v_proj"), "qkv_proj"),
            (("gate_proj", "up_proj"), "gate_up_proj"),
        ):
            for name in [name for name in weights if f".{parts[0]}." in name]:
                pieces = [live.pop(name.replace(parts[0], part)) for part in parts]
                live[name.replace(parts[0], fused)] = torch.cat(pieces)
        expected = {name: hashing.digest(raw_bytes(tensor)) for name, tensor in live.items()}
        (found,) = self._api.fingerprint()
        return expected.items() <= found.items()

    def label(self) -> str | None:
        """Return the weight version that the server puts on its answers."""
        return self._api.weight_version()

    def complete(self, prompts: Sequence[str], num_tokens: int) -> list[str]:
        """Return the greedy continuation of each prompt."""
        request = {"model": MODEL, "prompt": list(prompts), "max_tokens": num_tokens, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=request, timeout=120).raise_for_status()
        return [
            choice["text"] for choice in sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        ]


class FollowCommand(Program):
    """`patchstore follow STORE --server URL --json`."""

    def __init__(self, store: str, options: Mapping[str, str], server: str, log: Path) -> None:
        command = [sys.executable, "-m", "patchstore", "follow", store, "--server", server, "--json"]
        for key, value in options.items():
            command += ["--option", f"{key}={value}"]
        super().__init__(command, log=log, piped=True)
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))

    def wait_for(self, version: int) -> dict[str, Any]:
        """Return the event that brought the server to a version.

        Raises:
            TimeoutError: it did not come within a minute.
            RuntimeError: the command ended.
        """
        deadline = time.monotonic() + _FOLLOW_S
        event: dict[str, Any] = {}
        while time.monotonic() < deadline:
            try:
                event = self._events.get(timeout=1)
            except queue.Empty:
                self.check_alive()
                continue
            if event.get("version") == version and event["event"] in {"initialised", "applied"}:
                return event
        raise TimeoutError(
            f"the server is not at version {version} after {_FOLLOW_S:.0f} s; the last event is {event}"
        )


def _wait_for(program: Program, url: str) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        program.check_alive()
        try:
            if httpx.get(url, timeout=5).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.25)
    raise TimeoutError(f"{url} does not answer after {_START_S:.0f} s; see {program.log}")
