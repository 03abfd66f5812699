"""What an encoding is: how a delta file states which elements changed, and their new bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from patchstore.errors import CorruptObject
from patchstore.format.records import TensorSpec
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTensor:
    """The changes of one tensor as an index encoding stores them, under `<name>.idx` and `<name>.val`."""

    idx: torch.Tensor
    """[num_stated]; the encoding says what it holds."""
    val: torch.Tensor
    """[num_stated], in the tensor's own dtype."""
    first: int = 0
    """The position from which gaps count: 0, or the first one that a publisher of a part states."""


class Encoding(Protocol):
    """An encoding, by the name that manifests give it."""

    @property
    def name(self) -> str: ...

    @property
    def index(self) -> "IndexEncoding":
        """The encoding of tensors that are stored as positions and values; of an index encoding itself."""
        ...


@runtime_checkable
class IndexEncoding(Encoding, Protocol):
    """Positions and new values, which mean the same whatever the tensor holds.

    Values are new values, so applying a patch twice is harmless.
    """

    def with_bridges(self, changed: torch.Tensor) -> torch.Tensor:
        """Return the positions that a patch must state for these changed ones: all of them, perhaps more.

        Args:
            changed: int32 or int64 [num_changed], ascending.
        """
        ...

    def encode(self, patch: TensorPatch, spec: TensorSpec) -> EncodedTensor:
        """Encode a patch whose indices came from `with_bridges`."""
        ...

    def encode_all(self, patches: Sequence[tuple[TensorPatch, TensorSpec]]) -> list[EncodedTensor]:
        """`encode` each of several patches; the results may share memory."""
        ...

    def encode_part(self, patch: TensorPatch, spec: TensorSpec) -> EncodedTensor:
        """Encode exactly these positions of a tensor, at least one, ascending, without bridges."""
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
    """Refuse stored tensors of another dtype, or of different lengths.

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
