"""Decode changes of tensors, and refuse streams that break the format's rules.

The streams of many tiles are read side by side (`Lanes`): each step reads one code of every stream.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from patchstore.bucket.records import TensorSpec
from patchstore.codec.context.bits import Array, bounds_of, of_each, windows
from patchstore.codec.context.classes import WIDTHS, class_words, moved, plane
from patchstore.codec.context.coded import Coded
from patchstore.codec.context.rows import DENSE, RUNS, SILENT, SWAP, UNARY_LIMIT
from patchstore.codec.context.tiles import Layout, TileSet, split
from patchstore.errors import CorruptObject
from patchstore.tensors.columns import ramps

_MARGIN = 8  # bytes of ones after each stream: no window begins beyond its end
_MOST_ONES = 20  # read at once; 57 bits of a window then hold all of a change but a magnitude above one
_MOST_ELEMENTS = 1024  # of a dense class, noted at once

_U = np.uint64
_ONE = np.uint64(1)
_STOP = np.uint64(2**64 - 1 - (1 << _MOST_ONES))
_LOG2 = np.frexp(np.maximum(np.arange(RUNS[-1] + 1), 1).astype(np.float64))[1].astype(np.int64) - 1
_ENDLESS = 1 << 62
_STOP_RICE = np.uint64(2**64 - 1 - (1 << UNARY_LIMIT))
READ_TOGETHER = 1 << 24  # elements: many streams side by side, and bounded temporaries
_MOST_BYTES = 10
"""A change takes at most 77 bits: 1 + 17 for its place, a sign, 1 + 17 for its run, 40 for its magnitude."""


class Lanes:
    """Where each of some streams has been read to."""

    def __init__(self, data: Array, lengths: Array, width: int) -> None:
        """Read streams of these lengths, one after the other in `data`, of elements of `width` bits."""
        self._width = width
        self._lengths = lengths
        apart = np.full(int(lengths.sum()) + _MARGIN * (len(lengths) + 1), 0xFF, dtype=np.uint8)
        both = np.stack([lengths, np.full_like(lengths, _MARGIN)], axis=1)
        apart[: len(apart) - _MARGIN][np.repeat(np.tile([True, False], len(lengths)), both.reshape(-1))] = (
            data
        )
        self._begin = (lengths.cumsum() - lengths + _MARGIN * np.arange(len(lengths))) * 8
        self._windows = windows(apart)
        self._end = self._begin + lengths * 8
        self._at = self._begin.copy()

    def unread(self) -> npt.NDArray[np.int64]:
        """Return the streams that were not read into their last byte."""
        return np.flatnonzero(self._at - self._begin <= 8 * (self._lengths - 1))

    def read_class(self, rows: Array, first: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Read the next class of every stream; return ranks of changes, int64 ascending, and their steps.

        Args:
            rows: uint8 [lanes, 3], the class's code in each stream; [1, 3] where all have the same.
            first: int64 [lanes + 1], the rank at which each tile begins, and the end.
        """
        # Beyond its end a stream is ones: where that is reached, nothing of a sparse class changes any more.
        is_dense, has_any = rows[:, 0] == DENSE, first[1:] > first[:-1]
        is_sparse = ~is_dense & (rows[:, 0] != SILENT) & (self._at < self._end)
        found = []
        for read, wanted in ((self._read_sparse, is_sparse), (self._read_dense, is_dense)):
            lane = np.flatnonzero(has_any & wanted)
            if len(lane):
                found += read(rows if len(rows) == 1 else rows[lane], lane, first)
        if not found:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        ranks = np.concatenate([ranks for ranks, _ in found])
        steps = np.concatenate([steps for _, steps in found])
        # |steps| < 2**20 (Rice codes end below 24 << 15), so both fit a word, which sorts faster than two.
        both = np.sort((ranks << 21) | (steps + (1 << 20)))
        return both >> 21, (both & ((1 << 21) - 1)) - (1 << 20)

    def _window(self, at: Array) -> Array:
        window: Array = self._windows[at >> 3] >> (at & 7).view(_U)
        return window

    def _read_sparse(self, rows: Array, lane: Array, first: Array) -> list[tuple[Array, Array]]:
        runs = RUNS[rows[:, 0]]
        most_left = runs - 1  # behind the last whole run
        at, stop, rank, end = self._at[lane], self._end[lane], first[lane], first[lane + 1]
        magnitudes = _Magnitudes(self, rows, len(lane)) if rows[:, 1].any() else None
        found: list[tuple[Array, Array]] = []
        while len(lane):
            left = end - rank
            window = self._window(at)
            # At most so many ones: what fills the class, or what a window can tell.
            most = np.minimum((left + most_left) // runs, _MOST_ONES)
            ones = np.minimum(_ones(window & _STOP), most)
            hit = ones < most
            rank += ones * runs
            below = np.minimum(np.maximum(end - rank, 0), runs)
            window >>= ones.view(_U) + _ONE
            place, length = _truncated(window, *_codes(below))
            window >>= length.view(_U)
            at += ones
            all_hit = bool(hit.all())
            if all_hit:
                rank += place
                at += length + 2
            else:
                rank += place * hit
                at += (length + 2) * hit
            steps = 1 - 2 * (window & _ONE).view(np.int64)
            if magnitudes is not None:
                steps *= magnitudes.read(window >> _ONE, at, stop, hit)
            found.append((rank.copy(), steps) if all_hit else (rank[hit], steps[hit]))
            rank += hit
            np.minimum(at, stop, out=at)
            np.minimum(rank, end, out=rank)
            live = rank < end
            if np.count_nonzero(live) * 8 < 7 * len(lane):
                self._at[lane] = at
                lane, at, stop, rank, end = lane[live], at[live], stop[live], rank[live], end[live]
                runs, most_left = of_each(runs, live), of_each(most_left, live)
                if magnitudes is not None:
                    magnitudes.keep(live)
        return found

    def _read_dense(self, rows: Array, lane: Array, first: Array) -> list[tuple[Array, Array]]:
        code = rows[:, 2].astype(np.int64)
        at, stop, rank, end = self._at[lane], self._end[lane], first[lane], first[lane + 1]
        found: list[tuple[Array, Array]] = []
        while len(lane):
            # All lanes go on until the first has no elements left.
            num = min(int((end - rank).min()), _MOST_ELEMENTS)
            steps = np.empty((num, len(lane)), dtype=np.int32)
            swapped = code == SWAP
            for number in range(num):
                value, length, rest = self.rice(at, code & 0x7F)
                value ^= (value < 2) & swapped
                at += length
                at += value > 0
                np.minimum(at, stop, out=at)
                np.multiply(value, 1 - 2 * (rest & _ONE).view(np.int64), out=steps[number], casting="unsafe")
            row, column = np.nonzero(steps)
            found.append((rank[column] + row, steps[row, column].astype(np.int64)))
            rank += num
            live = rank < end
            if not live.all():
                self._at[lane] = at
                lane, at, stop, rank, end = lane[live], at[live], stop[live], rank[live], end[live]
                code = of_each(code, live)
        return found

    def rice(self, at: Array, k: Array) -> tuple[Array, Array, Array]:
        """Return values of Rice codes, their lengths, and what follows, a bit at least."""
        window = self._window(at)
        ones = _ones(window & _STOP_RICE)
        length = ones + (1 + k)
        value = ones
        if k.any():
            value = (ones << k) | ((window.view(np.int64) >> (ones + 1)) & ((1 << k) - 1))
        if ones.max() == UNARY_LIMIT:
            escapes = ones == UNARY_LIMIT
            raw = (window.view(np.int64) >> UNARY_LIMIT) & ((1 << self._width) - 1)
            value = np.where(escapes, raw, value)
            length = np.where(escapes, UNARY_LIMIT + self._width, length)
        return value, length, window >> length.view(_U)


class _Magnitudes:
    """How far each lane has come in runs of changes by one step."""

    def __init__(self, lanes: Lanes, rows: Array, num: int) -> None:
        self._lanes = lanes
        self._runs = RUNS[np.maximum(rows[:, 1], 1) - 1]
        self._codes = _codes(self._runs)
        self._k = rows[:, 2].astype(np.int64)
        # Changes of the open run, with the larger one. A run without end is open where none can be larger.
        self._left = np.where(rows[:, 1] > 0, np.zeros(num, dtype=np.int64), _ENDLESS)
        self._larger = np.zeros(num, dtype=np.bool_)  # whether a larger one ends it

    def keep(self, live: Array) -> None:
        self._left, self._larger = self._left[live], self._larger[live]
        if len(self._runs) > 1:
            self._runs, self._k = self._runs[live], self._k[live]
            self._codes = _codes(self._runs)

    def read(self, window: Array, at: Array, stop: Array, hit: Array) -> Array:
        """Return the magnitudes of changes, 1 where none is hit, and move `at`, where windows begin, on."""
        opens = np.flatnonzero(hit & (self._left == 0))
        if len(opens):
            bits = window[opens]
            plain = (bits & _ONE).astype(np.bool_)
            runs = of_each(self._runs, opens)
            codes = self._codes if len(self._runs) == 1 else _codes(runs)
            place, length = _truncated(bits >> _ONE, *codes)
            at[opens] += np.where(plain, 1, length + 1)
            self._left[opens] = np.where(plain, runs, place + 1)
            self._larger[opens] = ~plain
        self._left -= hit
        magnitude = np.ones(len(at), dtype=np.int64)
        larger = np.flatnonzero(hit & self._larger & (self._left == 0))
        if len(larger):
            # Beyond a stream's end all is as at its end, and soon after begins the next one.
            value, length, _ = self._lanes.rice(
                np.minimum(at[larger], stop[larger]), of_each(self._k, larger)
            )
            magnitude[larger] = 2 + value
            at[larger] += length
        return magnitude


def _ones(window: Array) -> npt.NDArray[np.int64]:
    """Return how many ones a window begins with."""
    ones: npt.NDArray[np.int64] = np.bitwise_count(window ^ (window + _ONE)).astype(np.int64) - 1
    return ones


def _codes(below: Array) -> tuple[Array, Array, Array]:
    """Return of codes of values below this: the shorter length, a mask of it, and the first longer value."""
    bits = _LOG2[below]
    power = np.int64(1) << bits
    return bits, power - 1, 2 * power - below


def _truncated(window: Array, bits: Array, low: Array, short: Array) -> tuple[Array, Array]:
    """Read truncated binary codes, as `_codes` describes them: return them and their lengths."""
    value = window.view(np.int64) & low
    is_long = value >= short
    longer = 2 * value + ((window >> bits.view(_U)) & _ONE).view(np.int64) - short
    return np.where(is_long, longer, value), bits + is_long


def decode_all(
    specs: Sequence[TensorSpec],
    coded: Coded,
    old: Array,
    tiles: Sequence[Array | None] | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Array]:
    """Decode changes of parts of tensors of one dtype, as `table.unpack` returned them.

    Args:
        specs: the tensors of the schema, which `coded.numbers` count.
        old: uint8 or uint16, all old bit patterns of the parts, one after the other.
        tiles: of each part those to decode, ascending; all by default.

    Returns:
        int64 [T], how many elements of each part change; their positions in the tensor, ascending; their new
        bits.
    """

    def refused(part: int, why: str) -> CorruptObject:
        return CorruptObject(f"{coded.key(part)}: a stream of {specs[coded.numbers[part]].name!r} {why}")

    dtype = specs[coded.numbers[0]].dtype
    layout = Layout.of(coded.cuts)
    # Of tiny tensors most tiles are as they were: no step takes those.
    told = np.flatnonzero(coded.lengths != 0)  # bools are listed several times as fast
    owner, sizes = np.searchsorted(coded.tiles_at, told, side="right") - 1, layout.sizes(told)
    rows, lengths, data = coded.sets.rows[coded.row_sets], coded.lengths[told], coded.data
    too_long = owner[lengths > _MOST_BYTES * sizes]
    if len(too_long):
        raise refused(too_long[0], "is longer than its elements can be")
    starts = bounds_of(lengths)[:-1]
    if tiles is not None:
        firsts = coded.tiles_at.tolist()
        wanted = [
            np.arange(first, end) if some is None else some + first
            for some, (first, end) in zip(tiles, pairwise(firsts), strict=True)
        ]
        is_wanted = np.isin(told, np.concatenate(wanted), assume_unique=True)
        told, owner, sizes, lengths, starts = (
            each[is_wanted] for each in (told, owner, sizes, lengths, starts)
        )
    lo, last = coded.lo.astype(np.uint8), (coded.num_classes - 1).astype(np.uint8)
    # The classes that may have changes.
    classes = np.flatnonzero((rows[:, :, 0] != SILENT).any(axis=0))
    is_changed = np.zeros(len(old), dtype=np.bool_)
    target = np.empty_like(old)
    end = 0
    for chosen in split(layout, told, READ_TOGETHER):
        mine = slice(end, end := end + len(chosen))
        bits = layout.gather(old, chosen)
        group = TileSet(owner[mine], sizes[mine])
        its_lengths, its_starts = lengths[mine], starts[mine]
        streams = data[its_starts[0] : its_starts[-1] + its_lengths[-1]]
        if len(streams) > its_lengths.sum():  # others lie between them
            streams = data[ramps(its_lengths, its_starts)]
        lanes = Lanes(streams, its_lengths, 8 * WIDTHS[dtype])
        of_class = class_words(bits, dtype, group.of_elements(lo), group.of_elements(last), classes)
        at, by = _read(lanes, of_class, of_each(rows, group.owner), group.ends)
        if len(unread := lanes.unread()):
            raise refused(group.owner[unread[0]], "has bytes that no element needs")
        still = np.flatnonzero(by & ((1 << 8 * WIDTHS[dtype]) - 1) == 0)
        if len(still):
            tile = np.searchsorted(group.ends, at[still[0]], side="right") - 1
            raise refused(group.owner[tile], "changes an element by nothing")
        new = np.empty_like(bits)
        new[at] = moved(bits[at], by)
        mask = np.zeros(len(bits), dtype=np.bool_)
        mask[at] = True
        layout.scatter(new, target, chosen)
        layout.scatter(mask, is_changed, chosen)
    positions = np.flatnonzero(is_changed)
    bounds = bounds_of(coded.cuts.num_elements)
    counts = np.diff(np.searchsorted(positions, bounds))
    local = positions - np.repeat(bounds[:-1], counts)
    return counts, coded.cuts.positions(local, counts), target[positions]


def _read(
    lanes: Lanes, words: dict[int, npt.NDArray[np.uint64]], rows: Array, ends: Array
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where elements change, and by how many steps. `ends`: where each tile begins, and the end."""
    at, by = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for number, of_class in words.items():
        inside = plane(of_class)
        ranks, its_steps = lanes.read_class(rows[:, number], inside.rank(ends))
        at.append(inside.select(ranks))
        by.append(its_steps)
    return np.concatenate(at), np.concatenate(by)
