"""Ranks of elements among those of their class, from a bit for every element and class.

A listing of every element of every class would take ten times as long.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from patchstore.encodings.context.classes import MAX_CLASSES, exponents

_CHUNK = 1 << 17  # elements: their temporaries stay in the cache
_LISTED = 1 / 24  # share of a class from which on listing all of it is quicker than looking up some

Array = npt.NDArray[Any]


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


def count(words: npt.NDArray[np.uint64], bounds: Array) -> npt.NDArray[np.int64]:
    """Return how many elements of a class lie between each two of the ascending `bounds`, 0 to the end."""
    if len(bounds) == 2:
        return np.array([np.bitwise_count(words).sum(dtype=np.int64)])
    counts: npt.NDArray[np.int64] = np.diff(plane(words).rank(bounds))
    return counts


def class_words(
    bits: Array, dtype: str, lo: Array, last: Array, wanted: Array
) -> dict[int, npt.NDArray[np.uint64]]:
    """Return, for each wanted class, a bit for each element: whether it belongs to that class.

    `bits` are the old bit patterns.

    Args:
        lo: uint8, exponents up to this one are in the first class; of each element, or one for all.
        last: uint8, the number of the last class, in the same way.
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
