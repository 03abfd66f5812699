"""The streams of tensors: which elements of each tile changed, and by how many steps.

A stream says nothing about elements that are likely to stay, class by class, so most of its bits are
ones; beyond its end a reader finds ones. An unchanged tile has no bytes.

Many small tensors are coded together, tile after tile, as one large tensor is: numpy's calls then cost
nothing beside the elements. What differs from tensor to tensor (classes, rows) is an array then, and of
one tensor an array of one value, with which numpy is as fast as with a number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from patchstore.encodings.context.bits import of_each, ramps
from patchstore.encodings.context.classes import MAX_CLASSES, WIDTHS, classes, exponents, moved, steps
from patchstore.encodings.context.fields import Fields, fields_of_class
from patchstore.encodings.context.lanes import Lanes
from patchstore.encodings.context.parameters import (
    BINS,
    SILENT,
    bin_of,
    choose_classes,
    choose_rows,
    valid_rows,
)
from patchstore.encodings.context.planes import class_words, count, plane
from patchstore.encodings.context.tiles import Layout, tiling
from patchstore.errors import CorruptObject
from patchstore.format.records import TensorSpec

_READ_TOGETHER = 1 << 24  # elements: many streams side by side, and bounded temporaries
_WRITTEN_TOGETHER = (
    1 << 21
)  # temporaries of a few times this stay in the cache: twice as fast as all of 4096 x 4096
_MOST_BYTES = 10
"""A change takes at most 77 bits: 1 + 17 for its place, a sign, 1 + 17 for its run, 40 for its magnitude."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """A change of one tensor."""

    lo: int
    """Exponents up to this one are in the first class."""
    rows: npt.NDArray[np.uint8]
    """[K, 3], the code of each class."""
    lengths: npt.NDArray[np.int64]
    """[num_tiles], bytes of each tile's stream."""
    data: npt.NDArray[np.uint8]
    """All streams, one after the other."""


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Some tiles of tensors of one dtype, their elements numbered tile after tile."""

    owner: npt.NDArray[np.int64]
    """[tiles], the tensor of each."""
    sizes: npt.NDArray[np.int64]
    """[tiles]"""

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """[tiles + 1], where each begins, and the end."""
        return _ends(self.sizes)

    def of_elements(self, values: Array) -> Array:
        """Return for each element the value (uint8) of its tensor; [1] where there is one tensor."""
        return values if len(values) == 1 else np.repeat(values[self.owner], self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Changes of some tiles."""

    tiles: _Tiles
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
    ends = _ends(np.array([spec.num_elements for spec in specs]))
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
            _Tiles(tile_owner[tiles], sizes[tiles]),
            dtype,
            lo,
            nums,
            wanted,
        )
        for tiles in _split(layout, np.arange(len(sizes)), _WRITTEN_TOGETHER)
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
    tiles_at = _ends(np.array(num_tiles)).tolist()
    bytes_at = _ends(lengths)[tiles_at].tolist()
    return [
        Coded(
            lo=int(lo[i]),
            rows=rows[i, : kept[i]],
            lengths=lengths[tiles_at[i] : tiles_at[i + 1]],
            data=data[bytes_at[i] : bytes_at[i + 1]],
        )
        for i in range(num)
    ]


def decode(
    spec: TensorSpec, coded: Coded, old: Array, where: str, tiles: Array | None = None
) -> tuple[npt.NDArray[np.int64], Array]:
    """Return the changed positions, int64 ascending, and their new bit patterns.

    Args:
        old: uint8 or uint16 [num_elements], all old bit patterns; of `tiles`, if those are given.
        where: names the change in errors.
        tiles: the tiles to decode, ascending; all by default.

    Raises:
        CorruptObject: the streams or their lengths break the format's rules.
    """
    _, positions, new = decode_all([spec], [coded], old, [where], None if tiles is None else [tiles])
    return positions, new


def decode_all(
    specs: Sequence[TensorSpec],
    coded: Sequence[Coded],
    old: Array,
    where: Sequence[str],
    tiles: Sequence[Array | None] | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Array]:
    """Decode changes of tensors of one dtype; as `decode`.

    Memory: several times that of the elements, see `tensors.grouped`.

    Args:
        old: uint8 or uint16, all old bit patterns, tensor after tensor.

    Returns:
        int64 [T], how many elements of each tensor change; their positions in it, ascending; their new bits.
    """
    dtype = specs[0].dtype
    layout = Layout.of([spec.shape for spec in specs])
    sizes = layout.sizes()
    num_tiles = np.array([tiling(spec.shape).num_tiles for spec in specs])
    rows, lengths = _checked(specs, coded, where, num_tiles, sizes)
    is_chosen = lengths > 0
    tiles_at = _ends(num_tiles).tolist()
    for number, wanted in enumerate(tiles or ()):
        if wanted is not None:
            mine = is_chosen[tiles_at[number] : tiles_at[number + 1]]
            among = np.zeros_like(mine)
            among[wanted] = True
            mine &= among
    data = coded[0].data if len(coded) == 1 else np.concatenate([each.data for each in coded])
    starts = _ends(lengths)
    lo = np.array([each.lo for each in coded], dtype=np.uint8)
    last = np.array([len(each.rows) - 1 for each in coded], dtype=np.uint8)
    owner = np.repeat(np.arange(len(specs)), num_tiles)
    is_changed = np.zeros(len(old), dtype=np.bool_)
    target = np.empty_like(old)
    for chosen in _split(layout, np.flatnonzero(is_chosen), _READ_TOGETHER):
        bits = layout.gather(old, chosen)
        group = _Tiles(owner[chosen], sizes[chosen])
        its_lengths = lengths[chosen]
        streams = data[starts[chosen[0]] : starts[chosen[-1] + 1]]
        if len(streams) > its_lengths.sum():  # others lie between them
            streams = data[ramps(its_lengths) + np.repeat(starts[chosen], its_lengths)]
        lanes = Lanes(streams, its_lengths, 8 * WIDTHS[dtype])
        of_class = class_words(bits, dtype, group.of_elements(lo), group.of_elements(last), _used(rows))
        at, by = _read(lanes, of_class, of_each(rows, group.owner), group.ends)
        if len(unread := lanes.unread()):
            tensor = int(group.owner[unread[0]])
            raise CorruptObject(
                f"{where[tensor]}: a stream of {specs[tensor].name!r} has bytes that no element needs"
            )
        still = np.flatnonzero(by & ((1 << 8 * WIDTHS[dtype]) - 1) == 0)
        if len(still):
            tensor = int(group.owner[np.searchsorted(group.ends, at[still[0]], side="right") - 1])
            raise CorruptObject(
                f"{where[tensor]}: a stream of {specs[tensor].name!r} changes an element by nothing"
            )
        new = np.empty_like(bits)
        new[at] = moved(bits[at], by)
        mask = np.zeros(len(bits), dtype=np.bool_)
        mask[at] = True
        layout.scatter(new, target, chosen)
        layout.scatter(mask, is_changed, chosen)
    positions = np.flatnonzero(is_changed)
    bounds = _ends(np.array([spec.num_elements for spec in specs]))
    counts = np.diff(np.searchsorted(positions, bounds))
    return counts, positions - np.repeat(bounds[:-1], counts), target[positions]


def _checked(
    specs: Sequence[TensorSpec], coded: Sequence[Coded], where: Sequence[str], num_tiles: Array, sizes: Array
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the rows of each tensor, silent ones to make 16, and the lengths of all tiles.

    Raises:
        CorruptObject: they break the format's rules.
    """
    for each, spec, place, num in zip(coded, specs, where, num_tiles.tolist(), strict=True):
        if not (1 <= len(each.rows) <= MAX_CLASSES and 0 <= each.lo <= 255):
            raise CorruptObject(f"{place}: classes of {spec.name!r} have no meaning")
        if len(each.lengths) != num:
            raise CorruptObject(
                f"{place}: {spec.name!r} has {num} tiles, but lengths of {len(each.lengths)} streams"
            )
    owner = np.repeat(np.arange(len(specs)), num_tiles)
    lengths = np.concatenate([each.lengths for each in coded])
    wrong = owner[(lengths < 0) | (lengths > _MOST_BYTES * sizes)]
    if len(wrong):
        tensor = int(wrong[0])
        raise CorruptObject(
            f"{where[tensor]}: a stream of {specs[tensor].name!r} is longer than its elements can be"
        )
    stated = np.diff(_ends(lengths)[_ends(num_tiles)])
    for each, spec, place, num in zip(coded, specs, where, stated.tolist(), strict=True):
        if len(each.data) != num:
            raise CorruptObject(
                f"{place}: {spec.name!r} has {len(each.data)} bytes of streams, but their lengths say {num}"
            )
    num_rows = np.array([len(each.rows) for each in coded])
    stored = np.concatenate([each.rows for each in coded])
    tensors = np.repeat(np.arange(len(specs)), num_rows)
    wrong = tensors[~valid_rows(stored)]
    if len(wrong):
        tensor = int(wrong[0])
        raise CorruptObject(f"{where[tensor]}: classes of {specs[tensor].name!r} have no meaning")
    rows = np.zeros((len(specs), MAX_CLASSES, 3), dtype=np.uint8)
    rows[:, :, 0] = SILENT
    rows[tensors, ramps(num_rows)] = stored
    return rows, lengths


def _ends(counts: Array) -> npt.NDArray[np.int64]:
    """Return where each begins that has so many, and the end of the last."""
    return np.concatenate([np.zeros(1, dtype=np.int64), counts.cumsum()])


def _split(layout: Layout, tiles: Array, num_elements: int) -> Iterator[Array]:
    """Cut ascending tiles into groups: of one run of tensors, of about so many elements."""
    num = max(1, len(tiles))
    if len(layout.runs) == 1:
        cut = layout.runs[0]
        # Whole bands are gathered fastest.
        num = max(1, num_elements // (cut.tile_rows * cut.tile_cols * cut.col_tiles)) * cut.col_tiles
    for start in range(0, len(tiles), num):
        yield tiles[start : start + num]


def _group(
    old: Array, moves: Array, tiles: _Tiles, dtype: str, lo: Array, num_classes: Array, wanted: Array
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


def _used(rows: Array) -> npt.NDArray[np.int64]:
    """Return the classes that may have changes."""
    return np.flatnonzero((rows[:, :, 0] != SILENT).any(axis=0))


def _read(
    lanes: Lanes, words: dict[int, npt.NDArray[np.uint64]], rows: Array, ends: Array
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where elements change, and by how many steps.

    Args:
        words: a bit for each element, by class, ascending.
        rows: uint8 [lanes, 16, 3], or [1, 16, 3] where all have the same.
        ends: int64 [lanes + 1], where each tile begins, and the end.
    """
    at, by = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for number, of_class in words.items():
        inside = plane(of_class)
        ranks, its_steps = lanes.read_class(rows[:, number], inside.rank(ends))
        at.append(inside.select(ranks))
        by.append(its_steps)
    return np.concatenate(at), np.concatenate(by)
