"""The bits of one class in the streams of many tiles.

Fields are complements, to be put into zeros that become ones: a run of ones is then only a distance.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from patchstore.encodings.context.bits import of_each, put
from patchstore.encodings.context.parameters import DENSE, RUNS, SILENT, SWAP, UNARY_LIMIT

Array = npt.NDArray[Any]

_U = np.uint64
_NO_ROW = np.zeros(3, dtype=np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Bits of one class: for each tile a run of fields in order."""

    num_bits: npt.NDArray[np.int64]
    """[num_tiles], bits of the class in each tile."""
    tile: npt.NDArray[np.int64]
    """[num], the tile of each field."""
    at: npt.NDArray[np.int64]
    """[num], bits of the class before it in its tile."""
    fields: npt.NDArray[np.uint64]
    tails: npt.NDArray[np.int64]
    """Those fields that a second one follows."""
    tails_at: npt.NDArray[np.int64]
    tail_fields: npt.NDArray[np.uint64]

    def write(self, zeros: npt.NDArray[np.uint64], start: Array) -> None:
        """Put the fields into the streams of tiles; the class begins at the bits `start`."""
        base = start[self.tile]
        put(zeros, base + self.at, self.fields)
        put(zeros, base[self.tails] + self.tails_at, self.tail_fields)


def fields_of_class(
    rows: Array, ranks: Array, tile: Array, steps: Array, begin: Array, end: Array, width: int
) -> list[Fields]:
    """Return the bits of one class: of the tiles where it is sparse, and of those where it is dense.

    Args:
        rows: uint8 [num_tiles, 3], the class's code in each tile's tensor; [1, 3] where all have the same.
        ranks: int64 [num], ascending, the changes' ranks in the class.
        tile: int64 [num], their tiles.
        steps: int64 [num], changes in keys.
        begin: int64 [num_tiles], the rank at which each tile begins.
        end: int64 [num_tiles], the rank at which it ends.
        width: bits of an element.
    """
    found = []
    is_dense = rows[:, 0] == DENSE
    for write, wanted in ((_sparse, ~is_dense & (rows[:, 0] != SILENT)), (_dense, is_dense)):
        if wanted.all():
            found.append(write(rows, ranks, tile, steps, begin, end, width))
        elif wanted.any():
            # Tiles of other codes are as if they had no elements of the class.
            its_rows = np.where(wanted[:, None], rows, _NO_ROW)
            kept = wanted[tile]
            found.append(
                write(
                    its_rows,
                    ranks[kept],
                    tile[kept],
                    steps[kept],
                    np.where(wanted, begin, 0),
                    np.where(wanted, end, 0),
                    width,
                )
            )
    return found


def _dense(
    rows: Array, ranks: Array, tile: Array, steps: Array, begin: Array, end: Array, width: int
) -> Fields:
    counts = end - begin
    first = counts.cumsum() - counts
    all_steps = np.zeros(int(counts.sum()), dtype=np.int64)
    all_steps[ranks + (first - begin)[tile]] = steps
    every = np.repeat(np.arange(len(counts)), counts)
    code = of_each(rows[:, 2].astype(np.int64), every)
    value = np.abs(all_steps)
    told = value > 0
    value = np.where((code == SWAP) & (value < 2), 1 - value, value)
    field, length = _rice(value, code & 0x7F, width)
    field |= (told & (all_steps > 0)).astype(_U) << length.astype(_U)
    num_bits, at = _places(length + told, counts)
    none = np.empty(0, dtype=np.int64)
    return Fields(
        num_bits=num_bits,
        tile=every,
        at=at,
        fields=field,
        tails=none,
        tails_at=none,
        tail_fields=none.astype(_U),
    )


def _sparse(
    rows: Array, ranks: Array, tile: Array, steps: Array, begin: Array, end: Array, width: int
) -> Fields:
    runs_of_tile = RUNS[rows[:, 0]]
    runs = of_each(runs_of_tile, tile)
    counts = np.bincount(tile, minlength=len(begin))
    opens_tile = np.ones(len(tile), dtype=np.bool_)
    opens_tile[1:] = tile[1:] != tile[:-1]
    since = np.empty_like(ranks)  # the first element after the change before
    since[1:] = ranks[:-1] + 1
    since[opens_tile] = begin[tile[opens_tile]]
    gap = ranks - since
    ones = gap // runs
    passed = ones * runs
    left = end[tile] - since - passed
    field, length = _truncated(gap - passed, np.minimum(left, runs))
    # A zero, the place and the sign (1 is down), as complements.
    field = (field << _U(1)) | _U(1)
    length += 1
    field |= (steps > 0).astype(_U) << length.astype(_U)
    length += 1
    tails = np.empty(0, dtype=np.int64)
    tail_fields, tail_lengths = np.empty(0, dtype=_U), tails
    has_larger = rows[:, 1] > 0
    if has_larger.any():
        magnitude = np.abs(steps)
        tails = np.flatnonzero(magnitude > 1)
        opening = RUNS[np.maximum(rows[:, 1], 1) - 1]
        _open_runs(of_each(opening, tile), of_each(has_larger, tile), tails, tile, opens_tile, field, length)
        rice = of_each(rows[:, 2].astype(np.int64), tile[tails])
        tail_fields, tail_lengths = _rice(magnitude[tails] - 2, rice, width)
    total = ones + length
    total[tails] += tail_lengths
    num_bits, at = _places(total, counts)
    at += ones
    stop = begin.copy()
    changed = np.flatnonzero(counts)
    stop[changed] = ranks[counts.cumsum()[changed] - 1] + 1
    num_bits -= (stop - end) // runs_of_tile  # the ones after the last change, rounded up
    return Fields(
        num_bits=num_bits,
        tile=tile,
        at=at,
        fields=field,
        tails=tails,
        tails_at=(at + length)[tails],
        tail_fields=tail_fields,
    )


def _open_runs(
    runs: Array,
    has_larger: Array,
    larger: Array,
    tile: Array,
    opens_tile: Array,
    field: Array,
    length: Array,
) -> None:
    """Append to the fields of changes what opens a run of changes by one step."""
    number = np.arange(len(tile))
    opens = opens_tile.copy()
    opens[larger[larger + 1 < len(tile)] + 1] = True
    since = number - np.maximum.accumulate(np.where(opens, number, 0))
    at = np.flatnonzero((since % runs == 0) & has_larger)
    runs = of_each(runs, at)
    next_larger = np.append(larger, len(tile))[np.searchsorted(larger, at)]
    ends = next_larger - at < runs
    ends[ends] = tile[next_larger[ends].clip(max=len(tile) - 1)] == tile[at[ends]]
    ends &= next_larger < len(tile)
    length_before = length[at].astype(_U)
    length[at] += 1
    ends_at = at[ends]
    place, place_length = _truncated((next_larger - at)[ends], np.broadcast_to(runs, len(at))[ends])
    field[ends_at] |= ((place << _U(1)) | _U(1)) << length_before[ends]
    length[ends_at] += place_length


def _places(length: Array, counts: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the bits of each tile, `counts` fields each, and those before each field in its tile."""
    ends = np.concatenate([[0], length.cumsum()])
    at = np.concatenate([[0], counts.cumsum()])
    before = ends[at]
    return np.diff(before), ends[:-1] - np.repeat(before[:-1], counts)


def _truncated(value: Array, below: Array) -> tuple[Array, Array]:
    """Return complements of truncated binary codes of `value` < `below`, and their lengths."""
    bits = np.frexp(below.astype(np.float64))[1].astype(np.int64) - 1
    short = (2 << bits) - below
    is_long = value >= short
    raised = value + short
    code = np.where(is_long, (raised >> 1) | ((raised & 1) << bits), value)
    length = bits + is_long
    return (code ^ ((1 << length) - 1)).astype(_U), length


def _rice(value: Array, k: Array, width: int) -> tuple[Array, Array]:
    """Return complements of Rice codes, and their lengths."""
    ones = value >> k
    escapes = ones >= UNARY_LIMIT
    low = (1 << k) - 1
    plain = (((value & low) ^ low) << 1) | 1
    raw = value ^ ((1 << width) - 1)
    ones = np.minimum(ones, UNARY_LIMIT)
    code = np.where(escapes, raw, plain).astype(_U) << ones.astype(_U)
    return code, np.where(escapes, UNARY_LIMIT + width, ones + 1 + k)
