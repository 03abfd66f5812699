"""Encoding `context`, decoded as docs/format.md alone says: no torch, no numpy, no patchstore."""

import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, pairwise, product, repeat
from math import prod
from typing import NamedTuple

CODED = {"BF16": (16, 7, 8), "F16": (16, 10, 5), "F8_E4M3": (8, 3, 4), "F8_E5M2": (8, 2, 5)}
"""Of the dtypes that are coded: the width in bits, the exponent's lowest bit, and how many it has."""

Schema = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and shape, in the order of the schema."""
Box = tuple[range, range, range]
"""Levels, rows and columns."""
Tile = Box
COLUMNS = {"place": 4, "first": 8, "levels": 8, "row": 8, "rows": 8, "column": 8, "columns": 8}
COLUMNS |= {"slices": 1, "set": 4, "w": 1, "least": 4}
"""The columns of parts in a table's head, and the bytes of a number."""


class Part(NamedTuple):
    """What a table says of a part."""

    name: str
    box: Box
    slices: tuple[int, int]
    lo: int
    rows: list[bytes]
    lengths: list[int]


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
    for part in parse_table(table, len(streams), schema):
        dtype, shape = schema[part.name]
        width = CODED[dtype][0]
        num_bytes = width // 8
        held = parent[part.name]
        old = struct.unpack(f"<{len(held) // num_bytes}{'BH'[num_bytes - 1]}", held)
        _, r, c = view(shape)
        for tile, length in zip(tiles(shape, part.box, part.slices), part.lengths, strict=True):
            stream = streams[start : start + length]
            start += length
            if stream:
                places = [(level * r + row) * c + column for level, row, column in product(*tile)]
                for position, d in _tile_changes(stream, old, places, dtype, part.lo, part.rows):
                    need(d % 2**width != 0, "a change by 0")
                    new = bits_of((key_of(old[position], width) + d) % 2**width, width)
                    yield part.name, position, new.to_bytes(num_bytes, "little")


def parse_table(table: bytes, num_bytes: int, schema: Schema) -> list[Part]:
    """Return what a table says of every coded part."""
    count, num_sets, num_squeezed = struct.unpack_from("<III", table)
    need(count > 0, "a table of no tensors")
    need(count <= num_bytes, "more parts than bytes of streams")
    elements = sum(prod(shape) for dtype, shape in schema.values() if dtype in CODED)
    need(count <= elements, "more parts than elements")
    need(0 < num_sets <= count, "no row sets, or more than parts")
    at = 12 + num_squeezed
    need(at <= len(table), "the table is too short")
    head = inflated(table[12:at], count * sum(COLUMNS.values()) + num_sets * 50)
    columns: dict[str, list[int]] = {}
    for name, size in COLUMNS.items():
        planes, head = head[: size * count], head[size * count :]
        need(len(planes) == size * count, "the head is too short")
        columns[name] = [int.from_bytes(planes[i::count], "little") for i in range(count)]
    los, ks, head = head[:num_sets], head[num_sets : 2 * num_sets], head[2 * num_sets :]
    need(len(ks) == num_sets and all(1 <= k <= 16 for k in ks), "a row set has no classes, or too many")
    need(len(head) == 3 * sum(ks), "the head is too short or too long")
    every = [bytes(head[i :: sum(ks)]) for i in range(sum(ks))]
    need(all(_is_row(*row) for row in every), "a row means nothing")
    ends = [*accumulate(ks)]
    places = [*accumulate(columns["place"])]
    names, found, order = list(schema), list[Part](), list[tuple[int, ...]]()
    for i, place in enumerate(places):
        dtype, shape = schema[names[place]]
        need(dtype in CODED, f"{names[place]!r} is of a dtype that is not coded")
        need(0 not in shape, f"{names[place]!r} has no elements")
        sides = [(columns[one][i], columns[many][i]) for one, many in PAIRS]
        box = []
        for side, (first, size) in zip(view(shape), sides, strict=True):
            need(size > 0 or first == 0, "a part begins behind 0 and has a whole side")
            box.append(range(first, first + size) if size else range(side))
            need(box[-1].stop <= side, "a part reaches beyond its tensor")
        slices = 1 << columns["slices"][i] % 16, 1 << columns["slices"][i] // 16
        for side, number in zip(view(shape)[1:], slices, strict=True):
            need(number <= 16 and side % number == 0, "a side cannot be cut in so many slices")
        need(columns["set"][i] < num_sets, "there is no such row set")
        its, w, least = columns["set"][i], columns["w"][i], columns["least"][i]
        need(w <= 32, "lengths have too many bits")
        order.append((place, *(each.start for each in box)))
        num_tiles = len(tiles(shape, tuple(box), slices))
        size = (num_tiles * w + 7) // 8
        need(at + size <= len(table), "the table is too short")
        bits = Bits(table[at : at + size])
        lengths = [least + bits.take(w) for _ in range(num_tiles)]
        need(bits.take(8 * size - bits.at) == 0, "lengths are padded with other bits than zeros")
        at += size
        rows = every[ends[its] - ks[its] : ends[its]]
        found.append(Part(names[place], tuple(box), slices, los[its], rows, lengths))
    need(all(a < b for a, b in pairwise(order)), "parts do not ascend")
    need(at == len(table), "the table is too long")
    need(sum(sum(part.lengths) for part in found) == num_bytes, "lengths do not add up")
    check_apart([(part.name, part.box) for part in found])
    return found


def positions_of(part: Part, schema: Schema) -> set[int]:
    """The flat positions of a part's elements."""
    _, r, c = view(schema[part.name][1])
    return {(level * r + row) * c + column for level, row, column in product(*part.box)}


PAIRS = (("first", "levels"), ("row", "rows"), ("column", "columns"))


def check_apart(boxes: list[tuple[str, Box]]) -> None:
    """Refuse parts of one version that have an element in common."""
    for i, (name, box) in enumerate(boxes):
        for other_name, other in boxes[:i]:
            common = all(a.start < b.stop and b.start < a.stop for a, b in zip(box, other, strict=True))
            need(name != other_name or not common, "parts overlap")


def inflated(squeezed: bytes, most: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        head = stream.decompress(squeezed, most + 1)
    except zlib.error as exc:
        raise ValueError("the head is not compressed") from exc
    need(stream.eof and not stream.unused_data and len(head) <= most, "the head has another length")
    return head


def view(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Levels, rows and columns."""
    *others, r, c = (1, 1, *(size for size in shape if size != 1))
    return prod(others), r, c


def whole(shape: tuple[int, ...]) -> tuple[Box, tuple[int, int]]:
    """A tensor as a part of itself, and the usual numbers of slices."""
    levels, r, c = view(shape)
    return (range(levels), range(r), range(c)), (1 if r % 16 else 16, 1 if c % 16 else 16)


@lru_cache(256)
def tiles(shape: tuple[int, ...], box: Box, slices: tuple[int, int]) -> list[Tile]:
    """A part's tiles in their order."""
    _, r, c = view(shape)
    t, columns = _pieces(c, slices[1], 65536)
    _, rows = _pieces(r, slices[0], 65536 // t)
    cut = [
        [piece for piece in (_common(piece, side) for piece in pieces) if piece]
        for pieces, side in ((rows, box[1]), (columns, box[2]))
    ]
    return [
        (range(level, level + 1), down, across) for level in box[0] for down in cut[0] for across in cut[1]
    ]


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _pieces(side: int, number: int, limit: int) -> tuple[int, list[range]]:
    s = side // number
    p = 1
    while s % (2 * p) == 0 and 2 * p <= limit:
        p *= 2
    t = s if s <= limit else p if 4 * p >= limit else limit
    return t, [range(a + b, a + min(b + t, s)) for a in range(0, side, s) for b in range(0, s, t)]


def _tile_changes(
    stream: bytes, old: tuple[int, ...], places: list[int], dtype: str, lo: int, rows: list[bytes]
) -> Iterator[tuple[int, int]]:
    """Position and difference of keys of every change in a tile of these elements that has bytes."""
    width, lowest, num_bits = CODED[dtype]
    classes: list[list[int]] = [[] for _ in rows]
    for position in places:
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
