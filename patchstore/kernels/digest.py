"""Digest what is served, in place, for all segments at once; see `tensors.state_digest`.

A program takes a block of one segment. Other kernels digest single elements with `mix`;
`tensors.elements.sum_of` says what it means.
"""

import torch
import triton
import triton.language as tl

from patchstore.kernels.segments import INTEGERS, Column, Kind
from patchstore.tensors import elements

_A = tl.constexpr(elements.A)
_B = tl.constexpr(elements.B)
_M = tl.constexpr(elements.M)
_LOW = tl.constexpr(elements.LOW)
BLOCK = 65_536
"""Elements that one program digests."""
_STEP = 512
"""Elements that it has in registers: with 2,048 there are too many, and it takes 2.5 times as long."""
_NUM = tl.constexpr(int(Column.NUM))
_MEMORY = tl.constexpr(int(Column.MEMORY))
_SOURCE = tl.constexpr(int(Column.SOURCE))
_TARGET = tl.constexpr(int(Column.TARGET))
_DIMS = tl.constexpr(int(Column.DIMS))


@triton.jit
def place(positions):
    """Return what a position (uint64, from 0) brings to an element's sum."""
    return (positions + 1) * _A


@triton.jit
def spread(distances):
    """Return by how much `place` grows over a distance (uint64)."""
    return distances * _A


@triton.jit
def fold(placed, bits):
    """Return what elements add to the two digest sums, modulo 2**64; `bits` are uint64, zero-extended."""
    u = placed + bits * _B
    z = (u ^ (u >> 32)) * _M
    y = z ^ (z >> 32)
    return y, (y >> 32) * (y & _LOW)


@triton.jit
def mix(positions, bits):
    """`fold` of the elements at these positions (uint64, from 0)."""
    return fold(place(positions), bits)


@triton.jit
def _digested(
    row, memory, source, target, begin, num, lanes, ramp,
    STEP: tl.constexpr, DIMS: tl.constexpr, NARROW: tl.constexpr, WIDENED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Both sums of a region's elements from `begin` on, and how many no checkpoint holds; each [STEP]."""
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


def digest(kind: Kind, table: torch.Tensor, jobs: torch.Tensor) -> torch.Tensor:
    """Digest what is served of some segments, whose `NUM` is the region's number of elements.

    Returns:
        int64 [num_segments, 3]: both digest sums, and how many elements no checkpoint holds.
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
            MEMORY=INTEGERS[kind.memory_width],
            WIDENED=kind.is_widened,
        )
    return sums
