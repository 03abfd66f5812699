from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from patchstore.bucket.records import Schema, TensorSpec
from patchstore.codec.context import Cuts, RowSets, decode_all, encode_all, pack, tiling, unpack
from patchstore.codec.context.bits import field_dtype, fields_of, joined_fields
from patchstore.codec.context.classes import WIDTHS
from patchstore.codec.context.rows import BINS, DENSE, bin_of, choose_classes, choose_rows
from patchstore.errors import CorruptObject
from tests.format import independent_context
from tests.support.coded import CodedPart, coded_of, decode, encode, parts_of

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


def plainly(spec: TensorSpec, coded: CodedPart, old: Array) -> dict[int, int]:
    """The changes as the independent reader finds them: the new bits by position."""
    table = pack(coded_of([coded]))
    found = independent_context.changes(
        table, coded.data.tobytes(), {spec.name: (spec.dtype, spec.shape)}, {spec.name: old.tobytes()}
    )
    return {position: int.from_bytes(new, "little") for _, position, new in found}


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
    at, bits = decode(spec, coded, old)
    assert np.array_equal(at, positions)
    assert bits.dtype == new.dtype
    assert np.array_equal(bits, new)
    assert (coded.lengths > 0).sum() == sum(
        bool(set(tile) & set(positions.tolist())) for tile in cells(spec.shape)
    )
    if prod(shape) < 5000 or density < 0.1:
        plain = plainly(spec, coded, old)
        assert sorted(plain) == positions.tolist()
        assert [plain[position] for position in positions.tolist()] == new.tolist()


def cells(shape: tuple[int, ...]) -> list[list[int]]:
    """The flat positions of each tile's elements, as the independent reader cuts them."""
    _, rows, cols = independent_context.view(shape)
    return [
        [(level * rows + row) * cols + col for level, row, col in product(*tile)]
        for tile in independent_context.tiles(shape, *independent_context.whole(shape))
    ]


@pytest.mark.parametrize("shape", [*SHAPES, (2, 32, 3), (16, 131072), (70000, 16), (3, 65537)], ids=str)
def test_tiles_are_those_of_the_description(shape: tuple[int, ...]) -> None:
    cut, plain = tiling(shape), cells(shape)
    assert cut.num_tiles == len(plain)
    assert cut.sizes(np.arange(cut.num_tiles)).tolist() == [len(tile) for tile in plain]
    assert cut.sizes(np.arange(cut.num_tiles)).max() <= 65536
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
    assert (num_rows * num_cols == cut.sizes(np.arange(cut.num_tiles))).all()


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
        tiles = np.array([number for number, tile in enumerate(cells(spec.shape)) if flat[tile].any()])
        assert (
            sum(len(tile) for number, tile in enumerate(cells(spec.shape)) if number in tiles) == flat.sum()
        )
        garbage = np.random.default_rng(part).integers(0, 65536, len(old)).astype(old.dtype)
        at, bits = decode(spec, coded, np.where(flat, old, garbage), tiles)
        inside = flat[positions]
        assert np.array_equal(at, positions[inside])
        assert np.array_equal(bits, new[inside])


def test_a_large_tensor_in_several_groups_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, old, positions, new = make_case("BF16", (256, 512), 0.02, "steps")
    positions, new = positions[positions < 60000], new[positions < 60000]
    whole = encode(spec, old, positions, new)
    monkeypatch.setattr("patchstore.codec.context.encoder.WRITTEN_TOGETHER", 16384)
    monkeypatch.setattr("patchstore.codec.context.decoder.READ_TOGETHER", 8192)
    monkeypatch.setattr("patchstore.codec.context.bits.COPIED", 10)
    parts = encode(spec, old, positions, new)
    assert whole.data.tobytes() == parts.data.tobytes()
    assert np.array_equal(whole.lengths, parts.lengths)
    at, bits = decode(spec, parts, old)
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


def encode_together(cases: list[Case]) -> list[CodedPart]:
    specs, *arrays = together(cases)
    cuts = Cuts.of(tiling(spec.shape) for spec in specs)
    return parts_of(encode_all(specs[0].dtype, np.arange(len(specs)), cuts, *arrays, RowSets()))


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
    monkeypatch.setattr("patchstore.codec.context.rows.SHARING", 0)
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
    found = decode_all(specs, coded_of(coded), olds)
    for got, expected in zip(found, (counts, positions, news), strict=True):
        assert got.dtype == expected.dtype and np.array_equal(got, expected)
    some = [
        None if number % 3 == 0 else np.flatnonzero(rng.random(len(each.lengths)) < 0.5)
        for number, each in enumerate(coded)
    ]
    counts, positions, news = decode_all(specs, coded_of(coded), olds, some)
    for case, each, tiles, num, end in zip(cases, coded, some, counts, counts.cumsum(), strict=True):
        at, bits = decode(case[0], each, case[1], tiles)
        assert np.array_equal(at, positions[end - num : end])
        assert np.array_equal(bits, news[end - num : end])


DAMAGE: dict[str, Callable[[CodedPart], CodedPart]] = {
    "long stream": lambda coded: replace(coded, lengths=coded.lengths + 100_000),
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
    coded[3] = replace(DAMAGE[damage](coded[3]), key="key3")
    with pytest.raises(CorruptObject, match=r"key3: .*'w3'"):
        decode_all(specs, coded_of(coded), olds)


def test_a_change_by_nothing_among_good_ones_is_refused_by_its_name() -> None:
    good = make_case("F8_E4M3", (1,), 1, "any")
    coded = encode(*good)
    row = np.array([[0x80, 0, 8]], dtype=np.uint8)
    bad = replace(coded, lo=0, rows=row, lengths=np.array([2]), data=np.array([0b01, 0b00], dtype=np.uint8))
    specs = [replace(good[0], name=f"w{number}") for number in range(3)]
    parts = [replace(part, number=at, key=f"key{at}") for at, part in enumerate([coded, bad, coded])]
    with pytest.raises(CorruptObject, match=r"key1: .*'w1' changes an element by nothing"):
        decode_all(specs, coded_of(parts), np.repeat(good[1], 3))


def make_table() -> tuple[list[TensorSpec], list[CodedPart]]:
    cases = [
        make_case("BF16", (96, 64), 0.03, "steps"),
        make_case("F8_E5M2", (33, 50), 0.3, "any"),
        make_case("F16", (1024,), 0.01, "steps"),
    ]
    other = TensorSpec(name="x", dtype="F32", shape=(4,))
    empty = TensorSpec(name="y", dtype="BF16", shape=(0, 4))
    specs = [cases[0][0], other, cases[1][0], empty, cases[2][0]]
    return specs, [encode(*case, 2 * number) for number, case in enumerate(cases)]


@pytest.mark.parametrize("width", range(1, 33))
def test_fields_of_any_width_are_joined_from_the_lowest_bit_on(width: int) -> None:
    random = np.random.default_rng(width)
    fields = random.integers(0, 1 << width, 80).astype(field_dtype(width))
    fields[:2] = (1 << width) - 1, 0
    number = sum(field << (width * nth) for nth, field in enumerate(fields.tolist()))
    joined = joined_fields(fields, width)
    assert joined.tobytes() == number.to_bytes(10 * width, "little")
    assert np.array_equal(fields_of(joined, width), fields)
    assert not len(joined_fields(fields[:0], width)) and not len(fields_of(joined[:0], width))


def test_a_table_comes_back() -> None:
    specs, parts = make_table()
    coded = coded_of(parts)
    back = unpack(
        "payload", np.frombuffer(pack(coded), dtype=np.uint8), coded.data, Schema(tensors=tuple(specs))
    )
    assert back.numbers.tolist() == [0, 2, 4]
    for coded, again in zip(parts, parts_of(back), strict=True):
        assert again.lo == coded.lo
        assert np.array_equal(again.rows, coded.rows)
        assert np.array_equal(again.lengths, coded.lengths)
        assert np.array_equal(again.data, coded.data)


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
