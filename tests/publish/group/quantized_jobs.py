"""What ranks do that publish in FP8."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from patchstore import Publisher
from patchstore.errors import PatchstoreError

ROWS, COLUMNS, NORM = "a.up_proj.weight", "a.down_proj.weight", "a.norm.weight"
PLACEMENTS = {ROWS: Shard(0), COLUMNS: Shard(1), NORM: Replicate()}


def whole(step: int) -> dict[str, torch.Tensor]:
    """The model at a step, the same on all ranks."""
    random = torch.Generator().manual_seed(step)
    return {
        ROWS: torch.randn(300, 256, generator=random).to(torch.bfloat16),
        COLUMNS: torch.randn(140, 500, generator=random).to(torch.bfloat16),
        NORM: torch.ones(7, dtype=torch.bfloat16),
    }


def _load(tensors: dict[str, DTensor], step: int, mesh: Any) -> None:
    for name, given in whole(step).items():
        tensors[name].to_local().copy_(distribute_tensor(given, mesh, [PLACEMENTS[name]]).to_local())


def publish(rank: int, url: str, form: str) -> list[int]:
    """Publish three steps; return the versions."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {name: distribute_tensor(each, mesh, [PLACEMENTS[name]]) for name, each in whole(0).items()}
    versions = []
    with Publisher(url, tensors, quantization=form, rank_timeout_s=120) as publisher:
        for step in range(3):
            _load(tensors, step, mesh)
            versions.append(publisher.publish_patch(step).result().version)
    return versions


def one_is_not_finite(rank: int, url: str) -> tuple[str, str, int]:
    """Return what each rank hears of a NaN on rank 1, and the version that comes next."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {name: distribute_tensor(each, mesh, [PLACEMENTS[name]]) for name, each in whole(0).items()}
    with Publisher(url, tensors, quantization="fp8-block", rank_timeout_s=120) as publisher:
        publisher.publish_patch(0).result()
        if rank == 1:
            tensors[ROWS].to_local()[50, 3] = float("nan")
        kind = message = ""
        try:
            publisher.publish_patch(1).result()
        except PatchstoreError as exc:
            kind, message = exc.kind, str(exc)
        _load(tensors, 2, mesh)
        dist.barrier()
        while True:
            try:
                return kind, message, publisher.publish_patch(2).result().version
            except PatchstoreError:
                # What was not told by the call before is told now.
                continue
