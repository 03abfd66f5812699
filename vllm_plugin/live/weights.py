"""The weights that one rank serves: mapped to a checkpoint's names, read, digested, and written in place.

Addresses never change: captured CUDA graphs read from them. Bits are moved, never numbers.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch

from patchstore.bucket import records
from patchstore.bucket.records import TensorSpec
from patchstore.codec.context import Chosen, Tiles, Tiling, is_coded
from patchstore.errors import DeviceMemoryShort, HalfApplied, LoadFailed, UsageError
from patchstore.read.deltas import Deltas
from patchstore.support import host
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, bits
from patchstore.tensors.columns import Array, Located, patches
from patchstore.tensors.state_digest import Sums
from vllm_plugin.live.copies import (
    BLOCK_BYTES,
    PIECE,
    UNMATCHED,
    Batch,
    Lane,
    Piece,
    Transfers,
    batched,
    flat,
    is_widened,
    narrowed,
    scatter,
    touch,
    widened,
)
from vllm_plugin.live.derived import KV_CACHE
from vllm_plugin.live.models import ServedModels
from vllm_plugin.live.random_checkpoint import RandomCheckpoint
from vllm_plugin.map.mapping import (
    Box,
    SliceSums,
    StagedSums,
    WeightMap,
    are_cut,
    boxes,
    numbers,
)
from vllm_plugin.map.provenance import within
from vllm_plugin.map.regions import Region, locate, pieces, positions
from vllm_plugin.map.trace import Attributes

NUM_SAMPLES = 64
"""Elements of each tensor that are compared with the checkpoint when a map is new."""
BROUGHT_BYTES = 2 << 30
"""The most that an anchor takes of a device's memory before it is written."""
_ALIGNMENT = 16
_PROVING = "proving where each weight goes"


@dataclass(slots=True)
class Scatter:
    """New bits for some elements of one runtime, and what they replace."""

    positions: torch.Tensor
    """int32 or int64 [num], in elements of the runtime's storage; no two are equal."""
    new: torch.Tensor
    """Integers [num] of the runtime's element width."""
    old: torch.Tensor


@dataclass(slots=True)
class StagedWrite:
    """Patches in runtime coordinates, and the slice_sums that prove them."""

    scatters: dict[int, Scatter] = field(default_factory=dict)
    """By index of the runtime."""
    staged_sums: StagedSums = field(default_factory=lambda: StagedSums.of([]))
    """Of the patched elements."""


class LiveWeights:
    """The memory of one rank's weights, read, digested and written through a map of a checkpoint's names."""

    def __init__(self, models: ServedModels) -> None:
        """Take over models as they are; `follow` a map before anything else is called."""
        self.models = models
        self.device = models.device
        self.staging_bytes = 0
        """Of the device's memory, that staging took last at its peak, with what is staged; 0 on the CPU."""
        self._transfers = Transfers(self.device)
        self._map: WeightMap | None = None
        self.dropped: Mapping[str, str] = {}
        """Names without a tensor of their own in the model, as it has one for them and another name -> that
        other name. vLLM ties an output layer to the embedding where both were equal when it started."""
        self.cut: frozenset[str] = frozenset()
        """Names of which coded deltas are decoded from a copy of the whole tensor, not from what is served.

        A coded delta is decoded tile by tile, and a tile only from all the values that it had before. A rank
        that holds columns 0 to 99, where tiles are 64 wide, lacks values that the second tile needs. And
        where no rank serves some part of a tensor, no digest tells whether the rest is right."""
        self._boxes: Mapping[str, list[Box] | None] = {}
        """Of coded names: what this rank holds, None where that cuts through tiles."""
        self._alike: Mapping[str, int] = {}
        """The same number for names of which this rank holds the same boxes."""
        self._slots: Sequence[_Slot] = []
        """All parameters and buffers that any name of the checkpoint reaches."""
        self._tree: Sequence[tuple[str, torch.nn.Module, str, torch.nn.Module | None]] = []
        """Prefix of the names in each module, its parent, the parent's key for it, and itself."""
        # The slots as columns: see `has_moved`.
        self._owners: Sequence[dict[str, torch.Tensor | None]] = []
        self._keys: Sequence[str] = []
        self._addresses: Sequence[int] = []

    # The map.

    def follow(self, mapped: WeightMap) -> None:
        self._map = mapped
        specs = mapped.schema.by_name()
        places = {
            name: _place(each) for name, each in self.models.every[0].named_parameters(remove_duplicate=False)
        }
        several = {place for place, count in Counter(places.values()).items() if count > 1}
        # Not what a draft model shares with its target: vLLM always takes the target's.
        self.dropped = {
            name: other for name, (alias, other) in mapped.aliases.items() if places.get(alias) in several
        }
        self._boxes = {
            name: boxes(specs[name], found)
            for name, found in mapped.regions.items()
            if found and is_coded(specs[name].dtype)
        }
        kinds: dict[tuple[records.Box, ...], int] = {}
        self._alike = {
            name: kinds.setdefault(tuple(box.elements for box in found), len(kinds))
            for name, found in self._boxes.items()
            if found
        }
        # What cannot be proved must not say what a delta means either.
        self.cut = frozenset(n for n, found in self._boxes.items() if found is None or n in mapped.partial)
        # Other buffers may move: vLLM makes some anew, such as a cache of rotations in another dtype.
        watched = {name for index in self.written() for name in mapped.runtimes[index].names}
        modules = [
            (number, path, module)
            for number, model in enumerate(self.models.every)
            for path, module in model.named_modules()
        ]
        self._slots = [
            _Slot(f"{number}.{within(path, key)}", module, kind, key, _place(tensor))
            for number, path, module in modules
            for kind in ("_parameters", "_buffers")
            for key, tensor in getattr(module, kind).items()
            if tensor is not None and within(path, key) in watched
        ]
        self._tree = [
            (f"{number}.{within(path, key)}.", module, key, child)
            for number, path, module in modules
            for key, child in module._modules.items()
        ]
        self._owners = [each.held() for each in self._slots]
        self._keys = [each.key for each in self._slots]
        self._addresses = [each.place[0] for each in self._slots]

    @property
    def map(self) -> WeightMap:
        assert self._map is not None
        return self._map

    def moved(self) -> list[str]:
        """Names of parameters and buffers whose memory is not what was traced, after their model's number."""
        replaced = tuple(
            name for name, parent, key, child in self._tree if parent._modules.get(key) is not child
        )
        # See `has_moved`.
        with torch._C.DisableTorchFunctionSubclass():
            return sorted(
                each.name
                for each in self._slots
                if each.name.startswith(replaced)
                or (tensor := each.held().get(each.key)) is None
                or _place(tensor) != each.place
            )

    def has_moved(self) -> bool:
        """Whether `moved` would name any, as far as can be told quickly: generation waits for the answer."""
        # `map` calls both without Python in between, and vLLM's classes of parameters would have every call
        # pass through Python: each takes several times as long.
        held: Iterator[Any] = map(dict.get, self._owners, self._keys)
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return [*map(torch.Tensor.data_ptr, held)] != self._addresses
            except TypeError:  # None: it is gone.
                return True

    # Reading.

    def slice_sums(self, names: Iterable[str]) -> SliceSums:
        """Digest what this rank holds of these names; those that are calculated are left out."""
        specs = self.map.schema.by_name()
        held = [(name, *each) for name in names for each in self.map.regions.get(name, ())]
        sums = [self._sums(specs[name], index, region) for name, index, region in held]
        return SliceSums(
            np.array([self.map.number(name, region.source) for name, _, region in held], dtype=np.int64),
            np.array(sums, dtype=np.uint64).reshape(-1, 2),
        )

    def _sums(self, spec: TensorSpec, index: int, region: Region) -> Sums:
        flat, total = self._flat(index), Sums()
        for part in pieces(region, PIECE):
            held = flat.as_strided(part.target.shape, part.target.strides, part.target.offset).reshape(-1)
            elements = narrowed(held, spec)
            if not is_widened(held, spec):
                total = total.plus(UNMATCHED)
            if part.source.strides in {(), (1,)}:
                found = state_digest.of_run(part.source.offset, elements)
            else:
                found = state_digest.of_elements(positions(part.source, held.device), elements)
            total = total.plus(found)
        return total

    def serves(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether what this rank holds of copied names is what checkpoint tensors have there."""

        def part(name: str, first: int, end: int) -> torch.Tensor:
            return bits(tensors[name])[first:end].to(self.device)

        return not self._differing(tensors, part)

    def _differing(self, names: Iterable[str], part: Callable[[str, int, int], torch.Tensor]) -> list[str]:
        """Return names of copied tensors of which this rank holds other elements than `part` says, ascending.

        `part` takes a name, and from where to where in the flattened tensor; integers [num] on the device.
        """
        specs, found = self.map.schema.by_name(), list[tuple[str, torch.Tensor]]()
        for name in sorted(names):
            for index, region in self.map.regions.get(name, ()):
                flat = self._flat(index)
                for each in pieces(region, PIECE):
                    given = part(name, each.source.offset, each.source.end)
                    given = given.as_strided(each.source.shape, each.source.strides)
                    held = flat.as_strided(each.target.shape, each.target.strides, each.target.offset)
                    found.append((name, (held != widened(given, specs[name], held)).any()))
        # Asked once: each answer has to be waited for.
        flags = torch.stack([flag for _, flag in found]).tolist() if found else []
        return [*dict.fromkeys(name for (name, _), differs in zip(found, flags, strict=True) if differs)]

    def pieces(self, tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
        """Cut what this rank holds of copied names, so that each piece can be copied at once.

        Tensors are a checkpoint's, contiguous, on the CPU.
        """
        specs, found = self.map.schema.by_name(), list[Piece]()
        # Many tensors may be in one memory, as experts are.
        flats: dict[int, torch.Tensor] = {}
        for name in sorted(tensors):
            source = bits(tensors[name])
            for index, region in self.map.regions.get(name, ()):
                if index not in flats:
                    flats[index] = self._flat(index)
                flat = flats[index]
                for part in pieces(region, BLOCK_BYTES // source.element_size()):
                    first = source.storage_offset() + part.source.offset
                    given = source.as_strided(part.source.shape, part.source.strides, first)
                    held = flat.as_strided(part.target.shape, part.target.strides, part.target.offset)
                    found.append(Piece(specs[name], given, held))
        return found

    def misplaced(self, loaded: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of which sampled elements of a checkpoint that was loaded are not where the map says."""
        random = torch.Generator().manual_seed(0)
        specs, wrong = self.map.schema.by_name(), []
        for name in sorted(loaded.keys() & self.map.regions.keys()):
            spec, elements = specs[name], bits(loaded[name])
            chosen = torch.randint(max(1, spec.num_elements), (NUM_SAMPLES,), generator=random)
            chosen = torch.unique(chosen)[: spec.num_elements]
            for index, region in self.map.regions[name]:
                inside, mask, target = locate(region, chosen.to(self.device))
                at = chosen[inside] if mask is None else chosen[inside][mask.cpu()]
                if not torch.equal(narrowed(self._flat(index)[target], spec).cpu(), elements[at]):
                    wrong.append(name)
                    break
        return wrong

    @host.asked(_PROVING, kinds=host.SHORT_OF_MEMORY)
    @torch.no_grad()
    def prove(self) -> None:
        """Prove the map: loaders load random numbers, and every element that is copied must be where it says.

        Takes as much of the host's memory as what is served has. Afterwards that is as before, but for what
        loaders themselves choose, such as zeros in rows that no tensor has.

        Raises:
            UsageError: a loader does otherwise than when it was traced; what is served is as before.
            SchemaMismatch, LoadFailed: it failed; what is served is as before.
            HalfApplied: it could not be put back.
            HostError, DeviceMemoryShort: there is no memory for it; what is served is as before.
        """
        if not any(self.map.regions.values()) and not self.map.filled:
            return
        drawn = RandomCheckpoint(self.map.schema)
        attributes = [Attributes(each) for each in self.models.every]
        with self.put_back(self._loadable()) as saved:
            try:
                self._load_drawn(drawn)
                if wrong := self._differing(self.map.regions, partial(drawn.part, device=self.device)):
                    raise UsageError(
                        f"the model's loader puts {len(wrong)} tensors elsewhere than when it was traced, "
                        f"such as {wrong[0]!r}, so it cannot be updated in place: report it with the model's "
                        "architecture and vLLM's release"
                    )
                self._keep_constants(saved)
            except BaseException as exc:
                for each in attributes:
                    each.restore()
                if isinstance(exc, torch.OutOfMemoryError):
                    raise DeviceMemoryShort(
                        f"{_PROVING} needs more memory than is free on {self.device}: start vllm with a "
                        "lower --gpu-memory-utilization"
                    ) from None
                raise

    def _load_drawn(self, drawn: RandomCheckpoint) -> None:
        # A tensor that nothing is made of may still be checked, as scales of a cache are: they are positive.
        unused = self.map.absent
        shapes = {name: each for name, each in drawn.shapes().items() if self._stored(name) not in unused}
        try:
            self.models.load(self.map.schema, shapes, partial(self._draw, drawn, self.device))
        except LoadFailed:
            if self.device.type == "cpu":
                raise
            # As vLLM itself loads: the device may have no room, or not for all that a loader joins. If that
            # was not why, the second failure says why.
            self.models.load(self.map.schema, shapes, partial(self._draw, drawn, torch.device("cpu")))

    def _draw(
        self, drawn: RandomCheckpoint, device: torch.device, shapes: Mapping[str, torch.Tensor]
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield tensors for a loader, which it may write to, and keep.

        They are on the device until half of its room is taken. What is calculated is on the CPU, as devices
        may round otherwise.
        """
        cpu, room, num_bytes, has_room = torch.device("cpu"), self.spare_bytes(), 0, True
        for name, shape in shapes.items():
            num_bytes += shape.nbytes
            if num_bytes > room // 16:  # Not for each: the driver is asked.
                num_bytes, has_room = 0, has_room and 2 * self.spare_bytes() >= room
            is_near = has_room and 2 * shape.nbytes <= room and self._stored(name) not in self.map.computed
            with host.asked(_PROVING, kinds=host.SHORT_OF_MEMORY):
                tensor = drawn.tensor(name, device if is_near else cpu)
            yield name, tensor

    def _stored(self, name: str) -> str:
        return self.map.schema.tied.get(name, name)

    def _keep_constants(self, saved: Mapping[int, torch.Tensor]) -> None:
        """Put what a loader set to a constant in the place of what was saved."""
        for index, writes in self.map.filled.items():
            if index not in saved:
                continue
            (now,), then = self.save([index]).values(), saved[index]
            is_constant = torch.zeros(then.shape, dtype=torch.bool)
            for view, fills in writes:
                is_constant.as_strided(view.shape, view.strides, view.offset).fill_(fills)
            then[is_constant] = now[is_constant]

    # Coded deltas: the tiles that this rank holds.

    def needs(self, spec: TensorSpec, tiles: Tiling) -> Tiles:
        """Which tiles of a coded part an update of what is served takes, ascending; None for all."""
        if spec.name in self.map.computed or spec.name in self.cut:
            return None
        return numbers(tiles, self._boxes.get(spec.name) or ())

    def cut_by(self, deltas: Deltas) -> set[str]:
        """Names, not in `cut`, of which these deltas have tiles that this rank holds in part.

        A trainer of many processes has small parts, whose tiles are fewer than those of a whole tensor.
        """
        others = self.map.computed | self.cut
        # Tensors of one shape have one tiling, and in most models boxes alike.
        alike = np.array([self._alike.get(spec.name, -1) for spec in self.map.schema.tensors])
        found = set()
        for places, cuts in deltas.cuts():
            ways = np.stack([cuts.kind, alike[places]], axis=1)
            _, firsts, ways = np.unique(ways, axis=0, return_index=True, return_inverse=True)
            names = [self.map.schema.tensors[number].name for number in places.tolist()]
            are = [are_cut(cuts[first], self._boxes.get(names[first]) or ()) for first in firsts.tolist()]
            cut = np.flatnonzero(np.array(are, dtype=np.bool_)[ways.reshape(-1)])
            found |= {names[part] for part in cut.tolist()}
        return found - others

    def gathered(self, name: str) -> torch.Tensor:
        """Return a copied name's tensor, flat, with zeros where this rank has nothing."""
        spec = self.map.schema.by_name()[name]
        found = torch.zeros(spec.num_elements, dtype=TORCH_DTYPES[spec.dtype], device=self.device)
        for index, region in self.map.regions[name]:
            flat = self._flat(index)
            for part in pieces(region, PIECE):
                held = flat.as_strided(part.target.shape, part.target.strides, part.target.offset)
                goal = bits(found).as_strided(part.source.shape, part.source.strides, part.source.offset)
                goal.copy_(narrowed(held, spec))
        return found

    # Memory.

    def _loadable(self) -> set[int]:
        """Runtimes of all tensors that a loader may write to: of modules' attributes too, but no KV cache."""
        registered = {name for _, name, _ in self.models.tensors()}
        return {
            index
            for index, each in enumerate(self.map.runtimes)
            if not registered.isdisjoint(each.names)
            or not any(name.rpartition(".")[2] == KV_CACHE for name in each.names)
        }

    def written(self) -> set[int]:
        """Runtimes that any name of the checkpoint reaches."""
        copied = {index for found in self.map.regions.values() for index, _ in found}
        return copied.union(*(indices for _, indices in self.map.groups))

    def _flat(self, index: int) -> torch.Tensor:
        return flat(self.map.runtimes[index])

    # Staging.

    def stage(self, patches: Iterable[TensorPatch], *, keep_old: bool) -> StagedWrite:
        """Translate patches of copied names to this rank's memory, and read what they replace.

        What is there now is digested if `keep_old`.
        """
        specs = self.map.schema.by_name()
        change = StagedWrite()
        parts: dict[int, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        sums: list[tuple[int, Sums, Sums]] = []
        for patch in patches:
            regions = self.map.regions.get(patch.name, ())
            if not regions:
                continue
            spec = specs[patch.name]
            indices, values = patch.indices.to(self.device), bits(patch.values).to(self.device)
            for index, region in regions:
                inside, mask, target = locate(region, indices)
                at, new = indices[inside], values[inside]
                if mask is not None:
                    at, new = at[mask], new[mask]
                flat = self._flat(index)
                old = flat.index_select(0, target)
                parts.setdefault(index, []).append((_index(target, flat), widened(new, spec, flat), old))
                if keep_old:
                    before = state_digest.of_elements(at, narrowed(old, spec))
                    if not is_widened(old, spec):
                        before = before.plus(UNMATCHED)
                    after = state_digest.of_elements(at, new)
                    sums.append((self.map.number(patch.name, region.source), before, after))
        for index, found in parts.items():
            where, new, old = (torch.cat(each) for each in zip(*found, strict=True))
            change.scatters[index] = Scatter(positions=where, new=new, old=old)
        change.staged_sums = StagedSums.of(sums)
        return change

    def stage_deltas(
        self, deltas: Deltas, names: Sequence[str], base: Mapping[str, torch.Tensor], *, keep_old: bool
    ) -> StagedWrite:
        """`stage` what deltas come to for some names. `base` has tensors that they start from, where those
        are not what is served: all of `cut`, at least.
        """
        schema = self.map.schema
        served = [schema.places[name] for name in names if self.map.regions.get(name)]

        def held(places: Array) -> Located:
            its = [schema.tensors[number].name for number in places.tolist()]
            return Located(places, [base[name] if name in base else self.gathered(name) for name in its])

        def cut(number: int) -> Chosen | None:
            boxes = self._boxes[schema.tensors[number].name]
            return None if boxes is None else lambda tiles: numbers(tiles, boxes)

        groups = deltas.merged_groups(np.array(sorted(served), dtype=np.int64), held, cut)
        return self.stage(chain.from_iterable(patches(each, schema) for each in groups), keep_old=keep_old)

    def aside(self) -> AbstractContextManager[None]:
        """Do what the block says beside what the device is busy with, and wait for it at its end."""
        return nullcontext()

    # Writing.

    def overwritten(self, change: StagedWrite) -> str | None:
        """Name a parameter that no longer has what a change would replace; None where all have."""
        for index, each in change.scatters.items():
            if not torch.equal(self._flat(index).index_select(0, each.positions), each.old):
                return self.map.runtimes[index].names[0]
        return None

    def scatter(self, change: StagedWrite) -> None:
        """Write a change, and read it back. If this raises, the weights hold part of the change."""
        for index, each in change.scatters.items():
            flat = self._flat(index)
            # Three times as fast on the CPU as indexing with a tensor.
            flat.scatter_(0, each.positions.to(torch.int64), each.new)
            if not torch.equal(flat.index_select(0, each.positions), each.new):
                raise LoadFailed(f"{self.map.runtimes[index].names[0]!r} did not keep what was written to it")

    def gather_back(self, change: StagedWrite) -> None:
        """Put back what a change replaced, and check that it is there."""
        for each in change.scatters.values():
            each.new, each.old = each.old, each.new
        try:
            self.scatter(change)
        finally:
            for each in change.scatters.values():
                each.new, each.old = each.old, each.new

    def spare_bytes(self) -> int:
        """How many bytes of the device's memory may be taken beside what is served."""
        return 0

    def bring(self, pieces: Iterable[Piece]) -> list[Batch | Piece]:
        """Have pieces where `write` copies them fast: some in the device's memory, the others mapped."""
        batches, others = batched(pieces)
        ends = list(accumulate(-(-each.given.nbytes // _ALIGNMENT) * _ALIGNMENT for each in batches))
        num = bisect_right(ends, self.spare_bytes())
        try:
            room = torch.empty(ends[num - 1] if num else 0, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:  # Another process was faster.
            num, room = 0, torch.empty(0, device=self.device)
        places = [
            room[start:][: each.given.nbytes] for each, start in zip(batches[:num], [0, *ends], strict=False)
        ]

        def copy(given: torch.Tensor, place: torch.Tensor, lane: Lane) -> None:
            lane.write(given, place)

        near = zip(batches, places, strict=False)
        far = [each.given for each in batches[num:]] + [each.given for each in others]
        self._transfers.run(chain((partial(copy, each.given, place) for each, place in near), touch(far)))
        brought = [each._replace(given=place) for each, place in zip(batches, places, strict=False)]
        return [*brought, *batches[num:], *others]

    def write(self, brought: Iterable[Batch | Piece]) -> None:
        self._transfers.run(partial(self._write, each) for each in brought)

    def _write(self, each: Batch | Piece, lane: Lane) -> None:
        if isinstance(each, Piece):
            if each.given.element_size() == each.held.element_size():
                lane.write(each.given, each.held)
            else:
                each.held.copy_(widened(lane.to_device(each.given), each.spec, each.held))
        elif each.given.device == self.device:
            scatter(each.given, each.parts)
        else:
            lane.scatter(each.given, each.parts)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have the models' own loaders load tensors of the CPU; see `ServedModels.load`."""
        self.models.load(self.map.schema, tensors)

    def wait(self) -> None:
        """Let what was written arrive, or raise what went wrong with it, while it can still be undone."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def save(self, indices: Iterable[int]) -> dict[int, torch.Tensor]:
        """Copy runtimes to the CPU."""
        saved = {index: torch.empty_like(self._flat(index), device="cpu") for index in indices}

        def one(held: torch.Tensor, data: torch.Tensor, lane: Lane) -> None:
            lane.read(held, data)

        self._transfers.run(partial(one, held, data) for _, held, data in self._saved_parts(saved))
        return saved

    @contextmanager
    def put_back(self, indices: Iterable[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Have a block load something to compare it. Yields copies of runtimes, which are put back behind it,
        also after an error. HalfApplied says that they could not be.
        """
        saved = self.save(indices)
        try:
            yield saved
        finally:
            try:
                self.restore(saved)
                self.models.derived.refresh()
                self.wait()
            except Exception as exc:
                raise HalfApplied(
                    f"weights that were loaded to be compared could not be put back: {exc}"
                ) from exc

    def restore(self, saved: Mapping[int, torch.Tensor]) -> None:
        """Put back what `save` returned, and check that it is there."""

        def put(held: torch.Tensor, data: torch.Tensor, lane: Lane) -> None:
            lane.write(data, held)

        def check(index: int, held: torch.Tensor, data: torch.Tensor, lane: Lane) -> None:
            try:
                # Some attributes are on the CPU.
                is_there = torch.equal(held, lane.to_device(data) if held.device == self.device else data)
            except torch.OutOfMemoryError:  # Perhaps what is undone had the same.
                is_there = torch.equal(held.cpu(), data)
            if not is_there:
                raise LoadFailed(f"{self.map.runtimes[index].names[0]!r} did not keep what was written to it")

        self._transfers.run(partial(put, held, data) for _, held, data in self._saved_parts(saved))
        self._transfers.run(partial(check, *each) for each in self._saved_parts(saved))

    def _saved_parts(
        self, saved: Mapping[int, torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield runtimes in parts: the index, what is served, and what was saved of it."""
        for index, data in saved.items():
            step = BLOCK_BYTES // data.element_size()
            for held, part in zip(torch.split(self._flat(index), step), torch.split(data, step), strict=True):
                yield index, held, part


class _Slot(NamedTuple):
    """Where a module keeps a parameter or buffer."""

    name: str
    module: torch.nn.Module
    kind: str
    """`_parameters` or `_buffers`."""
    key: str
    place: tuple[Any, ...]
    """Of its memory, when the map was followed."""

    def held(self) -> dict[str, torch.Tensor | None]:
        found: dict[str, torch.Tensor | None] = getattr(self.module, self.kind)
        return found


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _index(target: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Positions in the narrowest integers that reach them all: they are the larger part of what is staged."""
    return target.to(torch.int32) if memory.numel() < 2**31 else target
