"""A dict of tensors, as weights that `patchstore.apply.update` brings from one version to another."""

import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from patchstore.apply.staged import Replaced, Staged
from patchstore.apply.update import Reading
from patchstore.errors import SchemaMismatch, StateMismatch
from patchstore.format.records import Manifest, Plan, Schema
from patchstore.read.anchors import stream_anchor
from patchstore.read.deltas import Wanted, open_deltas
from patchstore.read.host_cache import HostCache
from patchstore.stores.base import Store
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TensorPatch, batches, bits, spec_of
from patchstore.tensors.state_digest import Sums


class TensorWeights:
    """Tensors by checkpoint name, on any device, written in place."""

    def __init__(
        self,
        store: Store,
        schema: Schema,
        tensors: MutableMapping[str, torch.Tensor],
        *,
        scratch: Path | None,
        cache: HostCache | None,
    ) -> None:
        """Take over tensors as they are.

        Args:
            tensors: those of the schema, or none; the first anchor then makes them.
            scratch, cache: as of `Replica`.

        Raises:
            SchemaMismatch: the tensors are not those of the schema, or cannot be written in place.
        """
        self.tensors = tensors
        self.replaced = Replaced({})
        """What the last update replaced."""
        self._store, self._schema, self._specs = store, schema, schema.by_name()
        self._scratch, self._cache = scratch, cache
        self._sums: dict[str, Sums] = {}
        """Digest sums of every tensor of the held version; empty while that is unknown."""
        if tensors:
            self._check_tensors()

    def adopt(self, manifest: Manifest) -> None:
        """Take it that the tensors have a version, after comparing their digest with it.

        Raises:
            StateMismatch: they have another state, or there are no tensors.
        """
        found = state_digest.of_named(
            {name: self.tensors[name] for name in self._specs.keys() & self.tensors}
        )
        if len(found) != len(self._specs):
            raise StateMismatch(f"no tensors were given, so they cannot be at version {manifest.version}")
        state_digest.check_state(self._store, self._schema, found, manifest)
        self._sums = found

    def stage(self, plan: Plan, reading: Reading) -> Staged:
        """Fetch and decode a plan, and add up the digest sums that the tensors would have.

        Memory: an anchor is held in full, deltas as their changed elements.

        Raises:
            CorruptObject: what the store holds is wrong.
            SchemaMismatch: one of the tensors was taken out of the dict.
            StateMismatch: a tensor that the update changes no longer has the bits of the held version.
        """
        if plan.held is not None and (missing := self._specs.keys() - self.tensors.keys()):
            raise SchemaMismatch(
                f"tensor {min(missing)!r} was taken out of the followed tensors; put it back, or open a new "
                "Replica"
            )
        began = time.monotonic()
        with open_deltas(self._store, plan.deltas, self._specs, self._scratch, self._cache) as deltas:
            fetched = time.monotonic()
            patches: dict[str, TensorPatch] = {}
            full: dict[str, torch.Tensor] = {}
            sums: dict[str, Sums] = {}
            if plan.anchor is not None:
                for _, specs, tensors in stream_anchor(self._store, plan.anchor, self._specs, self._cache):
                    for batch in batches(specs, tensors):
                        deltas.apply(batch)
                        named = {spec.name: tensor for spec, tensor in batch}
                        full |= named
                        sums |= state_digest.of_named(named)
            else:
                with reading:
                    names = sorted(deltas.names)
                    self._check_parents([name for name in names if deltas.is_relative(name)], plan)
                    wanted = (Wanted(self._specs[name], self.tensors[name]) for name in names)
                    for _, patch in deltas.merged_each(wanted):
                        # The mapped files are closed with this block; what is staged must outlive it.
                        patches[patch.name] = replace(
                            patch, indices=patch.indices.clone(), values=patch.values.clone()
                        )
            decoded = time.monotonic()
        if plan.anchor is None:
            sums = self._grown(patches)
        timings = {
            "fetch": fetched - began,
            "decode": decoded - fetched,
            "verify": time.monotonic() - decoded,
        }
        return Staged(plan=plan, patches=patches, full=full, sums=sums, timings=timings)

    def _check_parents(self, names: Sequence[str], plan: Plan) -> None:
        """Check the tensors that deltas are decoded against."""
        for name, found in state_digest.of_named({name: self.tensors[name] for name in names}).items():
            if found != self._sums[name]:
                raise StateMismatch(
                    f"{name!r} is no longer that of version {plan.held}: something else wrote to it"
                )

    def _grown(self, patches: Mapping[str, TensorPatch]) -> dict[str, Sums]:
        """Return the digest sums of all tensors with patches applied."""
        sums = dict(self._sums)
        before = state_digest.of_patches(
            replace(patch, values=bits(self.tensors[name])[patch.indices].cpu().view(patch.values.dtype))
            for name, patch in patches.items()
        )
        for name, after in state_digest.of_patches(patches.values()).items():
            sums[name] = sums[name].minus(before[name]).plus(after)
        return sums

    def verify(self, staged: Staged, told: Sequence[Any] = ()) -> None:
        """Compare the state digest that the tensors would have with the manifest's.

        Raises:
            StateMismatch: they differ; names tensors where the store says what their digest sums are.
        """
        began = time.monotonic()
        state_digest.check_state(self._store, self._schema, staged.sums, staged.manifest)
        staged.timings["verify"] += time.monotonic() - began

    def check(self, staged: Staged) -> None:
        """All that can be checked was checked by `stage` and `verify`."""

    def write(self, staged: Staged) -> None:
        """Write patches and full tensors; `replaced` has what was there, also if this raises.

        Memory: the replaced values.
        """
        self.replaced = Replaced(self._sums)
        with writing_to(self.tensors):
            for name, patch in staged.patches.items():
                live = bits(self.tensors[name])
                indices, new = patch.indices.to(live.device), bits(patch.values).to(live.device)
                old = live[indices].view(patch.values.dtype)
                self.replaced.old.append((name, TensorPatch(name=name, indices=indices, values=old)))
                live[indices] = new
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
            for name, old in reversed(replaced.old):
                if old is None:
                    del self.tensors[name]
                elif isinstance(old, TensorPatch):
                    bits(self.tensors[name])[old.indices] = bits(old.values)
                else:
                    bits(self.tensors[name]).copy_(bits(old))
        replaced.old.clear()
        self._sums = replaced.sums

    def accept(self, staged: Staged) -> None:
        self._sums = staged.sums

    def release(self, staged: Staged) -> None:
        """A staged update holds memory alone."""

    def _check_tensors(self) -> None:
        found = {name: spec_of(name, tensor) for name, tensor in self.tensors.items()}
        for alias, name in self._schema.tied.items():
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


def writing_to(tensors: Mapping[str, torch.Tensor]) -> torch.inference_mode:
    """Tensors that were made in inference mode can only be written to in it."""
    return torch.inference_mode(any(tensor.is_inference() for tensor in tensors.values()))
