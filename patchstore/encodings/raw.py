"""Encoding `raw`: positions as they are. 6 bytes per change in bf16."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from patchstore.encodings.base import EncodedTensor, check_stored
from patchstore.errors import CorruptObject
from patchstore.format.records import TensorSpec
from patchstore.tensors.bits import TensorPatch, index_dtype


@dataclass(frozen=True, slots=True)
class Raw:
    """int32 positions; int64 where a tensor has 2**31 elements or more."""

    name: str = "raw"

    @property
    def index(self) -> "Raw":
        return self

    def with_bridges(self, changed: torch.Tensor) -> torch.Tensor:
        return changed

    def encode(self, patch: TensorPatch, spec: TensorSpec) -> EncodedTensor:
        return EncodedTensor(idx=patch.indices.to(index_dtype(spec.num_elements)), val=patch.values)

    def encode_all(self, patches: Sequence[tuple[TensorPatch, TensorSpec]]) -> list[EncodedTensor]:
        return [self.encode(patch, spec) for patch, spec in patches]

    def encode_part(self, patch: TensorPatch, spec: TensorSpec) -> EncodedTensor:
        return self.encode(patch, spec)

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, where: str) -> TensorPatch:
        check_stored(encoded, spec, index_dtype(spec.num_elements), where)
        idx = encoded.idx
        if idx.numel():
            first, last = int(idx[0]), int(idx[-1])
            # Ascending with both ends in range puts every position in range.
            if not bool((idx[1:] > idx[:-1]).all()):
                raise CorruptObject(f"{where}: positions of {spec.name!r} do not ascend")
            if first < 0 or last >= spec.num_elements:
                raise CorruptObject(
                    f"{where}: positions {first} to {last} of {spec.name!r} leave its "
                    f"{spec.num_elements} elements"
                )
        return TensorPatch(name=spec.name, indices=idx, values=encoded.val)
