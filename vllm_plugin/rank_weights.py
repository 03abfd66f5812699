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
from functools import partial
from pathlib import Path

import torch

from patchstore.apply.update import Reading
from patchstore.errors import (
    CorruptObject,
    HalfApplied,
    SchemaMismatch,
    StateMismatch,
    UsageError,
)
from patchstore.format import history
from patchstore.format.records import Manifest, Plan, Schema
from patchstore.read import host_cache
from patchstore.read.anchors import open_anchor
from patchstore.read.deltas import Deltas, open_deltas
from patchstore.read.host_cache import HostCache
from patchstore.stores.base import Store
from patchstore.tensors import state_digest
from patchstore.tensors.state_digest import Sums
from vllm_plugin.batches import Batch, Comparison, Piece
from vllm_plugin.identify import Contents, read_contents, read_folder, sums_array
from vllm_plugin.mapping import SliceSums, StagedSums, SumsArray, WeightMap
from vllm_plugin.regions import View
from vllm_plugin.staged_update import Staged, patched
from vllm_plugin.weights import LiveWeights

logger = logging.getLogger(__name__)


class RankWeights:
    """The live weights of one rank, with what the held version has of names that they do not show."""

    def __init__(
        self,
        store: Store,
        schema: Schema,
        live: LiveWeights,
        cache: HostCache,
        background: Executor,
        *,
        is_partial: bool,
        check: history.Check | None = None,
    ) -> None:
        """Take over weights of which no version is known.

        Args:
            background: removes files, which takes longer than writing weights does.
            is_partial: whether to read only what this rank needs of coded deltas.
            check: see `identify.read_contents`.
        """
        self.live = live
        self.is_map_proved = False
        """The map agreed, in every element that is copied, with weights that vLLM's own loader had loaded."""
        self.loaded_from: Path | None = None
        """The checkpoint that vLLM loaded its weights from, if a folder of this host has it."""
        self._store, self._schema, self._cache = store, schema, cache
        self._background, self._is_partial, self._check = background, is_partial, check
        self._recorded: SumsArray | None = None
        """The held version's digest sums, as the store has them."""
        self._mirror: dict[str, torch.Tensor] = {}
        """Names that are calculated, or `cut`, in full, as they are in the held version."""

    @property
    def _map(self) -> WeightMap:
        return self.live.map

    # The held version.

    def adopt(self, contents: Contents | None) -> bool:
        """Take it that a version is served. What is calculated is verified by calculating it again.

        Returns:
            Whether it is; if not, the live weights are as before.

        Raises:
            HalfApplied: the live weights could not be put back.
        """
        self._recorded, self._mirror = None, {}
        if contents is None:
            return False
        mapped, found = self._map, contents.tensors
        mirror = {name: found[name] for name in mapped.computed}
        cut = {name: found[name] for name in self.live.cut}
        same = self.live.serves({name: found[name] for name in mapped.partial})
        if mirror and same:
            written = {index for _, indices in mapped.groups for index in indices}
            saved = self.live.save(written)
            try:
                self.live.load(self._named(mirror))
                same = all(torch.equal(saved[index], now) for index, now in self.live.save(written).items())
            finally:
                try:
                    self.live.restore(saved)
                except Exception as exc:
                    raise HalfApplied(
                        f"weights that were loaded to be compared could not be put back: {exc}"
                    ) from exc
        if same:
            # Also if an undo failed between the weights and what is made from them.
            self.live.derive()
            self._mirror = mirror | cut
            self._recorded = sums_array(self._schema, contents.recorded)
            self.is_map_proved = True
        return same

    def check_served(self, slice_sums: Sequence[SliceSums], version: int) -> None:
        """Check that all ranks together still serve the held version.

        Raises:
            StateMismatch: they do not: something else wrote to the weights.
        """
        assert self._recorded is not None
        if wrong := self._differing(self._map.total(slice_sums), self._recorded):
            raise StateMismatch(
                f"{len(wrong)} tensors of the live weights are no longer those of version {version}, "
                f"such as {wrong[0]!r}: something else wrote to them; the next update starts from an anchor"
            )

    def check_dropped(self, manifest: Manifest, recorded: SumsArray) -> None:
        """Refuse a version of which this server would silently leave out a tensor.

        Raises:
            SchemaMismatch: the version has two tensors, with other bits, where this server has one.
        """
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
        """Return a version's digest sums as the store has them, and as `check_dropped` lets them pass.

        They are checked against the total here: `verify` looks at them alone, as generation waits for it.
        """
        sums = host_cache.cached_sums(self._store, self._schema, manifest, self._cache)
        recorded = sums_array(self._schema, sums)
        self.check_dropped(manifest, recorded)
        return recorded

    # An update: see `patchstore.apply.update.Weights`.

    def stage(self, plan: Plan, reading: Reading) -> Staged:
        """Fetch and decode a plan, and translate it to writes to this rank's memory.

        Raises:
            CorruptObject: what the store has is wrong.
            SchemaMismatch: the version has two tensors where this server has one.
            UsageError: parameters have moved in memory since they were traced.
        """
        if moved := self.live.moved():
            raise UsageError(
                f"{len(moved)} parameters have other memory than when the store was opened, such as "
                f"{moved[0]!r}; open it again"
            )
        began = time.monotonic()
        specs, beside = self._schema.by_name(), ThreadPoolExecutor(1, thread_name_prefix="patchstore-stage")
        with ExitStack() as leases, beside, torch.no_grad():
            anchor: Mapping[str, torch.Tensor] = {}
            saved: Mapping[int, torch.Tensor] | None = None
            # Beside the payloads, as each waits for the store.
            telling = beside.submit(self._recorded_by, plan.target)
            if plan.anchor is not None:
                # It may be refused, and then no whole model is fetched.
                telling.result()
                saving = beside.submit(self._save, reading.beside())
                anchor = leases.enter_context(open_anchor(self._store, plan.anchor, specs, self._cache))
                saved = saving.result()
            needs = self.live.needs if self._is_partial and plan.anchor is None else None
            cache, allocate = self._cache, self.live.host_memory
            opened = partial(open_deltas, self._store, plan.deltas, specs, None, cache, needs, allocate)
            deltas = leases.enter_context(opened())
            if plan.anchor is None and plan.held is not None and (more := self.live.cut_by(deltas)):
                found = read_contents(
                    self._store, self._schema, plan.held, more, self._cache, self._check
                ).tensors
                self._mirror = {**self._mirror, **found}
                self.live.cut |= more
                if needs is not None:
                    # More of them is needed now.
                    deltas = leases.enter_context(opened())
            recorded, fetched = telling.result(), time.monotonic()
            with reading, self.live.aside():
                staged = self._translate(plan, anchor, deltas, recorded, saved)
            staged.timings = {"fetch": fetched - began, "stage": time.monotonic() - fetched}
            staged.leases = leases.pop_all()
            return staged

    @torch.no_grad()
    def _save(self, reading: AbstractContextManager[None]) -> dict[int, torch.Tensor]:
        """Copy all that an anchor will replace, beside an attempt to prove the map."""
        with reading, self.live.aside():
            written = self.live.written()
            comparison = None if self.is_map_proved else self._comparison()
            saved = self.live.save(written, () if comparison is None else comparison.jobs)
            self.is_map_proved |= comparison is not None and comparison.proves()
            if not self.is_map_proved:
                # Nor is it proved then that the loader writes nowhere else.
                saved |= self.live.save(self.live.registered() - written)
            return saved

    def _comparison(self) -> Comparison | None:
        """Prepare to prove the map with the checkpoint that vLLM loaded, while generation goes on.

        If it fails, vLLM's loader has to write the anchor, for which generation waits. It fails where other
        weights were written since the start.
        """
        if self.loaded_from is None:
            return None
        try:
            return self.live.comparison_of_all(read_folder(self.loaded_from, self._schema))
        except (CorruptObject, OSError) as exc:
            logger.warning("the checkpoint in %s cannot be read again: %s", self.loaded_from, exc)
            return None

    def _translate(
        self,
        plan: Plan,
        anchor: Mapping[str, torch.Tensor],
        deltas: Deltas,
        recorded: SumsArray,
        saved: Mapping[int, torch.Tensor] | None,
    ) -> Staged:
        """Turn what was fetched into writes to this rank's memory; reads the live weights."""
        specs, mapped = self._schema.by_name(), self._map
        copied = sorted(deltas.names - mapped.computed)
        base = anchor if plan.anchor is not None else self._mirror
        change = self.live.stage_deltas(deltas, copied, base, keep_old=plan.anchor is None)
        patches = {
            name: deltas.merged(specs[name], base[name]) for name in sorted(deltas.names & mapped.computed)
        }
        wanted = mapped.computed if anchor else patches.keys()
        groups = [(names, indices) for names, indices in mapped.groups if names & wanted]
        computed = {name: base[name].clone() for names, _ in groups for name in sorted(names)}
        before, after = patched(computed, patches)
        changed = self.live.cut if anchor else self.live.cut & deltas.names
        cut = {name: deltas.after(specs[name], base[name]) for name in sorted(changed)}
        partly = {name: deltas.after(specs[name], anchor[name]) for name in sorted(mapped.partial) if anchor}
        pieces: Sequence[Batch | Piece] | None = None
        if anchor and self.is_map_proved:
            copied_names = anchor.keys() - computed.keys()
            pieces = self.live.bring(self.live.pieces({name: anchor[name] for name in copied_names}))
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
            pieces=pieces,
            saved=self.live.save({i for _, indices in groups for i in indices}) if saved is None else saved,
        )

    def changes(self, staged: Staged) -> StagedSums:
        """Digest the elements that are staged, as they are on this rank and as they would be."""
        specs = self._schema.by_name()
        computed = [
            (self._map.number(name, View.contiguous(specs[name].shape)), sums, staged.after[name])
            for name, sums in staged.before.items()
        ]
        return staged.change.staged_sums.joined(StagedSums.of(computed))

    def verify(self, staged: Staged, told: Sequence[StagedSums]) -> None:
        """Check that what is staged leads from the held version to its target.

        An update from an anchor is verified when it is written, by `verify_written`.

        Args:
            told: the `changes` of all ranks.

        Raises:
            StateMismatch: it does not: the payloads are wrong, or the live weights are not the held version.
        """
        if staged.plan.anchor is not None:
            return
        assert self._recorded is not None
        sums = self._recorded + self._map.sum_staged(told)
        wrong = (sums != staged.recorded).any(axis=1) & self._map.is_proved
        if wrong.any():
            names = [self._schema.tensors[i].name for i in wrong.nonzero()[0][:3]]
            raise StateMismatch(
                f"these weights and what was published do not come to version {staged.manifest.version}: "
                f"{int(wrong.sum())} tensors differ: {', '.join(names)}"
            )

    def check(self, staged: Staged) -> None:
        """Check that the weights have the memory, and the bits, that the update was staged on.

        Raises:
            UsageError: parameters have moved in memory, or hold what cannot be made again.
            StateMismatch: something wrote to the weights meanwhile.
        """
        if self.live.has_moved():
            moved = ", ".join(self.live.moved()[:3])
            raise UsageError(
                f"parameters have other memory than when it was staged ({moved}); open the store again"
            )
        if staged.plan.anchor is None and (name := self.live.overwritten(staged.change)):
            raise StateMismatch(f"something wrote to {name!r} after this version was staged")
        self.live.notice_derived()

    def write(self, staged: Staged) -> None:
        """Write what is staged into the live weights.

        Raises:
            StateMismatch: the weights are not what they were when it was staged; `undo` puts back what
                really was there.
            SchemaMismatch, LoadFailed: writing failed.
        """
        computed = self._named(staged.computed)
        if staged.anchor and staged.pieces is None:
            # vLLM's loader writes, the map reads: if they agree in every bit, the map is right.
            rest = {name: each for name, each in self._named(staged.anchor).items() if name not in computed}
            self.live.load(rest | computed)
        else:
            self.live.write(staged.pieces or ())
            if computed:
                self.live.load(computed)
        self.live.scatter(staged.change)
        self.live.derive()
        self.live.wait()

    def verify_written(self, staged: Staged, slice_sums: Sequence[SliceSums]) -> None:
        """Check that all ranks together serve the version that was written.

        Raises:
            StateMismatch: they do not.
        """
        mapped = self._map
        sums = mapped.total(slice_sums) | {
            name: state_digest.of_tensor(each) for name, each in staged.computed.items()
        }
        unknown = {spec.name for spec in self._schema.tensors} - mapped.partial - mapped.absent - sums.keys()
        if wrong := sorted(unknown) + self._differing(sums, staged.recorded):
            raise StateMismatch(
                f"the live weights are not version {staged.manifest.version}, which was written: "
                f"{len(wrong)} tensors differ: {', '.join(wrong[:3])}"
            )
        for name, tensor in staged.partial.items():
            if not self.live.serves({name: tensor}):
                raise StateMismatch(f"what is served of {name!r} is not version {staged.manifest.version}'s")

    def undo(self, staged: Staged) -> None:
        """Put back the weights from before `write`."""
        if not staged.anchor:
            self.live.gather_back(staged.change)
        self.live.restore(staged.saved)
        self.live.derive()
        self.live.wait()

    def accept(self, staged: Staged) -> None:
        self._recorded = staged.recorded
        self._mirror |= staged.computed | staged.cut
        self.is_map_proved |= bool(staged.anchor)

    def release(self, staged: Staged) -> None:
        """Close the payloads' files, on a thread: generation may be waiting."""
        try:
            self._background.submit(staged.release)
        except RuntimeError:  # The thread was shut down.
            staged.release()

    def _differing(self, sums: Mapping[str, Sums], recorded: SumsArray) -> list[str]:
        """Return the names whose sums are not those recorded, in the schema's order."""
        each = zip(self._schema.tensors, recorded.tolist(), strict=True)
        return [spec.name for spec, row in each if spec.name in sums and [*sums[spec.name]] != row]

    def _named(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same tensors under all their names, tied ones too."""
        tied = {alias: name for alias, name in self._schema.tied.items() if name in tensors}
        return {**tensors, **{alias: tensors[name] for alias, name in tied.items()}}
