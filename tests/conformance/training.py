"""Publish a checkpoint folder as version 0, and versions that differ from it a little, as a trainer would.

The trainer keeps all weights in float32, and says nothing of dtypes: the folder does.
"""

from contextlib import closing
from pathlib import Path

import torch
from safetensors.torch import load_file

from patchstore import Publisher
from patchstore.stores import open_store
from patchstore.tensors.bits import TORCH_DTYPES

NEWEST = 3
"""The last version that `publish` makes; versions 0 and 2 are anchors too."""

Patch = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By tensor name: int64 positions in the flattened tensor, and the new values there."""


def publish(checkpoint: Path, store: Path, *, density: float = 0.02) -> list[Patch]:
    """Publish versions 0 to `NEWEST` of a checkpoint.

    Returns:
        What changed in versions 1 to `NEWEST`: some elements of every tensor, one of them to -0.0.
    """
    served = load_file(checkpoint / "model.safetensors")
    masters = {name: each.float() if each.is_floating_point() else each for name, each in served.items()}
    random = torch.Generator().manual_seed(11)
    patches = []
    with (
        closing(open_store(store)) as bucket,
        Publisher(bucket, masters, anchor_every=2, files=checkpoint) as publisher,
    ):
        publisher.publish_patch(0).result(timeout_s=60)
        assert {spec.name: TORCH_DTYPES[spec.dtype] for spec in publisher.schema.tensors} == {
            name: each.dtype for name, each in served.items()
        }
        for step in range(1, NEWEST + 1):
            changed = {name: _change(tensor, density, random) for name, tensor in masters.items()}
            patches.append({name: (at, new.to(served[name].dtype)) for name, (at, new) in changed.items()})
            publisher.publish_patch(step).result(timeout_s=60)
    return patches


def _change(
    tensor: torch.Tensor, density: float, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    flat = tensor.view(-1)
    positions = torch.randperm(flat.numel(), generator=random)[: max(2, int(flat.numel() * density))]
    noise = torch.randn(len(positions), generator=random) * flat.float().std()
    flat[positions] = (flat[positions].float() + 0.5 * noise).to(flat.dtype)
    # Equal to 0.0 as a number, not as bits.
    flat[positions[0]] = -0.0
    return positions, flat[positions].clone()
