"""Write streams of changes, in the very bytes of `encodings.context`.

One thread walks the changes of a tile as a reader would: first to measure the stream, and then to write it.
Streams start as ones, so that runs of unchanged elements are only passed.
"""

import torch
import triton
import triton.language as tl

from patchstore.kernels.context_streams import (
    DENSE,
    UNARY,
    each_stream,
    floor_div,
    next_class,
    power_of,
    run_length,
    tile_of,
)
from patchstore.kernels.context_tables import Segments, Tensors

_PASSED = tl.constexpr(48)
"""Bits of unchanged elements of a dense class that are written together, at most."""


@triton.jit
def _binary(value, most):
    """A number below `most` in truncated binary: the field, int64, and its bits."""
    power = power_of(most)
    short = (2 << power) - most
    is_long = value >= short
    shifted = value + short
    field = tl.where(is_long, (shifted >> 1) | ((shifted & 1) << power), value)
    return field.to(tl.int64), power + is_long.to(tl.int32)


@triton.jit
def _rice(value, k, width):
    """A number in Rice's code: the field, int64, and its bits."""
    ones = tl.minimum(value >> k, UNARY)
    is_raw = ones == UNARY
    rest = tl.where(is_raw, value, value & ((1 << k) - 1)).to(tl.int64)
    unary = (tl.full(value.shape, 1, tl.int64) << ones.to(tl.int64)) - 1
    field = unary | (rest << tl.where(is_raw, UNARY, ones + 1).to(tl.int64))
    return field, tl.where(is_raw, UNARY + 8 * width, ones + 1 + k)


@triton.jit
def _put(words, start, p, last, field, bits, mine, EMIT: tl.constexpr):
    """Write a field of at most 58 bits at bit p; return one past the last bit that is zero."""
    every = tl.full(field.shape, -1, tl.int64)
    field = field | (every << bits.to(tl.int64))
    if EMIT:
        at = start + p
        shift = at & 63
        low = (field << shift) | ~(every << shift)
        high = (field >> 1) >> (63 - shift)
        tl.atomic_and(words + (at >> 6), low, mask=mine & (low != -1), sem="relaxed")
        tl.atomic_and(words + (at >> 6) + 1, high, mask=mine & (high != -1), sem="relaxed")
    else:
        zeros = ~field
        # Without neighbours, ones cannot round up.
        highest = power_of(tl.maximum(zeros & ~(zeros >> 1), 1))
        last = tl.where(mine & (zeros != 0), p + highest + 1, last)
    return last


@triton.jit(do_not_specialize=["num_jobs"])
def _write(
    tensors, segments, owners, rows, counts, nums, places, changes, starts, lengths, words, num_jobs,
    LANES: tl.constexpr, EMIT: tl.constexpr,
):  # fmt: skip
    """Measure the streams of some tiles, or, where EMIT, write them; see `context_read._parse`."""
    job = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = job < num_jobs
    last_class, width, codes = tile_of(tensors, segments, owners, rows, job, inside)
    num = tl.load(nums + job, mask=inside, other=0)
    own = changes + tl.load(places + job, mask=inside, other=0)
    own_counts = counts + job.to(tl.int64) * 16
    start = tl.zeros((LANES,), tl.int64)
    if EMIT:
        start = tl.load(starts + job, mask=inside, other=0) * 8
    active = inside & (num > 0)
    is_open = job < 0
    p = tl.zeros((LANES,), tl.int32)
    last = tl.zeros((LANES,), tl.int32)
    number = tl.zeros((LANES,), tl.int32) - 1
    left = tl.zeros((LANES,), tl.int32)
    element = tl.zeros((LANES,), tl.int32)
    done = tl.zeros((LANES,), tl.int32)
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
        change = tl.load(own + done, mask=busy & (done < num), other=0)
        gap = (change & 0xFFFF) - element
        # Elements before the next change, or up to the end of the class.
        has = busy & (done < num) & (gap < left)
        gap = tl.where(has, gap, left)
        step = change >> 16
        size = tl.abs(step)
        is_less = (step < 0).to(tl.int64)

        length_of_run = run_length(kind & 0x3F)
        hit = sparse & has
        whole_runs = floor_div(tl.where(has, gap, left + length_of_run - 1), length_of_run)
        rest = tl.where(hit, gap - whole_runs * length_of_run, 0)
        field, bits = _binary(rest, tl.minimum(length_of_run, tl.maximum(left - gap + rest, 1)))
        field = (field << 1) | (is_less << (bits + 1).to(tl.int64))
        bits += 2
        p += tl.where(sparse, whole_runs, 0)
        passed = gap
        writes = hit

        if tl.max(dense.to(tl.int32)) > 0:
            swap = (code >> 23) != 0
            now = dense & has & (gap == 0)
            coded, coded_bits = _rice(tl.where(swap & (size == 1), 0, size), k, width)
            coded = coded | (is_less << coded_bits.to(tl.int64))
            each = tl.where(swap, 2, k + 1)
            together = tl.minimum(gap, floor_div(each * 0 + _PASSED, each))
            same_bits = together * each
            same = tl.full((LANES,), 0x5555555555555555, tl.int64)
            same = tl.where(swap, same & ((tl.full((LANES,), 1, tl.int64) << same_bits.to(tl.int64)) - 1), 0)
            field = tl.where(dense, tl.where(now, coded, same), field)
            bits = tl.where(dense, tl.where(now, coded_bits + 1, same_bits), bits)
            passed = tl.where(dense, tl.where(now, 0, together), passed)
            hit = hit | now
            writes = writes | dense
        last = _put(words, start, p, last, field, bits, writes, EMIT)
        p += tl.where(writes, bits, 0)

        runs = (code >> 8) & 0xFF
        stepped = hit & sparse & (runs > 0)
        if tl.max(stepped.to(tl.int32)) > 0:
            length_of_run = run_length(tl.maximum(runs - 1, 0))
            opens = stepped & (run == 0) & ~is_open
            end = element + left
            ahead = tl.zeros((LANES,), tl.int32)
            looks = opens
            ends_large = job < 0
            while tl.max(looks.to(tl.int32)) > 0:
                more = looks & (done + ahead < num) & (ahead < length_of_run)
                other = tl.load(own + done + ahead, mask=more, other=0)
                more = more & ((other & 0xFFFF) < end)
                is_large = more & (tl.abs(other >> 16) != 1)
                ends_large = ends_large | is_large
                looks = more & ~is_large
                ahead += looks.to(tl.int32)
            field, bits = _binary(tl.minimum(ahead, length_of_run - 1), length_of_run)
            field = tl.where(ends_large, field << 1, 1)
            bits = tl.where(ends_large, bits + 1, 1)
            field = tl.where(opens, field, 0)
            bits = tl.where(opens, bits, 0)
            run = tl.where(opens, tl.where(ends_large, ahead, length_of_run), run)
            is_open = is_open | (opens & ends_large)
            large = stepped & (run == 0)
            run -= (stepped & ~large).to(tl.int32)
            is_open = is_open & ~large
            coded, coded_bits = _rice(tl.maximum(size - 2, 0), k, width)
            field = tl.where(large, field | (coded << bits.to(tl.int64)), field)
            bits += tl.where(large, coded_bits, 0)
            last = _put(words, start, p, last, field, bits, stepped & (bits > 0), EMIT)
            p += tl.where(stepped, bits, 0)

        passed = tl.where(busy, passed + hit.to(tl.int32), 0)
        done += hit.to(tl.int32)
        element += passed
        left -= passed
    if not EMIT:
        tl.store(lengths + job, (last + 7) // 8, mask=inside)


def write(
    tensors: Tensors,
    segments: Segments,
    rows: torch.Tensor,
    counts: torch.Tensor,
    nums: torch.Tensor,
    places: torch.Tensor,
    changes: torch.Tensor,
    lengths: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
    words: torch.Tensor | None = None,
) -> None:
    """Measure the streams of jobs, or, given `words`, write them; one launch.

    Args:
        rows: int32 [num_rows], the codes of classes.
        counts: int32 [num_jobs * 16], elements of each class.
        nums: int32 [num_jobs], changes of each job.
        places: int64 [num_jobs], where they begin in `changes`.
        changes: int32, the number of the element, and the step times 2**16; ascending.
        lengths: int32 [num_jobs], bytes of each stream; is written when streams are measured.
        starts: int64 [num_jobs], where each begins in `words`, in bytes.
        words: int64, all ones; is written.
    """
    # Where nothing is written, tensors of the same types stand for those that are not read.
    begins, room = (places, places) if starts is None or words is None else (starts, words)
    each_stream(
        *(_write, tensors, segments, rows, counts, nums, places, changes, begins, lengths, room),
        emit=words is not None,
    )
