"""A vLLM engine of one rank in this process, and vLLM's own loader of checkpoint patches."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.support.shapes import Shape


def start_worker(shape: Shape, folder: Path, arguments: Mapping[str, Any]) -> Any:
    """Start an engine with dummy weights in this process, and return its worker."""
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        # No token is generated, so nothing need be compiled.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }.items():
        os.environ.setdefault(name, value)
    # A worker in this process can be called without pickling.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    llm = LLM(
        model=str(shape.save_config(folder)),
        **{
            "load_format": "dummy",
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 128,
            "kv_cache_memory_bytes": 1 << 28,
            "gpu_memory_utilization": 0.1,
            "disable_log_stats": True,
            "worker_extension_cls": "vllm_plugin.DeltaWorkerExtension",
            "weight_transfer_config": {"backend": "delta"},
            **arguments,
        },
    )
    (worker,) = llm.collective_rpc(_itself)
    # The engine must outlive this call.
    worker.benchmarked_by = llm
    return worker


def _itself(worker: Any) -> Any:
    """Return the worker; some versions of vLLM pass its wrapper."""
    return getattr(worker, "worker", worker)


def upstream_loader(path: Path | None) -> ModuleType | None:
    """Import vLLM's loader of checkpoint patches: of a file, or the installed one; None without either."""
    name = "vllm.model_executor.model_loader.checkpoint_weight_patch"
    if path is None:
        if importlib.util.find_spec("vllm") is None:
            raise SystemExit("this benchmark runs vLLM, and it is not installed here")
        folder = Path(importlib.util.find_spec("vllm").origin or "").parent  # type: ignore[union-attr]
        path = folder / "model_executor" / "model_loader" / "checkpoint_weight_patch.py"
        if not path.is_file():
            return None
    spec = importlib.util.spec_from_file_location(name.rsplit(".", 1)[1], path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
