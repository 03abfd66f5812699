"""Tensors as bit patterns: dtypes by their safetensors names, integer views, and patches.

Bits are compared and copied, never numbers: -0.0 and 0.0 differ, and a NaN equals itself.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from patchstore.bucket.manifest_json import is_name
from patchstore.bucket.records import PACKED, TensorSpec
from patchstore.errors import SchemaMismatch

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F4": torch.float4_e2m1fn_x2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
TOGETHER = 1 << 21
"""Elements of small tensors that one call works on: temporaries of a few times this size stay in the cache,
and the fixed cost of a call is small beside the work."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPatch:
    """New values for some elements of one tensor, in checkpoint coordinates."""

    name: str
    indices: torch.Tensor
    """int32 or int64 [num_stated], strictly ascending positions in the flattened tensor."""
    values: torch.Tensor
    """[num_stated], in the tensor's own dtype."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements' bit patterns as a flat integer tensor of the same width.

    Shares memory with a contiguous tensor; one byte gives uint8, wider ones int16, int32, int64.
    """
    return tensor.detach().reshape(-1).view(INTEGERS[tensor.element_size()])


def unsigned(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the bit patterns of a tensor on the CPU, flat, as unsigned integers, in the same memory."""
    flat = bits(tensor)
    return flat.numpy().view(f"u{flat.element_size()}")


def batches(
    specs: Iterable[TensorSpec], tensors: Iterable[torch.Tensor], together: int | None = None
) -> Iterator[list[tuple[TensorSpec, torch.Tensor]]]:
    """Cut a stream of tensors into batches: small ones together, a large one ends its batch.

    A batch has at most `together` elements before its last tensor, a quarter of `TOGETHER` if not given. No
    tensor is taken from the stream before it is needed.
    """
    batch: list[tuple[TensorSpec, torch.Tensor]] = []
    num = 0
    for spec, tensor in zip(specs, tensors, strict=True):
        # Not the pair of `zip`, which would keep the first one for itself.
        batch.append((spec, tensor))
        num += spec.num_elements
        if num >= (TOGETHER // 4 if together is None else together):
            yield batch
            batch, num = [], 0
    if batch:
        yield batch


def spec_of(name: str, tensor: torch.Tensor, served: torch.dtype | None = None) -> TensorSpec:
    """Describe a tensor, as it is `served` if that is another dtype than its own."""
    dtype = tensor.dtype if served is None else served
    if dtype not in _NAMES:
        raise SchemaMismatch(
            f"tensor {name!r} has dtype {dtype}; storable are {', '.join(sorted(TORCH_DTYPES))}"
        )
    if not is_name(name):
        what = (
            "it is empty"
            if not name
            else "safetensors keeps that name for itself"
            if name == "__metadata__"
            else "it has a control character, U+FEFF or half of a surrogate pair"
        )
        raise SchemaMismatch(f"{name!r} cannot name a tensor: {what}; rename it in a mapping of tensors")
    spec = TensorSpec(name=name, dtype=_NAMES[dtype], shape=tuple(tensor.shape))
    if spec.dtype in PACKED and not spec.shape:
        raise SchemaMismatch(
            f"tensor {name!r} of {dtype} has no dimension, and a safetensors file states in codes how "
            "large the last one is; give it the shape [1]"
        )
    return spec


def index_dtype(num_elements: int) -> torch.dtype:
    """int32 while every position fits, int64 from 2**31 elements on."""
    return torch.int32 if num_elements <= 2**31 - 1 else torch.int64


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, little-endian and without a copy where it is contiguous on the CPU."""
    flat = bits(tensor.cpu().contiguous())
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def from_bytes(spec: TensorSpec, data: bytearray | memoryview) -> torch.Tensor:
    """Return a tensor over `data` (`spec.num_bytes` long, writable), sharing its memory."""
    dtype = TORCH_DTYPES[spec.dtype]
    if spec.num_elements == 0:
        return torch.empty(spec.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(spec.shape)
