"""What an update writes to the weights of one rank, and what that replaces."""

from dataclasses import dataclass, field

import torch

from vllm_plugin.mapping import StagedSums


@dataclass(slots=True)
class Scatter:
    """New bits for some elements of one runtime, and what they replace."""

    positions: torch.Tensor
    """int32 or int64 [num], in elements of the runtime's storage; no two are equal."""
    new: torch.Tensor
    """Integers [num] of the runtime's element width."""
    old: torch.Tensor


@dataclass(slots=True)
class StagedWrite:
    """Patches in runtime coordinates, and the slice_sums that prove them."""

    scatters: dict[int, Scatter] = field(default_factory=dict)
    """By index of the runtime."""
    staged_sums: StagedSums = field(default_factory=lambda: StagedSums.of([]))
    """Of the patched elements."""
