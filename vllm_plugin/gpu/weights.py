"""Live weights on a GPU: what `live.weights` does name by name, for all names at once.

The number of launches, and of times the host waits, grows with neither names nor regions.
"""

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.records import Schema, TensorSpec
from patchstore.errors import DeviceMemoryShort, LoadFailed, StateMismatch, UsageError
from patchstore.kernels import digest, gap_decode, new_stream
from patchstore.kernels import patch as kernels
from patchstore.kernels.digest import BLOCK
from patchstore.kernels.gap_decode import TILE
from patchstore.kernels.patch import Exchange, Stated
from patchstore.kernels.segments import Column, Kind
from patchstore.read.deltas import Deltas
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, bits
from patchstore.tensors.columns import ramps
from vllm_plugin.gpu.decode import (
    Patches,
    Places,
    change_of_one,
    decode,
    has_gaps,
    jobs_of,
    num_tiles,
    send_gaps,
    table_on,
)
from vllm_plugin.gpu.merge import Merger
from vllm_plugin.gpu.upload import room_on, send, tables_on
from vllm_plugin.live.weights import BROUGHT_BYTES, LiveWeights, StagedWrite
from vllm_plugin.map.mapping import SliceSums, StagedSums, WeightMap
from vllm_plugin.map.regions import Region

Array = npt.NDArray[Any]


class Segment(NamedTuple):
    """One region of one name."""

    name: str
    number: int
    """See `WeightMap.number`."""
    kind: Kind
    row: tuple[int, ...]
    """Of the table of segments, without what a patch brings."""
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """Segments of one kind whose patches state positions alike."""

    kind: Kind
    position_width: int
    """See `Stated.position_width`."""
    segments: Sequence[Segment]
    """[num_segments]"""
    numbers: Array
    """int64 [num_segments], see `WeightMap.number`."""
    table: Array
    """int64 [num_segments, kind.num_columns], see `Column`."""
    jobs: Array
    """int32 [num_jobs, 2]: a segment, and which tile of its patch."""


class SegmentTable:
    """All segments of a rank, as rows of numbers: a change picks those of its tensors at once."""

    def __init__(self, schema: Schema, segments: Mapping[str, Sequence[Segment]]) -> None:
        of_each = [segments.get(spec.name, ()) for spec in schema.tensors]
        self._every = [each for its in of_each for each in its]
        self.counts = np.array([len(its) for its in of_each], dtype=np.int64)
        """int64 [T], how many segments each tensor of the schema has."""
        self._firsts = self.counts.cumsum() - self.counts
        # How regions begin matters only where they are read as a whole.
        numbers: dict[Kind, int] = {}
        self._kind = np.array(
            [numbers.setdefault(kind, len(numbers)) for kind in _unaligned(self._every)], dtype=np.int64
        )
        """int64 [num], of `kinds`."""
        self.kinds = list(numbers)
        """Kinds of segments, however regions begin."""
        self._numbers = np.array([each.number for each in self._every], dtype=np.int64)
        width = max((kind.num_columns for kind in self.kinds), default=int(Column.DIMS)) - Column.MEMORY
        self._rows = np.zeros((len(self._every), width), dtype=np.int64)
        """int64 [num, ..], the columns from MEMORY on, with zeros behind those that a kind has."""
        for kind in range(len(self.kinds)):
            mine = np.flatnonzero(self._kind == kind)
            rows = np.array([self._every[number].row for number in mine.tolist()], dtype=np.int64)
            self._rows[mine, : rows.shape[1]] = rows

    def pick(self, patches: Patches) -> list[Picked]:
        """Return the segments that patches of some tensors concern, by kind and width of positions."""
        firsts, counts = self._firsts[patches.numbers], self.counts[patches.numbers]
        owners, every = np.repeat(np.arange(len(counts)), counts), ramps(counts, firsts)
        tiles = num_tiles(patches.nums)
        brought = np.column_stack([patches.positions, patches.values, patches.nums, tiles.cumsum() - tiles])
        # Both in one number: a position has 8 bytes at most.
        alike = self._kind[every] * 16 + patches.position_widths[owners]
        found = []
        for number in np.unique(alike).tolist():
            mine = np.flatnonzero(alike == number)
            kind_number, width = divmod(number, 16)
            kind, picked = self.kinds[kind_number], every[mine]
            rows = self._rows[picked, : kind.num_columns - Column.MEMORY]
            table = np.concatenate([brought[owners[mine]], rows], axis=1)
            found.append(
                Picked(
                    kind=kind,
                    position_width=width,
                    segments=[self._every[each] for each in picked.tolist()],
                    numbers=self._numbers[picked],
                    table=table,
                    jobs=jobs_of(table[:, Column.NUM], TILE),
                )
            )
        return found


def _unaligned(segments: Iterable[Segment]) -> Iterable[Kind]:
    """Return the kinds of segments, as if no region said how it begins."""
    found: dict[Kind, Kind] = {}
    for each in segments:
        if each.kind not in found:
            found[each.kind] = replace(each.kind, is_aligned=False)
        yield found[each.kind]


@dataclass(slots=True)
class Exchanges(StagedWrite):
    """A change of all tensors at once."""

    parts: list[tuple[Sequence[Segment], Exchange]] = field(default_factory=list)
    keeps_old: bool = True
    """Whether what it replaces must be what was read when it was staged."""

    def add(self, other: "Exchanges") -> None:
        self.parts += other.parts
        self.staged_sums = self.staged_sums.joined(other.staged_sums)


class DeviceWeights(LiveWeights):
    """`LiveWeights` where Triton runs."""

    _segments: Mapping[str, Sequence[Segment]]
    _table: SegmentTable
    """Of the same."""
    _served: Places
    """Of names that can be decoded from what is served."""
    _all: Sequence[tuple[Array, Kind, torch.Tensor, torch.Tensor]] | None
    """What it takes to digest everything, made once."""
    _target: torch.dtype

    def follow(self, mapped: WeightMap) -> None:
        super().follow(mapped)
        specs = mapped.schema.by_name()
        for index in self.written():
            # Kernels are given addresses, and would not be told whose they are.
            name, place = mapped.runtimes[index].names[0], mapped.runtimes[index].storage.device
            if place != self.device:
                raise UsageError(
                    f"{name!r} is on {place}, and other weights on {self.device}: serve the model without "
                    "offloading"
                )
        self._segments = {
            name: [self._segment(specs[name], index, region) for index, region in found]
            for name, found in mapped.regions.items()
        }
        self._table = SegmentTable(mapped.schema, self._segments)
        memories = {index: self._flat(index) for index in self.written()}
        held = {name: found for name, found in self._boxes.items() if found is not None}
        self._served = Places.served(mapped.schema, held, memories)
        longest = max((self._flat(index).numel() for index in self.written()), default=0)
        self._target = torch.int32 if longest < 2**31 else torch.int64
        self._all = None
        self._stream = new_stream(self.device)
        if self.device.type == "cuda":
            self._compile()

    def _compile(self) -> None:
        """Run every kernel on nothing: compiled now, and not when generation waits for the first update."""
        nothing = torch.zeros(0, dtype=torch.int32, device=self.device)
        jobs = torch.zeros(1, 2, dtype=torch.int32, device=self.device)
        stream = torch.zeros(1, len(gap_decode.Stream), dtype=torch.int64, device=self.device)
        gap_decode.sum_gaps(stream, jobs)
        for kind in self._table.kinds:
            table = torch.zeros(1, kind.num_columns, dtype=torch.int64, device=self.device)
            # Strides to divide by.
            table[:, Column.DIMS :] = 1
            stated = Stated(
                kind=kind,
                table=table,
                jobs=jobs,
                position_width=2,
                starts=nothing.new_zeros(1, dtype=torch.int64),
            )
            counts = kernels.count(stated)
            exchange, _ = kernels.translate(stated, counts, 0, self._target, is_digested=True)
            kernels.exchange(exchange)
        self._compile_decoding()

    def _compile_decoding(self) -> None:
        """Decode a change of one element of the smallest tensor of each kind; nothing is written."""
        served, specs = self._served, self.map.schema.tensors
        smallest: dict[object, int] = {}
        ends = (served.firsts + served.num_boxes).tolist()
        for number, first, end in zip(served.numbers.tolist(), served.firsts.tolist(), ends, strict=True):
            spec, widths = specs[number], np.unique(served.memory_widths[first:end]).tolist()
            if spec.num_elements and self._segments.get(spec.name):
                kind = spec.dtype, len(spec.shape), *widths
                other = smallest.setdefault(kind, number)
                if spec.num_elements < specs[other].num_elements:
                    smallest[kind] = number
        for number in smallest.values():
            name = specs[number].name
            coded = change_of_one(self.map.schema, name, self.gathered(name).cpu())
            decode(coded, served, self.map.schema, self.device)

    def _segment(self, spec: TensorSpec, index: int, region: Region) -> Segment:
        source, target, flat = region.source, region.target, self._flat(index)
        is_run = source.strides in {(), (1,)} and target.strides in {(), (1,)}
        address = flat.data_ptr()
        kind = Kind(
            value_width=TORCH_DTYPES[spec.dtype].itemsize,
            memory_width=flat.element_size(),
            num_dims=0 if is_run else len(source.shape),
            is_narrow=spec.num_elements < 2**31,
            is_aligned=is_run and (address + target.offset * flat.element_size()) % 16 == 0,
        )
        dims = () if is_run else (*source.shape, *source.strides, *target.strides)
        return Segment(
            name=spec.name,
            number=self.map.number(spec.name, source),
            kind=kind,
            row=(address, source.offset, source.end, target.offset, *dims),
            num_elements=region.num_elements,
        )

    # Reading.

    def slice_sums(self, names: Iterable[str]) -> SliceSums:
        names = [name for name in names if name in self._segments]
        is_all = len(names) == len(self._segments)
        tables = self._all if is_all else None
        if tables is None:
            tables = [self._blocks(kind, found) for kind, found in self._by_kind(names).items()]
        if is_all:
            self._all = tables
        results = [digest.digest(kind, table, jobs) for _, kind, table, jobs in tables]
        nothing = torch.zeros(0, 3, dtype=torch.int64, device=self.device)
        columns = torch.cat([nothing, *results]).cpu().numpy().view(np.uint64)
        sums = columns[:, :2].copy()
        # An element that no checkpoint holds must match none.
        sums[:, 0] += columns[:, 2] > 0
        return SliceSums(np.concatenate([np.zeros(0, dtype=np.int64), *(each for each, *_ in tables)]), sums)

    def _blocks(
        self, kind: Kind, segments: Sequence[Segment]
    ) -> tuple[Array, Kind, torch.Tensor, torch.Tensor]:
        rows = [(0, 0, each.num_elements, 0, *each.row) for each in segments]
        jobs = jobs_of(np.array([each.num_elements for each in segments]), BLOCK)
        slices = np.array([each.number for each in segments], dtype=np.int64)
        return slices, kind, table_on(self.device, rows), table_on(self.device, jobs)

    def _by_kind(self, names: Iterable[str]) -> dict[Kind, list[Segment]]:
        found: dict[Kind, list[Segment]] = {}
        for name in names:
            for each in self._segments.get(name, ()):
                found.setdefault(each.kind, []).append(each)
        return found

    # Staging.

    @contextmanager
    def aside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        try:
            with torch.cuda.stream(self._stream):
                yield
                self._stream.synchronize()
        except torch.OutOfMemoryError as exc:
            # The frames hold what was staged so far, for as long as the error is kept.
            traceback.clear_frames(exc.__traceback__)
            torch.cuda.empty_cache()
            raise DeviceMemoryShort(
                f"an update needs more than the {room_on(self.device) / 2**30:.2f} GiB that are free on "
                f"{self.device}; go to a version in between first, as `patchstore follow` does, or start "
                "vllm with a lower --gpu-memory-utilization"
            ) from None
        finally:
            self.staging_bytes = torch.cuda.max_memory_allocated(self.device) - before

    def spare_bytes(self) -> int:
        if self.device.type != "cuda":
            return BROUGHT_BYTES
        # Not what torch keeps: forward passes use that.
        free, _ = torch.cuda.mem_get_info(self.device)
        return min(BROUGHT_BYTES, free // 2)

    def stage(self, patches: Iterable[TensorPatch], *, keep_old: bool) -> StagedWrite:
        wanted = [patch for patch in patches if self._segments.get(patch.name)]
        lists = [each for patch in wanted for each in (patch.indices, bits(patch.values))]
        lists = send(lists, self.device)
        rows = [
            (indices.data_ptr(), values.data_ptr(), values.numel(), indices.element_size())
            for indices, values in zip(lists[::2], lists[1::2], strict=True)
        ]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        places = self.map.schema.places
        numbers = np.array([places[patch.name] for patch in wanted], dtype=np.int64)
        return self._exchanges(Patches(numbers, *columns), None, keep_old=keep_old)

    def stage_deltas(
        self, deltas: Deltas, names: Sequence[str], base: Mapping[str, torch.Tensor], *, keep_old: bool
    ) -> StagedWrite:
        versions = deltas.contents()
        if versions is None:
            return super().stage_deltas(deltas, names, base, keep_old=keep_old)
        change = Exchanges(keeps_old=keep_old)
        schema = self.map.schema
        numbers = np.array(sorted(schema.places[name] for name in names), dtype=np.int64)
        numbers = numbers[self._table.counts[numbers] > 0]
        if len(versions) == 1:
            (content,) = versions
            # What is both listed and coded, or listed several times, is sorted as versions are.
            stated, counts = content.numbers
            alone = np.intersect1d(numbers, stated[counts == 1])
            gaps = send_gaps(
                [each.of(alone) for each in content.listed if has_gaps(each)], schema, self.device
            )
            listed = np.concatenate([numbers[:0], *(each.numbers for each in content.listed)])
            based = [schema.places[name] for name in base.keys() & schema.places]
            coded = content.of(np.setdiff1d(numbers, [*listed, *based]).astype(np.int64)).coded
            decoded = decode(coded, self._served, schema, self.device)
            patches = gaps.patches.joined(decoded.patches())
            change.add(self._exchanges(patches, gaps.starts, keep_old=keep_old))
            del decoded
            numbers = np.setdiff1d(numbers, patches.numbers)
        if not len(numbers):
            return change
        # Only what is written is kept of a part, and not what says so.
        merger = Merger(schema, self._served, base, self.gathered, self._transfers, self.device)
        for patches, _memory in merger.merged(versions, numbers, room_on(self.device)):
            change.add(self._exchanges(patches, None, keep_old=keep_old))
        return change

    def _exchanges(self, patches: Patches, starts: torch.Tensor | None, *, keep_old: bool) -> Exchanges:
        """Translate patches; those with gaps come first, and `Stated.starts` are of their tiles."""
        picked = self._table.pick(patches)
        # Only now, as the copy waits for the device, which may be busy with the patches.
        tables = tables_on(self.device, *(each.table for each in picked), *(each.jobs for each in picked))
        stated = [
            Stated(
                kind=each.kind,
                table=table,
                jobs=jobs,
                position_width=each.position_width,
                starts=jobs if starts is None else starts,
            )
            for each, table, jobs in zip(picked, tables, tables[len(picked) :], strict=False)
        ]
        change = Exchanges(keeps_old=keep_old)
        if not stated:
            return change
        counts = [kernels.count(each) for each in stated]
        totals = torch.stack([each.sum() for each in counts]).tolist()
        made = [
            kernels.translate(each, count, total, self._target, is_digested=keep_old)
            for each, count, total in zip(stated, counts, totals, strict=True)
        ]
        change.parts += [(each.segments, exchange) for each, (exchange, _) in zip(picked, made, strict=True)]
        # Also waits until nothing reads the patches any more.
        columns = torch.cat([sums for _, sums in made]).cpu().numpy().view(np.uint64)
        before, after, num_strange = columns[:, :2].copy(), columns[:, 2:4], columns[:, 4]
        # An element that no checkpoint holds must match none.
        before[:, 0] += num_strange > 0
        if keep_old:
            slices = np.concatenate([each.numbers for each in picked])
            change.staged_sums = change.staged_sums.joined(StagedSums(slices, before, after))
        return change

    # Writing.

    def overwritten(self, change: StagedWrite) -> str | None:
        # `scatter` finds out, as it reads what it replaces anyway.
        return None

    def scatter(self, change: StagedWrite) -> None:
        """Write a change in one pass, which also keeps what it replaces.

        It is not read back here: that took a third of the time, while generation waits. No two elements of a
        map have one place, and what an element is to become was digested when it was staged. If what it
        replaced was not what had been staged, all is written when this raises, and `gather_back` puts that
        back.
        """
        assert isinstance(change, Exchanges)
        # The largest first: while it runs, the others are launched.
        change.parts.sort(key=lambda part: len(part[1].counts), reverse=True)
        wrong = _first_wrong(change, [kernels.exchange(each) for _, each in change.parts])
        if wrong is not None and change.keeps_old:
            raise StateMismatch(f"something wrote to {wrong!r} after this version was staged")

    def gather_back(self, change: StagedWrite) -> None:
        assert isinstance(change, Exchanges)
        parts = [(segments, replace(each, new=each.old, old=each.new)) for segments, each in change.parts]
        back = Exchanges(parts=parts, keeps_old=False)
        self.scatter(back)
        if (wrong := _first_wrong(back, [kernels.compare(each) for _, each in parts])) is not None:
            raise LoadFailed(f"{wrong!r} did not keep what was written to it")


def _first_wrong(change: Exchanges, found: Sequence[torch.Tensor]) -> str | None:
    """Name what the first of these flags that is raised is about; waits for the device."""
    # All of them, so that no kernel is under way any more; one by one, which takes no memory of the device.
    flags = [int(flag) for flag in found]
    for (segments, _), segment in zip(change.parts, flags, strict=True):
        if segment != kernels.NONE:
            return segments[segment].name
    return None
