"""Encode changes on the device that found them; `codec.delta` does the same on the CPU.

Imports Triton, so only what runs kernels may import it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from patchstore.codec.delta import NO_SUMS, EncodedDelta, joined_kinds, joined_sums, stated
from patchstore.codec.index import Raw
from patchstore.codec.listing import Column, Listing, Stated, listing
from patchstore.codec.part_table import PartSums, PartTable
from patchstore.kernels import context_encode, context_tables, digest, sent
from patchstore.kernels.segments import Kind
from patchstore.tensors.bits import INTEGERS, index_dtype, unsigned
from patchstore.tensors.columns import Group, ramps
from patchstore.tensors.parts import positions
from patchstore.tensors.state_digest import of_elements

Array = npt.NDArray[Any]
_NO_FORMAT = (0, 0, 0)


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
    """A snapshot, or a copy of some of it: tensors, or parts, by the numbers of a `PartTable`."""

    memory: torch.Tensor
    """uint8, on the device or in pinned host memory."""
    firsts: Array
    """int64 [P], at which byte each begins: a multiple of its width. Where there is no part, they mean
    nothing."""

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


def as_found(table: PartTable, encoding: Raw, block: ChangeBlock, num_changed: int) -> EncodedDelta:
    """Return all changes, as a kernel wrote them with the gaps of `encoding`, or the positions."""
    block = block.on_host()
    return EncodedDelta(
        encoding=encoding.name,
        num_changed=num_changed,
        listing=block.listing(table.owners),
        growth=block.growth(),
    )


class Coder:
    """Encodes the changes of a version, those of some parts at a time."""

    def __init__(self, schema: Schema, table: PartTable, encoding: Encoding, device: torch.device) -> None:
        """`table` says what the snapshot's tensors are."""
        self._schema, self._table, self._encoding = schema, table, encoding
        self._device, self._are_whole = device, bool(table.is_whole.all())
        self._coding, self._digesting = _Coding(table), _Digesting(table, device)
        self._stated: list[Stated] = []
        self._growth: list[PartSums] = []
        self._parent: Parent | None = None
        self._is_broken = False

    def lines(self, layout: BlockLayout) -> torch.Tensor | None:
        """Return where elements of parts are in their tensors, where that differs; see `index_encode`."""
        if self._are_whole:
            return None
        return sent(self._table.lines[layout.numbers], self._device)

    def add(self, block: ChangeBlock, parent: Parent) -> None:
        """Begin to encode changes, with a parent that still has the parts as they were.

        Parts of one kind, see `part_table.Together`, that come in one call have whole groups, and ascend from
        call to call. The parent's memory is read until the next call has returned, or `delta`. After a call
        that raised, others do nothing.
        """
        if self._is_broken:
            return
        self._is_broken = True
        table, spans, num_begun = self._table, block.spans(), 0
        is_cut = np.zeros(len(spans.numbers), dtype=np.bool_)
        if isinstance(self._encoding, Context) and len(is_cut):
            is_cut, cuts = table.cuts(spans.numbers, spans.nums)
            num_begun = self._coding.begin(block, spans.at(is_cut), cuts, parent)
            self._digesting.begin(spans.numbers, parent)
        if not is_cut.all():
            self._stated += _stated(table, block, spans.at(~is_cut), parent, self._encoding.index)
        self._growth.append(_growth(block, spans, table, parent))
        # While the device counts in this.
        self._coding.advance(but=num_begun)
        # Until what was begun is ordered.
        self._parent, self._is_broken = parent, False

    def delta(self, num_changed: int) -> EncodedDelta:
        """Return all that was encoded; waits for the device."""
        self._coding.advance()
        self._parent = None
        return EncodedDelta(
            encoding=self._encoding.name,
            num_changed=num_changed,
            listing=listing(self._schema, self._stated, self._encoding.index),
            coded=self._coding.entries(),
            growth=joined_sums(self._growth),
            parents=self._digesting.sums(),
        )


def warm_up(table: PartTable, parent: Parent, device: torch.device) -> None:
    """Compile what codes changes, with one change of the largest part of each dtype; keeps nothing."""
    every = np.arange(len(table.parts))
    is_cut, cuts = table.cuts(every, np.ones_like(every))
    numbers, largest = every[is_cut], cuts.each(lambda kind: kind.largest)
    coding, digesting = _Coding(table), _Digesting(table, device)
    for its in _by(table.dtype[numbers]):
        place = np.flatnonzero(its)[largest[its].argmax()][None]
        (number,) = some = numbers[place]
        held = parent.part(number, table.parts[number]).to(device).view(torch.uint8)
        its_parent = Parent(held, parent.firsts - parent.firsts[number])
        first = _FirstOf(its_parent.part(number, table.parts[number])[:1])
        coding.begin(first, Spans(some, *(np.ones_like(some) for _ in range(5))), cuts.at(place), its_parent)
        digesting.begin(some, its_parent)
        coding.advance()
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


def _by(kinds: Array) -> list[Array]:
    """Return which are of each kind, ascending: bool."""
    return [kinds == kind for kind in np.unique(kinds)]


class _Begun(NamedTuple):
    """Some parts of one kind that are being coded."""

    owners: Array
    """int64 [num], the place in the schema of each's tensor."""
    cuts: Cuts
    kind: int
    """Of `part_table.Together`."""
    encoder: context_encode.Encoder


class _Coding:
    """Coded parts on their way to a file's entries; see `context_encode.Encoder` for the steps."""

    def __init__(self, table: PartTable) -> None:
        self._table, self._row_sets = table, defaultdict[int, RowSets](RowSets)
        self._formats = np.array([context_tables.FORMATS.get(each, _NO_FORMAT) for each in table.dtypes])
        self._steps: tuple[list[_Begun], list[_Begun]] = [], []
        """What is begun, and what is ordered too."""
        self._coded = defaultdict[int, list[Coded]](list)
        self._streams = defaultdict[int, list[torch.Tensor]](list)
        """By kind, on the device."""
        self._choosing = ThreadPoolExecutor(1, thread_name_prefix="patchstore-rows")

    def begin(self, changes: "Stating", spans: Spans, cuts: Cuts, parent: Parent) -> int:
        """Begin to code what changed of some parts, whole groups of them; see `Coder.add`.

        Returns of how many kinds they are, and so what to leave out if only what came before shall advance.
        """
        kinds = self._table.together.kinds[spans.numbers]
        every = np.unique(kinds).tolist()
        for kind in every:
            its = np.flatnonzero(kinds == kind)
            # In the order of the file.
            its = its[self._table.ranks[spans.numbers[its]].argsort()]
            self._begin(kind, changes, spans.at(its), cuts.at(its), parent)
        return len(every)

    def _begin(self, kind: int, changes: "Stating", spans: Spans, cuts: Cuts, parent: Parent) -> None:
        numbers, table = spans.numbers, self._table
        group = table.together.groups[numbers]
        order = np.lexsort((numbers, table.alike[numbers], group))
        firsts = np.flatnonzero(np.diff(group[order], prepend=-1))
        positions_dtype = torch.int64 if (spans.index_widths == 8).any() else torch.int32
        encoder = context_encode.Encoder(
            context_tables.geometry(cuts),
            self._formats[table.dtype[numbers]],
            parent.addresses(numbers),
            changes.positions(spans, positions_dtype),
            changes.values(spans, torch.int16),
            np.concatenate([np.zeros(1, dtype=np.int64), spans.nums.cumsum()]),
            (order, np.append(firsts, len(order))),
            self._row_sets[kind],
            self._choosing,
            largest=table.largest_tile,
        )
        self._steps[0].append(_Begun(table.owners[numbers], cuts, kind, encoder))

    def advance(self, *, but: int = 0) -> None:
        """Order what was begun, but for so many of the last; write what was ordered before."""
        begun, ordered = self._steps
        self._write(len(ordered))
        for each in begun[: len(begun) - but]:
            each.encoder.order()
            ordered.append(each)
        del begun[: len(begun) - but]

    def _write(self, num: int) -> None:
        """Write the streams of the first of those that are ordered, which frees the rest of their memory."""
        ordered = self._steps[1]
        for owners, cuts, kind, encoder in ordered[:num]:
            its, nothing = encoder.finish(), np.zeros(0, dtype=np.uint8)
            sets = self._row_sets[kind].sets
            self._coded[kind].append(Coded(owners, cuts, sets, its.row_sets, its.lengths, nothing))
            self._streams[kind].append(its.streams)
        del ordered[:num]

    def entries(self) -> dict[str, torch.Tensor]:
        """Return the file's entries for coded parts; waits for the device. Nothing can be begun then."""
        self._choosing.shutdown()
        self._write(len(self._steps[1]))
        if not self._coded:
            return {}
        coded = joined_kinds((its, self._row_sets[kind]) for kind, its in self._coded.items())
        order = coded.order()
        written = torch.cat([each for its in self._streams.values() for each in its])
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


class _FirstOf(NamedTuple):
    """The first element of a part, changed by a bit."""

    old: torch.Tensor
    """The bits before, on the device, [1]."""

    def positions(self, spans: Spans, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(1, dtype=dtype, device=self.old.device)

    def values(self, spans: Spans, dtype: torch.dtype) -> torch.Tensor:
        return self.old.to(dtype) ^ 1


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
            jobs = np.stack([owners, ramps(counts)], axis=1).astype(np.int32)
            self._begun.append((same, digest.digest(kind, sent(rows, device), sent(jobs, device))))

    def sums(self) -> PartSums:
        """Return the digest sums; waits for the device."""
        if not self._begun:
            return NO_SUMS
        digests = torch.cat([digests[:, :2] for _, digests in self._begun])
        return PartSums(
            np.concatenate([same for same, _ in self._begun]), digests.cpu().numpy().view(np.uint64)
        )


def digested(table: PartTable, held: Parent, device: torch.device) -> PartSums:
    """Return the digest sums of all parts of a table."""
    digesting = _Digesting(table, device)
    digesting.begin(np.arange(len(table.parts)), held)
    return digesting.sums()


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
