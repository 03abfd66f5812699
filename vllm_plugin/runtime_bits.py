"""The memory of a runtime tensor as integers, and the bits that a checkpoint has for them.

vLLM keeps some bfloat16 weights of a checkpoint as float32. Their bits are widened and narrowed here.
"""

import torch

from patchstore.format.records import TensorSpec
from patchstore.tensors.bits import TORCH_DTYPES, bits
from patchstore.tensors.state_digest import Sums
from vllm_plugin.resolve import Runtime

PIECE = 1 << 23
"""Elements that are digested at a time. Bounds what a device needs beside the weights: about 0.5 GB, as
temporaries are int64."""


def flat(runtime: Runtime) -> torch.Tensor:
    """All of a runtime's memory as integers of its element width, [num_elements]."""
    width = bits(torch.empty(0, dtype=runtime.dtype)).dtype
    num_elements = runtime.storage.nbytes() // width.itemsize
    return torch.empty(0, dtype=width, device=runtime.storage.device).set_(
        runtime.storage, 0, (num_elements,), (1,)
    )


def widened(new: torch.Tensor, spec: TensorSpec, memory: torch.Tensor) -> torch.Tensor:
    """The checkpoint's bits as the runtime's: bfloat16 is the upper half of float32."""
    if new.element_size() == memory.element_size():
        return new
    assert spec.dtype == "BF16" and memory.element_size() == 4
    return new.to(torch.int32) << 16


UNMATCHED = Sums(1, 0)
"""Added to the sums of elements that are no checkpoint's, so that they match none."""


def is_widened(held: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether the runtime's bits are what some bits of the checkpoint become."""
    is_same = held.element_size() == TORCH_DTYPES[spec.dtype].itemsize
    return is_same or not bool((held & 0xFFFF).any())


def narrowed(held: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The runtime's bits as the checkpoint's. What was copied there loses nothing."""
    if held.element_size() == TORCH_DTYPES[spec.dtype].itemsize:
        return held
    return (held >> 16).to(torch.int16)
