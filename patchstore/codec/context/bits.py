"""Bit fields in 64-bit words, least significant bit first, many at a time."""

from typing import Any

import numpy as np
import numpy.typing as npt

COPIED = 1 << 24  # bytes
PUT = 1 << 16  # fields at a time: their temporaries stay in the cache

Array = npt.NDArray[Any]


def put(words: npt.NDArray[np.uint64], at: Array, fields: Array) -> None:
    """Or `fields` (uint64) into `words` at the ascending bits `at`; a word must follow the last one's."""
    for first in range(0, len(at), PUT):
        _put(words, at[first : first + PUT], fields[first : first + PUT])


def _put(words: npt.NDArray[np.uint64], at: Array, fields: Array) -> None:
    word, shift = at >> 6, (at & 63).astype(np.uint64)
    starts = np.flatnonzero(np.concatenate([[True], word[1:] != word[:-1]]))
    target = word[starts]
    words[target] |= np.bitwise_or.reduceat(fields << shift, starts)
    words[target + 1] |= np.bitwise_or.reduceat(fields >> np.uint64(1) >> (np.uint64(63) - shift), starts)


def windows(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return the 64 bits from each byte of `data` on, but the last 8 bytes."""
    every: npt.NDArray[np.uint64] = np.ndarray((len(data) - 8,), "<u8", data, strides=(1,))
    # A copy is aligned, and read three times as fast, but takes 8 bytes for each.
    return every if len(data) > COPIED else np.ascontiguousarray(every)


def of_each(values: Array, owner: Array) -> Array:
    """Return the values of owners; those of all, if there is only one."""
    return values if len(values) == 1 else values[owner]


def bounds_of(counts: Array) -> npt.NDArray[np.int64]:
    """Return where each begins that has so many, and the end of the last."""
    return np.concatenate([np.zeros(1, dtype=np.int64), counts.cumsum()])
