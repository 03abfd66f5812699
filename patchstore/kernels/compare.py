"""Compare all tensors with their snapshot at once, write what changed as a payload holds it, and apply it.

Tensors are strings of 8-byte words here, cut into tiles, none of which has parts of two tensors; a program
takes one tile. The number of launches does not depend on that of the tensors. Addresses are absolute, so a
tensor may be anywhere, and the snapshot in any memory that the device can address: pinned host memory, too.

A word with a change is kept as its place in the tile, its new bits and its old ones. Those of a tile are in
order and together, wherever the tile found room. Room that is short costs a second comparison.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from patchstore.kernels.mixing import mix
from patchstore.tensors.elements import MAX_GAP

MAX_INT32 = 2**31 - 1
TILE_BYTES = 8192
WARPS = 4
BLOCK = 64
"""Words that a program encodes at a time, two a thread."""
ROWS = 32
"""Tiles that a program counts: they have few changes each, and one at a time is only waiting."""
WORD = 8
"""Bytes. Tensors that do not begin at a multiple are read a byte at a time."""
ALIGNMENT = 256
"""Bytes: at multiples of it the tensors of a snapshot begin."""

_INTEGERS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
_STEP = tl.constexpr(MAX_GAP + 1)
_WORD = tl.constexpr(WORD)


@triton.jit(do_not_specialize=["first_tile", "capacity"])
def _compare(
    tensors,
    sizes,
    starts,
    owners,
    indices,
    picked,
    first_tile,
    snapshot,
    places,
    new_words,
    old_words,
    offsets,
    counts,
    cursor,
    capacity,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Compare a tile of TILE words; see `compare`.

    Where WHOLE, programs take tiles that are full and aligned and leave the others alone; otherwise they
    take the tiles in `picked`, putting words together from bytes.
    """
    tile = first_tile + tl.program_id(0)
    if not WHOLE:
        tile = tl.load(picked + tile)
    owner = tl.load(owners + tile)
    at = tl.load(indices + tile).to(tl.int64) * (TILE * _WORD)
    left = tl.load(sizes + owner) - at
    address = tl.load(tensors + owner)
    taken = True
    if WHOLE:
        taken = (left >= TILE * _WORD) & (address % _WORD == 0)
    if taken:
        start = tl.load(starts + owner) + at
        words = tl.arange(0, TILE)
        # Said to be aligned to a word and no more: with wider loads Triton moves both inputs through shared
        # memory, to the layout in which it stores what is scattered.
        held = tl.multiple_of((snapshot + start).to(tl.pointer_type(tl.int64)), _WORD)
        if WHOLE:
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


@triton.jit
def _differs(difference, k, WIDTH: tl.constexpr):
    """Return whether the k-th element of words differs, from what their bits XOR to."""
    if WIDTH < 8:
        difference = (difference >> (8 * WIDTH * k)) & ((1 << (8 * WIDTH)) - 1)
    return difference != 0


@triton.jit
def _highest(difference, WIDTH: tl.constexpr):
    """Return which element of words is the last that differs; 0 where none does."""
    found = tl.zeros_like(difference)
    for k in tl.static_range(1, 8 // WIDTH):
        found = tl.where(_differs(difference, k, WIDTH), k, found)
    return found


@triton.jit
def _lowest(difference, WIDTH: tl.constexpr):
    """Return which element of words is the first that differs, where one does."""
    found = tl.zeros_like(difference) + (8 // WIDTH - 1)
    for k in tl.static_range(1, 8 // WIDTH):
        found = tl.where(_differs(difference, 8 // WIDTH - 1 - k, WIDTH), 8 // WIDTH - 1 - k, found)
    return found


@triton.jit
def _element(words, k, WIDTH: tl.constexpr):
    """Return the bits of the k-th element of words, zero-extended to uint64."""
    bits = words.to(tl.uint64, bitcast=True)
    if WIDTH < 8:
        bits = (bits >> (8 * WIDTH * k)) & ((1 << (8 * WIDTH)) - 1)
    return bits


@triton.jit(do_not_specialize=["first_tile", "end_tile"])
def _count(
    places,
    new_words,
    old_words,
    offsets,
    counts,
    first_tile,
    end_tile,
    nums,
    firsts,
    lasts,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Count the changed elements of ROWS tiles, and find the first and the last of each.

    Example, two bytes an element: words 0 and 5, of which the second and the first elements differ: 2 changed
    elements, the first at 1 and the last at 20.
    """
    tiles = first_tile + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count = tl.load(counts + tiles, mask=tiles < end_tile, other=0)
    found = count > 0
    offset = tl.load(offsets + tiles, mask=found, other=0)
    num = tl.zeros((ROWS, COLUMNS), tl.int32)
    for begin in range(0, tl.max(count), COLUMNS):
        nth = begin + tl.arange(0, COLUMNS)[None, :]
        inside = nth < count[:, None]
        word = offset[:, None] + nth
        difference = tl.load(new_words + word, mask=inside, other=0)
        difference ^= tl.load(old_words + word, mask=inside, other=0)
        for k in tl.static_range(8 // WIDTH):
            num += _differs(difference, k, WIDTH).to(tl.int32)
    tl.store(nums + tiles, tl.sum(num, axis=1), mask=tiles < end_tile)
    end = offset + count - 1
    first = tl.load(new_words + offset, mask=found, other=0) ^ tl.load(
        old_words + offset, mask=found, other=0
    )
    last = tl.load(new_words + end, mask=found, other=0) ^ tl.load(old_words + end, mask=found, other=0)
    first_word = tl.load(places + offset, mask=found, other=0).to(tl.int32) & (_STEP - 1)
    last_word = tl.load(places + end, mask=found, other=0).to(tl.int32) & (_STEP - 1)
    tl.store(firsts + tiles, first_word * (8 // WIDTH) + _lowest(first, WIDTH).to(tl.int32), mask=found)
    tl.store(lasts + tiles, last_word * (8 // WIDTH) + _highest(last, WIDTH).to(tl.int32), mask=found)


@triton.jit(do_not_specialize=["first_tile"])
def _encode(
    starts,
    owners,
    indices,
    snapshot,
    places,
    new_words,
    old_words,
    offsets,
    counts,
    first_tile,
    bridges,
    before,
    ranks,
    wide,
    idx_at,
    val_at,
    data,
    sums,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    INTEGER: tl.constexpr,
    GAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the changes of a tile into a payload's data, and add up what they change in the digest sums.

    Example, gaps: the tile from 8192 on, with changes at its positions 0 and 5 and none before it, gives the
    gaps 8192 and 4. That from 131072 on gives 65535 and 65535 (two bridges), 0 and 4.
    """
    tile = first_tile + tl.program_id(0)
    count = tl.load(counts + tile)
    if count > 0:
        owner = tl.load(owners + tile)
        first = tl.load(indices + tile).to(tl.int64) * (TILE * (8 // WIDTH))
        offset = tl.load(offsets + tile)
        rank = tl.load(ranks + tile)
        vals = (data + tl.load(val_at + owner)).to(tl.pointer_type(INTEGER)) + rank
        idx = data + tl.load(idx_at + owner)
        is_wide = tl.load(wide + owner) != 0
        gaps = idx.to(tl.pointer_type(tl.uint16)) + rank
        lanes = tl.arange(0, BLOCK)
        last_before = tl.load(before + tile)
        if GAPS:
            num_bridges = tl.load(bridges + tile)
            held = (snapshot + tl.load(starts + owner)).to(tl.pointer_type(INTEGER))
            for begin in range(0, num_bridges, BLOCK):
                nth = begin + lanes
                crossed = last_before + (nth.to(tl.int64) + 1) * _STEP
                bits = tl.load(held + crossed, mask=nth < num_bridges, other=0)
                tl.store(gaps + nth, tl.full((BLOCK,), _STEP - 1, tl.uint16), mask=nth < num_bridges)
                tl.store(vals + nth, bits, mask=nth < num_bridges)
            last_before += num_bridges.to(tl.int64) * _STEP
            gaps += num_bridges
            vals += num_bridges
        first_sum = tl.zeros((BLOCK,), tl.uint64)
        second_sum = tl.zeros((BLOCK,), tl.uint64)
        done = 0
        for begin in range(0, count, BLOCK):
            nth = begin + lanes
            word = tl.load(places + offset + nth, mask=nth < count, other=0).to(tl.int64) & (_STEP - 1)
            new = tl.load(new_words + offset + nth, mask=nth < count, other=0)
            old = tl.load(old_words + offset + nth, mask=nth < count, other=0)
            difference = new ^ old
            last = tl.zeros((BLOCK,), tl.int64) + last_before
            if GAPS:
                follows = (nth < count) & (nth > 0)
                near = tl.load(places + offset + nth - 1, mask=follows, other=0).to(tl.int64) & (_STEP - 1)
                difference_near = tl.load(new_words + offset + nth - 1, mask=follows, other=0)
                difference_near ^= tl.load(old_words + offset + nth - 1, mask=follows, other=0)
                near = first + near * (8 // WIDTH) + _highest(difference_near, WIDTH)
                last = tl.where(follows, near, last)
            num = tl.zeros((BLOCK,), tl.int32)
            for k in tl.static_range(8 // WIDTH):
                num += _differs(difference, k, WIDTH).to(tl.int32)
            to = done + tl.cumsum(num) - num
            done += tl.sum(num)
            for k in tl.static_range(8 // WIDTH):
                changed = _differs(difference, k, WIDTH)
                position = first + word * (8 // WIDTH) + k
                if GAPS:
                    tl.store(gaps + to, (position - last - 1).to(tl.uint16), mask=changed)
                    last = tl.where(changed, position, last)
                # One of the two, by what the tensor needs.
                elif is_wide:
                    tl.store(idx.to(tl.pointer_type(tl.int64)) + rank + to, position, mask=changed)
                else:
                    narrow_idx = idx.to(tl.pointer_type(tl.int32)) + rank + to
                    tl.store(narrow_idx, position.to(tl.int32), mask=changed)
                new_bits = _element(new, k, WIDTH)
                tl.store(vals + to, new_bits.to(INTEGER), mask=changed)
                to += changed.to(tl.int32)
                new_first, new_second = mix(position.to(tl.uint64), new_bits)
                old_first, old_second = mix(position.to(tl.uint64), _element(old, k, WIDTH))
                # What did not change adds nothing.
                first_sum += new_first - old_first
                second_sum += new_second - old_second
        tl.atomic_add(sums + 2 * owner, tl.sum(first_sum.to(tl.int64, bitcast=True)), sem="relaxed")
        tl.atomic_add(sums + 2 * owner + 1, tl.sum(second_sum.to(tl.int64, bitcast=True)), sem="relaxed")


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

    @property
    def num_tiles(self) -> int:
        return self.first_tiles[-1]

    def by_width(self) -> dict[int, range]:
        """Return the tiles of tensors of each element width."""
        found: dict[int, range] = {}
        for tensor, width in enumerate(self.widths):
            begin = found[width].start if width in found else self.first_tiles[tensor]
            found[width] = range(begin, self.first_tiles[tensor + 1])
        return found

    def slow(self, addresses: Sequence[int]) -> list[int]:
        """Return the tiles that must be read a byte at a time, ascending: cut short, or not aligned."""
        found: list[int] = []
        tile_bytes = self.words * WORD
        for tensor, (size, address) in enumerate(zip(self.num_bytes, addresses, strict=True)):
            if address % WORD:
                found.extend(range(self.first_tiles[tensor], self.first_tiles[tensor + 1]))
            elif size % tile_bytes:
                found.append(self.first_tiles[tensor + 1] - 1)
        return found

    def max_data_bytes(self, nums: Sequence[int], *, gaps: bool) -> int:
        """Return how large the data of a payload is at most.

        Args:
            nums: changed elements of each element width, as `count` returns them.
        """
        total = 0
        for num, width in zip(nums, self.by_width(), strict=True):
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

    Args:
        tile_bytes: a power of two, at most 65,536: the distance of two changes in a tile is a gap.
    """
    assert WORD <= tile_bytes <= MAX_GAP + 1 and tile_bytes & (tile_bytes - 1) == 0
    assert list(widths) == sorted(widths, reverse=True)
    sizes = torch.tensor(num_bytes, dtype=torch.int64, device="cpu")
    none = torch.zeros(1, dtype=torch.int64, device="cpu")
    bounds = torch.cat([none, ((sizes + tile_bytes - 1) // tile_bytes).cumsum(0)])
    starts = torch.cat([none, ((sizes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).cumsum(0)])
    owners = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), bounds[1:] - bounds[:-1])
    indices = torch.arange(len(owners), device="cpu") - bounds[owners]
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
        tile_elements=(tile_bytes // torch.tensor(widths, dtype=torch.int64, device="cpu")).to(device),
    )


class Found:
    """What a comparison found, in room that is kept from one to the next."""

    def __init__(self, tiles: Tiles, capacity: int) -> None:
        """Allocate on the device of `tiles`: 18 bytes a changed word, 24 a tile.

        Args:
            capacity: changed words.
        """
        self.tiles = tiles
        self._device = tiles.owners.device
        self.places, self.new_words, self.old_words = self._room(capacity)
        self.offsets = torch.zeros(tiles.num_tiles, dtype=torch.int64, device=self._device)
        """Where the words of each tile begin; means nothing where it has none."""
        self.counts = torch.zeros(tiles.num_tiles, dtype=torch.int32, device=self._device)
        """Changed words of each tile."""
        self.nums, self.firsts, self.lasts = (torch.zeros_like(self.counts) for _ in range(3))
        """Of each tile the number of changed elements, and the first and last of them; see `count`."""
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


def compare(
    found: Found,
    tensors: torch.Tensor,
    picked: torch.Tensor,
    snapshot: int,
    tiles: range,
    slow: range,
    *,
    warps: int = WARPS,
) -> None:
    """Add to `found` how tensors differ from the snapshot, which stays as it is; at most two launches.

    Where `found.cursor` exceeds `found.capacity` afterwards, some tiles found no room: resize `found`, and
    compare all tensors again.

    Args:
        tensors: int64 [num_tensors], the address of each tensor's elements; they are contiguous.
        picked: int32, what `Tiles.slow` returns.
        snapshot: address of the snapshot, laid out as `Tiles.first_bytes` says.
        tiles: those to compare.
        slow: the places in `picked` of those among them; see `slow_among`.
    """
    cut_up = found.tiles
    for chosen, whole in ((tiles, True), (slow, False)):
        if len(chosen) == 0:
            continue
        _compare[(len(chosen),)](
            tensors,
            cut_up.sizes,
            cut_up.starts,
            cut_up.owners,
            cut_up.indices,
            picked,
            chosen.start,
            snapshot,
            found.places,
            found.new_words,
            found.old_words,
            found.offsets,
            found.counts,
            found.cursor,
            found.capacity,
            TILE=cut_up.words,
            WHOLE=whole,
            num_warps=warps,
        )


def apply(found: Found, snapshot: int) -> None:
    """Write what was found into the snapshot; one launch.

    Args:
        snapshot: its address.
    """
    tiles = found.tiles
    if tiles.num_tiles:
        _apply[(tiles.num_tiles,)](
            *(tiles.starts, tiles.owners, tiles.indices, snapshot, found.places, found.new_words),
            *(found.offsets, found.counts),
            TILE=tiles.words,
            BLOCK=BLOCK,
            num_warps=2,
        )


def slow_among(picked: Sequence[int], tiles: range) -> range:
    """Return the places in `picked` (ascending) of those tiles that are in `tiles`."""
    return range(bisect_left(picked, tiles.start), bisect_left(picked, tiles.stop))


def count(found: Found) -> torch.Tensor:
    """Count changed elements, after a comparison that found room for all; one launch an element width.

    Returns:
        int64 [num_widths], their number for each width of `Tiles.by_width`.
    """
    sums = []
    for width, tiles in found.tiles.by_width().items():
        if len(tiles):
            _count[(triton.cdiv(len(tiles), ROWS),)](
                found.places,
                found.new_words,
                found.old_words,
                found.offsets,
                found.counts,
                tiles.start,
                tiles.stop,
                found.nums,
                found.firsts,
                found.lasts,
                WIDTH=width,
                ROWS=ROWS,
                COLUMNS=32,
            )
        sums.append(found.nums[tiles.start : tiles.stop].sum())
    return torch.stack(sums) if sums else found.nums.new_zeros(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """In which order a payload holds the entries of tensors; an entry of no elements takes no room."""

    tensors: torch.Tensor
    """int64 [2 * num_tensors]: the tensor of each entry."""
    widths: torch.Tensor
    """int64 [2 * num_tensors]: bytes an element of each entry, never ascending."""
    idx: torch.Tensor
    """int64 [num_tensors]: which entry has the tensor's positions."""
    val: torch.Tensor
    """int64 [num_tensors]: which entry has its values."""
    wide: torch.Tensor
    """int32 [num_tensors]: whether positions are int64; for encoding `raw`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stated:
    """What is to be stated; per tile it means something only where the tile has changes."""

    bridges: torch.Tensor
    """int64 [num_tiles]: elements stated before the tile's first change, on the way to it."""
    before: torch.Tensor
    """int64 [num_tiles]: the last position in the tensor that changed before the tile, or -1."""
    ranks: torch.Tensor
    """int64 [num_tiles]: elements of the tensor stated before those of the tile."""
    nums: torch.Tensor
    """int64 [num_tensors]: elements stated."""


def _stated(found: Found, *, gaps: bool) -> _Stated:
    # A gap within a tile fits always, since no tile has more than 65,536 elements.
    tiles, nums = found.tiles, found.nums.to(torch.int64)
    changed = nums > 0
    base = tiles.indices * tiles.tile_elements[tiles.owners]
    # The tiles that have changes side by side, from place 1 on, so that each follows its predecessor. The
    # others all go into a last place that nobody reads.
    home = changed.cumsum(0)
    place = torch.where(changed, home, tiles.num_tiles + 1)
    lasts = nums.new_full((tiles.num_tiles + 2,), -1).scatter_(0, place, base + found.lasts)
    owners = tiles.owners.new_full((tiles.num_tiles + 2,), -1).scatter_(0, place, tiles.owners)
    previous = (home - 1).clamp_(min=0)
    before = torch.where(owners[previous] == tiles.owners, lasts[previous], -1)
    bridges = torch.zeros_like(nums)
    if gaps:
        bridges = torch.where(changed, (base + found.firsts - before - 1) >> 16, 0)
    ends = torch.cat([nums.new_zeros(1), (nums + bridges).cumsum(0)])
    begins = ends[tiles.bounds]
    return _Stated(
        bridges=bridges,
        before=before,
        ranks=ends[:-1] - begins[tiles.owners],
        nums=begins[1:] - begins[:-1],
    )


def head_bytes(num_tensors: int) -> int:
    """Bytes that `encode` writes before a payload's data: three integers a tensor."""
    return 24 * num_tensors


def encode(found: Found, order: Order, snapshot: int, block: torch.Tensor, *, gaps: bool) -> None:
    """Write what was found and counted as the data of a payload; one launch an element width.

    Args:
        snapshot: address of the snapshot as `compare` left it; read where gaps are bridged.
        block: uint8, its memory aligned to 8 bytes. Receives per tensor how many elements are stated (int64),
            then per tensor by how much its two digest sums grow (int64 [num_tensors, 2], modulo 2**64), then
            the data. Has room for `head_bytes` and `Tiles.max_data_bytes`.
        gaps: encoding `gap`; otherwise `raw`.
    """
    tiles, num_tensors = found.tiles, len(found.tiles.widths)
    head = block[: head_bytes(num_tensors)].view(torch.int64)
    sums = head[num_tensors:].zero_()
    stated = _stated(found, gaps=gaps)
    head[:num_tensors] = stated.nums
    entry_bytes = stated.nums[order.tensors] * order.widths
    entry_at = entry_bytes.cumsum(0) - entry_bytes
    idx_at, val_at = entry_at[order.idx], entry_at[order.val]
    for width, chosen in tiles.by_width().items():
        if len(chosen):
            _encode[(len(chosen),)](
                tiles.starts,
                tiles.owners,
                tiles.indices,
                snapshot,
                found.places,
                found.new_words,
                found.old_words,
                found.offsets,
                found.counts,
                chosen.start,
                stated.bridges,
                stated.before,
                stated.ranks,
                order.wide,
                idx_at,
                val_at,
                block.data_ptr() + head_bytes(num_tensors),
                sums,
                TILE=tiles.words,
                WIDTH=width,
                INTEGER=_INTEGERS[width],
                GAPS=gaps,
                BLOCK=BLOCK,
                num_warps=max(BLOCK // 64, 1),
            )
