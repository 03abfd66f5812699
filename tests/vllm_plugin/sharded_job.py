"""A trainer of the tiny model in FSDP2, which publishes from all its ranks."""

import torch
from torch.distributed.fsdp import fully_shard

from patchstore import Publisher
from patchstore.testing import tiny_qwen


def publish(rank: int, url: str, num_steps: int, encoding: str) -> list[int]:
    """Train with AdamW, and publish each step; return the numbers of changes."""
    model = tiny_qwen.build()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    changes = []
    with Publisher(url, model, rank_timeout_s=60, encoding=encoding, anchor_every=100) as publisher:
        publisher.publish_patch(0).result()
        for step in range(1, num_steps + 1):
            tokens = torch.randint(0, 200, (2, 16), generator=torch.Generator().manual_seed(step))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            delta = publisher.publish_patch(step).result().delta
            changes.append(0 if delta is None else delta.num_changed)
    return changes
