"""Keep named tensors at a version of a store, whole or not at all.

An update has two halves. Staging plans, fetches, checks and decodes, and compares the state digest
that the tensors would have with the manifest's: all of it without writing to them. Committing
writes, and hands back what undoes it.
"""

import logging
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from patchstore import digest, fetch, lineage, log
from patchstore.errors import CorruptObject, SchemaMismatch, StateMismatch, UsageError, VersionNotFound
from patchstore.model import Manifest, Plan
from patchstore.node_cache import NodeCache
from patchstore.stores.base import Store
from patchstore.tensors import TensorPatch, batches, bits, spec_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """An update that is proved and ready to be written."""

    plan: Plan
    patches: dict[str, TensorPatch]
    """Per tensor of which some elements change."""
    full: dict[str, torch.Tensor]
    """Per tensor that an anchor replaces as a whole."""
    sums: dict[str, digest.Sums]
    """Digest sums of every tensor of the target."""
    timings: dict[str, float]
    """Seconds spent on `fetch`, `decode` and `verify`."""

    @property
    def manifest(self) -> Manifest:
        return self.plan.target

    @property
    def names(self) -> list[str]:
        """Tensors that the update writes."""
        return [*self.patches, *self.full]


class Undo:
    """What a commit replaced; putting it back needs nothing but memory."""

    def __init__(self, follower: "Follower") -> None:
        self._follower = follower
        self._before = (follower.manifest, follower._sums)
        self._after = follower.manifest
        """The version that the commit brought; until it is done, the one before."""
        self._old: list[tuple[str, TensorPatch | torch.Tensor | None]] = []

    def rollback(self) -> None:
        """Restore the tensors and the held version to what they were before the commit.

        Raises:
            UsageError: another commit came after this one; nothing was changed.
        """
        if self._follower.manifest is not self._after:
            raise UsageError(
                f"the tensors are at version {self._follower.held} by now: what this replaced cannot return"
            )
        tensors = self._follower.tensors
        for name, old in reversed(self._old):
            if old is None:
                del tensors[name]
            elif isinstance(old, TensorPatch):
                bits(tensors[name])[old.indices] = bits(old.values)
            else:
                bits(tensors[name]).copy_(bits(old))
        self._old.clear()
        self._follower.manifest, self._follower._sums = self._before
        self._after = self._follower.manifest


class Follower:
    """A holder of one version of a run's tensors."""

    def __init__(
        self,
        store: Store,
        tensors: MutableMapping[str, torch.Tensor],
        *,
        held: int | None = None,
        scratch: Path | None = None,
        cache: NodeCache | None = None,
    ) -> None:
        """Open a store for following.

        Args:
            tensors: by checkpoint name, contiguous; written in place. Empty to have the first
                anchor fill it with tensors on the CPU.
            held: the version whose weights `tensors` has now, which is proved by digest; None when
                unknown, and the first update starts from an anchor.
            scratch: folder for temporary files of a delta's size; None for the system's.
            cache: what to fetch through instead, if given, so that followers of a host share their downloads.

        Raises:
            VersionNotFound: the store holds no run, or not the version `held`.
            SchemaMismatch: the tensors are not those of the run.
            StateMismatch: they are not what version `held` has.
        """
        header = log.read_header(store)
        if header is None:
            raise VersionNotFound(f"{store.url} holds no run; open a publisher on it first")
        self.store = store
        self.header = header
        self.tensors = tensors
        self.manifest: Manifest | None = None
        """Of the held version; None while unknown."""
        self._scratch = scratch
        self._cache = cache
        self._specs = header.schema.by_name()
        self._sums: dict[str, digest.Sums] = {}
        if tensors:
            self._check_tensors()
        if held is not None:
            manifest = log.read_manifest(store, held)
            found = digest.of_named({name: tensors[name] for name in self._specs if name in tensors})
            if len(found) != len(self._specs):
                raise StateMismatch(f"no tensors were given, so they cannot be at version {held}")
            digest.check_state(header.schema, found, manifest)
            self.manifest, self._sums = manifest, found

    def _check_tensors(self) -> None:
        found = {name: spec_of(name, tensor) for name, tensor in self.tensors.items()}
        for alias, name in self.header.schema.tied.items():
            # The further name of a tied tensor is no tensor of its own, as long as it really is the same.
            if alias in found and self.tensors[alias].data_ptr() == self.tensors[name].data_ptr():
                del found[alias]
        for name in sorted(found.keys() | self._specs.keys()):
            if found.get(name) != self._specs.get(name):
                raise SchemaMismatch(
                    f"tensor {name!r} is {found.get(name)}, but the run has {self._specs.get(name)}"
                )
            if not self.tensors[name].is_contiguous():
                raise SchemaMismatch(f"tensor {name!r} is not contiguous, so it cannot be written in place")
        places = sorted(
            (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
            for name, tensor in self.tensors.items()
            if name in found and tensor.numel()
        )
        for (device, _, end, name), (other_device, start, _, other) in pairwise(places):
            if device == other_device and start < end:
                raise SchemaMismatch(f"tensors {name!r} and {other!r} share memory, but are two in this run")

    @property
    def held(self) -> int | None:
        """The version that the tensors have, or None while that is unknown."""
        return None if self.manifest is None else self.manifest.version

    def head(self) -> int | None:
        """Return the newest version in the store, or None before the first."""
        newest = log.head(self.store, hint=self.held)
        return None if newest is None else newest.version

    def update(self, version: int | None = None) -> Manifest:
        """Stage and commit a version; None for the head. Raises as those two do.

        Tensors that turn out not to be the held version's are brought to the goal from an anchor.

        Raises:
            VersionNotFound: no such version, or none at all yet.
        """
        goal = self.head() if version is None else version
        if goal is None:
            raise VersionNotFound(f"{self.store.url} has no version yet")
        if goal == self.held and self.manifest is not None:
            return self.manifest
        self.commit(self._staged_from_anywhere(goal))
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
        before = self.manifest, self._sums
        self.manifest, self._sums = None, {}
        try:
            return self.stage(version)
        except BaseException:
            self.manifest, self._sums = before
            raise

    def stage(self, version: int) -> Staged:
        """Make an update ready and prove it. The tensors are read, not written.

        Memory: an anchor is held in full, deltas as their changed elements.

        Raises:
            VersionNotFound, LineageError: the store has no way to that version.
            CorruptObject, StateMismatch: what it has is wrong; nothing may be applied.
        """
        route = lineage.plan(log.read_lineage(self.store, version, self.held), self.held, version)
        if route.target.run_id != self.header.run_id:
            raise CorruptObject(
                f"version {version} is of run {route.target.run_id}, but this store was opened as run "
                f"{self.header.run_id}"
            )
        began = time.monotonic()
        patches: dict[str, TensorPatch] = {}
        full: dict[str, torch.Tensor] = {}
        sums = dict(self._sums)
        with fetch.deltas(self.store, route.deltas, self._specs, self._scratch, self._cache) as deltas:
            fetched = time.monotonic()
            if route.anchor is not None:
                sums = {}
                for _, specs, tensors in fetch.anchor(self.store, route.anchor, self._specs, self._cache):
                    for batch in batches(specs, tensors):
                        deltas.apply(batch)
                        named = {spec.name: tensor for spec, tensor in batch}
                        full |= named
                        sums |= digest.of_named(named)
            else:
                names = sorted(deltas.names)
                parents = digest.of_named(
                    {name: self.tensors[name] for name in names if deltas.is_relative(name)}
                )
                for name, found in parents.items():
                    if found != sums[name]:
                        raise StateMismatch(
                            f"{name!r} is no longer that of version {self.held}: something else wrote to it"
                        )
                wanted = (fetch.Wanted(self._specs[name], self.tensors[name]) for name in names)
                for _, patch in deltas.merged_each(wanted):
                    # The mapped files go away with this block; what is staged must not.
                    patches[patch.name] = replace(
                        patch, indices=patch.indices.clone(), values=patch.values.clone()
                    )
            decoded = time.monotonic()
        before = digest.of_patches(
            replace(patch, values=bits(self.tensors[name])[patch.indices].cpu().view(patch.values.dtype))
            for name, patch in patches.items()
        )
        for name, after in digest.of_patches(patches.values()).items():
            sums[name] = sums[name].minus(before[name]).plus(after)
        digest.check_state(self.header.schema, sums, route.target)
        timings = {
            "fetch": fetched - began,
            "decode": decoded - fetched,
            "verify": time.monotonic() - decoded,
        }
        return Staged(plan=route, patches=patches, full=full, sums=sums, timings=timings)

    def commit(self, staged: Staged) -> Undo:
        """Write a staged update into the tensors; afterwards they hold its version.

        Memory: the replaced values are kept in what is returned.

        Raises:
            UsageError: the tensors moved to another version since it was staged.
            Anything that writing raises, after all that was written has been put back.
        """
        if staged.plan.held != self.held:
            raise UsageError(
                f"this update was staged on version {staged.plan.held}, but {self.held} is held now: "
                "stage it again"
            )
        undo = Undo(self)
        try:
            for name, patch in staged.patches.items():
                live = bits(self.tensors[name])
                indices, new = patch.indices.to(live.device), bits(patch.values).to(live.device)
                old = live[indices].view(patch.values.dtype)
                undo._old.append((name, TensorPatch(name=name, indices=indices, values=old)))
                live[indices] = new
            for name, tensor in staged.full.items():
                if name in self.tensors:
                    undo._old.append((name, self.tensors[name].clone()))
                    bits(self.tensors[name]).copy_(bits(tensor))
                else:
                    undo._old.append((name, None))
                    self.tensors[name] = tensor
            logger.info(
                "applied version %d: %d tensors, %.1f MiB, fetch %.2f s, decode %.2f s, verify %.2f s",
                staged.manifest.version,
                len(staged.names),
                staged.plan.num_bytes / 2**20,
                *(staged.timings[part] for part in ("fetch", "decode", "verify")),
            )
            self.manifest, self._sums, undo._after = staged.manifest, staged.sums, staged.manifest
        except BaseException:
            undo.rollback()
            raise
        return undo
