"""One rank's weights, as `patchstore.apply.update` brings them from one version to another.

Staging reads the live weights and writes nothing. `write` writes in place, and keeps what undoes it. No
method here waits for another rank. Whether all ranks together have what the manifest says takes the word of
all: each rank returns what it found, the engine gathers that, and `verify` hears it.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.apply.update import ReadGate
from patchstore.bucket.records import Manifest, Plan
from patchstore.bucket.state_sums import SumsArray
from patchstore.errors import (
    HostError,
    SchemaMismatch,
    StateMismatch,
    Unsigned,
    UsageError,
    VersionRetired,
    WrongSignature,
)
from patchstore.kernels import device_guard, pinned
from patchstore.read import host_cache
from patchstore.read.anchors import open_anchor
from patchstore.read.deltas import Deltas, open_deltas
from patchstore.read.host_cache import HostCache
from patchstore.read.run import Run
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TensorPatch, bits
from patchstore.tensors.state_digest import Sums
from vllm_plugin.live.copies import Batch, Piece
from vllm_plugin.live.identify import (
    Contents,
    find_version,
    nearly_the_head,
    read_contents,
    read_folder,
)
from vllm_plugin.live.weights import LiveWeights, StagedWrite
from vllm_plugin.map.mapping import RankSlices, SliceSums, StagedSums, WeightMap
from vllm_plugin.map.provenance import Trace
from vllm_plugin.map.regions import View

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Staged:
    """An update that is ready to be written."""

    plan: Plan
    anchor: Mapping[str, torch.Tensor]
    """Every tensor of the anchor that it starts from; empty where it starts from the held version."""
    change: StagedWrite
    """What the deltas change, of the names that are copied."""
    computed: dict[str, torch.Tensor]
    """Every calculated name that changes, and those loaded with it, in full."""
    cut: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every name of `LiveWeights.cut` that changes, in full."""
    before: Mapping[str, Sums] = field(default_factory=dict)
    after: Mapping[str, Sums] = field(default_factory=dict)
    """Digest sums of the elements of calculated names that change."""
    recorded: SumsArray
    """The target's digest sums, as the store has them."""
    partial: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every name of which only a part is served, in full, where the update starts from an anchor."""
    pieces: Sequence[Batch | Piece] = ()
    """What is written of the anchor."""
    saved: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """The runtimes that are written as a whole, as they are now."""
    leases: ExitStack = field(default_factory=ExitStack)
    """Holds the payloads' files, which the host's other ranks use too."""
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        return self.plan.target

    def release(self) -> None:
        """Close the payloads' files. The update does not fail where they cannot be removed."""
        try:
            self.leases.close()
        except HostError as exc:
            logger.warning("files of version %d could not be removed: %s", self.manifest.version, exc)


class _Fetched(NamedTuple):
    """What the store has for an update, open."""

    anchor: Mapping[str, torch.Tensor]
    deltas: Deltas
    recorded: SumsArray
    saved: Mapping[int, torch.Tensor] | None
    """As `Staged` has them; `saved` is None where the update starts from the held version."""


def _patched(
    tensors: Mapping[str, torch.Tensor], patches: Mapping[str, TensorPatch]
) -> tuple[dict[str, Sums], dict[str, Sums]]:
    """Apply patches to tensors of their names; return the digest sums of the elements before and after."""
    before, after = {}, {}
    for name, patch in patches.items():
        old = bits(tensors[name])[patch.indices].view(patch.values.dtype)
        before[name] = state_digest.of_elements(patch.indices, old)
        after[name] = state_digest.of_elements(patch.indices, patch.values)
        bits(tensors[name])[patch.indices] = bits(patch.values)
    return before, after


class RankWeights:
    """The live weights of one rank, with what the held version has of names that they do not show."""

    def __init__(
        self, run: Run, live: LiveWeights, cache: HostCache, background: Executor, *, is_partial: bool
    ) -> None:
        """Take over weights of which no version of the run is known. `is_partial`: of coded deltas only what
        this rank needs is read. `background` removes files, which takes longer than writing weights does.
        """
        self.live = live
        self.cache = cache
        self._run, self._schema = run, run.schema
        self._background, self._is_partial = background, is_partial
        self._recorded: SumsArray | None = None
        """The held version's digest sums, as the store has them."""
        self._mirror: dict[str, torch.Tensor] = {}
        """Names that are calculated, or `cut`, in full, as they are in the held version."""

    @property
    def map(self) -> WeightMap:
        return self.live.map

    # Opening: the map, and the version that is served already.

    def trace(self) -> Trace:
        return self.live.models.trace(self._schema)

    def follow(self, traced: Trace, shares: Sequence[RankSlices]) -> None:
        self.live.follow(WeightMap(self._schema, traced, shares))

    def check_arrangement(self, folder: Path) -> None:
        """Refuse weights that vLLM rearranged after it loaded them from a folder; compares some elements."""
        if wrong := self.live.misplaced(read_folder(folder, self._schema)):
            raise UsageError(
                f"{len(wrong)} tensors are not where vLLM's loader put them, such as {wrong[0]!r}. Either "
                "they were rearranged after loading and cannot be updated in place: choose backends "
                "(--moe-backend, --attention-backend) that serve bf16 weights as they are loaded. Or the "
                "checkpoint's files are others than when the server started: start it again"
            )

    def slice_sums(self) -> SliceSums:
        return self.live.slice_sums(sorted(self.map.regions))

    def sums(self, first: int, num_elements: int) -> dict[str, Any]:
        """Digest a part of what this rank serves; see `DeltaWorkerExtension.delta_sums`."""
        mapped, tensors, spent, at = self.map, self._schema.tensors, 0, first
        while at < len(tensors) and spent < num_elements:
            spent += sum(region.num_elements for _, region in mapped.regions.get(tensors[at].name, ()))
            at += 1
        told = self.live.slice_sums([spec.name for spec in tensors[first:at]])
        sums: dict[str, list[Any]] = {}
        for number, each in zip(told.slices.tolist(), told.sums.tolist(), strict=True):
            name, view = mapped.slices[number]
            if name in mapped.proved:
                place = [view.offset, *view.shape, *view.strides]
                sums.setdefault(name, []).append([place, Sums(*each).hex()])
        return {
            "next": at if at < len(tensors) else None,
            "sums": sums,
            "computed": sorted(mapped.computed),
            "unverified": sorted(mapped.partial | mapped.absent),
        }

    def find(self, slice_sums: Sequence[SliceSums], likely: int | None = None) -> int | None:
        """Return the version that all ranks together serve, or None; a `likely` one is tried first."""
        try:
            total, is_told = self.map.total(slice_sums)
        except StateMismatch as exc:
            logger.warning("these weights are no version of the run: %s", exc)
            return None
        every = zip(self._schema.tensors, total.tolist(), is_told.tolist(), strict=True)
        sums = {spec.name: Sums(*each) for spec, each, is_one in every if is_one}
        # What is served for a name that has no tensor of its own is known too.
        sums |= {name: sums[other] for name, other in self.live.dropped.items() if other in sums}
        found = find_version(self._run, sums, self.cache, likely)
        if found is None and (told := nearly_the_head(self._run, sums, self.cache)):
            logger.warning(told)
        return found

    def read(self, version: int | None) -> Contents | None:
        """Read what `adopt` needs of a version.

        None if the version is, if no required key has signed it, or if it is retired and payloads are gone.
        """
        if version is None:
            return None
        wanted = self.map.computed | self.map.partial | self.live.cut
        try:
            contents = read_contents(self._run, version, wanted, self.cache)
        except (Unsigned, WrongSignature, VersionRetired) as exc:
            logger.warning("these are the weights of version %d, which is not used: %s", version, exc)
            return None
        self._check_dropped(contents.manifest, contents.recorded)
        return contents

    def adopt(self, contents: Contents | None) -> bool:
        """Take it that a version is served. What is calculated is verified by calculating it again.

        Returns whether it is; if not, the map is proved without it, as of `LiveWeights.prove`.
        """
        self._recorded, self._mirror = None, {}
        if contents is None or not self._serves(contents):
            self.live.prove()
            return False
        # Also if an undo failed between the weights and what is made from them.
        self.live.models.derived.refresh()
        self._mirror = {name: contents.tensors[name] for name in self.map.computed | self.live.cut}
        self._recorded = contents.recorded
        return True

    def _serves(self, contents: Contents) -> bool:
        """Whether what no digest tells is served as well. The live weights are as before, or HalfApplied is
        raised.
        """
        mapped, found = self.map, contents.tensors
        mirror = {name: found[name] for name in mapped.computed}
        same = self.live.serves({name: found[name] for name in mapped.partial})
        if mirror and same:
            written = {index for _, indices in mapped.groups for index in indices}
            with self.live.put_back(written) as saved:
                self.live.load(self._named(mirror))
                same = all(torch.equal(saved[index], now) for index, now in self.live.save(written).items())
        return same

    def check_served(self, slice_sums: Sequence[SliceSums], version: int) -> None:
        """Check that all ranks together still serve the held version."""
        assert self._recorded is not None
        sums, is_told = self.map.total(slice_sums)
        if wrong := self._named_of(is_told & (sums != self._recorded).any(axis=1)):
            raise StateMismatch(
                f"{len(wrong)} tensors of the live weights are no longer those of version {version}, "
                f"such as {wrong[0]!r}: something else wrote to them; the next update starts from an anchor"
            )

    def _check_dropped(self, manifest: Manifest, recorded: SumsArray) -> None:
        """Refuse a version with two tensors, of other bits, where this server has one."""
        if not (dropped := self.live.dropped):
            return
        positions = {spec.name: i for i, spec in enumerate(self._schema.tensors)}
        for absent, name in dropped.items():
            if (recorded[positions[absent]] != recorded[positions[name]]).any():
                raise SchemaMismatch(
                    f"version {manifest.version} has other weights as {absent!r} than as {name!r}, but this "
                    "server has one tensor for both. If the config says tie_word_embeddings, they were equal "
                    "when vLLM started: start it from a checkpoint in which they differ, such as a replay of "
                    f"version {manifest.version}. Otherwise vLLM has no second tensor for this architecture, "
                    "and what it serves would not be what was trained: train with both tied"
                )

    def _recorded_by(self, manifest: Manifest) -> SumsArray:
        """Return a version's digest sums as the store has them, and as `_check_dropped` lets them pass.

        They are checked against the total here: `verify` looks at them alone, as generation waits for it.
        """
        recorded = host_cache.cached_sums(self._run.store, self._schema, manifest, self.cache)
        self._check_dropped(manifest, recorded)
        return recorded

    # An update: see `patchstore.apply.update.Weights`.

    def stage(self, plan: Plan, reading: ReadGate) -> Staged:
        """Fetch and decode a plan, and translate it to writes to this rank's memory."""
        if moved := self.live.moved():
            raise UsageError(
                f"{len(moved)} parameters have other memory than when the store was opened, such as "
                f"{moved[0]!r}; open it again"
            )
        began = time.monotonic()
        with ExitStack() as leases, torch.no_grad():
            given = self._fetch(plan, reading, leases)
            fetched = time.monotonic()
            with reading(), self.live.aside():
                staged = self._translate(plan, given)
            staged.timings = {"fetch": fetched - began, "stage": time.monotonic() - fetched}
            staged.leases = leases.pop_all()
            return staged

    def _fetch(self, plan: Plan, reading: ReadGate, leases: ExitStack) -> _Fetched:
        """Fetch what a plan names, and the target's digest sums beside it, as each waits for the store."""
        store, specs, cache = self._run.store, self._schema.by_name(), self.cache
        anchor: Mapping[str, torch.Tensor] = {}
        saved: Mapping[int, torch.Tensor] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="patchstore-stage") as beside:
            telling = beside.submit(self._recorded_by, plan.target)
            if plan.anchor is not None:
                # It may be refused, and then no whole model is fetched.
                telling.result()
                saving = beside.submit(self._save, reading())
                anchor = leases.enter_context(open_anchor(store, plan.anchor, specs, cache))
                saved = saving.result()
            needs = self.live.needs if self._is_partial and plan.anchor is None else None
            allocate = partial(pinned, device=self.live.device)
            opened = partial(open_deltas, store, plan.deltas, self._schema, None, cache, needs, allocate)
            deltas = leases.enter_context(opened())
            if plan.anchor is None and plan.held is not None and (more := self.live.cut_by(deltas)):
                held = read_contents(self._run, plan.held, more, cache)
                with reading():
                    # Not once this was abandoned: another version may be held by now.
                    self._mirror = {**self._mirror, **held.tensors}
                    self.live.cut |= more
                if needs is not None:
                    # More of them is needed now.
                    deltas = leases.enter_context(opened())
            return _Fetched(anchor, deltas, telling.result(), saved)

    @torch.no_grad()
    def _save(self, reading: AbstractContextManager[None]) -> dict[int, torch.Tensor]:
        """Copy all that an anchor will replace."""
        # A thread that leaves a stream of another device than the first makes a context on the first.
        with device_guard(self.live.device), reading, self.live.aside():
            return self.live.save(self.live.written())

    def _translate(self, plan: Plan, given: _Fetched) -> Staged:
        """Turn what was fetched into writes to this rank's memory; reads the live weights."""
        specs, mapped = self._schema.by_name(), self.map
        anchor, deltas, recorded, saved = given
        copied = sorted(deltas.names - mapped.computed)
        base = anchor if plan.anchor is not None else self._mirror
        change = self.live.stage_deltas(deltas, copied, base, keep_old=plan.anchor is None)
        patches = {
            name: deltas.merged(specs[name], base[name]) for name in sorted(deltas.names & mapped.computed)
        }
        wanted = mapped.computed if anchor else patches.keys()
        groups = [(names, indices) for names, indices in mapped.groups if names & wanted]
        computed = {name: base[name].clone() for names, _ in groups for name in sorted(names)}
        before, after = _patched(computed, patches)
        changed = self.live.cut if anchor else self.live.cut & deltas.names
        cut = {name: deltas.after(specs[name], base[name]) for name in sorted(changed)}
        partly = {name: deltas.after(specs[name], anchor[name]) for name in sorted(mapped.partial) if anchor}
        whole = {name: anchor[name] for name in anchor.keys() - computed.keys()}
        return Staged(
            plan=plan,
            anchor=anchor,
            change=change,
            computed=computed,
            cut=cut,
            before=before,
            after=after,
            recorded=recorded,
            partial=partly,
            pieces=self.live.bring(self.live.pieces(whole)),
            saved=self.live.save({i for _, indices in groups for i in indices}) if saved is None else saved,
        )

    def changes(self, staged: Staged) -> StagedSums:
        """Digest the elements that are staged, as they are on this rank and as they would be."""
        specs = self._schema.by_name()
        computed = [
            (self.map.number(name, View.contiguous(specs[name].shape)), sums, staged.after[name])
            for name, sums in staged.before.items()
        ]
        return staged.change.staged_sums.joined(StagedSums.of(computed))

    def verify(self, staged: Staged, told: Sequence[StagedSums]) -> None:
        """Check with the `changes` of all ranks that what is staged leads from the held version to its
        target.

        An update from an anchor is verified when it is written, by `verify_written`.
        """
        if staged.plan.anchor is not None:
            return
        assert self._recorded is not None
        sums = self._recorded + self.map.sum_staged(told)
        wrong = (sums != staged.recorded).any(axis=1) & self.map.is_proved
        if names := self._named_of(wrong):
            raise StateMismatch(
                f"these weights and what was published do not come to version {staged.manifest.version}: "
                f"{len(names)} tensors differ: {', '.join(names[:3])}"
            )

    def check(self, staged: Staged) -> None:
        """Check that the weights have the memory, and the bits, that the update was staged on."""
        if self.live.has_moved():
            moved = ", ".join(self.live.moved()[:3])
            raise UsageError(
                f"parameters have other memory than when it was staged ({moved}); open the store again"
            )
        if staged.plan.anchor is None and (name := self.live.overwritten(staged.change)):
            raise StateMismatch(f"something wrote to {name!r} after this version was staged")
        self.live.models.derived.notice()

    def write(self, staged: Staged) -> None:
        """Write what is staged into the live weights. If this raises, `undo` puts back what was there."""
        computed = self._named(staged.computed)
        self.live.write(staged.pieces)
        if computed:
            self.live.load(computed)
        self.live.scatter(staged.change)
        self.live.models.derived.refresh()
        self.live.wait()

    def verify_written(self, staged: Staged, slice_sums: Sequence[SliceSums]) -> None:
        """Check that all ranks together serve the version that was written."""
        sums, is_told = self.map.total(slice_sums)
        for name, each in staged.computed.items():
            place = self._schema.places[name]
            sums[place], is_told[place] = state_digest.of_tensor(each), True
        is_wrong = self.map.is_proved & ~is_told | is_told & (sums != staged.recorded).any(axis=1)
        if wrong := self._named_of(is_wrong):
            raise StateMismatch(
                f"the live weights are not version {staged.manifest.version}, which was written: "
                f"{len(wrong)} tensors differ: {', '.join(wrong[:3])}"
            )
        for name, tensor in staged.partial.items():
            if not self.live.serves({name: tensor}):
                raise StateMismatch(f"what is served of {name!r} is not version {staged.manifest.version}'s")

    def undo(self, staged: Staged) -> None:
        if not staged.anchor:
            self.live.gather_back(staged.change)
        self.live.restore(staged.saved)
        self.live.models.derived.refresh()
        self.live.wait()

    def accept(self, staged: Staged) -> None:
        self._recorded = staged.recorded
        self._mirror |= staged.computed | staged.cut

    def release(self, staged: Staged) -> None:
        """Close the payloads' files, on a thread: generation may be waiting."""
        # At once: a download that was abandoned may keep the thread busy, and the next update needs the room.
        staged.change, staged.pieces = StagedWrite(), ()
        try:
            self._background.submit(staged.release)
        except RuntimeError:  # The thread was shut down.
            staged.release()

    def _named_of(self, some: npt.NDArray[np.bool_]) -> list[str]:
        """Return the names of some tensors, in the schema's order."""
        return [self._schema.tensors[place].name for place in some.nonzero()[0]]

    def _named(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same tensors under all their names, tied ones too."""
        tied = {alias: name for alias, name in self._schema.tied.items() if name in tensors}
        return {**tensors, **{alias: tensors[name] for alias, name in tied.items()}}
