"""How regions compose: a copy of a copy, and regions as boxes of a contiguous tensor.

Loaders slice, transpose, fuse and gather before they copy, so a copy's source may itself be a copy. `compose`
looks through it without ever listing elements.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from vllm_plugin.regions import Region, View, contiguous_strides, normal

_MAX_CUTS = 1024
"""A copy that takes more regions than this to describe is not described at all."""


def compose(wanted: View, held: Sequence[Region], shape: tuple[int, ...]) -> list[Region] | None:
    """Find where the elements of a view of an intermediate tensor came from.

    Args:
        wanted: positions in the intermediate's storage.
        held: what was copied into the intermediate: each target is a box of it, in its own dimensions.
        shape: the intermediate's; it is contiguous.

    Returns:
        Regions from the origin to `wanted`'s own index space (targets are contiguous over `wanted.shape`).
        Parts that nothing was copied into are left out. None where it takes too many regions to say.
    """
    if not wanted.num_elements:
        return []
    near = [each for each in held if each.target.offset < wanted.end and wanted.offset < each.target.end]
    asked = [Region(source=wanted, target=View.contiguous(wanted.shape))] if near else []
    found: list[Region] = []
    num_cuts = 0
    while asked:
        each = asked.pop()
        digits = _digits(each, shape)
        if isinstance(digits, int):
            num_cuts += 1
            if num_cuts > _MAX_CUTS:
                return None
            asked += _halves(each, digits)
        else:
            found += [part for region in near for part in _parts(region, each, digits, shape)]
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
    for dim, first in enumerate(_indices(region.source.offset, steps)):
        mine = [digit for digit in digits if digit.dim == dim]
        if mine and first + sum((digit.length - 1) * digit.step for digit in mine) >= shape[dim]:
            return max(mine, key=lambda digit: digit.step).along  # a carry into the next dimension
    return digits


def _halves(region: Region, dim: int) -> list[Region]:
    n = region.source.shape[dim]
    return [region.cut(dim, 0, n // 2), region.cut(dim, n // 2, n)]


def _indices(position: int, steps: Sequence[int]) -> list[int]:
    indices = []
    for step in steps:
        indices.append(position // step if step else 0)
        position -= indices[-1] * step
    return indices


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
    starts, lows = _indices(asked.source.offset, steps), _indices(region.target.offset, steps)
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
    firsts = _indices(part.target.offset, steps)
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
    asked = normal(region)
    found: list[Region] = []
    num_cuts = 0
    while asked:
        each = asked.pop()
        box = _box(each, shape)
        if isinstance(box, int):
            num_cuts += 1
            if num_cuts > _MAX_CUTS:
                return None
            asked += _halves(each, box)
        else:
            found.append(box)
    return found


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
    own, other = _indices(region.target.offset, steps), _indices(box.offset, steps)
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
