"""One rank's side of an update: a version is served whole, or the one before it is.

Staging reads the live weights and writes nothing; committing writes what is staged, in place, with a record
that undoes it. What needs all ranks' word, that together they hold what the manifest says, is handed out as
claims and comes back as everybody's, since a method here must never wait for another rank.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import torch

from patchstore.errors import (
    HalfApplied,
    HostError,
    SchemaMismatch,
    StateMismatch,
    StoreReplaced,
    UsageError,
    VersionNotFound,
)
from patchstore.format import history, planning
from patchstore.format.records import Manifest, Plan, Schema, TensorSpec
from patchstore.read import host_cache
from patchstore.read.anchors import open_anchor
from patchstore.read.deltas import Deltas, open_deltas
from patchstore.read.host_cache import HostCache
from patchstore.stores.base import Store
from patchstore.support import host
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TensorPatch, bits
from patchstore.tensors.state_digest import Sums
from vllm_plugin.identify import find_version, read_tensors
from vllm_plugin.mapping import Claims, Growth, Share, SumsArray, WeightMap
from vllm_plugin.regions import View
from vllm_plugin.trace import Trace
from vllm_plugin.weights import Change, LiveWeights

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Staged:
    """An update that is ready to be written."""

    plan: Plan
    anchor: Mapping[str, torch.Tensor]
    """Every tensor of the anchor that it starts from; empty where it starts from the held version."""
    change: Change
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
    saved: dict[int, torch.Tensor] = field(default_factory=dict)
    """The runtimes that are written as a whole, as they are now."""
    leases: ExitStack = field(default_factory=ExitStack)
    """Holds the payloads' files, which the host's other ranks use too."""
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        return self.plan.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the store says of a version that seems to be served already."""

    manifest: Manifest
    recorded: Mapping[str, Sums]
    """Its digest sums."""
    tensors: Mapping[str, torch.Tensor]
    """In full: names that are calculated, held in part, or `cut`."""


class Updater:
    """Moves the live weights between versions: `stage`, `prove`, `commit`, then `accept` or `roll_back`.

    Before the first of them, all ranks `trace`, `follow` what they found, and `adopt` the version that
    they hold already, if any.
    """

    def __init__(
        self, store: Store, live: LiveWeights, cache: HostCache, *, is_partial: bool = False
    ) -> None:
        """Open a run.

        Args:
            is_partial: whether to read only what this rank needs of coded deltas.

        Raises:
            VersionNotFound: the store holds no run.
        """
        header = history.read_header(store)
        if header is None:
            raise VersionNotFound(
                f"this server finds no run at {store.url}: is that the place, on its machine too, where the "
                "trainer publishes?"
            )
        self.store = store
        self.header = header
        self.held: Manifest | None = None
        """The version that the live weights are known to have."""
        self._recorded: SumsArray | None = None
        """Its digest sums, as the store has them."""
        self.torn = False
        """The live weights are parts of two versions, or nobody's; the next update starts from an anchor."""
        self.is_map_proved = False
        """The map agreed, in every element that is copied, with weights that vLLM's own loader had loaded."""
        self.timings: dict[str, float] = {}
        """Seconds of the last update: `fetch`, `stage`, `commit`, `verify`."""
        self.num_commits = 0
        self._live = live
        self._cache = cache
        self._is_partial = is_partial
        self._mirror: dict[str, torch.Tensor] = {}
        """Names that are calculated, or `cut`, in full, as they are in the held version."""
        self._staged: Staged | None = None
        self._ahead: tuple[int, Future[Staged]] | None = None
        """A version that is being staged, or was, before anybody asked for it with `stage`."""
        self._turn = 0
        """Grows when what is staged on the thread becomes useless."""
        self._reading = Lock()
        """Held while live weights are read to stage a version, on whichever thread."""
        self._background = ThreadPoolExecutor(
            1, thread_name_prefix="patchstore-prefetch", initializer=use_device, initargs=(live.device,)
        )
        self._is_written = False

    @property
    def schema(self) -> Schema:
        return self.header.schema

    @property
    def staged(self) -> Manifest | None:
        return None if self._staged is None else self._staged.manifest

    @property
    def replaces_all(self) -> bool:
        """Whether what is staged starts from an anchor, so that only the weights as written can prove it."""
        return self._staged is not None and self._staged.plan.anchor is not None

    # Opening: the map, and the version that is held already.

    def trace(self) -> Trace:
        """Trace the models' loaders. Raises as `LiveWeights.trace`."""
        return self._live.trace(self.schema)

    def follow(self, traced: Trace, shares: Sequence[Share]) -> None:
        """Use the map that comes of all ranks' shares."""
        self._live.follow(WeightMap(self.schema, traced, shares))

    def claims(self) -> Claims:
        """Digest all that this rank serves of the run."""
        return self._live.claims(sorted(self._live.map.regions))

    def check_map(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Compare some elements of the live weights with the checkpoint that vLLM loaded them from.

        Raises:
            UsageError: weights are not where the loader puts them: they were rearranged since.
        """
        if wrong := self._live.misplaced(loaded):
            raise UsageError(
                f"{len(wrong)} tensors are not where vLLM's loader put them, such as {wrong[0]!r}. Either "
                "they were rearranged after loading and cannot be updated in place: choose backends "
                "(--moe-backend, --attention-backend) that serve bf16 weights as they are loaded. Or the "
                "checkpoint's files are others than when the server started: start it again"
            )

    def check_held(self, claims: Sequence[Claims]) -> None:
        """Check that all ranks together still serve the version that they hold.

        Raises:
            StateMismatch: they do not: somebody else wrote to the weights.
        """
        assert self.held is not None and self._recorded is not None
        if wrong := self._differing(self._live.map.total(claims), self._recorded):
            raise StateMismatch(
                f"{len(wrong)} tensors of the live weights are no longer those of version "
                f"{self.held.version}, such as {wrong[0]!r}: something else wrote to them; "
                "the next update starts from an anchor"
            )

    def sums(self, first: int, num_elements: int) -> dict[str, Any]:
        """Digest a part of what this rank serves; see `DeltaWorkerExtension.delta_sums`."""
        mapped, found, spent, at = self._live.map, {}, 0, first
        while at < len(self.schema.tensors) and spent < num_elements:
            spent += sum(
                region.num_elements for _, region in mapped.regions.get(self.schema.tensors[at].name, ())
            )
            at += 1
        names = [spec.name for spec in self.schema.tensors[first:at]]
        for name, slices in self._live.claims(names).items():
            if name in mapped.proved:
                found[name] = [
                    [[view.offset, *view.shape, *view.strides], sums.hex()] for view, sums in slices
                ]
        return {
            "held": self._held_version(),
            "num_commits": self.num_commits,
            "next": at if at < len(self.schema.tensors) else None,
            "sums": found,
            "computed": sorted(mapped.computed),
            "unproved": sorted(mapped.partial | mapped.absent),
        }

    @property
    def map(self) -> WeightMap:
        return self._live.map

    def find(self, claims: Sequence[Claims]) -> int | None:
        """Return the version that all ranks together serve, or None."""
        try:
            sums = self._live.map.total(claims)
        except StateMismatch:
            return None
        # What is served for a name that has no tensor of its own is known too.
        sums |= {name: sums[other] for name, other in self._live.dropped.items() if other in sums}
        return find_version(self.store, self.schema, sums, self._cache)

    def read(self, version: int | None) -> Contents | None:
        """Read what `adopt` needs of a version; None if the version is.

        Raises:
            SchemaMismatch: the version has two tensors where this server has one.
        """
        if version is None:
            return None
        manifest = history.read_manifest(self.store, version)
        recorded = host_cache.cached_sums(self.store, self.schema, manifest, self._cache)
        self._check_dropped(manifest, _array(self.schema, recorded))
        wanted = self._live.map.computed | self._live.map.partial | self._live.cut
        found = read_tensors(self.store, self.schema, version, wanted, recorded, self._cache)
        return Contents(manifest=manifest, recorded=recorded, tensors=found)

    def adopt(self, contents: Contents | None) -> bool:
        """Take it that a version is served. What is calculated is proved by calculating it again.

        Returns:
            Whether it is; if not, the live weights are as before.

        Raises:
            HalfApplied: the live weights could not be put back.
        """
        self.held, self._recorded, self._mirror = None, None, {}
        if contents is None:
            return False
        mapped, found = self._live.map, contents.tensors
        mirror = {name: found[name] for name in mapped.computed}
        cut = {name: found[name] for name in self._live.cut}
        same = all(self._live.serves(name, found[name]) for name in sorted(mapped.partial))
        if mirror and same:
            written = {index for _, indices in mapped.groups for index in indices}
            saved = self._live.save(written)
            try:
                self._live.load(self._named(mirror))
                same = all(torch.equal(saved[index], now) for index, now in self._live.save(written).items())
            finally:
                try:
                    self._live.restore(saved)
                except Exception as exc:
                    raise HalfApplied(
                        f"weights that were loaded to be compared could not be put back: {exc}"
                    ) from exc
        if same:
            # Also if an undo failed between the weights and what is made from them.
            self._live.derive()
            self.held, self._mirror = contents.manifest, mirror | cut
            self._recorded = _array(self.schema, contents.recorded)
            self.is_map_proved, self.torn = True, False
        return same

    def forget(self) -> None:
        """Hold no version: the next update starts from an anchor."""
        self.held = self._recorded = None
        self.drop()

    # Staging.

    def prefetch(self, version: int) -> bool:
        """Begin to stage a version on a thread, or see how that stands; returns at once.

        What goes wrong is not said here, but by `stage`.

        Returns:
            Whether nothing is under way any more, so that `stage` will not be the one to fetch.
        """
        if self._staged is not None:
            if self._staged.manifest.version == version:
                return True
            # Whoever staged it did not come back to finish.
            self.drop()
        if self._ahead is not None and (self._ahead[0] == version or not self._ahead[1].done()):
            return self._ahead[1].done()
        self.abandon()
        self._ahead = version, self._background.submit(self._stage, version, self._turn)
        return False

    def abandon(self) -> None:
        """Drop what `prefetch` began. Nothing reads the live weights on a thread from here on.

        Does not wait for the network: a download under way ends on its own, and its result is dropped.
        """
        with self._reading:
            self._turn += 1
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not ahead[1].cancel():
            ahead[1].add_done_callback(_release_result)

    def stage(self, version: int) -> None:
        """Fetch a version and translate it, unless `prefetch` did. What was staged before is dropped.

        Raises:
            VersionNotFound, WrongParent: the store has no way to that version.
            CorruptObject: what it has is wrong.
            SchemaMismatch: the version has two tensors where this server has one.
            StoreReplaced: it has another run than when it was opened, or another version of the held number.
            UsageError: parameters have moved in memory since they were traced.
        """
        if self._staged is not None and (version, self._held_version()) == (
            self._staged.manifest.version,
            self._staged.plan.held,
        ):
            return
        self.drop()
        ahead = self._ahead
        if ahead is not None and ahead[0] == version:
            self._ahead = None
            found = ahead[1].result()
            if found.plan.held == self._held_version():
                self._staged = found
            else:
                _release(found)
        self.abandon()
        if self._staged is None:
            self._staged = self._stage(version, self._turn)
        self.timings = dict(self._staged.timings)

    def _check_dropped(self, manifest: Manifest, recorded: SumsArray) -> None:
        """Refuse a version of which this server would silently leave out a tensor.

        Raises:
            SchemaMismatch: the version has two tensors, with other bits, where this server has one.
        """
        if not (dropped := self._live.dropped):
            return
        positions = {spec.name: i for i, spec in enumerate(self.schema.tensors)}
        for absent, name in dropped.items():
            if not np.array_equal(recorded[positions[absent]], recorded[positions[name]]):
                raise SchemaMismatch(
                    f"version {manifest.version} has other weights as {absent!r} than as {name!r}, but this "
                    "server has one tensor for both. If the config says tie_word_embeddings, they were equal "
                    "when vLLM started: start it from a checkpoint in which they differ, such as a replay of "
                    f"version {manifest.version}. Otherwise vLLM has no second tensor for this architecture, "
                    "and what it serves would not be what was trained: train with both tied"
                )

    def _held_version(self) -> int | None:
        return None if self.held is None else self.held.version

    @host.asked("staging an update")
    def _stage(self, version: int, turn: int) -> Staged:
        before = self.held
        held = None if before is None else before.version
        began = time.monotonic()
        if moved := self._live.moved():
            raise UsageError(
                f"{len(moved)} parameters have other memory than when the store was opened, such as "
                f"{moved[0]!r}; open it again"
            )
        try:
            manifests = history.read_lineage(self.store, version, held)
        except VersionNotFound as exc:
            # Whoever asked for the version may have seen it in another store.
            raise VersionNotFound(f"{exc}; {self.store.url} is the store that this server has open") from exc
        if manifests[version].run_id != self.header.run_id:
            raise self._replaced(f"has version {version} of run {manifests[version].run_id}")
        if held in manifests and manifests[held] != before:
            raise self._replaced(f"has another version {held} than the one that is served,")
        route = planning.plan(manifests, held, version)
        # They are proved against the total here: `prove` looks at them alone, as generation waits for it.
        recorded = _array(
            self.schema, host_cache.cached_sums(self.store, self.schema, route.target, self._cache)
        )
        self._check_dropped(route.target, recorded)
        specs = self.schema.by_name()
        with ExitStack() as leases, torch.no_grad():
            anchor: Mapping[str, torch.Tensor] = {}
            if route.anchor is not None:
                anchor = leases.enter_context(open_anchor(self.store, route.anchor, specs, self._cache))
            needs = self._live.needs if self._is_partial and route.anchor is None else None
            deltas = leases.enter_context(
                open_deltas(self.store, route.deltas, specs, None, self._cache, needs)
            )
            fetched = time.monotonic()
            with self._reading, self._live.aside():
                if turn != self._turn:
                    raise UsageError(
                        f"version {version} was still being fetched when the weights or the store were "
                        "replaced; stage it again"
                    )
                staged = self._translate(route, anchor, deltas, recorded)
            staged.timings = {"fetch": fetched - began, "stage": time.monotonic() - fetched}
            staged.leases = leases.pop_all()
            return staged

    def _translate(
        self, route: Plan, anchor: Mapping[str, torch.Tensor], deltas: Deltas, recorded: SumsArray
    ) -> Staged:
        """Turn what was fetched into writes to this rank's memory; reads the live weights."""
        specs, mapped = self.schema.by_name(), self._live.map
        copied = sorted(deltas.names - mapped.computed)
        base = anchor if route.anchor is not None else self._mirror
        change = self._live.stage_deltas(deltas, copied, base, keep_old=route.anchor is None)
        patches = {
            name: deltas.merged(specs[name], base[name]) for name in sorted(deltas.names & mapped.computed)
        }
        wanted = mapped.computed if anchor else patches.keys()
        groups = [(names, indices) for names, indices in mapped.groups if names & wanted]
        computed = {name: base[name].clone() for names, _ in groups for name in sorted(names)}
        before, after = _patched(computed, patches)
        changed = self._live.cut if anchor else self._live.cut & deltas.names
        cut = {name: _after(deltas, specs[name], base[name]) for name in sorted(changed)}
        partial = {
            name: _after(deltas, specs[name], anchor[name]) for name in sorted(mapped.partial) if anchor
        }
        written = {index for _, indices in groups for index in indices}
        if anchor:
            written = self._live.written()
            if not self.is_map_proved:
                # Nor is it proved then that the loader writes nowhere else.
                written |= self._live.registered()
        return Staged(
            plan=route,
            anchor=anchor,
            change=change,
            computed=computed,
            cut=cut,
            before=before,
            after=after,
            recorded=recorded,
            partial=partial,
            saved=self._live.save(written),
        )

    def _replaced(self, what: str) -> StoreReplaced:
        return StoreReplaced(
            f"{self.store.url} {what} but was opened as run {self.header.run_id}. Its objects were removed "
            "or replaced. The weights were left as they are; open the store again to follow what is there now"
        )

    def changes(self) -> Growth:
        """Digest the elements that are staged, as they are on this rank and as they would be."""
        assert self._staged is not None
        staged, specs = self._staged, self.schema.by_name()
        computed = [
            (self._live.map.number(name, View.contiguous(specs[name].shape)), sums, staged.after[name])
            for name, sums in staged.before.items()
        ]
        return staged.change.growth.joined(Growth.of(computed))

    def prove(self, changes: Sequence[Growth]) -> None:
        """Check that what is staged leads from the held version to the one that it says.

        Args:
            changes: of all ranks.

        Raises:
            StateMismatch: it does not: the payloads are wrong, or the live weights are not the held version.
        """
        assert self._staged is not None
        if self.replaces_all:
            return
        assert self._recorded is not None
        mapped, target = self._live.map, self._staged.manifest
        sums = self._recorded + mapped.grown(changes)
        wrong = (sums != self._staged.recorded).any(axis=1) & mapped.is_proved
        if wrong.any():
            names = [self.schema.tensors[i].name for i in wrong.nonzero()[0][:3]]
            raise StateMismatch(
                f"these weights and what was published do not come to version {target.version}: "
                f"{int(wrong.sum())} tensors differ: {', '.join(names)}"
            )

    def _differing(self, sums: Mapping[str, Sums], recorded: SumsArray) -> list[str]:
        """Return the names whose sums are not those recorded, in the schema's order."""
        each = zip(self.schema.tensors, recorded.tolist(), strict=True)
        return [spec.name for spec, row in each if spec.name in sums and [*sums[spec.name]] != row]

    def drop(self) -> None:
        """Forget what is staged."""
        staged, self._staged = self._staged, None
        if staged is not None:
            _release(staged)

    # Committing.

    def commit(self) -> None:
        """Write what is staged into the live weights. Ends with `accept` or `roll_back`, also if it raises.

        Raises:
            UsageError: nothing is staged.
            StateMismatch: the weights are not what they were when it was staged. Nothing was written, or
                `roll_back` puts back what really was there.
            SchemaMismatch, LoadFailed: writing failed; `roll_back` puts the weights back.
        """
        staged = self._staged
        if staged is None:
            raise UsageError("no version is staged; call update_weights with a version before finishing")
        if self._live.has_moved():
            moved = ", ".join(self._live.moved()[:3])
            raise UsageError(
                f"parameters have other memory than when it was staged ({moved}); open the store again"
            )
        began = time.monotonic()
        if staged.plan.anchor is None and (name := self._live.overwritten(staged.change)):
            raise StateMismatch(f"something wrote to {name!r} after this version was staged")
        self._live.notice_derived()
        self._is_written = True
        computed = self._named(staged.computed)
        if staged.anchor and not self.is_map_proved:
            # vLLM's loader writes, the map reads: if they agree in every bit, the map is right.
            rest = {name: each for name, each in self._named(staged.anchor).items() if name not in computed}
            self._live.load(rest | computed)
        else:
            for name in sorted(staged.anchor.keys() - staged.computed.keys()):
                self._live.write(name, staged.anchor[name])
            if computed:
                self._live.load(computed)
        self._live.scatter(staged.change)
        self._live.derive()
        _wait_for(self._live.device)
        self.timings["commit"] = time.monotonic() - began

    def check(self, claims: Sequence[Claims]) -> None:
        """Check that all ranks together serve the staged version.

        Raises:
            StateMismatch: they do not.
        """
        assert self._staged is not None
        began = time.monotonic()
        mapped, staged = self._live.map, self._staged
        sums = mapped.total(claims) | {
            name: state_digest.of_tensor(each) for name, each in staged.computed.items()
        }
        unknown = {spec.name for spec in self.schema.tensors} - mapped.partial - mapped.absent - sums.keys()
        if wrong := sorted(unknown) + self._differing(sums, staged.recorded):
            raise StateMismatch(
                f"the live weights are not version {staged.manifest.version}, which was written: "
                f"{len(wrong)} tensors differ: {', '.join(wrong[:3])}"
            )
        for name, tensor in staged.partial.items():
            if not self._live.serves(name, tensor):
                raise StateMismatch(f"what is served of {name!r} is not version {staged.manifest.version}'s")
        self.timings["verify"] = time.monotonic() - began

    def accept(self) -> None:
        """Make the commit final."""
        assert self._staged is not None
        self.held, self._recorded = self._staged.manifest, self._staged.recorded
        self._mirror |= self._staged.computed | self._staged.cut
        self.is_map_proved |= bool(self._staged.anchor)
        self.torn = False
        self.num_commits += 1
        self._is_written = False
        # Removing files takes longer than writing weights did, and generation waits for this.
        staged, self._staged = self._staged, None
        self._background.submit(_release, staged)

    def roll_back(self) -> None:
        """Put back the weights from before `commit`. The version held is the one before, as it was all along.

        Raises:
            HalfApplied: that failed too. `tear` is to follow, in all ranks.
        """
        try:
            if self._is_written and self._staged is not None:
                if not self._staged.anchor:
                    self._live.gather_back(self._staged.change)
                self._live.restore(self._staged.saved)
                self._live.derive()
                _wait_for(self._live.device)
        except Exception as exc:
            raise HalfApplied(
                f"undoing a failed update failed too, so the weights are parts of two versions: {exc}; "
                "update again, which will load an anchor, or restart the server"
            ) from exc
        finally:
            self._is_written = False
            self.drop()

    def tear(self) -> None:
        """Hold no version, and say so, until an update from an anchor succeeds."""
        self.torn = True
        self.forget()

    def close(self) -> None:
        """Let go of the store, on a thread, when what is being fetched has ended. `held` stays as it is."""
        self.abandon()
        self.drop()
        with suppress(RuntimeError):  # Closed already.
            self._background.submit(self.store.close)
        self._background.shutdown(wait=False)

    def _named(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same tensors under all their names, tied ones too."""
        tied = {alias: name for alias, name in self.schema.tied.items() if name in tensors}
        return {**tensors, **{alias: tensors[name] for alias, name in tied.items()}}


def _after(deltas: Deltas, spec: TensorSpec, before: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor with deltas applied."""
    tensor = before.clone()
    deltas.apply([(spec, tensor)])
    return tensor


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


def _array(schema: Schema, sums: Mapping[str, Sums]) -> SumsArray:
    """Both sums of each tensor of the schema."""
    return np.array([sums[spec.name] for spec in schema.tensors], dtype=np.uint64).reshape(-1, 2)


def _release(staged: Staged) -> None:
    """Let go of the payloads' files. The update does not fail where they cannot be removed."""
    try:
        staged.leases.close()
    except HostError as exc:
        logger.warning("files of version %d could not be removed: %s", staged.manifest.version, exc)


def _release_result(future: Future[Staged]) -> None:
    if not future.cancelled() and future.exception() is None:
        _release(future.result())


def use_device(device: torch.device) -> None:
    """A new thread begins on the first device, whatever its process uses."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def _wait_for(device: torch.device) -> None:
    """Let copies end, or raise what went wrong in them, while it can still be undone."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
