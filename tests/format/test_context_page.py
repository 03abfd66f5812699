"""Encoding `context` on the page: its examples, and streams that were written by hand from it."""

import re
import struct
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

from patchstore.encodings import context
from patchstore.errors import CorruptObject
from patchstore.format.records import Box, TensorSpec
from tests.format.bad_buckets import CASES
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
    """Position and new bits of every change of one tensor."""
    parent = b"".join(bits.to_bytes(1 if dtype.startswith("F8") else 2, "little") for bits in old)
    shape = shape or (len(old),)
    table = table_of(lo, rows, [len(stream) for stream in streams], slices=usual(shape))
    found = changes(table, b"".join(streams), {"a": (dtype, shape)}, {"a": parent})
    return {position: int.from_bytes(new, "little") for _, position, new in found}


SECTION = (Path(__file__).parent.parent.parent / "docs" / "format.md").read_text()
SECTION = SECTION.partition("### Examples of `context`")[2].partition("## 7. State digest")[0]
EXAMPLES = {
    title: dict(line.split(maxsplit=1) for line in block.splitlines())
    for title, block in re.findall(r"\*\*(.+?)\.\*\*.*?```\n(.*?)```", SECTION, re.DOTALL)
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
    cut = context.tiling_of_part(shape, box, len(local))
    positions = cut.positions(local)

    spec = TensorSpec(name="a", dtype="BF16", shape=shape)
    row_sets = context.RowSets()
    coded = context.encode_all("BF16", [cut], old, np.array([len(local)]), local, new[local], row_sets)
    entries = context.packed([(0, coded[0])])
    # Another zlib compresses to other bytes.
    written = Head(entries["table"].numpy().tobytes())
    assert written.data() == Head(table).data() == spelled_head(example["head"])
    assert written.rest == Head(table).rest
    assert entries["tiles"].numpy().tobytes() == streams

    whole = np.full(prod(shape), 0x4000, dtype=np.uint16)
    whole[cut.positions(np.arange(len(old)))] = old
    stored = {"table": torch.frombuffer(bytearray(table), dtype=torch.uint8), "tiles": entries["tiles"]}
    (part,) = context.unpacked("the page", stored, [spec])["a"]
    its_positions, its_new = context.decode(spec, part, whole, "the page")
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
    table = table_of(0x7F, [(1, 0, 0), (127, 0, 0)], [1], w=0)
    parent = struct.pack("<4H", 0x3F80, 0x3F80, 0x4000, 0x3F80)
    found = list(changes(table, b"\xfa", {"a": ("BF16", (4,))}, {"a": parent}))
    assert found == [("a", 1, b"\x81\x3f")]
    assert packed("0101") == b"\xfa"


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


@pytest.mark.parametrize(
    ("first", "m"), [(0, 1), (1, 2), (2, 3), (3, 4), (6, 7), (7, 8), (8, 10), (10, 14), (58, 57344)]
)
def test_the_numbers_of_rows(first: int, m: int) -> None:
    """The first m stay, and the only one left after them changes."""
    assert decoded([ONE] * (m + 1), 0, [(first, 0, 0)], packed("1 0 0")) == {m: ONE + 1}


def test_keys_order_numbers() -> None:
    assert [bits_of(key_of(bits, 8), 8) for bits in range(256)] == list(range(256))
    ascending = [0xFF, 0xF8, 0x81, 0x80, 0x00, 0x01, 0x78, 0x7F]
    assert all(key_of(a, 8) < key_of(b, 8) for a, b in pairwise(ascending))


def test_a_sparse_class_with_runs_of_magnitudes() -> None:
    stream = packed(
        "1",  # m = 6: ranks 0 to 5 stay
        "0 01 1  1  0 1 0",  # r = 3, so rank 9; down; a run of one 1, and then one of 2 + v
        "0 00  0  110 1",  # r = 0, rank 10; up; v = 5 with k = 1
        "0 11 1  0  1",  # r = 5, rank 16; up; a run of three 1
        "0 1 1  1",  # m = 3, r = 2, rank 19; down
    )
    assert decoded([ONE] * 20, 0x7F, [(5, 3, 1)], stream) == {
        9: ONE - 1,
        10: ONE + 7,
        16: ONE + 1,
        19: ONE - 1,
    }


def test_a_run_of_magnitudes_ends_and_another_opens() -> None:
    # M = 1, E = 2, k = 0: two of 1; then r = 0 and v = 0; then a run of two, of which one is used.
    stream = packed("0 0 1", "0 0", "0 0 0 0 0", "0 0 1", "1")
    assert decoded([ONE] * 5, 0, [(0, 2, 0)], stream) == {0: ONE + 1, 1: ONE + 1, 2: ONE + 2, 3: ONE + 1}


def test_a_dense_class() -> None:
    stream = packed("1 0 10  0", "0 00", "0 11  1")
    assert decoded([ONE] * 3, 0, [(128, 0, 2)], stream) == {0: ONE + 5, 2: ONE - 3}


def test_a_dense_class_with_0_and_1_swapped() -> None:
    stream = packed("0 1", "1 0", "1110 0", "110 1", "0 0")
    assert decoded([ONE] * 5, 0, [(128, 0, 128)], stream) == {0: ONE - 1, 2: ONE + 3, 3: ONE - 2, 4: ONE + 1}


def test_the_escape_of_rice_code() -> None:
    escaped = packed("1" * 24, f"{0x1234:016b}"[::-1], "0")
    assert decoded([ONE], 0, [(128, 0, 0)], escaped) == {0: ONE + 0x1234}
    assert decoded([ONE], 0, [(128, 0, 15)], escaped) == {0: ONE + 0x1234}
    assert decoded([ONE], 0, [(128, 0, 0)], packed("1" * 23, "0", "0")) == {0: ONE + 23}
    assert decoded([ONE], 0, [(128, 0, 0)], packed("1" * 24, f"{24:016b}"[::-1], "1")) == {0: ONE - 24}
    eight = packed("1" * 24, f"{100:08b}"[::-1], "1")
    assert decoded([0x7F], 0, [(128, 0, 1)], eight, dtype="F8_E4M3") == {0: 0x7F - 100}
    in_a_run = packed("0 0 0", "1" * 24, f"{1000:016b}"[::-1])
    assert decoded([ONE], 0, [(0, 1, 5)], in_a_run) == {0: ONE + 1002}


@pytest.mark.parametrize(("r", "bits"), [(0, "00"), (1, "10"), (2, "01"), (3, "11 0"), (4, "11 1")])
def test_truncated_binary_of_5(r: int, bits: str) -> None:
    """B = 2 and u = 3: 0, 1 and 2 have two bits, 3 and 4 have three."""
    stream = packed("0", bits, "0", "1" * 10)
    assert decoded([ONE] * 9, 0, [(4, 0, 0)], stream) == {r: ONE + 1}


def test_bytes_of_ones_are_dropped_and_found_beyond_the_end() -> None:
    rows = [(0, 0, 0)]
    assert packed("0 0" + "1" * 60) == b"\xfc"
    assert decoded([ONE] * 61, 0, rows, b"\xfc") == {0: ONE + 1}
    assert packed("1111111 0 1") == b"\x7f"  # the sign lies beyond
    assert decoded([ONE] * 9, 0, rows, b"\x7f") == {7: ONE - 1}
    assert decoded([ONE] * 9, 0, rows, b"\x7f\xff") == {7: ONE - 1}  # not dropped, and read


def test_a_tile_without_bytes_has_no_changes_whatever_its_rows() -> None:
    for row in ((128, 0, 0), (128, 0, 128), (7, 5, 3), (127, 0, 0)):
        assert decoded([ONE] * 9, 0, [row], b"") == {}


def test_classes_follow_each_other_and_take_what_lies_beyond() -> None:
    old = [0x3F80, 0x4000, 0x0000, 0x7F80, 0xBF80, 0x4080]
    # Exponents 7f, 80, 0, ff, 7f and 81: with lo = 7f and K = 3 classes 0, 1, 0, 2, 0 and 2.
    rows = [(0, 0, 0), (127, 0, 0), (128, 0, 0)]
    stream = packed("1", "0 1", "0 0", "0", "10 1")
    assert decoded(old, 0x7F, rows, stream) == {2: 0x8000, 4: 0xBF7F, 5: 0x407F}


@pytest.mark.parametrize(
    ("dtype", "old", "exponent"),
    [("BF16", 0x40FF, 0x81), ("F16", 0xC3FF, 0x10), ("F8_E4M3", 0xC7, 8), ("F8_E5M2", 0xC3, 0x10)],
)
def test_every_dtype_has_its_exponent(dtype: str, old: int, exponent: int) -> None:
    up = old + 1 if old < 0x80 or 0x100 <= old < 0x8000 else old - 1
    for lo, at in ((exponent, 0), (exponent - 1, 1), (exponent - 2, 2)):
        rows = [(127, 0, 0)] * at + [(0, 0, 0)] + [(127, 0, 0)] * (2 - at)
        assert decoded([old], lo, rows, packed("00"), dtype=dtype) == {0: up}


def test_eight_bits_cross_zero() -> None:
    for dtype in ("F8_E4M3", "F8_E5M2"):
        old = [0x00, 0x80, 0x80, 0x01]
        # E = 1: a magnitude is 1 after a bit 1, and 2 + v after a bit 0; k = 0.
        stream = packed("0 1 1", "0 0 1", "1", "0 1 0 10")
        assert decoded(old, 0, [(0, 1, 0)], stream, dtype=dtype) == {0: 0x80, 1: 0x00, 3: 0x81}


def test_two_tiles() -> None:
    assert decoded([ONE] * 65537, 0, [(0, 0, 0)], b"", packed("00")) == {65536: ONE + 1}
    streams = [b""] * 16
    streams[3], streams[15] = packed("1 00"), packed("1 1 01")
    assert decoded([ONE] * 48, 0, [(0, 0, 0)], *streams, shape=(16, 3)) == {10: ONE + 1, 47: ONE - 1}


def test_rows_and_columns_of_a_tile() -> None:
    """A side of 32 has 16 slices of 2, so tiles are of 2 by 2, and rank 2 begins the second row."""
    streams = [b""] * 256
    streams[17] = packed("1 1 00")
    assert decoded([ONE] * 1024, 0, [(0, 0, 0)], *streams, shape=(32, 32)) == {3 * 32 + 2: ONE + 1}


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
def test_rows_that_mean_something(row: Row) -> None:
    assert parse_table(table_of(0, [row], [0]), 0, {"a": ("BF16", (4,))})


@pytest.mark.parametrize(
    "row",
    [
        (63, 0, 0),
        (126, 0, 0),
        (0, 0, 1),
        (0, 64, 0),
        (0, 1, 16),
        (127, 0, 1),
        (127, 1, 0),
        (128, 1, 0),
        (128, 0, 16),
        (128, 0, 127),
        (128, 0, 129),
        (129, 0, 0),
        (255, 255, 255),
    ],
)
def test_other_rows_are_refused(row: Row) -> None:
    with pytest.raises(REFUSED):
        parse_table(table_of(0, [(0, 0, 0), row], [0]), 0, {"a": ("BF16", (4,))})


def test_tables_of_another_length_are_refused() -> None:
    table = table_of(0, [(0, 0, 0)], [1, 3])
    schema: Schema = {"a": ("BF16", (65537,))}
    assert parse_table(table, 4, schema)
    for broken in (*(table[:size] for size in range(len(table))), table + b"\0"):
        with pytest.raises(REFUSED):
            parse_table(broken, 4, schema)
    for num_bytes in (0, 3, 5):
        with pytest.raises(REFUSED):
            parse_table(table, num_bytes, schema)


def test_tables_that_name_other_tensors_are_refused() -> None:
    schema: Schema = {"a": ("F32", (4,)), "b": ("BF16", (4,)), "c": ("F16", (4,))}
    for places, fine in (((1,), True), ((1, 1), True), ((1, 0), False), ((0,), False), ((3,), False)):
        head = Head(table_of(0, [(0, 0, 0)], [0], w=0))
        head.num_parts = len(places)
        for name, column in head.columns.items():
            head.columns[name] = list(places) if name == "place" else column * len(places)
        if fine:
            found = [part.name for part in parse_table(head.table(), 0, schema)]
            assert found == ["abc"[place] for place in accumulate(places)]
        else:
            with pytest.raises(REFUSED):
                parse_table(head.table(), 0, schema)
    for k, w in ((0, 0), (17, 0), (1, 33)):
        with pytest.raises(REFUSED):
            parse_table(table_of(0, [(0, 0, 0)] * k, [0], 1, w), 0, schema)


Sides = tuple[int, int, int, int, int, int]


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
    table = table_of(0, [(0, 0, 0)], [0] * num, w=0, box=box, slices=slices)
    schema: Schema = {"a": ("BF16", shape)}
    spec = TensorSpec(name="a", dtype="BF16", shape=shape)
    data = np.frombuffer(table, dtype=np.uint8)
    if fine:
        assert parse_table(table, 0, schema)[0].box == tuple(sides)
        assert context.unpack("here", data, 0, [spec]).cuts[0].num_tiles == num
        return
    with pytest.raises(REFUSED):
        parse_table(table, 0, schema)
    with pytest.raises(CorruptObject):
        context.unpack("here", data, 0, [spec])


@pytest.mark.parametrize(
    ("row", "stream", "fine"),
    [
        ((0, 0, 0), b"\xfc", True),
        ((0, 0, 0), b"\xfc\xfe", False),  # 8 bits are read, and 9 would be needed
        ((127, 0, 0), b"\xfe", False),
        ((128, 0, 0), b"\x00", True),  # seven elements, seven bits
        ((128, 0, 4), packed("1" * 16, "0 0000 0"), False),  # 256 is 0 in eight bits
        ((128, 0, 4), packed("1" * 16, "0 1000 0"), True),
        ((0, 1, 0), packed("0 0 0", "1" * 24, "01111111"), False),  # 2 + 254
        ((0, 1, 0), packed("0 0 0", "1" * 24, "11111111"), True),  # 2 + 255
    ],
)
def test_tiles_that_say_too_little_or_change_nothing_are_refused(row: Row, stream: bytes, fine: bool) -> None:
    def read() -> dict[int, int]:
        return decoded([0x38] * 7, 0, [row], stream, dtype="F8_E4M3")

    if fine:
        read()
    else:
        with pytest.raises(REFUSED):
            read()
