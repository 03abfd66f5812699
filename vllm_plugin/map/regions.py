"""Where elements of one flat tensor lie in another: views, affine regions, and how regions compose.

A region is what a copy between two strided views says. Loaders slice, transpose, fuse and gather before they
copy, so a copy's source may itself be a copy. `compose` looks through it without ever listing elements.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeVar

import torch

Strides = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class View:
    """Positions `offset + sum(j_k * strides_k)` for `0 <= j_k < shape_k`, in the order of `j`."""

    offset: int
    shape: tuple[int, ...]
    strides: Strides

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "View":
        """The positions of a tensor in its storage, in elements of its own width."""
        return cls(
            offset=int(tensor.storage_offset()),
            shape=tuple(int(n) for n in tensor.shape),
            strides=tuple(int(s) for s in tensor.stride()),
        )

    @classmethod
    def contiguous(cls, shape: tuple[int, ...]) -> "View":
        return cls(offset=0, shape=shape, strides=contiguous_strides(shape))

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        """One past the highest position of a view that has any."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1

    def cut(self, dim: int, start: int, stop: int) -> "View":
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        return View(offset=self.offset + start * self.strides[dim], shape=shape, strides=self.strides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """`source` and `target` have one shape: element `j` of the one lies at element `j` of the other."""

    source: View
    target: View

    @property
    def num_elements(self) -> int:
        return self.source.num_elements

    def cut(self, dim: int, start: int, stop: int) -> "Region":
        return Region(source=self.source.cut(dim, start, stop), target=self.target.cut(dim, start, stop))


def normal(region: Region) -> list[Region]:
    """Return the same mapping with as few dimensions as it takes, ordered by falling source stride.

    A source that is repeated (stride 0) becomes one region a copy, and an empty one none. Equal sets of
    source positions get equal `source` views, whatever the target looks like, as long as both sides merge
    alike.
    """
    if not region.num_elements:
        return []
    dims = list(zip(region.source.shape, region.source.strides, region.target.strides, strict=True))
    for k, (n, s, _) in enumerate(dims):
        if n > 1 and s == 0:
            return [part for i in range(n) for part in normal(region.cut(k, i, i + 1))]
    dims = sorted((d for d in dims if d[0] > 1), key=lambda d: -d[1])
    merged: list[tuple[int, int, int]] = []
    for n, s, t in dims:
        if merged and merged[-1][1] == n * s and merged[-1][2] == n * t:
            merged[-1] = (merged[-1][0] * n, s, t)
        else:
            merged.append((n, s, t))
    shape = tuple(n for n, _, _ in merged)
    return [
        Region(
            source=View(offset=region.source.offset, shape=shape, strides=tuple(s for _, s, _ in merged)),
            target=View(offset=region.target.offset, shape=shape, strides=tuple(t for _, _, t in merged)),
        )
    ]


def is_nested(view: View) -> bool:
    """Whether a position tells its indices digit by digit, as `locate` reads them.

    Holds for every slice or transposition of a contiguous tensor.
    """
    reach = 0
    for n, s in sorted(zip(view.shape, view.strides, strict=True), key=lambda d: d[1]):
        if n > 1 and s <= reach:
            return False
        reach += (n - 1) * s
    return True


def locate(region: Region, positions: torch.Tensor) -> tuple[slice, torch.Tensor | None, torch.Tensor]:
    """Find which ascending positions of the source a region, `normal` and nested, holds, and where they go.

    Returns a slice of `positions` outside which none is in the region; a mask of those inside it, or None
    where all are; and the target positions of what slice and mask leave, int64.

    Example: rows 1 and 2 of a 4 x 3 source, first two columns, to target 10: the source view has offset 3,
    shape (2, 2), strides (3, 1). Position 7 is digit 1 with 1 left over: row 1, column 1, target 13.
    """
    source, target = region.source, region.target
    bounds = torch.tensor([source.offset, source.end], dtype=positions.dtype, device=positions.device)
    first, last = torch.searchsorted(positions, bounds).tolist()
    inside = slice(first, last)
    rest = positions[inside].to(torch.int64) - source.offset
    if len(source.shape) <= 1 and (not source.strides or source.strides[0] == 1):
        step = target.strides[0] if target.strides else 1
        return inside, None, rest.mul_(step).add_(target.offset)
    goal = torch.full_like(rest, target.offset)
    held = torch.ones_like(rest, dtype=torch.bool)
    for n, s, t in zip(source.shape, source.strides, target.strides, strict=True):
        digit = rest // s
        rest.sub_(digit * s)
        held &= digit < n
        goal.add_(digit.mul_(t))
    held &= rest == 0
    return inside, held, goal[held]


def pieces(region: Region, num_elements: int) -> Iterator[Region]:
    """Cut a region along its dimensions into parts of at most `num_elements` (at least one) each."""
    if region.num_elements <= num_elements:
        if region.num_elements:
            yield region
        return
    dim = next(k for k, n in enumerate(region.source.shape) if n > 1)
    rest = region.num_elements // region.source.shape[dim]
    step = max(1, num_elements // rest)
    for start in range(0, region.source.shape[dim], step):
        yield from pieces(region.cut(dim, start, min(start + step, region.source.shape[dim])), num_elements)


def positions(view: View, device: torch.device) -> torch.Tensor:
    """List a view's positions, int64 [num_elements], in the order of its indices."""
    listed = torch.full((1,) * len(view.shape), view.offset, dtype=torch.int64, device=device)
    for k, (n, s) in enumerate(zip(view.shape, view.strides, strict=True)):
        along = torch.arange(n, dtype=torch.int64, device=device) * s
        listed = listed + along.view([-1 if i == k else 1 for i in range(len(view.shape))])
    return listed.expand(view.shape).reshape(-1)


def overlap(views: Sequence[View]) -> bool:
    """Whether any position is in two of the views, or twice in one."""
    ordered = sorted((view for view in views if view.num_elements), key=lambda view: view.offset)
    ends, reach = [], -1
    for view in ordered:
        ends.append(view.offset < reach)
        reach = max(reach, view.end)
    if not any(ends) and all(is_nested(view) for view in ordered):
        return False
    # Strided parts that interleave, as the halves of a column-parallel weight do: paint them.
    base = ordered[0].offset
    painted = torch.zeros(reach - base, dtype=torch.bool)
    for view in ordered:
        part = painted.as_strided(view.shape, view.strides, view.offset - base)
        if bool(part.any()):
            return True
        if is_nested(view):
            part.fill_(True)
        else:
            listed = positions(view, painted.device)
            painted[listed - base] = True
            if len(set(listed.tolist())) < len(listed):
                return True
    return False


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


_MAX_CUTS = 1024
"""A copy that takes more regions than this to describe is not described at all."""


def compose(wanted: View, held: Sequence[Region], shape: tuple[int, ...]) -> list[Region] | None:
    """Find where the elements of a view of a contiguous intermediate tensor came from.

    Each target of `held` is a box of the intermediate, in its own dimensions. Returns regions from the origin
    to `wanted`'s own index space (targets are contiguous over `wanted.shape`), without parts that nothing was
    copied into. None where it takes too many regions to say.
    """
    if not wanted.num_elements:
        return []
    near = [each for each in held if each.target.offset < wanted.end and wanted.offset < each.target.end]
    asked = [Region(source=wanted, target=View.contiguous(wanted.shape))] if near else []
    read = _read(asked, lambda each: _digits(each, shape))
    if read is None:
        return None
    return [part for each, digits in read for region in near for part in _parts(region, each, digits, shape)]


def _read(asked: list[Region], one: Callable[[Region], T | int]) -> list[tuple[Region, T]] | None:
    """Read regions, in halves where `one` says which dimension to cut; None if that takes too many."""
    found: list[tuple[Region, T]] = []
    num_cuts = 0
    while asked:
        each = asked.pop()
        said = one(each)
        if isinstance(said, int):
            num_cuts += 1
            if num_cuts > _MAX_CUTS:
                return None
            n = each.source.shape[said]
            asked += [each.cut(said, 0, n // 2), each.cut(said, n // 2, n)]
        else:
            found.append((each, said))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Digit:
    """A dimension of a view, or a part of one, as steps along one dimension of the tensor it is a view of."""

    dim: int
    step: int
    length: int
    target_stride: int
    along: int
    """The dimension of the view."""


def _digits(region: Region, shape: Sequence[int]) -> list[_Digit] | int:
    """Read a region's source as digits of a contiguous tensor's indices: or say which dimension to cut first.

    Repeated dimensions, of source stride 0, have no digits.
    """
    steps = contiguous_strides(shape)
    digits: list[_Digit] = []
    dims = zip(region.source.shape, region.source.strides, region.target.strides, strict=True)
    for along, (n, s, t) in enumerate(dims):
        if n > 1 and s > 0:
            split = _split(along, n, s, t, shape)
            if split is None:
                return along
            digits += split
    for dim, first in enumerate(indices(region.source.offset, steps)):
        mine = [digit for digit in digits if digit.dim == dim]
        if mine and first + sum((digit.length - 1) * digit.step for digit in mine) >= shape[dim]:
            return max(mine, key=lambda digit: digit.step).along  # a carry into the next dimension
    return digits


def indices(position: int, steps: Sequence[int]) -> list[int]:
    """Return the indices of an element of a contiguous tensor that has these strides."""
    found = []
    for step in steps:
        found.append(position // step if step else 0)
        position -= found[-1] * step
    return found


def _split(along: int, n: int, stride: int, target: int, shape: Sequence[int]) -> list[_Digit] | None:
    """Split one dimension of a view into digits, innermost first."""
    digits: list[_Digit] = []
    for dim, size in reversed(list(zip(range(len(shape)), contiguous_strides(shape), strict=True))):
        if shape[dim] == 1 or stride % size or stride >= size * shape[dim]:
            continue
        step = stride // size
        if dim == 0 or (n - 1) * step < shape[dim]:
            digits.append(_Digit(dim=dim, step=step, length=n, target_stride=target, along=along))
            return digits
        # It runs over this dimension into the next one out: only whole turns can be told apart.
        if shape[dim] % step or n % (shape[dim] // step):
            return None
        turn = shape[dim] // step
        digits.append(_Digit(dim=dim, step=step, length=turn, target_stride=target, along=along))
        n, stride, target = n // turn, size * shape[dim], target * turn
        if n == 1:
            return digits
    return None


def _parts(region: Region, asked: Region, digits: Sequence[_Digit], shape: Sequence[int]) -> Iterator[Region]:
    """Yield the parts of what a region brought to its box that the digits of `asked` reach."""
    steps = contiguous_strides(shape)
    starts, lows = indices(asked.source.offset, steps), indices(region.target.offset, steps)
    origin = region.source.offset
    ordered: list[_Digit] = []
    ranges: list[list[tuple[tuple[int, int], ...]]] = []
    for dim, length in enumerate(region.source.shape):
        mine = sorted((digit for digit in digits if digit.dim == dim), key=lambda digit: -digit.step)
        ordered += mine
        low = lows[dim] - starts[dim]
        origin -= low * region.source.strides[dim]
        ranges.append(list(_ranges(mine, low, low + length)))
    repeats = [
        (n, 0, t)
        for n, s, t in zip(asked.source.shape, asked.source.strides, asked.target.strides, strict=True)
        if s == 0 and n > 1
    ]
    for chosen in product(*ranges):
        source, target, dims = origin, asked.target.offset, list(repeats)
        for digit, (first, count) in zip(ordered, [pair for each in chosen for pair in each], strict=True):
            stride = digit.step * region.source.strides[digit.dim]
            source += first * stride
            target += first * digit.target_stride
            dims.append((count, stride, digit.target_stride))
        lengths = tuple(n for n, _, _ in dims)
        yield Region(
            source=View(offset=source, shape=lengths, strides=tuple(s for _, s, _ in dims)),
            target=View(offset=target, shape=lengths, strides=tuple(t for _, _, t in dims)),
        )


def _ranges(digits: Sequence[_Digit], low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield for which digits, slowest first, the sum of their steps is in a range: a (first, count) each."""
    if not digits:
        if low <= 0 < high:
            yield ()
        return
    step, length, inner = digits[0].step, digits[0].length, digits[1:]
    reach = sum((digit.length - 1) * digit.step for digit in inner)
    touched = range(max(0, -((reach - low) // step)), min(length, (high - 1) // step + 1))
    whole = range(max(0, -(-low // step)), min(length, (high - 1 - reach) // step + 1))
    if whole:
        yield ((whole.start, len(whole)), *((0, digit.length) for digit in inner))
    for i in touched:
        if i not in whole:
            for rest in _ranges(inner, low - i * step, high - i * step):
                yield ((i, 1), *rest)


def onto(part: Region, goal: View) -> Region:
    """Take a region whose targets are indices into `goal`, contiguous over its shape, to its positions."""
    steps = contiguous_strides(goal.shape)
    firsts = indices(part.target.offset, steps)
    strides = []
    for n, t in zip(part.target.shape, part.target.strides, strict=True):
        # No part runs over a dimension of its goal: each was cut from one of them.
        dim = next((k for k, s in enumerate(steps) if goal.shape[k] > 1 and s <= t), None)
        strides.append(0 if n == 1 or dim is None else goal.strides[dim] * (t // steps[dim]))
    offset = goal.offset + sum(i * s for i, s in zip(firsts, goal.strides, strict=True))
    return Region(
        source=part.source, target=View(offset=offset, shape=part.target.shape, strides=tuple(strides))
    )


def boxed(region: Region, shape: tuple[int, ...]) -> list[Region] | None:
    """Express a region as boxes of its target, a contiguous tensor; None if that takes too many.

    The boxes have the target's dimensions, each in steps of one.
    """
    read = _read(normal(region), lambda each: _box(each, shape))
    return None if read is None else [box for _, box in read]


def _box(region: Region, shape: tuple[int, ...]) -> Region | int:
    """The same region in the dimensions of its target, or which of its own to cut first."""
    flipped = Region(source=region.target, target=region.source)
    digits = _digits(flipped, shape)
    if isinstance(digits, int):
        return digits
    counts, strides = [1] * len(shape), [0] * len(shape)
    for digit in sorted(digits, key=lambda digit: digit.step):
        if digit.step != 1 or counts[digit.dim] != 1:
            return digit.along
        counts[digit.dim], strides[digit.dim] = digit.length, digit.target_stride
    box = tuple(counts)
    return Region(
        source=View(offset=region.source.offset, shape=box, strides=tuple(strides)),
        target=View(offset=region.target.offset, shape=box, strides=contiguous_strides(shape)),
    )


def outside(region: Region, box: View, shape: tuple[int, ...]) -> Iterator[Region]:
    """Yield what a region, itself boxed, brings to elements of a contiguous tensor that are not in a box."""
    if box.end <= region.target.offset or region.target.end <= box.offset:
        yield region
        return
    steps = contiguous_strides(shape)
    own, other = indices(region.target.offset, steps), indices(box.offset, steps)
    shared = [
        (max(0, theirs - ours), min(n, theirs + m - ours))
        for ours, n, theirs, m in zip(own, region.target.shape, other, box.shape, strict=True)
    ]
    if any(low >= high for low, high in shared):
        yield region
        return
    for k, (low, high) in enumerate(shared):
        if low > 0:
            yield region.cut(k, 0, low)
        if high < region.target.shape[k]:
            yield region.cut(k, high, region.target.shape[k])
        region = region.cut(k, low, high)
