"""Encode what `compare` found in an index encoding, `gap` or `raw`: the data of a payload, and digest sums.

`count` comes first. It finds how many elements of each tile changed, and the first and the last of them. From
that follows where the part of each tile begins. `encode` writes the parts. A program takes one tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from patchstore.kernels.compare import FOUND_ANYWHERE, Found
from patchstore.kernels.digest import mix
from patchstore.kernels.segments import INTEGERS
from patchstore.tensors.elements import MAX_GAP

BLOCK = 64
"""Words that a program encodes at a time, two a thread."""
ROWS = 32
"""Tiles that a program counts: they have few changes each, and one at a time is only waiting."""

_STEP = tl.constexpr(MAX_GAP + 1)


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


@triton.jit(do_not_specialize=["first_tile", "end_tile"], do_not_specialize_on_alignment=[*FOUND_ANYWHERE])
def _count(
    places, new_words, old_words, offsets, counts, first_tile, end_tile, owners, masks,
    nums, firsts, lasts, strange, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Count the changed elements of ROWS tiles, and find the first and the last of each; see `Found`.

    Example, two bytes an element: words 0 and 5, of which the second and the first elements differ: 2 changed
    elements, the first at 1 and the last at 20.
    """
    tiles = first_tile + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count = tl.load(counts + tiles, mask=tiles < end_tile, other=0)
    found = count > 0
    offset = tl.load(offsets + tiles, mask=found, other=0)
    owner = tl.load(owners + tiles, mask=found, other=0)
    mask = tl.load(masks + owner, mask=found, other=0).to(tl.uint64)
    num = tl.zeros((ROWS, COLUMNS), tl.int32)
    odd = tl.zeros((ROWS, COLUMNS), tl.int32)
    for begin in range(0, tl.max(count), COLUMNS):
        nth = begin + tl.arange(0, COLUMNS)[None, :]
        inside = nth < count[:, None]
        word = offset[:, None] + nth
        new = tl.load(new_words + word, mask=inside, other=0)
        difference = new ^ tl.load(old_words + word, mask=inside, other=0)
        for k in tl.static_range(8 // WIDTH):
            differs = _differs(difference, k, WIDTH)
            num += differs.to(tl.int32)
            odd += (differs & ((_element(new, k, WIDTH) & mask[:, None]) == mask[:, None])).to(tl.int32)
    tl.store(nums + tiles, tl.sum(num, axis=1), mask=tiles < end_tile)
    odd_of_tile = tl.sum(odd, axis=1)
    tl.atomic_add(strange + owner, odd_of_tile, mask=found & (mask != 0) & (odd_of_tile > 0), sem="relaxed")
    end = offset + count - 1
    first = tl.load(new_words + offset, mask=found, other=0) ^ tl.load(
        old_words + offset, mask=found, other=0
    )
    last = tl.load(new_words + end, mask=found, other=0) ^ tl.load(old_words + end, mask=found, other=0)
    first_word = tl.load(places + offset, mask=found, other=0).to(tl.int32) & (_STEP - 1)
    last_word = tl.load(places + end, mask=found, other=0).to(tl.int32) & (_STEP - 1)
    tl.store(firsts + tiles, first_word * (8 // WIDTH) + _lowest(first, WIDTH).to(tl.int32), mask=found)
    tl.store(lasts + tiles, last_word * (8 // WIDTH) + _highest(last, WIDTH).to(tl.int32), mask=found)


# Where the data and the sums begin depends on how many tensors there are.
@triton.jit(
    do_not_specialize=["first_tile", "data"],
    do_not_specialize_on_alignment=["offsets", "counts", "sums", "lines"],
)
def _encode(
    starts, owners, indices, snapshot, places, new_words, old_words, offsets, counts, first_tile,
    bridges, before, ranks, wide, idx_at, val_at, data, sums, lines,
    TILE: tl.constexpr, WIDTH: tl.constexpr, INTEGER: tl.constexpr, GAPS: tl.constexpr,
    IN_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
        if IN_PARTS:
            first_at = tl.load(lines + 3 * owner)
            length = tl.load(lines + 3 * owner + 1)
            distance = tl.load(lines + 3 * owner + 2)
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
                at = position
                if IN_PARTS:
                    line = position // length
                    at = first_at + line * distance + (position - line * length)
                new_first, new_second = mix(at.to(tl.uint64), new_bits)
                old_first, old_second = mix(at.to(tl.uint64), _element(old, k, WIDTH))
                # What did not change adds nothing.
                first_sum += new_first - old_first
                second_sum += new_second - old_second
        tl.atomic_add(sums + 2 * owner, tl.sum(first_sum.to(tl.int64, bitcast=True)), sem="relaxed")
        tl.atomic_add(sums + 2 * owner + 1, tl.sum(second_sum.to(tl.int64, bitcast=True)), sem="relaxed")


def count(found: Found) -> torch.Tensor:
    """Count changed elements for each width of `Tiles.by_width`, after a comparison that found room for all.

    Counts those of `Found.strange` too. One launch an element width.
    """
    sums = []
    found.strange.zero_()
    for width, tiles in found.tiles.by_width.items():
        if len(tiles):
            _count[(triton.cdiv(len(tiles), ROWS),)](
                *(found.places, found.new_words, found.old_words, found.offsets, found.counts),
                *(tiles.start, tiles.stop, found.tiles.owners, found.masks),
                *(found.nums, found.firsts, found.lasts, found.strange),
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
    # others all go into a last place that is not read.
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


def encode(
    found: Found,
    order: Order,
    snapshot: int,
    block: torch.Tensor,
    *,
    gaps: bool,
    lines: torch.Tensor | None = None,
) -> None:
    """Write what was found and counted as the data of a payload; one launch an element width.

    Args:
        snapshot: address of the snapshot as `compare` left it; read where gaps are bridged.
        block: uint8, its memory aligned to 8 bytes. Receives per tensor how many elements are stated (int64),
            then per tensor by how much its two digest sums grow (int64 [num_tensors, 2], modulo 2**64), then
            the data. Has room for `head_bytes` and `Tiles.max_data_bytes`.
        gaps: encoding `gap`; otherwise `raw`.
        lines: int64 [num_tensors, 3], `Part.lines` of each, where the tensors are parts of others: the sums
            are those of elements at their positions there. What is stated are places in the part.
    """
    tiles, num_tensors = found.tiles, len(found.tiles.widths)
    head = block[: head_bytes(num_tensors)].view(torch.int64)
    sums = head[num_tensors:].zero_()
    stated = _stated(found, gaps=gaps)
    head[:num_tensors] = stated.nums
    entry_bytes = stated.nums[order.tensors] * order.widths
    entry_at = entry_bytes.cumsum(0) - entry_bytes
    idx_at, val_at = entry_at[order.idx], entry_at[order.val]
    for width, chosen in tiles.by_width.items():
        if len(chosen):
            _encode[(len(chosen),)](
                *(tiles.starts, tiles.owners, tiles.indices, snapshot),
                *(found.places, found.new_words, found.old_words, found.offsets, found.counts),
                *(chosen.start, stated.bridges, stated.before, stated.ranks, order.wide, idx_at, val_at),
                *(block.data_ptr() + head_bytes(num_tensors), sums, sums if lines is None else lines),
                TILE=tiles.words,
                WIDTH=width,
                INTEGER=INTEGERS[width],
                GAPS=gaps,
                IN_PARTS=lines is not None,
                BLOCK=BLOCK,
                num_warps=max(BLOCK // 64, 1),
            )
