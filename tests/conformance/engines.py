"""Real vLLM engines, each in a forked process of its own that ends with it.

A fork of this process has vLLM imported already, so an engine with a tiny model starts in seconds, and what
one leaves behind in memory cannot reach the next. Import this module before anything that starts threads.
"""

import os

os.environ |= {
    # What vLLM quantizes while it loads is tested too.
    "PATCHSTORE_REQUANTIZE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # Some functions of the sampler are compiled even if all else is eager.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The engine's core runs in the process that made it, so that its errors arrive there.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

import importlib
import multiprocessing
import re
import signal
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.model_executor.models import registry
from vllm.v1.executor import multiproc_executor

import patchstore.errors

# What starting an engine imports: 6 s each time, were it not here already.
for _each in (
    "model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "renderers.hf",
    "v1.engine.llm_engine",
    "v1.worker.cpu_model_runner",
    "v1.worker.cpu_worker",
):
    importlib.import_module(f"vllm.{_each}")

# Workers are forks too. On the CPU vLLM insists on spawning, which imports everything again: 40 s on 2 cores.
multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")

# What a model can do vLLM asks a process of its own once per architecture, so that CUDA is not initialised.
registry._run_in_subprocess = lambda ask: ask()

_PROMPTS = [[5, 6, 7, 200, 9, last] for last in (1, 2, 249)]


class EngineFailed(Exception):
    """An engine did not start, or a call of it failed."""

    refused: bool
    """Whether patchstore said so on purpose."""

    def __init__(self, reason: str, *, refused: bool) -> None:
        super().__init__(reason)
        self.refused = refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How to start one engine."""

    model: Path
    arguments: Mapping[str, Any]
    """Of the layout and the architecture."""
    log: Path
    time_limit_s: float = 300

    def run(self, work: Callable[[LLM], Any]) -> Any:
        """Start the engine, let it do some work in its process, and return what that returned.

        Raises:
            EngineFailed: with the reason; the log has the rest.
        """
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=self._serve, args=(work, there))
        process.start()
        there.close()
        try:
            if not here.poll(self.time_limit_s):
                raise EngineFailed(f"no result within {self.time_limit_s:.0f} s", refused=False)
            succeeded, result = here.recv()
        except EOFError:
            succeeded, result = False, "its process died"
        finally:
            # The workers too: all are in the process' own group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        if succeeded:
            return result
        raise _explain(result, self.log.read_text(errors="replace"))

    def _serve(self, work: Callable[[LLM], Any], result: Connection) -> None:
        os.setsid()
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            llm = LLM(
                model=str(self.model),
                enforce_eager=True,
                enable_prefix_caching=False,
                max_model_len=128,
                max_num_seqs=4,
                max_num_batched_tokens=128,
                kv_cache_memory_bytes=1 << 24,
                gpu_memory_utilization=0.1,
                disable_log_stats=True,
                worker_extension_cls="conformance_extension.ConformanceExtension",
                weight_transfer_config={"backend": "delta"},
                **{"skip_tokenizer_init": True} | self.arguments,
            )
            result.send((True, work(llm)))
        except BaseException as exc:  # noqa: BLE001  # It is told to the parent.
            traceback.print_exc()
            result.send((False, f"{type(exc).__name__}: {exc}"))


def open_run(llm: LLM, store: Path) -> None:
    """Have an engine follow the run in a store."""
    llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"store": str(store)}})


def update(llm: LLM, version: int) -> None:
    """Bring an engine to a version."""
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", kwargs={"update_info": {"version": version}})
    llm.collective_rpc("finish_weight_update")


def refusal(call: Callable[..., None], *args: object) -> str | None:
    """Make a call, and return what it raised."""
    try:
        call(*args)
    except Exception as exc:  # noqa: BLE001  # Told to the test.
        return str(exc)
    return None


def answers(llm: LLM) -> list[tuple[list[int], float]]:
    """Generate a few tokens for each of some prompts; also returns how likely the last token was."""
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False, logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": each} for each in _PROMPTS], sampling, use_tqdm=False)
    return [(list(each.outputs[0].token_ids), float(each.outputs[0].cumulative_logprob)) for each in outputs]


_KINDS = {
    each.__name__: each.kind
    for each in vars(patchstore.errors).values()
    if isinstance(each, type) and issubclass(each, patchstore.errors.PatchstoreError)
}
_REFUSED = [
    re.compile(rf"\b({'|'.join(_KINDS)}): (.+)"),
    re.compile(rf"RuntimeError: .*?\[({'|'.join(_KINDS.values())})\] (.+)"),
]
_INVALID = re.compile(r"^  Value error, (.+?)(?: \[type=.*)?$", re.MULTILINE)
_FAILED = re.compile(r"\b(\w*(?:Error|Exception): (?!Tokenizer not available|cancelled|Engine core init).+)")


def _explain(result: str, log: str) -> EngineFailed:
    """Find the reason: with several ranks, vLLM leaves it in the log."""
    for pattern in _REFUSED:
        if found := pattern.search(result) or pattern.search(log):
            return EngineFailed(found[2].strip(), refused=True)
    if "Segfault encountered" in log:
        return EngineFailed("a worker crashed (segmentation fault)", refused=False)
    if found := _INVALID.search(log) or _FAILED.search(log):
        return EngineFailed(found[1].strip(), refused=False)
    return EngineFailed(result.strip().partition("\n")[0], refused=False)
