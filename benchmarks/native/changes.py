"""The changes of a version, as vLLM's transfer of changes takes them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a version changes of one tensor."""

    name: str
    shape: tuple[int, ...]
    indices: torch.Tensor
    """int32, ascending."""
    values: torch.Tensor


def fused(changes: Iterable[Changes]) -> list[Changes]:
    """Return changes of the parameters into which vLLM joins tensors of a checkpoint, one after the other.

    Args:
        changes: of all tensors of a model of the Qwen family, in the order of the model.
    """
    parts: dict[str, list[Changes]] = {}
    for each in changes:
        parts.setdefault(_served_name(each.name), []).append(each)
    found = []
    for name, group in parts.items():
        begins, indices = 0, []
        for part in group:
            indices.append(part.indices + begins)
            begins += torch.Size(part.shape).numel()
        values = torch.cat([part.values for part in group])
        shape = group[0].shape if len(group) == 1 else (begins,)
        found.append(Changes(name=name, shape=shape, indices=torch.cat(indices), values=values))
    return found


def _served_name(name: str) -> str:
    name = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
    name = re.sub(r"\.experts\.\d+\.(gate|up)_proj\.weight", ".experts.routed_experts.w13_weight", name)
    name = re.sub(r"\.experts\.\d+\.down_proj\.weight", ".experts.routed_experts.w2_weight", name)
    return re.sub(r"\.mlp\.(gate|up)_proj\.", ".mlp.gate_up_proj.", name)
