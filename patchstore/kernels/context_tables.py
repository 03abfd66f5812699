"""Tables of coded parts of tensors and of where they lie, and what kernels read from them.

A job is a tile in a segment. Segments are boxes of whole tiles of one part in one place of memory, so a
rank has jobs for what it holds alone, and elements stay where they are, whatever their strides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from patchstore.encodings.context.tiles import Tiling

Array = npt.NDArray[Any]

FORMATS = {"BF16": (2, 7, 0xFF), "F16": (2, 10, 0x1F), "F8_E4M3": (1, 3, 0xF), "F8_E5M2": (1, 2, 0x1F)}
"""Bytes of an element, and by how much it is shifted and with what masked for its exponent."""
MAX_CLASSES = 16
BLOCK = 64
"""Elements for which classes are counted together."""
MAX_POSITION = 2**31 - 1


class Tensor(IntEnum):
    """Columns of the table of tensors."""

    ROWS = 0
    """Of elements, in a level; then columns, those of a slice, those of a tile, and tiles along a slice."""
    COLS = 1
    SLICE_ROWS = 2
    SLICE_COLS = 3
    TILE_ROWS = 4
    TILE_COLS = 5
    ROW_TILES = 6
    COL_TILES = 7
    SHIFT = 8
    MASK = 9
    WIDTH = 10
    """Bytes of an element."""
    LOWEST = 11
    CLASSES = 12
    FIRST_ROW = 13
    """Of its classes, among the rows of all."""
    FIRST_TILE = 14
    LEVEL = 15
    """The first of the part; then its first row, its rows, its first column, and its columns."""
    ROW = 16
    PART_ROWS = 17
    COL = 18
    PART_COLS = 19
    FIRST_ROW_TILE = 20
    """The first tile of the part along the rows of the whole tensor, and how many it has; then along the
    columns."""
    PART_ROW_TILES = 21
    FIRST_COL_TILE = 22
    PART_COL_TILES = 23


class Segment(IntEnum):
    """Columns of the table of segments."""

    TENSOR = 0
    FIRST_JOB = 1
    LEVEL = 2
    """Of the first tile, in the part; then its tile row and its tile column there, and tiles along them."""
    ROW = 3
    COL = 4
    NUM_ROWS = 5
    NUM_COLS = 6
    ADDRESS = 7
    """Where the tensor's first element is, or would be."""
    LEVEL_STRIDE = 8
    """In elements, as the others."""
    ROW_STRIDE = 9
    COL_STRIDE = 10


_TENSOR = tl.constexpr(len(Tensor))
_SEGMENT = tl.constexpr(len(Segment))
_ROWS = tl.constexpr(int(Tensor.ROWS))
_COLS = tl.constexpr(int(Tensor.COLS))
_SLICE_ROWS = tl.constexpr(int(Tensor.SLICE_ROWS))
_SLICE_COLS = tl.constexpr(int(Tensor.SLICE_COLS))
_TILE_ROWS = tl.constexpr(int(Tensor.TILE_ROWS))
_TILE_COLS = tl.constexpr(int(Tensor.TILE_COLS))
_ROW_TILES = tl.constexpr(int(Tensor.ROW_TILES))
_COL_TILES = tl.constexpr(int(Tensor.COL_TILES))
_PART_LEVEL = tl.constexpr(int(Tensor.LEVEL))
_PART_ROW = tl.constexpr(int(Tensor.ROW))
_PART_ROWS = tl.constexpr(int(Tensor.PART_ROWS))
_PART_COL = tl.constexpr(int(Tensor.COL))
_PART_COLS = tl.constexpr(int(Tensor.PART_COLS))
_FIRST_ROW_TILE = tl.constexpr(int(Tensor.FIRST_ROW_TILE))
_FIRST_COL_TILE = tl.constexpr(int(Tensor.FIRST_COL_TILE))
_FIRST_JOB = tl.constexpr(int(Segment.FIRST_JOB))
_LEVEL = tl.constexpr(int(Segment.LEVEL))
_ROW = tl.constexpr(int(Segment.ROW))
_COL = tl.constexpr(int(Segment.COL))
_NUM_ROWS = tl.constexpr(int(Segment.NUM_ROWS))
_NUM_COLS = tl.constexpr(int(Segment.NUM_COLS))
_ADDRESS = tl.constexpr(int(Segment.ADDRESS))
_LEVEL_STRIDE = tl.constexpr(int(Segment.LEVEL_STRIDE))
_ROW_STRIDE = tl.constexpr(int(Segment.ROW_STRIDE))
_COL_STRIDE = tl.constexpr(int(Segment.COL_STRIDE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Coded parts of tensors."""

    table: torch.Tensor
    """int64 [num_tensors, len(Tensor)], on the device."""
    host: Array
    """The same."""
    num_tiles: Array
    """int64 [num_tensors]."""
    tiles: Array
    """int64 [num_tensors, 3]: tiles of the part along levels, rows and columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Where what is held of coded tensors lies. All tables but `first_jobs` are on the device."""

    table: torch.Tensor
    """int64 [num_segments, len(Segment)]."""
    first_jobs: Array
    """int64 [num_segments + 1]."""
    owners: torch.Tensor
    """int32 [num_jobs], the segment of each."""
    tiles: torch.Tensor
    """int32 [num_jobs], their numbers among the tiles of all tensors."""
    kinds: tuple[tuple["Kind", torch.Tensor], ...]
    """Jobs of each kind, int32."""
    blocks: int
    """A power of two: of `BLOCK` elements in the largest tile, at most."""
    is_narrow: bool
    """Whether every tensor has fewer than 2**31 elements."""

    @property
    def num_jobs(self) -> int:
        return int(self.first_jobs[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What segments that one launch serves have in common."""

    width: int
    """Bytes of an element in a checkpoint."""
    memory_width: int
    """And in memory: the same, or 4 for 2, which then is the upper half."""

    def constants(self) -> dict[str, Any]:
        integers = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}
        return {
            "MEMORY": integers[self.memory_width],
            "MEMORY_WIDTH": self.memory_width,
            "WIDENED": self.width != self.memory_width,
        }


def geometry(tilings: Sequence[Tiling]) -> Array:
    """Return int64 [num_tensors, 16] of parts.

    Levels of the part; rows and columns of the tensor, those of a slice, those of a tile; the part's first
    level, first row, rows, first column and columns; its first tile and its tiles along rows, and along
    columns.
    """
    # Tensors of one shape have one tiling.
    distinct = {id(each): each for each in tilings}
    numbers = {key: number for number, key in enumerate(distinct)}
    found = [
        (
            *(each.levels, down.length, across.length, down.of_slice, across.of_slice),
            *(down.of_tile, across.of_tile, each.level, down.first, down.size, across.first, across.size),
            *(down.first_tile, each.row_tiles, across.first_tile, each.col_tiles),
        )
        for each in distinct.values()
        for down, across in ((each.down, each.across),)
    ]
    of_each = np.array([numbers[id(each)] for each in tilings], dtype=np.int64)
    return np.array(found, dtype=np.int64).reshape(-1, 16)[of_each]


def tensors(
    geometry: Array,
    formats: Array,
    lowest: Array,
    classes: Array,
    device: torch.device,
    *,
    first_rows: Array | None = None,
) -> Tensors:
    """Describe coded parts of tensors.

    Args:
        geometry: as the function of that name returns it.
        formats: int [num_tensors, 3], of `FORMATS`.
        lowest: int [num_tensors], the exponent of the lowest class.
        classes: int [num_tensors].
        first_rows: of each tensor among the rows of classes; without gaps if not given.
    """
    host = np.zeros((len(geometry), len(Tensor)), dtype=np.int64)
    host[:, :6] = geometry[:, 1:7]
    host[:, 6:8] = -(-geometry[:, 3:5] // geometry[:, 5:7])
    host[:, Tensor.SHIFT] = formats[:, 1]
    host[:, Tensor.MASK] = formats[:, 2]
    host[:, Tensor.WIDTH] = formats[:, 0]
    host[:, Tensor.LOWEST] = lowest
    host[:, Tensor.CLASSES] = classes
    host[:, Tensor.FIRST_ROW] = np.cumsum(classes) - classes if first_rows is None else first_rows
    host[:, Tensor.LEVEL :] = geometry[:, 7:16]
    tiles = geometry[:, [0, 13, 15]]
    count = tiles.prod(axis=1)
    host[:, Tensor.FIRST_TILE] = np.cumsum(count) - count
    return Tensors(table=torch.from_numpy(host).to(device), host=host, num_tiles=count, tiles=tiles)


def segments(
    tensors: Tensors,
    owners: Array,
    boxes: Array,
    addresses: Array,
    strides: Array,
    memory_widths: Array,
) -> Segments:
    """Describe where tensors lie, in boxes of whole tiles.

    Args:
        owners: int [num_segments], the part of each.
        boxes: int [num_segments, 6]: first level, tile row and tile column, in the part, and how many.
        addresses: int [num_segments], of the whole tensor's first element, or where it would be.
        strides: int [num_segments, 3], of levels, rows and columns, in elements.
        memory_widths: int [num_segments], bytes of an element in memory.
    """
    device = tensors.table.device
    host = np.zeros((len(owners), len(Segment)), dtype=np.int64)
    jobs = boxes[:, 3:].prod(axis=1)
    ends = np.cumsum(jobs)
    host[:, Segment.TENSOR] = owners
    host[:, Segment.FIRST_JOB] = ends - jobs
    host[:, Segment.LEVEL : Segment.NUM_ROWS] = boxes[:, :3]
    host[:, Segment.NUM_ROWS : Segment.ADDRESS] = boxes[:, 4:]
    host[:, Segment.ADDRESS] = addresses
    host[:, Segment.LEVEL_STRIDE :] = strides
    num_jobs = int(ends[-1]) if len(ends) else 0
    columns = np.stack(
        [
            *(host[:, Segment.FIRST_JOB], *host[:, Segment.LEVEL : Segment.ADDRESS].T),
            *(*tensors.tiles[owners, 1:].T, tensors.host[owners, Tensor.FIRST_TILE]),
        ]
    )
    widths, memory_widths = tensors.host[owners, Tensor.WIDTH], np.asarray(memory_widths)
    pairs = sorted({*zip(widths.tolist(), memory_widths.tolist(), strict=True)})
    mine = [(widths == width) & (memory_widths == memory_width) for width, memory_width in pairs]
    of_kinds = [np.stack([host[each, Segment.FIRST_JOB], jobs[each]]) for each in mine]
    arrays = [each.reshape(-1) for each in (host, jobs, columns, *of_kinds)]
    # In one copy.
    moved = torch.from_numpy(np.concatenate(arrays)).to(device)
    table, counts, rest, *firsts = moved.split([len(each) for each in arrays])
    numbers = torch.arange(len(owners), dtype=torch.int32, device=device)
    of = torch.repeat_interleave(numbers, counts, output_size=num_jobs)
    tiles = torch.empty(num_jobs, dtype=torch.int32, device=device)
    if num_jobs:
        _number[triton.cdiv(num_jobs, 1024),](rest, of, tiles, num_jobs, len(owners), NUM=1024)
    kinds = []
    for (width, memory_width), its_jobs, first in zip(pairs, of_kinds, firsts, strict=True):
        begins, sizes = first.view(2, -1)
        shift, size = begins - (sizes.cumsum(0) - sizes), int(its_jobs[1].sum())
        picked = torch.arange(size, device=device) + torch.repeat_interleave(shift, sizes, output_size=size)
        kinds.append((Kind(width=width, memory_width=memory_width), picked.to(torch.int32)))
    used = tensors.host[np.unique(owners)]
    tile_rows = np.minimum(used[:, Tensor.TILE_ROWS], used[:, Tensor.PART_ROWS])
    tile_cols = np.minimum(used[:, Tensor.TILE_COLS], used[:, Tensor.PART_COLS])
    largest = int((tile_rows * tile_cols).max(initial=1))
    levels = tensors.host[:, Tensor.LEVEL] + tensors.tiles[:, 0]
    num_elements = levels * tensors.host[:, Tensor.ROWS] * tensors.host[:, Tensor.COLS]
    return Segments(
        table=table.view(-1, len(Segment)),
        first_jobs=np.concatenate([[0], ends]),
        owners=of,
        tiles=tiles,
        kinds=tuple(kinds),
        blocks=max(16, triton.next_power_of_2(triton.cdiv(largest, BLOCK))),
        is_narrow=int(num_elements.max(initial=0)) <= MAX_POSITION,
    )


def whole(tensors: Tensors, addresses: Array) -> Segments:
    """Describe parts that lie contiguously, elements in the order of the tensor: a segment each."""
    host = tensors.host
    boxes = np.concatenate([np.zeros_like(tensors.tiles), tensors.tiles], axis=1)
    rows, cols = host[:, Tensor.PART_ROWS], host[:, Tensor.PART_COLS]
    strides = np.stack([rows * cols, cols, np.ones_like(cols)], axis=1)
    before = (host[:, [Tensor.LEVEL, Tensor.ROW, Tensor.COL]] * strides).sum(axis=1)
    firsts = addresses - before * host[:, Tensor.WIDTH]
    return segments(tensors, np.arange(len(host)), boxes, firsts, strides, host[:, Tensor.WIDTH])


@triton.jit(do_not_specialize=["num_jobs", "num_segments"])
def _number(columns, owners, tiles, num_jobs, num_segments, NUM: tl.constexpr):
    """Number the tiles of jobs."""
    job = tl.program_id(0) * NUM + tl.arange(0, NUM)
    inside = job < num_jobs
    owner = columns + tl.load(owners + job, mask=inside, other=0)
    index = job - tl.load(owner, mask=inside, other=0).to(tl.int32)
    num_rows = tl.load(owner + 4 * num_segments, mask=inside, other=1).to(tl.int32)
    num_cols = tl.load(owner + 5 * num_segments, mask=inside, other=1).to(tl.int32)
    rest = index // num_cols
    level = tl.load(owner + num_segments, mask=inside, other=0).to(tl.int32) + rest // num_rows
    row = tl.load(owner + 2 * num_segments, mask=inside, other=0).to(tl.int32) + rest % num_rows
    col = tl.load(owner + 3 * num_segments, mask=inside, other=0).to(tl.int32) + index % num_cols
    row += level * tl.load(owner + 6 * num_segments, mask=inside, other=0).to(tl.int32)
    col += row * tl.load(owner + 7 * num_segments, mask=inside, other=0).to(tl.int32)
    tile = col + tl.load(owner + 8 * num_segments, mask=inside, other=0).to(tl.int32)
    tl.store(tiles + job, tile, mask=inside)


@triton.jit
def box(tensors, segments, owners, job, MEMORY_WIDTH: tl.constexpr):
    """Find a job's tile.

    Returns: the tensor's number, its row, the address of the tile's first element and its position in the
        tensor (both int64), rows, columns, and the distances of rows and columns in memory (int64).
    """
    segment = segments + tl.load(owners + job).to(tl.int64) * _SEGMENT
    tensor = tl.load(segment)
    row = tensors + tensor * _TENSOR
    index = (job - tl.load(segment + _FIRST_JOB)).to(tl.int32)
    num_rows = tl.load(segment + _NUM_ROWS).to(tl.int32)
    num_cols = tl.load(segment + _NUM_COLS).to(tl.int32)
    rest = index // num_cols
    level = tl.load(row + _PART_LEVEL) + tl.load(segment + _LEVEL) + rest // num_rows
    row_tile = (tl.load(row + _FIRST_ROW_TILE) + tl.load(segment + _ROW)).to(tl.int32) + rest % num_rows
    col_tile = (tl.load(row + _FIRST_COL_TILE) + tl.load(segment + _COL)).to(tl.int32) + index % num_cols
    first_row, tile_rows = _side(row, row_tile, _SLICE_ROWS, _TILE_ROWS, _ROW_TILES, _PART_ROW, _PART_ROWS)
    first_col, tile_cols = _side(row, col_tile, _SLICE_COLS, _TILE_COLS, _COL_TILES, _PART_COL, _PART_COLS)
    row_stride = tl.load(segment + _ROW_STRIDE)
    col_stride = tl.load(segment + _COL_STRIDE)
    place = level * tl.load(segment + _LEVEL_STRIDE) + first_row * row_stride + first_col * col_stride
    address = tl.load(segment + _ADDRESS) + place * MEMORY_WIDTH
    position = (level * tl.load(row + _ROWS) + first_row) * tl.load(row + _COLS) + first_col
    return tensor, row, address, position, tile_rows, tile_cols, row_stride, col_stride


@triton.jit
def _side(
    row, tile, SLICE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    FIRST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Where a tile begins along one side, within the part, and how long it is there."""
    size = tl.load(row + SLICE).to(tl.int32)
    step = tl.load(row + TILE).to(tl.int32)
    tiles = tl.load(row + TILES).to(tl.int32)
    within = tile % tiles * step
    begin = (tile // tiles * size + within).to(tl.int64)
    end = begin + tl.minimum(step, size - within)
    first = tl.load(row + FIRST)
    begin = tl.maximum(begin, first)
    return begin, (tl.minimum(end, first + tl.load(row + SIZE)) - begin).to(tl.int32)
