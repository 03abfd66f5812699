"""Which elements of a coded tensor a rank holds, and where: see `patchstore.encodings.context`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from patchstore.encodings.context import Tiling, tiling
from patchstore.format import records
from patchstore.format.records import TensorSpec
from vllm_plugin.composition import boxed
from vllm_plugin.regions import Region

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Elements of one tensor that are in one place of memory."""

    elements: records.Box
    index: int
    """Of `WeightMap.runtimes`."""
    origin: int
    """Position in that storage at which the tensor's first element would be; may be outside of it."""
    strides: tuple[int, int, int]
    """In elements of the storage, from one level, row and column of the tensor to the next."""


def boxes(spec: TensorSpec, regions: Sequence[tuple[int, Region]]) -> list[Box] | None:
    """Say of which boxes the regions of a tensor are made; each tile of the tensor is in one at most.

    Returns:
        None where a region cuts through a tile of the whole tensor: this rank cannot decode the tensor from
        what it holds.
    """
    tiles = tiling(spec.shape)
    shape = (tiles.levels, tiles.rows, tiles.cols)
    found: dict[records.Box, Box] = {}
    for index, region in regions:
        parts = boxed(Region(source=region.target, target=region.source), shape)
        if parts is None:
            return None
        for part in parts:
            box = _box(shape, index, part)
            if tiles.is_cut(box.elements):
                return None
            # Tied weights, and heads that are held twice: one of them will do.
            found.setdefault(box.elements, box)
    kept = list(found.values())
    for number, box in enumerate(kept):
        if any(box.elements.overlaps(other.elements) for other in kept[:number]):
            return None
    return kept


def numbers(tiles: Tiling, held: Sequence[Box]) -> npt.NDArray[np.int64]:
    """Number the tiles of a part that have elements in any of the boxes, ascending."""
    found = [tiles.within(box.elements) for box in held]
    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *found]))


def are_cut(tiles: Tiling, held: Sequence[Box]) -> bool:
    """Whether a tile of a part has elements in a box, and others too."""
    return any(tiles.is_cut(box.elements) for box in held)


def tiles_within(geometry: Array, boxes: Array) -> tuple[Array, Array]:
    """Return the tiles of parts that have elements of a box of the tensor each; see `Tiling.ranges_within`.

    Args:
        geometry: int64 [num, 16], of parts, as `context_tables.geometry` returns it.
        boxes: int64 [num, 6]: first level, levels, first row, rows, first column and columns, in the tensor.

    Returns: int64 [num, 6], first level, tile row and tile column, in the part, and how many of them; and
        bool [num], false where the box has nothing of the part, and what is said of it has no meaning.
    """
    first = np.maximum(boxes[:, 0], geometry[:, 7])
    levels = np.minimum(boxes[:, 0] + boxes[:, 1], geometry[:, 7] + geometry[:, 0]) - first
    row, rows = _tiles_along(boxes[:, 2:4], geometry[:, 8:10], geometry[:, [3, 5, 12]])
    col, cols = _tiles_along(boxes[:, 4:6], geometry[:, 10:12], geometry[:, [4, 6, 14]])
    found = np.stack([first - geometry[:, 7], row, col, levels, rows, cols], axis=1)
    is_held = np.asarray((found[:, 3:] > 0).all(axis=1))
    return found, is_held


def _tiles_along(box: Array, part: Array, cut: Array) -> tuple[Array, Array]:
    """Return the first tile of parts that has rows (or columns) of boxes, and how many have; none or less
    where no tile has.

    Args:
        box: int64 [num, 2]: the first row of a box, and how many it has.
        part: int64 [num, 2], the same of the part.
        cut: int64 [num, 3]: rows of a slice and of a tile, and the first tile of the part in the tensor.
    """
    of_slice, of_tile, first_tile = cut.T
    tiles_of_slice = -(-of_slice // of_tile)

    def tile_of(at: Array) -> Array:
        tile: Array = at // of_slice * tiles_of_slice + at % of_slice // of_tile
        return tile

    first = np.maximum(box[:, 0], part[:, 0])
    end = np.minimum(box.sum(axis=1), part.sum(axis=1))
    tile = tile_of(first)
    return tile - first_tile, np.where(first < end, tile_of(end - 1) - tile + 1, 0)


def _box(shape: tuple[int, int, int], index: int, part: Region) -> Box:
    offset, firsts = part.target.offset, []
    for n in (shape[1] * shape[2], shape[2], 1):
        firsts.append(offset // n)
        offset %= n
    level, row, col = firsts
    levels, rows, cols = part.target.shape
    strides = part.source.strides
    return Box(
        elements=records.Box(level, levels, row, rows, col, cols),
        index=index,
        origin=part.source.offset - level * strides[0] - row * strides[1] - col * strides[2],
        strides=(strides[0], strides[1], strides[2]),
    )
