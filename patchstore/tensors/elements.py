"""What every kernel computes, in plain torch: the CPU path, and the reference of the kernels' tests.

Integers here are 64-bit and wrap around; torch has no unsigned shift, so a shift to the right is
followed by a mask.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import cache
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]

A = 0x9E3779B97F4A7C15
"""Multiplies an element's position, counted from 1."""
B = 0xD1B54A32D192ED03
"""Multiplies an element's bits. No difference of 16-bit patterns times B / A is a distance under 2**47
elements, so no two changes of a 16-bit tensor can trade places unseen."""
M = 0xFF51AFD7ED558CCD
"""Spreads the folded sum over all 64 bits (the first multiplier of MurmurHash3's 64-bit finaliser)."""

LOW = 0xFFFFFFFF
CHUNK = 1 << 15
"""Elements mixed at a time by torch: int64 temporaries stay in the cache (300 M/s a core), and torch does not
split an operation of this size over threads, whose waiting for each other took ten times as long as the
work on a busy host."""
NUMPY_CHUNK = 1 << 16
"""The same by numpy. Several threads do that beside each other, and each waits for Python's lock after every
operation, which takes long with small chunks."""
DEVICE_CHUNK = 1 << 23
"""The same on a device, where launching an operation costs more than its temporaries."""
COMPARE_CHUNK = 1 << 22  # elements; bounds the temporaries of a comparison to a few tens of MB
HOST_CHUNK = 1 << 18
"""The same by numpy in host memory: bools and what is picked stay in the cache, and calls take little."""
_FEW = 1000
"""Bools that numpy finds in about the time of the calls that would save that."""

MAX_GAP = 65535


def _signed(value: int) -> int:
    """The int64 with the same bits as an integer modulo 2**64."""
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value


def sum_of(bits: torch.Tensor, at: torch.Tensor | int = 0) -> tuple[int, int]:
    """Return the two digest sums of elements of a tensor, modulo 2**64.

    An element at position i (from 0) with bits x (zero-extended) adds, modulo 2**64:
        u = A * (i + 1) + B * x;  t = u ^ (u >> 32);  z = M * t;  y = z ^ (z >> 32)
    y to the first sum, and the product of y's upper and lower 32 bits to the second. Each map is a
    bijection, so a change of one element always changes the first sum.

    Args:
        bits: flat integer tensor, [num].
        at: their positions in the flattened tensor, or the first one where they follow each other.

    Example: bits [1] give u = 0x6fecc3ec50dd6918, the sums 0x9776c6b6230390f and 0x3a180016f332d45.
    """
    mask = (1 << (8 * bits.element_size())) - 1
    chunk = CHUNK if bits.device.type == "cpu" else DEVICE_CHUNK
    if isinstance(at, int):
        ramp = torch.arange(1, min(chunk, bits.numel()) + 1, device=bits.device) * _signed(A)
    first = second = 0
    for start in range(0, bits.numel(), chunk):
        u = bits[start : start + chunk].to(torch.int64, copy=True)
        if bits.element_size() < 8:
            u.bitwise_and_(mask)
        u.mul_(_signed(B))
        if isinstance(at, int):
            u.add_(ramp[: u.numel()]).add_(_signed((at + start) * A))
        else:
            u.add_((at[start : start + chunk].to(torch.int64) + 1).mul_(_signed(A)))
        high = (u >> 32).bitwise_and_(LOW)
        u.bitwise_xor_(high).mul_(_signed(M))
        high = (u >> 32).bitwise_and_(LOW)
        u.bitwise_xor_(high)
        first += int(u.sum())
        second += int(u.bitwise_and_(LOW).mul_(high).sum())
    return first % 2**64, second % 2**64


_compiled: list[Callable[..., object]] = []
"""What `compile_ahead` made, once it is done."""
_WHOLE = (np.uint8, np.uint16, np.uint32)
"""Elements for which it is compiled."""


@cache
def compile_ahead() -> Thread:
    """Compile, on a thread, what digests whole tensors on the CPU; again it changes nothing.

    Takes three seconds of a core. Then `sum_each` is about five times as fast as by numpy, and does without
    Python's lock. For servers, before there are requests; a process that digests once has no use for it.
    Without numba, which is there where vLLM is, nothing changes.
    """
    # Not a daemon: what compiles must not be cut off as the process ends.
    compiling = Thread(target=_compile, name="patchstore-compile")
    compiling.start()
    return compiling


def _compile() -> None:
    try:
        numba = importlib.import_module("numba")
        array, out = numba.types.Array, numba.uint64[::1]
        given = [array(numba.from_dtype(np.dtype(each)), 1, "C", readonly=True) for each in _WHOLE]
        kinds = [numba.void(bits, array(numba.int64, 1, "C", readonly=True), out, out) for bits in given]
        _compiled.append(numba.njit(kinds, nogil=True)(_sum_whole))
    except Exception as exc:  # noqa: BLE001  (numpy computes the same)
        logger.info("numpy goes on to digest, as numba does not compile here: %s", exc)


def _sum_whole(bits: Array, counts: Array, firsts: Array, seconds: Array) -> None:
    """Compute what `sum_each` returns, of all elements of each tensor. It is compiled, and called as that."""
    at = 0
    for tensor in range(len(counts)):
        placed = first = second = np.uint64(0)
        for element in bits[at : at + counts[tensor]]:
            placed += np.uint64(A)
            u = placed + np.uint64(B) * np.uint64(element)
            z = (u ^ (u >> np.uint64(32))) * np.uint64(M)
            high = z >> np.uint64(32)
            y = z ^ high
            first += y
            second += (y & np.uint64(LOW)) * high
        firsts[tensor], seconds[tensor] = first, second
        at += counts[tensor]


def sum_each(bits: Array, counts: Array, indices: Array | None = None) -> tuple[Array, Array]:
    """Return the two digest sums of each of some tensors on the CPU: `sum_of` many at once; uint64 [T] each.

    Args:
        bits: unsigned integers: the elements, tensor after tensor.
        counts: int64 [T], how many are of each tensor.
        indices: integers, their positions in the flattened tensors; None where these are all elements.
    """
    firsts, seconds = np.zeros((2, len(counts)), dtype=np.uint64)
    if _compiled and indices is None and bits.dtype in _WHOLE:
        _compiled[0](np.ascontiguousarray(bits), counts.astype(np.int64, copy=False), firsts, seconds)
        return firsts, seconds
    some = np.flatnonzero(counts)  # reduceat would take an empty part for one element
    ends = counts[some].cumsum()
    before = (ends - counts[some]).astype(np.uint64) * np.uint64(A)
    # One piece of memory for all: that of a temporary array is mapped and unmapped each time, which takes
    # longer than the work where threads of the process do it beside each other.
    ramp, room, rest = np.empty((3, min(NUMPY_CHUNK, len(bits))), dtype=np.uint64)
    if indices is None:
        np.multiply(np.arange(1, len(ramp) + 1, dtype=np.uint64), np.uint64(A), out=ramp)
    end = 0
    while (start := end) < len(bits):
        end = min(start + NUMPY_CHUNK, len(bits))
        first, last = np.searchsorted(ends, (start, end), side="right").tolist()
        if last > first:
            # No tensor is cut that need not be: those of one size are counted as rows, in half the time.
            end = int(ends[last - 1])
        else:
            last += 1
        u, high = room[: end - start], rest[: end - start]
        cuts = np.concatenate([[0], ends[first : last - 1] - start])
        np.copyto(u, bits[start:end])
        u *= np.uint64(B)
        if indices is not None:
            np.copyto(high, indices[start:end], casting="unsafe")
            high += np.uint64(1)
            high *= np.uint64(A)
            u += high
        else:
            sizes = np.diff(cuts, append=end - start)
            behind = np.uint64(start * A % 2**64) - before[first:last]
            if (sizes == sizes[0]).all():
                rows = u.reshape(len(sizes), -1)
                rows += ramp[: sizes[0]]
                # None of those that begin in this chunk.
                behind += cuts.astype(np.uint64) * np.uint64(A)
                if behind.any():
                    rows += behind[:, None]
            else:
                u += ramp[: end - start]
                u += np.repeat(behind, sizes)
        np.right_shift(u, np.uint64(32), out=high)
        u ^= high
        u *= np.uint64(M)
        np.right_shift(u, np.uint64(32), out=high)
        u ^= high
        parts = some[first:last]
        firsts[parts] += np.add.reduceat(u, cuts)
        u &= np.uint64(LOW)
        u *= high
        seconds[parts] += np.add.reduceat(u, cuts)
    return firsts, seconds


def places(flags: Array) -> Array:
    """Return where a flat array of bools is true: int64, ascending.

    As numpy's `flatnonzero`, which takes 15 ns for each that is true, or 0.6 ns for each element where more
    than a tenth are. So this looks at four bools at once, and then into those, until a tenth are.
    """
    num = np.count_nonzero(flags)
    if not _FEW <= num < len(flags) // 10 or len(flags) % 4:
        return flags.nonzero()[0]
    fours = flags.view(np.uint32)
    found = places(fours != 0)
    return _within(found, fours[found].view(np.bool_).nonzero()[0], 4)


def _within(found: Array, at: Array, num: int) -> Array:
    """Return which elements these are: of parts of `num` elements, the `found` ones, at some places."""
    shift = num.bit_length() - 1
    which: Array = found[at >> shift]
    which <<= shift
    which += at & (num - 1)
    return which


def differing(new: Sequence[torch.Tensor], old: torch.Tensor) -> tuple[Array, Array, Array]:
    """Return where flat integer tensors differ from old ones, and the bits of both there, in host memory.

    Args:
        new: [num] together, one after the other.
        old: [num], of their dtype and on their device.

    Returns:
        Positions, int64 [num_changed], ascending; the bits of `new` there, unsigned integers; those of `old`.
    """
    unsigned, is_here = f"u{old.element_size()}", old.device.type == "cpu"
    compared: Callable[[Any, Any], Sequence[Array]] = _compared if is_here else _compared_there
    step = HOST_CHUNK if is_here else COMPARE_CHUNK
    # numpy cuts and views in a quarter of torch's time.
    pieces: Sequence[Any] = [each.numpy().view(unsigned) for each in new] if is_here else new
    olds: Any = old.numpy().view(unsigned) if is_here else old
    parts: list[Sequence[Array]] = [(np.empty(0, np.int64), np.empty(0, unsigned), np.empty(0, unsigned))]
    begin = 0
    for piece in pieces:
        for start in range(0, len(piece), step):
            some = piece[start : start + step]
            at, *bits = compared(some, olds[begin : begin + len(some)])
            if len(at):
                at += begin
                parts.append((at, *bits))
            begin += len(some)
    positions, values, replaced = (np.concatenate(column) for column in zip(*parts, strict=True))
    return positions, values, replaced


def _compared_there(new: torch.Tensor, old: torch.Tensor) -> tuple[Array, ...]:
    at = (new != old).nonzero().view(-1)
    bits = (each[at].cpu().numpy().view(f"u{new.element_size()}") for each in (new, old))
    return at.cpu().numpy(), *bits


def _compared(new: Array, old: Array) -> tuple[Array, Array, Array]:
    words = None
    if new.nbytes % 8 == 0:
        # Words first, unless most of them differ.
        news, olds = new.view(np.uint64), old.view(np.uint64)
        differ = news != olds
        if 2 * np.count_nonzero(differ) < len(differ):
            words = places(differ)
            new, old = news[words].view(new.dtype), olds[words].view(old.dtype)
    at = places(new != old)
    values, replaced = new[at], old[at]
    return at if words is None else _within(words, at, 8 // new.itemsize), values, replaced
