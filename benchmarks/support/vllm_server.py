"""`vllm serve` of a shape, and a client that keeps the times of its calls."""

import argparse
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from benchmarks.support.paths import ROOT
from benchmarks.support.shapes import Shape
from examples.processes import Program, free_port
from patchstore.errors import PatchstoreError
from patchstore.follow.settings import PauseMode, PrefixCache
from patchstore.follow.vllm_server import VllmServer

_MODEL = "served"
_FILE_BYTES = 4 << 30
"""Of a checkpoint's file, about: as it is written, its bytes are in memory once more."""
_START_S = 420.0
_LIFE_S = 1800
"""Seconds after which the server ends by itself, in case this process was killed."""
_BLOCK = 128
"""Tokens of the largest block in which vLLM allocates KV memory."""

VLLM_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""The environment of every `vllm serve` of a benchmark."""

_SERVER_FAILURES = (RuntimeError, PatchstoreError, httpx.HTTPError)
"""Errors that the server's log may explain: it did not start, refused a call, or holds another version."""


class TimedServer(VllmServer):
    """Keeps when each step of the last `apply` began and ended."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.spans: dict[str, tuple[float, float]] = {}
        self.started = 0.0
        """When its process was started, on the monotonic clock."""

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.spans[name] = began, time.monotonic()

    def use(self, pause_mode: PauseMode, prefix_cache: PrefixCache) -> None:
        """Choose what the next `apply` does to requests, and to keys and values of older weights."""
        self._pause_mode, self._prefix_cache = pause_mode, prefix_cache
        # Its status asks whether the server can do that.
        self._has_backend = False

    def prefetch(self, version: int) -> None:
        with self._timed("prefetch"):
            super().prefetch(version)

    def pause(self) -> None:
        with self._timed("pause"):
            super().pause()

    def finish_weight_update(self, weight_version: str) -> None:
        with self._timed("finish"):
            super().finish_weight_update(weight_version)
        if self._pause_mode is PauseMode.NONE:
            # No call pauses and none resumes: the engine stands still in this one.
            began, ended = self.spans["finish"]
            self.spans |= {"pause": (began, began), "resume": (ended, ended)}

    def resume(self) -> None:
        with self._timed("resume"):
            super().resume()


@contextmanager
def serve(
    shape: Shape,
    args: argparse.Namespace,
    folder: Path,
    concurrency: int,
    weights: Mapping[str, torch.Tensor] | Path | None = None,
    form: str | None = None,
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Iterator[TimedServer]:
    """Run `vllm serve`, and end it.

    Args:
        concurrency: the most requests at a time, beside the driver's.
        weights: that the server is started from, or a folder of their files (`save_weights`); None for dummy
            weights.
        form: of FP8 in which the weights are; None for bf16.
        environment: in addition to `VLLM_ENVIRONMENT`.
        port: of 127.0.0.1; None for a free one.

    If the server fails, the end of its log is printed. Every error goes on to the caller.
    """
    model = _save_model(shape, folder / "model", form)
    if isinstance(weights, Path):
        for path in weights.iterdir():
            (model / path.name).symlink_to(path.resolve())
    elif weights is not None:
        save_weights(weights.items(), model)
    max_model_len = args.prompt_tokens + args.max_tokens
    port = free_port() if port is None else port
    memory = ["--kv-cache-memory-bytes", str(_kv_bytes(shape, concurrency + 2, max_model_len))]
    memory += ["--gpu-memory-utilization", "0.1"]
    if "--gpu-memory-utilization" in args.engine_args:
        memory = []
    command = [
        *("timeout", "--kill-after=10", str(_LIFE_S)),
        # The module that the `vllm` command runs; some installations lack the command.
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", _MODEL),
        *("--load-format", "dummy" if weights is None else "safetensors"),
        *("--dtype", "bfloat16", "--max-model-len", str(max_model_len)),
        # One more, for the driver's request.
        *("--max-num-seqs", str(concurrency + 1)),
        *memory,
        *("--worker-extension-cls", "vllm_plugin.DeltaWorkerExtension"),
        *("--weight-transfer-config", '{"backend": "delta"}'),
        *(["--enforce-eager"] if args.eager else []),
        *args.engine_args,
    ]
    environment = {
        **VLLM_ENVIRONMENT,
        **(environment or {}),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    log_file, started = args.log or folder / "vllm.log", time.monotonic()
    with Program(command, log=log_file, environment=environment) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(process, url)
            with TimedServer(url) as server:
                server.started = started
                yield server
        except _SERVER_FAILURES:
            lines = log_file.read_text(errors="replace").splitlines()[-60:]
            print("the server's log ends with:", *lines, sep="\n", file=sys.stderr)
            raise


def save_weights(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write a checkpoint to a folder, which is made if need be, with the memory of one of its files."""
    folder.mkdir(parents=True, exist_ok=True)
    part, num_bytes, num_files = dict[str, torch.Tensor](), 0, 0
    for name, tensor in tensors:
        part[name] = tensor.cpu()
        num_bytes += tensor.nbytes
        if num_bytes >= _FILE_BYTES:
            save_file(part, folder / f"model-{num_files:05}.safetensors")
            part, num_bytes, num_files = {}, 0, num_files + 1
    if part:
        save_file(part, folder / f"model-{num_files:05}.safetensors")


def _save_model(shape: Shape, folder: Path, form: str | None) -> Path:
    """Write a config, and a tokenizer with as many words as the vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(shape.vocabulary)}, unk_token="w0"))
    shape.save_config(folder, form)
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w0").save_pretrained(folder)
    return folder


def _kv_bytes(shape: Shape, num_requests: int, num_tokens: int) -> int:
    """Return the KV memory with which no request is preempted, at two bytes per number."""
    blocks = num_requests * -(-num_tokens // _BLOCK)
    return max(blocks * _BLOCK * 2 * shape.layers * shape.kv_heads * shape.head_dim * 2, 64 << 20)


def _wait_until_healthy(process: Program, url: str) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.process.poll() is not None:
            raise RuntimeError(f"vllm serve ended with status {process.process.returncode}")
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)
    raise RuntimeError(f"{url} does not answer after {_START_S:.0f} s")


def question(shape: Shape, args: argparse.Namespace, client: int) -> dict[str, Any]:
    """Return a completion request. Prompts differ between clients, so that they share no prefix."""
    random_ = random.Random(client)
    return {
        "model": _MODEL,
        "prompt": [random_.randrange(1, shape.vocabulary) for _ in range(args.prompt_tokens)],
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
