"""Find the elements that differ between two versions of a tensor.

Bit patterns are compared, not values: 0.0 and -0.0 differ and a NaN equals itself,
because replay promises the trainer's bytes, not its numbers.
"""

import torch

from patchstore.kernels import reference
from patchstore.tensors import bits, index_dtype


def changed(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return the flat positions at which two tensors of one shape and dtype differ.

    Reads each tensor once, in chunks of a few million elements; changes nothing.

    Returns:
        int32 (int64 from 2**31 elements on) [num_changed], ascending, on the tensors' device.
    """
    return reference.differing(bits(new), bits(old)).to(index_dtype(new.numel()))
