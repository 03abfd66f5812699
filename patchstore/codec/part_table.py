"""What a process has of a run's tensors, as columns: no step takes an object for each tensor."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from patchstore.bucket.records import DTYPE_BYTES, Part, Schema
from patchstore.bucket.state_sums import Sums, SumsArray
from patchstore.codec.context import Cuts, is_coded, pays, tiling
from patchstore.codec.context.tiles import most_tiles, tilings_of_part
from patchstore.tensors import parts
from patchstore.tensors.bits import TOGETHER
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


class Together(NamedTuple):
    """Which parts are coded together, whatever changes of them."""

    kinds: Array
    """int64 [P]: parts of one kind are of one dtype, and all of them are large, or all small (an odd number
    and an even one). Rows of one kind do not depend on those of another."""
    groups: Array
    """int64 [P], ascending by kind, and in each by number: rows are chosen for the parts of one at a time.
    Large parts are alone, and small ones have about `TOGETHER` elements."""

    @classmethod
    def of(cls, dtypes: Array, sizes: Array) -> Self:
        """Take parts by number: a number for each dtype, and how many elements there are."""
        kinds = 2 * dtypes + (sizes > TOGETHER // 2)
        order = kinds.argsort(kind="stable")
        ends = sizes[order].cumsum()
        firsts = np.searchsorted(kinds[order], kinds[order])
        before = ends - sizes[order] - (ends - sizes[order])[firsts]
        is_first = np.diff(kinds[order], prepend=-1) != 0
        is_first |= (kinds[order] % 2 == 1) | (np.diff(before // TOGETHER, prepend=-1) != 0)
        groups = np.empty_like(kinds)
        groups[order] = is_first.cumsum() - 1
        return cls(kinds, groups)


class PartTable:
    """What a process has of a run's tensors, as columns: parts by their number."""

    def __init__(self, given: Sequence[Part], owners: Sequence[int]) -> None:
        """Take parts, those of one tensor beside each other, and the place in the schema of each's tensor."""
        self.parts = tuple(given)
        self.owners = np.array(owners, dtype=np.int64)
        """int64 [P], never descending."""
        self.dtypes = sorted({part.spec.dtype for part in given})
        codes = {dtype: code for code, dtype in enumerate(self.dtypes)}
        self.dtype = np.array([codes[part.spec.dtype] for part in given], dtype=np.int64)
        """int64 [P], which of `dtypes` each has."""
        self.widths = np.array([DTYPE_BYTES[dtype] for dtype in self.dtypes], dtype=np.int64)[self.dtype]
        """int64 [P], bytes of an element."""
        self.numbers = {part.key: number for number, part in enumerate(given)}
        """By key."""
        keys = [(part.spec.shape, part.start, part.size) for part in given]
        ways = dict(zip(keys, given, strict=True))
        ranks = {key: rank for rank, key in enumerate(sorted(ways))}
        self.alike = np.array([ranks[key] for key in keys], dtype=np.int64)
        """int64 [P], a number for each way to be cut: parts that are cut alike are coded together."""
        # Thousands of parts are cut alike, so all that follows from that is worked out once for each way.
        cut = [ways[key] for key in ranks]
        self.sizes = self._each([part.num_elements for part in cut])
        """int64 [P], elements of each."""
        self.whole_sizes = self._each([part.spec.num_elements for part in cut])
        """int64 [P], elements of each one's tensor."""
        self.is_whole = self._each([part.is_whole for part in cut]).astype(np.bool_)
        self.together = Together.of(self.dtype, self.sizes)
        self.lines = self._each([part.lines or (-1, 1, 0) for part in cut]).reshape(-1, 3)
        """int64 [P, 3], `Part.lines` of each; from -1 on where it has none."""
        starts = self._each([(0, 0, 0) if part.box is None else part.box_start for part in cut])
        level, row, col = starts.reshape(-1, 3).T
        self.ranks = np.lexsort((col, row, level, self.owners)).argsort()
        """int64 [P], the place of each in the order of a file's coded parts."""
        self.runs = self._each([-1 if part.run is None else part.run for part in cut])
        """int64 [P], where each begins in its flattened tensor; -1 where its elements do not follow each
        other."""
        are_coded = np.array([is_coded(dtype) for dtype in self.dtypes], dtype=np.bool_)
        self._is_coded = are_coded[self.dtype] & (self._each([part.box is not None for part in cut]) > 0)
        self._ways = _Ways(cut)

    def _each(self, of_ways: Sequence[object]) -> Array:
        """Return what each part has, int64 [P, ...], given what each way to be cut has."""
        return np.array(of_ways, dtype=np.int64)[self.alike]

    @classmethod
    def of_whole(cls, schema: Schema) -> Self:
        """Return the table of a process that has all tensors whole; their numbers are their places."""
        return cls([Part.whole(spec) for spec in schema.tensors], range(len(schema.tensors)))

    @property
    def largest_tile(self) -> int:
        """Elements of the largest tile of any part, at most."""
        return max((kind.largest for kind in self._ways.kinds), default=1)

    @property
    def is_scattered(self) -> npt.NDArray[np.bool_]:
        """Bool [P], whether each is cut in three dimensions, so that `positions` follow no one rule."""
        scattered: npt.NDArray[np.bool_] = self.lines[:, 0] < 0
        return scattered

    def positions(self, group: Group) -> Array:
        """Return where changes stand in the flattened tensors, int64 [num]."""
        if self.is_whole[group.numbers].all():
            return group.positions
        lines = self.lines[group.numbers]
        first, length, distance = np.repeat(lines, group.counts, axis=0).T
        line = group.positions // length
        found: Array = first + line * distance + (group.positions - line * length)
        ends = group.counts.cumsum()
        for place in np.flatnonzero(lines[:, 0] < 0):
            # Cut in three dimensions, which is rare.
            mine = slice(int(ends[place] - group.counts[place]), int(ends[place]))
            found[mine] = self.parts[group.numbers[place]].positions(group.positions[mine])
        return found

    def cuts(self, numbers: Array, counts: Array) -> tuple[Array, Cuts]:
        """Return which parts with so many changes are coded, bool [num], and how those are cut."""
        kind, num_tiles = self._ways.of(self.alike[numbers], counts)
        is_cut = self._is_coded[numbers] & pays(counts, num_tiles)
        return is_cut, Cuts(self._ways.kinds, kind[is_cut])

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


class _Ways:
    """How parts that are alike may be cut into tiles: those with more changes into more."""

    def __init__(self, given: Sequence[Part]) -> None:
        found = [
            [tiling(())]
            if part.box is None
            else tilings_of_part(part.spec.shape, None if part.is_whole else part.box)
            for part in given
        ]
        self.kinds = [each for some in found for each in some]
        self._num_tiles = np.array([each.num_tiles for each in self.kinds], dtype=np.int64)
        nums = np.array([len(some) for some in found], dtype=np.int64)
        self._firsts, self._lasts = nums.cumsum() - nums, nums.cumsum() - 1

    def of(self, alike: Array, counts: Array) -> tuple[Array, Array]:
        """Return which of `kinds` parts with so many changes have, and the tiles of each: int64 [num]."""
        kind, lasts = self._firsts[alike], self._lasts[alike]
        most = most_tiles(counts)
        while (is_next := (self._num_tiles[kind] > most) & (kind < lasts)).any():
            kind += is_next
        return kind, self._num_tiles[kind]
