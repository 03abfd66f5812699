"""The ways from one version to the next: each brings the same worker to the same weights."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch

from benchmarks.apply.peak_memory import peak_memory
from benchmarks.support.trainer import Step, Trainer
from patchstore.tensors.bits import TensorPatch

if TYPE_CHECKING:
    from vllm_plugin.live.update import Updater
    from vllm_plugin.live.weights import LiveWeights, StagedWrite

Way = Literal["patchstore", "patchstore-decoded", "vllm-patch", "vllm-patch-unchecked", "dense"]

WAYS: Mapping[Way, str] = {
    "patchstore": "from the store: fetch, decode, translate and prove; then commit",
    "patchstore-decoded": "the same from decoded patches in memory: translate, then scatter",
    "vllm-patch": "vLLM's checkpoint_weight_patch, from the same decoded patches",
    "vllm-patch-unchecked": "the same without its check that positions are unique",
    "dense": "the model's own load_weights, from all tensors in memory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of one update."""

    stage_s: float = 0.0
    """Staging. Nothing is written yet, so generation can go on."""
    prove_s: float = 0.0
    """The check that the staged change leads to the manifest's state digest. Generation can go on."""
    pause_s: float
    """Writing the weights. Generation waits."""

    @property
    def total_s(self) -> float:
        return self.stage_s + self.prove_s + self.pause_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A version in the form that every way needs, in memory before the clock starts."""

    step: Step
    patches: Sequence[TensorPatch]
    """On the model's device."""
    undo: "StagedWrite"
    """Restores the version before."""


class Server:
    """One worker of vLLM, called directly, so that no transport of calls is timed."""

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
        """Map the weights and load version 0; return the times and sizes."""
        row: dict[str, Any] = {}
        if trainer.store is not None:
            self._worker.init_weight_transfer_engine(
                init_info={"store": trainer.store.url, "scratch": str(spool), "cache_bytes": 0}
            )
            self._live, self._updater = self._engine.live, self._engine.updater
            # vLLM's loader loads the first anchor, which proves the map; later anchors go through the map.
            row |= self._load_anchor("anchor") | self._load_anchor("anchor_again")
        else:
            from vllm_plugin.map.mapping import WeightMap, share

            traced = self._live.models.trace(trainer.schema)
            self._live.follow(WeightMap(trainer.schema, traced, [share(traced)]))
            self._live.models.load(trainer.schema, trainer.tensors)
        names = sorted(self._live.map.regions)
        trace_s = self._median(lambda: self._live.models.trace(trainer.schema))
        return {
            "num_elements": sum(spec.num_elements for spec in trainer.schema.tensors),
            "num_names": len(trainer.schema.tensors),
            "num_mapped": len(names),
            "num_runtimes": len(self._live.map.runtimes),
            "trace_s": trace_s,
            "digest_s": self._median(lambda: self._live.slice_sums(names)),
            **row,
        }

    def _load_anchor(self, name: str) -> dict[str, Any]:
        assert self._updater is not None
        self._updater.forget()
        with peak_memory(self.device) as peak:
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
        """Bring a version's patches to the device, and keep the elements that they replace."""
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
        """Restore the version before, and check every changed element."""
        if way == "patchstore":
            assert self._updater is not None
            self._updater.roll_back()
        else:
            self._live.gather_back(prepared.undo)

    def advance(self, prepared: Prepared) -> None:
        """Bring the live weights to a version, and keep it."""
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
        assert self._updater.staged is not None
        changes = self._updater.weights.changes(self._updater.staged)
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
        self._live.models.load(self._live.map.schema, prepared.step.tensors)
        return Spent(pause_s=self._now() - began)

    def _now(self) -> float:
        """Return the clock's seconds after the device has finished its work."""
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
