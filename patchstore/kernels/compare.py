"""Compare all tensors with their snapshot at once, and apply what changed to the snapshot.

Tensors are strings of 8-byte words here, cut into tiles, none of which has parts of two tensors; a program
takes one tile. The number of launches does not depend on that of the tensors. Addresses are absolute, so a
tensor may be anywhere, and the snapshot in any memory that the device can address: pinned host memory, too.

Weights in float32 that are served in bfloat16 are rounded as they are read; there is no copy of them.

A word with a change is kept as its place in the tile, its new bits and its old ones. Those of a tile are in
order and together, wherever the tile found room. Room that is short costs a second comparison. `index_encode`
writes what was found as a payload holds it.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from patchstore.tensors.elements import MAX_GAP

MAX_INT32 = 2**31 - 1
TILE_BYTES = 8192
WARPS = 4
BLOCK = 64
"""Words that a program applies at a time, one a thread."""
WORD = 8
"""Bytes. Tensors that do not begin at a multiple are read a byte at a time."""
ALIGNMENT = 256
"""Bytes: at multiples of it the tensors of a snapshot begin."""

FOUND_ANYWHERE = ["offsets", "counts", "nums", "firsts", "lasts", "strange", "masks"]
"""Tables of `Found`, of which kernels also take those of neighbouring tiles or tensors.

Triton would compile a kernel for each alignment, which takes a second in the middle of a run.
"""

_STEP = tl.constexpr(MAX_GAP + 1)
_WORD = tl.constexpr(WORD)
_INFINITE = tl.constexpr(0x7F800000)
"""Bits of float32."""
_NAN = tl.constexpr(0x7FFF)
"""Of bfloat16, as the device's own instruction makes of any NaN."""


@triton.jit
def bfloat16_of(bits):
    """Round float32 to bfloat16, ties to even; both as bits, int32."""
    # In whole numbers: Triton's interpreter cuts the rest off.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) <= _INFINITE, rounded & 0xFFFF, _NAN)


@triton.jit
def keep(tile, words, new, old, places, new_words, old_words, offsets, counts, cursor, capacity):
    """Add the words of a tile that changed to what was found, if there is room; see `Found`."""
    changed = new != old
    count = tl.sum(changed.to(tl.int32))
    if count > 0:
        offset = tl.atomic_add(cursor, count.to(tl.int64), sem="relaxed")
        if offset + count <= capacity:
            place = tl.cumsum(changed.to(tl.int32)) - changed.to(tl.int32)
            tl.store(places + offset + place, words.to(tl.uint16), mask=changed)
            tl.store(new_words + offset + place, new, mask=changed)
            tl.store(old_words + offset + place, old, mask=changed)
            tl.store(offsets + tile, offset)
            tl.store(counts + tile, count)


@triton.jit(
    do_not_specialize=["first_tile", "capacity"], do_not_specialize_on_alignment=["offsets", "counts"]
)
def _compare(
    tensors, sizes, starts, owners, indices, picked, first_tile, snapshot,
    places, new_words, old_words, offsets, counts, cursor, capacity,
    TILE: tl.constexpr, WHOLE: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Compare a tile of TILE words; see `compare`.

    Where WHOLE, programs take tiles that are full and aligned and leave the others alone; otherwise they
    take the tiles in `picked`, putting words together from bytes. Where it ROUNDS, they take those of tensors
    in float32 alone.
    """
    tile = first_tile + tl.program_id(0)
    if not WHOLE:
        tile = tl.load(picked + tile)
    owner = tl.load(owners + tile)
    at = tl.load(indices + tile).to(tl.int64) * (TILE * _WORD)
    left = tl.load(sizes + owner) - at
    address = tl.load(tensors + owner)
    taken = True
    if ROUNDS:
        taken = address < 0
    elif WHOLE:
        taken = (left >= TILE * _WORD) & (address > 0) & (address % _WORD == 0)
    if taken:
        start = tl.load(starts + owner) + at
        words = tl.arange(0, TILE)
        # Said to be aligned to a word and no more: with wider loads Triton moves both inputs through shared
        # memory, to the layout in which it stores what is scattered.
        held = tl.multiple_of((snapshot + start).to(tl.pointer_type(tl.int64)), _WORD)
        if ROUNDS:
            # A number of the snapshot has two bytes, and four here.
            given = (2 * at - address).to(tl.pointer_type(tl.int32))
            if (left >= TILE * _WORD) & (address % 16 == 0):
                four = tl.arange(0, 4)[None, :]
                numbers = bfloat16_of(tl.load(tl.multiple_of(given, 16) + (words[:, None] * 4 + four)))
                new = tl.sum(numbers.to(tl.int64) << (four * 16), axis=1)
                old = tl.load(held + words)
            else:
                new = tl.zeros((TILE,), tl.int64)
                for k in tl.static_range(4):
                    inside = (words * 4 + k) * 2 < left
                    number = bfloat16_of(tl.load(given + words * 4 + k, mask=inside, other=0))
                    new |= number.to(tl.int64) << (16 * k)
                old = tl.load(held + words, mask=words * _WORD < left, other=0)
        elif WHOLE:
            source = tl.multiple_of((address + at).to(tl.pointer_type(tl.int64)), _WORD)
            new = tl.load(source + words)
            old = tl.load(held + words)
        else:
            source = (address + at).to(tl.pointer_type(tl.uint8))
            new = tl.zeros((TILE,), tl.int64)
            for k in tl.static_range(_WORD):
                byte = tl.load(source + words * _WORD + k, mask=words * _WORD + k < left, other=0)
                new |= byte.to(tl.int64) << (8 * k)
            # The snapshot is padded with zeros up to whole words.
            old = tl.load(held + words, mask=words * _WORD < left, other=0)
        keep(
            tile, words, new, old,
            places, new_words, old_words, offsets, counts, cursor, capacity,
        )  # fmt: skip


@triton.jit
def _apply(
    starts, owners, indices, snapshot, places, words, offsets, counts, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write a tile's changed words into the snapshot."""
    tile = tl.program_id(0)
    count = tl.load(counts + tile)
    if count > 0:
        offset = tl.load(offsets + tile)
        at = tl.load(starts + tl.load(owners + tile))
        at += tl.load(indices + tile).to(tl.int64) * (TILE * _WORD)
        held = (snapshot + at).to(tl.pointer_type(tl.int64))
        for begin in range(0, count, BLOCK):
            nth = begin + tl.arange(0, BLOCK)
            word = tl.load(places + offset + nth, mask=nth < count, other=0).to(tl.int64) & (_STEP - 1)
            bits = tl.load(words + offset + nth, mask=nth < count, other=0)
            tl.store(held + word, bits, mask=nth < count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How tensors are cut into tiles, and where each is in the snapshot. All tables: 8 bytes a tile."""

    num_bytes: tuple[int, ...]
    """Of each tensor."""
    widths: tuple[int, ...]
    """Bytes an element of each tensor, never ascending."""
    words: int
    """Words of a full tile, a power of two."""
    first_tiles: tuple[int, ...]
    """Of each tensor, and the number of all tiles: [num_tensors + 1]."""
    first_bytes: tuple[int, ...]
    """Where each tensor begins in the snapshot, and the snapshot's size: [num_tensors + 1]."""
    owners: torch.Tensor
    """int32 [num_tiles]: the tensor that a tile is of."""
    indices: torch.Tensor
    """int32 [num_tiles]: which of its tensor's tiles it is."""
    sizes: torch.Tensor
    """int64, `num_bytes`."""
    starts: torch.Tensor
    """int64, `first_bytes`."""
    bounds: torch.Tensor
    """int64, `first_tiles`."""
    tile_elements: torch.Tensor
    """int64 [num_tensors]: elements of a full tile."""
    by_width: Mapping[int, range]
    """The tiles of tensors of each element width."""

    @property
    def num_tiles(self) -> int:
        return self.first_tiles[-1]

    def slow(self, addresses: Sequence[int]) -> list[int]:
        """Return the tiles that must be read a byte at a time, ascending: cut short, or not aligned.

        `addresses` as in `Given`.
        """
        found: list[int] = []
        tile_bytes = self.words * WORD
        for tensor, (size, address) in enumerate(zip(self.num_bytes, addresses, strict=True)):
            if address < 0:
                continue
            if address % WORD:
                found.extend(range(self.first_tiles[tensor], self.first_tiles[tensor + 1]))
            elif size % tile_bytes:
                found.append(self.first_tiles[tensor + 1] - 1)
        return found

    def max_data_bytes(self, nums: Sequence[int], *, gaps: bool) -> int:
        """Return how large the data of a payload is at most, where `count` returned `nums`."""
        total = 0
        for num, width in zip(nums, self.by_width, strict=True):
            numels = [
                size // width for size, own in zip(self.num_bytes, self.widths, strict=True) if own == width
            ]
            if gaps:
                total += (num + sum(numel // (MAX_GAP + 1) for numel in numels)) * (2 + width)
            else:
                total += num * ((8 if max(numels) > MAX_INT32 else 4) + width)
        return total


def cut(
    num_bytes: Sequence[int], widths: Sequence[int], device: torch.device, *, tile_bytes: int = TILE_BYTES
) -> Tiles:
    """Cut tensors of these sizes and element widths (wide ones first) into tiles; the tables are on `device`.

    The distance of two changes in a tile must be a gap, so tiles have at most 65,536 bytes.
    """
    assert WORD <= tile_bytes <= MAX_GAP + 1 and tile_bytes & (tile_bytes - 1) == 0
    assert list(widths) == sorted(widths, reverse=True)
    sizes = torch.tensor(num_bytes, dtype=torch.int64, device="cpu")
    none = torch.zeros(1, dtype=torch.int64, device="cpu")
    bounds = torch.cat([none, ((sizes + tile_bytes - 1) // tile_bytes).cumsum(0)])
    starts = torch.cat([none, ((sizes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).cumsum(0)])
    owners = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), bounds[1:] - bounds[:-1])
    indices = torch.arange(len(owners), device="cpu") - bounds[owners]
    nums = torch.bincount(torch.tensor(widths, dtype=torch.int64, device="cpu"), bounds.diff().double())
    by_width, first = dict[int, range](), 0
    for width in sorted(set(widths), reverse=True):
        by_width[width] = range(first, first := first + int(nums[width]))
    return Tiles(
        num_bytes=tuple(num_bytes),
        widths=tuple(widths),
        words=tile_bytes // WORD,
        first_tiles=tuple(bounds.tolist()),
        first_bytes=tuple(starts.tolist()),
        owners=owners.to(device, torch.int32),
        indices=indices.to(device, torch.int32),
        sizes=sizes.to(device),
        starts=starts.to(device),
        bounds=bounds.to(device),
        by_width=by_width,
        tile_elements=(tile_bytes // torch.tensor(widths, dtype=torch.int64, device="cpu")).to(device),
    )


class Given:
    """Where tensors are that are to be compared with a snapshot."""

    def __init__(self, tiles: Tiles, addresses: Sequence[int]) -> None:
        """Make the tables, on the device of `tiles`.

        Args:
            addresses: of each tensor's elements, which are contiguous; 0 of those that will not be compared.
                Negative of those in float32 whose snapshot is in bfloat16.
        """
        device = tiles.owners.device
        self.addresses = [*addresses]
        self.slow = tiles.slow(addresses)
        """Tiles that are read a byte at a time, ascending."""
        numbers = np.array(addresses, dtype=np.int64)
        self.tensors = torch.from_numpy(numbers).to(device, non_blocking=True)
        """int64 [num_tensors]: `addresses`."""
        self.picked = torch.tensor(self.slow, dtype=torch.int32, device="cpu").to(device, non_blocking=True)
        """int32: `slow`."""
        self.same, self.rounded = _around(tiles, numbers > 0), _around(tiles, numbers < 0)
        """Tiles from the first to the last of those that are read as they are; and of those in float32."""


def _around(tiles: Tiles, which: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> range:
    numbers = np.flatnonzero(which)
    if not len(numbers):
        return range(0)
    return range(tiles.first_tiles[numbers[0]], tiles.first_tiles[numbers[-1] + 1])


class Found:
    """What a comparison found, in room that is kept from one to the next."""

    def __init__(self, tiles: Tiles, capacity: int) -> None:
        """Allocate on the device of `tiles`: 18 bytes for each changed word, and 24 a tile."""
        self.tiles = tiles
        self._device = tiles.owners.device
        self.places, self.new_words, self.old_words = self._room(capacity)
        self.offsets = torch.zeros(tiles.num_tiles, dtype=torch.int64, device=self._device)
        """Where the words of each tile begin; means nothing where it has none."""
        self.counts = torch.zeros(tiles.num_tiles, dtype=torch.int32, device=self._device)
        """Changed words of each tile."""
        self.nums, self.firsts, self.lasts = (torch.zeros_like(self.counts) for _ in range(3))
        """Of each tile the number of changed elements, and the first and last of them; see `count`."""
        self.masks = torch.zeros(len(tiles.widths), dtype=torch.int64, device=self._device)
        """Of each tensor, bits that are all 1 in an element that is infinite or NaN; 0 to look for none."""
        self.strange = torch.zeros(len(tiles.widths), dtype=torch.int32, device=self._device)
        """Of each tensor with a mask, the changed elements whose new bits are such ones; see `count`."""
        self.cursor = torch.zeros(1, dtype=torch.int64, device=self._device)
        """Changed words, whether or not there was room for them."""

    @property
    def capacity(self) -> int:
        return self.places.numel()

    def _room(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            torch.empty(max(capacity, 1), dtype=torch.int16, device=self._device),
            torch.empty(max(capacity, 1), dtype=torch.int64, device=self._device),
            torch.empty(max(capacity, 1), dtype=torch.int64, device=self._device),
        )

    def clear(self) -> None:
        """Forget what was found."""
        self.counts.zero_()
        self.cursor.zero_()

    def resize(self, capacity: int) -> None:
        """Make room for so many changed words, and forget what was found."""
        # The old room goes first: both may not fit.
        self.places, self.new_words, self.old_words = self._room(0)
        self.places, self.new_words, self.old_words = self._room(capacity)
        self.clear()

    def grow(self, capacity: int, kept: int, reader: torch.cuda.Stream | None) -> None:
        """Make room for so many changed words, and keep the first ones; a stream may still read those."""
        held, room = (self.places, self.new_words, self.old_words), self._room(capacity)
        for old, new in zip(held, room, strict=True):
            new[:kept].copy_(old[:kept])
            if reader is not None:
                old.record_stream(reader)
        # All at once, as there may be no memory for the last one.
        self.places, self.new_words, self.old_words = room

    def among(self, tiles: Tiles, first_tensor: int, first_tile: int) -> "Found":
        """Return what is found of neighbouring tensors, as `tiles` are: the same memory, until it grows."""
        found = copy(self)
        found.tiles = tiles
        for num, first, names in (
            (tiles.num_tiles, first_tile, ("offsets", "counts", "nums", "firsts", "lasts")),
            (len(tiles.widths), first_tensor, ("masks", "strange")),
        ):
            for name in names:
                setattr(found, name, getattr(self, name)[first : first + num])
        return found


def compare(found: Found, given: Given, snapshot: int, tiles: range, *, warps: int = WARPS) -> None:
    """Add to `found` how tensors differ from the snapshot, which stays as it is; at most three launches.

    Where `found.cursor` exceeds `found.capacity` afterwards, some tiles found no room: resize `found`, and
    compare all tensors again.

    Args:
        given: the tensors, of `found.tiles`.
        snapshot: address of the snapshot, laid out as `Tiles.first_bytes` says.
        tiles: those to compare, of tensors that are given.
    """
    cut_up = found.tiles
    same, rounded = overlap(tiles, given.same), overlap(tiles, given.rounded)
    slow = within(given.slow, tiles, range(len(given.slow)))
    for chosen, whole, rounds in ((same, True, False), (slow, False, False), (rounded, True, True)):
        if len(chosen) == 0:
            continue
        _compare[(len(chosen),)](
            *(given.tensors, cut_up.sizes, cut_up.starts, cut_up.owners, cut_up.indices, given.picked),
            *(chosen.start, snapshot, found.places, found.new_words, found.old_words),
            *(found.offsets, found.counts, found.cursor, found.capacity),
            TILE=cut_up.words,
            WHOLE=whole,
            ROUNDS=rounds,
            num_warps=warps,
        )


def apply(found: Found, snapshot: int) -> None:
    """Write what was found into the snapshot at this address; one launch."""
    tiles = found.tiles
    if tiles.num_tiles:
        _apply[(tiles.num_tiles,)](
            *(tiles.starts, tiles.owners, tiles.indices, snapshot, found.places, found.new_words),
            *(found.offsets, found.counts),
            TILE=tiles.words,
            BLOCK=BLOCK,
            num_warps=2,
        )


def overlap(some: range, others: range) -> range:
    return range(max(some.start, others.start), min(some.stop, others.stop))


def within(listed: Sequence[int], tiles: range, places: range) -> range:
    """Return the places in a list of those of `tiles`; only `places` are looked at, which ascend."""
    first = bisect_left(listed, tiles.start, places.start, places.stop)
    return range(first, bisect_left(listed, tiles.stop, first, places.stop))
