"""Tiles: the parts of a tensor that are coded apart, so that a rank reads only those of its own slices.

Every slice of a side in 2, 4, 8 or 16 equal parts is a union of tiles, where 16 divides the side.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_ELEMENTS = 65536
SLICES = 16

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a tensor, seen as levels x rows x cols, is cut into tiles.

    Tiles are numbered row-major over (level, row tile, column tile), elements of a tile row-major. The
    last tile of a slice is smaller where the tile's side does not divide the slice's.
    """

    levels: int
    rows: int
    cols: int
    slice_rows: int
    slice_cols: int
    tile_rows: int
    tile_cols: int

    @property
    def row_tiles(self) -> int:
        """Tiles along the rows of a level, through all slices."""
        return self.rows // self.slice_rows * -(-self.slice_rows // self.tile_rows)

    @property
    def col_tiles(self) -> int:
        """Tiles along the columns, through all slices."""
        return self.cols // self.slice_cols * -(-self.slice_cols // self.tile_cols)

    @property
    def num_tiles(self) -> int:
        return self.levels * self.row_tiles * self.col_tiles

    @property
    def num_elements(self) -> int:
        return self.levels * self.rows * self.cols

    @property
    def is_even(self) -> bool:
        """Whether all tiles have the same sides."""
        return self.slice_rows % self.tile_rows == 0 and self.slice_cols % self.tile_cols == 0

    def box(self, tile: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Return (level, first row, first column, number of rows, number of columns) of tiles."""
        band, col_tile = np.divmod(np.asarray(tile, dtype=np.int64), self.col_tiles)
        level, row_tile = np.divmod(band, self.row_tiles)
        row, num_rows = _side(row_tile, self.slice_rows, self.tile_rows)
        col, num_cols = _side(col_tile, self.slice_cols, self.tile_cols)
        return level, row, col, num_rows, num_cols

    def sizes(self) -> npt.NDArray[np.int64]:
        """Return the number of elements of each tile, int64 [num_tiles]."""
        num_rows = _side(np.arange(self.row_tiles), self.slice_rows, self.tile_rows)[1]
        num_cols = _side(np.arange(self.col_tiles), self.slice_cols, self.tile_cols)[1]
        sizes: npt.NDArray[np.int64] = np.tile(np.outer(num_rows, num_cols).reshape(-1), self.levels)
        return sizes

    def gather(self, flat: Array, tiles: Array) -> Array:
        """Return the elements of `tiles` (ascending), tile after tile, of a flattened tensor.

        The result may share memory with `flat`.
        """
        if self.is_even:
            elements: Array = self._by_tile(flat)[self._pick(tiles)].reshape(-1)
            return elements
        return np.concatenate([self._part(flat, *at).reshape(-1) for at in self._boxes(tiles)])

    def scatter(self, elements: Array, flat: Array, tiles: Array) -> None:
        """Put elements, in the order of `gather`, into a flattened tensor."""
        if self.is_even:
            pick = self._pick(tiles)
            across = (self.col_tiles,) if isinstance(pick, slice) else ()
            self._by_tile(flat)[pick] = elements.reshape(-1, *across, self.tile_rows, self.tile_cols)
            return
        start = 0
        for at in self._boxes(tiles):
            part = self._part(flat, *at)
            part[...] = elements[start : start + part.size].reshape(part.shape)
            start += part.size

    def _by_tile(self, flat: Array) -> Array:
        """A view [bands, tiles of a band, rows, columns]."""
        view: Array = flat.reshape(-1, self.tile_rows, self.col_tiles, self.tile_cols).transpose(0, 2, 1, 3)
        return view

    def _pick(self, tiles: Array) -> Any:
        """Index `tiles` in `_by_tile`: as a slice of bands where they are whole ones."""
        first, end = int(tiles[0]), int(tiles[-1]) + 1
        if end - first == len(tiles) and first % self.col_tiles == 0 and end % self.col_tiles == 0:
            return slice(first // self.col_tiles, end // self.col_tiles)
        return np.divmod(tiles, self.col_tiles)

    def _boxes(self, tiles: Array) -> list[tuple[int, ...]]:
        # Uneven tiles are large ones: one step of Python for each costs little.
        return list(zip(*(side.tolist() for side in self.box(tiles)), strict=True))

    def _part(self, flat: Array, level: int, row: int, col: int, num_rows: int, num_cols: int) -> Array:
        whole = flat.reshape(self.levels, self.rows, self.cols)
        return whole[level, row : row + num_rows, col : col + num_cols]


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors that lie one after the other in one array, and their tiles, numbered through."""

    runs: tuple[Tiling, ...]
    """Neighbours of one shape are cut together, as one tensor of more levels."""

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]]) -> "Layout":
        runs = []
        for shape, same in groupby(shapes):
            cut = tiling(shape)
            runs.append(replace(cut, levels=cut.levels * sum(1 for _ in same)))
        return cls(tuple(runs))

    def sizes(self) -> npt.NDArray[np.int64]:
        """Return the number of elements of each tile."""
        return np.concatenate([run.sizes() for run in self.runs])

    def gather(self, flat: Array, tiles: Array) -> Array:
        """Return the elements of `tiles` (ascending), tile after tile; may share memory with `flat`."""
        parts = [run.gather(part, mine) for run, part, mine, _ in self._parts(flat, tiles)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def scatter(self, elements: Array, flat: Array, tiles: Array) -> None:
        """Put elements, in the order of `gather`, where they belong."""
        sizes = [run.sizes() for run in self.runs]
        start = 0
        for run, part, mine, number in self._parts(flat, tiles):
            end = start + int(sizes[number][mine].sum())
            run.scatter(elements[start:end], part, mine)
            start = end

    def _parts(self, flat: Array, tiles: Array) -> Iterator[tuple[Tiling, Array, Array, int]]:
        first, start = 0, 0
        for number, run in enumerate(self.runs):
            last, end = first + run.num_tiles, start + run.num_elements
            among = np.searchsorted(tiles, (first, last))
            if among[1] > among[0]:
                yield run, flat[start:end], tiles[among[0] : among[1]] - first, number
            first, start = last, end


@lru_cache(maxsize=4096)
def _tiling(shape: tuple[int, ...]) -> Tiling:
    sides = [side for side in shape if side != 1]
    cols = sides[-1] if sides else 1
    rows = sides[-2] if len(sides) > 1 else 1
    slice_rows, slice_cols = (side // SLICES if side % SLICES == 0 else side for side in (rows, cols))
    tile_cols = _cut(slice_cols, MAX_ELEMENTS)
    return Tiling(
        levels=math.prod(sides[:-2]),
        rows=rows,
        cols=cols,
        slice_rows=slice_rows,
        slice_cols=slice_cols,
        tile_rows=_cut(slice_rows, MAX_ELEMENTS // tile_cols),
        tile_cols=tile_cols,
    )


def tiling(shape: Sequence[int]) -> Tiling:
    """Return how a tensor of this shape, which has elements, is cut."""
    return _tiling(tuple(shape))


def _cut(side: int, limit: int) -> int:
    """Return the side of tiles: a power of two that divides `side` if it is near the limit, or the limit."""
    if side <= limit:
        return side
    even = min(side & -side, 1 << (limit.bit_length() - 1))
    return even if 4 * even >= limit else limit


def _side(tile: Array, slice_side: int, tile_side: int) -> tuple[Array, Array]:
    """Return the first row (or column) of tiles along one side, and their number of rows."""
    number, chunk = np.divmod(tile, -(-slice_side // tile_side))
    start = chunk * tile_side
    return number * slice_side + start, np.minimum(tile_side, slice_side - start)
