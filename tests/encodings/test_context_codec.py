from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from patchstore.encodings.context import (
    Coded,
    RowSets,
    decode,
    decode_all,
    encode,
    encode_all,
    pack,
    tiling,
    unpack,
)
from patchstore.encodings.context.classes import WIDTHS
from patchstore.encodings.context.parameters import BINS, DENSE, bin_of, choose_classes, choose_rows
from patchstore.errors import CorruptObject
from patchstore.format.records import TensorSpec
from tests.encodings import context_plain
from tests.format.table_edits import Head, edited, setting

SHAPES = [
    (),
    (1,),
    (7,),
    (16,),
    (1024,),
    (48, 32),
    (33, 50),
    (3, 48, 64),
    (5, 1, 4),
    (17, 16),
    (262, 274),
    (70001,),
]
DTYPES = sorted(WIDTHS)
Array = npt.NDArray[Any]
Case = tuple[TensorSpec, Array, Array, Array]


def make_case(dtype: str, shape: tuple[int, ...], density: float, kind: str, seed: int = 0) -> Case:
    """`any`: all bit patterns to all others; `steps`: like a trainer's, small steps of smooth weights."""
    rng = np.random.default_rng([seed, DTYPES.index(dtype), *shape, int(density * 1000)])
    spec = TensorSpec(name="w", dtype=dtype, shape=shape)
    num, width = prod(shape), WIDTHS[dtype]
    as_bits = f"u{width}"
    if kind == "any":
        old: Array = rng.integers(0, 1 << 8 * width, num).astype(as_bits)
        by: Array = rng.integers(1, 1 << 8 * width, num)
    else:
        old = (rng.standard_normal(num) * 0.02).astype(np.float32).view(np.uint32) >> (32 - 8 * width)
        old = old.astype(as_bits)
        by = rng.geometric(0.9, num) * rng.choice([-1, 1], num)
    changed = rng.random(num) < density
    changed[rng.integers(num)] = True
    positions = np.flatnonzero(changed)
    return spec, old, positions, (old[positions] + by[positions]).astype(as_bits)


def streams_of(coded: Coded) -> list[bytes]:
    ends = coded.lengths.cumsum()
    return [coded.data[end - length : end].tobytes() for end, length in zip(ends, coded.lengths, strict=True)]


def plainly(spec: TensorSpec, coded: Coded, old: Array) -> dict[int, int]:
    return context_plain.decode(
        spec.dtype, spec.shape, coded.lo, coded.rows.tolist(), streams_of(coded), old.tolist()
    )


@pytest.mark.sample(120)
@pytest.mark.parametrize("kind", ["any", "steps"])
@pytest.mark.parametrize("density", [0.0, 0.005, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_change_comes_back_exactly(shape: tuple[int, ...], dtype: str, density: float, kind: str) -> None:
    if prod(shape) > 65536 and density > 0.01 and (dtype, density, len(shape)) != ("BF16", 0.5, 1):
        pytest.skip("one large tile takes seconds, and one dtype tells")
    spec, old, positions, new = make_case(dtype, shape, density, kind)
    coded = encode(spec, old, positions, new)
    at, bits = decode(spec, coded, old, "payload")
    assert np.array_equal(at, positions)
    assert bits.dtype == new.dtype
    assert np.array_equal(bits, new)
    assert (coded.lengths > 0).sum() == sum(bool(set(tile) & set(positions.tolist())) for tile in cells(spec))
    if prod(shape) < 5000 or density < 0.1:
        plain = plainly(spec, coded, old)
        assert sorted(plain) == positions.tolist()
        assert [plain[position] for position in positions.tolist()] == new.tolist()


def cells(spec: TensorSpec) -> list[list[int]]:
    return list(context_plain.tiles(spec.shape))


@pytest.mark.parametrize("shape", [*SHAPES, (2, 32, 3), (16, 131072), (70000, 16), (3, 65537)], ids=str)
def test_tiles_are_those_of_the_description(shape: tuple[int, ...]) -> None:
    cut, plain = tiling(shape), list(context_plain.tiles(shape))
    assert cut.num_tiles == len(plain)
    assert cut.sizes().tolist() == [len(tile) for tile in plain]
    assert cut.sizes().max() <= 65536
    flat = np.arange(prod(shape))
    assert cut.gather(flat, np.arange(len(plain))).tolist() == [at for tile in plain for at in tile]
    some = np.arange(len(plain))[::3]
    wanted = [at for tile in plain[::3] for at in tile]
    assert cut.gather(flat, some).tolist() == wanted
    target = np.full(prod(shape), -1)
    cut.scatter(np.array(wanted), target, some)
    assert np.flatnonzero(target >= 0).tolist() == sorted(wanted)
    assert (target[wanted] == wanted).all()
    level, row, col, num_rows, num_cols = cut.places(np.arange(len(plain)))
    assert (((level * cut.rows + row) * cut.cols + col) == [tile[0] for tile in plain]).all()
    assert (num_rows * num_cols == cut.sizes()).all()


@pytest.mark.parametrize("parts", [2, 4, 8, 16])
@pytest.mark.parametrize("side", [-2, -1])
@pytest.mark.parametrize("shape", [(1024, 512), (4, 64, 96)], ids=str)
def test_a_slice_is_decoded_from_its_own_tiles_and_bits(
    shape: tuple[int, ...], side: int, parts: int
) -> None:
    spec, old, positions, new = make_case("BF16", shape, 0.02, "steps")
    coded = encode(spec, old, positions, new)
    for part in (0, parts // 2, parts - 1):
        mine = np.zeros(shape, dtype=np.bool_)
        length = shape[side] // parts
        index = [slice(None)] * len(shape)
        index[side] = slice(part * length, (part + 1) * length)
        mine[tuple(index)] = True
        flat = mine.reshape(-1)
        tiles = np.array([number for number, tile in enumerate(cells(spec)) if flat[tile].any()])
        assert sum(len(tile) for number, tile in enumerate(cells(spec)) if number in tiles) == flat.sum()
        garbage = np.random.default_rng(part).integers(0, 65536, len(old)).astype(old.dtype)
        at, bits = decode(spec, coded, np.where(flat, old, garbage), "payload", tiles)
        inside = flat[positions]
        assert np.array_equal(at, positions[inside])
        assert np.array_equal(bits, new[inside])


def test_a_large_tensor_in_several_groups_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, old, positions, new = make_case("BF16", (256, 512), 0.02, "steps")
    positions, new = positions[positions < 60000], new[positions < 60000]
    whole = encode(spec, old, positions, new)
    monkeypatch.setattr("patchstore.encodings.context.encoder._WRITTEN_TOGETHER", 16384)
    monkeypatch.setattr("patchstore.encodings.context.decoder._READ_TOGETHER", 8192)
    monkeypatch.setattr("patchstore.encodings.context.bits._COPIED", 10)
    parts = encode(spec, old, positions, new)
    assert whole.data.tobytes() == parts.data.tobytes()
    assert np.array_equal(whole.lengths, parts.lengths)
    at, bits = decode(spec, parts, old, "payload")
    assert np.array_equal(at, positions) and np.array_equal(bits, new)


def uneven_case(dtype: str, shape: tuple[int, ...], density: float, seed: int) -> Case:
    """Small weights change more often than large ones, so that classes are worth telling apart."""
    spec, old, _, _ = make_case(dtype, shape, 0, "steps", seed)
    rng = np.random.default_rng(seed)
    top = 1 << (8 * WIDTHS[dtype] - 1)
    small = 1 - (old & (top - 1)) / top
    changed = rng.random(len(old)) < density * (small / small.mean()) ** 20
    changed[rng.integers(len(old))] = True
    positions = np.flatnonzero(changed)
    by = rng.geometric(0.7, len(positions)) * rng.choice([-1, 1], len(positions))
    return spec, old, positions, (old[positions] + by).astype(old.dtype)


def mixed_cases(dtype: str) -> list[Case]:
    """Few changes and many, one class and sixteen, sparse and dense; neighbours of one shape among them."""
    shapes = [
        (1,),
        (7,),
        (48, 32),
        (48, 32),
        (48, 32),
        (33, 50),
        (3, 48, 64),
        (5, 1, 4),
        (64, 256),
        (),
        (1024,),
    ]
    cases = [uneven_case(dtype, (256, 512), 0.3, 1), uneven_case(dtype, (130, 130), 0.02, 2)]
    for seed, (kind, density) in enumerate([("any", 0.0), ("steps", 0.01), ("steps", 0.3), ("any", 1.0)]):
        cases += [make_case(dtype, shape, density, kind, seed) for shape in shapes]
    return cases


def together(cases: list[Case]) -> tuple[list[TensorSpec], Array, Array, Array, Array]:
    olds, positions, news = (np.concatenate([case[part] for case in cases]) for part in (1, 2, 3))
    return [case[0] for case in cases], olds, np.array([len(case[2]) for case in cases]), positions, news


def encode_together(cases: list[Case]) -> list[Coded]:
    specs, *arrays = together(cases)
    return encode_all(specs[0].dtype, [tiling(spec.shape) for spec in specs], *arrays, RowSets())


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_that_are_coded_together_share_rows(dtype: str) -> None:
    cases = mixed_cases(dtype)
    found = encode_together(cases)
    sets = {(coded.lo, coded.rows.tobytes()): coded for coded in found}
    assert 1 < len(sets) < len(found)
    size = sum(len(coded.data) for coded in found) + sum(2 + coded.rows.size for coded in sets.values())
    alone = [encode(*case) for case in cases]
    size_alone = sum(len(coded.data) + 2 + coded.rows.size for coded in alone)
    assert size < size_alone
    kinds = {(len(coded.rows) > 1, row[0] == DENSE) for coded in found for row in coded.rows.tolist()}
    assert {(False, True), (True, False)} <= kinds
    # Rows of its own are always an answer, but for what rounding and estimates make of small streams.
    for coded, other in zip(found, alone, strict=True):
        assert len(coded.data) <= 1.1 * (len(other.data) + other.rows.size + 2) + 8


def test_large_tensors_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchstore.encodings.context.row_sets.SHARING", 0)
    cases = mixed_cases("BF16")
    for case, coded in zip(cases, encode_together(cases), strict=True):
        alone = encode(*case)
        assert coded.lo == alone.lo
        assert np.array_equal(coded.rows, alone.rows)
        assert np.array_equal(coded.lengths, alone.lengths)
        assert coded.data.tobytes() == alone.data.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_that_are_decoded_together_are_those_of_each_alone(dtype: str) -> None:
    rng = np.random.default_rng(1)
    cases = mixed_cases(dtype)
    specs, olds, counts, positions, news = together(cases)
    coded = encode_together(cases)
    where = ["payload"] * len(specs)
    found = decode_all(specs, coded, olds, where)
    for got, expected in zip(found, (counts, positions, news), strict=True):
        assert got.dtype == expected.dtype and np.array_equal(got, expected)
    some = [
        None if number % 3 == 0 else np.flatnonzero(rng.random(len(each.lengths)) < 0.5)
        for number, each in enumerate(coded)
    ]
    counts, positions, news = decode_all(specs, coded, olds, where, some)
    for case, each, tiles, num, end in zip(cases, coded, some, counts, counts.cumsum(), strict=True):
        at, bits = decode(case[0], each, case[1], "payload", tiles)
        assert np.array_equal(at, positions[end - num : end])
        assert np.array_equal(bits, news[end - num : end])


DAMAGE: dict[str, Callable[[Coded], Coded]] = {
    "row": lambda coded: replace(coded, rows=np.full_like(coded.rows, 0x7E)),
    "number of rows": lambda coded: replace(coded, rows=coded.rows[:0]),
    "number of tiles": lambda coded: replace(coded, lengths=coded.lengths[:-1]),
    "negative length": lambda coded: replace(coded, lengths=coded.lengths - coded.lengths.max() - 1),
    "long stream": lambda coded: replace(coded, lengths=coded.lengths + 100_000),
    "missing bytes": lambda coded: replace(coded, data=coded.data[:-1]),
    "more bytes than elements": lambda coded: replace(
        coded,
        lengths=coded.lengths + 40 * (np.arange(len(coded.lengths)) == 0),
        data=np.concatenate([np.zeros(40, dtype=np.uint8), coded.data]),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_one_bad_tensor_among_good_ones_is_refused_by_its_name(damage: str) -> None:
    cases = [make_case("BF16", (48, 32), 0.02, "steps", seed) for seed in range(5)]
    cases = [(replace(case[0], name=f"w{number}"), *case[1:]) for number, case in enumerate(cases)]
    specs, olds, *_ = together(cases)
    coded = encode_together(cases)
    coded[3] = DAMAGE[damage](coded[3])
    with pytest.raises(CorruptObject, match=r"key3: .*'w3'"):
        decode_all(specs, coded, olds, [f"key{number}" for number in range(5)])


def test_a_change_by_nothing_among_good_ones_is_refused_by_its_name() -> None:
    good = make_case("F8_E4M3", (1,), 1, "any")
    coded = encode(*good)
    row = np.array([[0x80, 0, 8]], dtype=np.uint8)
    bad = replace(coded, lo=0, rows=row, lengths=np.array([2]), data=np.array([0b01, 0b00], dtype=np.uint8))
    specs = [replace(good[0], name=f"w{number}") for number in range(3)]
    with pytest.raises(CorruptObject, match=r"key1: .*'w1' changes an element by nothing"):
        decode_all(specs, [coded, bad, coded], np.repeat(good[1], 3), ["key0", "key1", "key2"])


def test_damaged_streams_are_refused_or_decode_to_something() -> None:
    rng = np.random.default_rng(5)
    cases = [
        make_case(dtype, (96, 64), density, kind)
        for dtype, density, kind in [
            ("BF16", 0.02, "steps"),
            ("BF16", 0.6, "any"),
            ("F8_E4M3", 0.3, "any"),
            ("F8_E5M2", 0.05, "steps"),
        ]
    ]
    coded_cases = [(case, encode(*case)) for case in cases]
    refused = 0
    for number in range(2000):
        (spec, old, _, _), coded = coded_cases[number % len(cases)]
        data, lengths, rows = coded.data.copy(), coded.lengths.copy(), coded.rows.copy()
        tile = int(rng.choice(np.flatnonzero(lengths)))
        end = int(lengths[: tile + 1].sum())
        damage = rng.integers(4)
        if damage == 0:
            for _ in range(rng.integers(1, 4)):
                data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        elif damage == 1:
            short = int(rng.integers(1, lengths[tile] + 1))
            data, lengths[tile] = np.delete(data, np.arange(end - short, end)), lengths[tile] - short
        elif damage == 2:
            more = rng.integers(0, 256, rng.integers(1, 9)).astype(np.uint8)
            data, lengths[tile] = np.insert(data, end, more), lengths[tile] + len(more)
        else:
            rows[rng.integers(len(rows)), rng.integers(3)] = rng.integers(256)
        bad = replace(coded, data=data, lengths=lengths, rows=rows)
        try:
            at, bits = decode(spec, bad, old, "payload")
        except CorruptObject:
            refused += 1
        else:
            assert (np.diff(at) > 0).all() and len(at) == len(bits)
            assert (bits != old[at]).all()
            if number % 40 == 0:
                plain = plainly(spec, bad, old)
                assert plain == dict(zip(at.tolist(), bits.tolist(), strict=True))
    assert refused > 400


def test_a_change_by_nothing_is_refused() -> None:
    spec = TensorSpec(name="w", dtype="F8_E4M3", shape=(1,))
    row = np.array([[0x80, 0, 8]], dtype=np.uint8)  # one element, Rice with k = 8
    data = np.array([0b01, 0b00], dtype=np.uint8)
    coded = Coded(tiling=tiling(()), lo=0, rows=row, lengths=np.array([2]), data=data)
    with pytest.raises(CorruptObject):  # 1 << 8 steps, in 8 bits
        decode(spec, coded, np.zeros(1, dtype=np.uint8), "payload")


def make_table() -> tuple[list[TensorSpec], list[tuple[int, Coded]]]:
    cases = [
        make_case("BF16", (96, 64), 0.03, "steps"),
        make_case("F8_E5M2", (33, 50), 0.3, "any"),
        make_case("F16", (1024,), 0.01, "steps"),
    ]
    other = TensorSpec(name="x", dtype="F32", shape=(4,))
    empty = TensorSpec(name="y", dtype="BF16", shape=(0, 4))
    specs = [cases[0][0], other, cases[1][0], empty, cases[2][0]]
    return specs, [(2 * number, encode(*case)) for number, case in enumerate(cases)]


def test_a_table_comes_back() -> None:
    specs, items = make_table()
    table, parts = pack(items)
    tiles = np.concatenate(parts)
    back = unpack("payload", np.frombuffer(table, dtype=np.uint8), len(tiles), specs)
    assert back.indices.tolist() == [0, 2, 4]
    for number, (_, coded) in enumerate(items):
        again = back.coded(number, tiles)
        assert again.lo == coded.lo
        assert np.array_equal(again.rows, coded.rows)
        assert np.array_equal(again.lengths, coded.lengths)
        assert np.array_equal(again.data, coded.data)


def test_a_table_of_no_tensors_is_refused() -> None:
    with pytest.raises(CorruptObject, match="no tensors"):
        unpack("payload", np.zeros(12, dtype=np.uint8), 0, make_table()[0])


BAD_FIELDS = [
    ("place", 1, 0),  # the same tensor twice
    ("place", 1, 1),  # one of a dtype that has no classes
    ("place", 1, 3),  # one without elements
    ("place", 2, 3),  # none of the schema
    ("place", 2, 2**32 - 1),
    ("levels", 0, 2),  # more than there are
    ("first", 0, 1),  # all levels, and not the first
    ("rows", 0, 97),
    ("row", 0, 96),
    ("row", 0, 2**48),
    ("columns", 0, 65),
    ("column", 0, 2**64 - 1),
    ("slices", 0, 0x45),  # 32 slices of rows
    ("slices", 0, 0x54),
    ("slices", 1, 0x01),  # 33 rows in two slices
    ("set", 0, 3),
    ("w", 0, 33),
    ("least", 0, 255),  # another sum of lengths
    ("least", 0, 2**32 - 1),
]


@pytest.mark.parametrize(("column", "number", "value"), BAD_FIELDS)
def test_a_bad_table_is_refused(column: str, number: int, value: int) -> None:
    refused(setting(column, number, value))


def set_row(at: int, value: int) -> Callable[[Head], None]:
    def edit(head: Head) -> None:
        head.rows[0][at] = value

    return edit


BAD_HEADS: dict[str, Callable[[Head], object]] = {
    "no code": set_row(0, 0x7E),
    "no runs": set_row(1, 0x40),
    "no rice": set_row(2, 0x10),
    "no classes": lambda head: head.num_classes.__setitem__(0, 0),
    "17 classes": lambda head: head.num_classes.__setitem__(0, 17),
    "a class less": lambda head: head.rows.pop(),
    "a part less": lambda head: setattr(head, "num_parts", 2),
    "a part more": lambda head: setattr(head, "num_parts", 4),
    "no part": lambda head: setattr(head, "num_parts", 0),
    "2**32 - 1 parts": lambda head: setattr(head, "num_parts", 2**32 - 1),
    "no set": lambda head: setattr(head, "num_sets", 0),
    "a set less": lambda head: setattr(head, "num_sets", head.num_sets - 1),
    "more sets than parts": lambda head: setattr(head, "num_sets", 4),
    "a byte behind the rows": lambda head: setattr(head, "more", b"\0"),
    "a byte behind the stream": lambda head: setattr(head, "trailing", b"\0"),
    "a million bytes behind the rows": lambda head: setattr(head, "more", bytes(10**6)),
}


@pytest.mark.parametrize("what", BAD_HEADS)
def test_a_bad_head_is_refused(what: str) -> None:
    refused(edited(BAD_HEADS[what]))


def refused(edit: Callable[[bytes], bytes]) -> None:
    specs, items = make_table()
    table, parts = pack(items)
    assert edited(lambda _: None)(table) == table
    with pytest.raises(CorruptObject):
        unpack("payload", np.frombuffer(edit(table), dtype=np.uint8), sum(map(len, parts)), specs)


def test_a_head_that_is_not_compressed_is_refused() -> None:
    refused(lambda table: table[:12] + bytes(Head(table).data()) + Head(table).rest)
    refused(lambda table: table[:12] + b"\0" + table[13:])


def test_a_table_of_another_length_or_padding_is_refused() -> None:
    spec, old, positions, new = make_case("BF16", (7, 3), 0.2, "steps")
    coded = encode(spec, old, positions, new)
    table, parts = pack([(0, coded)])
    num_bytes = sum(map(len, parts))
    for cut in range(len(table)):
        with pytest.raises(CorruptObject):
            unpack("payload", np.frombuffer(table[:cut], dtype=np.uint8), num_bytes, [spec])
    with pytest.raises(CorruptObject):
        unpack("payload", np.frombuffer(table + b"\0", dtype=np.uint8), num_bytes, [spec])
    with pytest.raises(CorruptObject):
        unpack("payload", np.frombuffer(table, dtype=np.uint8), num_bytes + 1, [spec])
    # One tile and one bit of length: seven of padding.
    padded = bytearray(setting("w", 0, 1)(table) + b"\x02")
    with pytest.raises(CorruptObject):
        unpack("payload", np.frombuffer(bytes(padded), dtype=np.uint8), num_bytes, [spec])
    padded[-1] = 0
    unpack("payload", np.frombuffer(bytes(padded), dtype=np.uint8), num_bytes, [spec])


def test_random_damage_to_a_table_never_breaks_the_reader() -> None:
    specs, items = make_table()
    table, parts = pack(items)
    rng = np.random.default_rng(3)
    for _ in range(500):
        data = np.frombuffer(table, dtype=np.uint8).copy()
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        with suppress(CorruptObject):
            unpack("payload", data[: rng.integers(len(data) - 3, len(data) + 1)], sum(map(len, parts)), specs)


def test_classes_reach_from_the_eighth_lowest_change_to_above_the_highest() -> None:
    changed = np.zeros((4, 256), dtype=np.int64)
    changed[0, 100:110] = 4  # the eighth is at 101
    changed[1, 120] = 3  # fewer than eight in all: the highest
    changed[1, 118] = 4
    changed[2, 50:90] = 100  # more than 16 classes
    changed[3, 255] = 9
    lo, num_classes = choose_classes(changed)
    assert lo.tolist() == [101, 120, 75, 255]
    assert num_classes.tolist() == [10, 2, 16, 2]


def test_bins_are_exact_and_then_powers_of_two() -> None:
    magnitudes = np.array([1, 2, 31, 32, 63, 64, 16384, 32767, 32768])
    assert bin_of(magnitudes).tolist() == [0, 1, 30, 31, 31, 32, 40, 40, 41]
    assert bin_of(np.array([32768]))[0] == BINS - 1


def test_rows_of_many_tensors_are_those_of_each() -> None:
    rng = np.random.default_rng(0)
    changes = rng.geometric(0.2, (50, 16, BINS)) * (rng.random((50, 16, 1)) < 0.7)
    changes[:, 15] = 0
    changes[:, 0, 0] += 1
    num_elements = changes.sum(axis=2) * rng.integers(1, 100, (50, 16)) + 5
    num_classes = np.full(50, 16)
    width = rng.integers(1, 3, 50)
    nums, rows, bits = choose_rows(num_elements, changes, num_classes, width)
    for number in range(50):
        one, its_rows, its_bits = choose_rows(
            num_elements[number : number + 1],
            changes[number : number + 1],
            num_classes[:1],
            int(width[number]),
        )
        assert one[0] == nums[number]
        assert np.array_equal(its_rows[0], rows[number])
        assert its_bits[0] == bits[number]
