"""A trainer with random weights, whose steps change a given share of their elements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.support.shapes import Shape
from patchstore import Publisher, open_store
from patchstore.bucket.records import Manifest, Schema
from patchstore.tensors.bits import TensorPatch, bits, index_dtype, spec_of

CHANGES = {
    "flips": "the lowest bit of any elements flips",
    "adamw": "noise moves float32 masters, so that small weights change rather than large ones",
}
"""Kinds of steps."""
STANDARD_DEVIATION = 0.02
"""Of the weights."""
RATE = 2.5e-7
"""Standard deviation of the updates that change 1 % of such weights."""
PART = 1 << 26
"""Elements that noise moves at a time."""


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
    """Random weights, and steps that change a share of them. Publishes if given a folder."""

    def __init__(
        self, shape: Shape, device: torch.device, store: Path | None, changes: str = "flips"
    ) -> None:
        """Make the weights.

        Args:
            changes: one of `CHANGES`.
        """
        self._changes = changes
        self._random = torch.Generator(device).manual_seed(7)
        self.tensors = {
            name: torch.empty(size, dtype=torch.bfloat16, device=device).normal_(
                0, STANDARD_DEVIATION, generator=self._random
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
        """Change about this share of the elements, and publish."""
        change = {"flips": self._flip, "adamw": self._move}[self._changes]
        patches = []
        for name, tensor in self.tensors.items():
            at = change(tensor, density)
            indices = at.to(index_dtype(tensor.numel()))
            patches.append(TensorPatch(name=name, indices=indices, values=tensor.view(-1)[at]))
        manifest = self._publish()
        step = Step(patches=patches, tensors=self.tensors, manifest=manifest)
        assert manifest is None or manifest.delta is not None
        if manifest is not None and manifest.delta is not None:
            assert manifest.delta.num_changed == step.num_changed
        return step

    def _flip(self, tensor: torch.Tensor, density: float) -> torch.Tensor:
        """Flip each element's lowest bit with this probability, one at least. Returns ascending positions."""
        at = self._positions(tensor.numel(), density)
        bits(tensor)[at] ^= 1
        return at

    def _move(self, tensor: torch.Tensor, density: float) -> torch.Tensor:
        """Take a step as AdamW does. Returns ascending positions of what changed."""
        rate, found = RATE * density / 0.01, []
        for start in range(0, tensor.numel(), PART):
            some = tensor.view(-1)[start : start + PART]
            before = some.clone()
            take_step(some, rate, self._random)
            found.append((bits(some) != bits(before)).nonzero().flatten() + start)
        return torch.cat(found)

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


def take_step(weights: torch.Tensor, rate: float, random: torch.Generator) -> None:
    """Add noise to weights whose masters are anywhere in the interval that rounds to them.

    Args:
        weights: bf16 [num], or masters themselves, float32.
        rate: standard deviation of the noise.
    """
    if weights.dtype == torch.float32:
        weights += rate * torch.randn(weights.shape, generator=random, device=weights.device)
        return
    masters = weights.float()
    # It launches its kernel on the current device, wherever its argument is.
    with torch.cuda.device_of(masters):  # type: ignore[no-untyped-call]
        mantissa, exponent = torch.frexp(masters)
    offset = torch.rand(masters.shape, generator=random, device=masters.device).sub_(0.5).mul_(0.999)
    # The interval of a power of two is half as wide on the side of 0.
    offset = torch.where((mantissa.abs() == 0.5) & (offset * mantissa < 0), offset / 2, offset)
    masters += torch.ldexp(offset, exponent - 8)
    masters += rate * torch.randn(masters.shape, generator=random, device=masters.device)
    weights.copy_(masters)
