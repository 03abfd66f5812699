"""Keep named tensors at a version of a store, whole or not at all.

An update has two halves. Staging plans, fetches, checks and decodes, and compares the state digest that the
tensors would have with the manifest's: all of it without writing to them. Applying writes, and returns what
undoes it.
"""

import logging
import os
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchstore.apply.update import ReadGate, Update
from patchstore.bucket import history, kept, notes
from patchstore.bucket.records import Manifest, Plan
from patchstore.bucket.state_sums import SumsArray, as_array
from patchstore.errors import HalfApplied, SchemaMismatch, StateMismatch, UsageError
from patchstore.kernels import are_usable
from patchstore.read.anchors import stream_anchor
from patchstore.read.deltas import open_deltas
from patchstore.read.host_cache import HostCache
from patchstore.read.load import check_apart, check_tensor, check_tensors, writing_to
from patchstore.read.rebuild import patched
from patchstore.read.run import LEFT, Run
from patchstore.signing.required import Keys, RequiredKeys
from patchstore.stores import Store, opened
from patchstore.support import host
from patchstore.support.arguments import version_number
from patchstore.tensors import state_digest
from patchstore.tensors.bits import bits
from patchstore.tensors.columns import ByAddress, Group, Located, Scattered

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """An update that is verified and ready to be written."""

    plan: Plan
    changes: Sequence[Group]
    """What changes of tensors, by place in the schema; a tensor is in one of them."""
    full: dict[str, torch.Tensor]
    """Per tensor that an anchor replaces as a whole."""
    sums: SumsArray
    """Digest sums of every tensor of the target."""
    timings: dict[str, float]
    """Seconds spent on `fetch`, `decode` and `verify`."""

    @property
    def manifest(self) -> Manifest:
        return self.plan.target

    @property
    def num_tensors(self) -> int:
        """Tensors that change."""
        return len(self.full) + sum(len(group.numbers) for group in self.changes)


@dataclass(slots=True)
class Replaced:
    """What an update replaced, in the order in which it was written."""

    sums: SumsArray | None
    """Digest sums of every tensor from before the update; None where those were not known."""
    old: list[Group | tuple[str, torch.Tensor | None]] = field(default_factory=list)
    """The elements that were replaced, or a tensor as it was; None if there was no such tensor."""


class Undo:
    """What an update replaced; putting it back needs nothing but memory."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self._restore = restore

    def rollback(self) -> None:
        """Restore the tensors and the held version to what they were before the update.

        Raises:
            UsageError: another update came after this one; nothing was changed.
            Exception: anything else that writing raises. No version is held then.
        """
        self._restore()


def _by_address(device: torch.device) -> ByAddress | None:
    """Return what reads and writes many tensors by one launch; None where there is no Triton."""
    if not are_usable(device):
        return None
    from patchstore.kernels import scattered

    return scattered


class TensorWeights:
    """Tensors by checkpoint name, on any device, written in place; many by one launch where Triton runs."""

    def __init__(
        self,
        run: Run,
        tensors: MutableMapping[str, torch.Tensor],
        *,
        scratch: Path | None,
        cache: HostCache | None,
    ) -> None:
        """Take over tensors as they are.

        Args:
            tensors: those of the schema, or none; the first anchor then makes them.
            scratch, cache: as of `Replica`.
        """
        self.tensors = tensors
        self.replaced = Replaced(None)
        """What the last update replaced."""
        self._store, self._schema, self._specs = run.store, run.schema, run.schema.by_name()
        self._scratch, self._cache = scratch, cache
        names = [spec.name for spec in run.schema.tensors]
        self._live = Scattered(tensors, names, self._check, _by_address)
        self._found: Sequence[Located] = ()
        """What the groups that are to be written change, from `check` to `write`."""
        self._sums: SumsArray | None = None
        """Digest sums of every tensor of the held version; None while that is unknown."""
        if tensors:
            check_tensors(run.schema, tensors)
        self._apart: dict[str, tuple[torch.device, int]] | None = self._places()
        """Where tensors are that share no memory; None once one is elsewhere."""

    def _places(self) -> dict[str, tuple[torch.device, int]]:
        named = ((name, self.tensors[name]) for name in self._specs.keys() & self.tensors.keys())
        return {name: (tensor.device, tensor.data_ptr()) for name, tensor in named}

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        """Check a tensor that no update has looked up: it may be in the place of another one."""
        check_tensor(name, tensor, self._specs[name])
        if self._apart is not None and self._apart.get(name) != (tensor.device, tensor.data_ptr()):
            self._apart = None

    def adopt(self, manifest: Manifest) -> None:
        """Take it that the tensors have a version, after comparing their digest with it."""
        found = state_digest.of_named(
            {name: self.tensors[name] for name in self._specs.keys() & self.tensors}
        )
        if len(found) != len(self._specs):
            raise StateMismatch(f"no tensors were given, so they cannot be at version {manifest.version}")
        self._sums = as_array(self._schema, found)
        state_digest.check_state(self._store, self._schema, self._sums, manifest)

    def stage(self, plan: Plan, reading: ReadGate) -> Staged:
        """Fetch and decode a plan, and add up the digest sums that the tensors would have.

        Memory: an anchor is held in full, deltas as their changed elements.
        """
        if plan.held is not None and (missing := self._specs.keys() - self.tensors.keys()):
            raise SchemaMismatch(
                f"tensor {min(missing)!r} was taken out of the followed tensors; put it back, or open a new "
                "Replica"
            )
        began = time.monotonic()
        sums = np.zeros((len(self._schema.tensors), 2), dtype=np.uint64)
        with open_deltas(self._store, plan.deltas, self._schema, self._scratch, self._cache) as deltas:
            fetched = time.monotonic()
            changes: list[Group] = []
            full: dict[str, torch.Tensor] = {}
            if plan.anchor is not None:
                given = stream_anchor(self._store, plan.anchor, self._schema.by_name(), self._cache)
                files = patched(given, self._schema, deltas, sums)
                for _, specs, tensors in files:
                    full |= zip((spec.name for spec in specs), tensors, strict=True)
            else:
                with reading():
                    held = self._live.located(deltas.numbers)
                    self._check_parents(held.of(deltas.relative), plan)
                    # The mapped files are closed with this block; what is staged must outlive it.
                    changes = [
                        Group(*(each if each.flags.owndata else each.copy() for each in group.stated))
                        for group in deltas.merged_groups(deltas.numbers, held.of)
                    ]
            decoded = time.monotonic()
        if plan.anchor is None:
            assert self._sums is not None
            sums = self._sums.copy()
            for group in changes:
                before = group._replace(values=held.at(group))
                sums[group.numbers] += state_digest.of_group(group) - state_digest.of_group(before)
        timings = {
            "fetch": fetched - began,
            "decode": decoded - fetched,
            "verify": time.monotonic() - decoded,
        }
        return Staged(plan=plan, changes=changes, full=full, sums=sums, timings=timings)

    def _check_parents(self, held: Located, plan: Plan) -> None:
        """Check the tensors that deltas are decoded against, by place in the schema."""
        assert self._sums is not None
        found = state_digest.of_each(held.tensors)
        for number in held.numbers[(found != self._sums[held.numbers]).any(axis=1)][:1]:
            raise StateMismatch(
                f"{self._schema.tensors[number].name!r} is no longer that of version {plan.held}: something "
                "else wrote to it"
            )

    def verify(self, staged: Staged, reports: Sequence[Any] = ()) -> None:
        """Compare the state digest that the tensors would have with the manifest's."""
        began = time.monotonic()
        state_digest.check_state(self._store, self._schema, staged.sums, staged.manifest)
        staged.timings["verify"] += time.monotonic() - began

    def check(self, staged: Staged) -> None:
        """Look up what is to be written to: tensors that are others than before are checked. The rest was
        checked by `stage` and `verify`.
        """
        full = [self._schema.places[name] for name in staged.full.keys() & self.tensors.keys()]
        self._live.located(np.array(full, dtype=np.int64))
        self._found = [self._live.located(group.numbers) for group in staged.changes]
        if self._apart is None:
            check_apart({name: self.tensors[name] for name in self._specs.keys() & self.tensors.keys()})
            self._apart = self._places()
        # Not by `write`: an interrupt before its first line would have the update before undone.
        self.replaced = Replaced(self._sums)

    def write(self, staged: Staged) -> None:
        """Write patches and full tensors; `replaced` has what was there, also if this raises.

        Memory: the replaced values.
        """
        found, self._found = self._found, []
        with writing_to(self.tensors):
            for group, live in zip(staged.changes, found, strict=True):
                self.replaced.old.append(group._replace(values=live.at(group)))
                live.write(group)
            for name, tensor in staged.full.items():
                if name in self.tensors:
                    self.replaced.old.append((name, self.tensors[name].clone()))
                    bits(self.tensors[name]).copy_(bits(tensor))
                else:
                    self.replaced.old.append((name, None))
                    self.tensors[name] = tensor

    def undo(self, staged: Staged) -> None:
        """Put back what `write` replaced."""
        self.restore(self.replaced)

    def restore(self, replaced: Replaced) -> None:
        """Put back what an update replaced, the last one that was written first."""
        with writing_to(self.tensors):
            for each in reversed(replaced.old):
                if isinstance(each, Group):
                    self._live.located(each.numbers).write(each)
                    continue
                name, old = each
                if old is None:
                    # An interrupt may have come before it was put there.
                    self.tensors.pop(name, None)
                else:
                    (tensor,) = self._live.located(np.array([self._schema.places[name]])).tensors
                    bits(tensor).copy_(bits(old))
        replaced.old.clear()
        self._sums = replaced.sums

    def accept(self, staged: Staged) -> None:
        self._sums = staged.sums

    def release(self, staged: Staged) -> None:
        """What is staged is in memory of its own."""


class Replica:
    """A holder of one version of a run's tensors."""

    @torch.inference_mode(mode=False)
    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        tensors: MutableMapping[str, torch.Tensor],
        *,
        held: int | None = None,
        scratch: Path | None = None,
        cache: HostCache | None = None,
        required_keys: RequiredKeys | Keys | Sequence[Keys] | None = None,
    ) -> None:
        """Open a store to follow.

        Args:
            store: an open store, or the URL or path of one, which `close` closes.
            tensors: by checkpoint name, contiguous; written in place. Empty to have the first
                anchor fill it with tensors on the CPU.
            held: the version whose weights `tensors` has now, which is verified by digest; None when
                unknown, and the first update starts from an anchor.
            scratch: folder for temporary files of a delta's size; None for the system's.
            cache: what to fetch through instead, if given, so that replicas of a host share their downloads.
            required_keys: PEM files with public keys. Only versions that one of them has signed are applied.

        Raises:
            VersionNotFound: the store holds no run, or not the version `held`.
            SchemaMismatch: the tensors are not those of the run.
            UsageError: `tensors` is no dict of tensors by name, or `held` is no version.
            StateMismatch: they are not what version `held` has.
            StoreReplaced: version `held` is of another run than the store.
            Unsigned, WrongSignature: no required key has signed version `held`.
        """
        if not isinstance(tensors, MutableMapping):
            raise UsageError(
                "tensors must be a dict of names to tensors, such as model.state_dict(), "
                f"not {type(tensors).__name__}"
            )
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):  # type: ignore[redundant-expr, unused-ignore]
                raise UsageError(
                    f"tensors must be a dict of names to tensors, but {name!r:.100} is a "
                    f"{type(tensor).__name__} in it"
                )
        held = None if held is None else version_number(held)
        required = RequiredKeys.of(required_keys)
        with ExitStack() as closing:
            self.store = closing.enter_context(opened(store))
            self.header = history.run_header(self.store)
            run = Run(self.store, self.header, required, then=LEFT.format("open a new Replica"))
            self._weights = TensorWeights(run, tensors, scratch=scratch, cache=cache)
            self._update = Update(run, self._weights)
            if held is not None:
                manifest = run.manifest(held)
                self._weights.adopt(manifest)
                self._update.held = manifest
            self._closing = closing.pop_all()

    @property
    def tensors(self) -> MutableMapping[str, torch.Tensor]:
        """What was given, as it is now."""
        return self._weights.tensors

    @property
    def manifest(self) -> Manifest | None:
        """Of the held version; None while that is unknown."""
        return self._update.held

    @property
    def held(self) -> int | None:
        """The version that the tensors have, or None while that is unknown."""
        return self._update.version

    def close(self) -> None:
        """Close the store if this opened it, which it did where it was given a URL. The tensors stay."""
        self._closing.close()

    def head(self) -> int | None:
        """Return the newest version in the store, or None before the first.

        Raises:
            StoreReplaced: as `stage`, or the versions end before the held one.
        """
        newest = self._update.head()
        return None if newest is None else newest.version

    def update(self, version: int | str | None = None) -> Manifest:
        """Stage and apply a version, named by its number or by a tag; None for the head.

        Raises as `stage` and `apply` do.

        Tensors that turn out not to be the held version's are brought to the version from an anchor.

        Raises:
            VersionNotFound: no such version or tag, or none at all yet.
            VersionRetired: the version is retired. One that is newer than the held version is only refused if
                its payloads are deleted, so that an update costs no further request.
            StoreReplaced: as `stage`, or, where the head is wanted, the versions end before the held one.
        """
        if version is not None:
            version = notes.version_of(self.store, version)
            if self.held is None or version < self.held:
                kept.check(self.store, version)
        if version is None:
            newest = self._update.head()
            if newest is None:
                raise history.no_version(self.store)
            version = newest.version
        elif version == self.held:
            # Also where there is nothing to do, what is held must be what the store means by that number.
            self._update.check_held()
        if version != self.held:
            self.apply(self._staged_from_anywhere(version))
        assert self.manifest is not None
        return self.manifest

    def _staged_from_anywhere(self, version: int) -> Staged:
        """`stage`; where the held tensors turn out to be no version's, once more from an anchor."""
        try:
            return self.stage(version)
        except StateMismatch as exc:
            if self.manifest is None:
                raise
            logger.warning(
                "version %d does not build on what is held, so it starts from an anchor: %s", version, exc
            )
        before, self._update.held = self._update.held, None
        try:
            return self.stage(version)
        except BaseException:
            self._update.held = before
            raise

    # Tensors that an anchor makes here are written to later, which inference mode would forbid outside of it.
    @torch.inference_mode(mode=False)
    @host.asked("staging an update")
    def stage(self, version: int) -> Staged:
        """Make an update ready and verify it. The tensors are read, not written.

        Memory: an anchor is held in full, deltas as their changed elements.

        Raises:
            VersionNotFound, WrongParent: the store has no way to that version.
            VersionRetired: the version is retired, and its payloads are deleted.
            CorruptObject, StateMismatch: what it has is wrong; nothing may be applied.
            Unsigned, WrongSignature: keys are required, and none has signed the version.
            StoreReplaced: it has another run than when it was opened, or another version of the held number.
            SchemaMismatch: one of the followed tensors was taken out of the dict, or replaced by one that is
                not as the run's, or that cannot be written in place.
            HostError: this host is short of memory, disk or open files.
        """
        return self._update.prepare(version_number(version), verify=self._weights.verify)

    def apply(self, staged: Staged) -> Undo:
        """Write a staged update into the tensors; afterwards they hold its version.

        Memory: the replaced values are kept in what is returned.

        Raises:
            UsageError: the tensors moved to another version since it was staged.
            SchemaMismatch: as `stage`, of tensors that were replaced since then.
            HalfApplied: writing failed, and so did putting back what was written. No version is held.
            Exception: anything else that writing raises, after all that was written has been put back.
        """
        update, weights, before = self._update, self._weights, self._update.held
        update.put(staged)
        try:
            update.apply()
            update.accept()
        except BaseException:
            try:
                update.roll_back()
            except HalfApplied:
                update.mark_half_applied()
                raise
            raise
        # What it replaced is kept for as long as the caller may want it back.
        after, replaced = update.held, weights.replaced
        weights.replaced = Replaced(None)
        logger.info(
            "applied version %d: %d tensors, %.1f MiB, fetch %.2f s, decode %.2f s, verify %.2f s",
            staged.manifest.version,
            staged.num_tensors,
            staged.plan.num_bytes / 2**20,
            *(staged.timings[part] for part in ("fetch", "decode", "verify")),
        )

        def restore() -> None:
            if update.held is not after:
                raise UsageError(
                    f"the tensors are at version {self.held} by now: what this replaced cannot return"
                )
            try:
                weights.restore(replaced)
                update.held = before
            except BaseException:
                # Some of it may be back.
                update.mark_half_applied()
                raise

        return Undo(restore)
