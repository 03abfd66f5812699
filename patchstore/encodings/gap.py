"""Encoding `gap`: uint16 distances between changes. 4 bytes per change in bf16.

A gap beyond 65,535 is bridged by stating an unchanged element on the way, so one outlier costs
one more element and never a wider tensor; a position may thus be stated that did not change.
"""

from dataclasses import dataclass

import torch

from patchstore.encodings.base import EncodedTensor, check_stored
from patchstore.errors import CorruptObject
from patchstore.format.records import TensorSpec
from patchstore.tensors import elements
from patchstore.tensors.bits import TensorPatch, index_dtype


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

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, where: str) -> TensorPatch:
        check_stored(encoded, spec, torch.uint16, where)
        indices = elements.from_gaps(encoded.idx)
        # Gaps cannot be negative, so positions ascend; only the last can be out of range.
        if indices.numel() and int(indices[-1]) >= spec.num_elements:
            raise CorruptObject(
                f"{where}: gaps of {spec.name!r} reach position {int(indices[-1])}, "
                f"beyond its {spec.num_elements} elements"
            )
        return TensorPatch(
            name=spec.name, indices=indices.to(index_dtype(spec.num_elements)), values=encoded.val
        )
