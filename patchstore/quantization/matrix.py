"""Weights that are quantised where a trainer has them."""

from typing import NamedTuple

import torch


class Matrix(NamedTuple):
    """Weights, and where they lie in the blocks that share a scale."""

    weights: torch.Tensor
    """[rows, columns] in bf16, fp16 or fp32, with any strides."""
    served: torch.dtype
    """bf16, fp16 or fp32: what the weights are rounded to before they are quantised."""
    above: int = 0
    """Rows of its first blocks that are not part of it, where it is a part of a larger matrix."""
    left: int = 0
    """The same of columns."""

    @property
    def is_aligned(self) -> bool:
        """Whether 8 elements from a multiple of 8 on are one run of one block, aligned to 16 bytes."""
        row_stride, column_stride = self.weights.stride()
        sizes = self.weights.shape[1], row_stride, self.left
        return column_stride == 1 and not any(n % 8 for n in sizes) and self.weights.data_ptr() % 16 == 0

    @property
    def place(self) -> tuple[object, ...]:
        """Where and what the weights are, to be compared with those of another time."""
        weights = self.weights
        where = weights.data_ptr(), tuple(weights.shape), weights.stride()
        return (*where, weights.dtype, self.served, self.above, self.left)

    def groups(self, block: tuple[int, int] | None) -> tuple[int, int]:
        """Return how many blocks it touches, down and across; rows and 1 where each row has a scale."""
        rows, columns = self.weights.shape
        if block is None:
            return rows, 1
        return -(-(rows + self.above) // block[0]), -(-(columns + self.left) // block[1])
