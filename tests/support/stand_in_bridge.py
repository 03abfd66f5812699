"""A stand-in for Megatron-Bridge: its interface, mappings that gather in its ways, and some that calculate.

Parameters are sharded over the ranks of one group, as by tensor parallelism. `Bridge.export_hf_weights` is a
collective that returns whole tensors on all ranks.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

_TAKEN_BEFORE = dist.all_gather
"""What a module that imported the function has."""


@dataclass
class Mapping:
    """How a parameter is exported."""

    hf_param: str
    convert: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    group_key: str | None = None


@dataclass
class Task:
    global_param_name: str
    mapping: Mapping
    param_weight: torch.Tensor | None
    param_name: str = ""
    cache: dict[str, Any] = field(default_factory=dict)


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


def column(name: str) -> Mapping:
    return Mapping(name, lambda local: {name: torch.cat(gather(local))})


def row(name: str) -> Mapping:
    return Mapping(name, lambda local: {name: torch.cat(gather(local), dim=1)})


def replicated(name: str) -> Mapping:
    return Mapping(name, lambda local: {name: local})


def transposed(name: str) -> Mapping:
    return Mapping(name, lambda local: {name: torch.cat(gather(local)).t().contiguous()})


def qkv(name: str, heads: int, groups: int) -> Mapping:
    def convert(local: torch.Tensor) -> dict[str, torch.Tensor]:
        fused = torch.cat(gather(local))
        per_group = heads // groups
        slices = fused.view(groups * (per_group + 2), -1, *fused.shape[1:])
        numbers = torch.arange(len(slices))
        kind = numbers % (per_group + 2)
        chosen = {"q": kind < per_group, "k": kind == per_group, "v": kind == per_group + 1}
        return {
            f"{name}.{part}": slices[numbers[which]].reshape(-1, *fused.shape[1:])
            for part, which in chosen.items()
        }

    return Mapping(name, convert)


def gated(name: str) -> Mapping:
    def convert(local: torch.Tensor) -> dict[str, torch.Tensor]:
        halves = [each.chunk(2) for each in gather(local)]
        return {
            f"{name}.gate": torch.cat([gate for gate, _ in halves]),
            f"{name}.up": torch.cat([up for _, up in halves]),
        }

    return Mapping(name, convert)


def padded(name: str, rows: int) -> Mapping:
    return Mapping(name, lambda local: {name: torch.cat(gather(local))[:rows]})


def plus_one(name: str) -> Mapping:
    """A norm that is stored around zero."""
    return Mapping(name, lambda local: {name: local.clone() + 1})


def cast_if_float(name: str, dtype: torch.dtype) -> Mapping:
    """No number is cast: only weights show this."""
    return Mapping(name, lambda local: {name: local.to(dtype) if local.is_floating_point() else local})


def averaged(name: str) -> Mapping:
    """The mean of all ranks' tensors, by a collective that a rank alone cannot carry out."""

    def convert(local: torch.Tensor) -> dict[str, torch.Tensor]:
        total = local.clone()
        dist.all_reduce(total)
        return {name: total / dist.get_world_size()}

    return Mapping(name, convert)


def doubled(name: str) -> Mapping:
    """Computed from what others have."""
    return Mapping(name, lambda local: {name: torch.cat(gather(local)) * 2})


def reversed_rows(name: str) -> Mapping:
    return Mapping(name, lambda local: {name: torch.cat(gather(local)).flip(0)})


def imported_before(name: str) -> Mapping:
    """Calls a collective that it imported."""

    def convert(local: torch.Tensor) -> dict[str, torch.Tensor]:
        found = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        _TAKEN_BEFORE(found, local)
        return {name: torch.cat(found)}

    return Mapping(name, convert)


def expert(name: str, number: int) -> Mapping:
    """One of several that are exported as one tensor; `Bridge` joins them."""
    return Mapping(f"{name}.{number}", lambda local: {name: torch.cat(gather(local))}, group_key=name)


class Bridge:
    """What a source uses of an AutoBridge."""

    def __init__(self, mappings: dict[str, Mapping]) -> None:
        self._mappings = mappings
        self.num_exports = 0

    def get_conversion_tasks(self, models: list[dict[str, torch.Tensor]]) -> list[Task | None]:
        weights = {name: each for model in models for name, each in model.items()}
        return [Task(name, mapping, weights.get(name)) for name, mapping in self._mappings.items()]

    def export_hf_weights(
        self,
        model: Any,
        cpu: bool = False,
        show_progress: bool = True,
        conversion_tasks: list[Task] | None = None,
        merge_adapter_weights: bool = True,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self.num_exports += 1
        tasks: Any = self.get_conversion_tasks(model) if conversion_tasks is None else conversion_tasks
        groups: dict[str, list[torch.Tensor]] = {}
        for task in tasks:
            mapping = task.mapping
            local = _from_its_stage(task)
            found = mapping.convert(local)
            if mapping.group_key is None:
                yield from found.items()
                continue
            group = groups.setdefault(mapping.group_key, [])
            group.append(found[mapping.group_key])
            if len(group) == sum(each.group_key == mapping.group_key for each in self._mappings.values()):
                yield mapping.group_key, torch.stack(group)


def _from_its_stage(task: Task) -> torch.Tensor:
    """Return a parameter, from the first rank that has it: pipeline stages have layers of their own."""
    weight = task.param_weight
    if not re.match(r"stage\d", task.global_param_name):
        assert weight is not None
        return weight
    specs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(specs, None if weight is None else (weight.shape, weight.dtype))
    source = next(rank for rank, spec in enumerate(specs) if spec is not None)
    if weight is None:
        weight = torch.empty(specs[source][0], dtype=specs[source][1])
    dist.broadcast(weight, src=source)
    return weight
