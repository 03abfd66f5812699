import pytest
import torch

from patchstore.encodings import EncodedTensor
from patchstore.encodings.raw import Raw
from patchstore.errors import CorruptObject
from patchstore.tensors.bits import TensorPatch
from patchstore.testing.encoding import HUGE, EncodingConformance, spec_with


class TestRaw(EncodingConformance):
    encoding = Raw()


@pytest.mark.parametrize(("num_elements", "dtype"), [(HUGE - 1, torch.int32), (HUGE, torch.int64)])
def test_positions_are_int64_from_2_to_the_31_elements_on(num_elements: int, dtype: torch.dtype) -> None:
    patch = TensorPatch(
        name="weight", indices=torch.tensor([num_elements - 1]), values=torch.zeros(1).bfloat16()
    )
    idx = Raw().encode(patch, spec_with(num_elements)).idx
    assert idx.dtype == dtype
    assert idx.tolist() == [num_elements - 1]


def test_positions_of_the_other_width_are_refused() -> None:
    for num_elements, dtype in ((HUGE - 1, torch.int64), (HUGE, torch.int32)):
        stored = EncodedTensor(idx=torch.tensor([5], dtype=dtype), val=torch.zeros(1).bfloat16())
        with pytest.raises(CorruptObject):
            Raw().decode(stored, spec_with(num_elements), "here")


@pytest.mark.parametrize(
    "positions", [[1, 0], [3, 3], [0, 5, 4, 9], [-1, 3], [-(2**31), 3], [3, 10], [3, 2**31 - 1], [9, 10]]
)
def test_positions_that_no_encoder_writes_are_refused(positions: list[int]) -> None:
    val = torch.zeros(len(positions)).bfloat16()
    stored = EncodedTensor(idx=torch.tensor(positions, dtype=torch.int32), val=val)
    with pytest.raises(CorruptObject):
        Raw().decode(stored, spec_with(10), "here")


def test_only_what_changed_is_stated() -> None:
    changed = torch.tensor([3, 65_539, 200_000], dtype=torch.int32)
    assert torch.equal(Raw().with_bridges(changed), changed)
