"""Encode changes of tensors: choose classes and codes from the changes, and write the streams."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from patchstore.encodings.context.bits import bounds_of, of_each, ramps
from patchstore.encodings.context.classes import MAX_CLASSES, WIDTHS, classes, exponents, steps
from patchstore.encodings.context.fields import Fields, fields_of_class
from patchstore.encodings.context.parameters import BINS, bin_of, choose_classes, choose_rows
from patchstore.encodings.context.planes import class_words, count, plane
from patchstore.encodings.context.stream import Array, Coded, TileSet, split
from patchstore.encodings.context.tiles import Layout, tiling
from patchstore.format.records import TensorSpec

_WRITTEN_TOGETHER = 1 << 21
"""Elements. Temporaries of a few times this stay in the cache: twice as fast as all of 4096 x 4096."""


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
    """A bit for each element, by the classes with changes in any of the tensors."""


def encode(spec: TensorSpec, old: Array, positions: Array, new: Array) -> Coded:
    """Encode a change of a tensor.

    Args:
        old: uint8 or uint16 [num_elements], all old bit patterns.
        positions: int64, ascending, of the elements with other bits than before; at least one.
        new: their new bit patterns.
    """
    return encode_all([spec], old, np.array([len(positions)]), positions, new)[0]


def encode_all(
    specs: Sequence[TensorSpec], old: Array, counts: Array, positions: Array, new: Array
) -> list[Coded]:
    """Encode changes of tensors of one dtype. The bytes are those that `encode` makes of each.

    Memory: several times that of the elements, see `tensors.grouped`.

    Args:
        old: uint8 or uint16, all old bit patterns, tensor after tensor.
        counts: int64 [T], changes of each; at least one.
        positions: int64, ascending in each tensor, of its elements with other bits than before.
        new: their new bit patterns.
    """
    num, dtype = len(specs), specs[0].dtype
    layout = Layout.of([spec.shape for spec in specs])
    ends = bounds_of(np.array([spec.num_elements for spec in specs]))
    owner = np.repeat(np.arange(num), counts)
    at = positions + of_each(ends[:-1], owner)
    replaced = old[at]
    moves = np.zeros_like(old)
    moves[at] = steps(replaced, new)
    old_exponents = exponents(replaced, dtype)
    changed = np.bincount(owner * 256 + old_exponents, minlength=256 * num).reshape(num, 256)
    lo, nums = choose_classes(changed)
    wanted = np.flatnonzero(np.bincount(classes(old_exponents, of_each(lo, owner), of_each(nums, owner))))
    sizes, num_tiles = layout.sizes(), [tiling(spec.shape).num_tiles for spec in specs]
    tile_owner = np.repeat(np.arange(num), num_tiles)
    groups = [
        _group(
            layout.gather(old, tiles),
            layout.gather(moves, tiles),
            TileSet(tile_owner[tiles], sizes[tiles]),
            dtype,
            lo,
            nums,
            wanted,
        )
        for tiles in split(layout, np.arange(len(sizes)), _WRITTEN_TOGETHER)
    ]
    del moves

    num_elements = np.zeros((num, MAX_CLASSES), dtype=np.int64)
    changes = np.zeros((num, MAX_CLASSES, BINS), dtype=np.int64)
    for group in groups:
        tiles = group.tiles
        bounds = tiles.ends[np.searchsorted(tiles.owner, np.arange(num + 1))]
        for number, words in group.words.items():
            num_elements[:, number] += count(words, bounds)
        key = (tiles.owner[group.tile] * MAX_CLASSES + group.classes) * BINS + bin_of(np.abs(group.steps))
        changes += np.bincount(key, minlength=changes.size).reshape(changes.shape)
    num_elements[np.arange(num), nums - 1] += np.diff(ends) - num_elements.sum(axis=1)
    kept, rows = choose_rows(num_elements, changes, nums, WIDTHS[dtype])
    joined = kept != nums
    if joined.any():
        groups = [_joined(group, joined) for group in groups]
    parts = [_streams(group, rows, 8 * WIDTHS[dtype]) for group in groups]
    lengths, data = (np.concatenate(part) for part in zip(*parts, strict=True))
    tiles_at = bounds_of(np.array(num_tiles)).tolist()
    bytes_at = bounds_of(lengths)[tiles_at].tolist()
    return [
        Coded(
            lo=int(lo[i]),
            rows=rows[i, : kept[i]],
            lengths=lengths[tiles_at[i] : tiles_at[i + 1]],
            data=data[bytes_at[i] : bytes_at[i + 1]],
        )
        for i in range(num)
    ]


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


def _joined(group: _Group, joined: Array) -> _Group:
    """One class for all elements of some tensors."""
    tiles = group.tiles
    words = np.zeros(int(tiles.ends[-1]) // 64 + 1, dtype=np.uint64)
    every = np.repeat(joined[tiles.owner], tiles.sizes)
    packed = np.packbits(every, bitorder="little")
    words.view(np.uint8)[: len(packed)] = packed
    others = {} if joined.all() else group.words
    return replace(
        group,
        classes=np.where(joined[tiles.owner[group.tile]], 0, group.classes),
        words=others | {0: words | others[0] if 0 in others else words},
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
