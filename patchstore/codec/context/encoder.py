"""Encode changes of parts of tensors: choose classes and codes from the changes, and write the streams.

A stream says nothing about elements that are likely to stay, class by class, so most of its bits are
ones; beyond its end a reader finds ones. An unchanged tile has no bytes. Fields are complements here, to be
put into zeros that become ones: a run of ones is then only a distance.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from patchstore.codec.context.bits import Array, bounds_of, of_each, put
from patchstore.codec.context.classes import (
    MAX_CLASSES,
    WIDTHS,
    class_words,
    classes,
    exponents,
    plane,
    steps,
)
from patchstore.codec.context.coded import Coded
from patchstore.codec.context.rows import (
    DENSE,
    RUNS,
    SILENT,
    SWAP,
    UNARY_LIMIT,
    RowSets,
    Totals,
    bin_of,
    first_exponent,
)
from patchstore.codec.context.tiles import Cuts, Layout, TileSet, split
from patchstore.tensors.columns import ramps

WRITTEN_TOGETHER = 1 << 21
"""Elements. Temporaries of a few times this stay in the cache: twice as fast as all of 4096 x 4096."""
_COUNTED_TOGETHER = 1 << 16
_U = np.uint64
_NO_ROW = np.zeros(3, dtype=np.uint8)


def encode_all(
    dtype: str,
    numbers: Array,
    cuts: Cuts,
    old: Array,
    counts: Array,
    positions: Array,
    new: Array,
    row_sets: RowSets,
) -> Coded:
    """Encode changes of parts of tensors of one dtype; takes several times their memory.

    Args:
        numbers: int64 [T], the place in the schema of each part's tensor.
        cuts: how each part is cut into tiles; see `tiles.tilings_of_part`.
        old: uint8 or uint16, all old bit patterns, part after part.
        counts: int64 [T], changes of each; at least one.
        positions: int64, ascending in each part, of its elements with other bits than before.
        new: their new bit patterns.
        row_sets: those of the payload so far, which grow by what these parts need.
    """
    layout = Layout.of(cuts)
    ends = bounds_of(cuts.num_elements)
    owner = np.repeat(np.arange(len(cuts)), counts)
    at = positions + of_each(ends[:-1], owner)
    replaced = old[at]
    moves = np.zeros_like(old)
    moves[at] = by = steps(replaced, new)
    chosen = row_sets.choose(_totals(dtype, old, ends, owner, replaced, by))
    sets = row_sets.sets
    its = sets.at(chosen)
    is_changed = np.zeros(layout.num_tiles, dtype=np.bool_)
    is_changed[layout.tiles_of(at)] = True
    if 2 * np.count_nonzero(is_changed) > len(is_changed):
        # Tiles that lie together are gathered fastest.
        is_changed[:] = True
    lengths, data, tiles_at = np.zeros(len(is_changed), dtype=np.int32), [], bounds_of(cuts.num_tiles)
    for tiles in split(layout, np.flatnonzero(is_changed), WRITTEN_TOGETHER):
        tile_owner = np.searchsorted(tiles_at, tiles, side="right") - 1
        its_old, its_moves = layout.gather(old, tiles), layout.gather(moves, tiles)
        found = TileSet(tile_owner, layout.sizes(tiles))
        lengths[tiles], streams = _streams(its_old, its_moves, found, dtype, its.lo, its.nums, its.rows)
        data.append(streams)
    return Coded(numbers, cuts, sets, chosen, lengths, np.concatenate(data))


def _totals(dtype: str, old: Array, ends: Array, owner: Array, replaced: Array, by: Array) -> Totals:
    """Count what decides on the rows of parts."""
    num, exponent = len(ends) - 1, exponents(replaced, dtype).astype(np.int64)
    lowest = int(exponent.min())
    width = int(exponent.max()) + 1 - lowest
    changed = np.bincount(owner * width + (exponent - lowest), minlength=num * width).reshape(num, width)
    base = first_exponent(changed, lowest)
    num_elements = np.zeros((num, MAX_CLASSES), dtype=np.int64)
    for first, last in _counted_together(ends):
        if last == first + 1:
            counts = np.zeros(256, dtype=np.int64)
            of_exponent = np.clip(np.arange(256) - base[first], 0, MAX_CLASSES - 1)
            for start in range(int(ends[first]), int(ends[last]), _COUNTED_TOGETHER):
                each = exponents(old[start : min(start + _COUNTED_TOGETHER, int(ends[last]))], dtype)
                counts += np.bincount(each, minlength=256)
            np.add.at(num_elements[first], of_exponent, counts)
            continue
        # By the class that decides: of many parts, counts by exponent would not stay in the cache.
        its_base, place = base[first:last, None].astype(np.uint8), np.arange(last - first)[:, None]
        each = exponents(old[ends[first] : ends[last]], dtype).reshape(last - first, -1)
        among = np.minimum(np.maximum(each, its_base) - its_base, np.uint8(MAX_CLASSES - 1))
        keys = (among + place * MAX_CLASSES).reshape(-1)
        found = np.bincount(keys, minlength=(last - first) * MAX_CLASSES)
        num_elements[first:last] = found.reshape(-1, MAX_CLASSES)
    among = np.clip(exponent - base[owner], 0, MAX_CLASSES - 1)
    bins = bin_of(np.abs(by))
    num_bins = int(bins.max(initial=0)) + 1
    key = (owner * MAX_CLASSES + among) * num_bins + bins
    changes = np.bincount(key, minlength=num * MAX_CLASSES * num_bins).reshape(num, MAX_CLASSES, num_bins)
    return Totals(
        changed=changed, num_elements=num_elements, changes=changes, width=WIDTHS[dtype], lowest=lowest
    )


def _counted_together(ends: Array) -> Iterator[tuple[int, int]]:
    """Yield ranges of parts: a large one alone, and of small ones of one size as many as one count takes."""
    sizes = np.diff(ends)
    cuts = [*(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
    first = 0
    for last in cuts:
        while first < last:
            num = max(1, _COUNTED_TOGETHER // int(sizes[first]))
            yield first, (first := min(first + num, last))


def _streams(
    old: Array, moves: Array, tiles: TileSet, dtype: str, lo: Array, num_classes: Array, rows: Array
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return the length of each tile's stream, and the streams."""
    lengths = np.zeros(len(tiles.sizes), dtype=np.int64)
    at, ends = np.flatnonzero(moves != 0), tiles.ends
    tile = np.repeat(np.arange(len(lengths)), np.diff(np.searchsorted(at, ends)))
    is_changed = np.bincount(tile, minlength=len(lengths)) > 0
    changed = np.flatnonzero(is_changed)
    if not len(changed):
        return lengths, np.empty(0, dtype=np.uint8)
    owner = tiles.owner[tile]
    tile = (is_changed.cumsum() - 1)[tile]
    by = moves[at].view(f"i{moves.itemsize}").astype(np.int64)
    class_of = classes(exponents(old[at], dtype), of_each(lo, owner), of_each(num_classes, owner))
    order = np.argsort(class_of, kind="stable")
    bounds = np.searchsorted(class_of[order], np.arange(MAX_CLASSES + 1))
    of_tiles = of_each(rows, tiles.owner[changed])
    words = class_words(
        old,
        dtype,
        tiles.of_elements(lo.astype(np.uint8)),
        tiles.of_elements((num_classes - 1).astype(np.uint8)),
        # Bits of an unchanged dense class are told too.
        np.flatnonzero((rows[:, :, 0] != SILENT).any(axis=0)),
    )
    parts: list[Fields] = []
    for number, of_class in words.items():
        mine = order[bounds[number] : bounds[number + 1]]
        inside = plane(of_class)
        first = inside.rank(ends)
        parts += fields_of_class(
            of_tiles[:, number],
            inside.rank(at[mine]),
            tile[mine],
            by[mine],
            first[:-1][changed],
            first[1:][changed],
            8 * WIDTHS[dtype],
        )
    num_bits = sum((part.num_bits for part in parts), np.zeros(len(changed), dtype=np.int64))
    num_bytes = -(-num_bits // 8)
    stops = num_bytes.cumsum()
    starts = stops - num_bytes
    # What is written are the zeros: fields are complements, and all else stays one.
    zeros = np.zeros(int(stops[-1]) // 8 + 2, dtype=np.uint64)
    start = starts * 8
    for part in parts:
        part.write(zeros, start)
        start += part.num_bits
    data = zeros.view(np.uint8)
    told = np.flatnonzero(data)
    kept = told[np.searchsorted(told, stops) - 1] + 1 - starts
    lengths[changed] = kept
    return lengths, ~data[ramps(kept, starts)]


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
        ranks: int64 [num], ascending, the changes' ranks in the class; then their tiles and steps.
        begin: int64 [num_tiles], the rank at which each tile begins; then where it ends.
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
