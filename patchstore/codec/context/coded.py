"""What is coded of a delta, as columns: no object for each part."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from patchstore.codec.context.bits import Array, bounds_of
from patchstore.codec.context.rows import Sets
from patchstore.codec.context.tiles import Cuts
from patchstore.tensors.columns import ramps

_NO_KEY = ("",)


class Coded:
    """Changes of P parts of tensors: part after part, and of each tile after tile."""

    def __init__(
        self,
        numbers: Array,
        cuts: Cuts,
        sets: Sets,
        row_sets: Array,
        lengths: Array,
        data: npt.NDArray[np.uint8],
        keys: Sequence[str] = _NO_KEY,
        payloads: Array | None = None,
    ) -> None:
        self.numbers = numbers
        """int64 [P], the place of each part's tensor in the schema."""
        self.cuts = cuts
        self.sets = sets
        self.row_sets = row_sets
        """int64 [P], which of `sets` says how each part is coded."""
        self.lengths = lengths
        """int32 or int64 [tiles], bytes of each tile's stream."""
        self.data = data
        """All streams, one after the other. Without bytes where they are elsewhere."""
        self.keys = keys
        """Of the payloads that were read, which errors name."""
        self.payloads = np.zeros(len(numbers), dtype=np.int64) if payloads is None else payloads
        """int64 [P], which of `keys` each part is from."""

    @classmethod
    def none(cls) -> "Coded":
        nothing = np.zeros(0, dtype=np.int64)
        return cls(nothing, Cuts([], nothing), Sets.none(), nothing, nothing, nothing.astype(np.uint8))

    @classmethod
    def joined(cls, many: Sequence["Coded"], sets: Sets | None = None) -> "Coded":
        """Join parts; `sets` are those of a `RowSets` that all of them number, if it is so."""
        if not many:
            return cls.none()
        if len(many) == 1:
            return many[0]
        firsts = np.cumsum([0, *(len(each.sets) if sets is None else 0 for each in many)])
        keys = {key: at for at, key in enumerate(dict.fromkeys(key for each in many for key in each.keys))}
        places = [np.array([keys[key] for key in each.keys])[each.payloads] for each in many]
        return cls(
            np.concatenate([each.numbers for each in many]),
            Cuts.joined([each.cuts for each in many]),
            Sets.joined([each.sets for each in many]) if sets is None else sets,
            np.concatenate([each.row_sets + at for each, at in zip(many, firsts.tolist(), strict=False)]),
            np.concatenate([each.lengths for each in many]),
            np.concatenate([each.data for each in many]),
            [*keys],
            np.concatenate(places),
        )

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def lo(self) -> npt.NDArray[np.int64]:
        """[P]: exponents up to this one are in the first class."""
        return self.sets.lo[self.row_sets]

    @property
    def num_classes(self) -> npt.NDArray[np.int64]:
        """[P], of each part."""
        return self.sets.nums[self.row_sets]

    @cached_property
    def tiles_at(self) -> npt.NDArray[np.int64]:
        """int64 [P + 1], where the tiles of each part begin, and the end."""
        return bounds_of(self.cuts.num_tiles)

    @cached_property
    def bytes_at(self) -> npt.NDArray[np.int64]:
        """int64 [P + 1], where the streams of each part begin in `data`, and the end."""
        starts, lengths = self.tiles_at[:-1], self.lengths
        if not len(self):
            return bounds_of(starts)
        # As many bits as they need: numpy adds up ten times as fast what it does not convert.
        is_narrow = int(lengths.max()) * int(self.cuts.num_tiles.max()) < 2**31
        return bounds_of(np.add.reduceat(lengths, starts, dtype=np.int32 if is_narrow else np.int64))

    def key(self, part: int) -> str:
        return self.keys[int(self.payloads[part])]

    def at(self, some: Array) -> "Coded":
        """Return some parts, by number, in that order; neighbours without a copy."""
        if len(some) == len(self) and (np.diff(some) == 1).all():
            return self
        if not len(some):
            return self.none()

        def picked(values: Array, bounds: Array) -> Array:
            found = [values[start:end] for start, end in runs_of(some, bounds)]
            return found[0] if len(found) == 1 else np.concatenate(found)

        return Coded(
            self.numbers[some],
            self.cuts.at(some),
            self.sets,
            self.row_sets[some],
            picked(self.lengths, self.tiles_at),
            picked(self.data, self.bytes_at) if len(self.data) else self.data,
            self.keys,
            self.payloads[some],
        )

    def of(self, numbers: Array) -> "Coded":
        """Return the parts of some tensors, ascending; `self.numbers` ascend too."""
        firsts, ends = (np.searchsorted(self.numbers, numbers, side) for side in ("left", "right"))
        return self.at(ramps(ends - firsts, firsts))

    def order(self) -> npt.NDArray[np.int64]:
        """Return the parts in the order of a file: by tensor, and by their first level, row and column."""
        starts = self.cuts.each(lambda kind: (kind.box.level, kind.box.row, kind.box.col)).reshape(-1, 3)
        keys = np.column_stack([self.numbers, starts])
        return np.arange(len(self)) if ascend(keys) else np.lexsort(keys.T[::-1])


def runs_of(some: Array, bounds: Array) -> list[tuple[int, int]]:
    """Return where what some parts have begins and ends: of parts that follow each other at once.

    `bounds` are int64 [P + 1], where that of each part begins, and the end.
    """
    cuts = np.flatnonzero(np.diff(some) != 1) + 1
    firsts, lasts = some[np.r_[0, cuts]], some[np.r_[cuts - 1, len(some) - 1]] + 1
    return [*zip(bounds[firsts].tolist(), bounds[lasts].tolist(), strict=True)]


def ascend(rows: Array) -> bool:
    """Whether rows ascend strictly, by their first column that differs."""
    step = np.diff(rows, axis=0)
    first = np.take_along_axis(step, np.argmax(step != 0, axis=1)[:, None], axis=1)
    return bool((first > 0).all())
