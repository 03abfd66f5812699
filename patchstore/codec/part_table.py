"""What a process has of a run's tensors, as columns: no step takes an object for each tensor."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from patchstore.bucket.records import Part, Schema
from patchstore.bucket.state_sums import Sums, SumsArray
from patchstore.codec.context import Tiling, is_coded, pays, tiling, tiling_of_part
from patchstore.codec.context.table import FEW_TILES, MANY_CHANGES
from patchstore.tensors import parts
from patchstore.tensors.columns import Group, signed_of
from patchstore.tensors.elements import sum_each

Array = npt.NDArray[Any]


class PartSums(NamedTuple):
    """Digest sums of some parts."""

    numbers: Array
    """int64 [num], which parts."""
    sums: SumsArray
    """[num, 2]."""

    @property
    def in_order(self) -> SumsArray:
        """[P, 2], of all parts by number; each is there."""
        ordered: SumsArray = self.sums[self.numbers.argsort()]
        return ordered


class PartTable:
    """What a process has of a run's tensors, as columns: parts by their number."""

    def __init__(self, given: Sequence[Part], owners: Sequence[int]) -> None:
        """Take parts, those of one tensor beside each other, and the place in the schema of each's tensor."""
        self.parts = tuple(given)
        self.owners = np.array(owners, dtype=np.int64)
        """int64 [P], never descending."""
        self.sizes = np.array([part.num_elements for part in given], dtype=np.int64)
        """int64 [P], elements of each."""
        self.is_whole = np.array([part.is_whole for part in given], dtype=np.bool_)
        self.numbers = {part.key: number for number, part in enumerate(given)}
        """By key."""
        keys = [(part.spec.shape, part.start, part.size) for part in given]
        ranks = {key: rank for rank, key in enumerate(sorted(set(keys)))}
        self.alike = np.array([ranks[key] for key in keys], dtype=np.int64)
        """int64 [P], a number for each way to be cut: parts that are cut alike are coded together."""
        self._lines = np.array([part.lines or (-1, 1, 0) for part in given], dtype=np.int64).reshape(-1, 3)
        self._is_coded = np.array([is_coded(part.spec.dtype) and part.num_elements > 0 for part in given])
        self._tilings = [tiling(part.spec.shape) if part.num_elements else None for part in given]
        """How whole tensors are cut into tiles."""
        self._num_tiles = np.array([0 if each is None else each.num_tiles for each in self._tilings])

    @classmethod
    def of_whole(cls, schema: Schema) -> Self:
        """Return the table of a process that has all tensors whole; their numbers are their places."""
        return cls([Part.whole(spec) for spec in schema.tensors], range(len(schema.tensors)))

    def positions(self, group: Group) -> Array:
        """Return where changes stand in the flattened tensors, int64 [num]."""
        if self.is_whole[group.numbers].all():
            return group.positions
        lines = self._lines[group.numbers]
        first, length, distance = np.repeat(lines, group.counts, axis=0).T
        line = group.positions // length
        found: Array = first + line * distance + (group.positions - line * length)
        ends = group.counts.cumsum()
        for place in np.flatnonzero(lines[:, 0] < 0):
            # Cut in three dimensions, which is rare.
            mine = slice(int(ends[place] - group.counts[place]), int(ends[place]))
            found[mine] = self.parts[group.numbers[place]].positions(group.positions[mine])
        return found

    def cuts(self, group: Group) -> list[Tiling | None]:
        """Return how each part is coded; None where that does not pay, or it cannot be.

        A reader goes through tiles side by side, one change after the other: where tiles are few and changes
        many, it would take longer than the bytes are worth.
        """
        pays = (group.counts <= MANY_CHANGES) | (self._num_tiles[group.numbers] >= FEW_TILES)
        pays &= self._is_coded[group.numbers]
        found = [
            self._tilings[number] if its else None
            for number, its in zip(group.numbers.tolist(), pays.tolist(), strict=True)
        ]
        for place in np.flatnonzero(~self.is_whole[group.numbers]):
            found[place] = cut_of_part(self.parts[group.numbers[place]], int(group.counts[place]))
        return found

    def are_dense(self, group: Group) -> Array:
        """Whether positions and values of the changes take more than a quarter of each part's own bytes."""
        widths = group.values.itemsize
        dense: Array = 4 * group.counts * (2 + widths) > self.sizes[group.numbers] * widths
        return dense

    def digested(self, numbers: Array, held: Array) -> PartSums:
        """Return the digest sums of parts, whose bits lie in `held` one after the other."""
        sizes = self.sizes[numbers]
        if self.is_whole[numbers].all():
            return PartSums(numbers, np.stack(sum_each(held, sizes), axis=1))
        ends = sizes.cumsum().tolist()
        each = zip(numbers.tolist(), [0, *ends], ends, strict=False)
        sums = [parts.digest(self.parts[n], signed_of(held[start:end])) for n, start, end in each]
        return PartSums(numbers, np.array(sums, dtype=np.uint64).reshape(-1, 2))

    def by_tensor(self, each: PartSums) -> PartSums:
        """Add up the sums of parts of one tensor; the result is by place in the schema, ascending."""
        places, inverse = np.unique(self.owners[each.numbers], return_inverse=True)
        sums = np.zeros((len(places), 2), dtype=np.uint64)
        np.add.at(sums, inverse, each.sums)
        return PartSums(places, sums)

    def listed(self, sums: Mapping[str, Sums]) -> PartSums:
        """Return sums that are given by the keys of parts."""
        numbers = np.array([self.numbers[key] for key in sums], dtype=np.int64)
        return PartSums(numbers, np.array(list(sums.values()), dtype=np.uint64).reshape(-1, 2))


def cut_of_part(part: Part, num_changed: int) -> Tiling | None:
    """Return how a part with this many changes is coded; None where that does not pay, or it cannot be."""
    box = part.box
    if box is None:
        return None
    cut = tiling_of_part(part.spec.shape, None if part.is_whole else box, num_changed)
    return cut if pays(part.spec, num_changed, cut) else None
