"""Encode changes on the device that found them; `codec.delta` does the same on the CPU.

Imports Triton, so only what runs kernels may import it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.records import DTYPE_BYTES, Part, Schema, TensorSpec
from patchstore.codec import Encoding, IndexEncoding
from patchstore.codec.context import Coded, Context, Cuts, RowSets, packed_table
from patchstore.codec.context.coded import runs_of
from patchstore.codec.delta import EncodedDelta, stated
from patchstore.codec.index import Gap, Raw
from patchstore.codec.listing import Column, Listing, Stated, listing
from patchstore.codec.part_table import PartSums, PartTable
from patchstore.kernels import context_encode, context_tables, digest, new_stream, on
from patchstore.kernels.compare import ALIGNMENT
from patchstore.kernels.segments import Kind
from patchstore.tensors.bits import INTEGERS, grouped, index_dtype, unsigned
from patchstore.tensors.columns import Group, ramps
from patchstore.tensors.parts import positions
from patchstore.tensors.state_digest import of_elements

Array = npt.NDArray[Any]
STAGED_BYTES = 512 << 20
"""Of a snapshot in host memory, so much at a time is copied to the device to be coded."""
NEAR_BYTES = 6 << 30
"""And of one on the device, so much is coded at a time."""
_ROOMS = 3
_NO_FORMAT = (0, 0, 0)
_BETWEEN = 4096
"""Bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayout:
    """In which order the data of a block has the positions, or gaps, and the values of T tensors.

    The widest elements first, then by the dtypes of tensors, so that what is alike lies side by side.
    """

    specs: Sequence[TensorSpec]
    """[T], in the order of the head."""
    tensors: Array
    """int64 [2 * T], which of `specs` each entry is of."""
    widths: Array
    """int64 [2 * T], bytes of an element of each entry; never ascending."""
    indices: Array
    """int64 [T], which entry has the positions of each tensor."""
    values: Array
    """int64 [T], which entry has its values."""
    by_name: Array
    """int64 [T], the tensors ascending by name."""
    is_value: Array
    """bool [2 * T], whether each entry has values."""
    bounds: Sequence[int]
    """Where among the entries those of one width, dtype and kind begin, and the end."""
    numbers: Array
    """int64 [T], which of the tensors that the snapshot was given each is."""
    gaps: bool
    """Whether there are gaps in the place of positions."""

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], numbers: Array, *, gaps: bool) -> "BlockLayout":
        by_name = sorted(range(len(specs)), key=lambda tensor: specs[tensor].name)
        entries: list[tuple[int, str, bool, int]] = []
        for place, tensor in enumerate(by_name):
            spec = specs[tensor]
            index_bytes = 2 if gaps else index_dtype(spec.num_elements).itemsize
            entries += [
                (-width, spec.dtype, is_value, place)
                for is_value, width in ((False, index_bytes), (True, DTYPE_BYTES[spec.dtype]))
            ]
        entries.sort()
        tensors = np.array([by_name[place] for *_, place in entries], dtype=np.int64)
        is_value = np.array([each[2] for each in entries], dtype=bool)
        indices, values = np.zeros((2, len(specs)), dtype=np.int64)
        indices[tensors[~is_value]] = np.flatnonzero(~is_value)
        values[tensors[is_value]] = np.flatnonzero(is_value)
        return cls(
            specs=specs,
            tensors=tensors,
            widths=np.array([-each[0] for each in entries], dtype=np.int64),
            indices=indices,
            values=values,
            by_name=np.array(by_name, dtype=np.int64),
            is_value=is_value,
            bounds=[n for n, each in enumerate(entries) if not n or each[:3] != entries[n - 1][:3]]
            + [len(entries)],
            numbers=numbers,
            gaps=gaps,
        )


class Spans(NamedTuple):
    """Where the data of a block has what changed of some tensors, int64 [num] each."""

    numbers: Array
    """Of the tensors, as the snapshot was given them."""
    nums: Array
    """Elements that are stated."""
    indices: Array
    """At which byte the positions, or gaps, begin."""
    values: Array
    """At which byte the values begin."""
    index_widths: Array
    """Bytes of a position; 2 of a gap."""
    widths: Array
    """Bytes of a value."""

    def at(self, some: Array) -> "Spans":
        return Spans(*(column[some] for column in self))


class ChangeBlock:
    """All changes as `kernels.index_encode` writes them: a head, and the data of a payload."""

    def __init__(self, layout: BlockLayout, memory: torch.Tensor, data_start: int) -> None:
        """Take a block that is complete, behind a head of `data_start` bytes; waits for the head."""
        self._layout, self._memory, self._data_start = layout, memory, data_start
        head = memory[:data_start].cpu().view(torch.int64).numpy()
        self._nums = head[: len(layout.specs)]
        self._sums = head[len(layout.specs) :].view(np.uint64).reshape(-1, 2)

    @property
    def data(self) -> torch.Tensor:
        """The positions and values of all tensors, uint8."""
        return self._memory[self._data_start :]

    def _changed(self) -> Array:
        by_name = self._layout.by_name
        changed: Array = by_name[self._nums[by_name] > 0]
        return changed

    def growth(self) -> PartSums:
        """By how much the digest sums of the tensors with changes grow."""
        changed = self._changed()
        return PartSums(self._layout.numbers[changed], self._sums[changed])

    def on_host(self) -> "ChangeBlock":
        memory = torch.empty_like(self._memory, device="cpu", pin_memory=self._memory.is_cuda)
        memory.copy_(self._memory)
        return ChangeBlock(self._layout, memory, self._data_start)

    def listing(self, owners: Array) -> Listing:
        """Return what a file lists, of a block in host memory, which it shares.

        Args:
            owners: int64, the place in the schema of each tensor, by its number.
        """
        columns = []
        for entries, suffix, dtype, data in self._columns():
            tensors = self._layout.tensors[entries]
            columns.append(
                Column(suffix, dtype, owners[self._layout.numbers[tensors]], self._nums[tensors], data)
            )
        return Listing(columns)

    def _columns(self) -> Iterator[tuple[Array, str, str, torch.Tensor]]:
        """Yield entries that are alike and not empty, `.idx` or `.val`, their dtype, and their data."""
        layout = self._layout
        nums = self._nums[layout.tensors]
        ends = np.concatenate([[0], (nums * layout.widths).cumsum()]).tolist()
        bounds = layout.bounds
        for first, end in pairwise(bounds):
            entries = np.arange(first, end)[nums[first:end] > 0]
            if not len(entries):
                continue
            width, spec = int(layout.widths[first]), layout.specs[layout.tensors[first]]
            is_value = bool(layout.is_value[first])
            dtype = spec.dtype if is_value else "U16" if layout.gaps else f"I{8 * width}"
            data = self.data[ends[first] : ends[end]].view(INTEGERS[width])
            yield entries, ".val" if is_value else ".idx", dtype, data

    def groups(self) -> list[Group]:
        """Return the changes, of a block in encoding `raw` in host memory."""
        layout, found = self._layout, []
        for dtype in sorted({spec.dtype for spec in layout.specs}):
            its = np.array([spec.dtype == dtype for spec in layout.specs])
            tensors = layout.by_name[its[layout.by_name] & (self._nums[layout.by_name] > 0)]
            if len(tensors):
                found.append(self._group(tensors))
        return found

    def _group(self, tensors: Array) -> Group:
        spans = self.spans(tensors)
        return Group(
            spans.numbers,
            spans.nums,
            self.positions(spans, torch.int64).numpy(),
            unsigned(self.values(spans, INTEGERS[int(spans.widths[0])])),
        )

    def spans(self, tensors: Array | None = None) -> Spans:
        """Say where the changes are; ascending by name."""
        layout, changed = self._layout, self._changed() if tensors is None else tensors
        sizes = self._nums[layout.tensors] * layout.widths
        starts = sizes.cumsum() - sizes
        indices, values = layout.indices[changed], layout.values[changed]
        return Spans(
            *(layout.numbers[changed], self._nums[changed], starts[indices], starts[values]),
            *(layout.widths[indices], layout.widths[values]),
        )

    def positions(self, spans: Spans, dtype: torch.dtype) -> torch.Tensor:
        """Return positions, one tensor after the other, of a block in encoding `raw`."""
        return _joined(self.data, spans.indices, spans.nums, spans.index_widths, dtype)

    def values(self, spans: Spans, dtype: torch.dtype) -> torch.Tensor:
        """Return the bits of values, one tensor after the other."""
        return _joined(self.data, spans.values, spans.nums, spans.widths, dtype)


class Parent(NamedTuple):
    """A snapshot: tensors, or parts, by the numbers of a `PartTable`."""

    memory: torch.Tensor
    """uint8, on the device or in pinned host memory."""
    firsts: Array
    """int64 [P], at which byte each begins: a multiple of its width."""

    def addresses(self, numbers: Array) -> Array:
        found: Array = self.memory.data_ptr() + self.firsts[numbers]
        return found

    def at(self, group: Group) -> Array:
        """Return the bit patterns at a group's positions, in host memory."""
        width = group.values.itemsize
        flat = self.memory.view(INTEGERS[width])
        places = np.repeat(self.firsts[group.numbers] // width, group.counts) + group.positions
        return unsigned(flat[torch.from_numpy(places).to(flat.device)].cpu())

    def part(self, number: int, part: Part) -> torch.Tensor:
        """Return the bits of one, flat."""
        first, width = int(self.firsts[number]), DTYPE_BYTES[part.spec.dtype]
        return self.memory[first : first + part.num_elements * width].view(INTEGERS[width])


def encode(
    schema: Schema,
    table: PartTable,
    encoding: Encoding,
    *,
    num_changed: int,
    block_of: Callable[..., ChangeBlock],
    parent: Parent,
) -> EncodedDelta:
    """Encode changes against the snapshot that they were found with, which is still the parent's.

    Waits for the device. `table` says what the snapshot's tensors are; `block_of` is `DeviceChanges.block`.
    """
    are_whole = bool(table.is_whole.all())
    if isinstance(encoding, Raw) and are_whole:
        # Kernels write these two, as they are stored.
        block = block_of(gaps=isinstance(encoding, Gap)).on_host()
        return EncodedDelta(
            encoding=encoding.name,
            num_changed=num_changed,
            listing=block.listing(table.owners),
            growth=block.growth(),
        )
    block = block_of(gaps=False, parts=None if are_whole else table.parts)
    spans = block.spans()
    if not isinstance(encoding, Context):
        return EncodedDelta(
            encoding=encoding.name,
            num_changed=num_changed,
            listing=listing(schema, _stated(table, block, spans, parent, encoding.index), encoding.index),
            growth=_growth(block, spans, table, parent),
        )
    is_cut, cuts = table.cuts(spans.numbers, spans.nums)
    listed, coding = _stated(table, block, spans.at(~is_cut), parent, encoding.index), _Coding(table)
    digesting = _Digesting(table, block.data.device)
    its = spans.at(is_cut)
    chunks = _chunks(its.numbers, spans.numbers[~is_cut], table, parent, block.data.device)
    for chunk, held in _held(parent, chunks, block.data.device):
        coding.begin(block, its.at(chunk.parts), cuts.at(chunk.parts), chunk.nums, held)
        digesting.begin(chunk.numbers, held)
        # The host chooses for one chunk while the device counts in the next.
        coding.order(but=1)
    coding.order()
    said = listing(schema, listed, encoding.index)
    growth = _growth(block, spans, table, parent)
    return EncodedDelta(
        encoding=encoding.name,
        num_changed=num_changed,
        listing=said,
        coded=coding.entries(),
        growth=growth,
        parents=digesting.sums(),
    )


def warm_up(table: PartTable, parent: Parent, device: torch.device) -> None:
    """Compile what codes changes, with one change of the largest part of each dtype; keeps nothing."""
    every = np.arange(len(table.parts))
    is_cut, cuts = table.cuts(every, np.ones_like(every))
    numbers, largest = every[is_cut], cuts.each(lambda kind: kind.largest)
    some = np.sort([np.flatnonzero(its)[largest[its].argmax()] for its in _by(table.dtype[numbers])])
    if not len(some):
        return
    numbers, cuts = numbers[some], cuts.at(some)
    old = {number: parent.part(number, table.parts[number])[:1].to(device) for number in numbers.tolist()}
    coding, digesting = _Coding(table), _Digesting(table, device)
    spans = Spans(numbers, *(np.ones_like(numbers) for _ in range(5)))
    for chunk, held in _held(parent, _chunks(numbers, numbers[:0], table, parent, device), device):
        parts = chunk.parts
        coding.begin(_OneOfEach(old), spans.at(parts), cuts.at(parts), chunk.nums, held)
        digesting.begin(chunk.numbers, held)
        coding.order(but=1)
    coding.order()
    coding.entries()
    digesting.sums()


def _stated(
    table: PartTable, block: ChangeBlock, spans: Spans, parent: Parent, index: IndexEncoding
) -> list[Stated]:
    """Return what a file states of parts, by position in the tensor, on the host."""
    listed: list[Stated] = []
    dtypes = table.dtype[spans.numbers]
    for dtype in np.unique(dtypes):
        its = spans.at(np.flatnonzero(dtypes == dtype))
        values = block.values(its, INTEGERS[int(its.widths[0])])
        positions = block.positions(its, torch.int64)
        group = Group(its.numbers, its.nums, positions.cpu().numpy(), unsigned(values.cpu()))
        listed += stated(table, group, parent.at, index)
    return listed


def _growth(block: ChangeBlock, spans: Spans, table: PartTable, parent: Parent) -> PartSums:
    """Return by how much the digest sums of parts grow."""
    growth = block.growth()
    for place in np.flatnonzero(table.is_scattered[spans.numbers]).tolist():
        # Cut in three dimensions, which is rare.
        its, number = spans.at(np.array([place])), int(spans.numbers[place])
        part, values = table.parts[number], block.values(its, INTEGERS[int(spans.widths[place])])
        local = block.positions(its, torch.int64)
        at, old = positions(part, local), parent.part(number, part).to(local.device)[local]
        growth.sums[place] = of_elements(at, values).minus(of_elements(at, old))
    return growth


class _Chunk(NamedTuple):
    """Changed parts that are coded and digested together."""

    parts: Array
    """int64 [num], those that are coded, by their place among all of these; group after group."""
    nums: Array
    """int64 [groups], parts of each group, for which row sets are chosen together."""
    numbers: Array
    """int64, all parts, by number."""
    num_bytes: Array
    """int64, of each."""


def _chunks(
    coded: Array, listed: Array, table: PartTable, parent: Parent, device: torch.device
) -> list[_Chunk]:
    """Return parts, by number, in chunks, and groups as `codec.delta` makes them."""
    most = NEAR_BYTES if is_near(parent, device) else STAGED_BYTES
    grouped_places: list[list[int]] = []
    for mine in _by(table.dtype[coded]):
        its = np.flatnonzero(mine)
        sizes = table.sizes[coded[its]].tolist()
        places = its.tolist()
        groups = grouped(range(len(its)), lambda _: None, sizes.__getitem__)
        grouped_places += [[places[at] for at in group] for group in groups]
    nums = np.array([len(group) for group in grouped_places], dtype=np.int64)
    order = np.array([place for group in grouped_places for place in group], dtype=np.int64)
    group_of = np.repeat(np.arange(len(nums)), nums)
    order = order[np.lexsort((table.alike[coded[order]], group_of))]
    num_bytes = table.sizes * table.widths
    found, bounds = list[_Chunk](), [0, *nums.cumsum().tolist()]
    of_groups = np.bincount(group_of, num_bytes[coded[order]], len(nums)).astype(np.int64)
    for first, end in _cut(of_groups, most):
        parts = order[bounds[first] : bounds[end]]
        found.append(_Chunk(parts, nums[first:end], coded[parts], num_bytes[coded[parts]]))
    nothing = np.zeros(0, dtype=np.int64)
    ranges = _cut(num_bytes[listed], most)
    alone = [listed[first:end] for first, end in ranges]
    return found + [_Chunk(nothing, nothing, its, num_bytes[its]) for its in alone]


def _by(kinds: Array) -> list[Array]:
    """Return which are of each kind, ascending: bool."""
    return [kinds == kind for kind in np.unique(kinds)]


def _cut(num_bytes: Array, most: int) -> list[tuple[int, int]]:
    """Cut items into ranges of about so many bytes."""
    number = (num_bytes.cumsum() - num_bytes) // most
    firsts = np.flatnonzero(np.diff(number, prepend=-1)).tolist()
    return [*zip(firsts, [*firsts[1:], len(number)], strict=False)]


def _held(parent: Parent, chunks: Sequence[_Chunk], device: torch.device) -> Iterator[tuple[_Chunk, Parent]]:
    """Yield chunks, and a parent on the device: parts that are elsewhere are copied, a chunk at a time.

    While the caller works with one chunk, and launches the last kernels of the one before, the next is
    copied. Takes the memory of three.
    """
    if is_near(parent, device):
        yield from ((chunk, parent) for chunk in chunks)
        return
    plans = [_Plan.of(chunk.numbers, chunk.num_bytes, parent) for chunk in chunks]
    room = max((plan.size for plan in plans), default=0)
    rooms = torch.empty((min(_ROOMS, len(plans)), room), dtype=torch.uint8, device=device)
    stream = new_stream(device)
    current = None if stream is None else torch.cuda.current_stream()

    def wait(one: torch.cuda.Stream | None, other: torch.cuda.Stream | None) -> None:
        """Have what is launched on one stream begin when all that is launched on the other is done."""
        if one is not None and other is not None:
            one.wait_stream(other)

    def copy(number: int) -> None:
        with on(stream):
            for begin, end, at in plans[number].runs:
                target = rooms[number % _ROOMS, at : at + end - begin]
                target.copy_(parent.memory[begin:end], non_blocking=True)

    if stream is not None:
        # If the caller fails, copies are still under way.
        rooms.record_stream(stream)
    # The memory may be that of something that is still read.
    wait(stream, current)
    if chunks:
        copy(0)
    for number, chunk in enumerate(chunks):
        wait(current, stream)
        if number + 1 < len(chunks):
            copy(number + 1)
        yield chunk, Parent(rooms[number % _ROOMS], plans[number].firsts)
        # Into the room of the one before goes the chunk after the next.
        wait(stream, current)


def is_near(parent: Parent, device: torch.device) -> bool:
    """Whether kernels read a snapshot at the device's own speed."""
    return parent.memory.device == device


class _Plan(NamedTuple):
    """How parts of a snapshot are copied."""

    runs: Sequence[tuple[int, int, int]]
    """From which byte of the snapshot to which, and where they are put."""
    firsts: Array
    """As `Parent.firsts`, of the copy; those of other parts mean nothing."""
    size: int

    @classmethod
    def of(cls, numbers: Array, num_bytes: Array, parent: Parent) -> "_Plan":
        """`num_bytes` are of each part, int64 [num]."""
        firsts = parent.firsts[numbers]
        order = firsts.argsort()
        firsts, ends = firsts[order], (firsts + num_bytes)[order]
        # What lies between is so little that it is copied too.
        is_first = np.concatenate([[True], firsts[1:] - ends[:-1] > _BETWEEN])
        begins, stops = firsts[is_first], ends[np.concatenate([is_first[1:], [True]])]
        sizes = -(-(stops - begins) // ALIGNMENT) * ALIGNMENT
        at = sizes.cumsum() - sizes
        moved = parent.firsts.copy()
        run = np.searchsorted(begins, parent.firsts[numbers], side="right") - 1
        moved[numbers] += (at - begins)[run]
        runs = [*zip(begins.tolist(), stops.tolist(), at.tolist(), strict=True)]
        return cls(runs, moved, int(sizes.sum()))


class _Coding:
    """Coded parts on their way to a file's entries; see `context_encode.Encoder` for the steps."""

    def __init__(self, table: PartTable) -> None:
        self._table, self._row_sets = table, RowSets()
        self._formats = np.array([context_tables.FORMATS.get(each, _NO_FORMAT) for each in table.dtypes])
        self._begun: list[tuple[Array, Cuts, context_encode.Encoder]] = []
        self._num_ordered = 0
        self._read: list[torch.Tensor] = []
        """Memory that those which are not ordered still read, by its addresses."""

    def begin(self, changes: "Stating", spans: Spans, cuts: Cuts, nums: Array, parent: Parent) -> None:
        """Begin to code some parts.

        Args:
            changes: what changed of them.
            nums: int64 [groups], parts of each group, for which row sets are chosen together.
        """
        if not len(cuts):
            return
        # In the order of the file.
        order = self._table.ranks[spans.numbers].argsort()
        groups = order.argsort(), np.concatenate([np.zeros(1, dtype=np.int64), nums.cumsum()])
        spans, cuts = spans.at(order), cuts.at(order)
        positions_dtype = torch.int64 if (spans.index_widths == 8).any() else torch.int32
        encoder = context_encode.Encoder(
            context_tables.geometry(cuts),
            self._formats[self._table.dtype[spans.numbers]],
            parent.addresses(spans.numbers),
            changes.positions(spans, positions_dtype),
            changes.values(spans, torch.int16),
            np.concatenate([np.zeros(1, dtype=np.int64), spans.nums.cumsum()]),
            groups,
            self._row_sets,
            largest=self._table.largest_tile,
        )
        self._begun.append((self._table.owners[spans.numbers], cuts, encoder))
        self._read.append(parent.memory)

    def order(self, *, but: int = 0) -> None:
        """Choose rows for what was begun, but for so many of the last, and go on with it."""
        end = max(self._num_ordered, len(self._begun) - but)
        for _, _, encoder in self._begun[self._num_ordered : end]:
            encoder.order()
            # What is launched reads it before what may take its memory, on the same stream.
            del self._read[0]
        self._num_ordered = end

    def entries(self) -> dict[str, torch.Tensor]:
        """Return the file's entries for coded parts; waits for the device."""
        if not self._begun:
            return {}
        found = [(owners, cuts, encoder.finish()) for owners, cuts, encoder in self._begun]
        nothing, sets = np.zeros(0, dtype=np.uint8), self._row_sets.sets
        coded = Coded.joined(
            [Coded(owners, cuts, sets, its.row_sets, its.lengths, nothing) for owners, cuts, its in found],
            sets,
        )
        order = coded.order()
        written = torch.cat([each.streams for *_, each in found])
        if (order[1:] < order[:-1]).any():
            written = torch.cat([written[begin:end] for begin, end in runs_of(order, coded.bytes_at)])
        streams = torch.empty(written.shape, dtype=torch.uint8, device="cpu", pin_memory=written.is_cuda)
        streams.copy_(written, non_blocking=True)
        # While the device writes and copies.
        table = packed_table(coded.at(order))
        if written.is_cuda:
            torch.cuda.current_stream().synchronize()
        return {"table": table, "tiles": streams}


class Stating(Protocol):
    """What changed of parts, on the device: a `ChangeBlock`."""

    def positions(self, spans: Spans, dtype: torch.dtype) -> torch.Tensor: ...

    def values(self, spans: Spans, dtype: torch.dtype) -> torch.Tensor: ...


class _OneOfEach(NamedTuple):
    """The first element of parts, changed by a bit."""

    old: dict[int, torch.Tensor]
    """The bits before, on the device, by number."""

    def positions(self, spans: Spans, dtype: torch.dtype) -> torch.Tensor:
        (first, *_) = self.old.values()
        return torch.zeros(len(spans.numbers), dtype=dtype, device=first.device)

    def values(self, spans: Spans, dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([self.old[number].to(dtype) ^ 1 for number in spans.numbers.tolist()])


def _joined(
    data: torch.Tensor, starts: Array, nums: Array, widths: Array, dtype: torch.dtype
) -> torch.Tensor:
    """Concatenate lists of integers; without a copy where they lie side by side.

    Args:
        data: uint8, in which they lie.
        starts: int64 [num], at which byte each begins; so are the next two.
        nums: elements of each.
        widths: bytes of an element.
    """
    ends = starts + nums * widths
    # A call for each list would take longer than all kernels, where there are thousands.
    is_first = np.concatenate([[True], (starts[1:] != ends[:-1]) | (widths[1:] != widths[:-1])])
    firsts = np.flatnonzero(is_first)
    lasts = np.concatenate([firsts[1:], [len(starts)]]) - 1
    runs = zip(starts[firsts].tolist(), ends[lasts].tolist(), widths[firsts].tolist(), strict=True)
    held = [data[start:end].view(INTEGERS[width]).to(dtype) for start, end, width in runs]
    return held[0] if len(held) == 1 else torch.cat(held)


class _Digesting:
    """The digests of parts before the change, under way on the device."""

    def __init__(self, table: PartTable, device: torch.device) -> None:
        self._table, self._device = table, device
        self._begun: list[tuple[Array, torch.Tensor]] = []

    def begin(self, numbers: Array, parent: Parent) -> None:
        """Begin with some parts; all of one element width and kind of region at once."""
        table, device = self._table, self._device
        widths = table.widths[numbers]
        is_run = table.runs[numbers] >= 0
        for width, runs in sorted({*zip(widths.tolist(), is_run.tolist(), strict=True)}):
            same = numbers[(widths == width) & (is_run == runs)]
            rows, ranks = _regions(same, table, parent, runs=runs)
            counts = -(-table.sizes[same] // digest.BLOCK)
            owners = np.repeat(np.arange(len(same)), counts)
            kind = Kind(
                value_width=width,
                memory_width=width,
                num_dims=ranks,
                is_narrow=bool((table.whole_sizes[same] < 2**31).all()),
                is_aligned=runs and bool((rows[:, 4] % 16 == 0).all()),
            )
            jobs = torch.from_numpy(np.stack([owners, ramps(counts)], axis=1).astype(np.int32))
            self._begun.append(
                (same, digest.digest(kind, _sent(torch.from_numpy(rows), device), _sent(jobs, device)))
            )

    def sums(self) -> PartSums:
        """Return the digest sums; waits for the device."""
        sums = [digests[:, :2].cpu().numpy().view(np.uint64) for _, digests in self._begun]
        return PartSums(np.concatenate([same for same, _ in self._begun]), np.concatenate(sums))


def _sent(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy from host memory to the device, without waiting for what that does already."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _regions(numbers: Array, table: PartTable, parent: Parent, *, runs: bool) -> tuple[Array, int]:
    """Return the rows of parts in the table of segments, and their dimensions; see `kernels.segments`."""
    addresses = parent.addresses(numbers)
    if runs:
        firsts, sizes, nothing = table.runs[numbers], table.sizes[numbers], np.zeros_like(numbers)
        columns = nothing, nothing, sizes, nothing, addresses, firsts, firsts + sizes, nothing
        return np.stack(columns, axis=1), 0
    given = [table.parts[number] for number in numbers.tolist()]
    ranks = max(len(part.size) for part in given)
    rows = [_region(part, address, ranks) for part, address in zip(given, addresses.tolist(), strict=True)]
    return np.array(rows, dtype=np.int64), ranks


def _region(part: Part, address: int, num_dims: int) -> tuple[int, ...]:
    """Return the row of a part that is no run."""
    shape = part.spec.shape
    source = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    target = [prod(part.size[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * stride for start, stride in zip(part.start, source, strict=True))
    last = first + sum((size - 1) * stride for size, stride in zip(part.size, source, strict=True))
    # Dimensions of one index in front, where parts of fewer dimensions are digested with these.
    more = num_dims - len(shape)
    dims = (*(1,) * more, *part.size, *(1,) * more, *source, *(1,) * more, *target)
    return (0, 0, part.num_elements, 0, address, first, last + 1, 0, *dims)
