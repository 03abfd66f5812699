"""Tiles: the pieces of a tensor that are coded apart, so that a rank reads only those of its own slices.

Every slice of a side in as many equal parts as the grid has is a union of tiles. A part of a tensor has the
tiles of the whole tensor's grid, cut by the part's edges: however a trainer shards a tensor, no tile reaches
over an edge of a server's slices.

Many small parts are coded together, tile after tile, as one large part is: numpy's calls then cost
nothing beside the elements. What differs from part to part (classes, rows) is an array then, and of
one part an array of one value, with which numpy is as fast as with a number.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from patchstore.bucket.records import Box, view_of
from patchstore.codec.context.bits import Array, bounds_of

MAX_ELEMENTS = 65536
SLICES = 16
FEWEST_SLICES = 8
"""A publisher never chooses fewer: servers of up to so many ranks decode every part in place."""
TILE_BYTES = 1.1
"""What a tile costs: its length in the table, and rounding to bytes."""
CHANGE_BYTES = 0.87
"""What a change costs, by which tiles are chosen."""
TILE_SHARE = 0.015
"""How much of a part's bytes its tiles may cost."""
Tiles = npt.NDArray[np.int64] | None
"""Numbers of some of a part's tiles, ascending; None for all."""


@dataclass(frozen=True, slots=True)
class Side:
    """How the rows or the columns of a part are cut."""

    length: int
    """Of the whole tensor; so are the next two."""
    of_slice: int
    of_tile: int
    first: int
    """Of the part."""
    size: int

    @property
    def slices(self) -> int:
        return self.length // self.of_slice

    def tile_of(self, at: Any) -> Any:
        """Return which tile of the whole side has a row (or column), or each of an array of them."""
        number, within = divmod(at, self.of_slice)
        return number * -(-self.of_slice // self.of_tile) + within // self.of_tile

    @property
    def first_tile(self) -> int:
        return int(self.tile_of(self.first))

    @property
    def num_tiles(self) -> int:
        return int(self.tile_of(self.first + self.size - 1)) - self.first_tile + 1

    def ranges(self, tile: Array) -> tuple[Array, Array]:
        """Return the first row (or column) of tiles of the part, in the tensor, and how many they have."""
        number, nth = np.divmod(self.first_tile + tile, -(-self.of_slice // self.of_tile))
        start = number * self.of_slice + nth * self.of_tile
        end = np.minimum(start + self.of_tile, (number + 1) * self.of_slice)
        start = np.maximum(start, self.first)
        return start, np.minimum(end, self.first + self.size) - start

    def touched(self, first: int, size: int) -> tuple[int, int] | None:
        """Return the first tile of the part that has any of some rows (or columns), and how many have."""
        first, end = max(first, self.first), min(first + size, self.first + self.size)
        if first >= end:
            return None
        tile = self.tile_of(first)
        return tile - self.first_tile, self.tile_of(end - 1) - tile + 1

    def is_cut(self, first: int, size: int) -> bool:
        """Whether a tile of the part has some of these rows (or columns), and others too."""
        end, last = first + size, self.first + self.size
        if first >= last or end <= self.first:
            return False
        inside = [at for at in (first, end) if self.first < at < last]
        return any(at % self.of_slice % self.of_tile for at in inside)

    def even(self) -> int | None:
        """Return the side of the tiles if all have the same; else None."""
        step = self.size // self.num_tiles
        # Tiles in between are whole, unless a slice ends with a shorter one.
        sizes = self.ranges(np.arange(self.num_tiles))[1]
        return step if bool((sizes == step).all()) else None


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a part of a tensor, seen as levels x rows x cols, is cut into tiles.

    Tiles are numbered row-major over (level, row tile, column tile), elements of a tile row-major. Elements
    of the part alone lie in memory, row-major.
    """

    levels: int
    """Of the part."""
    level: int
    """The first of them."""
    whole_levels: int
    """Of the whole tensor."""
    down: Side
    across: Side

    @property
    def rows(self) -> int:
        """Of a level of the whole tensor."""
        return self.down.length

    @property
    def cols(self) -> int:
        """Of the whole tensor."""
        return self.across.length

    @cached_property
    def box(self) -> Box:
        down, across = self.down, self.across
        return Box(self.level, self.levels, down.first, down.size, across.first, across.size)

    @cached_property
    def row_tiles(self) -> int:
        """Tiles along the rows of a level of the part."""
        return self.down.num_tiles

    @cached_property
    def col_tiles(self) -> int:
        """Tiles along the columns of the part."""
        return self.across.num_tiles

    @cached_property
    def num_tiles(self) -> int:
        return self.levels * self.row_tiles * self.col_tiles

    @cached_property
    def num_elements(self) -> int:
        return self.levels * self.down.size * self.across.size

    @property
    def largest(self) -> int:
        """Elements of its largest tile, at most."""
        return min(self.down.of_tile, self.down.size) * min(self.across.of_tile, self.across.size)

    @cached_property
    def even(self) -> tuple[int, int] | None:
        """Rows and columns of the tiles, if all have the same."""
        rows, cols = self.down.even(), self.across.even()
        return None if rows is None or cols is None else (rows, cols)

    def places(self, tile: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Return (level, first row, first column, number of rows, number of columns) of tiles.

        They count in the whole tensor.
        """
        band, col_tile = np.divmod(np.asarray(tile, dtype=np.int64), self.col_tiles)
        level, row_tile = np.divmod(band, self.row_tiles)
        row, num_rows = self.down.ranges(row_tile)
        col, num_cols = self.across.ranges(col_tile)
        return self.level + level, row, col, num_rows, num_cols

    def sizes(self, tiles: Array) -> npt.NDArray[np.int64]:
        """Return the number of elements of each of `tiles`, int64."""
        if self.even is not None:
            return np.full(len(tiles), self.even[0] * self.even[1])
        *_, num_rows, num_cols = self.places(tiles)
        sizes: npt.NDArray[np.int64] = num_rows * num_cols
        return sizes

    def tiles_of(self, local: Array) -> npt.NDArray[np.int64]:
        """Return which tiles have elements of the flattened part, int64."""
        box = self.box
        line, col = np.divmod(local, box.cols)
        level, row = np.divmod(line, box.rows)
        row_tile = self.down.tile_of(box.row + row) - self.down.first_tile
        col_tile = self.across.tile_of(box.col + col) - self.across.first_tile
        found: npt.NDArray[np.int64] = (level * self.row_tiles + row_tile) * self.col_tiles + col_tile
        return found

    @cached_property
    def first(self) -> int | None:
        """Where the part begins in the flattened tensor if its elements follow each other there."""
        box = self.box
        if box.cols == self.cols and (box.rows == self.rows or box.levels == 1):
            return (box.level * self.rows + box.row) * self.cols
        return None

    def positions(self, local: Array) -> Array:
        """Return where elements of the flattened part stand in the flattened tensor, int64."""
        if self.first is not None:
            return local + self.first
        box = self.box
        line, col = np.divmod(local, box.cols)
        level, row = np.divmod(line, box.rows)
        found: Array = ((box.level + level) * self.rows + box.row + row) * self.cols + box.col + col
        return found

    def of_whole(self, flat: Array) -> Array:
        """Return the part's elements of a flattened tensor, flat; where they lie together, its memory."""
        box = self.box
        whole = flat.reshape(-1, self.rows, self.cols)
        return whole[
            box.level : box.level + box.levels, box.row : box.row + box.rows, box.col : box.col + box.cols
        ].reshape(-1)

    def ranges_within(self, box: Box) -> tuple[int, int, int, int, int, int] | None:
        """Return the first level, tile row and tile column, in the part, that have elements of a box of the
        tensor, and how many; None if none has.
        """
        first = max(box.level, self.level)
        levels = min(box.level + box.levels, self.level + self.levels) - first
        down, across = self.down.touched(box.row, box.rows), self.across.touched(box.col, box.cols)
        if levels <= 0 or down is None or across is None:
            return None
        return first - self.level, down[0], across[0], levels, down[1], across[1]

    def is_cut(self, box: Box) -> bool:
        """Whether a tile has elements of a box of the tensor, and others too."""
        if self.ranges_within(box) is None:
            return False
        return self.down.is_cut(box.row, box.rows) or self.across.is_cut(box.col, box.cols)

    def within(self, box: Box) -> npt.NDArray[np.int64]:
        """Return the tiles that have elements of a box of the tensor, ascending."""
        found = self.ranges_within(box)
        if found is None:
            return np.zeros(0, dtype=np.int64)
        levels, rows, cols = (np.arange(found[k], found[k] + found[k + 3]) for k in range(3))
        numbers = (levels[:, None, None] * self.row_tiles + rows[:, None]) * self.col_tiles + cols
        flat: npt.NDArray[np.int64] = numbers.reshape(-1)
        return flat

    def gather(self, flat: Array, tiles: Array) -> Array:
        """Return the elements of `tiles` (ascending), tile after tile, of a flattened part.

        The result may share memory with `flat`.
        """
        if self.even is not None:
            elements: Array = self._by_tile(flat)[self._pick(tiles)].reshape(-1)
            return elements
        return np.concatenate([self._part(flat, *at).reshape(-1) for at in self._each(tiles)])

    def scatter(self, elements: Array, flat: Array, tiles: Array) -> None:
        """Put elements, in the order of `gather`, into a flattened part."""
        if self.even is not None:
            pick = self._pick(tiles)
            across = (self.col_tiles,) if isinstance(pick, slice) else ()
            self._by_tile(flat)[pick] = elements.reshape(-1, *across, *self.even)
            return
        start = 0
        for at in self._each(tiles):
            part = self._part(flat, *at)
            part[...] = elements[start : start + part.size].reshape(part.shape)
            start += part.size

    def _by_tile(self, flat: Array) -> Array:
        """A view [bands, tiles of a band, rows, columns]."""
        assert self.even is not None
        rows, cols = self.even
        view: Array = flat.reshape(-1, rows, self.col_tiles, cols).transpose(0, 2, 1, 3)
        return view

    def _pick(self, tiles: Array) -> Any:
        """Index `tiles` in `_by_tile`: as a slice of bands where they are whole ones."""
        first, end = int(tiles[0]), int(tiles[-1]) + 1
        if end - first == len(tiles) and first % self.col_tiles == 0 and end % self.col_tiles == 0:
            return slice(first // self.col_tiles, end // self.col_tiles)
        return np.divmod(tiles, self.col_tiles)

    def _each(self, tiles: Array) -> list[tuple[int, ...]]:
        # Uneven tiles are large ones: one step of Python for each costs little.
        return list(zip(*(side.tolist() for side in self.places(tiles)), strict=True))

    def _part(self, flat: Array, level: int, row: int, col: int, num_rows: int, num_cols: int) -> Array:
        box = self.box
        row, col = row - box.row, col - box.col
        held = flat.reshape(box.levels, box.rows, box.cols)
        return held[level - box.level, row : row + num_rows, col : col + num_cols]


class Cuts:
    """How parts are cut into tiles, as columns: a model has few ways, and each is there once."""

    def __init__(self, kinds: Sequence[Tiling], kind: Array) -> None:
        self.kinds = kinds
        self.kind = kind
        """int64 [P], which of `kinds` each part has."""

    @classmethod
    def of(cls, tilings: Iterable[Tiling]) -> "Cuts":
        """Take how each part is cut."""
        known: dict[Tiling, int] = {}
        kind = np.array([known.setdefault(each, len(known)) for each in tilings], dtype=np.int64)
        return cls([*known], kind)

    @classmethod
    def joined(cls, many: Sequence["Cuts"]) -> "Cuts":
        if len(many) == 1:
            return many[0]
        kinds = cls.of(kind for each in many for kind in each.kinds)
        firsts = np.cumsum([0, *(len(each.kinds) for each in many)])
        places = [each.kind + first for each, first in zip(many, firsts.tolist(), strict=False)]
        return cls(kinds.kinds, kinds.kind[np.concatenate(places)])

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, part: int) -> Tiling:
        return self.kinds[int(self.kind[part])]

    def __iter__(self) -> Iterator[Tiling]:
        return (self.kinds[kind] for kind in self.kind.tolist())

    def at(self, some: Array) -> "Cuts":
        """Return how some parts are cut, by number."""
        return Cuts(self.kinds, self.kind[some])

    def each(self, what: Callable[[Tiling], Any]) -> Array:
        """Return a number, or a row of them, of each part's tiling: int64 [P, ..]."""
        # Of none, there would be no row to index.
        if not len(self.kind):
            return np.zeros(0, dtype=np.int64)
        found: Array = np.array([what(kind) for kind in self.kinds], dtype=np.int64)[self.kind]
        return found

    @cached_property
    def num_tiles(self) -> npt.NDArray[np.int64]:
        """[P], of each part."""
        return self.each(lambda kind: kind.num_tiles)

    @cached_property
    def num_elements(self) -> npt.NDArray[np.int64]:
        """[P], of each part."""
        return self.each(lambda kind: kind.num_elements)

    def positions(self, local: Array, counts: Array) -> Array:
        """Return where elements stand in the flattened tensors, int64.

        `local`: places in the flattened parts, `counts` of each part, one part after the other.
        """
        firsts = self.each(lambda kind: -1 if kind.first is None else kind.first)
        found: Array = local + np.repeat(firsts, counts)
        ends = counts.cumsum()
        for part in np.flatnonzero((firsts < 0) & (counts > 0)).tolist():
            mine = slice(int(ends[part] - counts[part]), int(ends[part]))
            found[mine] = self[part].positions(local[mine])
        return found


@dataclass(frozen=True, slots=True)
class Layout:
    """Parts that lie one after the other in one array, and their tiles, numbered through."""

    runs: tuple[Tiling, ...]
    """Neighbours that are cut alike are cut together, as one part of more levels."""

    @classmethod
    def of(cls, cuts: Cuts) -> "Layout":
        sides: dict[tuple[Side, Side], int] = {}
        alike = cuts.each(lambda kind: sides.setdefault((kind.down, kind.across), len(sides)))
        firsts = np.flatnonzero(np.diff(alike, prepend=-1))
        levels = np.add.reduceat(cuts.each(lambda kind: kind.levels), firsts).tolist()
        found = []
        for first, num in zip(firsts.tolist(), levels, strict=True):
            cut = cuts[first]
            found.append(Tiling(levels=num, level=0, whole_levels=num, down=cut.down, across=cut.across))
        return cls(tuple(found))

    @property
    def num_tiles(self) -> int:
        return sum(run.num_tiles for run in self.runs)

    def sizes(self, tiles: Array) -> npt.NDArray[np.int64]:
        """Return the number of elements of each of `tiles` (ascending)."""
        bounds = np.searchsorted(tiles, bounds_of(np.array([run.num_tiles for run in self.runs])))
        found, first = [np.zeros(0, dtype=np.int64)], 0
        for run, (begin, end) in zip(self.runs, pairwise(bounds.tolist()), strict=True):
            found.append(run.sizes(tiles[begin:end] - first))
            first += run.num_tiles
        return np.concatenate(found)

    def tiles_of(self, at: Array) -> npt.NDArray[np.int64]:
        """Return which tiles have elements (ascending) of the array."""
        bounds = bounds_of(np.array([run.num_elements for run in self.runs])).tolist()
        found, first = [np.zeros(0, dtype=np.int64)], 0
        for run, (begin, end) in zip(self.runs, pairwise(bounds), strict=True):
            inside = slice(*np.searchsorted(at, (begin, end)))
            found.append(run.tiles_of(at[inside] - begin) + first)
            first += run.num_tiles
        return np.concatenate(found)

    def gather(self, flat: Array, tiles: Array) -> Array:
        """Return the elements of `tiles` (ascending), tile after tile; may share memory with `flat`."""
        parts = [run.gather(part, mine) for run, part, mine in self._parts(flat, tiles)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def scatter(self, elements: Array, flat: Array, tiles: Array) -> None:
        """Put elements, in the order of `gather`, where they belong."""
        start = 0
        for run, part, mine in self._parts(flat, tiles):
            end = start + int(run.sizes(mine).sum())
            run.scatter(elements[start:end], part, mine)
            start = end

    def _parts(self, flat: Array, tiles: Array) -> Iterator[tuple[Tiling, Array, Array]]:
        first, start = 0, 0
        for run in self.runs:
            last, end = first + run.num_tiles, start + run.num_elements
            among = np.searchsorted(tiles, (first, last))
            if among[1] > among[0]:
                yield run, flat[start:end], tiles[among[0] : among[1]] - first
            first, start = last, end


@lru_cache(maxsize=65536)
def _tiling(shape: tuple[int, ...], box: Box | None, row_slices: int, col_slices: int) -> Tiling:
    levels, rows, cols = view_of(shape)
    if box is None:
        box = Box(0, levels, 0, rows, 0, cols)
    slice_rows, slice_cols = rows // row_slices, cols // col_slices
    tile_cols = _cut(slice_cols, MAX_ELEMENTS)
    return Tiling(
        levels=box.levels,
        level=box.level,
        whole_levels=levels,
        down=Side(rows, slice_rows, _cut(slice_rows, MAX_ELEMENTS // tile_cols), box.row, box.rows),
        across=Side(cols, slice_cols, tile_cols, box.col, box.cols),
    )


@lru_cache(maxsize=4096)
def slices_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return in how many slices the rows and the columns of a tensor are usually cut."""
    _, rows, cols = view_of(shape)
    return tuple(SLICES if side % SLICES == 0 else 1 for side in (rows, cols))  # type: ignore[return-value]


def tiling(shape: Sequence[int], box: Box | None = None, slices: tuple[int, int] | None = None) -> Tiling:
    """Return how a part (by default all) of a tensor with elements is cut, in slices of rows and columns."""
    shape = tuple(shape)
    return _tiling(shape, box, *(slices_of(shape) if slices is None else slices))


def tilings_of_part(shape: Sequence[int], box: Box | None) -> list[Tiling]:
    """Return how a publisher may cut a part, from the most tiles to the fewest: see `most_tiles`.

    A whole tensor (no `box`) always has the usual slices.
    """
    found = [tiling(shape, box)]
    slices = slices_of(tuple(shape))
    while box is not None:
        fewer = [
            tiling(shape, box, each)
            for each in ((slices[0], slices[1] // 2), (slices[0] // 2, slices[1]))
            if min(each) >= 1
            and all(new == old or new >= FEWEST_SLICES for new, old in zip(each, slices, strict=True))
        ]
        # The side of which the part has more slices; of the columns, where it has as many of both.
        best = min(fewer, key=lambda each: each.num_tiles, default=found[-1])
        if best.num_tiles >= found[-1].num_tiles:
            break
        found.append(best)
        slices = best.down.slices, best.across.slices
    return found


def most_tiles(num_changed: Array) -> Array:
    """Return how many tiles parts with so many changes have at most, if they can be cut in as few.

    A publisher cuts a part in fewer slices where tiles would cost much.
    """
    return np.maximum(1.0, TILE_SHARE * CHANGE_BYTES / TILE_BYTES * num_changed)


def _cut(side: int, limit: int) -> int:
    """Return the side of tiles: a power of two that divides `side` if it is near the limit, or the limit."""
    if side <= limit:
        return side
    even = min(side & -side, 1 << (limit.bit_length() - 1))
    return even if 4 * even >= limit else limit


Chosen = Callable[[Tiling], Tiles]
"""Says which tiles of a part are meant."""


@dataclass(frozen=True, slots=True)
class TileSet:
    """Some tiles of parts of one dtype, their elements numbered tile after tile."""

    owner: npt.NDArray[np.int64]
    """[tiles], the part of each."""
    sizes: npt.NDArray[np.int64]
    """[tiles]"""

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """[tiles + 1], where each begins, and the end."""
        return bounds_of(self.sizes)

    def of_elements(self, values: Array) -> Array:
        """Return for each element the value (uint8) of its part; [1] where there is one part."""
        return values if len(values) == 1 else np.repeat(values[self.owner], self.sizes)


def split(layout: Layout, tiles: Array, num_elements: int) -> Iterator[Array]:
    """Cut ascending tiles into groups of about so many elements."""
    if len(layout.runs) > 1:
        ends = layout.sizes(tiles).cumsum()
        yield from np.split(tiles, np.flatnonzero(np.diff(ends // num_elements)) + 1) if len(tiles) else ()
        return
    cut = layout.runs[0]
    # Whole bands are gathered fastest.
    num = max(1, num_elements // (cut.largest * cut.col_tiles)) * cut.col_tiles
    for start in range(0, len(tiles), num):
        yield tiles[start : start + num]
