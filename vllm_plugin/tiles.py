"""Which tiles of a coded tensor a rank holds, and where: see `patchstore.encodings.context`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from patchstore.encodings.context import Tiling, tiling
from patchstore.format.records import TensorSpec
from vllm_plugin.composition import boxed
from vllm_plugin.regions import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Whole tiles of one tensor that are in one place of memory."""

    levels: range
    row_tiles: range
    col_tiles: range
    index: int
    """Of `WeightMap.runtimes`."""
    origin: int
    """Position in that storage at which the tensor's first element would be; may be outside of it."""
    strides: tuple[int, int, int]
    """In elements of the storage, from one level, row and column of the tensor to the next."""

    def numbers(self, tiles: Tiling) -> npt.NDArray[np.int64]:
        """Number its tiles, ascending."""
        levels, rows, cols = (np.array(each) for each in (self.levels, self.row_tiles, self.col_tiles))
        found = (levels[:, None, None] * tiles.row_tiles + rows[:, None]) * tiles.col_tiles + cols
        numbers: npt.NDArray[np.int64] = found.reshape(-1)
        return numbers


def boxes(spec: TensorSpec, regions: Sequence[tuple[int, Region]]) -> list[Box] | None:
    """Say which tiles the regions of a tensor are made of; each tile is in one box.

    Returns:
        None where a region cuts through a tile: this rank cannot decode the tensor from what it holds.
    """
    tiles = tiling(spec.shape)
    shape = (tiles.levels, tiles.rows, tiles.cols)
    found: dict[tuple[range, range, range], Box] = {}
    for index, region in regions:
        parts = boxed(Region(source=region.target, target=region.source), shape)
        if parts is None:
            return None
        for part in parts:
            box = _box(tiles, shape, index, part)
            if box is None:
                return None
            # Tied weights, and heads that are held twice: one of them will do.
            found.setdefault((box.levels, box.row_tiles, box.col_tiles), box)
    kept = list(found.values())
    num_tiles = sum(len(each.levels) * len(each.row_tiles) * len(each.col_tiles) for each in kept)
    numbers = [each.numbers(tiles) for each in kept]
    if numbers and len(np.unique(np.concatenate(numbers))) < num_tiles:
        return None
    return kept


def _box(tiles: Tiling, shape: tuple[int, int, int], index: int, part: Region) -> Box | None:
    """Say which tiles a box of elements is made of; None where it cuts through one."""
    offset, firsts = part.target.offset, []
    for n in (shape[1] * shape[2], shape[2], 1):
        firsts.append(offset // n)
        offset %= n
    level, row, col = firsts
    levels, rows, cols = part.target.shape
    row_tiles = _tiles(row, row + rows, tiles.rows, tiles.slice_rows, tiles.tile_rows)
    col_tiles = _tiles(col, col + cols, tiles.cols, tiles.slice_cols, tiles.tile_cols)
    if row_tiles is None or col_tiles is None:
        return None
    strides = part.source.strides
    origin = part.source.offset - level * strides[0] - row * strides[1] - col * strides[2]
    return Box(
        levels=range(level, level + levels),
        row_tiles=row_tiles,
        col_tiles=col_tiles,
        index=index,
        origin=origin,
        strides=(strides[0], strides[1], strides[2]),
    )


def _tiles(first: int, end: int, size: int, slice_size: int, tile_size: int) -> range | None:
    """Number the tiles from one position along a side to another; None where either is within a tile.

    Example: a side of 100 in slices of 50, and those in tiles of 20: 40 to 70 are tiles 2 and 3.
    """
    edges = []
    for at in (first, end):
        whole, within = divmod(at, slice_size)
        if at != size and within % tile_size:
            return None
        edges.append(whole * -(-slice_size // tile_size) + within // tile_size)
    return range(edges[0], edges[1])
