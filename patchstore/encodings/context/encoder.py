"""Encode changes of parts of tensors: choose classes and codes from the changes, and write the streams."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from patchstore.encodings.context.bits import bounds_of, of_each, ramps
from patchstore.encodings.context.classes import MAX_CLASSES, WIDTHS, classes, exponents, steps
from patchstore.encodings.context.fields import Fields, fields_of_class
from patchstore.encodings.context.parameters import SILENT, bin_of
from patchstore.encodings.context.planes import class_words, plane
from patchstore.encodings.context.row_sets import RowSets, Totals, first_exponent, told_apart
from patchstore.encodings.context.stream import Array, Coded, TileSet, split
from patchstore.encodings.context.tiles import Layout, Tiling, tiling_of_part
from patchstore.format.records import TensorSpec

_WRITTEN_TOGETHER = 1 << 21
"""Elements. Temporaries of a few times this stay in the cache: twice as fast as all of 4096 x 4096."""
_COUNTED_TOGETHER = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Changes of some tiles."""

    tiles: TileSet
    at: npt.NDArray[np.int64]
    """Changed elements, ascending."""
    tile: npt.NDArray[np.int64]
    """Their tiles."""
    steps: npt.NDArray[np.int64]
    classes: npt.NDArray[np.uint8]
    words: dict[int, npt.NDArray[np.uint64]]
    """A bit for each element, by the classes that are not silent in all of the parts."""


def encode(spec: TensorSpec, old: Array, positions: Array, new: Array) -> Coded:
    """Encode a change of a tensor.

    Args:
        old: uint8 or uint16 [num_elements], all old bit patterns.
        positions: int64, ascending, of the elements with other bits than before; at least one.
        new: their new bit patterns.
    """
    cut = tiling_of_part(spec.shape, None, len(positions))
    return encode_all(spec.dtype, [cut], old, np.array([len(positions)]), positions, new, RowSets())[0]


def encode_all(
    dtype: str,
    cuts: Sequence[Tiling],
    old: Array,
    counts: Array,
    positions: Array,
    new: Array,
    row_sets: RowSets,
) -> list[Coded]:
    """Encode changes of parts of tensors of one dtype.

    Memory: several times that of the elements, see `tensors.grouped`.

    Args:
        cuts: how each part is cut into tiles; see `tiles.tiling_of_part`.
        old: uint8 or uint16, all old bit patterns, part after part.
        counts: int64 [T], changes of each; at least one.
        positions: int64, ascending in each part, of its elements with other bits than before.
        new: their new bit patterns.
        row_sets: those of the payload so far, which grow by what these parts need.
    """
    num = len(cuts)
    layout = Layout.of(cuts)
    ends = bounds_of(np.array([cut.num_elements for cut in cuts]))
    owner = np.repeat(np.arange(num), counts)
    at = positions + of_each(ends[:-1], owner)
    replaced = old[at]
    moves = np.zeros_like(old)
    moves[at] = by = steps(replaced, new)
    numbers = row_sets.choose(_totals(dtype, old, ends, owner, replaced, by))
    sets = [row_sets.sets[number] for number in numbers.tolist()]
    lo = np.array([each.lo for each in sets])
    nums = np.array([len(each.rows) for each in sets])
    rows = np.zeros((num, MAX_CLASSES, 3), dtype=np.uint8)
    rows[:, :, 0] = SILENT
    for number, each in enumerate(sets):
        rows[number, : len(each.rows)] = each.rows
    # Bits of an unchanged dense class are told too.
    wanted = np.flatnonzero((rows[:, :, 0] != SILENT).any(axis=0))
    sizes, num_tiles = layout.sizes(), [cut.num_tiles for cut in cuts]
    tile_owner = np.repeat(np.arange(num), num_tiles)
    parts = []
    for tiles in split(layout, np.arange(len(sizes)), _WRITTEN_TOGETHER):
        group = _group(
            layout.gather(old, tiles),
            layout.gather(moves, tiles),
            TileSet(tile_owner[tiles], sizes[tiles]),
            dtype,
            lo,
            nums,
            wanted,
        )
        parts.append(_streams(group, rows, 8 * WIDTHS[dtype]))
    lengths, data = (np.concatenate(part) for part in zip(*parts, strict=True))
    tiles_at = bounds_of(np.array(num_tiles)).tolist()
    bytes_at = bounds_of(lengths)[tiles_at].tolist()
    return [
        Coded(
            tiling=cuts[i],
            lo=sets[i].lo,
            rows=sets[i].rows,
            lengths=lengths[tiles_at[i] : tiles_at[i + 1]],
            data=data[bytes_at[i] : bytes_at[i + 1]],
        )
        for i in range(num)
    ]


def _totals(dtype: str, old: Array, ends: Array, owner: Array, replaced: Array, by: Array) -> Totals:
    """Count what decides on the rows of parts."""
    num = len(ends) - 1
    counts = np.zeros((num, 256), dtype=np.int64)
    for part in range(num):
        for start in range(int(ends[part]), int(ends[part + 1]), _COUNTED_TOGETHER):
            end = min(start + _COUNTED_TOGETHER, int(ends[part + 1]))
            counts[part] += np.bincount(exponents(old[start:end], dtype), minlength=256)
    exponent = exponents(replaced, dtype).astype(np.int64)
    changed = np.bincount(owner * 256 + exponent, minlength=256 * num).reshape(num, 256)
    base = first_exponent(changed)
    among = np.clip(exponent - base[owner], 0, MAX_CLASSES - 1)
    bins = bin_of(np.abs(by))
    num_bins = int(bins.max(initial=0)) + 1
    key = (owner * MAX_CLASSES + among) * num_bins + bins
    changes = np.bincount(key, minlength=num * MAX_CLASSES * num_bins).reshape(num, MAX_CLASSES, num_bins)
    return Totals(
        changed=changed, num_elements=told_apart(counts, base), changes=changes, width=WIDTHS[dtype]
    )


def _group(
    old: Array, moves: Array, tiles: TileSet, dtype: str, lo: Array, num_classes: Array, wanted: Array
) -> _Group:
    at = np.flatnonzero(moves != 0)
    tile = np.repeat(np.arange(len(tiles.sizes)), np.diff(np.searchsorted(at, tiles.ends)))
    owner = tiles.owner[tile]
    last = (num_classes - 1).astype(np.uint8)
    return _Group(
        tiles=tiles,
        at=at,
        tile=tile,
        steps=moves[at].view(f"i{moves.itemsize}").astype(np.int64),
        classes=classes(exponents(old[at], dtype), of_each(lo, owner), of_each(num_classes, owner)),
        words=class_words(
            old, dtype, tiles.of_elements(lo.astype(np.uint8)), tiles.of_elements(last), wanted
        ),
    )


def _streams(group: _Group, rows: Array, width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return the length of each tile's stream, and the streams."""
    lengths = np.zeros(len(group.tiles.sizes), dtype=np.int64)
    is_changed = np.bincount(group.tile, minlength=len(lengths)) > 0
    changed = np.flatnonzero(is_changed)
    if not len(changed):
        return lengths, np.empty(0, dtype=np.uint8)
    ends = group.tiles.ends
    tile = (is_changed.cumsum() - 1)[group.tile]
    of_tiles = of_each(rows, group.tiles.owner[changed])
    order = np.argsort(group.classes, kind="stable")
    bounds = np.searchsorted(group.classes[order], np.arange(MAX_CLASSES + 1))
    parts: list[Fields] = []
    for number in sorted(group.words):
        mine = order[bounds[number] : bounds[number + 1]]
        inside = plane(group.words[number])
        first = inside.rank(ends)
        parts += fields_of_class(
            of_tiles[:, number],
            inside.rank(group.at[mine]),
            tile[mine],
            group.steps[mine],
            first[:-1][changed],
            first[1:][changed],
            width,
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
    return lengths, ~data[ramps(kept) + np.repeat(starts, kept)]
