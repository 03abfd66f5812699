"""Encode changes on the device that found them; `codec.delta` does the same on the CPU.

Imports Triton, so only what runs kernels may import it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.records import DTYPE_BYTES, Part, Schema, TensorSpec
from patchstore.codec import Encoding, IndexEncoding
from patchstore.codec.context import Coded, Context, Tiling, packed_table
from patchstore.codec.delta import NO_SUMS, EncodedDelta, stated
from patchstore.codec.index import Gap, Raw
from patchstore.codec.listing import Column, Listing, Stated, listing
from patchstore.codec.part_table import PartSums, PartTable, cut_of_part
from patchstore.kernels import context_encode, context_tables, digest
from patchstore.kernels.segments import Kind
from patchstore.tensors.bits import INTEGERS, TORCH_DTYPES, TensorPatch, bits, grouped, index_dtype, unsigned
from patchstore.tensors.columns import Group
from patchstore.tensors.parts import positions
from patchstore.tensors.state_digest import of_elements

Array = npt.NDArray[Any]


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


class Span(NamedTuple):
    """Where the data of a block has what changed of one tensor."""

    spec: TensorSpec
    number: int
    """Of the tensor, as the snapshot was given it."""
    num: int
    """Elements that are stated."""
    indices: int
    """At which byte the positions, or gaps, begin."""
    values: int
    """At which byte the values begin."""
    index_width: int
    """Bytes of a position; 2 of a gap."""


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
        patches = [self._views(span) for span in spans]
        at = [indices.to(torch.int64) for indices, _ in patches]
        values = torch.cat([bits(values) for _, values in patches])
        return Group(
            self._layout.numbers[tensors], self._nums[tensors], torch.cat(at).numpy(), unsigned(values)
        )

    def spans(self, tensors: Array | None = None) -> list[Span]:
        """Say where the changes are; ascending by name."""
        layout, changed = self._layout, self._changed() if tensors is None else tensors
        sizes = self._nums[layout.tensors] * layout.widths
        starts = sizes.cumsum() - sizes
        indices, values = layout.indices[changed], layout.values[changed]
        columns = (
            *(layout.numbers[changed], self._nums[changed]),
            *(starts[indices], starts[values], layout.widths[indices]),
        )
        rows = np.stack(columns, axis=1).tolist()
        return [Span(layout.specs[tensor], *row) for tensor, row in zip(changed.tolist(), rows, strict=True)]

    def _views(self, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        data, dtype = self.data, TORCH_DTYPES[span.spec.dtype]
        indices = data[span.indices : span.indices + span.num * span.index_width]
        values = data[span.values : span.values + span.num * dtype.itemsize]
        integer = torch.uint16 if self._layout.gaps else INTEGERS[span.index_width]
        return indices.view(integer), values.view(dtype)

    def patch(self, span: Span) -> TensorPatch:
        """Return what changed of one tensor, of a block in encoding `raw`; it shares the block."""
        indices, values = self._views(span)
        return TensorPatch(name=span.spec.name, indices=indices, values=values)


def encode(
    schema: Schema,
    table: PartTable,
    encoding: Encoding,
    *,
    num_changed: int,
    block_of: Callable[..., ChangeBlock],
    parent: Mapping[str, torch.Tensor],
) -> EncodedDelta:
    """Encode changes against the snapshot that they were found with, which is still the parent's.

    Waits for the device. `table` says what the snapshot's tensors, `parent`, are; `block_of` is
    `DeviceChanges.block`.
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
    found = []
    for span in block.spans():
        part = table.parts[span.number]
        cut = cut_of_part(part, span.num) if isinstance(encoding, Context) else None
        found.append(_Found(part, span, parent[span.spec.name], cut))
    listed = _stated(table, block, [each for each in found if each.cut is None], encoding.index)
    coded, parents = dict[str, torch.Tensor](), NO_SUMS
    if isinstance(encoding, Context):
        # The host works on one of these while the device works on the other.
        coding = _Coding(block, [each for each in found if each.cut is not None], table)
        digesting = _Digesting(found, block.data.device)
        coding.order()
    said = listing(schema, listed, encoding.index)
    growth = _growth(block, found)
    if isinstance(encoding, Context):
        coded, parents = coding.entries(), digesting.sums()
    return EncodedDelta(
        encoding=encoding.name,
        num_changed=num_changed,
        listing=said,
        coded=coded,
        growth=growth,
        parents=parents,
    )


class _Found(NamedTuple):
    """What changed of a part, on the device."""

    part: Part
    span: Span
    """By place in the part."""
    parent: torch.Tensor
    """The part before."""
    cut: Tiling | None
    """How it is coded; None where it is listed."""


def _stated(
    table: PartTable, block: ChangeBlock, found: Sequence[_Found], index: IndexEncoding
) -> list[Stated]:
    """Return what a file states of parts, by position in the tensor, on the host."""
    patches = [block.patch(each.span) for each in found]
    indices = _on_host([patch.indices for patch in patches])
    values = _on_host([bits(patch.values) for patch in patches])
    by_dtype: dict[str, list[int]] = {}
    for place, each in enumerate(found):
        by_dtype.setdefault(each.part.spec.dtype, []).append(place)
    held = {each.span.number: bits(each.parent) for each in found}

    def before(group: Group) -> Array:
        ends = group.counts.cumsum().tolist()
        each = zip(group.numbers.tolist(), [0, *ends], ends, strict=False)
        at = [(held[number], torch.from_numpy(group.positions[start:end])) for number, start, end in each]
        return unsigned(torch.cat([flat[some.to(flat.device)] for flat, some in at]).cpu())

    listed: list[Stated] = []
    for places in by_dtype.values():
        group = Group(
            np.array([found[place].span.number for place in places], dtype=np.int64),
            np.array([found[place].span.num for place in places], dtype=np.int64),
            torch.cat([indices[place].to(torch.int64) for place in places]).numpy(),
            unsigned(torch.cat([values[place] for place in places])),
        )
        listed += stated(table, group, before, index)
    return listed


def _on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Bring flat tensors to the host: those of one dtype together, as hundreds may have a few bytes."""
    brought: dict[int, torch.Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:
        same = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
        held = torch.cat([tensors[number] for number in same]).cpu()
        brought |= zip(same, torch.split(held, [tensors[number].numel() for number in same]), strict=True)
    return [brought[number] for number in range(len(tensors))]


def _growth(block: ChangeBlock, found: Sequence[_Found]) -> PartSums:
    """Return by how much the digest sums of parts grow."""
    growth = block.growth()
    for place, each in enumerate(found):
        if each.part.lines is not None:
            continue
        # Cut in three dimensions, which is rare.
        patch = block.patch(each.span)
        local = patch.indices.to(torch.int64)
        at, old = positions(each.part, local), bits(each.parent)[local]
        growth.sums[place] = of_elements(at, patch.values).minus(of_elements(at, old))
    return growth


class _Coding:
    """Coded parts on their way to a file's entries; see `context_encode.Encoder` for the steps."""

    def __init__(self, block: ChangeBlock, coded: Sequence[_Found], table: PartTable) -> None:
        owners = table.owners
        self._ordered = sorted(coded, key=lambda each: (owners[each.span.number], each.part.box_start))
        self._places = owners[[each.span.number for each in self._ordered]].tolist()
        self._cuts = [each.cut for each in self._ordered if each.cut is not None]
        self._encoder: context_encode.Encoder | None = None
        if not coded:
            return
        # Row sets are chosen in the order in which `codec.delta` does.
        numbers = {id(each): number for number, each in enumerate(self._ordered)}
        by_dtype: dict[str, list[_Found]] = {}
        for each in coded:
            by_dtype.setdefault(each.part.spec.dtype, []).append(each)
        groups = [
            [numbers[id(each)] for each in sorted(group, key=lambda each: table.alike[each.span.number])]
            for _, some in sorted(by_dtype.items())
            for group in grouped(some, lambda _: None, lambda each: each.part.num_elements)
        ]
        spans = [each.span for each in self._ordered]
        nums, indices, values, index_widths = np.array([span[2:] for span in spans], dtype=np.int64).T
        widths = np.array([DTYPE_BYTES[span.spec.dtype] for span in spans], dtype=np.int64)
        positions_dtype = torch.int64 if (index_widths == 8).any() else torch.int32
        self._encoder = context_encode.Encoder(
            context_tables.geometry(self._cuts),
            np.array(
                [context_tables.FORMATS[each.part.spec.dtype] for each in self._ordered], dtype=np.int64
            ),
            np.array([each.parent.data_ptr() for each in self._ordered], dtype=np.int64),
            _joined(block.data, indices, nums, index_widths, positions_dtype),
            _joined(block.data, values, nums, widths, torch.int16),
            np.concatenate([np.zeros(1, dtype=np.int64), nums.cumsum()]),
            groups,
        )

    def order(self) -> None:
        if self._encoder is not None:
            self._encoder.order()

    def entries(self) -> dict[str, torch.Tensor]:
        """Return the file's entries for coded parts; waits for the device."""
        if self._encoder is None:
            return {}
        found = self._encoder.finish()
        streams = torch.empty(
            found.streams.shape, dtype=torch.uint8, device="cpu", pin_memory=found.streams.is_cuda
        )
        streams.copy_(found.streams, non_blocking=True)
        ends = [*accumulate((cut.num_tiles for cut in self._cuts), initial=0)]
        sets = [found.sets[number] for number in found.row_sets.tolist()]
        nothing = np.zeros(0, dtype=np.uint8)
        items = [
            (place, Coded(tiling=cut, lo=its.lo, rows=its.rows, lengths=found.lengths[at:end], data=nothing))
            for place, cut, its, (at, end) in zip(self._places, self._cuts, sets, pairwise(ends), strict=True)
        ]
        table = packed_table(items)
        if found.streams.is_cuda:
            torch.cuda.current_stream().synchronize()
        return {"table": table, "tiles": streams}


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

    def __init__(self, found: Sequence[_Found], device: torch.device) -> None:
        """Begin; all parts of one element width and kind of region at once."""
        self._begun: list[tuple[Sequence[_Found], torch.Tensor]] = []
        groups: dict[tuple[int, bool], list[_Found]] = {}
        for each in found:
            key = DTYPE_BYTES[each.part.spec.dtype], each.part.run is not None
            groups.setdefault(key, []).append(each)
        for (width, is_run), same in sorted(groups.items(), key=lambda item: item[0]):
            ranks = 0 if is_run else max(len(each.part.size) for each in same)
            rows = [_region(each, ranks) for each in same]
            counts = np.array([-(-each.part.num_elements // digest.BLOCK) for each in same])
            owners = np.repeat(np.arange(len(same)), counts)
            blocks = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
            kind = Kind(
                value_width=width,
                memory_width=width,
                num_dims=ranks,
                is_narrow=all(each.part.spec.num_elements < 2**31 for each in same),
                is_aligned=is_run and all(row[4] % 16 == 0 for row in rows),
            )
            jobs = torch.from_numpy(np.stack([owners, blocks], axis=1).astype(np.int32))
            table = torch.tensor(rows, device="cpu")
            self._begun.append((same, digest.digest(kind, _sent(table, device), _sent(jobs, device))))

    def sums(self) -> PartSums:
        """Return the digest sums; waits for the device."""
        numbers = [each.span.number for same, _ in self._begun for each in same]
        sums = [digests[:, :2].cpu().numpy().view(np.uint64) for _, digests in self._begun]
        return PartSums(np.array(numbers, dtype=np.int64), np.concatenate(sums))


def _sent(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy from host memory to the device, without waiting for what that does already."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _region(found: _Found, num_dims: int) -> tuple[int, ...]:
    """Return the row of a part in the table of segments; see `kernels.segments`."""
    part, address = found.part, found.parent.data_ptr()
    if part.run is not None and not num_dims:
        return (0, 0, part.num_elements, 0, address, part.run, part.run + part.num_elements, 0)
    shape = part.spec.shape
    source = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    target = [prod(part.size[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * stride for start, stride in zip(part.start, source, strict=True))
    last = first + sum((size - 1) * stride for size, stride in zip(part.size, source, strict=True))
    # Dimensions of one index in front, where parts of fewer dimensions are digested with these.
    more = num_dims - len(shape)
    dims = (*(1,) * more, *part.size, *(1,) * more, *source, *(1,) * more, *target)
    return (0, 0, part.num_elements, 0, address, first, last + 1, 0, *dims)
