"""What ranks do with sharded models of transformers."""

import os
import warnings
from pathlib import Path

import torch.distributed as dist
from jobs import Bits, serve_bits
from torch.distributed.fsdp import fully_shard

from patchstore import Publisher, as_saved


def publish(rank: int, url: str, folder: str, kinds: list[str]) -> list[tuple[int, Bits]]:
    """Publish models that FSDP2 shards, each to a store of its own; return what was saved of each before."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import saved_models
    from safetensors.torch import load_file

    found = []
    for kind in kinds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = saved_models.build(kind)
            if rank == 0:
                model.save_pretrained(Path(folder) / kind)
            dist.barrier()
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        with Publisher(f"{url}/{kind}", as_saved(model), rank_timeout_s=60) as publisher:
            version = publisher.publish_patch(0).result().version
        saved = load_file(f"{folder}/{kind}/model.safetensors")
        # A tied head is not in the file; the run knows that it is tied.
        saved.setdefault("lm_head.weight", saved["model.embed_tokens.weight"])
        found.append((version, serve_bits(saved)))
    return found


def publish_tied(rank: int, url: str, folder: str, names: list[str]) -> list[tuple[int, Bits]]:
    """Publish models with tied weights that FSDP2 shards; return all tensors of each before."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import tied_models

    found = []
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = tied_models.build(name)
            if rank == 0:
                model.save_pretrained(Path(folder) / name)
            before = serve_bits(model.state_dict())
            fully_shard(model)
        with Publisher(f"{url}/{name}", as_saved(model), rank_timeout_s=60) as publisher:
            found.append((publisher.publish_patch(0).result().version, before))
    return found
