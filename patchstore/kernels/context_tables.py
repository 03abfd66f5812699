"""Tables of coded parts of tensors and of where they lie, and what kernels read from them.

A job is a tile in a segment. Segments are boxes of whole tiles of one part in one place of memory, so a
rank has jobs for what it holds alone, and elements stay where they are, whatever their strides.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from patchstore.codec.context import classes as context_classes
from patchstore.codec.context.tiles import Cuts, Tiling
from patchstore.kernels import sent

Array = npt.NDArray[Any]

FORMATS = context_classes.FORMATS
BLOCK = 64
"""Elements for which classes are counted together."""
MAX_POSITION = 2**31 - 1


# Columns of the table of tensors.
ROWS, COLS = tl.constexpr(0), tl.constexpr(1)
"""Of the elements of a level."""
SLICE_ROWS, SLICE_COLS, TILE_ROWS, TILE_COLS = (tl.constexpr(column) for column in range(2, 6))
"""Of a slice, and of a tile."""
ROW_TILES, COL_TILES = tl.constexpr(6), tl.constexpr(7)
"""Along a slice."""
SHIFT, MASK, WIDTH = (tl.constexpr(column) for column in range(8, 11))
"""Of the exponent; bytes of an element."""
LOWEST, CLASSES, FIRST_ROW = (tl.constexpr(column) for column in range(11, 14))
"""The exponent of the lowest class; how many classes; where their codes begin among those of all."""
FIRST_TILE = tl.constexpr(14)
LEVEL, ROW, PART_ROWS, COL, PART_COLS = (tl.constexpr(column) for column in range(15, 20))
"""The part's first level, first row, rows, first column and columns."""
FIRST_ROW_TILE, PART_ROW_TILES, FIRST_COL_TILE, PART_COL_TILES = (tl.constexpr(n) for n in range(20, 24))
"""The part's first tile along the rows of the whole tensor, and how many it has; then along the columns."""
NUM_COLUMNS = tl.constexpr(24)

# Columns of the table of segments; the first is the tensor's number.
FIRST_JOB = tl.constexpr(1)
SEGMENT_LEVEL, SEGMENT_ROW, SEGMENT_COL = (tl.constexpr(column) for column in range(2, 5))
"""Of the first tile, in the part: its level, tile row and tile column."""
NUM_ROWS, NUM_COLS = tl.constexpr(5), tl.constexpr(6)
"""Of tiles."""
ADDRESS = tl.constexpr(7)
"""Where the tensor's first element is, or would be."""
LEVEL_STRIDE, ROW_STRIDE, COL_STRIDE = (tl.constexpr(column) for column in range(8, 11))
"""In elements."""
SEGMENT_COLUMNS = tl.constexpr(11)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Coded parts of tensors."""

    table: torch.Tensor
    """int64 [num_tensors, NUM_COLUMNS], on the device."""
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
    """int64 [num_segments, SEGMENT_COLUMNS]."""
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


def geometry(cuts: Cuts) -> Array:
    """Return int64 [num_tensors, 16] of parts: levels, and then columns of the table of tensors."""

    def row(cut: Tiling) -> tuple[int, ...]:
        down, across = cut.down, cut.across
        return (
            *(cut.levels, down.length, across.length, down.of_slice, across.of_slice),
            *(down.of_tile, across.of_tile, cut.level, down.first, down.size, across.first, across.size),
            *(down.first_tile, cut.row_tiles, across.first_tile, cut.col_tiles),
        )

    return cuts.each(row).reshape(-1, 16)


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
        first_rows: of each tensor among the rows of classes; without gaps if not given.
    """
    host = np.zeros((len(geometry), NUM_COLUMNS.value), dtype=np.int64)
    host[:, :6] = geometry[:, 1:7]
    host[:, 6:8] = -(-geometry[:, 3:5] // geometry[:, 5:7])
    host[:, SHIFT] = formats[:, 1]
    host[:, MASK] = formats[:, 2]
    host[:, WIDTH] = formats[:, 0]
    host[:, LOWEST] = lowest
    host[:, CLASSES] = classes
    host[:, FIRST_ROW] = np.cumsum(classes) - classes if first_rows is None else first_rows
    host[:, LEVEL:] = geometry[:, 7:16]
    tiles = geometry[:, [0, 13, 15]]
    count = tiles.prod(axis=1)
    host[:, FIRST_TILE] = np.cumsum(count) - count
    return Tensors(table=sent(host, device), host=host, num_tiles=count, tiles=tiles)


def segments(
    tensors: Tensors,
    owners: Array,
    boxes: Array,
    addresses: Array,
    strides: Array,
    memory_widths: Array,
    largest: int = 1,
) -> Segments:
    """Describe where tensors lie, in boxes of whole tiles.

    Args:
        owners: int [num_segments], the part of each.
        boxes: int [num_segments, 6]: first level, tile row and tile column, in the part, and how many.
        addresses: int [num_segments], of the whole tensor's first element, or where it would be.
        strides: int [num_segments, 3], of levels, rows and columns, in elements.
        memory_widths: int [num_segments], bytes of an element in memory.
        largest: elements of a tile, which `blocks` are enough for too.
    """
    device = tensors.table.device
    host = np.zeros((len(owners), SEGMENT_COLUMNS.value), dtype=np.int64)
    jobs = boxes[:, 3:].prod(axis=1)
    ends = np.cumsum(jobs)
    host[:, 0] = owners
    host[:, FIRST_JOB] = ends - jobs
    host[:, SEGMENT_LEVEL:NUM_ROWS] = boxes[:, :3]
    host[:, NUM_ROWS:ADDRESS] = boxes[:, 4:]
    host[:, ADDRESS] = addresses
    host[:, LEVEL_STRIDE:] = strides
    num_jobs = int(ends[-1]) if len(ends) else 0
    columns = np.stack(
        [
            *(host[:, FIRST_JOB], *host[:, SEGMENT_LEVEL:ADDRESS].T),
            *(*tensors.tiles[owners, 1:].T, tensors.host[owners, FIRST_TILE]),
        ]
    )
    widths, memory_widths = tensors.host[owners, WIDTH], np.asarray(memory_widths)
    pairs = sorted({*zip(widths.tolist(), memory_widths.tolist(), strict=True)})
    mine = [(widths == width) & (memory_widths == memory_width) for width, memory_width in pairs]
    of_kinds = [np.stack([host[each, FIRST_JOB], jobs[each]]) for each in mine]
    arrays = [each.reshape(-1) for each in (host, jobs, columns, *of_kinds)]
    # In one copy.
    moved = sent(np.concatenate(arrays), device)
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
    tile_rows = np.minimum(used[:, TILE_ROWS], used[:, PART_ROWS])
    tile_cols = np.minimum(used[:, TILE_COLS], used[:, PART_COLS])
    largest = int((tile_rows * tile_cols).max(initial=largest))
    levels = tensors.host[:, LEVEL] + tensors.tiles[:, 0]
    num_elements = levels * tensors.host[:, ROWS] * tensors.host[:, COLS]
    return Segments(
        table=table.view(-1, SEGMENT_COLUMNS.value),
        first_jobs=np.concatenate([[0], ends]),
        owners=of,
        tiles=tiles,
        kinds=tuple(kinds),
        blocks=max(16, triton.next_power_of_2(triton.cdiv(largest, BLOCK))),
        is_narrow=int(num_elements.max(initial=0)) <= MAX_POSITION,
    )


def whole(tensors: Tensors, addresses: Array, largest: int = 1) -> Segments:
    """Describe parts that lie contiguously, elements in the order of the tensor: a segment each.

    `largest` is as for `segments`.
    """
    host = tensors.host
    boxes = np.concatenate([np.zeros_like(tensors.tiles), tensors.tiles], axis=1)
    rows, cols = host[:, PART_ROWS], host[:, PART_COLS]
    strides = np.stack([rows * cols, cols, np.ones_like(cols)], axis=1)
    before = (host[:, [LEVEL.value, ROW.value, COL.value]] * strides).sum(axis=1)
    firsts = addresses - before * host[:, WIDTH]
    return segments(tensors, np.arange(len(host)), boxes, firsts, strides, host[:, WIDTH], largest)


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
    segment = segments + tl.load(owners + job).to(tl.int64) * SEGMENT_COLUMNS
    tensor = tl.load(segment)
    row = tensors + tensor * NUM_COLUMNS
    index = (job - tl.load(segment + FIRST_JOB)).to(tl.int32)
    num_rows = tl.load(segment + NUM_ROWS).to(tl.int32)
    num_cols = tl.load(segment + NUM_COLS).to(tl.int32)
    rest = index // num_cols
    level = tl.load(row + LEVEL) + tl.load(segment + SEGMENT_LEVEL) + rest // num_rows
    row_tile = (tl.load(row + FIRST_ROW_TILE) + tl.load(segment + SEGMENT_ROW)).to(tl.int32) + rest % num_rows
    col_tile = (tl.load(row + FIRST_COL_TILE) + tl.load(segment + SEGMENT_COL)).to(
        tl.int32
    ) + index % num_cols
    first_row, tile_rows = _side(row, row_tile, SLICE_ROWS, TILE_ROWS, ROW_TILES, ROW, PART_ROWS)
    first_col, tile_cols = _side(row, col_tile, SLICE_COLS, TILE_COLS, COL_TILES, COL, PART_COLS)
    row_stride = tl.load(segment + ROW_STRIDE)
    col_stride = tl.load(segment + COL_STRIDE)
    place = level * tl.load(segment + LEVEL_STRIDE) + first_row * row_stride + first_col * col_stride
    address = tl.load(segment + ADDRESS) + place * MEMORY_WIDTH
    position = (level * tl.load(row + ROWS) + first_row) * tl.load(row + COLS) + first_col
    return tensor, row, address, position, tile_rows, tile_cols, row_stride, col_stride


@triton.jit
def _side(
    row, tile, SLICE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    FIRST: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Where a tile begins along one side, within the part, and how long it is there."""
    # A side may have more elements than int32 counts.
    size = tl.load(row + SLICE)
    step = tl.load(row + TILE)
    tiles = tl.load(row + TILES).to(tl.int32)
    within = tile % tiles * step
    begin = tile // tiles * size + within
    end = begin + tl.minimum(step, size - within)
    first = tl.load(row + FIRST)
    begin = tl.maximum(begin, first)
    return begin, (tl.minimum(end, first + tl.load(row + SIZE)) - begin).to(tl.int32)
