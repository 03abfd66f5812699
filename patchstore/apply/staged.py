"""An update of a dict of tensors: what it is before it is written, and what undoes it afterwards."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from patchstore.format.records import Manifest, Plan
from patchstore.tensors.bits import TensorPatch
from patchstore.tensors.state_digest import Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """An update that is verified and ready to be written."""

    plan: Plan
    patches: dict[str, TensorPatch]
    """Per tensor of which some elements change."""
    full: dict[str, torch.Tensor]
    """Per tensor that an anchor replaces as a whole."""
    sums: dict[str, Sums]
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


@dataclass(slots=True)
class Replaced:
    """What an update replaced, in the order in which it was written."""

    sums: dict[str, Sums]
    """Digest sums of every tensor from before the update."""
    old: list[tuple[str, TensorPatch | torch.Tensor | None]] = field(default_factory=list)
    """Per tensor, the elements that were replaced, or all of it; None if there was no such tensor."""


class Undo:
    """What an update replaced; putting it back needs nothing but memory."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self._restore = restore

    def rollback(self) -> None:
        """Restore the tensors and the held version to what they were before the update.

        Raises:
            UsageError: another update came after this one; nothing was changed.
        """
        self._restore()
