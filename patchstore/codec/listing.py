"""Tensors whose changes a delta file states by positions and values, as columns.

A file has a column of positions (`<name>.idx`) and one of values (`<name>.val`) for each dtype of tensors,
and in each the tensors ascend by name. So what is alike lies side by side: tens of thousands of tensors are
encoded and written with a few operations on whole columns.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.records import DTYPE_BYTES, Schema
from patchstore.codec.index import Gap, Raw
from patchstore.tensors.columns import Group, in_order, signed_of
from patchstore.tensors.elements import MAX_GAP

Array = npt.NDArray[Any]


class Stated(NamedTuple):
    """What a file states of some tensors of one dtype: changes, and perhaps elements on the way to them."""

    group: Group
    """By place in the schema, and by position in the whole tensors."""
    is_part: bool = False
    """Whether the publisher has parts of them alone, and does not know what lies between their changes."""


class Column(NamedTuple):
    """The positions, or the values, of tensors of one dtype, one after the other."""

    suffix: str
    """`.idx` or `.val`."""
    dtype: str
    """As it is stored."""
    numbers: Array
    """int64 [T], places in the schema, ascending."""
    counts: Array
    """int64 [T], elements of each."""
    data: torch.Tensor
    """Flat, in host memory, of a dtype of that width."""


class Listing(NamedTuple):
    """All that a file states by positions and values."""

    columns: Sequence[Column] = ()
    """In the file's order: wide elements first, so that each begins at a multiple of its size."""
    firsts: Mapping[int, int] = {}
    """From where the gaps of some tensors count, by place in the schema; see `index.Listed.firsts`."""

    @property
    def num_bytes(self) -> int:
        return sum(column.data.nbytes for column in self.columns)

    @property
    def numbers(self) -> Array:
        """Places in the schema of all tensors that are listed, ascending."""
        values = [column.numbers for column in self.columns if column.suffix == ".val"]
        return np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *values]))


def listing(schema: Schema, stated: Sequence[Stated], encoding: Raw) -> Listing:
    """Return what a file states, in `raw` or `gap`; each element once at most."""
    by_dtype: dict[str, list[Stated]] = {}
    for each in stated:
        if len(each.group.numbers):
            by_dtype.setdefault(schema.tensors[each.group.numbers[0]].dtype, []).append(each)
    columns: list[tuple[tuple[int, str, bool], Column]] = []
    firsts: dict[int, int] = {}
    for dtype, some in by_dtype.items():
        group = in_order([each.group for each in some])
        parts = [each.group.numbers for each in some if each.is_part]
        is_part = (
            np.isin(group.numbers, np.concatenate(parts)) if parts else np.zeros(len(group.numbers), bool)
        )
        found = _gaps(schema, group, is_part, firsts) if isinstance(encoding, Gap) else _raw(schema, group)
        found.append(Column(".val", dtype, group.numbers, group.counts, signed_of(group.values)))
        columns += [((-each.data.element_size(), dtype, each.suffix == ".val"), each) for each in found]
    columns.sort(key=lambda each: each[0])
    return Listing([column for _, column in columns], firsts)


def _raw(schema: Schema, group: Group, some: Array | None = None) -> list[Column]:
    """Return positions as they are: int32, and int64 of tensors of 2**31 elements or more."""
    sizes, found = np.array(schema.sizes)[group.numbers], []
    picked = np.ones(len(group.numbers), dtype=np.bool_) if some is None else some
    for dtype, is_wide in (("I32", False), ("I64", True)):
        mine = picked & ((sizes >= 2**31) == is_wide)
        if mine.any():
            its = group.positions[np.repeat(mine, group.counts)].astype(f"i{DTYPE_BYTES[dtype]}")
            numbers, counts = group.numbers[mine], group.counts[mine]
            found.append(Column(".idx", dtype, numbers, counts, torch.from_numpy(its)))
    return found


def _gaps(schema: Schema, group: Group, is_part: Array, firsts: dict[int, int]) -> list[Column]:
    """Return the positions skipped before each element, uint16.

    Those of a part count from its first change. Where one is too wide, the part's positions are as in `raw`.
    """
    starts = group.counts.cumsum() - group.counts
    gaps = group.positions - 1
    gaps[1:] -= group.positions[:-1]
    gaps[starts] = np.where(is_part, 0, group.positions[starts])
    is_wide = np.maximum.reduceat(gaps, starts) > MAX_GAP
    assert not (is_wide & ~is_part).any(), "a gap of a whole tensor was not bridged"
    begins = group.positions[starts]
    for place in np.flatnonzero(is_part & ~is_wide & (begins > 0)):
        firsts[int(group.numbers[place])] = int(begins[place])
    found = _raw(schema, group, is_wide) if is_wide.any() else []
    if not is_wide.all():
        narrow = ~is_wide
        its = gaps[np.repeat(narrow, group.counts)] if is_wide.any() else gaps
        data = torch.from_numpy(its.astype(np.uint16).view(np.int16))
        found.append(Column(".idx", "U16", group.numbers[narrow], group.counts[narrow], data))
    return found


def bridged(group: Group) -> tuple[Group, Array] | None:
    """Add positions so that no gap exceeds 65,535; None where none does.

    A bridge stands 65,536 after the position before it.

    Returns:
        The group with values of zero at bridges, and which of its elements these are, bool.

    Example: positions [3, 65539, 200000] of one tensor -> [3, 65539, 131075, 196611, 200000]: 65,535
    positions lie between 3 and 65539, so that gap just fits; the next one takes two bridges.
    """
    starts = group.counts.cumsum() - group.counts
    before = np.empty_like(group.positions)
    before[1:] = group.positions[:-1]
    before[starts] = -1
    num_bridges = (group.positions - before - 1) // (MAX_GAP + 1)
    if not num_bridges.any():
        return None
    each = num_bridges + 1
    last = each.cumsum() - 1
    owner = np.repeat(np.arange(len(each)), each)
    nth = np.arange(len(owner)) - (last - num_bridges)[owner] + 1
    positions = before[owner] + nth * (MAX_GAP + 1)
    positions[last] = group.positions
    values = np.zeros(len(owner), dtype=group.values.dtype)
    values[last] = group.values
    is_bridge = np.ones(len(owner), dtype=np.bool_)
    is_bridge[last] = False
    return Group(group.numbers, np.add.reduceat(each, starts), positions, values), is_bridge
