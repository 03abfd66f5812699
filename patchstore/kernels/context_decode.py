"""Decode what changed in tensors of the encoding `context`, from the live weights and the streams.

Streams speak of numbers of elements; see `context_classes`. So there are three steps. `count` finds how many
elements of each class every tile has. `read` reads the streams, a thread that of a tile, first to count its
changes, and then to list number and step of each; `codec.context.decoder` does the same on the CPU.
`_place` finds, tile by tile again, the positions that the numbers stand for. Nothing is sorted. Weights are
read twice.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from patchstore.kernels import context_tables as columns
from patchstore.kernels.context_classes import (
    DENSE,
    UNARY,
    VECTORS,
    bits_of,
    bits_of_key,
    class_place,
    count,
    each_stream,
    each_tile,
    floor_div,
    index_classes,
    key_of,
    matches,
    next_class,
    num_matches,
    power_of,
    run_length,
    tile_of,
)
from patchstore.kernels.context_tables import Segments, Tensors, box

_UNARY_GUARD = tl.constexpr(1 << 24)
_ONES_GUARD = tl.constexpr(1 << 45)
_ONES = tl.constexpr(45)
"""Ones that are looked at together: a bit, a place among 65,536 and a sign are in the same 64 bits."""
PLACED = 256
"""Changes that a program places at once."""
PROGRAMS_PER_PROCESSOR = 3
"""As many as run at a time. Each has 64 bytes of scratch for 64 elements of a tile, to stay in the caches."""
PLACING = {"num_warps": 8, "maxnreg": 80}
"""So that 24 warps run on a processor: it is the waiting for memory that takes long. Measured on an H200."""
NONE = 2**31 - 1


@triton.jit
def _ceil_div(value, by):
    """Divide numbers below 2**18, rounding up."""
    return floor_div(value + by - 1, by)


@triton.jit
def _window(words, start, end, p, busy):
    """64 bits of streams from bit p on, all ones beyond the end: uint64."""
    at = start + p
    word = at >> 6
    shift = (at & 63).to(tl.uint64)
    low = tl.load(words + word, mask=busy & (word * 64 < start + end), other=-1).to(tl.uint64, bitcast=True)
    high = tl.load(words + word + 1, mask=busy & (word * 64 + 64 < start + end), other=-1)
    window = (low >> shift) | ((high.to(tl.uint64, bitcast=True) << 1) << (63 - shift))
    left = tl.minimum(tl.maximum(end - p, 0), 63).to(tl.int64)
    ones = (tl.full(left.shape, -1, tl.int64) << left).to(tl.uint64, bitcast=True)
    return tl.where(end - p >= 64, window, window | ones)


@triton.jit
def _ones(window, GUARD: tl.constexpr):
    """How many of the lowest bits are ones, up to that of GUARD."""
    zeros = ~window.to(tl.int64, bitcast=True) | GUARD
    return power_of(zeros & -zeros)


@triton.jit
def _low(window, num):
    """The lowest bits, at most 30."""
    return (window & 0x7FFFFFFF).to(tl.int32) & ((1 << num) - 1)


@triton.jit
def _bit(window, at):
    return ((window >> at.to(tl.uint64)) & 1).to(tl.int32)


@triton.jit
def _binary(window, most):
    """A truncated binary number below `most`, and its bits."""
    power = power_of(most)
    short = (2 << power) - most
    value = _low(window, power)
    is_long = value >= short
    value = tl.where(is_long, 2 * value + _bit(window, power) - short, value)
    return value, power + is_long.to(tl.int32)


@triton.jit
def _rice(window, k, width):
    """A number in Rice's code, and its bits."""
    q = _ones(window, _UNARY_GUARD)
    raw = _low(window >> UNARY, 8 * width)
    value = tl.where(q == UNARY, raw, (q << k) | _low(window >> (q + 1).to(tl.uint64), k))
    return value, tl.where(q == UNARY, UNARY + 8 * width, q + 1 + k)


@triton.jit(do_not_specialize=["num_jobs"])
def _parse(
    tensors, segments, owners, tiles, starts, words, rows, counts, nums, places, changes, first_wrong,
    num_jobs, LANES: tl.constexpr, EMIT: tl.constexpr,
):  # fmt: skip
    """Read the streams of some tiles, a change of each at a time.

    Counts changes, or, where EMIT, lists them: the number of the element, and the step times 2**16.

    Example: 3 elements of class 0, which is silent, and 5 of class 1, which is sparse with M = 4 and |d| = 1.
    The bits 1, 0, 0 say that 4 elements of class 1 did not change, and the one left did, by +1: number 7.
    """
    job = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = job < num_jobs
    last_class, width, codes = tile_of(tensors, segments, owners, rows, job, inside)
    mask = (1 << (8 * width)) - 1
    tile = tl.load(tiles + job, mask=inside, other=0)
    start = tl.load(starts + tile, mask=inside, other=0)
    length = tl.load(starts + tile + 1, mask=inside, other=0) - start
    start = start * 8
    # No stream says so much: one that is longer has bytes too many.
    end = tl.minimum(length, 1 << 24).to(tl.int32) * 8
    has_stream = inside & (length > 0)
    own_counts = counts + job.to(tl.int64) * 16
    room = changes
    if EMIT:
        room = changes + tl.load(places + job, mask=inside, other=0)
    active = has_stream
    wrong = job < 0
    is_open = job < 0
    p = tl.zeros((LANES,), tl.int32)
    number = tl.zeros((LANES,), tl.int32) - 1
    left = tl.zeros((LANES,), tl.int32)
    element = tl.zeros((LANES,), tl.int32)
    found = tl.zeros((LANES,), tl.int32)
    run = tl.zeros((LANES,), tl.int32)
    code = tl.zeros((LANES,), tl.int32)
    while tl.max(active.to(tl.int32)) > 0:
        active, number, left, element, run, is_open, code = next_class(
            active, number, left, element, run, is_open, code, codes, own_counts, last_class
        )
        kind = code & 0xFF
        busy = active & (left > 0)
        dense = busy & (kind == DENSE)
        sparse = busy & (kind != DENSE)
        k = (code >> 16) & 0xF
        window = _window(words, start, end, p, busy)

        length_of_run = run_length(kind & 0x3F)
        ones = _ones(window, _ONES_GUARD)
        runs_left = _ceil_div(left, length_of_run)
        hit = sparse & (ones < runs_left) & (ones < _ONES)
        skipped = tl.minimum(ones * length_of_run, left)
        rest = window >> (tl.minimum(ones, _ONES) + 1).to(tl.uint64)
        more, bits = _binary(rest, tl.minimum(length_of_run, tl.maximum(left - skipped, 1)))
        is_less = _bit(rest, bits)
        skipped += tl.where(hit, more, 0)
        step = tl.full((LANES,), 1, tl.int32)
        advance = tl.where(hit, ones + bits + 2, tl.minimum(ones, runs_left))

        if tl.max(dense.to(tl.int32)) > 0:
            size, bits = _rice(window, k, width)
            swap = (size < 2) & ((code >> 23) != 0)
            size = tl.where(swap, 1 - size, size)
            some = dense & (size > 0)
            step = tl.where(dense, size, step)
            is_less = tl.where(dense, _bit(window, bits), is_less)
            advance = tl.where(dense, bits + some.to(tl.int32), advance)
            skipped = tl.where(dense, 0, skipped)
            hit = hit | some
        p += tl.where(busy, advance, 0)

        runs = (code >> 8) & 0xFF
        stepped = hit & sparse & (runs > 0)
        if tl.max(stepped.to(tl.int32)) > 0:
            window = _window(words, start, end, p, stepped)
            opens = stepped & (run == 0) & ~is_open
            length_of_run = run_length(tl.maximum(runs - 1, 0))
            is_long = (window & 1) != 0
            more, bits = _binary(window >> 1, length_of_run)
            run = tl.where(opens, tl.where(is_long, length_of_run, more), run)
            is_open = is_open | (opens & ~is_long)
            bits = tl.where(opens, tl.where(is_long, 1, bits + 1), 0)
            large = stepped & (run == 0)
            run -= (stepped & ~large).to(tl.int32)
            is_open = is_open & ~large
            size, more = _rice(window >> bits.to(tl.uint64), k, width)
            step = tl.where(large, size + 2, step)
            p += tl.where(stepped, bits + tl.where(large, more, 0), 0)

        step = tl.where(is_less != 0, -step, step)
        wrong = wrong | (hit & ((step & mask) == 0))
        passed = tl.where(sparse, skipped + hit.to(tl.int32), dense.to(tl.int32))
        if EMIT:
            change = ((element + passed - 1) & 0xFFFF) | (step << 16)
            tl.store(room + found, change, mask=hit)
        found += hit.to(tl.int32)
        element += passed
        left -= passed
    if not EMIT:
        wrong = has_stream & (wrong | (p <= end - 8))
        tl.store(nums + job, found, mask=inside)
        tl.atomic_min(first_wrong + job * 0, job, mask=wrong, sem="relaxed")


def read(
    tensors: Tensors,
    segments: Segments,
    starts: torch.Tensor,
    words: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    nums: torch.Tensor,
    first_wrong: torch.Tensor,
    *,
    places: torch.Tensor | None = None,
    changes: torch.Tensor | None = None,
) -> None:
    """Count the changes of streams, or, given `changes`, list them; one launch.

    Args:
        starts: int64 [num_tiles + 1], where the stream of each tile begins, in bytes, and the end.
        words: the streams, of `as_words`.
        rows: int32 [num_rows], the codes of classes.
        counts: int32 [num_jobs * 16], elements of each class of tiles with a stream.
        nums: int32 [num_jobs], is written when changes are counted; so is `first_wrong`, the first job with a
            stream that is not as the format says, if that is less.
        places: int64 [num_jobs], where the changes of each job begin in `changes`.
        changes: int32, is written: the number of the element, and the step times 2**16.
    """
    # Where none are listed, tensors of the same types stand for those that are not read.
    listed = (starts, counts) if places is None or changes is None else (places, changes)
    each_stream(
        *(_parse, tensors, segments, segments.tiles, starts, words, rows, counts, nums, *listed, first_wrong),
        emit=changes is not None,
    )


def as_words(streams: torch.Tensor) -> torch.Tensor:
    """Return bytes as int64, copied where they do not begin and end with whole words."""
    num_bytes = triton.cdiv(streams.numel(), 8) * 8
    if streams.data_ptr() % 8 == 0 and num_bytes == streams.numel() > 0:
        return streams.view(torch.int64)
    padded = streams.new_zeros(max(num_bytes, 8))
    padded[: streams.numel()] = streams
    return padded.view(torch.int64)


@triton.jit
def _block_of(sums, rank, num_blocks, mine, BLOCKS: tl.constexpr, LOG_BLOCKS: tl.constexpr):
    """Find the last block with at most `rank` elements of a class before it, and how many these are.

    Looks at three places at once, since it is the waiting for one look after the other that takes long.
    """
    block = tl.zeros(rank.shape, tl.int32)
    smaller = tl.zeros(rank.shape, tl.int32)
    for k in tl.static_range(LOG_BLOCKS // 2):
        next_block = block
        for nth in tl.static_range(1, 4):
            at = block + nth * (BLOCKS >> (2 * k + 2))
            before = tl.load(sums + at * 16, mask=mine & (at < num_blocks), other=65535).to(tl.int32)
            is_later = (at < num_blocks) & (before <= rank)
            next_block = tl.where(is_later, at, next_block)
            smaller = tl.where(is_later, before, smaller)
        block = next_block
    if LOG_BLOCKS % 2 == 1:
        before = tl.load(sums + (block + 1) * 16, mask=mine & (block + 1 < num_blocks), other=65535)
        is_later = (block + 1 < num_blocks) & (before.to(tl.int32) <= rank)
        block += is_later.to(tl.int32)
        smaller = tl.where(is_later, before.to(tl.int32), smaller)
    return block, smaller


# Stores to scratch whose alignment were known would be made wider, by way of shared memory and six barriers.
@triton.jit(do_not_specialize=["num_jobs"], do_not_specialize_on_alignment=["scratch"])
def _place(
    tensors, segments, owners, picked, counts, nums, places, changes, positions, values, scratch, num_jobs,
    BLOCKS: tl.constexpr, LOG_BLOCKS: tl.constexpr, VECTORS: tl.constexpr, PLACED: tl.constexpr,
    MEMORY: tl.constexpr, MEMORY_WIDTH: tl.constexpr, WIDENED: tl.constexpr,
):  # fmt: skip
    """Find the positions and the new bits of changes, of one tile after the other."""
    scratch += tl.program_id(0).to(tl.int64) * (8 * BLOCKS)
    listed = (scratch + 4 * BLOCKS).to(tl.pointer_type(tl.uint64))
    sums = scratch.to(tl.pointer_type(tl.uint16))
    for nth in range(tl.program_id(0), num_jobs, tl.num_programs(0)):
        job = tl.load(picked + nth).to(tl.int64)
        num_changes = tl.load(nums + job)
        if num_changes > 0:
            _, row, address, first, num_rows, num_cols, row_stride, col_stride = box(
                tensors, segments, owners, job, MEMORY_WIDTH
            )
            num = num_rows * num_cols
            index_classes(
                row, address, num, num_cols, row_stride, col_stride, scratch,
                BLOCKS, VECTORS, MEMORY, MEMORY_WIDTH, WIDENED,
            )  # fmt: skip
            width = tl.load(row + columns.WIDTH).to(tl.int32)
            cols = tl.load(row + columns.COLS)
            memory = address.to(tl.pointer_type(MEMORY))
            place = tl.load(places + job)
            num_blocks = (num + 63) // 64
            for begin in range(0, num_changes, PLACED):
                at = begin + tl.arange(0, PLACED)
                mine = at < num_changes
                change = tl.load(changes + place + at, mask=mine, other=0)
                element = change & 0xFFFF
                number = tl.zeros((PLACED,), tl.int32)
                before = tl.zeros((PLACED,), tl.int32)
                end = tl.load(counts + job * 16)
                for k in tl.static_range(1, 16):
                    later = element >= end
                    number += later.to(tl.int32)
                    before = tl.where(later, end, before)
                    end += tl.load(counts + job * 16 + k)
                rank = element - before
                block, smaller = _block_of(
                    sums + class_place(number), rank, num_blocks, mine, BLOCKS, LOG_BLOCKS
                )
                rank -= smaller
                word = tl.zeros((PLACED,), tl.int32)
                held = tl.zeros((PLACED,), tl.uint64)
                passed = tl.zeros((PLACED,), tl.int32)
                skipped = tl.zeros((PLACED,), tl.int32)
                for k in tl.static_range(4):
                    mask = matches(tl.load(listed + block * 4 + k, mask=mine, other=0), number)
                    count = num_matches(mask)
                    here = (rank >= passed) & (rank < passed + count)
                    word = tl.where(here, k, word)
                    held = tl.where(here, mask, held)
                    skipped = tl.where(here, passed, skipped)
                    passed += count
                rank -= skipped
                # How many up to each of 16 places; the last of them may not fit, and is not read.
                held = held * 0x1111111111111111
                within = tl.zeros((PLACED,), tl.int32)
                for k in tl.static_range(15):
                    within += (((held >> (4 * k)) & 15).to(tl.int32) <= rank).to(tl.int32)
                index = block * 64 + word * 16 + within
                line = index // num_cols
                column = (index - line * num_cols).to(tl.int64)
                line = line.to(tl.int64)
                loaded = tl.load(memory + line * row_stride + column * col_stride, mask=mine, other=0)
                key = key_of(bits_of(loaded, WIDENED), width) + (change >> 16)
                bits = bits_of_key(key & ((1 << (8 * width)) - 1), width)
                position = first + line * cols + column
                tl.store(positions + place + at, position.to(positions.dtype.element_ty), mask=mine)
                tl.store(values + place + at, bits.to(tl.int16), mask=mine)
            tl.debug_barrier()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What changed."""

    positions: torch.Tensor
    """int32 [num], in the flattened tensor; int64 if any tensor has 2**31 elements or more. In no order but
    that of the jobs."""
    values: torch.Tensor
    """int16 [num], the new bits; one-byte elements in the lower byte, with zeros above."""
    bounds: npt.NDArray[np.int64]
    """[num_segments + 1]: where the changes of each segment begin, and the end."""
    first_wrong: int | None
    """The first segment with a stream that is not as the format says; then there are no changes."""


def decode(
    tensors: Tensors,
    segments: Segments,
    rows: torch.Tensor,
    starts: torch.Tensor,
    streams: torch.Tensor,
) -> Decoded:
    """Return what changed in the tiles of segments; waits for the device once.

    Takes 100 bytes a job, 4 bytes a change, and 64 KiB for each of some hundred programs.

    Args:
        rows: int32 [num_rows], of the classes of all tensors: their three bytes, the first one lowest.
            All are as the format says.
        starts: int64 [num_tiles + 1], where the stream of each tile begins, and the end.
    """
    device, num_jobs = starts.device, segments.num_jobs
    words = as_words(streams)
    counts = torch.empty(num_jobs * 16, dtype=torch.int32, device=device)
    nums = torch.zeros(num_jobs, dtype=torch.int32, device=device)
    first_wrong = torch.full((1,), NONE, dtype=torch.int32, device=device)
    count(tensors, segments, counts, starts=starts)
    common = (tensors, segments, starts, words, rows, counts, nums, first_wrong)
    read(*common)
    ends = torch.zeros(num_jobs + 1, dtype=torch.int64, device=device)
    torch.cumsum(nums, 0, out=ends[1:])
    firsts = ends[segments.table[:, columns.FIRST_JOB.value]]
    *bounds, wrong = torch.cat([firsts, ends[-1:], first_wrong]).tolist()
    segment = None
    if wrong != NONE:
        segment = int(np.searchsorted(segments.first_jobs, wrong, side="right")) - 1
        bounds = [0] * len(bounds)
    total = bounds[-1]
    dtype = torch.int32 if segments.is_narrow else torch.int64
    positions = torch.empty(total, dtype=dtype, device=device)
    values = torch.empty(total, dtype=torch.int16, device=device)
    if total:
        changes = torch.empty(total, dtype=torch.int32, device=device)
        read(*common, places=ends, changes=changes)
        each_tile(
            _place,
            tensors,
            segments,
            *(counts, nums, ends, changes, positions, values),
            per_processor=PROGRAMS_PER_PROCESSOR,
            scratch_words=8,
            vectors=2 * VECTORS,
            LOG_BLOCKS=segments.blocks.bit_length() - 1,
            PLACED=PLACED,
            **PLACING,
        )
    return Decoded(
        positions=positions,
        values=values,
        bounds=np.array(bounds, dtype=np.int64),
        first_wrong=segment,
    )
