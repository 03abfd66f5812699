"""Positions that gap streams state, for all streams of a version at once.

A program takes one tile of one stream. `sum_gaps` finds by how much each tile advances; from that follows
where it begins. `list_positions` lists the positions, where something else than `patch` needs them.
"""

from enum import IntEnum

import torch
import triton
import triton.language as tl

TILE = 512
"""Gaps, or changes (see `patch`), that one program takes. Few, so that all which run at a time write close
together: an exchange of 82 million took 4.2 ms on an H200, with 2,048 a program 4.4."""


class Stream(IntEnum):
    """Columns of the table of gap streams."""

    GAPS = 0
    """Address of uint16 [num]."""
    NUM = 1
    PLACE = 2
    """Where its positions begin in what `list_positions` returns."""
    FIRST = 3
    """What that adds to each of them."""


_NUM_STREAM = tl.constexpr(len(Stream))


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


def sum_gaps(streams: torch.Tensor, jobs: torch.Tensor) -> torch.Tensor:
    """Return by how many positions each job, a tile of a gap stream, advances: int64 [num_jobs]."""
    sums = torch.empty(len(jobs), dtype=torch.int64, device=jobs.device)
    if len(jobs):
        _sum_gaps[len(jobs),](streams, jobs, sums, TILE=TILE)
    return sums


def list_positions(streams: torch.Tensor, jobs: torch.Tensor, starts: torch.Tensor, num: int) -> torch.Tensor:
    """Return what gap streams state, int64 [num]; `starts` are one past the position before each tile."""
    listed = torch.empty(num, dtype=torch.int64, device=jobs.device)
    if len(jobs):
        _list[len(jobs),](streams, jobs, starts, listed, TILE=TILE)
    return listed
