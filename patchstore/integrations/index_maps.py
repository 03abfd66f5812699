"""Where a conversion puts each element, found by converting tensors of indices.

The conversion runs as it is, on tensors whose elements say which element they are. What it returns says where
each element went. Elements that lie in straight lines are joined to boxes, so a map is small.
"""

from collections.abc import Iterator
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch

from patchstore.publish.sources.pieces import boxes

FOREIGN = -1
"""Stands for an element that another process has."""
_MOST_LINES = 4096
"""Boxes of one tensor, beyond which its map is not worth keeping."""


class NoMap(Exception):
    """What a conversion returned is computed, or too scattered to be described by boxes."""


class Box(NamedTuple):
    """Elements of a converted tensor that are elements of one given tensor."""

    start: tuple[int, ...]
    """The first index of each dimension in the converted tensor."""
    size: tuple[int, ...]
    first: int
    """The index that the first element has in the given tensors' numbering."""
    strides: tuple[int, ...]
    """By how much that grows along each dimension."""

    def last(self) -> int:
        """Return the number of the element with the highest index of each dimension."""
        return self.first + sum((n - 1) * s for n, s in zip(self.size, self.strides, strict=True))


def numbered(first: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return a tensor whose elements are numbered from `first` on, int64."""
    return torch.arange(first, first + prod(shape), dtype=torch.int64, device=device).view(shape)


def scrambled(numbers: torch.Tensor) -> torch.Tensor:
    """Return other numbers in place of these, at least 0, in no simple relation to them."""
    mixed = (numbers ^ (numbers >> 21)) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 32)) * -4658895280553007687
    return (mixed ^ (mixed >> 29)) & (2**62 - 1)


def boxes_of(tensor: torch.Tensor, highest: int) -> list[Box]:
    """Return where a converted tensor, of numbers below `highest` and of FOREIGN, has which elements of this
    process.
    """
    if tensor.dtype != torch.int64:
        raise NoMap(f"the numbers were cast to {tensor.dtype}")
    if not tensor.numel():
        return []
    if int(tensor.min()) < FOREIGN or int(tensor.max()) >= highest:
        raise NoMap("its elements are computed, and not only moved")
    shape = tuple(tensor.shape)
    rows = tensor.reshape(-1, shape[-1] if shape else 1)
    found: list[Box] = []
    for first, last in _bands(rows):
        for top, bottom, number, step in _runs(rows[:, first]):
            stride = int(rows[top, first + 1]) - number if last - first > 1 else 0
            found += _in_dimensions(shape, (top, bottom), (first, last), number, (step, stride))
        if len(found) > _MOST_LINES:
            raise NoMap("its elements are too scattered")
    return found


def filled_in(shape: tuple[int, ...], found: list[Box], rest: int, device: torch.device) -> torch.Tensor:
    """Return the tensor of numbers that these boxes describe, with `rest` elsewhere."""
    tensor = torch.full(shape, rest, dtype=torch.int64, device=device)
    for box in found:
        numbers = torch.full((), box.first, dtype=torch.int64, device=device)
        for size, stride in zip(box.size, box.strides, strict=True):
            numbers = numbers.unsqueeze(-1) + torch.arange(size, device=device) * stride
        tensor[tuple(slice(at, at + size) for at, size in zip(box.start, box.size, strict=True))] = numbers
    return tensor


def _bands(rows: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of columns in which each row has all its elements in a line, or none."""
    num = rows.shape[1]
    if num == 1:
        yield 0, 1
        return
    own = rows >= 0
    steps = rows[:, 1:] - rows[:, :-1]
    both = own[:, 1:] & own[:, :-1]
    if not bool(both.any()):
        # Elements are alone in their rows.
        cuts = torch.ones(num - 1, dtype=torch.bool, device=rows.device)
    else:
        usual = steps[both].median()
        cuts = ((own[:, 1:] != own[:, :-1]) | (both & (steps != usual))).any(0)
    bounds = [0, *((cuts.nonzero()[:, 0] + 1).tolist()), num]
    if len(bounds) > _MOST_LINES:
        raise NoMap("its elements are too scattered")
    yield from pairwise(bounds)


def _runs(column: torch.Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Yield the runs of a column in which numbers grow by the same step: first row, end, number, step."""
    own = column >= 0
    places = own.nonzero()[:, 0]
    if not len(places):
        return
    numbers = column[places]
    apart, steps = places.diff(), numbers.diff()
    usual = steps[apart == 1].median() if bool((apart == 1).any()) else 0
    ends = ((apart != 1) | (steps != usual)).nonzero()[:, 0] + 1
    if len(ends) > _MOST_LINES:
        raise NoMap("its elements are too scattered")
    for first, last in pairwise([0, *ends.tolist(), len(places)]):
        top = int(places[first])
        yield top, top + last - first, int(numbers[first]), int(usual) if last - first > 1 else 0


def _in_dimensions(
    shape: tuple[int, ...],
    rows: tuple[int, int],
    columns: tuple[int, int],
    number: int,
    steps: tuple[int, int],
) -> Iterator[Box]:
    """Yield boxes of a tensor's own dimensions for a range of its rows and columns, flattened to a matrix."""
    if not shape:
        yield Box((), (), number, ())
        return
    above = shape[:-1]
    per_dim = tuple(steps[0] * prod(above[dim + 1 :]) for dim in range(len(above)))
    if not above:
        yield Box((columns[0],), (columns[1] - columns[0],), number, (steps[1],))
        return
    taken = 0
    for start, size in boxes(above, rows[0], rows[1] - rows[0]):
        yield Box(
            (*start, columns[0]),
            (*size, columns[1] - columns[0]),
            number + taken * steps[0],
            (*per_dim, steps[1]),
        )
        taken += prod(size)
