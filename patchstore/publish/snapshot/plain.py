"""A snapshot that is compared in plain torch and numpy."""

import os
from collections.abc import Iterator, Mapping, Sequence

import torch

from patchstore.format.records import TensorSpec
from patchstore.publish.snapshot.memory import Place, allocating, in_file, served, views
from patchstore.tensors import diff, state_digest
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, bits
from patchstore.tensors.changes import Changes
from patchstore.tensors.state_digest import Sums


class PlainSnapshot:
    """A snapshot of tensors on any devices, compared one after the other; small ones on the CPU together."""

    def __init__(
        self, current: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec], place: Place
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        num_bytes = sum(spec.num_bytes for spec in specs)
        with allocating(place, num_bytes):
            if isinstance(place, os.PathLike):
                starts = [0]
                for spec in specs:
                    starts.append(starts[-1] + -(-spec.num_bytes // 8) * 8)
                self.tensors = views(in_file(place, starts[-1]), specs, starts[:-1])
            else:
                self.tensors = {
                    spec.name: torch.empty(
                        spec.shape,
                        dtype=TORCH_DTYPES[spec.dtype],
                        device=current[spec.name].device if place == "device" else "cpu",
                    )
                    for spec in specs
                }
        self.replace(current)

    def compare(self, current: Mapping[str, torch.Tensor]) -> Changes:
        patches = [
            (
                self._specs[name],
                TensorPatch(name=name, indices=at.cpu(), values=bits(tensor)[at].view(tensor.dtype).cpu()),
            )
            for (name, tensor, _), at in diff.changed_each(self._pairs(current))
        ]
        # Tensors were compared in groups, which are not in the schema's order.
        patches.sort(key=lambda each: each[0].name)
        return Changes(sum(len(patch.indices) for _, patch in patches), patches)

    def _pairs(self, current: Mapping[str, torch.Tensor]) -> Iterator[diff.Pair]:
        for name, spec in self._specs.items():
            tensor = served(current[name], spec)
            yield name, tensor, self.tensors[name].to(tensor.device)

    def apply(self, changes: Changes) -> None:
        write_patches(self.tensors, changes)
        self._wait(self.tensors)

    def replace(self, current: Mapping[str, torch.Tensor]) -> None:
        for name, spec in self._specs.items():
            self.tensors[name].copy_(served(current[name], spec))
        self._wait(current)

    def _wait(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # Other threads, and so other streams, read the snapshot next.
        for device in {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()

    def read(self, name: str) -> tuple[torch.Tensor, Sums]:
        tensor = self.tensors[name].cpu()
        return tensor, state_digest.of_tensor(tensor)


def write_patches(tensors: Mapping[str, torch.Tensor], changes: Changes) -> None:
    """Write changes into tensors, on whichever devices they are."""
    for spec, patch in changes.patches():
        held = tensors[spec.name]
        bits(held)[patch.indices.to(held.device)] = bits(patch.values).to(held.device)
