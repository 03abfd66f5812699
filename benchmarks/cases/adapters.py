"""From a step of an adapter to an answer of it: versions of a run, beside a folder that is loaded by hand.

Both ways serve the same tensors on one server, in turns. By hand is what a team does today: the trainer saves
the adapter as `PeftModel.save_pretrained` does, and vLLM loads the folder under a new name, as the same name
would leave keys and values of older weights in its prefix cache. Half of the updates are of an idle server,
the others of one with streamed answers of the adapter.
"""

import argparse
import dataclasses
import json
import shlex
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from benchmarks.serving.latency import Span, gaps, longest
from benchmarks.serving.load import Load
from benchmarks.support.shapes import SHAPES, Shape
from benchmarks.support.software import software
from benchmarks.support.vllm_server import question, serve
from benchmarks.support.work_folder import work_folder
from patchstore import Publisher, open_store
from patchstore.follow.adapter_server import AdapterServer

WAYS = ("patchstore", "by-hand")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NAME = "policy"
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_QUIET_S = 1.0
_PREFIX = "base_model.model."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b", help="of the base model")
    parser.add_argument("--layers", type=int, help="of the base model; all, if not given")
    parser.add_argument("--rank", type=int, default=32, help="of the adapter, in all linear layers")
    parser.add_argument(
        "--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="of the adapter, in turn"
    )
    parser.add_argument("--repeats", type=int, default=5, help="updates in each way, idle and with streams")
    parser.add_argument("--concurrency", type=int, default=16, help="streamed answers at a time")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each request of the load")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of each answer of the load")
    parser.add_argument("--eager", action="store_true", help="neither compile the model nor capture graphs")
    parser.add_argument("--engine-args", type=shlex.split, default=[], metavar="ARGS")
    parser.add_argument("--folder", type=Path, help="to work in, such as /dev/shm/bench; is removed")
    parser.add_argument("--log", type=Path, help="file that takes what the server prints")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each dtype, load and way. What is served at the end is verified bit for bit."""
    shape = SHAPES[args.shape]
    if shape.experts:
        raise SystemExit("adapters of experts are not measured: take a dense shape")
    if args.layers is not None:
        shape = dataclasses.replace(shape, name=f"{shape.name}-{args.layers}-layers", layers=args.layers)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.engine_args = [
        *("--enable-lora", "--max-lora-rank", str(args.rank), "--max-loras", "4", "--max-cpu-loras", "8"),
        *args.engine_args,
    ]
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with (
        work_folder(args.folder, "adapters") as folder,
        serve(shape, args, folder / "server", args.concurrency, environment=environment) as server,
    ):
        for dtype in args.dtypes:
            with _Bench(shape, args, folder / dtype, server.url, DTYPES[dtype], device) as bench:
                about = {
                    "shape": shape.name,
                    "rank": args.rank,
                    "dtype": dtype,
                    "num_elements": sum(tensor.numel() for tensor in bench.tensors.values()),
                    **software(device),
                    "is_eager": args.eager,
                }
                for row in bench.rows():
                    yield {**about, **row}
                bench.verify()


class _Bench:
    """An adapter that is trained, its run, and its folders; on one server."""

    def __init__(
        self,
        shape: Shape,
        args: argparse.Namespace,
        folder: Path,
        url: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tensors = {
            name: torch.randn(size, dtype=torch.float32, device=device).mul_(0.01).to(dtype)
            for name, size in _adapter(shape, args.rank).items()
        }
        self._repeats, self._folder, self._url = args.repeats, folder, url
        self._asked = question(shape, args, 0) | {"max_tokens": 1}
        self._loads = [question(shape, args, 1 + client) for client in range(args.concurrency)]
        config = folder / "config"
        config.mkdir(parents=True)
        self._config = json.dumps(
            {"peft_type": "LORA", "r": args.rank, "lora_alpha": args.rank, "bias": "none"}
            | {"target_modules": list(_LINEAR), "base_model_name_or_path": "served"}
        )
        (config / "adapter_config.json").write_text(self._config)
        self._stack = ExitStack()
        self._store = self._stack.enter_context(closing(open_store(folder / "bucket")))
        self._publisher = self._stack.enter_context(
            Publisher(self._store, self.tensors, adapter="default", files=config)
        )
        self._server = self._stack.enter_context(
            AdapterServer(url, f"{_NAME}-{dtype}".replace("torch.", ""), self._store)
        )
        self._http = self._stack.enter_context(httpx.Client(base_url=url, timeout=300))
        self._num_steps = 0
        self._by_hand: str | None = None

    def __enter__(self) -> "_Bench":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Update in each way, without and with a load; yield medians."""
        for way in WAYS:
            # The first of each way allocates and compiles.
            self._update(way)
        idle: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(self._repeats):
            for way, found in idle.items():
                found.append(self._update(way)[0])
        for way, found in idle.items():
            yield {"way": way, "concurrency": 0, **_medians(found)}
        loaded: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        spans: dict[str, list[Span]] = {way: [] for way in (*WAYS, "quiet")}
        with Load(self._url, [{**each, "model": self._server.adapter} for each in self._loads]) as load:
            load.wait_until_steady()
            for _ in range(self._repeats):
                for way, found in loaded.items():
                    began = time.monotonic()
                    time.sleep(_QUIET_S)
                    spans["quiet"].append(Span(window="quiet", began=began, ended=time.monotonic()))
                    parts, span = self._update(way)
                    found.append(parts)
                    spans[way].append(span)
                    load.check()
            seen = gaps(load.stop())
        quiet = [longest(seen, span) or 0.0 for span in spans["quiet"]]
        for way, found in loaded.items():
            longests = [longest(seen, span) or 0.0 for span in spans[way]]
            yield {
                "way": way,
                "concurrency": len(self._loads),
                **_medians(found),
                "longest_gap_s": statistics.median(longests),
                "longest_gap_max_s": max(longests),
                "quiet_longest_gap_s": statistics.median(quiet),
                "quiet_longest_gap_max_s": max(quiet),
            }

    def verify(self) -> None:
        """Compare what each rank computes with, bit for bit, with the newest version."""
        self._server.verify(self._store)

    def _update(self, way: str) -> tuple[dict[str, float], Span]:
        """Take a step, serve it, and return the seconds of each part, and when it was."""
        for tensor in self.tensors.values():
            tensor.add_(torch.randn_like(tensor), alpha=1e-4)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._num_steps += 1
        update = self._publish if way == "patchstore" else self._save
        began = time.monotonic()
        parts = update()
        answered = time.monotonic()
        return {"total_s": answered - began, **parts}, Span(window="staging", began=began, ended=answered)

    def _publish(self) -> dict[str, float]:
        began = time.monotonic()
        publication = self._publisher.publish_patch(self._num_steps)
        blocked = time.monotonic()
        version = publication.result().version
        stored = time.monotonic()
        timings = self._server.apply(version)
        assert timings is not None
        served = time.monotonic()
        self._answer(f"{self._server.adapter}@{version}")
        return {
            "blocks_s": blocked - began,
            "store_s": stored - blocked,
            "load_s": timings.stage_s,
            "switch_s": served - stored - timings.stage_s,
            "answer_s": time.monotonic() - served,
        }

    def _save(self) -> dict[str, float]:
        began = time.monotonic()
        name = f"hand-{self._folder.name}-{self._num_steps}"
        folder = self._folder / name
        folder.mkdir()
        save_file(self.tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(self._config)
        saved = time.monotonic()
        self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        loaded = time.monotonic()
        self._answer(name)
        answered = time.monotonic()
        if self._by_hand is not None:
            self._post("/v1/unload_lora_adapter", {"lora_name": self._by_hand})
            shutil.rmtree(self._folder / self._by_hand)
        self._by_hand = name
        return {"store_s": saved - began, "load_s": loaded - saved, "answer_s": answered - loaded}

    def _answer(self, model: str) -> None:
        self._post("/v1/completions", {**self._asked, "model": model})

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        self._http.post(path, json=body).raise_for_status()


def _adapter(shape: Shape, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter of all linear layers, by PEFT's names."""
    found: dict[str, tuple[int, ...]] = {}
    for name, size in shape.tensors().items():
        module = name.removesuffix(".weight")
        if module.endswith(_LINEAR) and module != name:
            outputs, inputs = size
            found[f"{_PREFIX}{module}.lora_A.weight"] = (rank, inputs)
            found[f"{_PREFIX}{module}.lora_B.weight"] = (outputs, rank)
    return found


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {
        **{name: statistics.median(parts[name] for parts in found) for name in found[0]},
        "total_max_s": max(parts["total_s"] for parts in found),
    }
