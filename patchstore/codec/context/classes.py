"""Classes: elements with equal old exponents change about equally often.

A key orders bit patterns as the numbers they stand for, so that a change is a small whole number of
steps. Every pattern has a key of its own: -0.0, infinities and NaNs too.

A change is told by its rank in its class. Ranks are counted in a bit for every element and class (`Plane`): a
listing of every element of every class would take ten times as long.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from patchstore.codec.context.bits import Array

FORMATS = {"BF16": (2, 7, 0xFF), "F16": (2, 10, 0x1F), "F8_E4M3": (1, 3, 0xF), "F8_E5M2": (1, 2, 0x1F)}
"""Of the dtypes that have classes: bytes of an element, and by how much it is shifted, and with what masked,
for its exponent."""
WIDTHS = {dtype: width for dtype, (width, _, _) in FORMATS.items()}
MAX_CLASSES = 16
_CHUNK = 1 << 17  # elements: their temporaries stay in the cache
_LISTED = 1 / 24  # share of a class from which on listing all of it is quicker than looking up some


def is_coded(dtype: str) -> bool:
    return dtype in FORMATS


def exponents(bits: Array, dtype: str) -> npt.NDArray[np.uint8]:
    """Return the exponent fields of bit patterns, uint8."""
    _, shift, mask = FORMATS[dtype]
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


@dataclass(frozen=True, slots=True)
class Plane:
    """The elements of one class among a run of elements."""

    words: npt.NDArray[np.uint64]
    """A bit for each element, and one word more."""
    before: npt.NDArray[np.int64]
    """Elements of the class before each word."""

    def rank(self, at: Array) -> npt.NDArray[np.int64]:
        """Return how many elements of the class come before each position."""
        word = at >> 6
        below = (np.uint64(1) << (at & 63).astype(np.uint64)) - np.uint64(1)
        ranks: npt.NDArray[np.int64] = self.before[word] + np.bitwise_count(self.words[word] & below)
        return ranks

    def _bits(self) -> npt.NDArray[np.bool_]:
        # As bool: of bytes, the nonzero ones take several times as long to list.
        return np.unpackbits(self.words.view(np.uint8), bitorder="little").view(np.bool_)

    def select(self, ranks: Array) -> npt.NDArray[np.int64]:
        """Return where the elements of these ranks (ascending) stand."""
        if len(ranks) > _LISTED * int(self.before[-1]):
            return np.flatnonzero(self._bits())[ranks]
        word = np.searchsorted(self.before, ranks, side="right") - 1
        rest = (ranks - self.before[word]).astype(np.uint8)
        bits = self.words[word]
        at = word << 6
        for half in (32, 16, 8, 4, 2, 1):
            low = bits & np.uint64((1 << half) - 1)
            count = np.bitwise_count(low)
            upper = rest >= count
            rest = np.where(upper, rest - count, rest)
            at += upper * np.int64(half)
            bits = np.where(upper, bits >> np.uint64(half), low)
        return at


def plane(words: npt.NDArray[np.uint64]) -> Plane:
    before = np.zeros(len(words) + 1, dtype=np.int64)
    np.cumsum(np.bitwise_count(words), out=before[1:])
    return Plane(words, before)


def class_words(
    bits: Array, dtype: str, lo: Array, last: Array, wanted: Array
) -> dict[int, npt.NDArray[np.uint64]]:
    """Return, for each wanted class, a bit for each element: whether it belongs to that class.

    `lo` and `last` are of each element, or one for all: exponents up to `lo` are in the first class.
    """
    num_words = len(bits) // 64 + 1
    words = {int(number): np.zeros(num_words, dtype=np.uint64) for number in wanted}
    for start in range(0, len(bits), _CHUNK):
        exponent = exponents(bits[start : start + _CHUNK], dtype)
        if len(lo) > 1:
            # Seen from the lowest class of its own tensor.
            its_lo = lo[start : start + _CHUNK]
            exponent = np.minimum(np.maximum(exponent, its_lo) - its_lo, last[start : start + _CHUNK])
            lowest, highest = 0, MAX_CLASSES
        else:
            lowest, highest = int(lo[0]), int(last[0])
        for number, out in words.items():
            if highest == 0:
                inside = np.ones(len(exponent), dtype=np.bool_)
            elif number == 0:
                inside = exponent <= lowest
            elif number < highest:
                inside = exponent == lowest + number
            else:
                inside = exponent >= lowest + number
            packed = np.packbits(inside, bitorder="little")
            out[start >> 6 :].view(np.uint8)[: len(packed)] = packed
    return words
