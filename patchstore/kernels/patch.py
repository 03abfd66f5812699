"""Patches on the device, for all segments at once: find where changes go, exchange them, and compare.

A program takes one tile of one segment: some changes of one patch. `tensors.elements`, and
`vllm_plugin.live.weights` where there are no kernels, say what all of this means.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from patchstore.kernels.digest import mix
from patchstore.kernels.gap_decode import TILE
from patchstore.kernels.segments import INTEGERS, Column, Kind

_NUM = tl.constexpr(int(Column.NUM))
_VALUES = tl.constexpr(int(Column.VALUES))
_FIRST_TILE = tl.constexpr(int(Column.FIRST_TILE))
_MEMORY = tl.constexpr(int(Column.MEMORY))
_SOURCE = tl.constexpr(int(Column.SOURCE))
_END = tl.constexpr(int(Column.END))
_TARGET = tl.constexpr(int(Column.TARGET))
_DIMS = tl.constexpr(int(Column.DIMS))

NUM_SUMS = 5
"""Columns of what `translate` sums up: both digest sums before, both after, and elements that no checkpoint
holds: wide ones with bits that a narrow one lacks."""


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
    first_wrong: torch.Tensor
    """int32 [1], memory of what is returned: to write, and to undo, must need no more memory."""


def count(stated: Stated) -> torch.Tensor:
    """Return how many changes of each job its region holds: int64 [num_jobs]."""
    counts = torch.empty(len(stated.jobs), dtype=torch.int64, device=stated.jobs.device)
    if len(counts):
        _count[len(counts),](stated.table, stated.jobs, stated.starts, counts, **stated._positions())
    return counts


def translate(
    stated: Stated, counts: torch.Tensor, num: int, target: torch.dtype, *, is_digested: bool
) -> tuple[Exchange, torch.Tensor]:
    """Find where `num` changes go, whose `counts` are of `count`, and read what is there.

    Positions become `target`: int32 or int64, whatever reaches the end of the longest storage. Returns also,
    if `is_digested`, int64 [num_segments, NUM_SUMS].
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
        first_wrong=torch.empty(1, dtype=torch.int32, device=device),
    )
    sums = torch.zeros(len(stated.table), NUM_SUMS, dtype=torch.int64, device=device)
    if len(counts):
        _translate[len(counts),](
            *(stated.table, stated.jobs, stated.starts, exchange.places),
            *(exchange.targets, exchange.new, exchange.old, sums),
            **stated._positions(),
            VALUE=INTEGERS[kind.value_width],
            MEMORY=INTEGERS[kind.memory_width],
            WIDENED=kind.is_widened,
            DIGEST=is_digested,
        )
    return exchange, sums


def exchange(what: Exchange) -> torch.Tensor:
    """Write the new bits, and keep in the place of the old ones what was there.

    Returns int32 [1], until the next call: the first segment of which an element was not as expected; `NONE`
    where all were.
    """
    # Threads have two changes each, so that many loads are under way.
    return _run(_exchange, what, what.new, what.old, num_warps=8)


def compare(what: Exchange) -> torch.Tensor:
    """Compare the served weights with the new bits. Returns as `exchange`."""
    return _run(_compare, what, what.new)


NONE = 2**31 - 1


def _run(kernel: Any, what: Exchange, *values: torch.Tensor, num_warps: int = 4) -> torch.Tensor:
    stated, kind = what.stated, what.stated.kind
    first_wrong = what.first_wrong.fill_(NONE)
    if len(what.counts):
        kernel[len(what.counts),](
            *(stated.table, stated.jobs, what.places, what.counts, what.targets, *values, first_wrong),
            WIDTH=kind.num_columns,
            TILE=TILE,
            MEMORY=INTEGERS[kind.memory_width],
            num_warps=num_warps,
        )
    return first_wrong
