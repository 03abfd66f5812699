"""What ranks do in tests of exported models: publish parameters of the stand-in, and gather to compare."""

from typing import Any

import torch
import torch.distributed as dist

from patchstore import Publisher
from patchstore.integrations.megatron import as_exported
from patchstore.tensors.bits import bits
from tests.support import stand_in_bridge as bridges

Bits = dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]


def mappings() -> dict[str, bridges.Mapping]:
    return {
        "column": bridges.column("column"),
        "row": bridges.row("row"),
        "norm": bridges.replicated("norm"),
        "transposed": bridges.transposed("transposed"),
        "qkv.weight": bridges.qkv("qkv.weight", 8, 4),
        "qkv.bias": bridges.qkv("qkv.bias", 8, 4),
        "gated": bridges.gated("gated"),
        "embedding": bridges.padded("embedding", 21),
        "counts": bridges.column("counts"),
        "zero_centred": bridges.plus_one("zero_centred"),
        "cast": bridges.cast_if_float("cast", torch.float16),
        "averaged": bridges.averaged("averaged"),
        "doubled": bridges.doubled("doubled"),
        "reversed": bridges.reversed_rows("reversed"),
        "imported": bridges.imported_before("imported"),
        **{f"experts.{number}": bridges.expert("experts", number) for number in range(3)},
        **{f"stage{number}.up": bridges.replicated(f"stage{number}.up") for number in range(2)},
        "stage1.norm": bridges.plus_one("stage1.norm"),
    }


def weights(rank: int) -> dict[str, torch.Tensor]:
    """Return what a rank has: shards of its own, and copies of what all have."""
    own, common = torch.Generator().manual_seed(rank + 1), torch.Generator().manual_seed(0)
    shapes = {
        "column": (6, 5),
        "row": (4, 7),
        "transposed": (5, 3),
        "qkv.weight": (48, 3),
        "qkv.bias": (48,),
        "gated": (10, 4),
        "embedding": (12, 3),
        "averaged": (3, 3),
        "doubled": (3, 3),
        "reversed": (4, 3),
        "imported": (4, 3),
        **{f"experts.{number}": (4, 3) for number in range(3)},
    }
    found = {name: torch.randn(shape, generator=own).bfloat16() for name, shape in shapes.items()}
    found["counts"] = torch.randint(0, 9, (5,), generator=own)
    for name, shape in {"norm": (9,), "zero_centred": (9,), "cast": (3, 2)}.items():
        found[name] = torch.randn(shape, generator=common).bfloat16()
    if rank < 2:
        found[f"stage{rank}.up"] = torch.randn(4, 4, generator=own).bfloat16()
    if rank == 1:
        found["stage1.norm"] = torch.randn(4, generator=own).bfloat16()
    found["column"][0, :2] = torch.tensor([float("nan"), -0.0])
    return found


def served(tensors: Any) -> Bits:
    found = {}
    for name, tensor in tensors:
        kept = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        found[name] = kept.dtype, tuple(kept.shape), bits(kept.contiguous()).numpy().tobytes()
    return found


def publish(rank: int, url: str) -> tuple[list[tuple[int, Bits]], set[str], set[str], int]:
    """Publish some steps.

    Returns:
        Versions, with what the stand-in gathers of each; which parameters are gathered, which are converted
        here, and how often the stand-in exported in the last publication.
    """
    bridge, model = bridges.Bridge(mappings()), weights(rank)
    source = as_exported(bridge, model)
    tasks = list(mappings())
    published = []
    with Publisher(url, source, group=dist.group.WORLD, rank_timeout_s=60, anchor_every=2) as publisher:
        for step in range(4):
            before = bridge.num_exports
            version = publisher.publish_patch(step).result().version
            num_exports = bridge.num_exports - before
            published.append((version, served(bridge.export_hf_weights([model]))))
            for name, each in model.items():
                flat = each.view(-1)
                flat[step :: step + 2] += 1 if name == "counts" else flat[step :: step + 2]
    gathered = {tasks[place] for place in source.gathered}
    return published, gathered, {tasks[place] for place in source.converted}, num_exports


def moves_alone(rank: int, url: str) -> tuple[list[tuple[int, Bits]], int, bool]:
    """Publish parameters that are only moved, and watch for collectives."""
    names = (
        "column",
        "row",
        "norm",
        "qkv.weight",
        "gated",
        "embedding",
        "experts.0",
        "experts.1",
        "experts.2",
    )
    bridge = bridges.Bridge({name: mappings()[name] for name in names})
    model = {name: each for name, each in weights(rank).items() if name in names}
    source = as_exported(bridge, [model])
    published, real, calls = [], dist.all_gather, []
    with Publisher(url, source, group=dist.group.WORLD, rank_timeout_s=60) as publisher:
        for step in range(2):
            dist.all_gather = lambda *args, **kwargs: calls.append(args)
            try:
                before = bridge.num_exports
                version = publisher.publish_patch(step).result().version
                num_exports = bridge.num_exports - before
            finally:
                dist.all_gather = real
            published.append((version, served(bridge.export_hf_weights([model]))))
            model["gated"] *= 3
    storages = {each.untyped_storage().data_ptr() for each in model.values()}
    parts = [part for parts in source().values() for part in parts]
    return (
        published,
        num_exports + len(calls),
        {part.tensor.untyped_storage().data_ptr() for part in parts} <= storages,
    )
