"""The streams of a tensor: which elements of each tile changed, and by how many steps.

A stream says nothing about elements that are likely to stay, class by class, so most of its bits are
ones; beyond its end a reader finds ones. An unchanged tile has no bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from patchstore.encodings.context.bits import ramps
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
from patchstore.encodings.context.planes import class_words, plane
from patchstore.encodings.context.tiles import Tiling, tiling
from patchstore.errors import CorruptObject
from patchstore.model import TensorSpec

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Changes of some tiles, their elements numbered tile after tile."""

    ends: npt.NDArray[np.int64]
    """[tiles + 1], where each tile begins, and the end."""
    at: npt.NDArray[np.int64]
    """Changed elements, ascending."""
    steps: npt.NDArray[np.int64]
    classes: npt.NDArray[np.uint8]
    words: dict[int, npt.NDArray[np.uint64]]
    """A bit for each element, by the classes with changes in the tensor."""


def encode(spec: TensorSpec, old: Array, positions: Array, new: Array) -> Coded:
    """Encode a change of a tensor.

    Args:
        old: uint8 or uint16 [num_elements], all old bit patterns.
        positions: int64, ascending, those of the elements whose bits differ; at least one.
        new: their new bit patterns.
    """
    cut = tiling(spec.shape)
    changed = np.bincount(exponents(old[positions], spec.dtype), minlength=256)
    lows, nums = choose_classes(changed[None])
    lo, num_classes = int(lows[0]), int(nums[0])
    exponent = np.flatnonzero(changed)
    wanted = np.unique(classes(exponent, lo, num_classes))
    target = old.copy()
    target[positions] = new
    groups = [
        _group(cut.gather(old, tiles), cut.gather(target, tiles), sizes, spec.dtype, lo, num_classes, wanted)
        for tiles, sizes in _split(cut, np.arange(cut.num_tiles), _WRITTEN_TOGETHER)
    ]
    del target

    num_elements = np.zeros((1, MAX_CLASSES), dtype=np.int64)
    changes = np.zeros((1, MAX_CLASSES, BINS), dtype=np.int64)
    for group in groups:
        for number, words in group.words.items():
            num_elements[0, number] += int(np.bitwise_count(words).sum(dtype=np.int64))
        key = group.classes * np.int64(BINS) + bin_of(np.abs(group.steps))
        changes += np.bincount(key, minlength=changes.size).reshape(changes.shape)
    num_elements[0, num_classes - 1] += spec.num_elements - num_elements.sum()
    nums, rows = choose_rows(num_elements, changes, nums, WIDTHS[spec.dtype])
    if int(nums[0]) != num_classes:
        groups = [_joined(group) for group in groups]
    rows = rows[0, : int(nums[0])]
    parts = [_streams(group, rows, 8 * WIDTHS[spec.dtype]) for group in groups]
    return Coded(
        lo=lo,
        rows=rows,
        lengths=np.concatenate([lengths for lengths, _ in parts]),
        data=np.concatenate([data for _, data in parts]),
    )


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
    cut = tiling(spec.shape)
    rows = coded.rows
    if not (1 <= len(rows) <= MAX_CLASSES and 0 <= coded.lo <= 255 and valid_rows(rows).all()):
        raise CorruptObject(f"{where}: classes of {spec.name!r} have no meaning")
    ends = np.concatenate([[0], coded.lengths.cumsum()])
    if len(coded.lengths) != cut.num_tiles or coded.lengths.min() < 0 or ends[-1] != len(coded.data):
        raise CorruptObject(
            f"{where}: {spec.name!r} has {cut.num_tiles} tiles and {len(coded.data)} bytes of streams, "
            f"but {len(coded.lengths)} lengths say {int(ends[-1])}"
        )
    if (coded.lengths > _MOST_BYTES * cut.sizes()).any():
        raise CorruptObject(f"{where}: a stream of {spec.name!r} is longer than its elements can be")
    chosen = np.flatnonzero(coded.lengths) if tiles is None else tiles[coded.lengths[tiles] > 0]
    is_changed = np.zeros(spec.num_elements, dtype=np.bool_)
    target = np.empty_like(old)
    for group, sizes in _split(cut, chosen, _READ_TOGETHER):
        bits = cut.gather(old, group)
        at, by = _read(spec, coded, bits, group, sizes, ends, where)
        new = np.empty_like(bits)
        new[at] = moved(bits[at], by)
        mask = np.zeros(len(bits), dtype=np.bool_)
        mask[at] = True
        cut.scatter(new, target, group)
        cut.scatter(mask, is_changed, group)
    positions = np.flatnonzero(is_changed)
    return positions, target[positions]


def _split(cut: Tiling, tiles: Array, num_elements: int) -> Iterator[tuple[Array, Array]]:
    """Cut ascending tiles into groups of about so many elements, and state their sizes."""
    bands = num_elements // (cut.tile_rows * cut.tile_cols * cut.col_tiles)
    num = max(1, bands) * cut.col_tiles
    sizes = cut.sizes()
    for start in range(0, len(tiles), num):
        group = tiles[start : start + num]
        yield group, sizes[group]


def _group(
    old: Array, new: Array, sizes: Array, dtype: str, lo: int, num_classes: int, wanted: Array
) -> _Group:
    at = np.flatnonzero(old != new)
    return _Group(
        ends=np.concatenate([[0], sizes.cumsum()]),
        at=at,
        steps=steps(old[at], new[at]),
        classes=classes(exponents(old[at], dtype), lo, num_classes),
        words=class_words(old, dtype, lo, num_classes, wanted),
    )


def _joined(group: _Group) -> _Group:
    """One class for all."""
    num_elements = int(group.ends[-1])
    words = np.full(num_elements // 64 + 1, 2**64 - 1, dtype=np.uint64)
    words[-1] = (1 << (num_elements & 63)) - 1
    return _Group(
        ends=group.ends,
        at=group.at,
        steps=group.steps,
        classes=np.zeros_like(group.classes),
        words={0: words},
    )


def _streams(group: _Group, rows: Array, width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return the length of each tile's stream, and the streams."""
    num_tiles = len(group.ends) - 1
    tile_of = np.repeat(np.arange(num_tiles), np.diff(np.searchsorted(group.at, group.ends)))
    is_changed = np.bincount(tile_of, minlength=num_tiles) > 0
    order = np.argsort(group.classes, kind="stable")
    bounds = np.searchsorted(group.classes[order], np.arange(len(rows) + 1))
    parts: list[Fields] = []
    for number in sorted(group.words):
        mine = order[bounds[number] : bounds[number + 1]]
        inside = plane(group.words[number])
        first = inside.rank(group.ends)
        part = fields_of_class(
            rows[number],
            inside.rank(group.at[mine]),
            tile_of[mine],
            group.steps[mine],
            first,
            is_changed,
            width,
        )
        parts.append(part)
    num_bits = np.zeros(num_tiles, dtype=np.int64)
    for part in parts:
        num_bits += part.num_bits
    num_bits *= is_changed
    num_bytes = -(-num_bits // 8)
    ends = num_bytes.cumsum()
    # What is written are the zeros: fields are complements, and all else stays one.
    zeros = np.zeros(int(ends[-1]) // 8 + 2, dtype=np.uint64)
    start = (ends - num_bytes) * 8
    for part in parts:
        part.write(zeros, start)
        start += part.num_bits
    data = zeros.view(np.uint8)
    told = np.flatnonzero(data)
    last = (
        told[np.maximum(np.searchsorted(told, ends) - 1, 0)] if len(told) else np.zeros(num_tiles, np.int64)
    )
    lengths = np.where(is_changed, last + 1 - (ends - num_bytes), 0)
    kept = ramps(lengths) + np.repeat(ends - num_bytes, lengths)
    return lengths, ~data[kept]


def _read(
    spec: TensorSpec, coded: Coded, bits: Array, tiles: Array, sizes: Array, ends: Array, where: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where elements of these tiles change, and by how many steps."""
    wanted = np.flatnonzero(coded.rows[:, 0] != SILENT)
    words = class_words(bits, spec.dtype, coded.lo, len(coded.rows), wanted)
    edges = np.concatenate([[0], sizes.cumsum()])
    width = 8 * WIDTHS[spec.dtype]
    lanes = Lanes(coded.data, ends[tiles], coded.lengths[tiles], width)
    found: list[tuple[Array, Array]] = []
    for number, of_class in words.items():
        inside = plane(of_class)
        first = inside.rank(edges)
        ranks, by = lanes.read_class(coded.rows[number], first)
        if len(ranks):
            found.append((inside.select(ranks), by))
    if not lanes.all_read():
        raise CorruptObject(f"{where}: a stream of {spec.name!r} has bytes that no element needs")
    if not found:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    at, by = (np.concatenate(part) for part in zip(*found, strict=True))
    if not (by & ((1 << width) - 1)).all():
        raise CorruptObject(f"{where}: a stream of {spec.name!r} changes an element by nothing")
    return at, by
