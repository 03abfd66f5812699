"""Classes: elements with equal old exponents change about equally often.

A key orders bit patterns as the numbers they stand for, so that a change is a small whole number of
steps. Every pattern has a key of its own: -0.0, infinities and NaNs too.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

WIDTHS = {"BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
"""Bytes of an element, by the dtypes that have classes."""
_EXPONENTS = {"BF16": (7, 0xFF), "F16": (10, 0x1F), "F8_E4M3": (3, 0xF), "F8_E5M2": (2, 0x1F)}
MAX_CLASSES = 16

Array = npt.NDArray[Any]


def is_coded(dtype: str) -> bool:
    return dtype in WIDTHS


def exponents(bits: Array, dtype: str) -> npt.NDArray[np.uint8]:
    """Return the exponent fields of bit patterns, uint8."""
    shift, mask = _EXPONENTS[dtype]
    field = bits >> shift
    if mask != 0xFF:
        field &= mask
    return field.astype(np.uint8)


def classes(exponent: Array, lo: Array, num_classes: Array) -> npt.NDArray[np.uint8]:
    """Return the classes of elements with these old exponents, uint8; `lo` of each, or [1] for all."""
    return np.clip(exponent.astype(np.int16) - lo, 0, num_classes - 1).astype(np.uint8)


def steps(old: Array, new: Array) -> npt.NDArray[np.int64]:
    """Return how many keys `new` lies above `old`, wrapped to the width of an element."""
    signed = np.int16 if old.itemsize == 2 else np.int8
    return (_key(new) - _key(old)).view(signed).astype(np.int64)


def moved(old: Array, steps: Array) -> Array:
    """Return the bit patterns `steps` keys above `old`, wrapped around."""
    key = _key(old) + steps.astype(old.dtype)
    top, rest = _masks(old)
    bits: Array = key ^ (top | (rest * (1 - (key >> (8 * old.itemsize - 1)))))
    return bits


def _key(bits: Array) -> Array:
    top, rest = _masks(bits)
    key: Array = bits ^ (top | (rest * (bits >> (8 * bits.itemsize - 1))))
    return key


def _masks(bits: Array) -> tuple[Any, Any]:
    top = 1 << (8 * bits.itemsize - 1)
    return bits.dtype.type(top), bits.dtype.type(top - 1)
