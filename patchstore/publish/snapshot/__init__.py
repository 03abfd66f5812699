"""The last published weights, for comparison: on the device, in host memory or in a file."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from patchstore.format.records import Part, TensorSpec
from patchstore.kernels import are_usable
from patchstore.publish.snapshot.device import DeviceSnapshot, Kernels
from patchstore.publish.snapshot.memory import Place, Served, Stream, Tensors, check_place, devices_of
from patchstore.publish.snapshot.plain import PlainSnapshot
from patchstore.tensors.changes import Changes
from patchstore.tensors.state_digest import Sums

__all__ = ["Place", "Served", "Snapshot", "Stream", "Tensors", "check_place", "kernels_for", "take"]


class Snapshot(Protocol):
    """The tensors of a run as they were published last: memory, and a comparison with it.

    `compare` leaves it as it is, so that changes can be encoded against it. `apply` then writes them to it.
    """

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """By name, contiguous, where the snapshot is; views of its memory."""
        ...

    def compare(self, current: Tensors) -> Changes:
        """Return how the model's tensors differ from the snapshot, which stays as it is.

        The tensors may change once this returns. What it returns is valid until the next call.
        """
        ...

    def apply(self, changes: Changes) -> None:
        """Write the changes that the last comparison found. If this raises, some of them may be missing."""
        ...

    def replace(self, current: Tensors) -> None:
        """Copy all of the model's tensors. If this raises, the snapshot may have parts of two states."""
        ...

    def read(self, part: Part) -> tuple[torch.Tensor, Sums]:
        """Return a part in host memory, and its digest sums; one thread at a time."""
        ...

    def digest(self, tensor: torch.Tensor) -> Sums:
        """Return the digest sums of a tensor in host memory, computed where that is fastest."""
        ...


def take(current: Tensors, specs: Sequence[TensorSpec], place: Place) -> Snapshot:
    """Copy tensors as they are served.

    Args:
        specs: of the schema, in its order.
        place: that `check_place` admits.

    Raises:
        UsageError: not enough memory there.
    """
    devices = set(devices_of(current).values())
    kernels = kernels_for(devices)
    if kernels is not None:
        return DeviceSnapshot(current, specs, place, devices.pop(), kernels)
    return PlainSnapshot(current, specs, place)


def kernels_for(devices: set[torch.device]) -> Kernels | None:
    """Return kernels where they can do the work: Triton is there, and all tensors are on one GPU."""
    if {device.type for device in devices} != {"cuda"} or len(devices) > 1:
        return None
    if not are_usable(next(iter(devices))):
        return None
    from patchstore.kernels import compare, index_encode, rounded

    return Kernels(compare=compare, encode=index_encode, rounded=rounded)
