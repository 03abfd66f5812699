import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchstore.encodings import EncodedTensor
from patchstore.encodings.gap import Gap
from patchstore.errors import CorruptObject
from patchstore.tensors import elements
from patchstore.tensors.bits import TensorPatch
from patchstore.testing.encoding import HUGE, EncodingConformance, spec_with


class TestGap(EncodingConformance):
    encoding = Gap()


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
    stated = Gap().with_bridges(torch.tensor(changed, dtype=torch.int64))
    patch = TensorPatch(name="weight", indices=stated, values=torch.zeros(len(stated)).bfloat16())
    return Gap().encode(patch, spec_with(num_elements)).idx.tolist()


def test_the_example_of_the_page_holds() -> None:
    assert gaps_of([3, 65_539, 200_000], 200_001) == [3, 65_535, 65_535, 65_535, 3_388]


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
    ],
)
def test_a_gap_of_65535_fits_and_a_larger_one_is_bridged(changed: list[int], gaps: list[int]) -> None:
    assert gaps_of(changed, 200_000) == gaps


@pytest.mark.parametrize("last", [HUGE - 2, HUGE - 1, HUGE, 2 * HUGE + 5])
def test_one_change_at_the_end_of_a_huge_tensor_costs_a_bridge_every_65536_elements(last: int) -> None:
    stated = Gap().with_bridges(torch.tensor([last]))
    assert stated.tolist() == bridged([last])
    assert len(stated) == last // 65_536 + 1


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 500_000), max_size=12), st.sampled_from([torch.int32, torch.int64]))
def test_bridges_are_those_of_the_page(changed: set[int], dtype: torch.dtype) -> None:
    stated = Gap().with_bridges(torch.tensor(sorted(changed), dtype=dtype))
    assert stated.tolist() == bridged(sorted(changed))
    assert elements.from_gaps(elements.to_gaps(stated)).tolist() == stated.tolist()


@pytest.mark.parametrize(
    ("gaps", "num_elements"), [([10], 10), ([0, 9], 10), ([65_535] * 5, 5 * 65_536 - 1), ([0], 0)]
)
def test_gaps_that_leave_the_tensor_are_refused(gaps: list[int], num_elements: int) -> None:
    idx = torch.tensor(gaps, dtype=torch.uint16)
    stored = EncodedTensor(idx=idx, val=torch.zeros(len(gaps)).bfloat16())
    with pytest.raises(CorruptObject):
        Gap().decode(stored, spec_with(num_elements), "here")
    assert Gap().decode(stored, spec_with(num_elements + 1), "here").indices[-1] == num_elements


def test_patches_that_are_encoded_together_have_the_gaps_of_each_alone() -> None:
    random = torch.Generator().manual_seed(3)
    patches = []
    for number, num in enumerate([5, 0, 1, 9000, 4096, 0, 17, 0]):
        dtype = (torch.int32, torch.int64)[number % 2]
        changed = torch.randperm(60_000, generator=random)[:num].sort().values.to(dtype)
        values = torch.randn(num, generator=random).bfloat16()
        patches.append((TensorPatch(name=str(number), indices=changed, values=values), spec_with(60_000)))

    found = Gap().encode_all(patches)

    for each, (patch, spec) in zip(found, patches, strict=True):
        alone = Gap().encode(patch, spec)
        assert each.idx.dtype == torch.uint16
        assert (each.idx.tolist(), each.val.tolist()) == (alone.idx.tolist(), alone.val.tolist())
    assert Gap().encode_all([]) == []
