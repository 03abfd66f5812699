"""The choice of row sets for all parts of a payload from their totals, as kernels count them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from patchstore.encodings.context.parameters import used_bins
from patchstore.encodings.context.row_sets import (
    SHARING,
    BestRows,
    CostsAhead,
    RowSet,
    RowSets,
    Totals,
    best_rows,
)

Array = npt.NDArray[Any]


def choose_by_group(
    changed: Array, found: Array, widths: Array, groups: Sequence[Sequence[int]]
) -> tuple[Array, Sequence[RowSet]]:
    """Choose rows as `RowSets.choose` does for one group of parts after the other.

    Args:
        changed: as `Totals` has it; so are the other two, of parts of any width.
        found: int64 [T, 16, 1 + BINS], `num_elements` and then `changes`.
        widths: int [T], bytes of an element.
        groups: which parts each has, of one width.

    Returns:
        The number of each part's set, int64 [T], and the sets.
    """
    row_sets, numbers = RowSets(), np.zeros(len(changed), dtype=np.int64)
    every, best = dict[int, Totals](), dict[int, BestRows]()
    place = np.zeros(len(changed), dtype=np.int64)
    num_elements, changes = found[:, :, 0], found[:, :, 1 : 1 + used_bins(found[:, :, 1:])]
    for width in np.unique(widths).tolist():
        alike = np.flatnonzero(widths == width)
        place[alike] = np.arange(len(alike))
        every[width] = Totals(
            changed=changed[alike], num_elements=num_elements[alike], changes=changes[alike], width=width
        )
        # Of all parts at once: each call costs a millisecond, and there may be a group for each part.
        best[width] = best_rows(every[width])
    num_changed = changed.sum(axis=1)
    alone: dict[int, list[int]] = {width: [] for width in every}
    sure: dict[int, list[tuple[int, RowSet]]] = {width: [] for width in every}
    for first, *others in groups:
        if num_changed[first] > SHARING and not others:
            own = best[int(widths[first])].sets[int(place[first])]
            for width, before in alone.items():
                sure[width].append((len(before), own))
        elif not others:
            alone[int(widths[first])].append(int(place[first]))
    ahead = {width: CostsAhead(totals, alone[width], sure[width]) for width, totals in every.items()}
    for group in groups:
        width, some = int(widths[group[0]]), place[group]
        if len(group) == 1:
            part = int(some[0])
            own, cost = best[width].sets[part], float(best[width].bits[part])
            numbers[group] = row_sets.choose_alone(own, cost, int(num_changed[group[0]]), ahead[width], part)
        else:
            numbers[group] = row_sets.choose(every[width].of(some), best[width].of(some))
    return numbers, row_sets.sets
