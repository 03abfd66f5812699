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


def field_dtype(width: int) -> type[np.signedinteger[Any]]:
    """Return what holds a field of so many bits, 32 at most, that begins anywhere in a byte."""
    return np.int32 if width <= 24 else np.int64


def joined_fields(fields: Array, width: int) -> npt.NDArray[np.uint8]:
    """Return fields of so many bits one after the other: 8 of them take `width` bytes, 32 at most.

    `fields` are [8 * n], of `field_dtype`.
    """
    octets, found = fields.reshape(-1, 8).T, np.zeros((len(fields) // 8, width), dtype=np.uint8)
    for nth in range(8):
        first, shift = divmod(nth * width, 8)
        field = octets[nth] << shift
        for at in range(first, -(-(nth + 1) * width // 8)):
            found[:, at] |= field.astype(np.uint8)
            field >>= 8
    return found.reshape(-1)


def fields_of(data: npt.NDArray[np.uint8], width: int) -> Array:
    """Return what `joined_fields` joined."""
    octets = np.ascontiguousarray(data.reshape(-1, width).T)
    found = np.empty((octets.shape[1], 8), dtype=field_dtype(width))
    for nth in range(8):
        first, shift = divmod(nth * width, 8)
        field = octets[first].astype(found.dtype)
        for place, at in enumerate(range(first + 1, -(-(nth + 1) * width // 8)), 1):
            field |= octets[at].astype(found.dtype) << 8 * place
        found[:, nth] = field >> shift & (1 << width) - 1
    return found.reshape(-1)


def of_each(values: Array, owner: Array) -> Array:
    """Return the values of owners; those of all, if there is only one."""
    return values if len(values) == 1 else values[owner]


def bounds_of(counts: Array) -> npt.NDArray[np.int64]:
    """Return where each begins that has so many, and the end of the last."""
    return np.concatenate([np.zeros(1, dtype=np.int64), counts.cumsum()])
