"""The servers' side: real vLLM servers, and the process that keeps them at the bucket's head."""

import json
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import httpx
import torch
from safetensors.torch import load_file

from examples.processes import Program, free_port, wait_for
from patchstore.bucket import digests
from patchstore.follow.adapter_server import AdapterServer
from patchstore.follow.vllm_protocol import ServerStatus
from patchstore.follow.vllm_server import VllmServer
from patchstore.tensors.bits import raw_bytes

MODEL = "demo"
_FOLLOW_S = 60.0


class Vllm(Program):
    """`vllm serve` with the delta backend."""

    def __init__(
        self,
        checkpoint: Path,
        log: Path,
        *,
        hub: str | None = None,
        port: int | None = None,
        device: Literal["cpu", "cuda"] = "cpu",
        num_threads: int | None = None,
        adapter: str | None = None,
    ) -> None:
        """Start it.

        Args:
            hub: endpoint of the only Hugging Face Hub that it may ask; without it, it asks none.
            port: of 127.0.0.1, for a server that takes another's place; by default a free one.
            device: where its model runs. On a GPU it takes a tenth of the memory, so that others fit.
            num_threads: that compute on the CPU; by default one a core.
            adapter: the name under which it serves versions of an adapter, beside its own weights.
        """
        port = port or free_port()
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        command = [
            # The module that the `vllm` command runs; some installations lack the command.
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint)),
            *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
            *("--worker-extension-cls", "vllm_plugin.DeltaWorkerExtension"),
            *("--weight-transfer-config", '{"backend": "delta"}'),
            *("--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", str(256 << 20)),
            *("--gpu-memory-utilization", "0.1"),
            *(("--enable-lora", "--max-loras", "4", "--max-lora-rank", "16") if adapter else ()),
        ]
        environment = {
            # Serves the routes that update weights.
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if device == "cpu" else {}),
            **({"OMP_NUM_THREADS": str(num_threads)} if num_threads else {}),
            **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if adapter else {}),
            **({"HF_ENDPOINT": hub} if hub else {"HF_HUB_OFFLINE": "1"}),
        }
        super().__init__(command, log=log, environment=environment)
        self._api = VllmServer(self.url)
        self._adapter = None if adapter is None else AdapterServer(self.url, adapter)

    def wait_until_healthy(self) -> None:
        wait_for(self, f"{self.url}/health")

    def status(self) -> ServerStatus:
        """Ask the server which version it holds; without an adapter, with its state digest."""
        return (self._adapter or self._api).status()

    def holds_adapter(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Whether what requests for the adapter get has the bits of these tensors, by PEFT's names."""
        assert self._adapter is not None
        cards = httpx.get(f"{self.url}/v1/models", timeout=60).raise_for_status().json()["data"]
        (folder,) = (card["root"] for card in cards if card["id"] == self._adapter.adapter)
        found = load_file(Path(folder) / "adapter_model.safetensors")
        return found.keys() == weights.keys() and all(
            torch.equal(found[name].view(torch.uint8), each.view(torch.uint8))
            for name, each in weights.items()
        )

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
        expected = {name: digests.digest(raw_bytes(tensor)) for name, tensor in live.items()}
        (found,) = self._api.fingerprint()
        return expected.items() <= found.items()

    def label(self) -> str | None:
        """Return the weight version that the server puts on its answers."""
        return self._api.weight_version()

    def complete(self, prompts: Sequence[str], num_tokens: int) -> list[str]:
        """Return the greedy continuation of each prompt."""
        choices = self._ask(prompt=list(prompts), max_tokens=num_tokens)
        return [choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])]

    def loss(self, tokens: Sequence[int]) -> float:
        """Return the mean negative log-likelihood of each token of a text after those before it."""
        (choice,) = self._ask(prompt=list(tokens), max_tokens=1, echo=True, logprobs=0)
        log_probs: list[float] = choice["logprobs"]["token_logprobs"]
        return -mean(log_probs[1 : len(tokens)])

    def _ask(self, **request: Any) -> list[dict[str, Any]]:
        request = {"model": MODEL, "temperature": 0, **request}
        answer = httpx.post(f"{self.url}/v1/completions", json=request, timeout=120).raise_for_status()
        choices: list[dict[str, Any]] = answer.json()["choices"]
        return choices


class FollowCommand(Program):
    """`patchstore follow STORE --server URL... --json`, perhaps with `--adapter NAME`."""

    def __init__(
        self,
        store: str,
        options: Mapping[str, str],
        servers: str | Sequence[str],
        log: Path,
        adapter: str | None = None,
    ) -> None:
        command = [sys.executable, "-m", "patchstore", "follow", store, "--json"]
        command += ["--adapter", adapter] if adapter else []
        for server in [servers] if isinstance(servers, str) else servers:
            command += ["--server", server]
        for key, value in options.items():
            command += ["--option", f"{key}={value}"]
        super().__init__(command, log=log, piped=True)
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def stop(self) -> None:
        """End the command, and read the last of what it printed."""
        super().stop()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))

    def wait_for(self, version: int) -> dict[str, Any]:
        """Return the next event that brought a server to a version.

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
            f"no server came to version {version} in {_FOLLOW_S:.0f} s; the last event is {event}"
        )
