"""What an encoding is, and the two of positions and new values, which mean the same whatever the parent is.

`raw` states positions as they are: 6 bytes per change in bf16. `gap` states uint16 distances between changes:
4 bytes per change. A gap beyond 65,535 is bridged by stating an unchanged element on the way, so one outlier
costs one more element and never a wider tensor; a position may thus be stated that did not change.

A publisher that has only some elements of a tensor does not know what lies between them. Its gaps count from
its first change. Where one is still too wide, the positions are stored as `raw` stores them.

Values are new values, so applying a patch twice is harmless.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.records import Schema
from patchstore.errors import CorruptObject
from patchstore.tensors.bits import INTEGERS, unsigned
from patchstore.tensors.columns import Group, ramps, within

Array = npt.NDArray[Any]


class Listed(NamedTuple):
    """What a payload lists of tensors of one dtype, as an index encoding stores it."""

    where: str
    """The payload's key, which errors name."""
    numbers: Array
    """int64 [T], places in the schema, ascending."""
    counts: Array
    """int64 [T], elements that are listed of each; at least one, and no more than it has."""
    firsts: Array
    """int64 [T], the position from which the gaps of each count: 0, or the first that a publisher of a part
    states."""
    starts: Array
    """int64 [T], where the elements of each begin in `idx` and `val`, which may have others' too."""
    idx: torch.Tensor
    """[num], on the CPU, of one dtype; the encoding says what it holds."""
    val: torch.Tensor
    """[num], on the CPU, in the tensors' own dtype."""

    def of(self, numbers: Array) -> "Listed":
        """Return what is listed of some tensors, ascending, in the same memory."""
        at = within(self.numbers, numbers)
        return self._replace(
            numbers=self.numbers[at], counts=self.counts[at], firsts=self.firsts[at], starts=self.starts[at]
        )

    def alone(self) -> "Listed":
        """Return the same with no elements of others; neighbours without a copy."""
        starts = self.counts.cumsum() - self.counts
        num = int(self.counts.sum())
        if not len(starts) or (self.starts - starts == self.starts[0]).all():
            first = int(self.starts[0]) if len(starts) else 0
            idx, val = self.idx[first : first + num], self.val[first : first + num]
        else:
            picked = torch.from_numpy(ramps(self.counts, self.starts))
            idx, val = _taken(self.idx, picked), _taken(self.val, picked)
        return self._replace(starts=starts, idx=idx, val=val)


@dataclass(frozen=True, slots=True)
class Raw:
    """int32 positions; int64 where a tensor has 2**31 elements or more."""

    name: str = "raw"

    @property
    def index(self) -> Self:
        """The encoding of tensors that are stored as positions and values."""
        return self

    def decode(self, listed: Listed, schema: Schema) -> Group:
        """Return the changes that are listed; a CorruptObject names the payload and the tensor."""
        sizes = np.array(schema.sizes)[listed.numbers]
        expected = np.where(sizes < 2**31, "int32", "int64")
        check_dtype(listed, schema, expected)
        listed = listed.alone()
        at, starts = listed.idx.numpy(), listed.starts
        ends = starts + listed.counts
        # Ascending with both ends in range puts every position in range.
        falls = at[1:] <= at[:-1]
        falls[starts[1:] - 1] = False
        if falls.any():
            place = np.searchsorted(ends, np.flatnonzero(falls)[0], side="right")
            raise CorruptObject(
                f"{listed.where}: positions of {_name(listed, schema, place)!r} do not ascend"
            )
        beyond = np.flatnonzero((at[starts] < 0) | (at[ends - 1] >= sizes))
        if len(beyond):
            place = beyond[0]
            raise CorruptObject(
                f"{listed.where}: positions {at[starts[place]]} to {at[ends[place] - 1]} of "
                f"{_name(listed, schema, place)!r} leave its {sizes[place]} elements"
            )
        return Group(listed.numbers, listed.counts, at, unsigned(listed.val))


@dataclass(frozen=True, slots=True)
class Gap(Raw):
    """uint16 gaps: a position minus the one before it (-1 before the first), minus one."""

    name: str = "gap"

    def decode(self, listed: Listed, schema: Schema) -> Group:
        if listed.idx.dtype in (torch.int32, torch.int64):
            for place in np.flatnonzero(listed.firsts)[:1]:
                raise CorruptObject(
                    f"{listed.where}: positions of {_name(listed, schema, place)!r} count from "
                    f"{listed.firsts[place]}, and only gaps count from anywhere"
                )
            return Raw.decode(self, listed, schema)
        check_gaps(listed, schema)
        sizes = np.array(schema.sizes)[listed.numbers]
        listed = listed.alone()
        at = unsigned(listed.idx).astype(np.int64)
        at += 1
        np.cumsum(at, out=at)
        begins = listed.firsts - 1 - np.where(listed.starts > 0, at[listed.starts - 1], 0)
        at += np.repeat(begins, listed.counts) if len(begins) > 1 else begins
        # Gaps cannot be negative, so positions ascend; only the last can be out of range.
        last = at[listed.counts.cumsum() - 1]
        beyond = np.flatnonzero(last >= sizes)
        if len(beyond):
            place = beyond[0]
            raise CorruptObject(
                f"{listed.where}: gaps of {_name(listed, schema, place)!r} reach position {last[place]}, "
                f"beyond its {sizes[place]} elements"
            )
        narrow = sizes.max(initial=0) < 2**31
        return Group(
            listed.numbers, listed.counts, at.astype(np.int32) if narrow else at, unsigned(listed.val)
        )


def check_gaps(listed: Listed, schema: Schema) -> None:
    """Refuse what is listed by anything else than gaps."""
    check_dtype(listed, schema, np.full(len(listed.numbers), "uint16"))


def check_dtype(listed: Listed, schema: Schema, expected: Array) -> None:
    """Refuse positions that are stored in another dtype than the one expected of each tensor."""
    found = str(listed.idx.dtype).removeprefix("torch.")
    wrong = np.flatnonzero(expected != found)
    if len(wrong):
        raise CorruptObject(
            f"{listed.where}: {_name(listed, schema, wrong[0])!r} has positions in {found}, expected "
            f"{expected[wrong[0]]}"
        )


def _name(listed: Listed, schema: Schema, place: int) -> str:
    """Return the name of the tensor at a place of what is listed."""
    name: str = schema.tensors[listed.numbers[place]].name
    return name


def _taken(flat: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    # torch indexes no uint16.
    return flat.view(INTEGERS[flat.element_size()])[picked].view(flat.dtype)
