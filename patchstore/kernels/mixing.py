"""What Triton kernels share: the digest of one element. `tensors.elements.sum_all` says what it means."""

import triton
import triton.language as tl

from patchstore.tensors import elements

_A = tl.constexpr(elements.A)
_B = tl.constexpr(elements.B)
_M = tl.constexpr(elements.M)
_LOW = tl.constexpr(elements.LOW)


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
    """Return what elements add to the two digest sums, modulo 2**64.

    Args:
        placed: uint64, of `place`.
        bits: uint64, zero-extended.
    """
    u = placed + bits * _B
    z = (u ^ (u >> 32)) * _M
    y = z ^ (z >> 32)
    return y, (y >> 32) * (y & _LOW)


@triton.jit
def mix(positions, bits):
    """`fold` of the elements at these positions (uint64, from 0)."""
    return fold(place(positions), bits)
