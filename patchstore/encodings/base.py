"""What an index encoding is: a frozen value that turns patches into two stored tensors and back."""

from dataclasses import dataclass
from typing import Protocol

import torch

from patchstore.errors import CorruptObject
from patchstore.model import TensorSpec
from patchstore.tensors import TORCH_DTYPES, TensorPatch


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTensor:
    """The changes of one tensor as they are stored, under `<name>.idx` and `<name>.val`."""

    idx: torch.Tensor
    """[num_stated]; what it holds is the encoding's business."""
    val: torch.Tensor
    """[num_stated], in the tensor's own dtype."""


class Encoding(Protocol):
    """How positions are stored. Values are new values, so applying a patch twice is harmless."""

    @property
    def name(self) -> str: ...

    def stated(self, changed: torch.Tensor) -> torch.Tensor:
        """Return the positions that a patch must state for these changed ones: all of them, perhaps more.

        Args:
            changed: int32 or int64 [num_changed], ascending.
        """
        ...

    def encode(self, patch: TensorPatch, spec: TensorSpec) -> EncodedTensor:
        """Encode a patch whose indices came from `stated`."""
        ...

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, where: str) -> TensorPatch:
        """Return the patch that was encoded.

        Args:
            where: the object's key, to name in errors.

        Raises:
            CorruptObject: wrong dtype or shape, or positions out of range or not ascending.
        """
        ...


def check_stored(encoded: EncodedTensor, spec: TensorSpec, idx_dtype: torch.dtype, where: str) -> None:
    """Refuse stored tensors of another dtype, or whose lengths differ.

    Raises:
        CorruptObject
    """
    idx, val = encoded.idx, encoded.val
    if idx.dtype != idx_dtype or val.dtype != TORCH_DTYPES[spec.dtype]:
        raise CorruptObject(
            f"{where}: {spec.name!r} has positions in {idx.dtype} and values in {val.dtype}, "
            f"expected {idx_dtype} and {TORCH_DTYPES[spec.dtype]}"
        )
    if idx.dim() != 1 or idx.shape != val.shape:
        raise CorruptObject(
            f"{where}: {spec.name!r} has positions of shape {tuple(idx.shape)} and values of shape "
            f"{tuple(val.shape)}, expected one dimension of the same length"
        )
