"""Live weights on a GPU: what `weights` does name by name, for all names at once.

The number of launches, and of times the host waits, grows with neither names nor regions.
"""

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from patchstore.encodings.base import EncodedTensor, check_stored
from patchstore.encodings.context import Coded, encode
from patchstore.errors import CorruptObject, DeviceMemoryShort, LoadFailed, StateMismatch, UsageError
from patchstore.format.records import TensorSpec
from patchstore.kernels import new_stream
from patchstore.kernels import patch as kernels
from patchstore.kernels.patch import BLOCK, TILE, Exchange, Kind, Stated
from patchstore.read.deltas import Deltas
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, bits, index_dtype, unsigned
from patchstore.tensors.state_digest import Sums
from vllm_plugin.change import Change
from vllm_plugin.decode_gpu import Listed, Patch, Places, decode
from vllm_plugin.mapping import Claims, Growth, WeightMap
from vllm_plugin.regions import Region, View
from vllm_plugin.runtime_bits import PIECE
from vllm_plugin.upload import send
from vllm_plugin.weights import LiveWeights

MERGED = 1 << 25
"""Changes of several versions that are merged at a time, in about 2 GB of the device's memory.

A tensor of which they state more is copied and written to: twice the tensor, and changes of one version.
"""

_MERGING_BYTES = 64
"""Of the device's memory, for each change that is merged: keys, values, and what sorting takes."""


class _Segment(NamedTuple):
    """One region of one name."""

    name: str
    source: View
    number: int
    """See `WeightMap.number`."""
    kind: Kind
    row: tuple[int, ...]
    """Of the table of segments, without what a patch brings."""
    num_elements: int


@dataclass(slots=True)
class Exchanges(Change):
    """A change of all tensors at once."""

    parts: list[tuple[Sequence[_Segment], Exchange]] = field(default_factory=list)
    keeps_old: bool = True
    """Whether what it replaces must be what was read when it was staged."""

    def add(self, other: "Exchanges") -> None:
        """Take a change of other elements over."""
        self.parts += other.parts
        self.growth = self.growth.joined(other.growth)


Stored = Mapping[str, tuple[str, EncodedTensor | Coded]]
"""One version: by name the key of an object, and what it has."""


class _Gaps(NamedTuple):
    """One version's patches of some names on the device."""

    patches: dict[str, Patch]
    starts: torch.Tensor
    """int64 [num_tiles]: one past the position before each tile."""
    jobs: torch.Tensor
    """int32 [num_tiles, 2]: which of the patches, and which of its tiles."""
    lists: list[torch.Tensor]
    """Gaps and values in turn, which the patches point to."""


class DeviceWeights(LiveWeights):
    """`LiveWeights` where Triton runs."""

    _segments: Mapping[str, Sequence[_Segment]]
    _served: Mapping[str, Places]
    """Of names that can be decoded from what is served."""
    _all: Sequence[tuple[Sequence[_Segment], Kind, torch.Tensor, torch.Tensor]] | None
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
        memories = {index: self._flat(index) for index in self.written()}
        self._served = {
            name: Places.served(specs[name], found, memories)
            for name, found in self._boxes.items()
            if found is not None
        }
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
        kernels.sum_gaps(torch.zeros(1, len(kernels.Stream), dtype=torch.int64, device=self.device), jobs)
        for kind in {replace(kind, is_aligned=False) for kind in self._by_kind(self._segments)}:
            table = torch.zeros(1, kind.num_columns, dtype=torch.int64, device=self.device)
            # Strides to divide by.
            table[:, kernels.Column.DIMS :] = 1
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
        specs = self.map.schema.by_name()
        smallest: dict[object, str] = {}
        for name in sorted(self._served, key=lambda each: (specs[each].num_elements, each)):
            widths = tuple(sorted(set(self._served[name].memory_widths.tolist())))
            if specs[name].num_elements and self._segments.get(name):
                smallest.setdefault((specs[name].dtype, len(specs[name].shape), widths), name)
        for name in smallest.values():
            old = unsigned(self.gathered(name).cpu())
            coded = encode(specs[name], old, np.zeros(1, dtype=np.int64), old[:1] ^ 1)
            decode([name], [("nothing", coded)], [self._served[name]], self.device)

    def _segment(self, spec: TensorSpec, index: int, region: Region) -> _Segment:
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
        return _Segment(
            name=spec.name,
            source=source,
            number=self.map.number(spec.name, source),
            kind=kind,
            row=(address, source.offset, source.end, target.offset, *dims),
            num_elements=region.num_elements,
        )

    # Reading.

    def claims(self, names: Iterable[str]) -> Claims:
        names = [name for name in names if name in self._segments]
        is_all = len(names) == len(self._segments)
        tables = self._all if is_all else None
        if tables is None:
            tables = [self._blocks(kind, found) for kind, found in self._by_kind(names).items()]
        if is_all:
            self._all = tables
        results = [kernels.digest(kind, table, jobs) for _, kind, table, jobs in tables]
        claims: dict[str, list[tuple[View, Sums]]] = {}
        for (segments, _, _, _), sums in zip(tables, results, strict=True):
            for each, (first, second, strange) in zip(segments, sums.tolist(), strict=True):
                claims.setdefault(each.name, []).append((each.source, _sums(first, second, strange)))
        return claims

    def _blocks(
        self, kind: Kind, segments: Sequence[_Segment]
    ) -> tuple[Sequence[_Segment], Kind, torch.Tensor, torch.Tensor]:
        rows = [(0, 0, each.num_elements, 0, *each.row) for each in segments]
        jobs = _jobs(np.array([each.num_elements for each in segments]), BLOCK)
        return segments, kind, self._table(rows), self._table(jobs)

    def _by_kind(self, names: Iterable[str]) -> dict[Kind, list[_Segment]]:
        found: dict[Kind, list[_Segment]] = {}
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
                f"an update needs more than the {self._room() / 2**30:.2f} GiB that are free on "
                f"{self.device}; go to a version in between first, as `patchstore follow` does, or start "
                "vllm with a lower --gpu-memory-utilization"
            ) from None
        finally:
            self.staging_bytes = torch.cuda.max_memory_allocated(self.device) - before

    def _room(self) -> int:
        """Return how many bytes can be allocated on the device."""
        if self.device.type != "cuda":
            return 1 << 62
        free, _ = torch.cuda.mem_get_info(self.device)
        idle = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + idle

    def stage(self, patches: Iterable[TensorPatch], *, keep_old: bool) -> Change:
        wanted = [patch for patch in patches if self._segments.get(patch.name)]
        lists = [each for patch in wanted for each in (patch.indices, bits(patch.values))]
        lists = send(lists, self.device)
        where = {
            patch.name: Patch(indices.data_ptr(), values.data_ptr(), values.numel(), indices.element_size())
            for patch, indices, values in zip(wanted, lists[::2], lists[1::2], strict=True)
        }
        return self._exchanges(where, None, keep_old=keep_old)

    def stage_deltas(
        self, deltas: Deltas, names: Sequence[str], base: Mapping[str, torch.Tensor], *, keep_old: bool
    ) -> Change:
        versions = deltas.stored()
        if versions is None:
            return super().stage_deltas(deltas, names, base, keep_old=keep_old)
        names = [name for name in names if self._segments.get(name)]
        change = Exchanges(keeps_old=keep_old)
        if len(versions) == 1:
            (stored,) = versions
            gaps = self._gaps(stored, [name for name in names if not isinstance(stored[name][1], Coded)])
            coded = [name for name in names if isinstance(stored[name][1], Coded) and name not in base]
            decoded = self._decoded(stored, coded, [self._served[name] for name in coded])
            patches = gaps.patches | decoded.patches()
            change.add(self._exchanges(patches, gaps.starts, keep_old=keep_old))
            del decoded
            names = [name for name in names if name not in patches]
        # Only what is written is kept of a part, and not what says so.
        for patches, _memory in self._merged(versions, names, base):
            change.add(self._exchanges(patches, None, keep_old=keep_old))
        return change

    def _gaps(self, stored: Stored, names: Sequence[str]) -> "_Gaps":
        """Bring one version's patches of some names to the device.

        Raises:
            CorruptObject: of another dtype or length, or beyond the end of a tensor.
        """
        specs = self.map.schema.by_name()
        found: list[EncodedTensor] = []
        for name in names:
            where, encoded = stored[name]
            assert isinstance(encoded, EncodedTensor)
            check_stored(encoded, specs[name], torch.uint16, where)
            found.append(encoded)
        lists = send([each for one in found for each in (one.idx, bits(one.val))], self.device)
        patches = [
            Patch(gaps.data_ptr(), values.data_ptr(), values.numel(), 2)
            for gaps, values in zip(lists[::2], lists[1::2], strict=True)
        ]
        jobs = self._table(_jobs(np.array([each.num for each in patches]), TILE))
        sums = kernels.sum_gaps(self._table([(each.positions, each.num, 0, 0) for each in patches]), jobs)
        ends = torch.cat([sums.new_zeros(1), sums.cumsum(0)])
        bounds = ends[self._table([0, *accumulate(_num_tiles(each.num) for each in patches)])]
        reach = bounds[1:] - bounds[:-1]
        if wrong := (reach > self._table([specs[n].num_elements for n in names])).nonzero()[:, 0].tolist():
            name = names[wrong[0]]
            raise CorruptObject(
                f"{stored[name][0]}: gaps of {name!r} reach position {int(reach[wrong[0]]) - 1}, beyond its "
                f"{specs[name].num_elements} elements"
            )
        return _Gaps(dict(zip(names, patches, strict=True)), ends[:-1] - bounds[jobs[:, 0]], jobs, lists)

    def _decoded(self, stored: Stored, names: Sequence[str], places: Sequence[Places]) -> Listed:
        """Decode one version's changes of some coded names.

        Raises:
            CorruptObject: a stream that no encoder writes for such a parent.
        """
        coded = [(key, each) for key, each in (stored[name] for name in names) if isinstance(each, Coded)]
        return decode(names, coded, places, self.device)

    def _merged(
        self, versions: Sequence[Stored], names: Sequence[str], base: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[dict[str, Patch], tuple[torch.Tensor, torch.Tensor]]]:
        """Yield patches with the effect of all versions, and the tensors that hold them, for some names each.

        Of each position the last value counts: a stable sort brings equal ones together, oldest first.
        """
        specs = self.map.schema.by_name()
        # Half of what is free: memory that was used before lies in pieces.
        at_a_time = min(MERGED, self._room() // 2 // _MERGING_BYTES)
        for some, num_stated in self._parts(versions, names, at_a_time):
            # Where kernels read whole vectors.
            sizes = [-(-specs[name].num_elements // 128) * 128 for name in some]
            firsts = dict(zip(some, accumulate(sizes, initial=0), strict=False))
            is_large = num_stated > at_a_time
            relative = [
                n
                for n in some
                if is_large or any(isinstance(each[n][1], Coded) for each in versions if n in each)
            ]
            copy = self._copied(relative, firsts, sum(sizes), base)
            places = {
                name: Places.copied(
                    specs[name],
                    copy.data_ptr() + firsts[name] * copy.element_size(),
                    None if name in base else self._boxes[name],
                )
                for name in relative
            }
            keys, values = [], []
            for stored in versions:
                mine = [name for name in some if name in stored]
                for where, new in self._listed(stored, mine, firsts, places):
                    if relative:
                        copy[where] = new
                    if not is_large:
                        keys.append(where)
                        values.append(new)
            if is_large:
                yield self._differing(some[0], copy, base)
                continue
            if not keys:
                continue
            order, by = torch.cat(keys).sort(stable=True)
            last = torch.ones(len(order), dtype=torch.bool, device=self.device)
            torch.ne(order[1:], order[:-1], out=last[:-1])
            order, chosen = order[last], torch.cat(values)[by[last]]
            bounds = torch.searchsorted(order, self._table([*firsts.values(), sum(sizes)])).tolist()
            owners = self._table(np.repeat(np.array(list(firsts.values())), np.diff(bounds)))
            positions = (order - owners).to(index_dtype(max(sizes)))
            width = positions.element_size()
            patches = {
                name: Patch(
                    positions.data_ptr() + begin * width,
                    chosen.data_ptr() + begin * chosen.element_size(),
                    end - begin,
                    width,
                )
                for name, (begin, end) in zip(some, pairwise(bounds), strict=True)
            }
            yield patches, (positions, chosen)

    def _listed(
        self,
        stored: Stored,
        names: Sequence[str],
        firsts: Mapping[str, int],
        places: Mapping[str, Places],
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """List one version's changes of names of one element width: where, int64 [num], and their bits."""
        gaps = self._gaps(stored, [name for name in names if not isinstance(stored[name][1], Coded)])
        begins = accumulate((each.num for each in gaps.patches.values()), initial=0)
        streams = [
            (each.positions, each.num, begin, firsts[name])
            for (name, each), begin in zip(gaps.patches.items(), begins, strict=False)
        ]
        num = sum(each.num for each in gaps.patches.values())
        if num:
            positions = kernels.list_positions(self._table(streams), gaps.jobs, gaps.starts, num)
            yield positions, torch.cat(gaps.lists[1::2])
        coded = [name for name in names if isinstance(stored[name][1], Coded)]
        if coded:
            found = self._decoded(stored, coded, [places[name] for name in coded])
            owners = np.repeat(np.array([firsts[name] for name in coded]), np.diff(found.bounds))
            positions = found.positions.to(torch.int64) + self._table(owners)
            yield positions, found.narrow if 1 in found.widths else found.values

    def _copied(
        self,
        names: Sequence[str],
        firsts: Mapping[str, int],
        num_elements: int,
        base: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Copy tensors of one element width as checkpoints have them: from `base`, or what is served."""
        specs = self.map.schema.by_name()
        if not names:
            return torch.empty(0, dtype=torch.int16, device=self.device)
        dtype = bits(torch.empty(0, dtype=TORCH_DTYPES[specs[names[0]].dtype])).dtype
        copy = torch.empty(num_elements, dtype=dtype, device=self.device)
        for name in names:
            held = base[name] if name in base else self.gathered(name)
            copy[firsts[name] : firsts[name] + specs[name].num_elements] = bits(held).to(self.device)
        return copy

    def _differing(
        self, name: str, copy: torch.Tensor, base: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, Patch], tuple[torch.Tensor, torch.Tensor]]:
        """Return a patch that makes of a tensor what its copy has become, and the tensors that hold it."""
        num_elements = self.map.schema.by_name()[name].num_elements
        held = bits(base[name] if name in base else self.gathered(name))
        narrow = index_dtype(num_elements)
        found = []
        for start in range(0, num_elements, PIECE):
            end = min(start + PIECE, num_elements)
            differs = held[start:end].to(self.device) != copy[start:end]
            found.append((differs.nonzero()[:, 0] + start).to(narrow))
        positions = torch.cat(found) if found else torch.empty(0, dtype=narrow, device=self.device)
        values = copy[positions.to(torch.int64)]
        patch = Patch(positions.data_ptr(), values.data_ptr(), values.numel(), positions.element_size())
        return {name: patch}, (positions, values)

    def _parts(
        self, versions: Sequence[Stored], names: Sequence[str], at_a_time: int
    ) -> Iterator[tuple[list[str], int]]:
        """Cut names into parts whose elements have one width, and count what the versions state of each part.

        That is at most so many changes at a time, but for a part of one name.
        """
        specs = self.map.schema.by_name()
        by_width: dict[int, list[str]] = {}
        for name in names:
            by_width.setdefault(TORCH_DTYPES[specs[name].dtype].itemsize, []).append(name)
        for same in by_width.values():
            some, stated = list[str](), 0
            for name in same:
                num = sum(_num_stated(specs[name], each[name][1]) for each in versions if name in each)
                if some and stated + num > at_a_time:
                    yield some, stated
                    some, stated = [], 0
                some.append(name)
                stated += num
            yield some, stated

    def _exchanges(
        self, patches: Mapping[str, Patch], starts: torch.Tensor | None, *, keep_old: bool
    ) -> Exchanges:
        firsts = accumulate((_num_tiles(each.num) for each in patches.values()), initial=0)
        tiles = dict(zip(patches, firsts, strict=False))
        every: list[Sequence[_Segment]] = []
        stated: list[Stated] = []
        for (kind, width), segments in self._by_kind_and_width(patches).items():
            rows = [
                (each.positions, each.values, each.num, tiles[segment.name], *segment.row)
                for segment in segments
                for each in (patches[segment.name],)
            ]
            table, jobs = self._table(rows), self._table(_jobs(np.array([row[2] for row in rows]), TILE))
            every.append(segments)
            stated.append(
                Stated(
                    kind=kind,
                    table=table,
                    jobs=jobs,
                    position_width=width,
                    starts=jobs if starts is None else starts,
                )
            )
        counts = [kernels.count(each) for each in stated]
        totals = torch.stack([each.sum() for each in counts]).tolist() if counts else []
        made = [
            kernels.translate(each, count, total, self._target, is_digested=keep_old)
            for each, count, total in zip(stated, counts, totals, strict=True)
        ]
        change = Exchanges(keeps_old=keep_old)
        for found, (exchange, sums) in zip(every, made, strict=True):
            change.parts.append((found, exchange))
            # Also waits until nothing reads the patch any more.
            columns = sums.cpu().numpy().view(np.uint64)
            before, after, num_strange = columns[:, :2].copy(), columns[:, 2:4], columns[:, 4]
            # An element that is nobody's must match no checkpoint's.
            before[:, 0] += num_strange > 0
            if keep_old:
                slices = np.array([segment.number for segment in found], dtype=np.int64)
                change.growth = change.growth.joined(Growth(slices, before, after))
        return change

    def _by_kind_and_width(self, patches: Mapping[str, Patch]) -> dict[tuple[Kind, int], list[_Segment]]:
        found: dict[tuple[Kind, int], list[_Segment]] = {}
        for kind, segments in self._by_kind(patches).items():
            for each in segments:
                # How regions begin matters only where they are read as a whole.
                key = replace(kind, is_aligned=False), patches[each.name].position_width
                found.setdefault(key, []).append(each)
        return found

    def _table(self, rows: object) -> torch.Tensor:
        array = np.array(rows) if not isinstance(rows, np.ndarray) else rows
        return torch.from_numpy(array).to(self.device)

    # Writing.

    def overwritten(self, change: Change) -> str | None:
        # `scatter` finds out, as it reads what it replaces anyway.
        return None

    def scatter(self, change: Change) -> None:
        """Write a change in one pass, which also keeps what it replaces.

        It is not read back here: that took a third of the time, while generation waits. No two elements of a
        map have one place, and what an element is to become was digested when it was staged.

        Raises:
            StateMismatch: what it replaced was not what had been staged. All is written; `gather_back` puts
                back what really was there.
        """
        assert isinstance(change, Exchanges)
        wrong = _first_wrong(change, [kernels.exchange(each) for _, each in change.parts])
        if wrong is not None and change.keeps_old:
            raise StateMismatch(f"something wrote to {wrong!r} after this version was staged")

    def gather_back(self, change: Change) -> None:
        """Put back what a change replaced, and check that it is there.

        Raises:
            LoadFailed: the device did not keep it.
        """
        assert isinstance(change, Exchanges)
        parts = [(segments, replace(each, new=each.old, old=each.new)) for segments, each in change.parts]
        back = Exchanges(parts=parts, keeps_old=False)
        self.scatter(back)
        if (wrong := _first_wrong(back, [kernels.compare(each) for _, each in parts])) is not None:
            raise LoadFailed(f"{wrong!r} did not keep what was written to it")


def _first_wrong(change: Exchanges, found: Sequence[torch.Tensor]) -> str | None:
    """Name what the first of these flags that is raised is about; waits for the device."""
    flags: list[int] = torch.cat(list(found)).tolist() if found else []
    for (segments, _), segment in zip(change.parts, flags, strict=True):
        if segment != kernels.NONE:
            return segments[segment].name
    return None


def _num_stated(spec: TensorSpec, stored: EncodedTensor | Coded) -> int:
    """How much memory merging takes, counted in changes; a coded tensor is copied, too."""
    if isinstance(stored, Coded):
        return 2 * len(stored.data) + spec.num_elements // 32
    return stored.val.numel()


def _num_tiles(num: int) -> int:
    return -(-num // TILE)


def _jobs(sizes: "np.ndarray[Any, np.dtype[np.int64]]", size: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """List (which of `sizes`, which part of it) for all parts of at most `size`: int32 [num_jobs, 2]."""
    counts = -(-sizes.astype(np.int64) // size)
    owners = np.repeat(np.arange(len(sizes)), counts)
    parts = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([owners, parts], axis=1).astype(np.int32)


def _sums(first: int, second: int, num_strange: int) -> Sums:
    # An element that is nobody's must match no checkpoint's.
    return Sums(first % 2**64, second % 2**64).plus(Sums(1 if num_strange else 0, 0))
