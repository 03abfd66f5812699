"""Encoding `context` on the page: its examples, and streams that were written by hand from it."""

import re
import struct
from contextlib import nullcontext
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from patchstore.bucket import records
from patchstore.bucket.records import Box, Part, TensorSpec
from patchstore.codec import context
from patchstore.codec.part_table import PartTable
from patchstore.errors import CorruptObject
from tests.format.bad_buckets import CASES
from tests.format.bad_context import Sides
from tests.format.independent_context import (
    Schema,
    Tile,
    bits_of,
    changes,
    key_of,
    parse_table,
    tiles,
    whole,
)
from tests.format.table_edits import Head, Row, table_of, usual
from tests.support.coded import decode, parts_of

ONE = 0x3F80
"""1.0 in bf16, of exponent 7f."""
REFUSED = (LookupError, ValueError, struct.error)


def packed(*fields: str) -> bytes:
    """Bits in the order in which they are read, as the bytes of a tile."""
    bits = "".join(fields).replace(" ", "")
    bits += "1" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8)).rstrip(b"\xff")


def decoded(
    old: list[int],
    lo: int,
    rows: list[Row],
    *streams: bytes,
    dtype: str = "BF16",
    shape: tuple[int, ...] = (),
) -> dict[int, int]:
    """Position and new bits of every change of one tensor, as both readers find them; `REFUSED` by both."""
    shape = shape or (len(old),)
    parent = np.array(old, dtype="u1" if dtype.startswith("F8") else "<u2")
    table = table_of(lo, rows, [len(stream) for stream in streams], slices=usual(shape))
    spec, where = TensorSpec(name="a", dtype=dtype, shape=shape), "the page"
    try:
        tiles_, table_ = (np.frombuffer(each, dtype=np.uint8) for each in (b"".join(streams), table))
        (coded,) = parts_of(context.unpack(where, table_, tiles_, of_one(spec)))
        positions, new = decode(spec, coded, parent)
        ours = dict(zip(positions.tolist(), new.tolist(), strict=True))
    except CorruptObject:
        ours = None
    try:
        found = changes(table, b"".join(streams), {"a": (dtype, shape)}, {"a": parent.tobytes()})
        plain = {position: int.from_bytes(new, "little") for _, position, new in found}
    except REFUSED:
        assert ours is None
        raise
    assert ours == plain
    return plain


def of_one(spec: TensorSpec) -> records.Schema:
    return records.Schema(tensors=(spec,))


SECTION = (Path(__file__).parent.parent.parent / "docs" / "format.md").read_text()
SECTION = SECTION.partition("### Examples of `context`")[2].partition("## 7. State digest")[0]
EXAMPLES = {
    title: dict(line.split(maxsplit=1) for line in block.splitlines())
    for title, block in re.findall(r"\*\*(.+?)\.\*\*.*?```text\n(.*?)```", SECTION, re.DOTALL)
}


def patterns(text: str) -> list[int]:
    """Bit patterns as the page writes them: `3f00*7 3f80` is eight."""
    found = []
    for word in text.split():
        pattern, _, times = word.partition("*")
        found += [int(pattern, 16)] * int(times or 1)
    return found


def test_the_page_has_an_example_of_each_kind_of_row_and_of_tiles() -> None:
    assert len(EXAMPLES) == 6
    rows = [
        tuple(row)
        for each in EXAMPLES.values()
        for part in parse_table(
            bytes.fromhex(each["table"]),
            len(bytes.fromhex(each["tiles"])),
            {"a": ("BF16", tuple(map(int, each["shape"].split())))},
        )
        for row in part.rows
    ]
    assert {(127, 0, 0), (128, 0, 1), (128, 0, 128)} < set(rows)
    assert any(first < 127 and second for first, second, _ in rows)
    assert any(first < 127 and not second for first, second, _ in rows)


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_of_the_page_is_what_the_encoder_writes_and_both_readers_read(title: str) -> None:
    example = EXAMPLES[title]
    shape = tuple(map(int, example["shape"].split()))
    old, new = (np.array(patterns(example[name]), dtype=np.uint16) for name in ("old", "new"))
    table, streams = bytes.fromhex(example["table"]), bytes.fromhex(example["tiles"])
    box = Box(*map(int, example["part"].split())) if "part" in example else None
    assert len(old) == len(new) == (prod(shape) if box is None else box.num_elements)
    local = np.flatnonzero(old != new)
    spec = TensorSpec(name="a", dtype="BF16", shape=shape)
    part = Part.whole(spec) if box is None else Part(spec, (box.row, box.col), (box.rows, box.cols))
    _, cuts = PartTable([part], [0]).cuts(np.zeros(1, dtype=np.int64), np.array([len(local)]))
    (cut,) = cuts
    positions = cut.positions(local)

    number, row_sets = np.zeros(1, dtype=np.int64), context.RowSets()
    given = np.array([len(local)]), local, new[local]
    entries = context.packed(context.encode_all("BF16", number, cuts, old, *given, row_sets))
    # Another zlib compresses to other bytes.
    written = Head(entries["table"].numpy().tobytes())
    assert written.data() == Head(table).data() == spelled_head(example["head"])
    assert written.rest == Head(table).rest
    assert entries["tiles"].numpy().tobytes() == streams

    whole = np.full(prod(shape), 0x4000, dtype=np.uint16)
    whole[cut.positions(np.arange(len(old)))] = old
    (coded,) = parts_of(
        context.unpack(
            "the page",
            np.frombuffer(table, dtype=np.uint8),
            entries["tiles"].numpy(),
            of_one(spec),
        )
    )
    its_positions, its_new = decode(spec, coded, whole)
    assert its_positions.tolist() == positions.tolist()
    assert its_new.tolist() == new[local].tolist()

    found = changes(table, streams, {"a": ("BF16", shape)}, {"a": whole.astype("<u2").tobytes()})
    assert {position: int.from_bytes(its, "little") for _, position, its in found} == dict(
        zip(positions.tolist(), new[local].tolist(), strict=True)
    )


def spelled_head(text: str) -> bytes:
    """A head as the page writes it: `00*48` is 48 zeros."""
    return b"".join(
        bytes.fromhex(word.partition("*")[0]) * int(word.partition("*")[2] or 1) for word in text.split()
    )


BITS = {
    "A silent class": "01 00 00 01 1 00 01",
    "Runs of magnitudes": "111 001 01 0001101 1 0110 1 0 11",
    "A dense class": "00 1010 1000 11011 11000 00",
    "A dense class with 0 and 1 swapped": "1100 01 10 00",
}
"""The bits that the page spells out; the last sign of the second example lies beyond its end."""


@pytest.mark.parametrize("title", BITS)
def test_the_bits_that_the_page_spells_out_are_those_of_its_bytes(title: str) -> None:
    assert packed(BITS[title]) == bytes.fromhex(EXAMPLES[title]["tiles"])
    spelled = "".join(re.findall(r"`([01 ]+)`", _part(title))).replace(" ", "")
    assert BITS[title].replace(" ", "") in spelled


def _part(title: str) -> str:
    return SECTION.partition(f"**{title}.**")[2].partition("```")[0]


def test_the_page_names_the_kind_of_every_refusal() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "format.md").read_text()
    section = page.partition("## 9. What a reader refuses")[2]
    named = set(re.findall(r": `([a-z]+-[a-z-]+)`|error kind `([a-z-]+)`", section))
    expected = {kind for case in CASES for kind in case.kinds}
    assert {first or second for first, second in named} == expected


def test_a_table_with_a_silent_class_that_pays_for_nothing() -> None:
    """Valid, though our encoder would use one class."""
    old = [0x3F80, 0x3F80, 0x4000, 0x3F80]
    assert decoded(old, 0x7F, [(1, 0, 0), (127, 0, 0)], packed("0101")) == {1: 0x3F81}


def of_whole(shape: tuple[int, ...]) -> list[Tile]:
    """The tiles of a tensor in the usual slices."""
    return tiles(shape, *whole(shape))


def test_the_examples_of_tiles() -> None:
    small = of_whole((3, 64, 40))
    assert len(small) == 48
    assert {(len(down), len(across)) for _, down, across in small} == {(4, 40)}
    assert [level.start for level, _, _ in small] == [0] * 16 + [1] * 16 + [2] * 16
    part = tiles((3, 64, 40), (range(1, 2), range(10, 30), range(40)), (16, 1))
    assert [len(down) for _, down, _ in part] == [2, 4, 4, 4, 4, 2]
    large = of_whole((50257, 4096))
    assert {len(across) for _, _, across in large} == {256}
    assert [len(down) for _, down, across in large if across.start == 0] == [256] * 196 + [81]
    assert [across.start for _, _, across in large[:17]] == [*range(0, 4096, 256), 0]


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [
        ((), {1}, {1}),
        ((1, 5, 1), {1}, {5}),
        ((16, 1, 3), {1}, {3}),
        ((65537,), {1}, {65536, 1}),
        ((1 << 21,), {1}, {65536}),
        ((16 * 3 << 15,), {1}, {32768}),
        ((16 * 7 << 14,), {1}, {16384}),
        ((16 * 9 << 13,), {1}, {65536, 8192}),  # here 4 p is less than the limit
        ((2001, 40 * 3 + 1), {541, 378}, {121}),
        ((16 * 2048, 40), {1024}, {40}),
        ((16 * 256 * 7, 40), {1638, 154}, {40}),
    ],
)
def test_sides_are_cut(shape: tuple[int, ...], rows: set[int], columns: set[int]) -> None:
    found = of_whole(shape)
    assert {len(down) for _, down, _ in found} == rows
    assert {len(across) for _, _, across in found} == columns
    assert sum(len(down) * len(across) for _, down, across in found) == prod(shape)


def test_keys_order_numbers() -> None:
    assert [bits_of(key_of(bits, 8), 8) for bits in range(256)] == list(range(256))
    ascending = [0xFF, 0xF8, 0x81, 0x80, 0x00, 0x01, 0x78, 0x7F]
    assert all(key_of(a, 8) < key_of(b, 8) for a, b in pairwise(ascending))


def of(number: int, width: int = 16) -> str:
    """The bits of a number, the lowest first."""
    return f"{number:0{width}b}"[::-1]


class Stream(NamedTuple):
    """What a table and a stream say, and what it means: new bits by position."""

    old: list[int]
    rows: list[Row]
    bits: tuple[str, ...]
    """Of one tile."""
    new: dict[int, int]
    lo: int = 0
    dtype: str = "BF16"


# A magnitude is 1 after a bit 1, and 2 + v after a bit 0; k = 0.
ACROSS_ZERO = ("0 1 1", "0 0 1", "1", "0 1 0 10")
# Exponents 7f, 80, 0, ff, 7f and 81: with lo = 7f and K = 3 classes 0, 1, 0, 2, 0 and 2.
OF_CLASSES = [0x3F80, 0x4000, 0x0000, 0x7F80, 0xBF80, 0x4080]
SPARSE, DENSE, SWAPPED = (0, 0, 0), (128, 0, 0), (128, 0, 128)
ONES = "1" * 24
"""The escape of Rice code."""
STREAMS = {
    **{
        # The first m stay, and the only one left after them changes.
        f"the number {number} of a row": Stream([ONE] * (m + 1), [(number, 0, 0)], ("1 0 0",), {m: ONE + 1})
        for number, m in [(0, 1), (1, 2), (2, 3), (3, 4), (6, 7), (7, 8), (8, 10), (10, 14), (58, 57344)]
    },
    **{
        # B = 2 and u = 3: 0, 1 and 2 have two bits, 3 and 4 have three.
        f"truncated binary of {r} below 5": Stream(
            [ONE] * 9, [(4, 0, 0)], ("0", bits, "0", "1" * 10), {r: ONE + 1}
        )
        for r, bits in enumerate(("00", "10", "01", "11 0", "11 1"))
    },
    "a sparse class with runs of magnitudes": Stream(
        [ONE] * 20,
        [(5, 3, 1)],
        (
            "1",  # m = 6: ranks 0 to 5 stay
            "0 01 1  1  0 1 0",  # r = 3, so rank 9; down; a run of one 1, and then one of 2 + v
            "0 00  0  110 1",  # r = 0, rank 10; up; v = 5 with k = 1
            "0 11 1  0  1",  # r = 5, rank 16; up; a run of three 1
            "0 1 1  1",  # m = 3, r = 2, rank 19; down
        ),
        {9: ONE - 1, 10: ONE + 7, 16: ONE + 1, 19: ONE - 1},
        lo=0x7F,
    ),
    # M = 1, E = 2, k = 0: two of 1; then r = 0 and v = 0; then a run of two, of which one is used.
    "a run of magnitudes ends and another opens": Stream(
        [ONE] * 5,
        [(0, 2, 0)],
        ("0 0 1", "0 0", "0 0 0 0 0", "0 0 1", "1"),
        {0: ONE + 1, 1: ONE + 1, 2: ONE + 2, 3: ONE + 1},
    ),
    "a dense class": Stream(
        [ONE] * 3, [(128, 0, 2)], ("1 0 10  0", "0 00", "0 11  1"), {0: ONE + 5, 2: ONE - 3}
    ),
    "a dense class with 0 and 1 swapped": Stream(
        [ONE] * 5,
        [SWAPPED],
        ("0 1", "1 0", "1110 0", "110 1", "0 0"),
        {0: ONE - 1, 2: ONE + 3, 3: ONE - 2, 4: ONE + 1},
    ),
    "an escape": Stream([ONE], [DENSE], (ONES, of(0x1234), "0"), {0: ONE + 0x1234}),
    "an escape, k = 15": Stream([ONE], [(128, 0, 15)], (ONES, of(0x1234), "0"), {0: ONE + 0x1234}),
    "no escape yet": Stream([ONE], [DENSE], ("1" * 23, "0", "0"), {0: ONE + 23}),
    "an escape of what needs none": Stream([ONE], [DENSE], (ONES, of(24), "1"), {0: ONE - 24}),
    "an escape of eight bits": Stream(
        [0x7F], [(128, 0, 1)], (ONES, of(100, 8), "1"), {0: 0x7F - 100}, dtype="F8_E4M3"
    ),
    "an escape in a run": Stream([ONE], [(0, 1, 5)], ("0 0 0", ONES, of(1000)), {0: ONE + 1002}),
    "classes follow each other and take what lies beyond": Stream(
        OF_CLASSES,
        [SPARSE, (127, 0, 0), DENSE],
        ("1", "0 1", "0 0", "0", "10 1"),
        {2: 0x8000, 4: 0xBF7F, 5: 0x407F},
        lo=0x7F,
    ),
    **{
        f"{dtype} across zero": Stream(
            [0x00, 0x80, 0x80, 0x01], [(0, 1, 0)], ACROSS_ZERO, {0: 0x80, 1: 0x00, 3: 0x81}, dtype=dtype
        )
        for dtype in ("F8_E4M3", "F8_E5M2")
    },
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_means_what_the_page_says(name: str) -> None:
    case = STREAMS[name]
    assert decoded(case.old, case.lo, case.rows, packed(*case.bits), dtype=case.dtype) == case.new


def test_bytes_of_ones_are_dropped_and_found_beyond_the_end() -> None:
    assert packed("0 0" + "1" * 60) == b"\xfc"
    assert decoded([ONE] * 61, 0, [SPARSE], b"\xfc") == {0: ONE + 1}
    assert packed("1111111 0 1") == b"\x7f"  # the sign lies beyond
    assert decoded([ONE] * 9, 0, [SPARSE], b"\x7f") == {7: ONE - 1}
    assert decoded([ONE] * 9, 0, [SPARSE], b"\x7f\xff") == {7: ONE - 1}  # not dropped, and read


@pytest.mark.parametrize(
    ("dtype", "old", "exponent"),
    [("BF16", 0x40FF, 0x81), ("F16", 0xC3FF, 0x10), ("F8_E4M3", 0xC7, 8), ("F8_E5M2", 0xC3, 0x10)],
)
def test_every_dtype_has_its_exponent(dtype: str, old: int, exponent: int) -> None:
    up = old + 1 if old < 0x80 or 0x100 <= old < 0x8000 else old - 1
    for lo, at in ((exponent, 0), (exponent - 1, 1), (exponent - 2, 2)):
        rows = [(127, 0, 0)] * at + [(0, 0, 0)] + [(127, 0, 0)] * (2 - at)
        assert decoded([old], lo, rows, packed("00"), dtype=dtype) == {0: up}


def test_the_tiles_of_a_tensor_follow_each_other() -> None:
    assert decoded([ONE] * 65537, 0, [SPARSE], b"", packed("00")) == {65536: ONE + 1}
    streams = [b""] * 16
    streams[3], streams[15] = packed("1 00"), packed("1 1 01")
    assert decoded([ONE] * 48, 0, [SPARSE], *streams, shape=(16, 3)) == {10: ONE + 1, 47: ONE - 1}
    # A side of 32 has 16 slices of 2, so tiles are of 2 by 2, and rank 2 begins the second row.
    streams = [b""] * 256
    streams[17] = packed("1 1 00")
    assert decoded([ONE] * 1024, 0, [SPARSE], *streams, shape=(32, 32)) == {3 * 32 + 2: ONE + 1}
    # Only the last of 16 tiles has a byte: of class 1. The others have no changes, whatever their rows.
    old, streams = [ONE] * 45 + [0x4000] * 3, [b""] * 15 + [b"\xfc"]
    for row in (DENSE, SWAPPED, (7, 5, 3), (127, 0, 0)):
        assert decoded(old, 0x7F, [row, SPARSE], *streams, shape=(16, 3)) == {45: 0x4001}


def test_lengths_of_some_bits() -> None:
    lengths = [2, 3, 4, 5, 6, 7, 8, 9, 2, 2, 2, 2, 2, 2, 2, 9]
    table = table_of(5, [(0, 0, 0)], lengths, w=3, slices=usual((16, 3)))
    assert table[-6:].hex() == "88c6fa0000e0"
    schema: Schema = {"a": ("F16", (16, 3))}
    (part,) = parse_table(table, sum(lengths), schema)
    assert (part.name, part.lo, part.rows, part.lengths) == ("a", 5, [b"\0\0\0"], lengths)
    with pytest.raises(REFUSED):
        parse_table(table, sum(lengths) + 1, schema)


@pytest.mark.parametrize(
    "row", [(62, 0, 0), (62, 63, 15), (0, 1, 0), (127, 0, 0), (128, 0, 15), (128, 0, 128)]
)
def test_rows_at_the_edges_are_read(row: Row) -> None:
    table, one = table_of(0, [row], [1]), np.zeros(1, dtype=np.uint8)
    assert parse_table(table, 1, {"a": ("BF16", (4,))})[0].rows == [bytes(row)]
    spec = TensorSpec(name="a", dtype="BF16", shape=(4,))
    (coded,) = parts_of(context.unpack("here", np.frombuffer(table, dtype=np.uint8), one, of_one(spec)))
    assert coded.rows.tolist() == [list(row)]


def read_table(table: bytes, num_bytes: int, spec: TensorSpec) -> bool:
    """Whether both readers take a table, which they must agree about."""
    entries = (np.frombuffer(table, dtype=np.uint8), np.zeros(num_bytes, dtype=np.uint8))
    try:
        parse_table(table, num_bytes, {spec.name: (spec.dtype, spec.shape)})
    except REFUSED:
        with pytest.raises(CorruptObject):
            context.unpack("here", *entries, of_one(spec))
        return False
    context.unpack("here", *entries, of_one(spec))
    return True


def test_tables_of_another_length_are_refused() -> None:
    table, spec = table_of(0, [SPARSE], [1, 3]), TensorSpec(name="a", dtype="BF16", shape=(65537,))
    assert read_table(table, 4, spec)
    others = [(table[:size], 4) for size in range(len(table))]
    for broken, num_bytes in (*others, (table + b"\0", 4), (table, 0), (table, 3), (table, 5)):
        assert not read_table(broken, num_bytes, spec)


def test_lengths_are_padded_with_zeros() -> None:
    """One tile and one bit of length: seven of padding."""
    spec = TensorSpec(name="a", dtype="BF16", shape=(7, 3))
    table = table_of(0, [SPARSE], [1], w=1)
    assert read_table(table, 1, spec)
    assert not read_table(table[:-1] + b"\x02", 1, spec)


@pytest.mark.parametrize(
    ("box", "slices", "fine"),
    [
        ((0, 0, 0, 0, 0, 0), 0x14, True),
        ((1, 2, 0, 0, 0, 0), 0x00, True),
        ((1, 3, 0, 0, 0, 0), 0x00, False),  # beyond the levels
        ((1, 0, 0, 0, 0, 0), 0x00, False),  # none of them
        ((0, 0, 31, 1, 39, 1), 0x34, True),
        ((0, 0, 31, 2, 0, 0), 0x00, False),
        ((0, 0, 2**63, 1, 0, 0), 0x00, False),
        ((0, 0, 0, 0, 39, 2), 0x00, False),
        ((0, 0, 0, 0, 0, 0), 0x05, False),  # 32 slices
        ((0, 0, 0, 0, 0, 0), 0x40, False),  # 16 of 40
        ((0, 0, 0, 0, 0, 0), 0xF0, False),
    ],
)
def test_parts_and_slices(box: Sides, slices: int, fine: bool) -> None:
    shape = (3, 32, 40)
    sides = [range(a, a + b) if b else range(n) for a, b, n in zip(box[::2], box[1::2], shape, strict=True)]
    num = len(tiles(shape, tuple(sides), (1 << slices % 16, 1 << slices // 16))) if fine else 1
    table = table_of(0, [(0, 0, 0)], [1] * num, w=0, box=box, slices=slices)
    spec = TensorSpec(name="a", dtype="BF16", shape=shape)
    assert read_table(table, num, spec) == fine
    if fine:
        assert parse_table(table, num, {"a": ("BF16", shape)})[0].box == tuple(sides)


FAR = (128, 0, 4), "1" * 16
"""A dense class, and 16 << 4 steps, which are none in eight bits."""
IN_A_RUN = (0, 1, 0), "0 0 0" + ONES


@pytest.mark.parametrize(
    ("row", "stream", "first"),
    [
        (SPARSE, b"\xfc", 1),
        (SPARSE, b"\xfc\xfe", None),  # 8 bits are read, and 9 would be needed
        ((127, 0, 0), b"\xfe", None),
        (DENSE, b"\x00", 0),  # seven elements, seven bits
        (FAR[0], packed(FAR[1], "0 0000 0"), None),  # 256 is 0 in eight bits, and a sign follows
        (FAR[0], packed(FAR[1], "0 1000 0"), 1),  # 257 steps up
        (FAR[0], packed(FAR[1], "0 1000 1"), -1),
        (IN_A_RUN[0], packed(IN_A_RUN[1], "01111111"), None),  # 2 + 254
        (IN_A_RUN[0], packed(IN_A_RUN[1], "11111111"), 1),  # 2 + 255
    ],
)
def test_tiles_that_say_too_little_or_change_nothing_are_refused(
    row: Row, stream: bytes, first: int | None
) -> None:
    """Magnitudes are taken modulo the width after they are read; `first` is by how much element 0 changes."""
    with nullcontext() if first is not None else pytest.raises(REFUSED):
        assert decoded([0x38] * 7, 0, [row], stream, dtype="F8_E4M3").get(0, 0x38) == 0x38 + (first or 0)
