"""Weights in FP8 beside a snapshot of which kernels compare all tensors at once.

Imports Triton, so only what runs kernels may import it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from patchstore.kernels import rounded
from patchstore.kernels.compare import Found
from patchstore.publish.snapshot import InPlace, Roundable, Rounded, Unrounded
from patchstore.quantization import Form
from patchstore.quantization.forms import Matrix


class _Begun(NamedTuple):
    """A pass whose matrices were measured."""

    rest: InPlace
    """Scales, flat, and what is published as it is, by key: to be compared like other tensors."""
    plan: rounded.Rounding
    operands: torch.Tensor
    """See `Form.operands`."""
    held: object
    """Weights, which must not be freed before they were compared."""


@dataclass(frozen=True, slots=True)
class _Laid:
    """Where matrices are, and memory for what is measured of them."""

    where: object
    """See `InPlace`; None where matrices are converted, so are elsewhere in each pass."""
    places: list[object]
    plan: rounded.Rounding
    maxima: torch.Tensor
    """float32 [num_groups], as `scales`."""
    scales: torch.Tensor
    of_whole: dict[str, torch.Tensor]
    """Views of `scales`, by key."""
    of_parts: dict[str, tuple[int, tuple[slice, slice]]]
    """Scales that are no run of `scales`, by key: the number of the matrix, and which of its blocks."""

    def of_matrix(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        """Return a view, [down, across], of one matrix in what has a number for each block."""
        first, (down, across) = self.plan.firsts[number], self.plan.shapes[number]
        return flat[first : first + down * across].view(down, across)


class Rounder:
    """Compares matrices that are published in FP8 with the codes in a snapshot, all at once.

    The codes are not made: see `kernels.rounded`. What a snapshot compares beside them are the scales, and
    the tensors that are published as they are. Tables are kept while weights stay where they are.
    """

    def __init__(self, form: Form, found: Found, numbers: Mapping[str, int]) -> None:
        """Take what differs into `found`; `numbers` are of its tensors, by key."""
        self._form, self._found, self._numbers = form, found, numbers
        self._laid: _Laid | None = None
        """As the last pass had it."""

    def warm_up(self, source: Roundable, snapshot: int) -> None:
        """Compile kernels now, and not while a trainer waits."""
        tiles = self._found.tiles
        codes = [n for n, width in enumerate(tiles.widths) if width == 1 and tiles.num_bytes[n]]
        for dtypes in source.dtypes if codes else ():
            if dtypes[0] in rounded.DTYPES:
                rounded.warm_up(self._found, codes[0], dtypes, self._form.block, snapshot)

    def begin(self, source: Roundable) -> _Begun:
        """Begin a pass, and measure the matrices. Raises as `Roundable.read`."""
        given: Unrounded
        laid: _Laid
        held: object

        def measure(found: Unrounded) -> tuple[torch.Tensor, Callable[[int], torch.Tensor]]:
            nonlocal given, laid, held
            given = found
            laid, held = self._laid_out(found)
            rounded.measure(laid.plan, laid.maxima)
            return laid.maxima, partial(laid.of_matrix, laid.maxima)

        source.read(measure)
        operands, scales = self._form.operands(laid.maxima)
        laid.scales.copy_(scales)
        rest = given.plain | laid.of_whole
        for key, (number, owned) in laid.of_parts.items():
            rest[key] = laid.of_matrix(laid.scales, number)[owned].contiguous()
        is_in_place = laid.where is not None and not laid.of_parts
        return _Begun(InPlace(rest, laid if is_in_place else None), laid.plan, operands, (given, held))

    def compare(self, begun: _Begun, snapshot: int, tiles: range) -> None:
        """Compare the codes of a pass, in some tiles, with those in the snapshot; may be repeated."""
        rounded.compare(begun.plan, self._found, begun.operands, snapshot, tiles)

    def _laid_out(self, given: Unrounded) -> tuple[_Laid, object]:
        """Return where the matrices are, and what holds their memory beside `given`."""
        where, last = given.plain.where, self._laid
        if last is not None and where is not None and last.where is where:
            return last, None
        listed = given.rounded()
        held = [self._numbered(each) for each in listed]
        if any(matrix is not each.matrix for (_, matrix), each in zip(held, listed, strict=True)):
            where = None
        places: list[object] = [(number, *matrix.place) for number, matrix in held]
        if last is not None and last.places == places:
            laid = replace(last, where=where)
        else:
            self._laid = last = None
            plan = rounded.plan(self._found, held, self._form.block)
            laid = self._with_memory(where, places, plan, listed)
        self._laid = laid
        return laid, held

    def _with_memory(
        self, where: object, places: list[object], plan: rounded.Rounding, listed: Sequence[Rounded]
    ) -> _Laid:
        device = self._found.cursor.device
        maxima, scales = (torch.zeros(plan.num_groups, dtype=torch.float32, device=device) for _ in range(2))
        laid = _Laid(where, places, plan, maxima, scales, {}, {})
        # One call for all, as there may be thousands.
        pieces = torch.split(scales, plan.sizes)
        for number, each in enumerate(listed):
            if each.scales is None:
                continue
            if each.owned is None:
                laid.of_whole[each.scales] = pieces[plan.pieces[number]]
            elif (its := laid.of_matrix(scales, number)[each.owned]).is_contiguous():
                laid.of_whole[each.scales] = its
            else:
                laid.of_parts[each.scales] = number, each.owned
        return laid

    def _numbered(self, each: Rounded) -> tuple[int | None, Matrix]:
        matrix, device = each.matrix, self._found.cursor.device
        weights = matrix.weights
        if weights.device != device or weights.dtype not in rounded.DTYPES:
            matrix = matrix._replace(weights=weights.to(device, matrix.served))
        return None if each.codes is None else self._numbers[each.codes], matrix
