"""A trainer with random weights, whose steps change a given share of every tensor's elements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.support.shapes import Shape
from patchstore import Publisher, open_store
from patchstore.format.records import Manifest, Schema
from patchstore.tensors.bits import TensorPatch, bits, index_dtype, spec_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One version."""

    patches: Sequence[TensorPatch]
    """From the version before, on the trainer's device."""
    tensors: Mapping[str, torch.Tensor]
    """All tensors of the version: the trainer's own memory."""
    manifest: Manifest | None
    """None without a store."""

    @property
    def num_changed(self) -> int:
        return sum(patch.indices.numel() for patch in self.patches)

    @property
    def payload_bytes(self) -> int | None:
        return None if self.manifest is None or self.manifest.delta is None else self.manifest.delta.num_bytes


class Trainer:
    """Random weights, and steps that flip the lowest bit of random elements. Publishes if given a folder."""

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
        """Change each element with this probability, at least one per tensor, and publish."""
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
        """Return ascending positions, int64. The distances of independent changes are geometric."""
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
