"""Encoding `context`, decoded as docs/format.md alone says: no torch, no numpy, no patchstore."""

import struct
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise, repeat
from math import prod

CODED = {"BF16": (16, 7, 8), "F16": (16, 10, 5), "F8_E4M3": (8, 3, 4), "F8_E5M2": (8, 2, 5)}
"""Of the dtypes that are coded: the width in bits, the exponent's lowest bit, and how many it has."""

Schema = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and shape, in the order of the schema."""
Tile = tuple[int, range, range]
"""Position of the level's first element, positions of the rows in it, of the columns in a row."""


class Bits:
    """A tile's string of bits: the lowest of a byte first, and ones beyond the end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> int:
        """The next field, of `count` bits."""
        found = 0
        for i in range(count):
            byte = self.data[self.at >> 3] if self.at >> 3 < len(self.data) else 255
            found |= (byte >> (self.at & 7) & 1) << i
            self.at += 1
        return found

    def truncated(self, m: int) -> int:
        """A number below m in truncated binary."""
        b = m.bit_length() - 1
        u = 2 ** (b + 1) - m
        x = self.take(b)
        return x if x < u else 2 * x + self.take(1) - u

    def rice(self, k: int, width: int) -> int:
        """A number in Rice code, or of `width` bits behind 24 ones."""
        ones = 0
        while ones < 24 and self.take(1):
            ones += 1
        return self.take(width) if ones == 24 else (ones << k) + self.take(k)


def changes(
    table: bytes, streams: bytes, schema: Schema, parent: dict[str, bytes]
) -> Iterator[tuple[str, int, bytes]]:
    """The name, flat position and new bytes of every change.

    Raises:
        LookupError, ValueError, struct.error: a rule is broken.
    """
    start = 0
    for name, lo, rows, lengths in parse_table(table, len(streams), schema):
        dtype, shape = schema[name]
        width = CODED[dtype][0]
        num_bytes = width // 8
        old = struct.unpack(f"<{len(parent[name]) // num_bytes}{'BH'[num_bytes - 1]}", parent[name])
        for tile, length in zip(tiles(shape), lengths, strict=True):
            stream = streams[start : start + length]
            start += length
            if stream:
                for position, d in _tile_changes(stream, old, tile, dtype, lo, rows):
                    need(d % 2**width != 0, "a change by 0")
                    new = bits_of((key_of(old[position], width) + d) % 2**width, width)
                    yield name, position, new.to_bytes(num_bytes, "little")


def parse_table(
    table: bytes, num_bytes: int, schema: Schema
) -> list[tuple[str, int, list[bytes], list[int]]]:
    """Return name, `lo`, rows, and lengths of tiles of every coded tensor."""
    (count,) = struct.unpack_from("<I", table)
    need(count > 0, "a table of no tensors")
    headers = [struct.unpack_from("<IBBBBI", table, 4 + 12 * i) for i in range(count)]
    places, names, at = [header[0] for header in headers], list(schema), 4 + 12 * count
    need(all(a < b for a, b in pairwise(places)), "places do not ascend")
    rows: list[list[bytes]] = []
    for _, _, k, w, zero, _ in headers:
        need(1 <= k <= 16 and w <= 32 and zero == 0, "a tensor's line of the table breaks a rule")
        rows.append([table[at + 3 * i : at + 3 * i + 3] for i in range(k)])
        at += 3 * k
    for row in (row for its_rows in rows for row in its_rows):
        need(len(row) == 3 and _is_row(*row), f"the row {row!r} means nothing")
    found = []
    for (place, lo, _, w, _, least), its_rows in zip(headers, rows, strict=True):
        dtype, shape = schema[names[place]]
        need(dtype in CODED, f"{names[place]!r} is of a dtype that is not coded")
        need(0 not in shape, f"{names[place]!r} has no elements")
        num_tiles = len(tiles(shape))
        size = (num_tiles * w + 7) // 8
        need(at + size <= len(table), "the table is too short")
        bits = Bits(table[at : at + size])
        found.append((names[place], lo, its_rows, [least + bits.take(w) for _ in range(num_tiles)]))
        need(bits.take(8 * size - bits.at) == 0, "lengths are padded with other bits than zeros")
        at += size
    need(at == len(table), "the table is too long")
    need(sum(sum(lengths) for *_, lengths in found) == num_bytes, "lengths do not add up")
    return found


@lru_cache(256)
def tiles(shape: tuple[int, ...]) -> list[Tile]:
    """A tensor's tiles in their order."""
    if 0 in shape:
        return []
    *others, r, c = (1, 1, *(size for size in shape if size != 1))
    t, columns = _pieces(c, 65536)
    _, rows = _pieces(r, 65536 // t)
    return [
        (level * r * c, range(down.start * c, down.stop * c, c), across)
        for level in range(prod(others))
        for down in rows
        for across in columns
    ]


def _pieces(side: int, limit: int) -> tuple[int, list[range]]:
    s = side if side % 16 else side // 16
    p = 1
    while s % (2 * p) == 0 and 2 * p <= limit:
        p *= 2
    t = s if s <= limit else p if 4 * p >= limit else limit
    return t, [range(a + b, a + min(b + t, s)) for a in range(0, side, s) for b in range(0, s, t)]


def _tile_changes(
    stream: bytes, old: tuple[int, ...], tile: Tile, dtype: str, lo: int, rows: list[bytes]
) -> Iterator[tuple[int, int]]:
    """Position and difference of keys of every change in a tile that has bytes."""
    first, down, across = tile
    width, lowest, num_bits = CODED[dtype]
    classes: list[list[int]] = [[] for _ in rows]
    for position in (first + row + column for row in down for column in across):
        exponent = old[position] >> lowest & (1 << num_bits) - 1
        classes[min(max(exponent - lo, 0), len(rows) - 1)].append(position)
    bits = Bits(stream)
    for row, members in zip(rows, classes, strict=True):
        if row[0] != 127:
            decode = _dense if row[0] == 128 else _sparse
            for rank, d in decode(bits, len(members), row, width):
                yield members[rank], d
    need(bits.at > 8 * (len(stream) - 1), "a tile is longer than what it says")


def _sparse(bits: Bits, count: int, row: bytes, width: int) -> Iterator[tuple[int, int]]:
    rank, magnitudes = 0, _magnitudes(bits, row, width)
    while rank < count:
        m = min(_m(row[0]), count - rank)
        if bits.take(1):
            rank += m
        else:
            rank += bits.truncated(m)
            sign = -1 if bits.take(1) else 1
            yield rank, sign * next(magnitudes)
            rank += 1


def _magnitudes(bits: Bits, row: bytes, width: int) -> Iterator[int]:
    _, e, k = row
    while e:
        if bits.take(1):
            yield from repeat(1, _m(e - 1))
        else:
            yield from repeat(1, bits.truncated(_m(e - 1)))
            yield 2 + bits.rice(k, width)
    yield from repeat(1)


def _dense(bits: Bits, count: int, row: bytes, width: int) -> Iterator[tuple[int, int]]:
    swapped = row[2] == 128
    for rank in range(count):
        v = bits.rice(0 if swapped else row[2], width)
        if swapped and v < 2:
            v = 1 - v
        if v:
            yield rank, -v if bits.take(1) else v


def _is_row(first: int, second: int, third: int) -> bool:
    sparse = first <= 62 and (second <= 63 and third <= 15 if second else third == 0)
    dense = (first, second) == (128, 0) and (third <= 15 or third == 128)
    return sparse or dense or (first, second, third) == (127, 0, 0)


def _m(number: int) -> int:
    return number + 1 if number < 3 else (4 + (number - 3) % 4) << (number - 3) // 4


def key_of(bits: int, width: int) -> int:
    return bits ^ (2**width - 1 if bits >> (width - 1) else 1 << (width - 1))


def bits_of(key: int, width: int) -> int:
    return key ^ (1 << (width - 1) if key >> (width - 1) else 2**width - 1)


def need(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why)
