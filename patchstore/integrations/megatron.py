"""Megatron-Core models, published from every rank under the names that Megatron-Bridge exports.

Bridge's own conversion says where each element goes. It runs once, when the source is made, on numbers in
place of weights, and without the other ranks (`alone`). From then on each rank publishes its own elements as
views of its parameters. What Bridge computes is converted anew by each publication.
"""

import logging
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.integrations.index_maps import FOREIGN, Box, NoMap, boxes_of, filled_in, numbered, scrambled
from patchstore.integrations.single_rank_collectives import alone
from patchstore.publish.sources.pieces import LocalPart

_LOG = logging.getLogger(__name__)
_INSTEAD = (
    "publish what it gathers, as a stream: Publisher(store, lambda: bridge.export_hf_weights(model, "
    "show_progress=False), group=dist.group.WORLD)"
)
_COMPUTED = "its elements are computed, and not only moved"


class _Part(NamedTuple):
    """Elements of a checkpoint tensor that are elements of one parameter."""

    task: int
    shape: tuple[int, ...]
    """Of the checkpoint tensor."""
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    """Of the first element in the parameter."""
    strides: tuple[int, ...]

    def box(self, first: int) -> Box:
        """Return it with the number of the parameter's first element added."""
        return Box(self.start, self.size, first + self.offset, self.strides)


def as_exported(bridge: Any, model: Any, *, group: Any = None) -> "Exported":
    """Return a source that publishes a model of Megatron-Core as Megatron-Bridge exports it.

    All ranks of the job call it, and then open a `Publisher` with `group=dist.group.WORLD`.

    Args:
        bridge: an AutoBridge with a pretrained model: `AutoBridge.from_hf_pretrained`.
        model: the model, or the list of its virtual pipeline stages.
        group: whose ranks agree on what is gathered; all of the job by default. It must have all ranks that
            export together.

    Raises:
        UsageError: this is no bridge, or it has no pretrained model.
        SchemaMismatch: adapters or parameters that Megatron-FSDP shards.
    """
    for name in ("get_conversion_tasks", "export_hf_weights"):
        if not callable(getattr(bridge, name, None)):
            raise UsageError(f"as_exported takes an AutoBridge of Megatron-Bridge, not {bridge!r:.100}")
    return Exported(bridge, list(model) if isinstance(model, list | tuple) else [model], group)


class Exported:
    """A model of Megatron-Core: a function that returns what this rank has, by names of the checkpoint."""

    def __init__(self, bridge: Any, models: list[Any], group: Any) -> None:
        self._bridge, self._models = bridge, models
        tasks = _tasks(bridge, models)
        trace = _Trace(self._export, [each if _is_own(each) else None for each in tasks])
        self._tasks = tasks
        odd = {place for place in trace.unknown if not self._is_local(place)}
        every: list[Any] = [odd]
        if dist.is_available() and dist.is_initialized():
            every = [None] * dist.get_world_size(group)
            dist.all_gather_object(every, odd, group=group)
        gathered = [place for place in range(len(tasks)) if any(place in each for each in every)]
        converted = sorted(trace.unknown - set(gathered))
        self.gathered = [tasks[place].global_param_name for place in gathered]
        """Parameters whose tensors all ranks gather in each publication."""
        self.converted = [tasks[place].global_param_name for place in converted]
        """Parameters that this rank converts in each publication."""
        self._parts: dict[str, list[_Part]] = defaultdict(list)
        for name, part in trace.parts:
            if part.task not in trace.unknown and part.task not in gathered:
                self._parts[name].append(part)
        # Those that were run alone remember what other ranks do not have.
        self._fresh = [_tasks(bridge, models)[place] for place in gathered] if gathered else []
        self._converted = [tasks[place] for place in converted]
        if gathered:
            what = "%s parameters are gathered in each publication, such as %s"
            _LOG.info(what, len(gathered), self.gathered[0])

    def __call__(self) -> "dict[str, Any] | Iterator[tuple[str, Any]]":
        """Return what this rank has now: an iterator if there is something to gather."""
        found: dict[str, Any] = {
            name: [self._now(part) for part in parts] for name, parts in self._parts.items()
        }
        if self._converted:
            with alone(0):
                found |= dict(self._export(self._converted))
        return self._with_gathered(found) if self.gathered else found

    def _with_gathered(self, found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        yield from found.items()
        yield from self._export(self._fresh)

    def _now(self, part: _Part) -> LocalPart:
        tensor = self._tasks[part.task].param_weight.detach()
        if not tensor.is_contiguous():
            name = self._tasks[part.task].global_param_name
            raise SchemaMismatch(f"{name!r} is not contiguous any more; make the source anew")
        view = tensor.as_strided(part.size, part.strides, tensor.storage_offset() + part.offset)
        return LocalPart(view, part.shape, start=part.start)

    def _export(self, tasks: Sequence[Any]) -> Iterable[tuple[str, torch.Tensor]]:
        exported = self._bridge.export_hf_weights(
            self._models,
            cpu=False,
            show_progress=False,
            conversion_tasks=list(tasks),
            merge_adapter_weights=False,
        )
        return ((each[0], each[1]) for each in exported)

    def _is_local(self, place: int) -> bool:
        """Whether a task needs nothing of other ranks."""
        task = self._tasks[place]
        if not _is_own(task):
            return False
        try:
            with alone(0) as others:
                found = list(self._export([task]))
        except Exception:  # noqa: BLE001 -- whatever it is, all ranks can still export it together
            return False
        return bool(found) and not others.num_filled


def _tasks(bridge: Any, models: list[Any]) -> list[Any]:
    """Return Bridge's conversion tasks, the same list on all ranks that export together."""
    try:
        tasks = list(bridge.get_conversion_tasks(models))
    except ValueError as exc:
        raise UsageError(f"Megatron-Bridge cannot list its conversions: {exc}") from exc
    for task in tasks:
        if task is None:
            raise SchemaMismatch("Megatron-Bridge has no conversion of a parameter; its log says of which")
        if "to_wrap." in task.global_param_name:
            raise SchemaMismatch(f"{task.global_param_name!r} has an adapter, which is merged; {_INSTEAD}")
        if hasattr(task.param_weight, "placements"):
            raise SchemaMismatch(f"{task.global_param_name!r} is sharded by Megatron-FSDP; {_INSTEAD}")
    return tasks


def _is_own(task: Any) -> bool:
    return isinstance(task.param_weight, torch.Tensor)


class _Trace:
    """Where Bridge puts the elements of this rank's parameters."""

    def __init__(
        self, export: Callable[[Sequence[Any]], Iterable[tuple[str, torch.Tensor]]], tasks: list[Any]
    ) -> None:
        """Trace; a task of another rank is None."""
        self._export, self._tasks = export, tasks
        self.parts: list[tuple[str, _Part]] = []
        self.unknown = {place for place, task in enumerate(tasks) if task is not None and not _is_plain(task)}
        """Places of tasks whose tensors are computed, or whose conversion needs other ranks."""
        self._firsts, self._end = self._numbering()
        self._last = -1, torch.empty(0)
        # Numbers that show where elements went, then other numbers, then weights of the real dtype: what is
        # computed by any rule cannot be a move of all three.
        self._moved: dict[str, list[_Part]] = {}
        self._pass(self._mapped, self._numbers)
        self._pass(self._checked, lambda place: scrambled(self._numbers(place)))
        checked = {name for name, _ in self._pass(self._checked_values, self._random)}
        for name, parts in self._moved.items():
            if name in checked:
                self.parts += [(name, part) for part in parts]
            else:
                self.unknown |= {part.task for part in parts}
        reached = {part.task for _, part in self.parts}
        # A parameter that nothing is exported of here may still be exported when all ranks do so.
        self.unknown |= {place for place in self._own() if place not in reached}

    def _own(self) -> list[int]:
        return [p for p, task in enumerate(self._tasks) if task is not None and p not in self.unknown]

    def _numbering(self) -> tuple[list[int], int]:
        """Return the first number of each task's parameter, ascending, and what is beyond the last."""
        firsts, end = [], 0
        for task in self._tasks:
            firsts.append(end)
            # A gap, so that no line of numbers goes on from one parameter to the next.
            end += 0 if task is None else task.param_weight.numel() + 1
        return firsts, end

    def _numbers(self, place: int) -> torch.Tensor:
        weight = self._tasks[place].param_weight
        return numbered(self._firsts[place], tuple(weight.shape), weight.device)

    def _random(self, place: int) -> torch.Tensor:
        """Return random weights of a parameter's dtype, the same at each call."""
        if self._last[0] != place:
            weight = self._tasks[place].param_weight
            generator = torch.Generator(weight.device).manual_seed(place)
            found = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
            self._last = place, found.uniform_(-2, 2, generator=generator).to(weight.dtype)
        return self._last[1]

    def _pass(
        self, check: Callable[[str, torch.Tensor], Any], values: Callable[[int], torch.Tensor]
    ) -> list[tuple[str, Any]]:
        """Export values in place of parameters; begin anew without a task that fails, until none does."""
        while True:
            at = [-1]
            probes = [_Probe(self._tasks[place], place, values, at) for place in self._own()]
            found: list[tuple[str, Any]] = []
            try:
                with alone(FOREIGN):
                    for name, tensor in self._export(probes):
                        found.append((name, check(name, tensor)))
            except Exception as exc:
                if at[0] < 0:
                    raise
                task = self._tasks[at[0]]
                _LOG.info("%s is not published as views: %s", task.global_param_name, exc)
                self._drop(at[0])
                continue
            return found

    def _drop(self, place: int) -> None:
        """Leave out a task, and those whose tensors are exported as one with it."""
        key = getattr(self._tasks[place].mapping, "group_key", None)
        self.unknown |= {place} | {
            each
            for each in self._own()
            if key is not None and getattr(self._tasks[each].mapping, "group_key", None) == key
        }

    def _mapped(self, name: str, tensor: torch.Tensor) -> None:
        """Take down where numbers went."""
        shape = tuple(tensor.shape)
        self._moved[name] = [self._part(shape, box) for box in boxes_of(tensor, self._end)]

    def _checked(self, name: str, tensor: torch.Tensor) -> None:
        """Raises NoMap where the other numbers did not go where the first did."""
        parts = self._known(name, tensor)
        found = [part.box(self._firsts[part.task]) for part in parts]
        numbers = filled_in(tuple(tensor.shape), found, FOREIGN, tensor.device)
        expected = torch.where(numbers == FOREIGN, FOREIGN, scrambled(numbers))
        if tensor.dtype != torch.int64 or not torch.equal(expected, tensor):
            raise NoMap(_COMPUTED)

    def _checked_values(self, name: str, tensor: torch.Tensor) -> None:
        """Raises NoMap where elements in the parameter's own dtype are not the parameter's."""
        for part in self._known(name, tensor):
            view = self._random(part.task).as_strided(part.size, part.strides, part.offset)
            here = tensor[tuple(slice(at, at + n) for at, n in zip(part.start, part.size, strict=True))]
            if view.dtype != here.dtype or not torch.equal(view, here):
                raise NoMap(_COMPUTED)

    def _known(self, name: str, tensor: torch.Tensor) -> list[_Part]:
        parts = self._moved.get(name)
        if parts is None or any(part.shape != tuple(tensor.shape) for part in parts):
            raise NoMap("its name or shape depends on the values")
        return parts

    def _part(self, shape: tuple[int, ...], box: Box) -> _Part:
        """Return a box as a part of a parameter."""
        place = bisect_right(self._firsts, box.first) - 1
        first = self._firsts[place]
        if any(stride < 0 for stride in box.strides):
            raise NoMap("its elements are in the opposite order")
        if box.last() >= first + self._tasks[place].param_weight.numel():
            raise NoMap("a line of its elements is of two parameters")
        return _Part(place, shape, box.start, box.size, box.first - first, box.strides)


def _is_plain(task: Any) -> bool:
    """Whether a parameter has its elements in its memory, in order."""
    weight = task.param_weight
    return type(weight) in {torch.Tensor, torch.nn.Parameter} and weight.is_contiguous()


class _Probe:
    """A task with other values in place of its parameter, which are made when they are asked for."""

    def __init__(self, task: Any, place: int, values: Callable[[int], torch.Tensor], at: list[int]) -> None:
        self._task, self._place, self._values, self._at = task, place, values, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    @property
    def param_weight(self) -> torch.Tensor:
        self._at[0] = self._place
        values = self._values(self._place)
        for name in ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce"):
            if hasattr(self._task.param_weight, name):
                setattr(values, name, getattr(self._task.param_weight, name))
        return values
