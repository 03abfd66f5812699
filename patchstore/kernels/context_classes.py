"""Classes of the elements of tiles, and the walk through a stream: what decoding and encoding share.

Elements of a tile are numbered class after class, and by position within a class; streams speak of these
numbers. `count` counts the elements of each class. `index_classes` makes the index that leads from positions
to numbers and back: the class of every element, and how many of each class precede each 64 elements.

A thread takes the stream of one tile, class after class. The threads of a program go on together.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from patchstore.codec.context import rows as row_codes
from patchstore.kernels import context_tables as columns
from patchstore.kernels.context_tables import Segments, Tensors, box

VECTORS = 512
"""How often 8 elements a program reads at once."""

LANES = 32
"""Streams that a program takes: it is one warp, whose threads go on together."""
SILENT = tl.constexpr(row_codes.SILENT)
DENSE = tl.constexpr(row_codes.DENSE)
UNARY = tl.constexpr(row_codes.UNARY_LIMIT)
"""Ones after which a number is stored as it is."""


@triton.jit
def is_aligned(address, num_cols, row_stride, col_stride, MEMORY_WIDTH: tl.constexpr):
    """Whether every 8 elements that follow in a tile lie together, as one load can read them."""
    odd = (address | row_stride * MEMORY_WIDTH) & (MEMORY_WIDTH * 8 - 1)
    return (odd == 0) & (num_cols % 8 == 0) & (col_stride == 1)


@triton.jit
def class_rule(row):
    """What `classes_of` goes by for a tensor whose row is given: shift, mask, lowest exponent, last class."""
    return (
        tl.load(row + columns.SHIFT).to(tl.int32),
        tl.load(row + columns.MASK).to(tl.int32),
        tl.load(row + columns.LOWEST).to(tl.int32),
        tl.load(row + columns.CLASSES).to(tl.int32) - 1,
    )


@triton.jit
def classes_of(bits, shift, mask, lowest, last):
    """The classes of elements with these old bits: int32."""
    return tl.minimum(tl.maximum(((bits >> shift) & mask) - lowest, 0), last)


@triton.jit
def bits_of(loaded, WIDENED: tl.constexpr):
    """Elements as they are in checkpoints, zero-extended to int32."""
    if WIDENED:
        return (loaded >> 16).to(tl.int32)
    return loaded.to(tl.int32)


@triton.jit
def eights(
    address, first, num, num_cols, row_stride, col_stride, shift, mask, lowest, last,
    ALIGNED: tl.constexpr, MEMORY: tl.constexpr, MEMORY_WIDTH: tl.constexpr,
    WIDENED: tl.constexpr,
):  # fmt: skip
    """Classes of some elements of a tile and the 7 after each, 4 bits each.

    Returns: how many of the 8 are of each class, int64, and the class of each, int32, shaped as `first`.
    """
    # Exact: half a column is more than rounding takes from 65,536 of them.
    inverse = 1.0 / num_cols.to(tl.float32)
    if ALIGNED:
        # All 8 are in one line, and so in the tile or not. In words they need no unpacking before the shift.
        num_words: tl.constexpr = 2 * MEMORY_WIDTH
        word = tl.arange(0, num_words)[None, :]
        line = ((first.to(tl.float32) + 0.5) * inverse).to(tl.int32)
        at = line.to(tl.int64) * row_stride + (first - line * num_cols)
        # 8 elements of any width are a power of two of bytes, and begin at a multiple of it.
        memory = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 8 * MEMORY_WIDTH)
        place = tl.multiple_of((at * MEMORY_WIDTH) >> 2, num_words)[:, None] + word
        loaded = tl.load(memory + place, mask=(first < num)[:, None] & (word >= 0), other=0)
        counts = tl.zeros(loaded.shape, tl.int64)
        packed = tl.zeros(loaded.shape, tl.int32)
        if WIDENED:
            shift += 16
        for nth in tl.static_range(8 // num_words):
            classes = classes_of(loaded, shift + 8 * MEMORY_WIDTH * nth, mask, lowest, last)
            counts += tl.full(classes.shape, 1, tl.int64) << (classes * 4).to(tl.int64)
            packed |= classes << (4 * nth)
        counts = tl.where(first < num, tl.sum(counts, axis=1), 0)
        packed = packed << (word * (32 // num_words))
    else:
        lane = tl.arange(0, 8)[None, :]
        element = first[:, None] + lane
        inside = element < num
        line = ((element.to(tl.float32) + 0.5) * inverse).to(tl.int32)
        at = line.to(tl.int64) * row_stride + (element - line * num_cols).to(tl.int64) * col_stride
        loaded = tl.load(address.to(tl.pointer_type(MEMORY)) + at, mask=inside, other=0)
        classes = classes_of(bits_of(loaded, WIDENED), shift, mask, lowest, last)
        one = tl.full(classes.shape, 1, tl.int64) << (classes * 4).to(tl.int64)
        counts = tl.sum(tl.where(inside, one, 0), axis=1)
        packed = classes << (lane * 4)
    return counts, tl.sum(packed, axis=1)


@triton.jit
def halves(counts):
    """Widen counts from 4 to 8 bits: those of the even and of the odd classes."""
    low = 0x0F0F0F0F0F0F0F0F
    return counts & low, (counts >> 4) & low


@triton.jit
def quarters(even, odd):
    """Widen counts to 16 bits: of the classes 0, 4, 8, 12, then 1, 5, 9, 13, then 2, .. and 3, .."""
    low = 0x00FF00FF00FF00FF
    return even & low, odd & low, (even >> 8) & low, (odd >> 8) & low


@triton.jit
def key_of(bits, width):
    top = 1 << (8 * width - 1)
    return tl.where((bits & top) != 0, bits ^ (2 * top - 1), bits | top)


@triton.jit
def bits_of_key(key, width):
    top = 1 << (8 * width - 1)
    return tl.where((key & top) != 0, key ^ top, key ^ (2 * top - 1))


@triton.jit
def _count(
    tensors, segments, owners, tiles, picked, starts, counts, totals,
    VECTORS: tl.constexpr, ALL: tl.constexpr, MEMORY: tl.constexpr, MEMORY_WIDTH: tl.constexpr,
    WIDENED: tl.constexpr,
):  # fmt: skip
    """Count the classes of a tile: of one with a stream, or, where ALL, of any, and of its tensor."""
    job = tl.load(picked + tl.program_id(0)).to(tl.int64)
    wanted = True
    if not ALL:
        tile = tl.load(tiles + job)
        wanted = tl.load(starts + tile + 1) > tl.load(starts + tile)
    if wanted:
        tensor, row, address, _, num_rows, num_cols, row_stride, col_stride = box(
            tensors, segments, owners, job, MEMORY_WIDTH
        )
        num = num_rows * num_cols
        if is_aligned(address, num_cols, row_stride, col_stride, MEMORY_WIDTH):
            even, odd = count_classes(
                row, address, num, num_cols, row_stride, col_stride,
                VECTORS, True, MEMORY, MEMORY_WIDTH, WIDENED,
            )  # fmt: skip
        else:
            even, odd = count_classes(
                row, address, num, num_cols, row_stride, col_stride,
                VECTORS, False, MEMORY, MEMORY_WIDTH, WIDENED,
            )  # fmt: skip
        first, second, third, fourth = quarters(even, odd)
        _total(first, counts + job * 16, totals + tensor * 16, ALL)
        _total(second, counts + job * 16 + 1, totals + tensor * 16 + 1, ALL)
        _total(third, counts + job * 16 + 2, totals + tensor * 16 + 2, ALL)
        _total(fourth, counts + job * 16 + 3, totals + tensor * 16 + 3, ALL)


@triton.jit
def count_classes(
    row, address, num, num_cols, row_stride, col_stride,
    VECTORS: tl.constexpr, ALIGNED: tl.constexpr, MEMORY: tl.constexpr, MEMORY_WIDTH: tl.constexpr,
    WIDENED: tl.constexpr,
):  # fmt: skip
    """Count the classes of a tile: of even and odd ones, int64 [VECTORS], 8 bits each."""
    shift, mask, lowest, last = class_rule(row)
    even = tl.zeros((VECTORS,), tl.int64)
    odd = tl.zeros((VECTORS,), tl.int64)
    # At most 16 times, so that 8 bits are enough for counts.
    for begin in range(0, num, VECTORS * 8):
        counts, _ = eights(
            address, begin + tl.arange(0, VECTORS) * 8, num, num_cols, row_stride, col_stride,
            shift, mask, lowest, last, ALIGNED, MEMORY, MEMORY_WIDTH, WIDENED,
        )  # fmt: skip
        low, high = halves(counts)
        even += low
        odd += high
    return even, odd


@triton.jit
def _total(fields, counts, totals, ALL: tl.constexpr):
    """Add up four counts of 16 bits, and keep them at every fourth place."""
    for k in tl.static_range(2):
        both = tl.sum((fields >> (16 * k)) & 0x0000FFFF0000FFFF)
        low = both & 0xFFFFFFFF
        high = both >> 32
        tl.store(counts + 4 * k, low.to(tl.int32))
        tl.store(counts + 4 * k + 8, high.to(tl.int32))
        if ALL:
            tl.atomic_add(totals + 4 * k, low, mask=low > 0, sem="relaxed")
            tl.atomic_add(totals + 4 * k + 8, high, mask=high > 0, sem="relaxed")


@triton.jit
def list_classes(
    row, address, num, num_cols, row_stride, col_stride, listed, sums,
    VECTORS: tl.constexpr, ALIGNED: tl.constexpr, MEMORY: tl.constexpr, MEMORY_WIDTH: tl.constexpr,
    WIDENED: tl.constexpr,
):  # fmt: skip
    """Keep the classes of a tile, 4 bits each, and their counts in each 64 elements, 8 bits each."""
    shift, mask, lowest, last = class_rule(row)
    nth = tl.arange(0, VECTORS)
    for begin in range(0, num, VECTORS * 8):
        counts, packed = eights(
            address, begin + nth * 8, num, num_cols, row_stride, col_stride,
            shift, mask, lowest, last, ALIGNED, MEMORY, MEMORY_WIDTH, WIDENED,
        )  # fmt: skip
        tl.store(listed + begin // 8 + nth, packed)
        even, odd = halves(counts)
        even = tl.sum(tl.reshape(even, (VECTORS // 8, 8)), axis=1, keep_dims=True)
        odd = tl.sum(tl.reshape(odd, (VECTORS // 8, 8)), axis=1, keep_dims=True)
        # Two of the eight threads that have a sum store it, so that none has to be handed on.
        lane = tl.arange(0, 8)[None, :]
        block = (begin // 64 + tl.arange(0, VECTORS // 8)[:, None]) * 4
        tl.store(sums + block + lane, tl.where(lane == 0, even, odd), mask=lane < 2)


@triton.jit
def index_classes(
    row, address, num, num_cols, row_stride, col_stride, scratch,
    BLOCKS: tl.constexpr, VECTORS: tl.constexpr, MEMORY: tl.constexpr, MEMORY_WIDTH: tl.constexpr,
    WIDENED: tl.constexpr,
):  # fmt: skip
    """Keep the classes of a tile, and how many of each precede each 64 elements."""
    sums = scratch
    listed = (scratch + 4 * BLOCKS).to(tl.pointer_type(tl.int32))
    if is_aligned(address, num_cols, row_stride, col_stride, MEMORY_WIDTH):
        list_classes(
            row, address, num, num_cols, row_stride, col_stride, listed, sums,
            VECTORS, True, MEMORY, MEMORY_WIDTH, WIDENED,
        )  # fmt: skip
    else:
        list_classes(
            row, address, num, num_cols, row_stride, col_stride, listed, sums,
            VECTORS, False, MEMORY, MEMORY_WIDTH, WIDENED,
        )  # fmt: skip
    tl.debug_barrier()
    at = tl.arange(0, BLOCKS)
    mine = at * 64 < num
    even = tl.load(sums + at * 4, mask=mine, other=0)
    odd = tl.load(sums + at * 4 + 1, mask=mine, other=0)
    first, second, third, fourth = quarters(even, odd)
    tl.debug_barrier()
    tl.store(sums + at * 4, tl.cumsum(first, 0) - first)
    tl.store(sums + at * 4 + 1, tl.cumsum(second, 0) - second)
    tl.store(sums + at * 4 + 2, tl.cumsum(third, 0) - third)
    tl.store(sums + at * 4 + 3, tl.cumsum(fourth, 0) - fourth)
    tl.debug_barrier()


@triton.jit
def matches(listed, number):
    """Which of 16 listed classes are `number`: the lowest bit of each 4, uint64."""
    other = listed ^ (number.to(tl.uint64) * 0x1111111111111111)
    other = other | (other >> 1)
    other = other | (other >> 2)
    return ~other & 0x1111111111111111


@triton.jit
def num_matches(mask):
    pairs = (mask + (mask >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((pairs * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def class_place(number):
    """Which of 16 counts, 16 bits each, is that of a class."""
    return (number & 3) * 4 + (number >> 2)


def count(
    tensors: Tensors,
    segments: Segments,
    counts: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
    totals: torch.Tensor | None = None,
) -> None:
    """Count the elements of each class of tiles into `counts`, int32 [num_jobs * 16]; one launch a kind.

    Given `starts`, of tiles with a stream alone; otherwise `totals`, int64 [num_tensors * 16], grow by those
    of each tensor.
    """
    for kind, picked in segments.kinds:
        if len(picked):
            _count[len(picked),](
                *(tensors.table, segments.table, segments.owners, segments.tiles, picked),
                *(counts if starts is None else starts, counts, counts if totals is None else totals),
                VECTORS=min(VECTORS, 8 * segments.blocks),
                ALL=starts is None,
                num_warps=2,
                **kind.constants(),
            )


def each_tile(
    kernel: Any,
    tensors: Tensors,
    segments: Segments,
    *arguments: torch.Tensor,
    per_processor: int,
    scratch_words: int,
    vectors: int = VECTORS,
    **constants: Any,
) -> None:
    """Run a kernel that indexes classes; one launch a kind. Its programs take one tile after the other.

    `per_processor` of them run at a time, and each has `scratch_words` words of 8 bytes for each `BLOCK`
    elements of the largest tile.
    """
    device, programs = segments.table.device, 4
    if device.type == "cuda":
        programs = per_processor * torch.cuda.get_device_properties(device).multi_processor_count
    scratch = torch.empty(programs * scratch_words * segments.blocks, dtype=torch.int64, device=device)
    for kind, picked in segments.kinds:
        if len(picked):
            kernel[min(programs, len(picked)),](
                *(tensors.table, segments.table, segments.owners, picked, *arguments, scratch, len(picked)),
                BLOCKS=segments.blocks,
                VECTORS=min(vectors, 8 * segments.blocks),
                **kind.constants(),
                **constants,
            )


@triton.jit
def tile_of(tensors, segments, owners, rows, job, inside):
    """What the tensors of jobs bring: the last class of each, bytes of an element, and where codes begin."""
    segment = segments + tl.load(owners + job, mask=inside, other=0).to(tl.int64) * columns.SEGMENT_COLUMNS
    row = tensors + tl.load(segment, mask=inside, other=0) * columns.NUM_COLUMNS
    last_class = tl.load(row + columns.CLASSES, mask=inside, other=0).to(tl.int32) - 1
    width = tl.load(row + columns.WIDTH, mask=inside, other=0).to(tl.int32)
    codes = rows + tl.load(row + columns.FIRST_ROW, mask=inside, other=0)
    return last_class, width, codes


@triton.jit
def next_class(active, number, left, element, run, is_open, code, codes, counts, last_class):
    """Go on to the next class where no element of a class is left, and pass all elements of a silent one.

    Returns: the first seven arguments as they are then. `active` ends with the last class.
    """
    fresh = active & (left == 0)
    active = active & ((left > 0) | (number < last_class))
    fresh = fresh & active
    number += fresh.to(tl.int32)
    left = tl.where(fresh, tl.load(counts + number, mask=fresh, other=0), left)
    code = tl.where(fresh, tl.load(codes + number, mask=fresh, other=0), code)
    run = tl.where(fresh, 0, run)
    is_open = is_open & ~fresh
    kind = code & 0xFF
    element += tl.where(kind == SILENT, left, 0)
    left = tl.where(kind == SILENT, 0, left)
    return active, number, left, element, run, is_open, code


@triton.jit
def power_of(values):
    """The floor of the logarithm to base two of numbers that float32 holds exactly."""
    return ((values.to(tl.float32).to(tl.int32, bitcast=True)) >> 23) - 127


@triton.jit
def run_length(code):
    """The parameter that a code stands for: 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, .."""
    step = tl.maximum(code - 3, 0)
    return tl.where(code < 3, code + 1, (4 + (step & 3)) << (step >> 2))


@triton.jit
def floor_div(value, by):
    """Divide numbers below 2**18; exact, see `context_classes.eights`."""
    return ((value.to(tl.float32) + 0.5) * (1.0 / by.to(tl.float32))).to(tl.int32)


def each_stream(
    kernel: Any, tensors: Tensors, segments: Segments, *arguments: torch.Tensor, emit: bool
) -> None:
    """Run a kernel on the streams of all jobs, to count or to `emit`; one launch."""
    if segments.num_jobs:
        kernel[(triton.cdiv(segments.num_jobs, LANES),)](
            *(tensors.table, segments.table, segments.owners, *arguments, segments.num_jobs),
            LANES=LANES,
            EMIT=emit,
            num_warps=1,
        )
