"""Decode what changed in tensors of the encoding `context`, from the live weights and the streams.

Streams speak of numbers of elements; see `context_classes`. So there are three steps. `count` finds how many
elements of each class every tile has, `read` reads the streams, and `_place` finds, tile by tile again, the
positions that the numbers stand for. Nothing is sorted. Weights are read twice.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from patchstore.kernels.context_classes import (
    VECTORS,
    bits_of,
    bits_of_key,
    class_place,
    count,
    each_tile,
    index_classes,
    key_of,
    matches,
    num_matches,
)
from patchstore.kernels.context_read import as_words, read
from patchstore.kernels.context_tables import Segment, Segments, Tensor, Tensors, box

PLACED = 256
"""Changes that a program places at once."""
PROGRAMS_PER_PROCESSOR = 3
"""As many as run at a time. Each has 64 bytes of scratch for 64 elements of a tile, to stay in the caches."""
PLACING = {"num_warps": 8, "maxnreg": 80}
"""So that 24 warps run on a processor: it is the waiting for memory that takes long. Measured on an H200."""
NONE = 2**31 - 1

_WIDTH = tl.constexpr(int(Tensor.WIDTH))
_COLS = tl.constexpr(int(Tensor.COLS))


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
            width = tl.load(row + _WIDTH).to(tl.int32)
            cols = tl.load(row + _COLS)
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
        streams: uint8.
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
    firsts = ends[segments.table[:, Segment.FIRST_JOB]]
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
