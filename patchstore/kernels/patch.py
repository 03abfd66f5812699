"""Patches on the device, for all tensors and all their regions at once: find, exchange, compare and digest.

A program takes one tile of one segment: of what one region of a served weight has to do with one stored
tensor. What segments are is in tables of int64, one row each, whose columns are named below; addresses are
absolute, so tensors need not lie together. The number of launches depends on neither tensors nor regions.
`reference`, and `vllm_plugin.weights` where there are no kernels, say what all of this means.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl

from patchstore.kernels.mixing import fold, mix, place, spread

TILE = 512
"""Changes, or gaps, that one program takes. Few, so that all which run at a time write close together: an
exchange of 82 million took 4.2 ms on an H200, with 2,048 a program 4.4."""
BLOCK = 65_536
"""Elements that one program digests."""
_STEP = 512
"""Elements that it has in registers: with 2,048 there are too many, and it takes 2.5 times as long."""


class Stream(IntEnum):
    """Columns of the table of gap streams."""

    GAPS = 0
    """Address of uint16 [num]."""
    NUM = 1
    PLACE = 2
    """Where its positions begin in what `list_positions` returns."""
    FIRST = 3
    """What that adds to each of them."""


class Column(IntEnum):
    """Columns of the table of segments. Shape, source strides and target strides of its dimensions follow."""

    POSITIONS = 0
    """Address of what states the positions [num]: uint16 gaps, or int32 or int64 positions."""
    VALUES = 1
    """Address of the new bits, [num]."""
    NUM = 2
    FIRST_TILE = 3
    """Of the stream, in what `starts` holds; unused without gaps."""
    MEMORY = 4
    """Address of the served weight's storage."""
    SOURCE = 5
    """Position in the stored tensor of the region's first element."""
    END = 6
    """One past that of its last."""
    TARGET = 7
    """Where the first element is in the storage."""
    DIMS = 8


_NUM_STREAM = tl.constexpr(len(Stream))
_NUM = tl.constexpr(int(Column.NUM))
_VALUES = tl.constexpr(int(Column.VALUES))
_FIRST_TILE = tl.constexpr(int(Column.FIRST_TILE))
_MEMORY = tl.constexpr(int(Column.MEMORY))
_SOURCE = tl.constexpr(int(Column.SOURCE))
_END = tl.constexpr(int(Column.END))
_TARGET = tl.constexpr(int(Column.TARGET))
_DIMS = tl.constexpr(int(Column.DIMS))

NUM_SUMS = 5
"""Columns of what `translate` sums up: both digest sums before, both after, elements that were nobody's."""

_INTEGERS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}


@triton.jit
def _sum_gaps(streams, jobs, sums, TILE: tl.constexpr):
    job = tl.program_id(0).to(tl.int64)
    row = streams + tl.load(jobs + 2 * job).to(tl.int64) * _NUM_STREAM
    gaps = tl.load(row).to(tl.pointer_type(tl.uint16))
    k = tl.load(jobs + 2 * job + 1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = k < tl.load(row + 1)
    steps = tl.where(inside, tl.load(gaps + k, mask=inside, other=0).to(tl.int32) + 1, 0)
    tl.store(sums + job, tl.sum(steps).to(tl.int64))


@triton.jit
def _list(streams, jobs, starts, listed, TILE: tl.constexpr):
    job = tl.program_id(0).to(tl.int64)
    row = streams + tl.load(jobs + 2 * job).to(tl.int64) * _NUM_STREAM
    gaps = tl.load(row).to(tl.pointer_type(tl.uint16))
    k = tl.load(jobs + 2 * job + 1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = k < tl.load(row + 1)
    steps = tl.where(inside, tl.load(gaps + k, mask=inside, other=0).to(tl.int32) + 1, 0)
    positions = tl.load(starts + job) + tl.cumsum(steps, 0).to(tl.int64) - 1
    tl.store(listed + tl.load(row + 2) + k, tl.load(row + 3) + positions, mask=inside)


@triton.jit
def _stated(row, tile, starts, TILE: tl.constexpr, GAPS: tl.constexpr, POSITION: tl.constexpr):
    """Positions in the stored tensor that a tile states, int64, and which of the tile's places it has."""
    k = tile * TILE + tl.arange(0, TILE)
    stated = k < tl.load(row + _NUM)
    if GAPS:
        gaps = tl.load(row).to(tl.pointer_type(tl.uint16))
        steps = tl.where(stated, tl.load(gaps + k, mask=stated, other=0).to(tl.int32) + 1, 0)
        first = tl.load(starts + tl.load(row + _FIRST_TILE) + tile)
        positions = first + tl.cumsum(steps, 0).to(tl.int64) - 1
    else:
        listed = tl.load(row).to(tl.pointer_type(POSITION))
        positions = tl.load(listed + k, mask=stated, other=0).to(tl.int64)
    return k, stated, positions


@triton.jit
def _located(row, positions, stated, DIMS: tl.constexpr, NARROW: tl.constexpr):
    """Which positions a region holds, and where they are in its storage; DIMS is 0 where it is one run."""
    source = tl.load(row + _SOURCE)
    held = stated & (positions >= source) & (positions < tl.load(row + _END))
    rest = positions - source
    targets = tl.load(row + _TARGET) + tl.zeros_like(positions)
    if DIMS == 0:
        targets += rest
    else:
        if NARROW:
            rest = tl.where(held, rest, 0).to(tl.uint32)
        else:
            rest = tl.where(held, rest, 0).to(tl.uint64)
        for dim in tl.static_range(DIMS):
            size = tl.load(row + _DIMS + dim)
            stride = tl.load(row + _DIMS + DIMS + dim)
            digits = rest // stride.to(rest.dtype)
            rest -= digits * stride.to(rest.dtype)
            held = held & (digits.to(tl.int64) < size)
            targets += digits.to(tl.int64) * tl.load(row + _DIMS + 2 * DIMS + dim)
        held = held & (rest == 0)
    return held, targets


@triton.jit
def _count(
    table, jobs, starts, counts,
    WIDTH: tl.constexpr, TILE: tl.constexpr, GAPS: tl.constexpr, POSITION: tl.constexpr, DIMS: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    job = tl.program_id(0).to(tl.int64)
    row = table + tl.load(jobs + 2 * job).to(tl.int64) * WIDTH
    tile = tl.load(jobs + 2 * job + 1).to(tl.int64)
    _, stated, positions = _stated(row, tile, starts, TILE, GAPS, POSITION)
    held, _ = _located(row, positions, stated, DIMS, NARROW)
    tl.store(counts + job, tl.sum(held.to(tl.int64)))


@triton.jit
def _translate(
    table, jobs, starts, places, targets, new, old, sums,
    WIDTH: tl.constexpr, TILE: tl.constexpr, GAPS: tl.constexpr, POSITION: tl.constexpr, DIMS: tl.constexpr,
    NARROW: tl.constexpr, VALUE: tl.constexpr, MEMORY: tl.constexpr, WIDENED: tl.constexpr,
    DIGEST: tl.constexpr,
):  # fmt: skip
    job = tl.program_id(0).to(tl.int64)
    segment = tl.load(jobs + 2 * job).to(tl.int64)
    row = table + segment * WIDTH
    tile = tl.load(jobs + 2 * job + 1).to(tl.int64)
    k, stated, positions = _stated(row, tile, starts, TILE, GAPS, POSITION)
    held, where = _located(row, positions, stated, DIMS, NARROW)
    values = tl.load(tl.load(row + _VALUES).to(tl.pointer_type(VALUE)) + k, mask=held, other=0)
    memory = tl.load(row + _MEMORY).to(tl.pointer_type(MEMORY))
    before = tl.load(memory + where, mask=held, other=0)
    at = tl.load(places + job) + tl.cumsum(held.to(tl.int32), 0) - 1
    tl.store(targets + at, where.to(targets.dtype.element_ty), mask=held)
    wide = values.to(MEMORY)
    if WIDENED:
        wide = wide << 16
    tl.store(new + at, wide.to(new.dtype.element_ty, bitcast=True), mask=held)
    tl.store(old + at, before.to(old.dtype.element_ty, bitcast=True), mask=held)
    if DIGEST:
        bits = before.to(tl.uint64)
        if WIDENED:
            bits = bits >> 16
            strange = tl.sum((held & ((before & 0xFFFF) != 0)).to(tl.int64))
            tl.atomic_add(sums + segment * 5 + 4, strange, mask=strange > 0)
        where = positions.to(tl.uint64)
        first, second = mix(where, bits)
        _add(sums + segment * 5, first, second, held)
        first, second = mix(where, values.to(tl.uint64))
        _add(sums + segment * 5 + 2, first, second, held)


@triton.jit
def _add(sums, first, second, held):
    # A sum of none must not wait for its turn.
    any_held = tl.sum(held.to(tl.int32)) > 0
    tl.atomic_add(sums, tl.sum(tl.where(held, first, 0)).to(tl.int64, bitcast=True), mask=any_held)
    tl.atomic_add(sums + 1, tl.sum(tl.where(held, second, 0)).to(tl.int64, bitcast=True), mask=any_held)


@triton.jit
def _exchange(
    table, jobs, places, counts, targets, new, old, first_wrong,
    WIDTH: tl.constexpr, TILE: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    job = tl.program_id(0).to(tl.int64)
    segment = tl.load(jobs + 2 * job)
    memory = tl.load(table + segment.to(tl.int64) * WIDTH + _MEMORY).to(tl.pointer_type(MEMORY))
    num = tl.load(counts + job)
    at = tl.load(places + job) + tl.arange(0, TILE)
    mine = tl.arange(0, TILE) < num
    where = memory + tl.load(targets + at, mask=mine, other=0)
    wanted = tl.load(new + at, mask=mine, other=0)
    expected = tl.load(old + at, mask=mine, other=0)
    found = tl.load(where, mask=mine, other=0)
    tl.store(where, wanted.to(MEMORY, bitcast=True), mask=mine)
    found = found.to(old.dtype.element_ty, bitcast=True)
    is_other = mine & (found != expected)
    tl.store(old + at, found, mask=is_other)
    tl.atomic_min(first_wrong, segment, mask=tl.sum(is_other.to(tl.int32)) > 0)


@triton.jit
def _compare(
    table, jobs, places, counts, targets, new, first_wrong,
    WIDTH: tl.constexpr, TILE: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    job = tl.program_id(0).to(tl.int64)
    segment = tl.load(jobs + 2 * job)
    memory = tl.load(table + segment.to(tl.int64) * WIDTH + _MEMORY).to(tl.pointer_type(MEMORY))
    at = tl.load(places + job) + tl.arange(0, TILE)
    mine = tl.arange(0, TILE) < tl.load(counts + job)
    where = memory + tl.load(targets + at, mask=mine, other=0)
    wanted = tl.load(new + at, mask=mine, other=0)
    found = tl.load(where, mask=mine, other=0).to(new.dtype.element_ty, bitcast=True)
    is_wrong = tl.sum((mine & (found != wanted)).to(tl.int32)) > 0
    tl.atomic_min(first_wrong, segment, mask=is_wrong)


@triton.jit
def _digested(
    row, memory, source, target, begin, num, lanes, ramp,
    STEP: tl.constexpr, DIMS: tl.constexpr, NARROW: tl.constexpr, WIDENED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Both sums of the elements of a region from `begin` on, each [STEP], and how many were nobody's."""
    if DIMS == 0:
        at = memory + (target + begin) + lanes
        placed = place((source + begin).to(tl.uint64)) + ramp
    else:
        if NARROW:
            rest = (begin + lanes).to(tl.uint32)
        else:
            rest = (begin + lanes).to(tl.uint64)
        where = tl.zeros((STEP,), tl.int64)
        positions = tl.zeros((STEP,), tl.int64)
        for i in tl.static_range(DIMS):
            dim = DIMS - 1 - i
            size = tl.load(row + _DIMS + dim).to(rest.dtype)
            above = rest // size
            digits = (rest - above * size).to(tl.int64)
            rest = above
            positions += digits * tl.load(row + _DIMS + DIMS + dim)
            where += digits * tl.load(row + _DIMS + 2 * DIMS + dim)
        at = memory + target + where
        placed = place((positions + source).to(tl.uint64))
    if MASKED:
        mine = begin + lanes < num
        found = tl.load(at, mask=mine, other=0)
    else:
        found = tl.load(at)
    bits = found.to(tl.uint64)
    strange = tl.zeros((STEP,), tl.int32)
    if WIDENED:
        bits = bits >> 16
        strange = ((found & 0xFFFF) != 0).to(tl.int32)
    first, second = fold(placed, bits)
    if MASKED:
        first = tl.where(mine, first, 0)
        second = tl.where(mine, second, 0)
        strange = tl.where(mine, strange, 0)
    return first, second, strange


@triton.jit
def _digest(
    table, jobs, sums,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, DIMS: tl.constexpr, NARROW: tl.constexpr,
    ALIGNED: tl.constexpr, MEMORY: tl.constexpr, WIDENED: tl.constexpr,
):  # fmt: skip
    job = tl.program_id(0).to(tl.int64)
    segment = tl.load(jobs + 2 * job).to(tl.int64)
    row = table + segment * WIDTH
    num = tl.load(row + _NUM)
    begin = tl.load(jobs + 2 * job + 1).to(tl.int64) * BLOCK
    source = tl.load(row + _SOURCE)
    target = tl.load(row + _TARGET)
    memory = tl.load(row + _MEMORY).to(tl.pointer_type(MEMORY))
    if ALIGNED:
        memory = tl.multiple_of(memory + target, 16)
        target = target * 0
    lanes = tl.arange(0, STEP)
    ramp = spread(lanes.to(tl.uint64))
    first = tl.zeros((STEP,), tl.uint64)
    second = tl.zeros((STEP,), tl.uint64)
    strange = tl.zeros((STEP,), tl.int32)
    end = tl.minimum(begin + BLOCK, num)
    whole = (end - begin) // STEP
    for step in range(whole):
        one, two, three = _digested(
            row, memory, source, target, begin + step * STEP, num, lanes, ramp,
            STEP, DIMS, NARROW, WIDENED, MASKED=False,
        )  # fmt: skip
        first += one
        second += two
        strange += three
    if begin + whole * STEP < end:
        one, two, three = _digested(
            row, memory, source, target, begin + whole * STEP, num, lanes, ramp,
            STEP, DIMS, NARROW, WIDENED, MASKED=True,
        )  # fmt: skip
        first += one
        second += two
        strange += three
    tl.atomic_add(sums + segment * 3, tl.sum(first).to(tl.int64, bitcast=True))
    tl.atomic_add(sums + segment * 3 + 1, tl.sum(second).to(tl.int64, bitcast=True))
    if WIDENED:
        num_strange = tl.sum(strange)
        tl.atomic_add(sums + segment * 3 + 2, num_strange.to(tl.int64), mask=num_strange > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What all segments of a table have in common, so that one launch serves them."""

    value_width: int
    """Bytes of a stored element."""
    memory_width: int
    """Bytes of a served one: the same, or 4 for 2, which then is the upper half."""
    num_dims: int
    """Of every region; 0 where each is one run in both, without gaps."""
    is_narrow: bool
    """Whether every stored tensor has fewer than 2**31 elements."""
    is_aligned: bool
    """Whether every region begins at an address that 16 divides. Only runs need to say."""

    @property
    def is_widened(self) -> bool:
        return self.value_width != self.memory_width

    @property
    def num_columns(self) -> int:
        return int(Column.DIMS) + 3 * self.num_dims


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """Segments of one kind, whose patches are on the device."""

    kind: Kind
    table: torch.Tensor
    """int64 [num_segments, kind.num_columns], on the device, as all tensors here."""
    jobs: torch.Tensor
    """int32 [num_jobs, 2]: a segment, and which tile of its patch."""
    position_width: int
    """Bytes of a listed position: 4 or 8; 2 for gaps."""
    starts: torch.Tensor
    """int64 [num_tiles]: one past the position before each tile of the gap streams; not read without gaps."""

    def _positions(self) -> dict[str, Any]:
        return {
            "WIDTH": self.kind.num_columns,
            "TILE": TILE,
            "GAPS": self.position_width == 2,
            "POSITION": tl.int64 if self.position_width == 8 else tl.int32,
            "DIMS": self.kind.num_dims,
            "NARROW": self.kind.is_narrow,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What is to be written to the served weights of some segments, and what it replaces."""

    stated: Stated
    counts: torch.Tensor
    """int64 [num_jobs]: changes of each job that are served here."""
    places: torch.Tensor
    """int64 [num_jobs]: where a job's changes begin in what follows."""
    targets: torch.Tensor
    """int32 or int64 [num]: elements of the served weight's storage."""
    new: torch.Tensor
    """Integers [num] of the served element's width."""
    old: torch.Tensor


def sum_gaps(streams: torch.Tensor, jobs: torch.Tensor) -> torch.Tensor:
    """Return by how many positions each tile of some gap streams advances: int64 [num_jobs].

    Args:
        streams: int64 [num_streams, len(Stream)].
        jobs: int32 [num_jobs, 2]: a stream, and which of its tiles.
    """
    sums = torch.empty(len(jobs), dtype=torch.int64, device=jobs.device)
    if len(jobs):
        _sum_gaps[len(jobs),](streams, jobs, sums, TILE=TILE)
    return sums


def list_positions(streams: torch.Tensor, jobs: torch.Tensor, starts: torch.Tensor, num: int) -> torch.Tensor:
    """Return what gap streams state, one after the other: int64 [num].

    Args:
        starts: int64 [num_jobs]: one past the position before each tile.
    """
    listed = torch.empty(num, dtype=torch.int64, device=jobs.device)
    if len(jobs):
        _list[len(jobs),](streams, jobs, starts, listed, TILE=TILE)
    return listed


def count(stated: Stated) -> torch.Tensor:
    """Return how many changes of each job its region holds: int64 [num_jobs]."""
    counts = torch.empty(len(stated.jobs), dtype=torch.int64, device=stated.jobs.device)
    if len(counts):
        _count[len(counts),](stated.table, stated.jobs, stated.starts, counts, **stated._positions())
    return counts


def translate(
    stated: Stated, counts: torch.Tensor, num: int, target: torch.dtype, *, is_digested: bool
) -> tuple[Exchange, torch.Tensor]:
    """Find where changes go, and read what is there.

    Args:
        counts: of `count`.
        num: their sum.
        target: int32 or int64, whatever reaches the end of the longest storage.

    Returns:
        And, if `is_digested`, int64 [num_segments, NUM_SUMS]: see there.
    """
    kind, device = stated.kind, stated.jobs.device
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.memory_width]
    exchange = Exchange(
        stated=stated,
        counts=counts,
        places=counts.cumsum(0) - counts,
        targets=torch.empty(num, dtype=target, device=device),
        new=torch.empty(num, dtype=width, device=device),
        old=torch.empty(num, dtype=width, device=device),
    )
    sums = torch.zeros(len(stated.table), NUM_SUMS, dtype=torch.int64, device=device)
    if len(counts):
        _translate[len(counts),](
            *(stated.table, stated.jobs, stated.starts, exchange.places),
            *(exchange.targets, exchange.new, exchange.old, sums),
            **stated._positions(),
            VALUE=_INTEGERS[kind.value_width],
            MEMORY=_INTEGERS[kind.memory_width],
            WIDENED=kind.is_widened,
            DIGEST=is_digested,
        )
    return exchange, sums


def exchange(what: Exchange) -> torch.Tensor:
    """Write the new bits, and keep in the place of the old ones what was there.

    Returns:
        int32 [1]: the first segment of which an element was not as expected; `NONE` where all were.
    """
    # Threads have two changes each, so that many loads are under way.
    return _run(_exchange, what, what.new, what.old, num_warps=8)


def compare(what: Exchange) -> torch.Tensor:
    """Compare the served weights with the new bits. Returns as `exchange`."""
    return _run(_compare, what, what.new)


NONE = 2**31 - 1


def _run(kernel: Any, what: Exchange, *values: torch.Tensor, num_warps: int = 4) -> torch.Tensor:
    stated, kind = what.stated, what.stated.kind
    first_wrong = torch.full((1,), NONE, dtype=torch.int32, device=what.counts.device)
    if len(what.counts):
        kernel[len(what.counts),](
            *(stated.table, stated.jobs, what.places, what.counts, what.targets, *values, first_wrong),
            WIDTH=kind.num_columns,
            TILE=TILE,
            MEMORY=_INTEGERS[kind.memory_width],
            num_warps=num_warps,
        )
    return first_wrong


def digest(kind: Kind, table: torch.Tensor, jobs: torch.Tensor) -> torch.Tensor:
    """Digest what is served of some segments.

    Args:
        table: int64 [num_segments, kind.num_columns]; `NUM` is the region's number of elements.
        jobs: int32 [num_jobs, 2]: a segment, and which of its blocks.

    Returns:
        int64 [num_segments, 3]: both digest sums, and how many elements were nobody's.
    """
    sums = torch.zeros(len(table), 3, dtype=torch.int64, device=table.device)
    if len(jobs):
        _digest[len(jobs),](
            *(table, jobs, sums),
            WIDTH=kind.num_columns,
            BLOCK=BLOCK,
            STEP=_STEP,
            DIMS=kind.num_dims,
            NARROW=kind.is_narrow,
            ALIGNED=kind.is_aligned and kind.num_dims == 0,
            MEMORY=_INTEGERS[kind.memory_width],
            WIDENED=kind.is_widened,
        )
    return sums
