"""Blocks that share a scale, and of which a part of a tensor has only some elements."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float32]


class Blocks(NamedTuple):
    """A box of blocks, counted in the whole tensor."""

    row: int
    rows: int
    column: int
    columns: int

    @property
    def num(self) -> int:
        return self.rows * self.columns

    def within(self, outer: "Blocks") -> tuple[slice, slice]:
        """Return where this box lies in another one."""
        row, column = self.row - outer.row, self.column - outer.column
        return slice(row, row + self.rows), slice(column, column + self.columns)


@dataclass(frozen=True, slots=True)
class Region:
    """The blocks of a part of a matrix."""

    touched: Blocks
    """Those of which it has an element."""
    owned: Blocks
    """Those of which it has the first element: their scales are published with it."""
    cut: tuple[Blocks, ...]
    """Those of which it has some elements and not all, or lines of blocks that have such ones."""

    @classmethod
    def of(
        cls, shape: tuple[int, ...], start: Sequence[int], size: Sequence[int], block: tuple[int, int]
    ) -> Self:
        """Return the blocks of a part.

        Args:
            shape: of the whole matrix.
            block: rows and columns of a block.
        """
        ends = [first + num for first, num in zip(start, size, strict=True)]
        touched, owned = list[int](), list[int]()
        is_cut = []
        for first, end, side, step in zip(start, ends, shape, block, strict=True):
            below = -(-end // step)
            touched += [first // step, below - first // step]
            owned += [-(-first // step), below - -(-first // step)]
            is_cut.append((bool(first % step), bool(end % step) and end != side))
        whole = Blocks(*touched)
        if any(is_cut[1]):
            return cls(whole, Blocks(*owned), (whole,))
        ends_of = whole.row, whole.row + whole.rows - 1
        lines = {row for row, is_so in zip(ends_of, is_cut[0], strict=True) if is_so}
        cut = tuple(Blocks(row, 1, whole.column, whole.columns) for row in sorted(lines))
        return cls(whole, Blocks(*owned), cut)


@dataclass(frozen=True, slots=True)
class Cuts:
    """All blocks of which a process has a part, in the order in which it tells their maxima."""

    boxes: tuple[tuple[str, Blocks], ...]
    """With the tensors' names."""

    @property
    def num_blocks(self) -> int:
        return sum(box.num for _, box in self.boxes)

    def told(self) -> list[Any]:
        """Return what JSON can hold."""
        return [[name, *box] for name, box in self.boxes]

    @classmethod
    def of(cls, told: Sequence[Any]) -> Self:
        return cls(tuple((name, Blocks(*box)) for name, *box in told))


def joined(every: Sequence[Cuts], values: Sequence[Values]) -> list[Values]:
    """Return the maxima over all processes of each one's blocks.

    Args:
        values: of each process, float32 [num_blocks]. A NaN is a maximum.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for cuts in every:
        for name, box in cuts.boxes:
            rows, columns = shapes.get(name, (0, 0))
            shapes[name] = max(rows, box.row + box.rows), max(columns, box.column + box.columns)
    most = {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}

    def places(cuts: Cuts) -> list[tuple[Values, Blocks]]:
        return [
            (most[name][box.row : box.row + box.rows, box.column : box.column + box.columns], box)
            for name, box in cuts.boxes
        ]

    for cuts, its in zip(every, values, strict=True):
        first = 0
        for place, box in places(cuts):
            np.maximum(place, its[first : first + box.num].reshape(place.shape), out=place)
            first += box.num
    nothing = np.zeros(0, dtype=np.float32)
    return [np.concatenate([nothing, *(place.reshape(-1) for place, _ in places(cuts))]) for cuts in every]


Exchange = Callable[[Cuts, Callable[[], Values]], Values]
"""Returns the maxima over all processes, given where this one's blocks are, and what returns its own."""


def alone(cuts: Cuts, local: Callable[[], Values]) -> Values:
    """Return the maxima of blocks of which this process has all parts."""
    (found,) = joined([cuts], [local()])
    return found
