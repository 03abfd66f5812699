"""What ranks do with sharded models of transformers."""

import os
import warnings
from pathlib import Path

import torch.distributed as dist
from jobs import Bits, serve_bits
from torch.distributed.fsdp import fully_shard

from patchstore import Publisher, as_saved
from patchstore.tensors.bits import bits


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


def publish_masters(rank: int, url: str, folder: str) -> list[tuple[int, Bits]]:
    """Publish a model in float32 that FSDP2 shards; the first rank alone has the base checkpoint.

    Returns:
        The version, and the model in the dtypes of that checkpoint.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import saved_models
    from safetensors.torch import load_file, save_file

    base = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = saved_models.trained("DeepseekV3")
        if rank == 0:
            base, _ = saved_models.checkpoint(model, Path(folder))
            masters = load_file(f"{folder}/float32/model.safetensors")
            wide = ("e_score_correction_bias", "mlp.gate.weight")
            saved = {n: each if n.endswith(wide) else each.bfloat16() for n, each in masters.items()}
            save_file(saved, base / "model.safetensors")
        dist.barrier()
        expected = load_file(f"{folder}/base/model.safetensors")
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    with Publisher(url, model, files=base, rank_timeout_s=60) as publisher:
        version = publisher.publish_patch(0).result().version
    return [(version, {n: (t.dtype, tuple(t.shape), bits(t).numpy().tobytes()) for n, t in expected.items()})]


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
