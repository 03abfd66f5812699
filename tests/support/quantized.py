"""A few weights to publish in FP8, and what followers must have of them."""

import torch

from patchstore import Replica
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits

UP = "model.layers.0.mlp.up_proj.weight"


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": torch.randn(256, 128).to(dtype),
        UP: (torch.randn(384, 256) * 0.02).to(dtype),
        "model.layers.0.mlp.gate.weight": torch.randn(8, 128).to(dtype),
        "model.norm.weight": torch.ones(128, dtype=dtype),
    }


def assert_served(store: MemoryStore, wanted: dict[str, torch.Tensor]) -> None:
    """Compare the newest version, by its deltas from version 0 on."""
    replica = Replica(store, {})
    replica.update(0)
    replica.update()
    assert replica.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(bits(replica.tensors[name]), bits(tensor)), name
