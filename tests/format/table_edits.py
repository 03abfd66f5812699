"""Tables of encoding `context` with other heads."""

import struct
import zlib
from collections.abc import Callable, Sequence

from tests.format.independent_context import COLUMNS, whole

Row = tuple[int, int, int]


class Head:
    """The head of a table, inflated."""

    def __init__(self, table: bytes) -> None:
        self.num_parts, self.num_sets, squeezed = struct.unpack_from("<III", table)
        data = zlib.decompress(table[12 : 12 + squeezed])
        self.rest = table[12 + squeezed :]
        """Lengths."""
        self.columns: dict[str, list[int]] = {}
        count = self.num_parts
        for name, size in COLUMNS.items():
            planes, data = data[: size * count], data[size * count :]
            self.columns[name] = [int.from_bytes(planes[i::count], "little") for i in range(count)]
        self.lo, self.num_classes = list(data[: self.num_sets]), list(data[self.num_sets : 2 * self.num_sets])
        flat = data[2 * self.num_sets :]
        num = len(flat) // 3
        self.rows = [list(flat[i::num]) for i in range(num)]
        self.more = b""
        """Behind the rows."""
        self.trailing = b""
        """Behind the compressed stream, and counted as a part of it."""

    def data(self) -> bytes:
        planes = []
        for name, size in COLUMNS.items():
            numbers = [value.to_bytes(size, "little") for value in self.columns[name]]
            planes += [bytes(number[k] for number in numbers) for k in range(size)]
        rows = [bytes(row[k] for row in self.rows) for k in range(3)]
        return b"".join([*planes, bytes(self.lo), bytes(self.num_classes), *rows, self.more])

    def table(self) -> bytes:
        squeezed = zlib.compress(self.data(), 9) + self.trailing
        return struct.pack("<III", self.num_parts, self.num_sets, len(squeezed)) + squeezed + self.rest


def edited(edit: Callable[[Head], object]) -> Callable[[bytes], bytes]:
    """A table whose head was changed by `edit`."""

    def change(table: bytes) -> bytes:
        head = Head(table)
        edit(head)
        return head.table()

    return change


def setting(column: str, number: int, value: int) -> Callable[[bytes], bytes]:
    """A table with another number in a column of its parts."""

    def edit(head: Head) -> None:
        head.columns[column][number] = value

    return edited(edit)


def usual(shape: tuple[int, ...]) -> int:
    """What a table says of the slices in which a whole tensor is usually cut."""
    rows, columns = whole(shape)[1]
    return (rows.bit_length() - 1) + 16 * (columns.bit_length() - 1)


def table_of(
    lo: int,
    rows: Sequence[Row],
    lengths: Sequence[int],
    place: int = 0,
    w: int = 8,
    box: tuple[int, int, int, int, int, int] = (0,) * 6,
    slices: int = 0,
) -> bytes:
    """The table of one part; lengths in whole bytes, unless told otherwise."""
    least = min(lengths) if w else lengths[0]
    number = sum((length - least) << i * w for i, length in enumerate(lengths))
    head = Head.__new__(Head)
    head.num_parts = head.num_sets = 1
    named = ("first", "levels", "row", "rows", "column", "columns")
    head.columns = {"place": [place], **{name: [value] for name, value in zip(named, box, strict=True)}}
    head.columns |= {"slices": [slices], "set": [0], "w": [w], "least": [least]}
    head.lo, head.num_classes, head.rows = [lo], [len(rows)], [list(row) for row in rows]
    head.more = head.trailing = b""
    head.rest = number.to_bytes((len(lengths) * w + 7) // 8, "little")
    return head.table()
