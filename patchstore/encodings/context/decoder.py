"""Decode changes of tensors, and refuse streams that break the format's rules."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from patchstore.encodings.context.bits import bounds_of, of_each, ramps
from patchstore.encodings.context.classes import MAX_CLASSES, WIDTHS, moved
from patchstore.encodings.context.lanes import Lanes
from patchstore.encodings.context.parameters import SILENT, valid_rows
from patchstore.encodings.context.planes import class_words, plane
from patchstore.encodings.context.stream import Array, Coded, TileSet, split
from patchstore.encodings.context.tiles import Layout
from patchstore.errors import CorruptObject
from patchstore.format.records import TensorSpec

_READ_TOGETHER = 1 << 24  # elements: many streams side by side, and bounded temporaries
_MOST_BYTES = 10
"""A change takes at most 77 bits: 1 + 17 for its place, a sign, 1 + 17 for its run, 40 for its magnitude."""


def decode(
    spec: TensorSpec, coded: Coded, old: Array, where: str, tiles: Array | None = None
) -> tuple[npt.NDArray[np.int64], Array]:
    """Return the changed positions, int64 ascending, and their new bit patterns.

    Args:
        old: uint8 or uint16 [num_elements], all old bit patterns; of the part and `tiles` alone they count.
        where: names the change in errors.
        tiles: the tiles to decode, ascending; all by default.

    Raises:
        CorruptObject: the streams or their lengths break the format's rules.
    """
    some = None if tiles is None else [tiles]
    _, positions, new = decode_all([spec], [coded], coded.tiling.of_whole(old), [where], some)
    return positions, new


def decode_all(
    specs: Sequence[TensorSpec],
    coded: Sequence[Coded],
    old: Array,
    where: Sequence[str],
    tiles: Sequence[Array | None] | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Array]:
    """Decode changes of parts of tensors of one dtype; as `decode`.

    Memory: several times that of the elements, see `tensors.grouped`.

    Args:
        specs: the whole tensors.
        old: uint8 or uint16, all old bit patterns of the parts, one after the other.

    Returns:
        int64 [T], how many elements of each part change; their positions in the tensor, ascending; their new
        bits.
    """
    dtype = specs[0].dtype
    layout = Layout.of([each.tiling for each in coded])
    sizes = layout.sizes()
    num_tiles = np.array([each.tiling.num_tiles for each in coded])
    rows, lengths = _checked(specs, coded, where, num_tiles, sizes)
    is_chosen = lengths > 0
    tiles_at = bounds_of(num_tiles).tolist()
    for number, wanted in enumerate(tiles or ()):
        if wanted is not None:
            mine = is_chosen[tiles_at[number] : tiles_at[number + 1]]
            among = np.zeros_like(mine)
            among[wanted] = True
            mine &= among
    data = coded[0].data if len(coded) == 1 else np.concatenate([each.data for each in coded])
    starts = bounds_of(lengths)
    lo = np.array([each.lo for each in coded], dtype=np.uint8)
    last = np.array([len(each.rows) - 1 for each in coded], dtype=np.uint8)
    owner = np.repeat(np.arange(len(specs)), num_tiles)
    is_changed = np.zeros(len(old), dtype=np.bool_)
    target = np.empty_like(old)
    for chosen in split(layout, np.flatnonzero(is_chosen), _READ_TOGETHER):
        bits = layout.gather(old, chosen)
        group = TileSet(owner[chosen], sizes[chosen])
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
    bounds = bounds_of(np.array([each.tiling.num_elements for each in coded]))
    ends = np.searchsorted(positions, bounds)
    found = [
        each.tiling.positions(positions[ends[i] : ends[i + 1]] - bounds[i]) for i, each in enumerate(coded)
    ]
    return np.diff(ends), np.concatenate(found), target[positions]


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
    stated = np.diff(bounds_of(lengths)[bounds_of(num_tiles)])
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
