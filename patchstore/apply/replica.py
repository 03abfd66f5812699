"""Keep named tensors at a version of a store, whole or not at all.

An update has two halves. Staging plans, fetches, checks and decodes, and compares the state digest
that the tensors would have with the manifest's: all of it without writing to them. Applying
writes, and hands back what undoes it.
"""

import logging
import os
import time
from collections.abc import MutableMapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from patchstore.apply.staged import Staged, Undo, writing_to
from patchstore.errors import (
    SchemaMismatch,
    StateMismatch,
    StoreReplaced,
    UsageError,
    VersionNotFound,
)
from patchstore.format import history, planning
from patchstore.format.records import Manifest
from patchstore.read.anchors import stream_anchor
from patchstore.read.deltas import Wanted, open_deltas
from patchstore.read.host_cache import HostCache
from patchstore.stores import Store, opened
from patchstore.support import host
from patchstore.support.arguments import version_number
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TensorPatch, batches, bits, spec_of

logger = logging.getLogger(__name__)


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

        Raises:
            VersionNotFound: the store holds no run, or not the version `held`.
            SchemaMismatch: the tensors are not those of the run.
            UsageError: `tensors` is no dict of tensors by name, or `held` is no version.
            StateMismatch: they are not what version `held` has.
            StoreReplaced: version `held` is of another run than the store.
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
        with ExitStack() as closing:
            self.store = closing.enter_context(opened(store))
            self._open(tensors, held, scratch, cache)
            self._closing = closing.pop_all()

    def _open(
        self,
        tensors: MutableMapping[str, torch.Tensor],
        held: int | None,
        scratch: Path | None,
        cache: HostCache | None,
    ) -> None:
        store = self.store
        header = history.read_header(store)
        if header is None:
            raise VersionNotFound(f"{store.url} holds no run; open a publisher on it first")
        self.header = header
        self.tensors = tensors
        self.manifest: Manifest | None = None
        """Of the held version; None while unknown."""
        self._scratch = scratch
        self._cache = cache
        self._specs = header.schema.by_name()
        self._sums: dict[str, state_digest.Sums] = {}
        if tensors:
            self._check_tensors()
        if held is not None:
            manifest = history.read_manifest(store, held)
            self._check_run(manifest)
            found = state_digest.of_named({name: tensors[name] for name in self._specs if name in tensors})
            if len(found) != len(self._specs):
                raise StateMismatch(f"no tensors were given, so they cannot be at version {held}")
            state_digest.check_state(store, header.schema, found, manifest)
            self.manifest, self._sums = manifest, found

    def close(self) -> None:
        """Close the store if this opened it, which it did where it was given a URL. The tensors stay."""
        self._closing.close()

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
        """Return the newest version in the store, or None before the first.

        Raises:
            StoreReplaced: as `stage`, or the versions end before the held one.
        """
        newest = self._newest()
        return None if newest is None else newest.version

    def _newest(self) -> Manifest | None:
        newest = history.head(self.store, hint=self.held)
        if newest is None:
            self._check_header()
        else:
            self._check_run(newest)
        if self.manifest is not None:
            if newest is None or newest.version < self.manifest.version:
                there = "has no version" if newest is None else f"ends with version {newest.version}"
                raise self._replaced(f"{there}, but version {self.held} of the same run is held")
            if newest.version == self.manifest.version:
                self._check_held(newest)
        return newest

    def update(self, version: int | None = None) -> Manifest:
        """Stage and apply a version; None for the head. Raises as those two do.

        Tensors that turn out not to be the held version's are brought to the version from an anchor.

        Raises:
            VersionNotFound: no such version, or none at all yet.
            StoreReplaced: as `stage`, or, where the head is wanted, the versions end before the held one.
        """
        if version is not None:
            version = version_number(version)
        if version is None:
            newest = self._newest()
            if newest is None:
                raise VersionNotFound(f"{self.store.url} has no version yet")
            version = newest.version
        elif version == self.held:
            # Also where there is nothing to do, what is held must be what the store means by that number.
            self._check_held(self._read_held())
        if version == self.held and self.manifest is not None:
            return self.manifest
        self.apply(self._staged_from_anywhere(version))
        assert self.manifest is not None
        return self.manifest

    def _read_held(self) -> Manifest:
        assert self.held is not None
        try:
            return history.read_manifest(self.store, self.held)
        except VersionNotFound as exc:
            self._check_header()
            raise self._replaced(f"no longer has version {self.held}, which is held") from exc

    def _check_run(self, found: Manifest) -> None:
        if found.run_id != self.header.run_id:
            raise self._replaced(
                f"has version {found.version} of run {found.run_id}, but run {self.header.run_id} was opened"
            )

    def _check_header(self) -> None:
        header = history.read_header(self.store)
        if header is None or header.run_id != self.header.run_id:
            there = "no run" if header is None else f"run {header.run_id}"
            raise self._replaced(f"has {there}, but run {self.header.run_id} was opened")

    def _check_held(self, found: Manifest) -> None:
        """Check that the store's version of the held one's number is the held one."""
        self._check_run(found)
        if found != self.manifest:
            raise self._replaced(f"has another version {self.held} than the one that is held")

    def _replaced(self, what: str) -> StoreReplaced:
        return StoreReplaced(
            f"{self.store.url} {what}. Its objects were removed or replaced. "
            "The tensors were left as they are; open a new Replica to follow what is there now"
        )

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

    # Tensors that an anchor makes here are written to later, which inference mode would forbid outside of it.
    @torch.inference_mode(mode=False)
    @host.asked("staging an update")
    def stage(self, version: int) -> Staged:
        """Make an update ready and verify it. The tensors are read, not written.

        Memory: an anchor is held in full, deltas as their changed elements.

        Raises:
            VersionNotFound, WrongParent: the store has no way to that version.
            CorruptObject, StateMismatch: what it has is wrong; nothing may be applied.
            StoreReplaced: it has another run than when it was opened, or another version of the held number.
            SchemaMismatch: one of the followed tensors was taken out of the dict.
            HostError: this host is short of memory, disk or open files.
        """
        version = version_number(version)
        if self.manifest is not None and not self._specs.keys() <= self.tensors.keys():
            missing = min(self._specs.keys() - self.tensors.keys())
            raise SchemaMismatch(
                f"tensor {missing!r} was taken out of the followed tensors; put it back, or open a new "
                "Replica"
            )
        try:
            manifests = history.read_lineage(self.store, version, self.held)
        except VersionNotFound:
            self._check_header()
            raise
        self._check_run(manifests[version])
        if self.held in manifests:
            self._check_held(manifests[self.held])
        route = planning.plan(manifests, self.held, version)
        began = time.monotonic()
        patches: dict[str, TensorPatch] = {}
        full: dict[str, torch.Tensor] = {}
        sums = dict(self._sums)
        with open_deltas(self.store, route.deltas, self._specs, self._scratch, self._cache) as deltas:
            fetched = time.monotonic()
            if route.anchor is not None:
                sums = {}
                for _, specs, tensors in stream_anchor(self.store, route.anchor, self._specs, self._cache):
                    for batch in batches(specs, tensors):
                        deltas.apply(batch)
                        named = {spec.name: tensor for spec, tensor in batch}
                        full |= named
                        sums |= state_digest.of_named(named)
            else:
                names = sorted(deltas.names)
                parents = state_digest.of_named(
                    {name: self.tensors[name] for name in names if deltas.is_relative(name)}
                )
                for name, found in parents.items():
                    if found != sums[name]:
                        raise StateMismatch(
                            f"{name!r} is no longer that of version {self.held}: something else wrote to it"
                        )
                wanted = (Wanted(self._specs[name], self.tensors[name]) for name in names)
                for _, patch in deltas.merged_each(wanted):
                    # The mapped files go away with this block; what is staged must not.
                    patches[patch.name] = replace(
                        patch, indices=patch.indices.clone(), values=patch.values.clone()
                    )
            decoded = time.monotonic()
        before = state_digest.of_patches(
            replace(patch, values=bits(self.tensors[name])[patch.indices].cpu().view(patch.values.dtype))
            for name, patch in patches.items()
        )
        for name, after in state_digest.of_patches(patches.values()).items():
            sums[name] = sums[name].minus(before[name]).plus(after)
        state_digest.check_state(self.store, self.header.schema, sums, route.target)
        timings = {
            "fetch": fetched - began,
            "decode": decoded - fetched,
            "verify": time.monotonic() - decoded,
        }
        return Staged(plan=route, patches=patches, full=full, sums=sums, timings=timings)

    def apply(self, staged: Staged) -> Undo:
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
            with writing_to(self.tensors):
                self._write(staged, undo)
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

    def _write(self, staged: Staged, undo: Undo) -> None:
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
