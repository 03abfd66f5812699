"""Find the elements that differ between two versions of a tensor.

Bit patterns are compared, not values: 0.0 and -0.0 differ and a NaN equals itself,
because replay promises the trainer's bytes, not its numbers.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
import torch

from patchstore.tensors import elements
from patchstore.tensors.bits import TOGETHER, bits, grouped, index_dtype, joined

Pair = TypeVar(
    "Pair", tuple[str, torch.Tensor, torch.Tensor], tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]
)
"""A name, and tensors of one shape, dtype and device: new, old, and perhaps one of the caller's."""


def changed(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return the flat positions at which two tensors of one shape and dtype differ.

    Reads each tensor once, in chunks of a few million elements; changes nothing.

    Returns:
        int32 (int64 from 2**31 elements on) [num_changed], ascending, on the tensors' device.
    """
    return elements.differing(bits(new), bits(old)).to(index_dtype(new.numel()))


def changed_each(pairs: Iterable[Pair]) -> Iterator[tuple[Pair, torch.Tensor]]:
    """Yield the pairs of tensors that differ, in any order, and at which positions; as `changed`.

    Small tensors on the CPU are compared many at a time; some are kept in memory for that.
    """
    for group in grouped(
        pairs,
        lambda pair: pair[1].element_size(),
        lambda pair: pair[1].numel() if pair[1].device.type == "cpu" else TOGETHER,
    ):
        if len(group) == 1:
            found = changed(group[0][1], group[0][2])
            if found.numel():
                yield group[0], found
            continue
        at = np.flatnonzero(joined([pair[1] for pair in group]) != joined([pair[2] for pair in group]))
        ends = np.array([pair[1].numel() for pair in group]).cumsum()
        bounds = np.searchsorted(at, ends)
        first = 0
        for pair, end, last in zip(group, ends.tolist(), bounds.tolist(), strict=True):
            if last > first:
                size = pair[1].numel()
                yield pair, torch.from_numpy(at[first:last] - (end - size)).to(index_dtype(size))
            first = last
