"""Weights in FP8 beside a snapshot of which kernels compare all tensors at once.

Imports Triton, so only what runs kernels may import it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from patchstore.kernels import rounded
from patchstore.kernels.compare import Found
from patchstore.publish.snapshot import Roundable, Rounded
from patchstore.quantization import Form
from patchstore.quantization.forms import Matrix


class _Begun(NamedTuple):
    """A pass whose matrices were measured."""

    rest: Mapping[str, torch.Tensor]
    """Scales, flat, and what is published as it is, by key: to be compared like other tensors."""
    operands: torch.Tensor
    """See `Form.operands`."""
    held: Sequence[tuple[int | None, Matrix]]
    """Weights, which must not be freed before they were compared."""


class Rounder:
    """Compares matrices that are published in FP8 with the codes in a snapshot, all at once.

    The codes are not made: see `kernels.rounded`. What a snapshot compares beside them are the scales, and
    the tensors that are published as they are. Tables are kept while weights stay where they are.
    """

    def __init__(self, form: Form, found: Found, numbers: Mapping[str, int]) -> None:
        """Take what differs into `found`; `numbers` are of its tensors, by key."""
        self._form, self._found, self._numbers = form, found, numbers
        self._places: list[object] | None = None
        """Of the matrices that `_plan` was made for."""
        self._plan: rounded.Rounding
        self._maxima: torch.Tensor

    def warm_up(self, source: Roundable, snapshot: int) -> None:
        """Compile kernels now, and not while a trainer waits."""
        tiles = self._found.tiles
        codes = [n for n, width in enumerate(tiles.widths) if width == 1 and tiles.num_bytes[n]]
        for dtypes in source.dtypes if codes else ():
            if dtypes[0] in rounded.DTYPES:
                rounded.warm_up(self._found, codes[0], dtypes, self._form.block, snapshot)

    def begin(self, source: Roundable) -> _Begun:
        """Begin a pass, and measure the matrices. Raises as `Roundable.read`."""
        held: list[tuple[int | None, Matrix]] = []

        def measure(matrices: Sequence[Rounded]) -> tuple[torch.Tensor, Callable[[int], torch.Tensor]]:
            held.extend(self._numbered(each) for each in matrices)
            self._plan_for(held)
            rounded.measure(self._plan, self._maxima)
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
        return _Begun(rest, operands, held)

    def compare(self, begun: _Begun, snapshot: int) -> None:
        """Compare the codes of the pass that began last with those in the snapshot; may be repeated."""
        rounded.compare(self._plan, self._found, begun.operands, snapshot)

    def _numbered(self, each: Rounded) -> tuple[int | None, Matrix]:
        matrix, device = each.matrix, self._found.cursor.device
        weights = matrix.weights
        if weights.device != device or weights.dtype not in rounded.DTYPES:
            matrix = matrix._replace(weights=weights.to(device, matrix.served))
        return None if each.codes is None else self._numbers[each.codes], matrix

    def _plan_for(self, held: Sequence[tuple[int | None, Matrix]]) -> None:
        places: list[object] = [(number, *matrix.place) for number, matrix in held]
        if self._places == places:
            return
        self._places = None
        self._plan = rounded.plan(self._found, held, self._form.block)
        device = self._found.cursor.device
        self._maxima = torch.zeros(self._plan.num_groups, dtype=torch.float32, device=device)
        self._places = places

    def _of_matrix(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        """Return a view, [down, across], of one matrix in what has a number for each block."""
        first, (down, across) = self._plan.firsts[number], self._plan.shapes[number]
        return flat[first : first + down * across].view(down, across)
