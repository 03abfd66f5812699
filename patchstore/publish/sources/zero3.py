"""Parameters that DeepSpeed ZeRO-3 partitions: each rank has a flat range of each. Nothing is gathered."""

from typing import Any

import torch

from patchstore.errors import SchemaMismatch
from patchstore.publish.sources.pieces import LocalPart

ADVICE = (
    "DeepSpeed ZeRO-3 keeps parameters apart: copy them inside deepspeed.zero.GatheredParameters("
    "model.parameters()), and publish the mapping of copies from rank 0"
)


def is_partitioned(value: Any) -> bool:
    """Whether this is a parameter whose partition is known."""
    return hasattr(value, "ds_tensor") and hasattr(value, "ds_shape") and hasattr(value, "ds_numel")


def is_placeholder(value: Any) -> bool:
    """Whether DeepSpeed keeps this tensor's elements elsewhere."""
    return hasattr(value, "ds_id") and not value.numel() and bool(getattr(value, "ds_numel", 1))


def part_of(name: str, parameter: Any) -> LocalPart:
    """Return the partition of this rank, without what pads the last one.

    The partition is what the next forward pass gathers, also of parameters that are gathered now.

    Raises:
        SchemaMismatch: it is not in memory, or in another dtype than the parameter.
    """
    held = parameter.ds_tensor
    num_held = int(getattr(held, "ds_numel", held.numel()))
    if held.numel() != num_held:
        raise SchemaMismatch(f"the partition of {name!r} is not in memory, but offloaded to NVMe; {ADVICE}")
    if held.dtype != parameter.dtype:
        raise SchemaMismatch(
            f"{name!r} is {parameter.dtype}, but DeepSpeed keeps it quantised as {held.dtype}; {ADVICE}"
        )
    total = int(parameter.ds_numel)
    offset = min(_rank(parameter) * num_held, total)
    return LocalPart(held.detach()[: min(num_held, total - offset)], tuple(parameter.ds_shape), offset=offset)


def world() -> set[int]:
    """Return the ranks that have partitions; none if there is one process alone."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return set()
    size = distributed.get_world_size()
    return set(range(size)) if size > 1 else set()


def _rank(parameter: Any) -> int:
    found = getattr(parameter, "ds_zero_partition_rank", None)
    if found is None:
        found = torch.distributed.get_rank(parameter.ds_process_group)
    return int(found)
