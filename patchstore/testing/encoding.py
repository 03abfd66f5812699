"""What every encoding must do, as a class of tests: subclass it, and name the encoding.

    class TestMine(EncodingConformance):
        encoding = Mine()

Bits are compared through integer views, never numbers.
"""

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from itertools import product
from typing import ClassVar

import pytest
import torch

from patchstore.encodings.base import EncodedTensor, IndexEncoding
from patchstore.errors import CorruptObject
from patchstore.format.records import DTYPE_BYTES, TensorSpec
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, bits, index_dtype, spec_of

WHERE = "deltas/00000001-0123456789abcdef/00001-of-00001.safetensors"
SIZES = (0, 1, 63, 65_535, 65_536, 65_537)
HUGE = 2**31


def spec_with(num_elements: int, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name="weight", dtype=dtype, shape=(num_elements,))


def random_values(num: int, dtype: str, seed: int = 0) -> torch.Tensor:
    """Any bit pattern, NaNs with payloads among them; 0 and 1 for bool."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == "BOOL":
        return torch.randint(0, 2, (num,), generator=generator).bool()
    data = torch.randint(0, 256, (num * DTYPE_BYTES[dtype],), generator=generator, dtype=torch.uint8)
    return data.view(TORCH_DTYPES[dtype])


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


class EncodingConformance:
    """Tests of the contract in `encodings/base.py`."""

    encoding: ClassVar[IndexEncoding]

    def patch(self, changed: torch.Tensor, spec: TensorSpec) -> TensorPatch:
        """A patch as a publisher makes one: the stated positions, with a value for each."""
        stated = self.encoding.with_bridges(changed)
        return TensorPatch(name=spec.name, indices=stated, values=random_values(len(stated), spec.dtype))

    def round_trip(self, changed: torch.Tensor, spec: TensorSpec) -> TensorPatch:
        """Encode and decode, and check all that holds for any change."""
        patch = self.patch(changed, spec)
        indices, values = patch.indices.clone(), bits(patch.values).clone()
        encoded = self.encoding.encode(patch, spec)
        assert encoded.idx.dim() == encoded.val.dim() == 1
        assert len(encoded.idx) == len(encoded.val)
        spec_of("weight.idx", encoded.idx)  # a dtype that can be stored
        decoded = self.encoding.decode(encoded, spec, WHERE)
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
    def test_what_was_encoded_is_decoded(self, num_elements: int) -> None:
        for changed in changed_positions(num_elements):
            self.round_trip(changed.to(torch.int32), spec_with(num_elements))

    @pytest.mark.parametrize("dtype", TORCH_DTYPES)
    def test_every_dtype_keeps_its_bits(self, dtype: str) -> None:
        for changed in changed_positions(300):
            self.round_trip(changed.to(torch.int32), spec_with(300, dtype))

    @pytest.mark.parametrize(
        "gap", [1, 65_534, 65_535, 65_536, 65_537, 131_071, 131_072, 131_073, 10 * 65_536]
    )
    def test_positions_may_be_any_distance_apart(self, gap: int) -> None:
        for first in (0, 1, gap - 1, gap):
            changed = torch.tensor([first, first + gap, first + gap + 1, first + 2 * gap + 1])
            for num_elements in (int(changed[-1]) + 1, int(changed[-1]) + 100_000):
                self.round_trip(changed.to(torch.int32), spec_with(num_elements))

    def test_the_last_element_of_the_largest_int32_tensor_is_reached(self) -> None:
        self.round_trip(torch.tensor([HUGE - 2], dtype=torch.int32), spec_with(HUGE - 1))

    @pytest.mark.parametrize("num_elements", [HUGE, HUGE + 1, HUGE + 70_000])
    def test_positions_go_beyond_31_bits(self, num_elements: int) -> None:
        changed = torch.tensor(sorted({HUGE - 3, HUGE - 1, num_elements - 1}))
        decoded = self.round_trip(changed, spec_with(num_elements))
        assert decoded.indices.dtype == torch.int64

    def test_a_tensor_of_any_shape_is_flat(self) -> None:
        for shape in ((3, 5), (15,), (1, 15, 1)):
            spec = TensorSpec(name="weight", dtype="BF16", shape=shape)
            self.round_trip(torch.tensor([0, 7, 14], dtype=torch.int32), spec)

    def test_a_scalar_has_one_element(self) -> None:
        self.round_trip(
            torch.tensor([0], dtype=torch.int32), TensorSpec(name="weight", dtype="F32", shape=())
        )

    def test_stated_positions_ascend_and_hold_all_that_changed(self) -> None:
        for changed in changed_positions(200_000):
            for dtype in (torch.int32, torch.int64):
                given = changed.to(dtype)
                stated = self.encoding.with_bridges(given)
                assert stated.dtype == dtype
                assert torch.equal(given, changed.to(dtype))
                assert bool((stated[1:] > stated[:-1]).all())
                assert bool(torch.isin(given, stated).all())
                assert not len(stated) or int(stated[-1]) == int(given[-1])

    def test_stating_twice_states_nothing_more(self) -> None:
        for changed in changed_positions(200_000):
            stated = self.encoding.with_bridges(changed)
            assert torch.equal(self.encoding.with_bridges(stated), stated)

    def test_what_was_encoded_may_be_decoded_twice(self) -> None:
        spec = spec_with(1000)
        encoded = self.encoding.encode(self.patch(torch.tensor([3, 9, 999], dtype=torch.int32), spec), spec)
        first, second = (self.encoding.decode(encoded, spec, WHERE) for _ in range(2))
        assert torch.equal(first.indices, second.indices)
        assert torch.equal(bits(first.values), bits(second.values))

    def test_an_encoding_is_a_frozen_value(self) -> None:
        assert hash(self.encoding) == hash(type(self.encoding)())
        assert self.encoding == type(self.encoding)()
        with pytest.raises((FrozenInstanceError, AttributeError)):
            self.encoding.name = "another"  # type: ignore[misc]

    # what decode must refuse

    def encoded(self, spec: TensorSpec, *positions: int) -> EncodedTensor:
        return self.encoding.encode(self.patch(torch.tensor(positions, dtype=torch.int32), spec), spec)

    def refuse(self, encoded: EncodedTensor, spec: TensorSpec) -> None:
        with pytest.raises(CorruptObject) as caught:
            self.encoding.decode(encoded, spec, WHERE)
        assert caught.value.kind == "corrupt-object"
        assert WHERE in str(caught.value)
        assert repr(spec.name) in str(caught.value)

    @pytest.mark.parametrize("dtype", TORCH_DTYPES)
    def test_positions_of_another_dtype_are_refused(self, dtype: str) -> None:
        spec = spec_with(1000)
        good = self.encoded(spec, 3, 9)
        if TORCH_DTYPES[dtype] != good.idx.dtype:
            idx = torch.zeros(len(good.idx), dtype=TORCH_DTYPES[dtype])
            self.refuse(EncodedTensor(idx=idx, val=good.val), spec)

    @pytest.mark.parametrize("dtype", TORCH_DTYPES)
    def test_values_of_another_dtype_are_refused(self, dtype: str) -> None:
        for own in ("BF16", "U8"):
            spec = spec_with(1000, own)
            good = self.encoded(spec, 3, 9)
            if dtype != own:
                val = torch.zeros(len(good.val), dtype=TORCH_DTYPES[dtype])
                self.refuse(EncodedTensor(idx=good.idx, val=val), spec)

    def test_positions_and_values_of_different_lengths_are_refused(self) -> None:
        spec = spec_with(1000)
        good = self.encoded(spec, 3, 9)
        self.refuse(EncodedTensor(idx=good.idx, val=good.val[:-1]), spec)
        self.refuse(EncodedTensor(idx=good.idx, val=good.val[:0]), spec)
        self.refuse(EncodedTensor(idx=good.idx[:-1], val=good.val), spec)
        self.refuse(EncodedTensor(idx=good.idx[:0], val=good.val), spec)

    def test_other_than_one_dimension_is_refused(self) -> None:
        spec = spec_with(1000)
        good = self.encoded(spec, 3, 9)
        for shape in ((1, 2), (2, 1), (2, 1, 1)):
            self.refuse(EncodedTensor(idx=good.idx.reshape(shape), val=good.val.reshape(shape)), spec)
        self.refuse(EncodedTensor(idx=good.idx[0], val=good.val[0]), spec)

    def test_positions_beyond_the_tensor_are_refused(self) -> None:
        wide = spec_with(100_000)
        for positions in ((999,), (1000,), (3, 1000), (99_999,)):
            good = self.encoded(wide, *positions)
            for num_elements in (0, 1, positions[-1]):
                self.refuse(good, spec_with(num_elements))

    def test_whatever_is_stored_gives_positions_in_order_or_an_error(self) -> None:
        spec = spec_with(1000)
        generator = torch.Generator().manual_seed(7)
        dtype = self.encoded(spec, 3).idx.dtype
        for num, most, _ in product((0, 1, 2, 5, 40), (1, 3, 100, 2_000, 65_536), range(10)):
            idx = torch.randint(-most if dtype.is_signed else 0, most, (num,), generator=generator).to(dtype)
            val = random_values(num, "BF16")
            try:
                decoded = self.encoding.decode(EncodedTensor(idx=idx, val=val), spec, WHERE)
            except CorruptObject:
                continue
            assert bool((decoded.indices[1:] > decoded.indices[:-1]).all())
            assert not num or 0 <= int(decoded.indices[0]) <= int(decoded.indices[-1]) < 1000
            assert torch.equal(bits(decoded.values), bits(val))
