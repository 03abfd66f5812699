"""Encode changes of parts of tensors as `context` does, in the very bytes of `codec.context`.

Changes come by position. `_locate` and `_fill` put them into rooms, one a tile. `_order` turns positions into
numbers, class after class (see `context_classes`), and puts changes in that order. Weights are read twice.

Then one thread walks the changes of a tile as a reader would: first to measure the stream, and then to
write it (`write`). Streams start as ones, so that runs of unchanged elements are only passed.
"""

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from patchstore.codec.context.rows import BINS, RowSets, choose_by_group, first_exponent
from patchstore.kernels import context_tables as columns
from patchstore.kernels import sent
from patchstore.kernels.context_classes import (
    DENSE,
    UNARY,
    class_place,
    class_rule,
    classes_of,
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
from patchstore.kernels.context_tables import Segments, Tensors, box, tensors, whole

_PASSED = tl.constexpr(48)
"""Bits of unchanged elements of a dense class that are written together, at most."""
Array = npt.NDArray[Any]
CHUNK = 2048
"""Changes of one tensor that a program takes."""
ORDERED = 256
"""Changes of a tile that a program takes at once."""
PROGRAMS_PER_PROCESSOR = 4
"""As many as run at a time."""
_ANYWHERE = ["addresses", "bounds", "chunks", "positions", "values"]
"""Arguments that begin wherever this version has them.

Triton would compile a kernel for each alignment, which takes a second in the middle of a run.
"""
_HIST = tl.constexpr(1024)
_HIST_BINS = 64


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
    """Measure the streams of some tiles, or, where EMIT, write them; see `context_decode._parse`."""
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


@triton.jit
def _chunk(tensors, addresses, bounds, chunks, owners, positions, CHUNK: tl.constexpr):
    """The tensor of a chunk, its row, the changes and the old bits of their elements."""
    tensor = tl.load(owners + tl.program_id(0)).to(tl.int64)
    row = tensors + tensor * columns.NUM_COLUMNS
    nth = (tl.program_id(0) - tl.load(chunks + tensor)) * CHUNK + tl.arange(0, CHUNK)
    at = tl.load(bounds + tensor) + nth
    mine = at < tl.load(bounds + tensor + 1)
    position = tl.load(positions + at, mask=mine, other=0)
    address = tl.load(addresses + tensor)
    width = tl.load(row + columns.WIDTH) + at * 0
    wide = tl.load(address.to(tl.pointer_type(tl.uint16)) + position, mask=mine & (width == 2), other=0)
    narrow = tl.load(address.to(tl.pointer_type(tl.uint8)) + position, mask=mine & (width == 1), other=0)
    return tensor, row, at, mine, position, wide.to(tl.int32) | narrow.to(tl.int32)


@triton.jit
def _within(
    row, place, SLICE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    FIRST: tl.constexpr, SIZE: tl.constexpr, FIRST_TILE: tl.constexpr,
):  # fmt: skip
    """Which tile of a part's side has these rows or columns, where in it, and how long it is there."""
    size = tl.load(row + SLICE).to(place.dtype)
    step = tl.load(row + TILE).to(place.dtype)
    first = tl.load(row + FIRST).to(place.dtype)
    place += first
    of_slice = place // size
    nth = (place - of_slice * size) // step
    begin = of_slice * size + nth * step
    end = tl.minimum(begin + tl.minimum(step, size - nth * step), first + tl.load(row + SIZE).to(place.dtype))
    begin = tl.maximum(begin, first)
    tile = of_slice * tl.load(row + TILES).to(place.dtype) + nth - tl.load(row + FIRST_TILE).to(place.dtype)
    return tile, place - begin, end - begin


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _locate(
    tensors, addresses, bounds, chunks, owners, positions, values, nums, tiles, slots, packed, histogram,
    CHUNK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Find the tile of changes, a slot in its room, their steps, and count old exponents."""
    tensor, row, at, mine, position, old = _chunk(
        tensors, addresses, bounds, chunks, owners, positions, CHUNK
    )
    if NARROW:
        place = position.to(tl.uint32)
    else:
        place = position.to(tl.uint64)
    cols = tl.load(row + columns.PART_COLS).to(place.dtype)
    rows = tl.load(row + columns.PART_ROWS).to(place.dtype)
    line = place // cols
    level = line // rows
    row_tile, tile_row, _ = _within(
        row, line - level * rows, columns.SLICE_ROWS, columns.TILE_ROWS, columns.ROW_TILES,
        columns.ROW, columns.PART_ROWS, columns.FIRST_ROW_TILE,
    )  # fmt: skip
    col_tile, tile_col, num_cols = _within(
        row, place - line * cols, columns.SLICE_COLS, columns.TILE_COLS, columns.COL_TILES,
        columns.COL, columns.PART_COLS, columns.FIRST_COL_TILE,
    )  # fmt: skip
    row_tiles = tl.load(row + columns.PART_ROW_TILES).to(place.dtype)
    col_tiles = tl.load(row + columns.PART_COL_TILES).to(place.dtype)
    tile = ((level * row_tiles + row_tile) * col_tiles + col_tile).to(tl.int32)
    tile += tl.load(row + columns.FIRST_TILE).to(tl.int32)
    element = (tile_row * num_cols + tile_col).to(tl.int32)
    width = tl.load(row + columns.WIDTH).to(tl.int32)
    new = tl.load(values + at, mask=mine, other=0).to(tl.int32) & ((1 << (8 * width)) - 1)
    spare = 32 - 8 * width
    step = ((key_of(new, width) - key_of(old, width)) << spare) >> spare
    slot = tl.atomic_add(nums + tile, tl.full((CHUNK,), 1, tl.int32), mask=mine, sem="relaxed")
    tl.store(tiles + at, tile, mask=mine)
    tl.store(slots + at, slot, mask=mine)
    tl.store(packed + at, (element & 0xFFFF) | (step << 16), mask=mine)
    exponent = (old >> tl.load(row + columns.SHIFT).to(tl.int32)) & tl.load(row + columns.MASK).to(tl.int32)
    counts = tl.histogram(tl.where(mine, exponent, 511), 512)
    bins = tl.arange(0, 512)
    tl.atomic_add(histogram + tensor * 256 + bins, counts, mask=(counts > 0) & (bins < 256), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _measure(tensors, addresses, bounds, chunks, owners, positions, packed, histogram, CHUNK: tl.constexpr):
    """Count changes by class and by the bin of the size of their steps, 64 bins a class."""
    tensor, row, at, mine, _, old = _chunk(tensors, addresses, bounds, chunks, owners, positions, CHUNK)
    size = tl.maximum(tl.abs(tl.load(packed + at, mask=mine, other=0) >> 16), 1)
    place = tl.where(size < 32, size - 1, 26 + power_of(size))
    shift, mask, lowest, last = class_rule(row)
    place = tl.where(mine, classes_of(old, shift, mask, lowest, last) * 64 + place, _HIST - 1)
    counts = tl.histogram(place, _HIST)
    bins = tl.arange(0, _HIST)
    tl.atomic_add(
        histogram + tensor * _HIST + bins, counts, mask=(counts > 0) & (bins < _HIST - 1), sem="relaxed"
    )


@triton.jit(do_not_specialize=["num"])
def _fill(tiles, slots, packed, places, room, num, CHUNK: tl.constexpr):
    """Put changes into the rooms of their tiles."""
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mine = at < num
    tile = tl.load(tiles + at, mask=mine, other=0)
    to = tl.load(places + tile, mask=mine, other=0) + tl.load(slots + at, mask=mine, other=0)
    tl.store(room + to, tl.load(packed + at, mask=mine, other=0), mask=mine)


@triton.jit
def _ones_of(word):
    """How many bits of uint32 words are ones: int32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


# Of the alignment of scratch, see `context_decode._place`.
@triton.jit(do_not_specialize=["num_jobs"], do_not_specialize_on_alignment=["scratch"])
def _order(
    tensors, segments, owners, picked, counts, nums, places, room, ordered, scratch, num_jobs,
    BLOCKS: tl.constexpr, VECTORS: tl.constexpr, ORDERED: tl.constexpr,
    MEMORY: tl.constexpr, MEMORY_WIDTH: tl.constexpr, WIDENED: tl.constexpr,
):  # fmt: skip
    """Turn positions in a tile into the numbers of elements, and put changes in their order."""
    scratch += tl.program_id(0).to(tl.int64) * (10 * BLOCKS)
    listed = (scratch + 4 * BLOCKS).to(tl.pointer_type(tl.uint64))
    bitmap = (scratch + 8 * BLOCKS).to(tl.pointer_type(tl.int32))
    before = (scratch + 9 * BLOCKS).to(tl.pointer_type(tl.int32))
    words = tl.arange(0, BLOCKS * 2)
    sums = scratch.to(tl.pointer_type(tl.uint16))
    for nth in range(tl.program_id(0), num_jobs, tl.num_programs(0)):
        job = tl.load(picked + nth).to(tl.int64)
        num_changes = tl.load(nums + job)
        if num_changes > 0:
            _, row, address, _, num_rows, num_cols, row_stride, col_stride = box(
                tensors, segments, owners, job, MEMORY_WIDTH
            )
            tl.store(bitmap + words, tl.zeros((BLOCKS * 2,), tl.int32))
            index_classes(
                row, address, num_rows * num_cols, num_cols, row_stride, col_stride, scratch,
                BLOCKS, VECTORS, MEMORY, MEMORY_WIDTH, WIDENED,
            )  # fmt: skip
            own = room + tl.load(places + job)
            for begin in range(0, num_changes, ORDERED):
                at = begin + tl.arange(0, ORDERED)
                mine = at < num_changes
                change = tl.load(own + at, mask=mine, other=0)
                element = change & 0xFFFF
                block = element // 64
                word = (element // 16) % 4
                nibble = ((element % 16) * 4).to(tl.uint64)
                number = tl.load(listed + element // 16, mask=mine, other=0)
                number = ((number >> nibble) & 15).to(tl.int32)
                rank = tl.load(sums + block * 16 + class_place(number), mask=mine, other=0).to(tl.int32)
                below = (tl.full((ORDERED,), 1, tl.uint64) << nibble) - 1
                for k in tl.static_range(4):
                    mask = matches(tl.load(listed + block * 4 + k, mask=mine & (k <= word), other=0), number)
                    mask = tl.where(word == k, mask & below, mask)
                    rank += tl.where(k <= word, num_matches(mask), 0)
                for k in tl.static_range(15):
                    rank += tl.where(k < number, tl.load(counts + job * 16 + k), 0)
                bit = tl.full((ORDERED,), 1, tl.int32) << (rank & 31)
                tl.atomic_or(bitmap + rank // 32, bit, mask=mine, sem="relaxed")
                tl.store(own + at, (rank & 0xFFFF) | (change & -65536), mask=mine)
            tl.debug_barrier()
            # Atomic operations are done beyond the first cache.
            num_ones = _ones_of(tl.load(bitmap + words, cache_modifier=".cg").to(tl.uint32, bitcast=True))
            tl.store(before + words, tl.cumsum(num_ones, 0) - num_ones)
            tl.debug_barrier()
            target = ordered + tl.load(places + job)
            for begin in range(0, num_changes, ORDERED):
                at = begin + tl.arange(0, ORDERED)
                mine = at < num_changes
                change = tl.load(own + at, mask=mine, other=0)
                rank = change & 0xFFFF
                held = tl.load(bitmap + rank // 32, mask=mine, other=0, cache_modifier=".cg")
                bit = tl.full((ORDERED,), 1, tl.uint32) << (rank & 31).to(tl.uint32)
                to = tl.load(before + rank // 32, mask=mine, other=0)
                to += _ones_of(held.to(tl.uint32, bitcast=True) & (bit - 1))
                tl.store(target + to, change, mask=mine)
            tl.debug_barrier()


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A change of parts of tensors as a payload holds it."""

    row_sets: Array
    """int64 [num_tensors], the number of each part's row set."""
    lengths: Array
    """int64 [num_tiles], bytes of each tile's stream, part by part."""
    streams: torch.Tensor
    """uint8, one after the other, on the device."""


class Encoder:
    """Encodes changes of parts of tensors, each with at least one, in three steps.

    Each step ends when the device has work: what the caller does before the next step costs no time of its
    own. Takes 16 bytes a change, 110 bytes a tile, 80 KiB for each of some hundred programs, and 5 KiB a
    part.
    """

    def __init__(
        self,
        geometry: Array,
        formats: Array,
        addresses: Array,
        positions: torch.Tensor,
        values: torch.Tensor,
        bounds: Array,
        groups: tuple[Array, Array],
        row_sets: RowSets,
        choosing: Executor,
        *,
        largest: int = 1,
    ) -> None:
        """Find the tiles of changes, and begin to count what rows are chosen by, and to choose them.

        Args:
            geometry: int64 [num_tensors, 16], of `context_tables.geometry`.
            formats: int [num_tensors, 3], of `context_tables.FORMATS`.
            addresses: int64 [num_tensors], of the old bits of the part, contiguous.
            positions: int32 or int64, ascending within each part, those of its elements that differ, in the
                part.
            values: int16, their new bits; one-byte elements in the lower byte.
            bounds: int64 [num_tensors + 1], where the changes of each part begin, and the end.
            groups: the parts for which row sets are chosen together, of one dtype: `order` and `bounds` of
                `choose_by_group`.
            row_sets: those of the payload so far, which grow by what these parts need.
            choosing: a thread, which chooses rows beside the caller.
            largest: elements of the largest tile for which kernels are compiled, if these parts have smaller
                ones alone.
        """
        device, num, num_tensors = positions.device, len(positions), len(geometry)
        self._geometry, self._formats, self._device = geometry, formats, device
        self._groups, self._row_sets = groups, row_sets
        zeros = np.zeros(num_tensors, dtype=np.int64)
        cut = tensors(geometry, formats, zeros, zeros + 1, device)
        self._held = held = whole(cut, addresses, largest)
        num_chunks = -(-np.diff(bounds) // CHUNK)
        firsts = np.cumsum(num_chunks) - num_chunks
        tables = sent(np.concatenate([addresses, bounds, firsts, num_chunks]), device)
        where, limits = tables[:num_tensors], tables[num_tensors : 2 * num_tensors + 1]
        chunks, repeats = tables[2 * num_tensors + 1 :].view(2, num_tensors).unbind()
        owners = torch.repeat_interleave(
            torch.arange(num_tensors, dtype=torch.int32, device=device),
            repeats,
            output_size=int(num_chunks.sum()),
        )
        grid = (len(owners),)
        self._nums = torch.zeros(held.num_jobs, dtype=torch.int32, device=device)
        tiles, self._slots, packed = (torch.empty(num, dtype=torch.int32, device=device) for _ in range(3))
        changed = torch.zeros((num_tensors, 256), dtype=torch.int32, device=device)
        of_chunks = (where, limits, chunks, owners, positions)
        _locate[grid](
            *(cut.table, *of_chunks, values, self._nums, tiles, self._slots, packed, changed),
            CHUNK=CHUNK,
            NARROW=held.is_narrow,
            num_warps=8,
        )
        self._places = self._nums.cumsum(0) - self._nums
        self._room = torch.empty(num, dtype=torch.int32, device=device)
        _fill[triton.cdiv(num, CHUNK),](
            tiles, self._slots, packed, self._places, self._room, num, CHUNK=CHUNK, num_warps=8
        )
        self._changed = changed.cpu().numpy().astype(np.int64)
        self._base = first_exponent(self._changed)
        cut = tensors(geometry, formats, self._base, np.full(num_tensors, 16), device)
        self._counts = torch.empty(held.num_jobs * 16, dtype=torch.int32, device=device)
        totals = torch.zeros(num_tensors * 16, dtype=torch.int64, device=device)
        count(cut, held, self._counts, totals=totals)
        sizes = torch.zeros((num_tensors, 16, _HIST_BINS), dtype=torch.int32, device=device)
        _measure[grid](cut.table, *of_chunks, packed, sizes, CHUNK=CHUNK, num_warps=8)
        found = torch.cat([totals.view(-1, 16, 1), sizes[:, :, :BINS].to(torch.int64)], dim=2)
        self._chosen = choosing.submit(self._choose, *_on_its_way(found))

    def _choose(self, found: torch.Tensor, is_found: torch.cuda.Event | None) -> Array:
        if is_found is not None:
            is_found.synchronize()
        widths = self._formats[:, 0]
        return choose_by_group(self._row_sets, self._changed, found.numpy(), widths, *self._groups)

    def order(self) -> None:
        """Begin to put changes in the order of the streams, as rows have it, and to measure those."""
        held, base, device = self._held, self._base, self._device
        self._numbers = self._chosen.result()
        sets, of_each = self._row_sets.sets.at(self._numbers).distinct()
        lo, classes = sets.lo[of_each], sets.nums[of_each]
        first_rows = (sets.nums.cumsum() - sets.nums)[of_each]
        cut = tensors(self._geometry, self._formats, lo, classes, device, first_rows=first_rows)
        rows = sets.listed
        codes = sent(rows.astype(np.int32) @ np.array([1, 1 << 8, 1 << 16], dtype=np.int32), device)
        if (((lo >= base) | (base == 0)) & (lo + classes <= base + 16)).all():
            shifted = np.clip(base[:, None] + np.arange(16) - lo[:, None], 0, classes[:, None] - 1)
            _reclass(self._counts, held, shifted)
        else:
            # Of the classes of another part, which reach beyond what was told apart here.
            totals = torch.zeros(len(lo) * 16, dtype=torch.int64, device=device)
            count(cut, held, self._counts, totals=totals)
        ordered = self._slots
        each_tile(
            _order,
            cut,
            held,
            *(self._counts, self._nums, self._places, self._room, ordered),
            per_processor=PROGRAMS_PER_PROCESSOR,
            scratch_words=10,
            ORDERED=ORDERED,
        )
        del self._room
        self._lengths = torch.empty(held.num_jobs, dtype=torch.int32, device=device)
        self._common = (cut, held, codes, self._counts, self._nums, self._places, ordered, self._lengths)
        write(*self._common)
        self._found, self._is_found = _on_its_way(self._lengths)

    def finish(self) -> Encoded:
        """Write the streams."""
        starts = self._lengths.cumsum(0) - self._lengths
        if self._is_found is not None:
            self._is_found.synchronize()
        told = self._found.numpy().astype(np.int64)
        total = int(told.sum())
        words = torch.full((total // 8 + 2,), -1, dtype=torch.int64, device=self._device)
        write(*self._common, starts=starts, words=words)
        return Encoded(
            row_sets=self._numbers,
            lengths=told,
            streams=words.view(torch.uint8)[:total],
        )


def _on_its_way(found: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Begin to copy to the host, so that a later step waits for this alone and not for what is launched next.

    Returns the copy, and when it is complete.
    """
    copy = torch.empty_like(found, device="cpu", pin_memory=found.is_cuda)
    copy.copy_(found, non_blocking=True)
    return copy, torch.cuda.current_stream().record_event() if found.is_cuda else None


def _reclass(counts: torch.Tensor, held: Segments, classes: Array) -> None:
    """Add up the counts of tiles by the classes of their parts.

    Args:
        classes: int64 [num_tensors, 16], the class of each that was counted.
    """
    by_tile = counts.view(-1, 16)
    to = sent(classes, counts.device)[held.owners.long()]
    by_tile.copy_(torch.zeros_like(by_tile).scatter_add_(1, to, by_tile))
