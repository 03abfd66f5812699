"""What was published last, to compare with: on the device, in host memory or in a file."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Protocol

import torch

from patchstore.change import Change
from patchstore.digest import Sums
from patchstore.kernels import are_usable
from patchstore.model import TensorSpec
from patchstore.snapshot.device import DeviceSnapshot
from patchstore.snapshot.memory import Place, Served, check_place
from patchstore.snapshot.plain import PlainSnapshot

__all__ = ["Place", "Served", "Snapshot", "check_place", "kernels_for", "take"]


class Snapshot(Protocol):
    """The tensors of a run as they were published last."""

    def compare(self, step: int, current: Mapping[str, torch.Tensor]) -> Change:
        """Bring the snapshot up to the model's tensors, and return what that changed.

        The tensors may change once this returns. Where it raises, the snapshot has any part of the change.
        """
        ...

    def replace(self, current: Mapping[str, torch.Tensor]) -> None:
        """Bring the snapshot up to the model's tensors; what changed is not asked for."""
        ...

    def read(self, name: str) -> tuple[torch.Tensor, Sums]:
        """Return a tensor in host memory, and its digest sums; for any one thread."""
        ...

    def close(self) -> None:
        """End its thread, where it has one; nothing is compared afterwards."""
        ...


def take(
    current: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec], encoding: str, place: Place
) -> Snapshot:
    """Copy tensors as they are served.

    Args:
        specs: of the schema, in its order.
        encoding: of `encodings.CHOICES`.
        place: that `check_place` admits.

    Raises:
        UsageError: not enough memory there.
    """
    devices = {tensor.device for tensor in current.values()}
    kernels = kernels_for(devices)
    if kernels is not None:
        return DeviceSnapshot(current, specs, encoding, place, devices.pop(), kernels)
    return PlainSnapshot(current, specs, encoding, place)


def kernels_for(devices: set[torch.device]) -> ModuleType | None:
    """Return `kernels.compare` where it can do the work: Triton is there, and all tensors on one GPU."""
    if {device.type for device in devices} != {"cuda"} or len(devices) > 1:
        return None
    if not are_usable(next(iter(devices))):
        return None
    from patchstore.kernels import compare

    return compare
