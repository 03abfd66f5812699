"""Streams of changes, as far as reading (`context_read`) and writing them (`context_write`) are the same.

A thread takes the stream of one tile, class after class. The threads of a program go on together.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from patchstore.kernels.context_tables import Segment, Segments, Tensor, Tensors

LANES = 32
"""Streams that a program takes: it is one warp, whose threads go on together."""

_TENSOR = tl.constexpr(len(Tensor))
_SEGMENT = tl.constexpr(len(Segment))
_WIDTH = tl.constexpr(int(Tensor.WIDTH))
_CLASSES = tl.constexpr(int(Tensor.CLASSES))
_FIRST_ROW = tl.constexpr(int(Tensor.FIRST_ROW))
SILENT = tl.constexpr(0x7F)
DENSE = tl.constexpr(0x80)
UNARY = tl.constexpr(24)
"""Ones after which a number is stored as it is; see `encodings.context.fields`."""


@triton.jit
def tile_of(tensors, segments, owners, rows, job, inside):
    """What the tensors of jobs bring: the last class of each, bytes of an element, and where codes begin."""
    segment = segments + tl.load(owners + job, mask=inside, other=0).to(tl.int64) * _SEGMENT
    row = tensors + tl.load(segment, mask=inside, other=0) * _TENSOR
    last_class = tl.load(row + _CLASSES, mask=inside, other=0).to(tl.int32) - 1
    width = tl.load(row + _WIDTH, mask=inside, other=0).to(tl.int32)
    codes = rows + tl.load(row + _FIRST_ROW, mask=inside, other=0)
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
    """Run a kernel on the streams of all jobs; one launch.

    Args:
        kernel: takes the tables, `arguments` and the number of jobs.
        emit: whether it lists or writes what it otherwise only counts.
    """
    if segments.num_jobs:
        kernel[(triton.cdiv(segments.num_jobs, LANES),)](
            *(tensors.table, segments.table, segments.owners, *arguments, segments.num_jobs),
            LANES=LANES,
            EMIT=emit,
            num_warps=1,
        )
