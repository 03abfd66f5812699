"""The weights a model serves: patched and written in place, through a traced map.

Addresses never change: captured CUDA graphs read from them. Bits are moved, never numbers.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate, chain, zip_longest

import torch

from patchstore.errors import LoadFailed, SchemaMismatch
from patchstore.format import mismatch
from patchstore.read.deltas import Deltas
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TensorPatch, bits
from patchstore.tensors.state_digest import Sums
from vllm_plugin.batches import Batch, Piece, batched
from vllm_plugin.mapped_weights import MappedWeights
from vllm_plugin.mapping import StagedSums
from vllm_plugin.regions import locate
from vllm_plugin.runtime_bits import UNMATCHED, is_widened, narrowed, widened
from vllm_plugin.staged_write import Scatter, StagedWrite
from vllm_plugin.trace import same_parameters
from vllm_plugin.transfers import BLOCK_BYTES, Job, Lane, scatter

PAGE_BYTES = 4096
"""No page of memory is smaller."""
BROUGHT_BYTES = 2 << 30
"""The most that an anchor takes of a device's memory before it is written."""
_ALIGNMENT = 16


class LiveWeights(MappedWeights):
    """The weights of one rank, and what changes them."""

    def stage(self, patches: Iterable[TensorPatch], *, keep_old: bool) -> StagedWrite:
        """Translate patches of copied names to this rank's memory, and read what they replace.

        Args:
            keep_old: whether to digest and keep what is there now.
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
        """`stage` what deltas come to for some names.

        Args:
            base: tensors that deltas start from, where those are not what is served: all of `cut`, at least.

        Raises:
            CorruptObject: positions that no encoder writes.
        """
        served = [name for name in names if self.map.regions.get(name)]
        return self.stage((self._patch_of(deltas, name, base) for name in served), keep_old=keep_old)

    def _patch_of(self, deltas: Deltas, name: str, base: Mapping[str, torch.Tensor]) -> TensorPatch:
        spec = self.map.schema.by_name()[name]
        if not deltas.is_relative(name):
            return deltas.merged(spec, None)
        held = base[name] if name in base else self.gathered(name)
        return deltas.merged(spec, held, self._tiles(name))

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return memory of the host, uint8, from which bytes are brought to the device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def aside(self) -> AbstractContextManager[None]:
        """Do what the block says beside what the device is busy with, and wait for it at its end."""
        return nullcontext()

    def overwritten(self, change: StagedWrite) -> str | None:
        """Name a parameter that no longer has what a change would replace; None where all have."""
        for index, each in change.scatters.items():
            if not torch.equal(self._flat(index).index_select(0, each.positions), each.old):
                return self.map.runtimes[index].names[0]
        return None

    def scatter(self, change: StagedWrite) -> None:
        """Write a change, and read it back.

        Raises:
            LoadFailed: the device did not keep what was written; the weights hold part of the change.
        """
        for index, each in change.scatters.items():
            flat = self._flat(index)
            # Three times as fast on the CPU as indexing with a tensor.
            flat.scatter_(0, each.positions.to(torch.int64), each.new)
            if not torch.equal(flat.index_select(0, each.positions), each.new):
                raise LoadFailed(f"{self.map.runtimes[index].names[0]!r} did not keep what was written to it")

    def gather_back(self, change: StagedWrite) -> None:
        """Put back what a change replaced, and check that it is there. Raises as `scatter`."""
        for each in change.scatters.values():
            each.new, each.old = each.old, each.new
        try:
            self.scatter(change)
        finally:
            for each in change.scatters.values():
                each.new, each.old = each.old, each.new

    def spare_bytes(self) -> int:
        """How much of the device's memory `bring` may take."""
        return 0

    def bring(self, pieces: Iterable[Piece]) -> list[Batch | Piece]:
        """Have pieces where `write` copies them fast: some in the device's memory, the others mapped.

        Mapping takes as long as copying.

        Args:
            pieces: see `MappedWeights.pieces`.
        """
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

        def touch(given: torch.Tensor, _: Lane) -> None:
            memory = given.numpy()
            if memory.ndim and memory.size:
                memory[..., :: PAGE_BYTES // memory.itemsize].max()

        near = zip(batches, places, strict=False)
        far = [each.given for each in batches[num:]] + [each.given for each in others]
        self._transfers.run(
            chain(
                (partial(copy, each.given, place) for each, place in near),
                (partial(touch, given) for given in far),
            )
        )
        brought = [each._replace(given=place) for each, place in zip(batches, places, strict=False)]
        return [*brought, *batches[num:], *others]

    def write(self, brought: Iterable[Batch | Piece]) -> None:
        """Write what `bring` returned."""

        def one(each: Batch | Piece, lane: Lane) -> None:
            if isinstance(each, Piece):
                if each.given.element_size() == each.held.element_size():
                    lane.write(each.given, each.held)
                else:
                    each.held.copy_(widened(lane.to_device(each.given), each.spec, each.held))
            elif each.given.device == self.device:
                scatter(each.given, each.parts)
            else:
                lane.scatter(each.given, each.parts)

        self._transfers.run(partial(one, each) for each in brought)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have the models' own loaders load tensors in full.

        Args:
            tensors: by checkpoint name, on the CPU; several names may share one tensor (tied).

        Raises:
            SchemaMismatch: a loader refused a tensor; the weights now hold part of the others.
            LoadFailed: it raised anything else; the weights now hold part of the tensors.
        """
        at = "before it read a tensor"

        def in_order() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal at
            for name, tensor in tensors.items():
                at = f"when it had read up to {name!r} {tuple(tensor.shape)} {tensor.dtype}"
                # A copy: some loaders write to what they are given.
                yield name, tensor.clone()

        for model in self._target_last():
            try:
                with same_parameters(model):
                    left = self._load(model, in_order())
            except Exception as exc:
                # What vLLM's loaders raise for names and shapes that their model does not have.
                refused = isinstance(exc, KeyError | ValueError | AttributeError | AssertionError)
                error = SchemaMismatch if refused else LoadFailed
                reason = f"the model's loader failed {at}: {type(exc).__name__}: {mismatch.brief(str(exc))}"
                raise error(mismatch.explain(self.map.schema, reason) if refused else reason) from exc
            if isinstance(left, set) and left and tensors.keys() >= self.map.schema.by_name().keys():
                reason = (
                    f"{len(left):,} weights of the model get nothing from this run's {len(tensors):,} "
                    f"tensors, such as {min(left)!r}"
                )
                raise SchemaMismatch(mismatch.explain(self.map.schema, reason))

    def notice_derived(self) -> None:
        """Look for what forward passes made of weights; called before weights change.

        Raises:
            UsageError: there is some that cannot be made again.
        """
        self._derived.notice()

    def derive(self) -> None:
        """Have the model calculate again what it made from its weights after loading, into the same memory.

        Raises:
            LoadFailed: it came out in another shape.
        """
        self._derived.refresh()

    def wait(self) -> None:
        """Let what was written arrive, or raise what went wrong with it, while it can still be undone."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def save(self, indices: Iterable[int], beside: Iterable[Job] = ()) -> dict[int, torch.Tensor]:
        """Copy runtimes to the CPU.

        Args:
            beside: what else is to be done at the same time; a bus has two directions.
        """
        saved = {index: torch.empty_like(self._flat(index), device="cpu") for index in indices}

        def one(held: torch.Tensor, data: torch.Tensor, lane: Lane) -> None:
            lane.read(held, data)

        jobs = (partial(one, held, data) for _, held, data in self._saved_parts(saved))
        self._transfers.run(job for both in zip_longest(jobs, beside) for job in both if job is not None)
        return saved

    def restore(self, saved: Mapping[int, torch.Tensor]) -> None:
        """Put back what `save` returned, and check that it is there.

        Raises:
            LoadFailed: the device did not keep it.
        """

        def put(held: torch.Tensor, data: torch.Tensor, lane: Lane) -> None:
            lane.write(data, held)

        def check(index: int, held: torch.Tensor, data: torch.Tensor, lane: Lane) -> None:
            if not torch.equal(held, lane.to_device(data)):
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


def _index(target: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Positions in the narrowest integers that reach them all: they are the larger part of what is staged."""
    return target.to(torch.int32) if memory.numel() < 2**31 else target
