"""Bring a served model from one version to the next in several ways, side by side, to the same bits.

Every way starts from the same weights in a real vLLM engine of one rank, in this process, and is undone
before the next one begins. In the first round the live weights are compared bit for bit after each; a
difference ends the benchmark. That round is not timed.

What an update takes and what generation waits for are two figures: patchstore stages a version while
generation goes on, and only its commit is in the pause; the other ways write from the first moment.
"""

import argparse
import gc
import importlib
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch

from benchmarks.shapes import SHAPES, Shape
from patchstore import Publisher, open_store
from patchstore.format.records import Manifest, Schema
from patchstore.tensors.bits import TensorPatch, bits, index_dtype, spec_of

if TYPE_CHECKING:
    from vllm_plugin.change import Change
    from vllm_plugin.update import Updater
    from vllm_plugin.weights import LiveWeights

Way = Literal["patchstore", "patchstore-decoded", "vllm-patch", "vllm-patch-unchecked", "dense"]

WAYS: Mapping[Way, str] = {
    "patchstore": "from the store: fetch, decode, translate and prove; then commit",
    "patchstore-decoded": "the same from decoded patches in memory: translate, then scatter",
    "vllm-patch": "vLLM's checkpoint_weight_patch, from the same decoded patches",
    "vllm-patch-unchecked": "the same without its check that positions are unique",
    "dense": "the model's own load_weights, from all tensors in memory",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b", help="of the model")
    parser.add_argument(
        "--densities",
        type=float,
        nargs="+",
        default=[0.001, 0.01, 0.05],
        help="share of every tensor's elements that a version changes",
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds for each density")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), help="all that this vLLM has, if not given")
    parser.add_argument(
        "--upstream", type=Path, help="checkpoint_weight_patch.py of a newer vLLM, where this one has none"
    )
    parser.add_argument(
        "--no-store",
        action="store_true",
        help="publish nothing: build versions on the model's device, and leave out the way `patchstore`",
    )
    parser.add_argument(
        "--engine", type=json.loads, default={}, metavar="JSON", help="further arguments of vLLM's engine"
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row about the model, and one for each density and way."""
    upstream = _upstream(args.upstream)
    ways = _ways(args.ways, has_upstream=upstream is not None, has_store=not args.no_store)
    shape = SHAPES[args.shape]
    with tempfile.TemporaryDirectory(prefix="patchstore-apply-") as temporary:
        folder = Path(temporary)
        with closing(Server(_start(shape, folder / "model", args.engine), upstream)) as server:
            device = server.device if args.no_store else torch.device("cpu")
            with Trainer(shape, device, None if args.no_store else folder / "store") as trainer:
                about = {"shape": shape.name, "tensors_on": device.type, **_software(server.device)}
                yield about | server.open(trainer, folder / "spool")
                for density in args.densities:
                    for row in _rounds(server, trainer, ways, density, args.repeats):
                        yield about | row


def _ways(asked: Sequence[Way] | None, *, has_upstream: bool, has_store: bool) -> list[Way]:
    missing = set[str]() if has_store else {"patchstore"}
    if not has_upstream:
        missing |= {"vllm-patch", "vllm-patch-unchecked"}
    if wrong := missing & set(asked or ()):
        raise SystemExit(f"not possible here: {', '.join(sorted(wrong))}; see --upstream and --no-store")
    return [way for way in WAYS if way in (asked or WAYS) and way not in missing]


def _rounds(
    server: "Server", trainer: "Trainer", ways: Sequence[Way], density: float, repeats: int
) -> Iterator[dict[str, Any]]:
    """Publish one version, bring the server there in every way in turn, and leave it there."""
    step = trainer.step(density)
    prepared = server.prepare(step)
    found: dict[Way, dict[str, str]] = {}
    spent: dict[Way, list[Spent]] = {way: [] for way in ways}
    for number in range(repeats + 1):
        for way in ways:
            gc.collect()
            once = server.update(way, prepared)
            if number == 0:
                found[way] = server.fingerprint()
                _compare(found)
            else:
                spent[way].append(once)
            server.undo(way, prepared)
    server.advance(prepared)
    for way in ways:
        totals = [each.total_s for each in spent[way]]
        yield {
            "density": density,
            "way": way,
            "num_changed": step.num_changed,
            "payload_bytes": step.payload_bytes if way == "patchstore" else None,
            "total_s": statistics.median(totals),
            "total_min_s": min(totals),
            "total_max_s": max(totals),
            "stage_s": statistics.median(each.stage_s for each in spent[way]),
            "prove_s": statistics.median(each.prove_s for each in spent[way]),
            "pause_s": statistics.median(each.pause_s for each in spent[way]),
            "repeats": repeats,
        }


def _compare(found: Mapping[Way, Mapping[str, str]]) -> None:
    """Check that all ways so far came to the same weights.

    Raises:
        SystemExit: they did not, so that their times mean nothing.
    """
    first, last = next(iter(found)), list(found)[-1]
    if wrong := [name for name, digest in found[first].items() if found[last].get(name) != digest]:
        raise SystemExit(f"{last} and {first} differ in {len(wrong)} tensors, such as {wrong[0]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of one update."""

    stage_s: float = 0.0
    """Before anything is written: generation can go on."""
    prove_s: float = 0.0
    """The same: checking that it leads to what the manifest says."""
    pause_s: float
    """While weights are written: generation waits."""

    @property
    def total_s(self) -> float:
        return self.stage_s + self.prove_s + self.pause_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One version."""

    patches: Sequence[TensorPatch]
    """From the version before, on the trainer's device."""
    tensors: Mapping[str, torch.Tensor]
    """All of it: the trainer's own memory."""
    manifest: Manifest | None
    """None without a store."""

    @property
    def num_changed(self) -> int:
        return sum(patch.indices.numel() for patch in self.patches)

    @property
    def payload_bytes(self) -> int | None:
        return None if self.manifest is None or self.manifest.delta is None else self.manifest.delta.num_bytes


class Trainer:
    """Random weights, and steps that flip the lowest bit of random elements; publishes if given a folder."""

    def __init__(self, shape: Shape, device: torch.device, store: Path | None) -> None:
        self._random = torch.Generator(device).manual_seed(7)
        self.tensors = {
            name: torch.empty(size, dtype=torch.bfloat16, device=device).normal_(
                0, 0.02, generator=self._random
            )
            for name, size in shape.tensors().items()
        }
        self.schema = Schema(
            tensors=tuple(spec_of(name, tensor) for name, tensor in sorted(self.tensors.items())), tied={}
        )
        self.store = None if store is None else open_store(store)
        self._publisher = None
        self._num_published = 0
        if self.store is not None:
            self._publisher = Publisher(self.store, self.tensors, anchor_every=1_000_000)
            self._publish()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._publisher is not None:
            self._publisher.close()
        if self.store is not None:
            self.store.close()

    def step(self, density: float) -> Step:
        """Change each element with this probability, in every tensor at least one, and publish."""
        patches = []
        for name, tensor in self.tensors.items():
            flat, at = bits(tensor), self._positions(tensor.numel(), density)
            flat[at] ^= 1
            indices = at.to(index_dtype(tensor.numel()))
            patches.append(TensorPatch(name=name, indices=indices, values=tensor.view(-1)[at]))
        manifest = self._publish()
        step = Step(patches=patches, tensors=self.tensors, manifest=manifest)
        assert manifest is None or manifest.delta is not None
        if manifest is not None and manifest.delta is not None:
            assert manifest.delta.num_changed == step.num_changed
        return step

    def _positions(self, num_elements: int, density: float) -> torch.Tensor:
        """Ascending positions, int64: distances of independent changes follow a geometric distribution."""
        expected = num_elements * density
        gaps = torch.empty(
            int(expected + 6 * expected**0.5 + 8), dtype=torch.float64, device=self._random.device
        ).geometric_(density, generator=self._random)
        at = gaps.to(torch.int64).cumsum(0) - 1
        at = at[: int(torch.searchsorted(at, num_elements))]
        return at if at.numel() else at.new_zeros(1)

    def _publish(self) -> Manifest | None:
        if self._publisher is None:
            return None
        self._num_published += 1
        return self._publisher.publish_patch(self._num_published).result()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A version as every way needs it, all of it in memory before the clock starts."""

    step: Step
    patches: Sequence[TensorPatch]
    """On the model's device."""
    undo: "Change"
    """Leads back to the version before."""


class Server:
    """One worker of vLLM, reached directly: what it does is timed without any transport of calls."""

    def __init__(self, worker: Any, upstream: ModuleType | None) -> None:
        self._worker = worker
        self._engine = worker.weight_transfer_engine
        self._upstream = upstream
        self._updater: Updater | None = None
        self._live: LiveWeights = self._engine.live
        self.device = self._live.device
        self._updates: Mapping[Way, Callable[[Prepared], Spent]] = {
            "patchstore": self._patchstore,
            "patchstore-decoded": self._decoded,
            "vllm-patch": partial(self._vllm_patch, is_checked=True),
            "vllm-patch-unchecked": partial(self._vllm_patch, is_checked=False),
            "dense": self._dense,
        }

    def open(self, trainer: Trainer, spool: Path) -> dict[str, Any]:
        """Map the weights and load version 0; returns what that took."""
        row: dict[str, Any] = {}
        if trainer.store is not None:
            self._worker.init_weight_transfer_engine(
                init_info={"store": trainer.store.url, "scratch": str(spool), "cache_bytes": 0}
            )
            self._live, self._updater = self._engine.live, self._engine.updater
            # The first anchor goes through vLLM's loader, and proves the map; any other through the map.
            row |= self._load_anchor("anchor") | self._load_anchor("anchor_again")
        else:
            from vllm_plugin.mapping import WeightMap

            traced = self._live.trace(trainer.schema)
            self._live.follow(WeightMap(trainer.schema, traced, [self._live.share(traced)]))
            self._live.load(trainer.tensors)
        names = sorted(self._live.map.regions)
        trace_s = self._median(lambda: self._live.trace(trainer.schema))
        return {
            "num_elements": sum(spec.num_elements for spec in trainer.schema.tensors),
            "num_names": len(trainer.schema.tensors),
            "num_mapped": len(names),
            "num_runtimes": len(self._live.map.runtimes),
            "trace_s": trace_s,
            "digest_s": self._median(lambda: self._live.claims(names)),
            **row,
        }

    def _load_anchor(self, name: str) -> dict[str, Any]:
        assert self._updater is not None
        self._updater.forget()
        with _peak(self.device) as peak:
            began = time.perf_counter()
            self._worker.start_weight_update()
            self._worker.update_weights(update_info={"version": 0})
            staged = time.perf_counter()
            self._worker.finish_weight_update()
            ended = time.perf_counter()
        assert self._updater.held is not None
        timings = {f"{name}_{part}_s": each for part, each in self._updater.timings.items()}
        return {
            f"{name}_s": ended - began,
            f"{name}_pause_s": ended - staged,
            **timings,
            **{f"{name}_{where}_mib": each / 2**20 for where, each in peak.items()},
        }

    def close(self) -> None:
        self._engine.shutdown()

    def prepare(self, step: Step) -> Prepared:
        """Bring a version's patches to the device, and keep what they replace."""
        patches = [
            TensorPatch(
                name=patch.name,
                indices=patch.indices.to(self.device),
                values=patch.values.to(self.device),
            )
            for patch in step.patches
        ]
        return Prepared(step=step, patches=patches, undo=self._live.stage(patches, keep_old=False))

    def update(self, way: Way, prepared: Prepared) -> Spent:
        """Bring the live weights to a version."""
        return self._updates[way](prepared)

    def undo(self, way: Way, prepared: Prepared) -> None:
        """Bring them back to the version before, and check that every changed element is."""
        if way == "patchstore":
            assert self._updater is not None
            self._updater.roll_back()
        else:
            self._live.gather_back(prepared.undo)

    def advance(self, prepared: Prepared) -> None:
        """Bring them to a version for good."""
        if self._updater is None:
            self._live.scatter(prepared.undo)
        else:
            self._patchstore(prepared)
            self._updater.accept()

    def fingerprint(self) -> dict[str, str]:
        found: dict[str, str] = self._worker.delta_fingerprint()
        return found

    def _patchstore(self, prepared: Prepared) -> Spent:
        assert self._updater is not None and prepared.step.manifest is not None
        began = self._now()
        self._updater.stage(prepared.step.manifest.version)
        changes = self._updater.changes()
        staged = self._now()
        self._updater.verify([changes])
        proved = self._now()
        self._updater.apply()
        return Spent(stage_s=staged - began, prove_s=proved - staged, pause_s=self._now() - proved)

    @torch.no_grad()
    def _decoded(self, prepared: Prepared) -> Spent:
        began = self._now()
        change = self._live.stage(prepared.patches, keep_old=True)
        staged = self._now()
        self._live.scatter(change)
        return Spent(stage_s=staged - began, pause_s=self._now() - staged)

    def _vllm_patch(self, prepared: Prepared, *, is_checked: bool) -> Spent:
        from vllm.config import set_current_vllm_config

        assert self._upstream is not None
        tensors = prepared.step.tensors
        patches = [
            self._upstream.CheckpointWeightPatch(
                name=patch.name,
                shape=tuple(tensors[patch.name].shape),
                dtype=patch.values.dtype,
                values=patch.values,
                indices=patch.indices,
            )
            for patch in prepared.patches
        ]
        with set_current_vllm_config(self._worker.vllm_config):
            began = self._now()
            self._upstream.load_checkpoint_weight_patches(
                self._worker.model_runner.get_model(), patches, validate_unique_indices=is_checked
            )
            return Spent(pause_s=self._now() - began)

    def _dense(self, prepared: Prepared) -> Spent:
        began = self._now()
        self._live.load(prepared.step.tensors)
        return Spent(pause_s=self._now() - began)

    def _now(self) -> float:
        """Seconds, once the device is done with what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _median(self, work: Callable[[], object]) -> float:
        spent = []
        for _ in range(3):
            began = self._now()
            work()
            spent.append(self._now() - began)
        return statistics.median(spent)


def _start(shape: Shape, folder: Path, arguments: Mapping[str, Any]) -> Any:
    """Start an engine with dummy weights in this process, and return its worker."""
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        # Compiles nothing: not one token is generated.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }.items():
        os.environ.setdefault(name, value)
    # With the worker in this process it can be called without pickling anything.
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
    """Called in the worker, whose wrapper some versions pass instead."""
    return getattr(worker, "worker", worker)


def _upstream(path: Path | None) -> ModuleType | None:
    """Import vLLM's loader of checkpoint patches: from a file, or the installed one; None without either."""
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


@contextmanager
def _peak(device: torch.device) -> Iterator[dict[str, int]]:
    """Measure how far memory grows: of the `host` (resident, mapped files included) and of the `device`."""
    peak: dict[str, int] = {}
    gc.collect()
    # Resets the kernel's high-water mark of this process; not every container may.
    has_reset = False
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        has_reset = True
    before, allocated = _status("VmRSS"), 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
    yield peak
    if has_reset:
        peak["host"] = _status("VmHWM") - before
    if device.type == "cuda":
        peak["device"] = torch.cuda.max_memory_allocated() - allocated


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def _software(device: torch.device) -> dict[str, str]:
    import vllm

    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
        name = f"{os.cpu_count()} cores, {name}"
    return {"vllm": vllm.__version__, "device": name}
