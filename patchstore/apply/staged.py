"""An update of a replica: what it is before it is applied, and what undoes it afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from patchstore.errors import UsageError
from patchstore.format.records import Manifest, Plan
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TensorPatch, bits

if TYPE_CHECKING:
    from patchstore.apply.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """An update that is verified and ready to be written."""

    plan: Plan
    patches: dict[str, TensorPatch]
    """Per tensor of which some elements change."""
    full: dict[str, torch.Tensor]
    """Per tensor that an anchor replaces as a whole."""
    sums: dict[str, state_digest.Sums]
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
    """What an update replaced; putting it back needs nothing but memory."""

    def __init__(self, replica: "Replica") -> None:
        self._replica = replica
        self._before = (replica.manifest, replica._sums)
        self._after = replica.manifest
        """The version that the update brought; until it is applied, the one before."""
        self._old: list[tuple[str, TensorPatch | torch.Tensor | None]] = []

    def rollback(self) -> None:
        """Restore the tensors and the held version to what they were before the update.

        Raises:
            UsageError: another update came after this one; nothing was changed.
        """
        if self._replica.manifest is not self._after:
            raise UsageError(
                f"the tensors are at version {self._replica.held} by now: what this replaced cannot return"
            )
        tensors = self._replica.tensors
        with writing_to(tensors):
            for name, old in reversed(self._old):
                if old is None:
                    del tensors[name]
                elif isinstance(old, TensorPatch):
                    bits(tensors[name])[old.indices] = bits(old.values)
                else:
                    bits(tensors[name]).copy_(bits(old))
        self._old.clear()
        self._replica.manifest, self._replica._sums = self._before
        self._after = self._replica.manifest


def writing_to(tensors: Mapping[str, torch.Tensor]) -> torch.inference_mode:
    """Tensors that were made in inference mode can only be written to in it."""
    return torch.inference_mode(any(tensor.is_inference() for tensor in tensors.values()))
