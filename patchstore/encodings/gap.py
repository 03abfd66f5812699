"""Encoding `gap`: uint16 distances between changes. 4 bytes per change in bf16.

A gap beyond 65,535 is bridged by stating an unchanged element on the way, so one outlier costs
one more element and never a wider tensor; a position may thus be stated that did not change.

A publisher that has only some elements of a tensor does not know what lies between them. Its gaps count from
its first change. Where one is still too wide, the positions are stored as `raw` stores them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from patchstore.encodings.base import EncodedTensor, check_stored
from patchstore.encodings.raw import Raw
from patchstore.errors import CorruptObject
from patchstore.format.records import TensorSpec
from patchstore.tensors import elements
from patchstore.tensors.bits import TensorPatch, index_dtype

_RAW = Raw()
_FEW = 4096
"""Changes of tensors that are encoded together, at most."""


@dataclass(frozen=True, slots=True)
class Gap:
    """uint16 gaps: a position minus the one before it (-1 before the first), minus one."""

    name: str = "gap"

    @property
    def index(self) -> "Gap":
        return self

    def with_bridges(self, changed: torch.Tensor) -> torch.Tensor:
        return elements.bridge(changed)

    def encode(self, patch: TensorPatch, spec: TensorSpec) -> EncodedTensor:
        return EncodedTensor(idx=elements.to_gaps(patch.indices), val=patch.values)

    def encode_all(self, patches: Sequence[tuple[TensorPatch, TensorSpec]]) -> list[EncodedTensor]:
        found = {
            number: self.encode(patch, spec)
            for number, (patch, spec) in enumerate(patches)
            if patch.indices.numel() > _FEW
        }
        # Each call of torch costs microseconds, and a model of experts has thousands of small tensors.
        for dtype in (torch.int32, torch.int64):
            few = [
                number
                for number, (patch, _) in enumerate(patches)
                if patch.indices.dtype == dtype and number not in found
            ]
            gaps = elements.to_gaps_of_each([patches[number][0].indices for number in few])
            for number, idx in zip(few, gaps, strict=True):
                found[number] = EncodedTensor(idx=idx, val=patches[number][0].values)
        return [found[number] for number in range(len(patches))]

    def encode_part(self, patch: TensorPatch, spec: TensorSpec) -> EncodedTensor:
        """Encode exactly these positions, at least one, without bridges: of a part of a tensor."""
        first = int(patch.indices[0])
        if bool((patch.indices[1:] - patch.indices[:-1] > elements.MAX_GAP + 1).any()):
            return _RAW.encode(patch, spec)
        return EncodedTensor(idx=elements.to_gaps(patch.indices - first), val=patch.values, first=first)

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, where: str) -> TensorPatch:
        if encoded.idx.dtype in (torch.int32, torch.int64) and not encoded.first:
            return _RAW.decode(encoded, spec, where)
        check_stored(encoded, spec, torch.uint16, where)
        indices = elements.from_gaps(encoded.idx) + encoded.first
        # Gaps cannot be negative, so positions ascend; only the last can be out of range.
        if indices.numel() and int(indices[-1]) >= spec.num_elements:
            raise CorruptObject(
                f"{where}: gaps of {spec.name!r} reach position {int(indices[-1])}, "
                f"beyond its {spec.num_elements} elements"
            )
        return TensorPatch(
            name=spec.name, indices=indices.to(index_dtype(spec.num_elements)), values=encoded.val
        )
