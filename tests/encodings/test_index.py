"""The two encodings of positions and new values: what each must do, and what it must refuse.

Bits are compared through integer views, never numbers.
"""

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchstore.bucket.records import Schema, TensorSpec
from patchstore.codec import ENCODINGS, IndexEncoding
from patchstore.codec import encoding as encoding_named
from patchstore.codec.index import Gap, Listed, Raw
from patchstore.codec.listing import Stated, listing
from patchstore.errors import CorruptObject, UnsupportedFormat
from patchstore.tensors import columns, elements
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, bits, index_dtype, spec_of, unsigned
from patchstore.tensors.columns import Block, in_order
from tests.support.stated import content_of, encoded, from_file, group_of, listed, with_bridges
from tests.support.stated import decoded as decoded_of
from tests.support.weights import random_bits

WHERE = "deltas/00000001-0123456789abcdef/00001-of-00001.safetensors"
NUM = 150_000
SIZES = (0, 1, 63, 65_535, 65_536, 65_537)
HUGE = 2**31


def spec_with(num_elements: int, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name="weight", dtype=dtype, shape=(num_elements,))


def changed_positions(num_elements: int) -> Iterator[torch.Tensor]:
    """Ways for a tensor to change: not, everywhere, at one end, here and there, in runs."""
    everywhere = torch.arange(num_elements)
    yield everywhere[:0]
    yield everywhere
    yield everywhere[:1]
    yield everywhere[-1:]
    yield everywhere[:: max(1, num_elements // 7)]
    chosen = torch.rand(num_elements, generator=torch.Generator().manual_seed(1)) < 0.01
    yield everywhere[chosen]
    yield everywhere[(everywhere // 100) % 2 == 1]


INDEX_ENCODINGS = {name: each for name, each in ENCODINGS.items() if isinstance(each, IndexEncoding)}


@pytest.fixture(params=INDEX_ENCODINGS.values(), ids=INDEX_ENCODINGS)
def encoding(request: pytest.FixtureRequest) -> IndexEncoding:
    return request.param  # type: ignore[no-any-return]


def patch_of(encoding: IndexEncoding, changed: torch.Tensor, spec: TensorSpec) -> TensorPatch:
    """A patch as a publisher makes one: the stated positions, with a value for each."""
    stated = with_bridges(encoding, changed)
    return TensorPatch(
        name=spec.name, indices=stated, values=random_bits(TORCH_DTYPES[spec.dtype], (len(stated),))
    )


def round_trip(encoding: IndexEncoding, changed: torch.Tensor, spec: TensorSpec) -> TensorPatch:
    """Encode and decode, and check all that holds for any change."""
    patch = patch_of(encoding, changed, spec)
    indices, values = patch.indices.clone(), bits(patch.values).clone()
    stored = encoded(encoding, patch, spec)
    assert stored.idx.dim() == stored.val.dim() == 1
    assert len(stored.idx) == len(stored.val)
    spec_of("weight.idx", stored.idx)  # a dtype that can be stored
    decoded, again = (decoded_of(encoding, stored, spec) for _ in range(2))
    assert torch.equal(decoded.indices, again.indices) and torch.equal(
        bits(decoded.values), bits(again.values)
    )
    assert torch.equal(patch.indices, indices)
    assert torch.equal(bits(patch.values), values)
    assert decoded.name == spec.name
    assert decoded.indices.dtype == index_dtype(spec.num_elements)
    assert decoded.values.dtype == TORCH_DTYPES[spec.dtype]
    assert torch.equal(decoded.indices.to(torch.int64), indices.to(torch.int64))
    assert torch.equal(bits(decoded.values), values)
    assert bool((decoded.indices[1:] > decoded.indices[:-1]).all())
    assert (
        not len(decoded.indices)
        or 0 <= int(decoded.indices[0]) <= int(decoded.indices[-1]) < spec.num_elements
    )
    assert bool(torch.isin(changed.to(torch.int64), decoded.indices.to(torch.int64)).all())
    return decoded


@pytest.mark.parametrize("num_elements", SIZES)
def test_what_was_encoded_is_decoded(encoding: IndexEncoding, num_elements: int) -> None:
    for changed in changed_positions(num_elements):
        round_trip(encoding, changed.to(torch.int32), spec_with(num_elements))


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_dtype_keeps_its_bits(encoding: IndexEncoding, dtype: str) -> None:
    for changed in changed_positions(300):
        round_trip(encoding, changed.to(torch.int32), spec_with(300, dtype))


@pytest.mark.parametrize("gap", [1, 65_534, 65_535, 65_536, 65_537, 131_071, 131_072, 131_073, 10 * 65_536])
def test_positions_may_be_any_distance_apart(encoding: IndexEncoding, gap: int) -> None:
    for first in (0, 1, gap - 1, gap):
        changed = torch.tensor([first, first + gap, first + gap + 1, first + 2 * gap + 1])
        for num_elements in (int(changed[-1]) + 1, int(changed[-1]) + 100_000):
            round_trip(encoding, changed.to(torch.int32), spec_with(num_elements))


def test_the_last_element_of_the_largest_int32_tensor_is_reached(encoding: IndexEncoding) -> None:
    round_trip(encoding, torch.tensor([HUGE - 2], dtype=torch.int32), spec_with(HUGE - 1))


@pytest.mark.parametrize("num_elements", [HUGE, HUGE + 1, HUGE + 70_000])
def test_positions_go_beyond_31_bits(encoding: IndexEncoding, num_elements: int) -> None:
    changed = torch.tensor(sorted({HUGE - 3, HUGE - 1, num_elements - 1}))
    decoded = round_trip(encoding, changed, spec_with(num_elements))
    assert decoded.indices.dtype == torch.int64


def test_a_tensor_of_any_shape_is_flat(encoding: IndexEncoding) -> None:
    for shape, changed in (((3, 5), [0, 7, 14]), ((15,), [0, 7, 14]), ((1, 15, 1), [0, 7, 14]), ((), [0])):
        spec = TensorSpec(name="weight", dtype="BF16", shape=shape)
        round_trip(encoding, torch.tensor(changed, dtype=torch.int32), spec)


def test_stated_positions_ascend_and_hold_all_that_changed(encoding: IndexEncoding) -> None:
    for changed in changed_positions(200_000):
        for dtype in (torch.int32, torch.int64):
            given = changed.to(dtype)
            stated = with_bridges(encoding, given)
            assert stated.dtype == dtype
            assert torch.equal(given, changed.to(dtype))
            assert bool((stated[1:] > stated[:-1]).all())
            assert bool(torch.isin(given, stated).all())
            assert not len(stated) or int(stated[-1]) == int(given[-1])
            # Stating twice states nothing more.
            assert torch.equal(with_bridges(encoding, stated), stated)


def test_an_encoding_is_a_frozen_value(encoding: IndexEncoding) -> None:
    assert hash(encoding) == hash(type(encoding)())
    assert encoding == type(encoding)()
    with pytest.raises((FrozenInstanceError, AttributeError)):
        encoding.name = "another"  # type: ignore[misc]


# what decode must refuse


def stored_at(encoding: IndexEncoding, spec: TensorSpec, *positions: int) -> Listed:
    return encoded(encoding, patch_of(encoding, torch.tensor(positions, dtype=torch.int32), spec), spec)


def refuse(
    encoding: IndexEncoding, spec: TensorSpec, idx: torch.Tensor, val: torch.Tensor, says: str = ""
) -> None:
    with pytest.raises(CorruptObject) as caught:
        from_file(encoding, spec, idx, val, WHERE)
    assert caught.value.kind == "corrupt-object"
    assert WHERE in str(caught.value)
    assert repr(spec.name) in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_positions_and_values_of_another_dtype_are_refused(encoding: IndexEncoding, dtype: str) -> None:
    for own in ("BF16", "U8"):
        spec = spec_with(1000, own)
        good, other = stored_at(encoding, spec, 3, 9), torch.zeros(2, dtype=TORCH_DTYPES[dtype])
        if other.dtype != good.idx.dtype:
            refuse(encoding, spec, other, good.val)
        if dtype != own:
            refuse(encoding, spec, good.idx, other)


def test_positions_and_values_of_other_lengths_or_dimensions_are_refused(encoding: IndexEncoding) -> None:
    spec = spec_with(1000)
    good = stored_at(encoding, spec, 3, 9)
    for part in (slice(-1), slice(0)):
        refuse(encoding, spec, good.idx, good.val[part])
        refuse(encoding, spec, good.idx[part], good.val)
    for shape in ((1, 2), (2, 1), (2, 1, 1)):
        refuse(encoding, spec, good.idx.reshape(shape), good.val.reshape(shape))
    refuse(encoding, spec, good.idx[0], good.val[0])


def test_positions_beyond_the_tensor_are_refused(encoding: IndexEncoding) -> None:
    wide = spec_with(100_000)
    for positions in ((999,), (1000,), (3, 1000), (99_999,)):
        good = stored_at(encoding, wide, *positions)
        for num_elements in (0, 1, positions[-1]):
            refuse(encoding, spec_with(num_elements), good.idx, good.val)


def test_whatever_is_stored_gives_positions_in_order_or_an_error(encoding: IndexEncoding) -> None:
    spec = spec_with(1000)
    generator = torch.Generator().manual_seed(7)
    dtype = stored_at(encoding, spec, 3).idx.dtype
    for num, most, _ in product((1, 2, 5, 40), (1, 3, 100, 2_000, 65_536), range(10)):
        idx = torch.randint(-most if dtype.is_signed else 0, most, (num,), generator=generator).to(dtype)
        val = random_bits(torch.bfloat16, (num,))
        try:
            decoded = decoded_of(encoding, listed(idx, val), spec)
        except CorruptObject:
            continue
        assert bool((decoded.indices[1:] > decoded.indices[:-1]).all())
        assert 0 <= int(decoded.indices[0]) <= int(decoded.indices[-1]) < 1000
        assert torch.equal(bits(decoded.values), bits(val))


# What holds for one of them.


@pytest.mark.parametrize(("num_elements", "dtype"), [(HUGE - 1, torch.int32), (HUGE, torch.int64)])
def test_positions_are_int64_from_2_to_the_31_elements_on(num_elements: int, dtype: torch.dtype) -> None:
    patch = TensorPatch(
        name="weight", indices=torch.tensor([num_elements - 1]), values=torch.zeros(1).bfloat16()
    )
    idx = encoded(Raw(), patch, spec_with(num_elements)).idx
    assert idx.dtype == dtype
    assert idx.tolist() == [num_elements - 1]


def test_positions_of_the_other_width_are_refused() -> None:
    for num_elements, dtype in ((HUGE - 1, torch.int64), (HUGE, torch.int32)):
        refuse(Raw(), spec_with(num_elements), torch.tensor([5], dtype=dtype), torch.zeros(1).bfloat16())


@pytest.mark.parametrize(
    "positions", [[1, 0], [3, 3], [0, 5, 4, 9], [-1, 3], [-(2**31), 3], [3, 10], [3, 2**31 - 1], [9, 10]]
)
def test_positions_that_no_encoder_writes_are_refused(positions: list[int]) -> None:
    val = torch.zeros(len(positions)).bfloat16()
    refuse(Raw(), spec_with(10), torch.tensor(positions, dtype=torch.int32), val)


def test_only_what_changed_is_stated() -> None:
    changed = torch.tensor([3, 65_539, 200_000], dtype=torch.int32)
    assert torch.equal(with_bridges(Raw(), changed), changed)


def bridged(changed: list[int]) -> list[int]:
    """The page's rule, one position at a time."""
    stated: list[int] = []
    at = -1
    for position in changed:
        while position - at - 1 > 65_535:
            at += 65_536
            stated.append(at)
        at = position
        stated.append(at)
    return stated


def gaps_of(changed: list[int], num_elements: int) -> list[int]:
    stated = with_bridges(Gap(), torch.tensor(changed, dtype=torch.int64))
    patch = TensorPatch(name="weight", indices=stated, values=torch.zeros(len(stated)).bfloat16())
    return encoded(Gap(), patch, spec_with(num_elements)).idx.tolist()


@pytest.mark.parametrize(
    ("changed", "gaps"),
    [
        ([], []),
        ([0], [0]),
        ([65_535], [65_535]),
        ([65_536], [65_535, 0]),
        ([131_071], [65_535, 65_535]),
        ([131_072], [65_535, 65_535, 0]),
        ([0, 65_536], [0, 65_535]),
        ([0, 65_537], [0, 65_535, 0]),
        ([7, 8, 9], [7, 0, 0]),
        # The page's example.
        ([3, 65_539, 199_999], [3, 65_535, 65_535, 65_535, 3_387]),
    ],
)
def test_a_gap_of_65535_fits_and_a_larger_one_is_bridged(changed: list[int], gaps: list[int]) -> None:
    assert gaps_of(changed, 200_000) == gaps


@pytest.mark.parametrize("last", [HUGE - 2, HUGE - 1, HUGE, 2 * HUGE + 5])
def test_one_change_at_the_end_of_a_huge_tensor_costs_a_bridge_every_65536_elements(last: int) -> None:
    stated = with_bridges(Gap(), torch.tensor([last]))
    assert stated.tolist() == bridged([last])
    assert len(stated) == last // 65_536 + 1


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 500_000), max_size=12), st.sampled_from([torch.int32, torch.int64]))
def test_bridges_are_those_of_the_page(changed: set[int], dtype: torch.dtype) -> None:
    stated = with_bridges(Gap(), torch.tensor(sorted(changed), dtype=dtype))
    assert stated.tolist() == bridged(sorted(changed))


@pytest.mark.parametrize(
    ("gaps", "num_elements"), [([10], 10), ([0, 9], 10), ([65_535] * 5, 5 * 65_536 - 1), ([0], 0)]
)
def test_gaps_that_leave_the_tensor_are_refused(gaps: list[int], num_elements: int) -> None:
    idx = torch.tensor(gaps, dtype=torch.uint16)
    val = torch.zeros(len(gaps)).bfloat16()
    refuse(Gap(), spec_with(num_elements), idx, val)
    assert decoded_of(Gap(), listed(idx, val), spec_with(num_elements + 1)).indices[-1] == num_elements


@pytest.mark.parametrize(
    ("name", "dtype"), [("raw", torch.int32), ("gap", torch.uint16), ("gap", torch.int32)]
)
def test_more_positions_than_elements_are_refused(name: str, dtype: torch.dtype) -> None:
    idx, val = torch.zeros(65, dtype=dtype), torch.zeros(65).bfloat16()
    says = "states 65 elements of 'weight', which has 64"
    refuse(INDEX_ENCODINGS[name], spec_with(64), idx, val, says)


@pytest.mark.parametrize("num_between", [0, 3])
def test_tensors_are_picked_from_what_is_listed(encoding: IndexEncoding, num_between: int) -> None:
    """Neighbours, and tensors with others between them."""
    specs = tuple(TensorSpec(name=f"t{at:02}", dtype="BF16", shape=(70_000,)) for at in range(20))
    schema = Schema(tensors=specs)
    patches = []
    for number, spec in enumerate(specs):
        at = torch.randperm(70_000, generator=torch.Generator().manual_seed(number))[: 1 + 7 * number].sort()
        stated = with_bridges(encoding, at.values)
        values = random_bits(torch.bfloat16, stated.shape)
        patches.append(TensorPatch(name=spec.name, indices=stated, values=values))
    groups = [group_of(patch, number) for number, patch in enumerate(patches)]
    (stored,) = content_of(encoding, schema, patches).listed
    chosen = np.arange(4, 19, 1 + num_between)
    decoded = encoding.decode(stored.of(chosen), schema)
    expected = in_order([groups[number] for number in chosen])
    assert all(np.array_equal(one, other) for one, other in zip(decoded, expected, strict=True))
    assert not len(stored.of(np.array([], dtype=np.int64)).numbers)


def test_patches_that_are_encoded_together_have_the_gaps_of_each_alone(encoding: IndexEncoding) -> None:
    random = torch.Generator().manual_seed(3)
    specs = [TensorSpec(name=str(number), dtype="BF16", shape=(60_000,)) for number in range(5)]
    patches = []
    for spec, num in zip(specs, [5, 1, 9000, 4096, 17], strict=True):
        changed = torch.randperm(60_000, generator=random)[:num].sort().values.to(torch.int32)
        values = torch.randn(num, generator=random).bfloat16()
        patches.append(TensorPatch(name=spec.name, indices=changed, values=values))
    # In any order, and some together.
    groups = [group_of(patches[number], number) for number in (3, 0, 4)]
    groups.append(in_order([group_of(patches[number], number) for number in (2, 1)]))

    found = listing(Schema(tensors=tuple(specs)), [Stated(group) for group in groups], encoding)

    alone = [encoded(encoding, patch, spec) for patch, spec in zip(patches, specs, strict=True)]
    for column in found.columns:
        assert column.numbers.tolist() == [0, 1, 2, 3, 4]
        its = [each.val if column.suffix == ".val" else each.idx for each in alone]
        parts = torch.split(column.data, column.counts.tolist())
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(parts, its, strict=True))
    assert listing(Schema(tensors=tuple(specs)), [], encoding).num_bytes == 0


@pytest.mark.parametrize("name", INDEX_ENCODINGS)
@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from([*TORCH_DTYPES]),
    touched=st.sets(
        st.integers(0, NUM - 1) | st.sampled_from([0, 65_535, 65_536, 131_071, 131_072, NUM - 1]), max_size=8
    ),
    seed=st.integers(0, 2**32),
)
def test_a_patch_turns_the_old_tensor_into_the_new_one(
    name: str, dtype: str, touched: set[int], seed: int
) -> None:
    """What is stated is what changed and bridges; a bridge carries the value it was given."""
    old = random_bits(TORCH_DTYPES[dtype], (1000,), seed).repeat(NUM // 1000)
    new = old.clone()
    at = torch.tensor(sorted(touched), dtype=torch.int64)
    bits(new)[at] = bits(random_bits(TORCH_DTYPES[dtype], (len(at),), seed + 1))
    encoding, spec = INDEX_ENCODINGS[name], TensorSpec(name="w", dtype=dtype, shape=(NUM,))
    changed = torch.from_numpy(columns.changed([new], old, np.array([NUM]), np.array([0])).positions)
    stated = with_bridges(encoding, changed)
    patch = TensorPatch(name="w", indices=stated, values=bits(new)[stated].view(new.dtype))
    decoded = decoded_of(encoding, encoded(encoding, patch, spec), spec)
    assert set(changed.tolist()) <= set(decoded.indices.tolist()) <= set(stated.tolist())
    applied = old.clone()
    for _ in range(2):
        bits(applied)[decoded.indices] = bits(decoded.values)
        assert torch.equal(bits(applied), bits(new))


def test_an_encoding_is_registered_under_its_own_name() -> None:
    assert {name: encoding.name for name, encoding in ENCODINGS.items()} == {name: name for name in ENCODINGS}
    assert all(encoding_named(name) is encoding for name, encoding in ENCODINGS.items())


def test_an_unknown_encoding_names_the_known_ones() -> None:
    with pytest.raises(UnsupportedFormat) as caught:
        encoding_named("context-2")
    assert caught.value.kind == "unsupported-format"
    assert all(name in str(caught.value) for name in ENCODINGS)


@pytest.mark.parametrize("num", [0, 7, 2000, 20_000, 300_000, 700_001])
@pytest.mark.parametrize("dtype", ["F8_E5M2", "BF16", "F32", "I64"])
def test_few_and_many_differences_are_found_in_pieces_that_begin_anywhere(dtype: str, num: int) -> None:
    old = bits(random_bits(TORCH_DTYPES[dtype], (700_001,), 1))
    at = torch.randperm(len(old), generator=torch.Generator().manual_seed(num))[:num].sort().values
    new = old.clone()
    new[at] ^= 1

    found = elements.differing([new[:300_001], new[300_001:300_001], new[300_001:]], old)

    expected = at.numpy(), unsigned(new[at]), unsigned(old[at])
    assert all(np.array_equal(each, other) for each, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", ["BOOL", "F8_E5M2", "BF16", "F32", "I64"])
def test_tensors_compared_together_differ_where_each_does(dtype: str) -> None:
    olds, news = [], []
    for number, size in enumerate((0, 1, 7, 1000, 70_000, 1, 3_000_000, 12)):
        old = random_bits(TORCH_DTYPES[dtype], (min(size, 1000),), number).repeat(max(1, size // 1000))
        new = old.clone()
        at = torch.randperm(max(1, len(old)))[: number % 4 and len(old) // 3]
        bits(new)[at] = bits(random_bits(TORCH_DTYPES[dtype], (len(at),), number + 1))
        olds.append(old)
        news.append(new)
    block = Block.of(range(len(olds)), olds)

    found = block.changed(news, block.numbers)

    ends = np.concatenate([[0], found.counts.cumsum()])
    said = {
        number: torch.from_numpy(found.positions[start:end].astype(np.int64))
        for number, start, end in zip(found.numbers.tolist(), ends, ends[1:], strict=False)
    }
    for number, (old, new) in enumerate(zip(olds, news, strict=True)):
        expected = (bits(old) != bits(new)).nonzero().view(-1)
        assert (number in said) == bool(len(expected))
        assert torch.equal(said.get(number, expected), expected)
    for number, new in enumerate(news):
        mine = found.numbers == number
        values = found.values[np.repeat(mine, found.counts)]
        assert np.array_equal(values, unsigned(new)[said[number].numpy()] if mine.any() else values[:0])
    block.write(found)
    assert all(torch.equal(bits(block.held(np.array([n]))), bits(new)) for n, new in enumerate(news))
