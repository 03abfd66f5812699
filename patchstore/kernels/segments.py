"""Segments: what one region of a served weight has to do with one stored tensor.

They are rows of a table of int64, whose columns are named here. Addresses are absolute, so tensors need not
lie together. The number of launches depends on neither tensors nor regions.
"""

from dataclasses import dataclass
from enum import IntEnum

import triton.language as tl

INTEGERS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
"""Types of unsigned elements, by bytes."""


class Column(IntEnum):
    """Columns of the table of segments. Shape, source strides and target strides of its dimensions follow."""

    POSITIONS = 0
    """Address of what states the positions [num]: uint16 gaps, or int32 or int64 positions."""
    VALUES = 1
    """Address of the new bits, [num]."""
    NUM = 2
    FIRST_TILE = 3
    """Of the stream, in what `starts` holds; unused without gaps."""
    MEMORY = 4
    """Address of the served weight's storage."""
    SOURCE = 5
    """Position in the stored tensor of the region's first element."""
    END = 6
    """One past that of its last."""
    TARGET = 7
    """Where the first element is in the storage."""
    DIMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What all segments of a table have in common, so that one launch serves them."""

    value_width: int
    """Bytes of a stored element."""
    memory_width: int
    """Bytes of a served one: the same, or 4 for 2, which then is the upper half."""
    num_dims: int
    """Of every region; 0 where each is one run in both, without gaps."""
    is_narrow: bool
    """Whether every stored tensor has fewer than 2**31 elements."""
    is_aligned: bool
    """Whether every region begins at an address that 16 divides. Only runs need to say."""

    @property
    def is_widened(self) -> bool:
        return self.value_width != self.memory_width

    @property
    def num_columns(self) -> int:
        return int(Column.DIMS) + 3 * self.num_dims
