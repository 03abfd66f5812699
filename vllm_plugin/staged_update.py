"""An update of one rank that is fetched and decoded, and not written."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from patchstore.errors import HostError
from patchstore.format.records import Manifest, Plan
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TensorPatch, bits
from patchstore.tensors.state_digest import Sums
from vllm_plugin.batches import Batch, Piece
from vllm_plugin.mapping import SumsArray
from vllm_plugin.staged_write import StagedWrite

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Staged:
    """An update that is ready to be written."""

    plan: Plan
    anchor: Mapping[str, torch.Tensor]
    """Every tensor of the anchor that it starts from; empty where it starts from the held version."""
    change: StagedWrite
    """What the deltas change, of the names that are copied."""
    computed: dict[str, torch.Tensor]
    """Every calculated name that changes, and those loaded with it, in full."""
    cut: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every name of `LiveWeights.cut` that changes, in full."""
    before: Mapping[str, Sums] = field(default_factory=dict)
    after: Mapping[str, Sums] = field(default_factory=dict)
    """Digest sums of the elements of calculated names that change."""
    recorded: SumsArray
    """The target's digest sums, as the store has them."""
    partial: dict[str, torch.Tensor] = field(default_factory=dict)
    """Every name of which only a part is served, in full, where the update starts from an anchor."""
    pieces: Sequence[Batch | Piece] | None = None
    """What is written of the anchor; None where vLLM's loader loads it, as the map is not proved."""
    saved: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """The runtimes that are written as a whole, as they are now."""
    leases: ExitStack = field(default_factory=ExitStack)
    """Holds the payloads' files, which the host's other ranks use too."""
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        return self.plan.target

    def release(self) -> None:
        """Close the payloads' files. The update does not fail where they cannot be removed."""
        try:
            self.leases.close()
        except HostError as exc:
            logger.warning("files of version %d could not be removed: %s", self.manifest.version, exc)


def patched(
    tensors: Mapping[str, torch.Tensor], patches: Mapping[str, TensorPatch]
) -> tuple[dict[str, Sums], dict[str, Sums]]:
    """Apply patches to tensors of their names; return the digest sums of the elements before and after."""
    before, after = {}, {}
    for name, patch in patches.items():
        old = bits(tensors[name])[patch.indices].view(patch.values.dtype)
        before[name] = state_digest.of_elements(patch.indices, old)
        after[name] = state_digest.of_elements(patch.indices, patch.values)
        bits(tensors[name])[patch.indices] = bits(patch.values)
    return before, after
