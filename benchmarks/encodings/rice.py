"""Golomb-Rice codes as streams of bits, for peers.

Rice(k) of v is v >> k ones, a zero, and the k low bits of v, least significant first. A v with 24 or more
ones is coded as 24 ones and 32 bits of v, so that one NaN takes seven bytes and not kilobytes.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmarks.encodings.entropy import Numbers

_MAX_ONES = 24
_ESCAPED_BITS = 32
_MAX_PARAMETER = 24


def zigzag(differences: Numbers) -> Numbers:
    """Map differences other than 0 to numbers from 0 on: -1, 1, -2, 2 become 0, 1, 2, 3."""
    return 2 * np.abs(differences) - 2 + (differences > 0)


def from_zigzag(numbers: Numbers) -> Numbers:
    magnitudes = (numbers >> 1) + 1
    return np.where(numbers & 1, magnitudes, -magnitudes)


def _best(numbers: Numbers) -> int:
    costs = [int(_lengths(numbers, k).sum()) for k in range(_MAX_PARAMETER)]
    return costs.index(min(costs))


def _lengths(numbers: Numbers, k: int) -> Numbers:
    ones = numbers >> k
    return np.where(ones < _MAX_ONES, ones + 1 + k, _MAX_ONES + _ESCAPED_BITS)


@dataclass(slots=True)
class BitWriter:
    _parts: list[npt.NDArray[np.uint8]] = field(default_factory=list)

    def rice(self, numbers: Numbers) -> int:
        """Append numbers of at most 32 bits with the parameter of the shortest code, and return it."""
        k = _best(numbers)
        lengths = _lengths(numbers, k)
        ends = lengths.cumsum()
        starts = ends - lengths
        stream = np.ones(int(lengths.sum()), np.uint8)
        short = (numbers >> k) < _MAX_ONES
        stream[ends[short] - k - 1] = 0
        for bit in range(k):
            stream[ends[short] - k + bit] = (numbers[short] >> bit) & 1
        for bit in range(_ESCAPED_BITS):
            stream[starts[~short] + _MAX_ONES + bit] = (numbers[~short] >> bit) & 1
        self._parts.append(stream)
        return k

    def bits(self, bits: npt.NDArray[np.bool_]) -> None:
        self._parts.append(bits.astype(np.uint8))

    def to_bytes(self) -> bytes:
        """Return the stream, with zeros at the end of the last byte."""
        return np.packbits(np.concatenate(self._parts), bitorder="little").tobytes() if self._parts else b""


class BitReader:
    def __init__(self, data: bytes) -> None:
        self._bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        self._raw = self._bits.tobytes()
        self._at = 0

    def rice(self, num: int, k: int) -> Numbers:
        """Read the numbers that `BitWriter.rice` wrote. Only the search for the ends of codes is serial."""
        starts, zeros = np.empty(num, np.int64), np.empty(num, np.int64)
        at, find = self._at, self._raw.find
        for nth in range(num):
            starts[nth] = at
            zero = find(b"\0", at, at + _MAX_ONES)
            zeros[nth] = zero
            at = zero + 1 + k if zero >= 0 else at + _MAX_ONES + _ESCAPED_BITS
        self._at = at
        short = zeros >= 0
        numbers = np.empty(num, np.int64)
        numbers[short] = ((zeros - starts)[short] << k) | self._low_bits(zeros[short] + 1, k)
        numbers[~short] = self._low_bits(starts[~short] + _MAX_ONES, _ESCAPED_BITS)
        return numbers

    def bits(self, num: int) -> npt.NDArray[np.bool_]:
        self._at += num
        return self._bits[self._at - num : self._at].astype(np.bool_)

    def _low_bits(self, at: Numbers, num: int) -> Numbers:
        found = np.zeros(at.size, np.int64)
        for bit in range(num):
            found |= self._bits[at + bit].astype(np.int64) << bit
        return found
