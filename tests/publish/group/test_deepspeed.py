"""DeepSpeed itself trains on gloo, and each rank publishes its partitions: nothing is gathered to publish."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist

from patchstore import Publisher
from patchstore.publish.sources import Weights
from tests.support.model_bits import Bits, Versions, bits_of
from tests.support.ranks import Published, RanksOf

pytest.importorskip("deepspeed")

# Compiles a part of itself at first.
pytestmark = pytest.mark.timeout(600)


def engine_of(rank: int, stage: int, make: Callable[[], torch.nn.Module]) -> Any:
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    import deepspeed

    model = make()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 4,
            # Smaller parameters stay gathered.
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        },
    )
    return engine


def whole(engine: Any) -> Bits:
    """Return all tensors as DeepSpeed gathers them."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return bits_of({name: each.clone() for name, each in engine.module.state_dict().items()})


SOURCES: dict[str, Callable[[Any], Any]] = {
    "engine": lambda engine: engine,
    "module": lambda engine: engine.module,
    "mapping": lambda engine: {
        **dict(engine.module.named_parameters()),
        **dict(engine.module.named_buffers()),
    },
}


def train_and_publish(
    rank: int, url: str, stage: int, make: Any, source: str, while_gathered: bool
) -> Versions:
    import deepspeed

    engine = engine_of(rank, stage, make)
    published = []
    group = dist.group.WORLD if stage < 3 else None
    with Publisher(url, SOURCES[source](engine), group=group, anchor_every=3, rank_timeout_s=60) as publisher:
        for step in range(4):
            tokens = torch.randint(0, 17, (4, 5), generator=torch.Generator().manual_seed(step))
            engine.backward(engine(tokens).float().square().mean())
            engine.step()
            gathered = deepspeed.zero.GatheredParameters(list(engine.module.parameters()))
            with gathered if while_gathered else nullcontext():
                version = publisher.publish_patch(step).result().version
            published.append((version, whole(engine)))
    return published


def tied() -> torch.nn.Module:
    torch.manual_seed(0)
    return jobs.Tied()


@pytest.mark.parametrize(
    ("num", "stage", "make", "source", "while_gathered"),
    [
        (2, 3, jobs.plain, "engine", False),
        (3, 3, jobs.plain, "module", False),
        (2, 3, jobs.plain, "mapping", True),
        (2, 3, tied, "module", False),
        (2, 1, jobs.plain, "engine", False),
        (2, 2, jobs.plain, "module", False),
    ],
)
def test_each_version_has_what_deepspeed_gathers(
    published: Published, num: int, stage: int, make: Any, source: str, while_gathered: bool
) -> None:
    manifests = published(num, train_and_publish, stage, make, source, while_gathered)
    assert [manifest.kind for manifest in manifests] == ["anchor", "delta", "delta", "anchor"]


def partitions(rank: int) -> list[tuple[bool, int, int]]:
    """Return for each parameter whether its elements are in the partition, how many, and of how many."""
    engine = engine_of(rank, 3, jobs.plain)
    parameters = dict(engine.module.named_parameters())
    given = Weights(engine).read()
    found = []
    for name, parameter in parameters.items():
        mine = [tensor for key, tensor in given.tensors.items() if key.partition("\t")[0] == name]
        storage = parameter.ds_tensor.untyped_storage().data_ptr()
        shared = all(tensor.untyped_storage().data_ptr() == storage for tensor in mine)
        found.append((shared, sum(tensor.numel() for tensor in mine), parameter.ds_numel))
    return found


def test_partitions_are_views_of_deepspeeds_memory_without_padding(ranks_of: RanksOf) -> None:
    for each in zip(*ranks_of(3).run(partitions), strict=True):
        assert all(shared for shared, _, _ in each)
        assert sum(num for _, num, _ in each) == each[0][2]
