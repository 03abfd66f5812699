"""A snapshot that is compared in plain torch and numpy."""

import os
from collections.abc import Iterator, Mapping, Sequence

import torch

from patchstore.format.records import Part, TensorSpec
from patchstore.publish.snapshot.memory import (
    Place,
    Stream,
    Tensors,
    allocating,
    copy_each,
    devices_of,
    in_file,
    in_turn,
    served,
    views,
)
from patchstore.publish.snapshot.ranges import Ranges
from patchstore.tensors import diff, state_digest
from patchstore.tensors import parts as part_sums
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, bits
from patchstore.tensors.changes import Changes
from patchstore.tensors.state_digest import Sums


class PlainSnapshot:
    """A snapshot of tensors on any devices, compared one after the other; small ones on the CPU together."""

    def __init__(self, current: Tensors, specs: Sequence[TensorSpec], place: Place) -> None:
        self._specs = {spec.name: spec for spec in specs}
        num_bytes = sum(spec.num_bytes for spec in specs)
        devices = devices_of(current)
        self._finite = self._found_finite = set[str]()
        """`Ranges.finite` of the snapshot's tensors, and as they are after the changes found last."""
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
                        device=devices[spec.name] if place == "device" else "cpu",
                    )
                    for spec in specs
                }
        self.replace(current)

    def compare(self, current: Tensors) -> Changes:
        patches = []
        ranges = Ranges(self._finite)
        for (name, tensor, _, given), at in diff.changed_each(self._pairs(current, ranges)):
            values = bits(tensor)[at].view(tensor.dtype)
            if given is not tensor:
                ranges.look(name, given, values, at)
            patches.append((self._specs[name], TensorPatch(name=name, indices=at.cpu(), values=values.cpu())))
        ranges.end()
        self._found_finite = ranges.finite
        # Tensors were compared in groups, which are not in the schema's order.
        patches.sort(key=lambda each: each[0].name)
        return Changes(sum(len(patch.indices) for _, patch in patches), patches)

    def _pairs(
        self, current: Tensors, ranges: Ranges
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield tensors as they are served and in the snapshot; then those whose changes are to be looked at
        in `ranges`, as they were given, or once more what needs no further look.
        """
        for name, given in in_turn(current):
            tensor, kept = served(given, self._specs[name]), given
            if isinstance(current, Stream) or name not in self._finite:
                # All of it. A stream's tensors must not be kept.
                ranges.look(name, given, tensor)
                kept = tensor
            yield name, tensor, self.tensors[name].to(tensor.device), kept

    def apply(self, changes: Changes) -> None:
        write_patches(self.tensors, changes)
        self._finite = self._found_finite
        self._wait(self.tensors)

    def replace(self, current: Tensors) -> None:
        self._finite = set()
        self._finite = copy_each(current, self._specs, self.tensors)
        self._wait(current)

    def _wait(self, tensors: Tensors) -> None:
        # Other threads, and so other streams, read the snapshot next.
        for device in set(devices_of(tensors).values()):
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def read(self, part: Part) -> tuple[torch.Tensor, Sums]:
        tensor = self.tensors[part.key].cpu()
        return tensor, part_sums.digest(part, tensor)

    def digest(self, tensor: torch.Tensor) -> Sums:
        return state_digest.of_tensor(tensor)


def write_patches(tensors: Mapping[str, torch.Tensor], changes: Changes) -> None:
    """Write changes into tensors, on whichever devices they are."""
    for spec, patch in changes.patches():
        held = tensors[spec.name]
        bits(held)[patch.indices.to(held.device)] = bits(patch.values).to(held.device)
