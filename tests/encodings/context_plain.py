"""The encoding `context` read bit by bit, from its description alone: the check of the fast one."""

from collections.abc import Iterator
from math import prod

EXPONENTS = {"BF16": (7, 8), "F16": (10, 5), "F8_E4M3": (3, 4), "F8_E5M2": (2, 5)}
MS = [1, 2, 3] + [(4 + f) << j for j in range(15) for f in range(4)]


def cut(side: int, limit: int) -> int:
    if side <= limit:
        return side
    power = 1
    while power * 2 <= limit and side % (power * 2) == 0:
        power *= 2
    return power if 4 * power >= limit else limit


def tiles(shape: tuple[int, ...]) -> Iterator[list[int]]:
    """Yield the flat positions of each tile's elements."""
    sides = [1, 1, *(side for side in shape if side != 1)]
    levels, rows, cols = prod(sides[:-2]), sides[-2], sides[-1]
    slice_rows = rows // 16 if rows % 16 == 0 else rows
    slice_cols = cols // 16 if cols % 16 == 0 else cols
    tile_cols = cut(slice_cols, 65536)
    tile_rows = cut(slice_rows, 65536 // tile_cols)
    row_spans = list(spans(rows, slice_rows, tile_rows))
    col_spans = list(spans(cols, slice_cols, tile_cols))
    for level in range(levels):
        for row_span in row_spans:
            for col_span in col_spans:
                yield [(level * rows + row) * cols + col for row in row_span for col in col_span]


def spans(side: int, of_slice: int, of_tile: int) -> Iterator[range]:
    for start in range(0, side, of_slice):
        for first in range(start, start + of_slice, of_tile):
            yield range(first, min(first + of_tile, start + of_slice))


class Bits:
    def __init__(self, data: bytes, width: int) -> None:
        self.data, self.width, self.used = data, width, 0

    def bit(self) -> int:
        byte = self.used >> 3
        bit = self.data[byte] >> (self.used & 7) & 1 if byte < len(self.data) else 1
        self.used += 1
        return bit

    def bits(self, num: int) -> int:
        return sum(self.bit() << i for i in range(num))

    def truncated(self, below: int) -> int:
        num = below.bit_length() - 1
        short = (1 << (num + 1)) - below
        value = self.bits(num)
        return value if value < short else 2 * value + self.bit() - short

    def rice(self, k: int) -> int:
        ones = 0
        while ones < 24 and self.bit():
            ones += 1
        return self.bits(self.width) if ones == 24 else ones << k | self.bits(k)


def key(bits: int, width: int) -> int:
    top = 1 << (width - 1)
    return bits ^ (2 * top - 1) if bits & top else bits | top


def unkey(value: int, width: int) -> int:
    top = 1 << (width - 1)
    return value ^ top if value & top else value ^ (2 * top - 1)


def sparse(stream: Bits, row: list[int], num: int) -> Iterator[tuple[int, int]]:
    """Yield (rank, steps) of a class of `num` elements."""
    runs, larger = MS[row[0]], MS[row[1] - 1] if row[1] else 0
    rank, ones_left, larger_next = 0, 0, False
    while rank < num:
        run = min(runs, num - rank)
        if stream.bit():
            rank += run
            continue
        rank += stream.truncated(run)
        sign = -1 if stream.bit() else 1
        magnitude = 1
        if larger:
            if not ones_left and not larger_next:
                if stream.bit():
                    ones_left = larger
                else:
                    ones_left, larger_next = stream.truncated(larger), True
            if ones_left:
                ones_left -= 1
            else:
                magnitude, larger_next = 2 + stream.rice(row[2]), False
        yield rank, sign * magnitude
        rank += 1


def dense(stream: Bits, code: int, num: int) -> Iterator[tuple[int, int]]:
    for rank in range(num):
        magnitude = stream.rice(code & 0x7F)
        if code & 0x80 and magnitude < 2:
            magnitude = 1 - magnitude
        if magnitude:
            yield rank, -magnitude if stream.bit() else magnitude


def decode(
    dtype: str, shape: tuple[int, ...], lo: int, rows: list[list[int]], streams: list[bytes], old: list[int]
) -> dict[int, int]:
    """Return the new bits of the changed positions."""
    shift, exponent_bits = EXPONENTS[dtype]
    width = 8 if dtype.startswith("F8") else 16
    changed = {}
    for data, positions in zip(streams, tiles(shape), strict=True):
        if not data:
            continue
        members: list[list[int]] = [[] for _ in rows]
        for position in positions:
            exponent = old[position] >> shift & ((1 << exponent_bits) - 1)
            members[min(max(exponent - lo, 0), len(rows) - 1)].append(position)
        stream = Bits(data, width)
        for row, of_class in zip(rows, members, strict=True):
            if row[0] == 0x7F:
                continue
            found = (
                dense(stream, row[2], len(of_class)) if row[0] == 0x80 else sparse(stream, row, len(of_class))
            )
            for rank, steps in found:
                position = of_class[rank]
                assert steps % (1 << width)
                changed[position] = unkey((key(old[position], width) + steps) % (1 << width), width)
        assert stream.used > 8 * (len(data) - 1)
    return changed
