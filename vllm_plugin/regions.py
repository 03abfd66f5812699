"""Where elements of one flat tensor lie in another: views, affine regions, and the positions that they hold.

A region is what a copy between two strided views says. `composition` follows a copy of a copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
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
        """All positions of a contiguous tensor."""
        return cls(offset=0, shape=shape, strides=contiguous_strides(shape))

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        """One past the highest position of a view that has any."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1

    def cut(self, dim: int, start: int, stop: int) -> "View":
        """The part whose index along a dimension is in a range."""
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
    """Find which positions a region holds, and where they go. The region must be `normal` and nested.

    Args:
        positions: int32 or int64 [n], ascending, in the source.

    Returns:
        A slice of `positions` outside which none is in the region; a mask of those inside it, or None where
        all are; and the target positions of what slice and mask leave, int64.

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
    """The strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
