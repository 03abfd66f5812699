"""Where conversions put elements, found from numbers."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchstore.integrations.index_maps import FOREIGN, NoMap, boxes_of, filled_in, numbered

CPU = torch.device("cpu")


def foreign(*shape: int) -> torch.Tensor:
    return torch.full(shape, FOREIGN)


@pytest.mark.parametrize(
    ("convert", "num"),
    [
        (lambda x: x, 1),
        (lambda x: x.T, 1),
        (lambda x: x[2:5, 1:3], 1),
        (lambda x: torch.cat([foreign(2, 6), x, foreign(3, 6)]), 1),
        (lambda x: torch.cat([foreign(8, 2), x], dim=1), 1),
        (lambda x: torch.cat([x[:4], x[:4]]), 2),
        (lambda x: torch.cat([x[:, 3:], x[:, :3]], dim=1), 2),
        (lambda x: x.reshape(-1), 1),
        (lambda x: x.reshape(2, 4, 2, 3).permute(0, 2, 1, 3), 4),
        (lambda x: x[::2], 1),
        (lambda x: x[:, ::3], 1),
        (lambda x: x[0, 0], 1),
        (lambda x: x.unsqueeze(0).expand(2, 8, 6), 2),
        (lambda x: torch.stack([foreign(8, 6), x, foreign(8, 6)]), 1),
        (lambda x: foreign(3, 4), 0),
        (lambda x: x[:0], 0),
    ],
)
def test_moved_elements_are_described_by_few_boxes(
    convert: Callable[[torch.Tensor], torch.Tensor], num: int
) -> None:
    converted = convert(numbered(7, (8, 6), CPU)).contiguous()
    found = boxes_of(converted, 7 + 48)
    assert torch.equal(filled_in(tuple(converted.shape), found, FOREIGN, CPU), converted)
    assert len(found) == num


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x + 50,
        lambda x: -x,
        lambda x: x.float(),
        lambda x: torch.full_like(x, -2),
        lambda x: x.repeat(200, 1)[torch.randperm(1600)][:, torch.randperm(6)],
    ],
)
def test_what_is_computed_or_scattered_has_no_map(convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    with pytest.raises(NoMap):
        boxes_of(convert(numbered(7, (8, 6), CPU)), 7 + 48)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_tensor_of_numbers_is_described_exactly(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4))
    size = int(torch.tensor(shape).prod()) if shape else 1
    numbers = data.draw(st.lists(st.integers(FOREIGN, 12), min_size=size, max_size=size))
    tensor = torch.tensor(numbers).view(shape)
    found = boxes_of(tensor, 13)
    assert torch.equal(filled_in(tuple(shape), found, FOREIGN, CPU), tensor)
