"""Matrices that are published in FP8 and that kernels compare with their codes, all at once.

The codes are not made: see `kernels.rounded`. What a snapshot compares beside them are the scales, and the
tensors that are published as they are.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from patchstore.quantization import Form
from patchstore.quantization.matrix import Matrix

if TYPE_CHECKING:
    from patchstore.kernels.compare import Found
    from patchstore.kernels.rounded import Rounding


class Rounded(NamedTuple):
    """Weights that are published as codes and scales."""

    matrix: Matrix
    codes: str | None
    """Key of the codes; None if this publisher does not publish them."""
    scales: str | None
    """The same of the scales."""
    owned: tuple[slice, slice] | None = None
    """Which scales are published, of those of all blocks that it touches; None for all."""


Measure = Callable[[Sequence[Rounded]], tuple[torch.Tensor, Callable[[int], torch.Tensor]]]
"""Returns the largest magnitudes of the blocks of matrices: all, flat, and what returns a view of those of
one matrix, [down, across], by its number. They may be written to."""


class Given(NamedTuple):
    """All that is published, matrices before they are rounded."""

    plain: Mapping[str, torch.Tensor]
    """By key."""
    rounded: Sequence[Rounded]


class Roundable(Protocol):
    """A stream of codes and scales that can also be had as matrices."""

    @property
    def form(self) -> Form: ...

    @property
    def dtypes(self) -> Collection[tuple[torch.dtype, torch.dtype]]:
        """Of the matrices: as they are given, and as they are served."""
        ...

    def read(self, measure: Measure) -> Given:
        """Begin a pass, in the place of `Stream.read`.

        Args:
            measure: is called once, with `Given.rounded`. Maxima of blocks of which several processes have
                parts are then raised to those of all.

        Raises:
            SchemaMismatch: tensors are not those of the first time.
            UsageError: a weight is not finite.
        """
        ...


class Begun(NamedTuple):
    """A pass whose matrices were measured."""

    rest: Mapping[str, torch.Tensor]
    """Scales, flat, and what is published as it is, by key: to be compared like other tensors."""
    operands: torch.Tensor
    """See `Form.operands`."""
    held: Sequence[tuple[int | None, Matrix]]
    """Weights, which must not be freed before they were compared."""


class Rounder:
    """Compares matrices with the codes in a snapshot. Tables are kept while weights stay where they are."""

    def __init__(self, kernels: ModuleType, form: Form, found: "Found", numbers: Mapping[str, int]) -> None:
        """Prepare; nothing is read.

        Args:
            kernels: `kernels.rounded`.
            found: takes what differs.
            numbers: of the tensors in `found.tiles`, by key.
        """
        self._kernels, self._form, self._found, self._numbers = kernels, form, found, numbers
        self._places: list[object] | None = None
        """Of the matrices that `_plan` was made for."""
        self._plan: Rounding
        self._maxima: torch.Tensor

    def warm_up(self, source: Roundable, snapshot: int) -> None:
        """Compile kernels now, and not while a trainer waits.

        Args:
            snapshot: its address.
        """
        tiles = self._found.tiles
        codes = [n for n, width in enumerate(tiles.widths) if width == 1 and tiles.num_bytes[n]]
        for dtypes in source.dtypes if codes else ():
            if dtypes[0] in self._kernels.DTYPES:
                self._kernels.warm_up(self._found, codes[0], dtypes, self._form.block, snapshot)

    def begin(self, source: Roundable) -> Begun:
        """Begin a pass, and measure the matrices. Raises as `Roundable.read`."""
        held: list[tuple[int | None, Matrix]] = []

        def measure(rounded: Sequence[Rounded]) -> tuple[torch.Tensor, Callable[[int], torch.Tensor]]:
            held.extend(self._numbered(each) for each in rounded)
            self._plan_for(held)
            self._kernels.measure(self._plan, self._maxima)
            return self._maxima, partial(self._of_matrix, self._maxima)

        given = source.read(measure)
        operands, scales = self._form.operands(self._maxima)
        rest = dict(given.plain)
        # One call for all, as there may be thousands.
        pieces = torch.split(scales, self._plan.sizes)
        for number, each in enumerate(given.rounded):
            if each.scales is None:
                continue
            if each.owned is None:
                rest[each.scales] = pieces[self._plan.pieces[number]]
            else:
                rest[each.scales] = self._of_matrix(scales, number)[each.owned].contiguous()
        return Begun(rest, operands, held)

    def compare(self, begun: Begun, snapshot: int) -> None:
        """Compare the codes of the pass that began last with those in the snapshot; may be repeated.

        Args:
            snapshot: its address.
        """
        self._kernels.compare(self._plan, self._found, begun.operands, snapshot)

    def _numbered(self, rounded: Rounded) -> tuple[int | None, Matrix]:
        matrix, device = rounded.matrix, self._found.cursor.device
        weights = matrix.weights
        if weights.device != device or weights.dtype not in self._kernels.DTYPES:
            matrix = matrix._replace(weights=weights.to(device, matrix.served))
        return None if rounded.codes is None else self._numbers[rounded.codes], matrix

    def _plan_for(self, held: Sequence[tuple[int | None, Matrix]]) -> None:
        places: list[object] = [(number, *matrix.place) for number, matrix in held]
        if self._places == places:
            return
        self._places = None
        self._plan = self._kernels.plan(self._found, held, self._form.block)
        device = self._found.cursor.device
        self._maxima = torch.zeros(self._plan.num_groups, dtype=torch.float32, device=device)
        self._places = places

    def _of_matrix(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        """Return a view, [down, across], of one matrix in what has a number for each block."""
        first, (down, across) = self._plan.firsts[number], self._plan.shapes[number]
        return flat[first : first + down * across].view(down, across)
