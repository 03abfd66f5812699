"""The bits of one class in the streams of many tiles.

Fields are complements, to be put into zeros that become ones: a run of ones is then only a distance.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from patchstore.encodings.context.bits import put
from patchstore.encodings.context.parameters import DENSE, RUNS, SWAP, UNARY_LIMIT

Array = npt.NDArray[Any]

_U = np.uint64


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
        """Put the fields into the streams of tiles whose class begins at the bits `start`."""
        base = start[self.tile]
        put(zeros, base + self.at, self.fields)
        put(zeros, base[self.tails] + self.tails_at, self.tail_fields)


def fields_of_class(
    row: Array, ranks: Array, tile: Array, steps: Array, first: Array, is_changed: Array, width: int
) -> Fields:
    """Return the bits of one class.

    Args:
        row: uint8 [3], the class's code.
        ranks: int64 [num], ascending, the changes' ranks in the class.
        tile: int64 [num], their tiles.
        steps: int64 [num], changes in keys.
        first: int64 [num_tiles + 1], the rank at which each tile begins, and the end.
        is_changed: bool [num_tiles]; the others have no stream.
        width: bits of an element.
    """
    if row[0] == DENSE:
        return _dense(int(row[2]), ranks, steps, first, is_changed, width)
    return _sparse(row, ranks, tile, steps, first, width)


def _dense(code: int, ranks: Array, steps: Array, first: Array, is_changed: Array, width: int) -> Fields:
    all_steps = np.zeros(int(first[-1]), dtype=np.int64)
    all_steps[ranks] = steps
    counts = np.diff(first)
    tile = np.repeat(np.arange(len(counts)), counts)
    if not is_changed.all():
        kept = is_changed[tile]
        all_steps, tile = all_steps[kept], tile[kept]
        counts = counts * is_changed
    value = np.abs(all_steps)
    told = value > 0
    if code == SWAP:
        value = np.where(value < 2, 1 - value, value)
    field, length = _rice(value, code & 0x7F, width)
    field |= (told & (all_steps > 0)).astype(_U) << length.astype(_U)
    num_bits, at = _places(length + told, counts)
    none = np.empty(0, dtype=np.int64)
    return Fields(
        num_bits=num_bits,
        tile=tile,
        at=at,
        fields=field,
        tails=none,
        tails_at=none,
        tail_fields=none.astype(_U),
    )


def _sparse(row: Array, ranks: Array, tile: Array, steps: Array, first: Array, width: int) -> Fields:
    runs = int(RUNS[row[0]])
    counts = np.bincount(tile, minlength=len(first) - 1)
    opens_tile = np.ones(len(tile), dtype=np.bool_)
    opens_tile[1:] = tile[1:] != tile[:-1]
    begin = np.empty_like(ranks)  # the first element after the change before
    begin[1:] = ranks[:-1] + 1
    begin[opens_tile] = first[tile[opens_tile]]
    gap = ranks - begin
    ones = gap // runs
    left = first[tile + 1] - begin - ones * runs
    field, length = _truncated(gap - ones * runs, np.minimum(left, runs))
    # A zero, the place and the sign (1 is down), as complements.
    field = (field << _U(1)) | _U(1)
    length += 1
    field |= (steps > 0).astype(_U) << length.astype(_U)
    length += 1
    tails = np.empty(0, dtype=np.int64)
    tail_fields, tail_lengths = np.empty(0, dtype=_U), tails
    if row[1]:
        magnitude = np.abs(steps)
        tails = np.flatnonzero(magnitude > 1)
        _open_runs(int(RUNS[row[1] - 1]), tails, tile, opens_tile, field, length)
        tail_fields, tail_lengths = _rice(magnitude[tails] - 2, int(row[2]), width)
    total = ones + length
    total[tails] += tail_lengths
    num_bits, at = _places(total, counts)
    at += ones
    end = first[:-1].copy()
    changed = np.flatnonzero(counts)
    end[changed] = ranks[counts.cumsum()[changed] - 1] + 1
    num_bits -= (end - first[1:]) // runs  # the ones after the last change, rounded up
    return Fields(
        num_bits=num_bits,
        tile=tile,
        at=at,
        fields=field,
        tails=tails,
        tails_at=(at + length)[tails],
        tail_fields=tail_fields,
    )


def _open_runs(runs: int, larger: Array, tile: Array, opens_tile: Array, field: Array, length: Array) -> None:
    """Append to the fields of changes what opens a run of changes by one step."""
    number = np.arange(len(tile))
    opens = opens_tile.copy()
    opens[larger[larger + 1 < len(tile)] + 1] = True
    since = number - np.maximum.accumulate(np.where(opens, number, 0))
    at = np.flatnonzero(since % runs == 0)
    next_larger = np.append(larger, len(tile))[np.searchsorted(larger, at)]
    ends = next_larger - at < runs
    ends[ends] = tile[next_larger[ends].clip(max=len(tile) - 1)] == tile[at[ends]]
    ends &= next_larger < len(tile)
    length_before = length[at].astype(_U)
    length[at] += 1
    ends_at = at[ends]
    place, place_length = _truncated((next_larger - at)[ends], np.full(len(ends_at), runs))
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


def _rice(value: Array, k: int, width: int) -> tuple[Array, Array]:
    """Return complements of Rice codes, and their lengths."""
    ones = value >> k
    escapes = ones >= UNARY_LIMIT
    low = (1 << k) - 1
    plain = (((value & low) ^ low) << 1) | 1
    raw = value ^ ((1 << width) - 1)
    ones = np.minimum(ones, UNARY_LIMIT)
    code = np.where(escapes, raw, plain).astype(_U) << ones.astype(_U)
    return code, np.where(escapes, UNARY_LIMIT + width, ones + 1 + k)
