"""What one version stores, brought to the device: gaps as they are, and coded deltas decoded there.

Only the tiles that this rank holds are decoded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket import records
from patchstore.bucket.records import Schema
from patchstore.codec.context import Coded, Cuts, RowSets, encode_all, is_coded, tiling
from patchstore.codec.delta_file import Content
from patchstore.codec.index import Gap, Listed, check_gaps
from patchstore.errors import CorruptObject
from patchstore.kernels import context_decode, context_tables, gap_decode, sent
from patchstore.kernels.context_tables import FORMATS
from patchstore.kernels.gap_decode import TILE
from patchstore.tensors.bits import bits, unsigned
from patchstore.tensors.columns import ramps, signed_of
from vllm_plugin.gpu.upload import aligned, send, send_memory, tables_on
from vllm_plugin.map.mapping import Box

Array = npt.NDArray[Any]
_NO_RANGES = np.zeros((2, 0), dtype=np.int64)
_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """Patches on the device, of one tensor each."""

    numbers: Array
    """int64 [num], places of the tensors in the schema."""
    positions: Array
    """int64 [num], addresses of positions or gaps."""
    values: Array
    """int64 [num], addresses of values."""
    nums: Array
    """int64 [num], how many there are of both."""
    position_widths: Array
    """int64 [num], bytes of a position; 2 for gaps."""

    def joined(self, other: "Patches") -> "Patches":
        return Patches(
            np.concatenate([self.numbers, other.numbers]),
            np.concatenate([self.positions, other.positions]),
            np.concatenate([self.values, other.values]),
            np.concatenate([self.nums, other.nums]),
            np.concatenate([self.position_widths, other.position_widths]),
        )

    @classmethod
    def between(
        cls, numbers: Array, bounds: Array, positions: torch.Tensor, values: torch.Tensor
    ) -> "Patches":
        """Return patches of tensors that are listed one after the other, each up to the next of `bounds`.

        Positions and values are on the device; the caller keeps both.
        """
        firsts, width = np.asarray(bounds, dtype=np.int64)[:-1], positions.element_size()
        return cls(
            numbers,
            positions.data_ptr() + firsts * width,
            values.data_ptr() + firsts * values.element_size(),
            np.diff(bounds),
            np.full(len(numbers), width, dtype=np.int64),
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Places:
    """Where elements of tensors lie on the device, as columns: the boxes of one tensor after the other."""

    numbers: Array
    """int64 [T], places in the schema, ascending."""
    formats: Array
    """int64 [T, 3], of `FORMATS`."""
    num_boxes: Array
    """int64 [T]"""
    boxes: Array
    """int64 [num_boxes, 6]: first level, levels, first row, rows, first column and columns, in the tensor."""
    addresses: Array
    """int64 [num_boxes], at which the tensor's first element would be."""
    strides: Array
    """int64 [num_boxes, 3], in elements: of levels, rows and columns."""
    memory_widths: Array
    """int64 [num_boxes], bytes of an element."""
    largest_tile: int
    """Elements of the largest tile of any tensor of the schema, at most."""

    @property
    def firsts(self) -> Array:
        """int64 [T], the first box of each."""
        found: Array = self.num_boxes.cumsum() - self.num_boxes
        return found

    @classmethod
    def served(
        cls, schema: Schema, held: Mapping[str, Sequence[Box]], memories: Mapping[int, torch.Tensor]
    ) -> "Places":
        """Describe elements that are served from flat memories, by index of the runtime."""
        order = sorted((schema.places[name], found) for name, found in held.items())
        every = [box for _, found in order for box in found]
        owners = [memories[box.index] for box in every]
        widths = np.array([each.element_size() for each in owners], dtype=np.int64)
        firsts = np.array([each.data_ptr() for each in owners], dtype=np.int64)
        formats = [FORMATS[schema.tensors[number].dtype] for number, _ in order]
        kinds, _ = schema.kinds
        shapes = [shape for dtype, shape in kinds if is_coded(dtype) and 0 not in shape]
        return cls(
            numbers=np.array([number for number, _ in order], dtype=np.int64),
            formats=np.array(formats, dtype=np.int64).reshape(-1, 3),
            num_boxes=np.array([len(found) for _, found in order], dtype=np.int64),
            boxes=np.array([_row(box.elements) for box in every], dtype=np.int64).reshape(-1, 6),
            addresses=firsts + widths * np.array([box.origin for box in every], dtype=np.int64),
            strides=np.array([box.strides for box in every], dtype=np.int64).reshape(-1, 3),
            memory_widths=widths,
            largest_tile=max((tiling(shape).largest for shape in shapes), default=1),
        )

    def copies(self, schema: Schema, numbers: Array, is_whole: Array) -> "Places":
        """Describe copies of coded tensors, as checkpoints have them; addresses count from each copy's own.

        `numbers` ascend; `is_whole`, bool [num], says of which all is there. Of the others it is these boxes.
        """
        kinds, of_all = schema.kinds
        rows = np.zeros((len(kinds), 6), dtype=np.int64)
        formats, strides = np.zeros((2, len(kinds), 3), dtype=np.int64)
        for kind, (dtype, shape) in enumerate(kinds):
            if is_coded(dtype) and 0 not in shape:
                tiles = tiling(shape)
                rows[kind], formats[kind] = _row(tiles.box), FORMATS[dtype]
                strides[kind] = tiles.rows * tiles.cols, tiles.cols, 1
        of = np.array(of_all, dtype=np.int64)[numbers]
        at = np.searchsorted(self.numbers, numbers[~is_whole])
        num_boxes = np.ones_like(numbers)
        num_boxes[~is_whole] = self.num_boxes[at]
        owners = np.repeat(np.arange(len(numbers)), num_boxes)
        boxes = rows[of[owners]]
        boxes[~is_whole[owners]] = self.boxes[ramps(self.num_boxes[at], self.firsts[at])]
        return replace(
            self,
            numbers=numbers,
            formats=formats[of],
            num_boxes=num_boxes,
            boxes=boxes,
            addresses=np.zeros_like(owners),
            strides=strides[of[owners]],
            memory_widths=formats[of[owners], 0],
        )

    def at(self, numbers: Array, addresses: Array) -> "Places":
        """Return some tensors, ascending, that lie these addresses further on."""
        at = np.searchsorted(self.numbers, numbers)
        num_boxes = self.num_boxes[at]
        boxes = ramps(num_boxes, self.firsts[at])
        return replace(
            self,
            numbers=numbers,
            formats=self.formats[at],
            num_boxes=num_boxes,
            boxes=self.boxes[boxes],
            addresses=self.addresses[boxes] + np.repeat(addresses, num_boxes),
            strides=self.strides[boxes],
            memory_widths=self.memory_widths[boxes],
        )


def _row(box: records.Box) -> tuple[int, ...]:
    return box.level, box.levels, box.row, box.rows, box.col, box.cols


class Decoded(NamedTuple):
    """What was decoded."""

    numbers: Array
    """int64 [T], places of tensors in the schema, ascending."""
    widths: Array
    """int64 [T], bytes of an element of each."""
    positions: torch.Tensor
    """int32 or int64 [num], of one tensor after the other."""
    values: torch.Tensor
    """int16 [num]; one-byte elements in the lower byte."""
    narrow: torch.Tensor
    """uint8 [num]: the same, or nothing where no element is of one byte."""
    bounds: Array
    """int64 [T + 1], where the changes of each tensor begin, and the end."""

    def patches(self) -> Patches:
        found = Patches.between(self.numbers, self.bounds, self.positions, self.values)
        narrow = self.narrow.data_ptr() + self.bounds[:-1]
        return replace(found, values=np.where(self.widths == 1, narrow, found.values))


def decode(coded: Coded, places: Places, schema: Schema, device: torch.device) -> Decoded:
    """Decode what changed of parts of tensors, which ascend by tensor; no box of `places` cuts through a
    tile.
    """
    numbers = np.unique(coded.numbers)
    widths = places.formats[np.searchsorted(places.numbers, numbers), 0]
    geometry = context_tables.geometry(coded.cuts)
    # Every part with every box of its tensor, and then those that have elements in common.
    at = np.searchsorted(places.numbers, coded.numbers)
    num_boxes = places.num_boxes[at]
    owners, box = np.repeat(np.arange(len(coded)), num_boxes), ramps(num_boxes, places.firsts[at])
    tiles, is_held = tiles_within(geometry[owners], places.boxes[box])
    picked = np.flatnonzero(is_held)
    if not len(picked):
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        values = torch.empty(0, dtype=torch.int16, device=device)
        bounds = np.zeros(len(numbers) + 1, dtype=np.int64)
        return Decoded(numbers, widths, nothing, values, values.to(torch.uint8), bounds)
    some, owners = np.unique(owners[picked], return_inverse=True)
    box, held = box[picked], coded.at(some)
    (streams,) = send([torch.from_numpy(held.data)], device)
    sets, row_sets = held.sets, held.row_sets
    tensors = context_tables.tensors(
        geometry[some],
        places.formats[at[some]],
        held.lo,
        held.num_classes,
        device,
        first_rows=(sets.nums.cumsum() - sets.nums)[row_sets],
    )
    segments = context_tables.segments(
        tensors,
        owners,
        tiles[picked],
        places.addresses[box],
        places.strides[box],
        places.memory_widths[box],
        # Of all tensors, so that the same kernels serve each version.
        places.largest_tile,
    )
    rows = sets.listed.astype(np.int32)
    lengths, codes = tables_on(device, held.lengths, rows[:, 0] | rows[:, 1] << 8 | rows[:, 2] << 16)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=device)
    torch.cumsum(lengths, 0, dtype=torch.int64, out=starts[1:])
    found = context_decode.decode(tensors, segments, codes, starts, streams)
    if found.first_wrong is not None:
        wrong = int(owners[found.first_wrong])
        name = schema.tensors[held.numbers[wrong]].name
        raise CorruptObject(
            f"{held.key(wrong)}: what it says of {name!r} is no change of the tensor that is served"
        )
    narrow = found.values.to(torch.uint8) if (widths == 1).any() else found.values[:0]
    # Where the parts of each tensor end; one of which nothing is here ends where it begins.
    last = np.searchsorted(held.numbers[owners], numbers, side="right")
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), found.bounds[last]])
    return Decoded(numbers, widths, found.positions, found.values, narrow, bounds)


def change_of_one(schema: Schema, name: str, tensor: torch.Tensor) -> Coded:
    """Code another lowest bit of the first element of a tensor on the CPU, of a dtype that can be coded."""
    first, old = np.zeros(1, dtype=np.int64), unsigned(tensor)
    spec = schema.tensors[number := schema.places[name]]
    cuts, changes = Cuts.of([tiling(spec.shape)]), (first + 1, first, old[:1] ^ 1)
    return encode_all(spec.dtype, first + number, cuts, old, *changes, RowSets())


def tiles_within(geometry: Array, boxes: Array) -> tuple[Array, Array]:
    """Return the tiles of parts that have elements of a box of the tensor each; see `Tiling.ranges_within`.

    `geometry` is as `context_tables.geometry` returns it; boxes are int64 [num, 6]: first level, levels,
    first row, rows, first column and columns, in the tensor. Returns int64 [num, 6], first level, tile row
    and tile column, in the part, and how many of them; and bool [num], false where the box has nothing of the
    part.
    """
    first = np.maximum(boxes[:, 0], geometry[:, 7])
    levels = np.minimum(boxes[:, 0] + boxes[:, 1], geometry[:, 7] + geometry[:, 0]) - first
    row, rows = _tiles_along(boxes[:, 2:4], geometry[:, 8:10], geometry[:, [3, 5, 12]])
    col, cols = _tiles_along(boxes[:, 4:6], geometry[:, 10:12], geometry[:, [4, 6, 14]])
    found = np.stack([first - geometry[:, 7], row, col, levels, rows, cols], axis=1)
    is_held = np.asarray((found[:, 3:] > 0).all(axis=1))
    return found, is_held


def _tiles_along(box: Array, part: Array, cut: Array) -> tuple[Array, Array]:
    """Return the first tile of parts that has rows (or columns) of boxes, and how many have; none or less
    where no tile has. `box` and `part` have the first row and how many there are; `cut` rows of a slice and
    of a tile, and the first tile of the part in the tensor.
    """
    of_slice, of_tile, first_tile = cut.T
    tiles_of_slice = -(-of_slice // of_tile)

    def tile_of(at: Array) -> Array:
        tile: Array = at // of_slice * tiles_of_slice + at % of_slice // of_tile
        return tile

    first = np.maximum(box[:, 0], part[:, 0])
    end = np.minimum(box.sum(axis=1), part.sum(axis=1))
    tile = tile_of(first)
    return tile - first_tile, np.where(first < end, tile_of(end - 1) - tile + 1, 0)


class Gaps(NamedTuple):
    """Patches of one version on the device."""

    patches: Patches
    starts: torch.Tensor
    """int64 [num_tiles]: one past the position before each tile."""
    jobs: torch.Tensor
    """int32 [num_tiles, 2]: which of the patches, and which of its tiles."""
    memory: torch.Tensor
    """uint8: gaps and values, which the patches point to."""

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all values, of elements of one width, one patch after the other."""
        firsts = self.patches.values - self.memory.data_ptr()
        ends = firsts + self.patches.nums * dtype.itemsize
        parts = [self.memory[i:j] for i, j in zip(firsts.tolist(), ends.tolist(), strict=True)]
        return torch.cat(parts).view(dtype)


def send_gaps(listed: Sequence[Listed], schema: Schema, device: torch.device) -> Gaps:
    """Send what is listed by gaps; a tensor is listed once."""
    for each in listed:
        check_gaps(each, schema)
    numbers, nums, firsts = (np.concatenate([_NONE, *(each[at] for each in listed)]) for at in (1, 2, 3))
    sent = [each._replace(idx=aligned(each.idx), val=aligned(each.val)) for each in listed]
    ranges = [
        np.stack([flat.data_ptr() + flat.element_size() * each.starts, flat.element_size() * each.counts])
        for each in sent
        for flat in (each.idx, each.val)
    ]
    # Gaps and values of each in turn.
    both = [np.concatenate([_NO_RANGES, *ranges[at::2]], axis=1) for at in (0, 1)]
    addresses, num_bytes = np.stack(both, axis=2).reshape(2, -1)
    memory, places = send_memory(addresses, num_bytes, device)
    positions, values = (memory.data_ptr() + places).reshape(-1, 2).T
    sizes = np.array(schema.sizes, dtype=np.int64)[numbers]
    begins = np.concatenate([np.zeros(1, dtype=np.int64), num_tiles(nums).cumsum()])
    streams = np.column_stack([positions, nums, np.zeros_like(nums), np.zeros_like(nums)])
    jobs, streams_there, begins_there, firsts_there, sizes_there = tables_on(
        device, jobs_of(nums, TILE), streams, begins, firsts, sizes
    )
    sums = gap_decode.sum_gaps(streams_there, jobs)
    ends = torch.cat([sums.new_zeros(1), sums.cumsum(0)])
    bounds = ends[begins_there]
    reach = bounds[1:] - bounds[:-1] + firsts_there
    if wrong := (reach > sizes_there).nonzero()[:, 0].tolist():
        key = next(each.where for each in listed if numbers[wrong[0]] in each.numbers)
        spec = schema.tensors[numbers[wrong[0]]]
        raise CorruptObject(
            f"{key}: gaps of {spec.name!r} reach position {int(reach[wrong[0]]) - 1}, beyond its "
            f"{spec.num_elements} elements"
        )
    patches = Patches(numbers, positions, values, nums, np.full_like(nums, 2))
    return Gaps(patches, ends[:-1] + (firsts_there - bounds[:-1])[jobs[:, 0]], jobs, memory)


def list_positions(
    listed: Sequence[Listed], schema: Schema, numbers: Array, firsts: Array, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what tensors of one element width list: positions plus the first of each, and bits of values.

    Takes int64 [T] each: the tensors, ascending, and where each begins.
    """
    for each in listed:
        if has_gaps(each):
            gaps = send_gaps([each], schema, device)
            nums = gaps.patches.nums
            begins = firsts[np.searchsorted(numbers, each.numbers)]
            streams = np.column_stack([gaps.patches.positions, nums, nums.cumsum() - nums, begins])
            table = table_on(device, streams)
            yield (
                gap_decode.list_positions(table, gaps.jobs, gaps.starts, int(nums.sum())),
                gaps.values(bits(each.val[:0]).dtype),
            )
        else:
            # Anything else is for `Gap.decode` to judge.
            group = Gap().decode(each, schema)
            begins = firsts[np.searchsorted(numbers, group.numbers)]
            at = group.positions + np.repeat(begins, group.counts)
            positions, values = send([torch.from_numpy(at), signed_of(group.values)], device)
            yield positions, values


def list_changes(
    content: Content, numbers: Array, firsts: Array, places: Places, schema: Schema, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what one version states of tensors of one element width: positions plus the first of each, int64
    [num], and bits.

    What is yielded last is decoded then: with values that may be written before.

    Args:
        numbers, firsts: int64 [T]: the tensors, ascending, and where each begins.
        places: of those that are coded; see `decode`.
    """
    yield from list_positions(content.listed, schema, numbers, firsts, device)
    found = decode(content.coded, places, schema, device)
    if found.values.numel():
        begins, nums = firsts[np.searchsorted(numbers, found.numbers)], np.diff(found.bounds)
        owners = torch.repeat_interleave(
            sent(begins, device), sent(nums, device), output_size=found.values.numel()
        )
        yield found.positions + owners, found.narrow if (found.widths == 1).any() else found.values


def has_gaps(listed: Listed) -> bool:
    return listed.idx.dtype == torch.uint16


def table_on(device: torch.device, rows: object) -> torch.Tensor:
    array = np.array(rows) if not isinstance(rows, np.ndarray) else rows
    return torch.from_numpy(array).to(device)


def num_tiles(nums: Array) -> Array:
    """How many tiles so many changes, or gaps, each are cut into."""
    tiles: Array = -(-nums // TILE)
    return tiles


def jobs_of(sizes: Array, size: int) -> Array:
    """List (which of `sizes`, which part of it) for all parts of at most `size`: int32 [num_jobs, 2]."""
    counts = -(-sizes.astype(np.int64) // size)
    jobs = np.empty((int(counts.sum()), 2), dtype=np.int32)
    jobs[:, 0] = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
    jobs[:, 1] = np.arange(len(jobs)) - np.repeat(counts.cumsum() - counts, counts)
    return jobs
