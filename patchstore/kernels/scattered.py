"""Elements anywhere in the memory of a GPU, by address: of many small tensors by one launch."""

import torch
import triton
import triton.language as tl

from patchstore.kernels import device_guard

BLOCK = 1024
"""Elements of a program."""


@triton.jit(do_not_specialize=["num"])
def _read(addresses, found, num, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    where = tl.load(addresses + at, mask=inside, other=0).to(tl.pointer_type(found.dtype.element_ty))
    tl.store(found + at, tl.load(where, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["num"])
def _write(addresses, values, num, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    where = tl.load(addresses + at, mask=inside, other=0).to(tl.pointer_type(values.dtype.element_ty))
    tl.store(where, tl.load(values + at, mask=inside, other=0), mask=inside)


def read(addresses: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements at addresses, int64 [num], of integers that are aligned; nothing is checked."""
    found = torch.empty(len(addresses), dtype=dtype, device=addresses.device)
    if len(found):
        with device_guard(addresses.device):
            _read[triton.cdiv(len(found), BLOCK),](addresses, found, len(found), BLOCK=BLOCK)
    return found


def write(addresses: torch.Tensor, values: torch.Tensor) -> None:
    """Write elements [num] to addresses, int64 [num], each of which is there once; nothing is checked."""
    if len(values):
        with device_guard(addresses.device):
            _write[triton.cdiv(len(values), BLOCK),](addresses, values, len(values), BLOCK=BLOCK)
