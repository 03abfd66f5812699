"""Find where a model's own loader puts each element of a checkpoint, without loading anything.

`load_weights` runs once on meta tensors, which have shapes and no elements. A dispatch mode sees every
operation. Copies into the model are recorded instead of executed, and followed back through slices,
transpositions, gathers and copies of copies. What is calculated instead of copied has no place of its own,
and is listed as such. All else that touches the checkpoint's tensors runs on shapes alone. What does not
touch them, such as working out which experts a rank has, runs for real.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from patchstore.bucket import schema_text
from patchstore.bucket.records import Schema
from patchstore.errors import SchemaMismatch, UsageError
from vllm_plugin.map.provenance import (
    MAX_COPIES,
    Provenance,
    Runtime,
    Trace,
    constant,
    memory,
    tensors_of,
    within,
)
from vllm_plugin.map.regions import View

aten = torch.ops.aten


def _clone(known: Provenance, result: torch.Tensor, source: torch.Tensor, **_: Any) -> bool:
    known.copy(result, source)
    return True


def _cat(known: Provenance, result: torch.Tensor, given: list[torch.Tensor], dim: int = 0) -> bool:
    start = 0
    for each in given:
        if each.dim() == 1 and each.numel() == 0:
            continue
        known.copy(result.narrow(dim, start, each.shape[dim]), each)
        start += each.shape[dim]
    return True


def _stack(known: Provenance, result: torch.Tensor, given: list[torch.Tensor], dim: int = 0) -> bool:
    return _cat(known, result, [each.unsqueeze(dim) for each in given], dim)


def _repeat(known: Provenance, result: torch.Tensor, source: torch.Tensor, repeats: list[int]) -> bool:
    shape = (*(1,) * (len(repeats) - source.dim()), *source.shape)
    split = [n for pair in zip(repeats, shape, strict=True) for n in pair]
    once = [n for size in shape for n in (1, size)]
    known.copy(result.view(split), source.view(once).expand(split))
    return True


def _index_rows(known: Provenance, result: torch.Tensor, source: torch.Tensor, indices: list[Any]) -> bool:
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    return len(dims) == 1 and _select_rows(known, result, source, dims[0], indices[dims[0]])


def _select_rows(
    known: Provenance, result: torch.Tensor, source: torch.Tensor, dim: int, rows: torch.Tensor
) -> bool:
    """Follow a gather of whole rows along one dimension, by indices that are known."""
    runs = _runs(known, rows, source.shape[dim])
    if runs is None:
        return False
    dim %= source.dim()
    listed = result.unsqueeze(dim) if rows.dim() == 0 else result.flatten(dim, dim + rows.dim() - 1)
    if memory(listed) != memory(result):
        return False  # two dimensions of indices that do not lie together
    for first, row, count in runs:
        known.copy(listed.narrow(dim, first, count), source.narrow(dim, row, count))
    return True


def _runs(known: Provenance, rows: torch.Tensor, size: int) -> list[tuple[int, int, int]] | None:
    """Ascending runs of row numbers as (position in the list, first row, length), if they are known."""
    if known.is_unknown(rows) or rows.is_meta or rows.is_floating_point() or rows.dtype == torch.bool:
        return None
    runs: list[tuple[int, int, int]] = []
    for i, row in enumerate(rows.flatten().remainder(size).tolist()):
        if runs and row == runs[-1][1] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((i, row, 1))
    return runs if len(runs) <= MAX_COPIES else None


def scatter(known: Provenance, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Follow a write to whole rows along one dimension, by indices that are known."""
    if func is aten.index_put_.default and not (args[3] if len(args) > 3 else kwargs.get("accumulate")):
        target, indices, source = args[:3]
        indices = without_masks(known, indices)
        dims = [dim for dim, index in enumerate(indices) if index is not None]
        if len(dims) != 1:
            return False
        dim, rows = dims[0], indices[dims[0]]
    elif func is aten.index_copy_.default:
        target, dim, rows, source = args
    else:
        return False
    if rows.dim() != 1 or (runs := _runs(known, rows, target.shape[dim])) is None:
        return False
    shape = list(target.shape)
    shape[dim] = len(rows)
    source = source.expand(shape)
    for first, row, count in runs:
        known.copy(target.narrow(dim, row, count), source.narrow(dim, first, count))
    return True


def without_masks(known: Provenance, indices: Iterable[Any]) -> list[Any]:
    """Turn known masks into row numbers: without elements, a mask selects an unknown number."""
    found: list[Any] = []
    for index in indices:
        is_mask = index is not None and index.dtype == torch.bool
        if is_mask and not known.is_unknown(index) and not index.is_meta:
            found += index.nonzero(as_tuple=True)
        else:
            found.append(index)
    return found


def _pad(
    known: Provenance, result: torch.Tensor, source: torch.Tensor, pad: list[int], value: float = 0
) -> bool:
    _constant(known, result, float(value))
    for k in range(len(pad) // 2):
        dim, (low, high) = source.dim() - 1 - k, pad[2 * k : 2 * k + 2]
        source = source.narrow(dim, max(0, -low), source.shape[dim] - max(0, -low) - max(0, -high))
        result = result.narrow(dim, max(0, low), source.shape[dim])
    known.copy(result, source)
    return True


def _constant(known: Provenance, result: torch.Tensor, *args: Any, **_: Any) -> bool:
    """Follow a result of which only the shape is the given tensor's."""
    is_unknown = any(math.isnan(value) for value in args if isinstance(value, float))
    known.taint(result, known.blamed(is_unknown))
    return True


FOLLOWED: Mapping[Any, Callable[..., bool]] = {
    aten.clone.default: _clone,
    aten._to_copy.default: _clone,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.repeat.default: _repeat,
    aten.index.Tensor: _index_rows,
    aten.index_select.default: _select_rows,
    aten.constant_pad_nd.default: _pad,
    aten.zeros_like.default: _constant,
    aten.ones_like.default: _constant,
    aten.full_like.default: _constant,
    aten.new_zeros.default: _constant,
    aten.new_ones.default: _constant,
    aten.new_full.default: _constant,
}


_EMPTY = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
_FILLS = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default})
_REMAKES = frozenset(
    {
        aten.resize_.default,
        aten.resize_as_.default,
        aten.set_.default,
        aten.set_.source_Storage,
        aten.set_.source_Storage_storage_offset,
        aten.set_.source_Tensor,
    }
)


class KnownIndices(TorchFunctionMode):
    """Keeps lists of indices known: tensors without elements would make them tensors without elements too."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ or func is torch.Tensor.__setitem__:
            args = (args[0], _indexed(args[1]), *args[2:])
        elif func is torch.Tensor.data_ptr and args[0].is_meta:
            # A kernel that was given this address, 0, would end the process.
            raise UsageError("vLLM hands weights to a kernel after loading, which cannot be traced")
        return func(*args, **(kwargs or {}))


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a loader, and tells `Provenance` what it does."""

    def __init__(self, provenance: Provenance) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = provenance

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func is aten._unsafe_view.default:
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            self._known.copy(args[0], args[1])
            return args[0]
        if func is aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                self._known.copy(target, source)
            return None
        if func in _FILLS:
            self._fill(func, args)
            return args[0]
        if func is aten._local_scalar_dense.default:
            return self._number(func, args[0])
        if func is aten._to_copy.default and not self._known.is_unknown(args[0]):
            # Indices that are moved to where the checkpoint's tensors are must stay known.
            kwargs = {name: value for name, value in kwargs.items() if value != torch.device("meta")}
        return self._other(func, args, kwargs)

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = list(_flat((*args, *kwargs.values())))
        written = _written(func, args, kwargs)
        is_harmless = all(self._known.index(tensor) is None for tensor in written)
        if is_harmless and not any(self._known.is_unknown(tensor) for tensor in tensors):
            made = func(*args, **kwargs)
            self._known.note(_flat((made,)), written, is_empty=func in _EMPTY)
            return made
        if not written:
            return self._derive(func, args, kwargs, tensors)
        if func in _REMAKES:
            raise UsageError(
                f"the model's loader gives tensors other memory ({func}), so it cannot be traced"
            )
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if not scatter(self._known, func, args, kwargs):
            self._change(written, tensors)
        return written[0] if len(func._schema.returns) == 1 else tuple(written) or None

    def _fill(self, func: Any, args: tuple[Any, ...]) -> None:
        target, value = args[0], args[1] if len(args) > 1 else 0
        if isinstance(value, torch.Tensor):
            self._known.copy(target, value.expand(target.shape))
            return
        names = self._known.blamed(isinstance(value, float) and math.isnan(value))
        index, node = self._known.index(target), self._known.node(target)
        if index is not None:
            self._known.write(index, target, names=names)
        elif node is None and not names:
            self._known.wrote(target)
            func(*args)
        else:
            node = node or self._known.adopted(target)
            is_known = not names and not node.tainted and target.element_size() == node.dtype.itemsize
            if not is_known or not node.put(View.of(target), constant(target)):
                node.taint(names)

    def _number(self, func: Any, tensor: torch.Tensor) -> Any:
        """Answer a loader that reads an element as a number. Some fill parameters of one element by value."""
        node = self._known.node(tensor)
        self._known.read_number(tensor)
        if node is None:
            return func(tensor)
        if tensor.dtype == torch.bool:
            raise UsageError(
                f"the model's loader {self._known.at} decides by elements, so it cannot be traced"
            )
        # Whatever is calculated from it is recognised by being no number.
        return math.nan if tensor.is_floating_point() else 0

    def _change(self, written: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        """Note that an operation calculates in place, or into tensors that it was given."""
        names = {name for tensor in tensors for name in self._known.names(tensor)}
        company = self._known.company(tensors)
        for tensor in written:
            index = self._known.index(tensor)
            if index is not None:
                self._known.write(index, tensor, names=names, company=company)
            else:
                node = self._known.node(tensor) or self._known.adopted(tensor)
                node.taint(names)
                node.company |= company

    def _derive(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """Run an operation on shapes alone, and say where its result's elements come from."""
        names = {name for tensor in tensors for name in self._known.names(tensor)}
        if torch.Tag.data_dependent_output in func.tags:
            listed = ", ".join(sorted(names)[:3])
            raise UsageError(
                f"the model's loader looks at the elements of {listed} ({func}), so it cannot be traced"
            )
        if func is aten.index.Tensor:
            args = (args[0], without_masks(self._known, args[1]))
        made = func(
            *_on_meta(args), **_on_meta({**kwargs, **({"device": "meta"} if "device" in kwargs else {})})
        )
        given = {memory(tensor) for tensor in tensors}
        for result in _flat((made,)):
            if memory(result) in given:
                continue  # a view: its memory says where it came from
            node = self._known.new_node(result)
            if func in _EMPTY:
                continue
            node.company = self._known.company(tensors)
            follow = FOLLOWED.get(func)
            if follow is None or not follow(self._known, result, *args, **kwargs):
                node.taint(names)
        return made


def _flat(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _flat(value)


def _on_meta(value: Any) -> Any:
    """The same arguments without elements, since no operation mixes real tensors with meta ones."""
    if isinstance(value, torch.Tensor):
        return value if value.is_meta else value.to("meta")
    if isinstance(value, list | tuple):
        return type(value)(_on_meta(each) for each in value)
    if isinstance(value, dict):
        return {name: _on_meta(each) for name, each in value.items()}
    return value


@cache
def _outputs(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _indexed(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_indexed(each) for each in index)
    if isinstance(index, list) and index and all(isinstance(each, int) for each in index):
        return torch.tensor(index, device="cpu")
    return index


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return list(_flat(args[i] if i < len(args) else kwargs.get(name) for i, name in _outputs(func)))


_REGISTERED = ("_parameters", "_buffers", "_modules")


def trace(
    models: Iterable[torch.nn.Module],
    schema: Schema,
    load: Callable[[torch.nn.Module, Iterator[tuple[str, torch.Tensor]]], object],
) -> Trace:
    """Trace the loaders of models that are loaded from one checkpoint. Nothing is written to them.

    Of what models share the last one decides. `load` calls a loader in the surroundings that it expects.
    """
    models = list(models)
    provenance = Provenance(models, schema)
    tracer = Tracer(provenance)
    for model in models:
        before = Attributes(model)
        try:
            with torch.no_grad(), tracer, KnownIndices(), same_parameters(model):
                load(model, provenance.checkpoint())
            before.check(has_read_numbers=provenance.has_read_numbers)
        except (KeyError, ValueError, AttributeError, AssertionError, TypeError) as exc:
            # What vLLM's loaders raise for names and shapes that their model does not have.
            raise SchemaMismatch(
                schema_text.explain(
                    schema,
                    f"the model's loader failed {provenance.at}, of {len(schema.tensors):,} names: "
                    f"{type(exc).__name__}: {schema_text.brief(str(exc))}",
                )
            ) from exc
        except (RuntimeError, NotImplementedError, IndexError) as exc:
            raise UsageError(
                f"the model's loader cannot be traced; it failed {provenance.at}: "
                f"{type(exc).__name__}: {schema_text.brief(str(exc))}"
            ) from exc
        finally:
            before.restore()
    return provenance.result()


def untraced(models: Iterable[torch.nn.Module], schema: Schema) -> Trace:
    """Say that every name is calculated, those of a layer together, and may be written anywhere.

    For models of which vLLM loads layers as a whole, because it quantizes them on the way.
    """
    runtimes: dict[int, tuple[list[str], torch.Tensor]] = {}
    for model in models:
        parameters = model.named_parameters(remove_duplicate=False)
        for name, tensor in (*parameters, *model.named_buffers()):
            runtimes.setdefault(memory(tensor), ([], tensor))[0].append(name)
    layers: dict[str, set[str]] = {}
    for spec in schema.tensors:
        layers.setdefault(_layer(spec.name), set()).add(spec.name)
    everything = frozenset(range(len(runtimes)))
    return Trace(
        runtimes=tuple(
            Runtime(names=tuple(names), storage=tensor.untyped_storage(), dtype=tensor.dtype)
            for names, tensor in runtimes.values()
        ),
        regions={},
        computed=tuple((frozenset(names), everything) for names in layers.values()),
        uncovered={},
    )


def _layer(name: str) -> str:
    """The part of a name up to its first number. Names without one are a layer too, as they may be fused."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else ""


@contextmanager
def same_parameters(model: torch.nn.Module) -> Iterator[None]:
    """Put back parameters that a loader replaces inside of the block, with what it put into the new ones.

    vLLM's backend for models of transformers makes the bias of an output layer anew each time it loads one.
    """
    held = [(module, dict(module._parameters)) for module in model.modules()]
    try:
        yield
    finally:
        for module, before in held:
            for name, then in before.items():
                now = module._parameters.get(name)
                if now is None or then is None or now is then:
                    continue
                if (now.shape, now.dtype, now.device) == (then.shape, then.dtype, then.device):
                    then.data.copy_(now.data)
                    module._parameters[name] = then


class Attributes:
    """What a model's modules hold, to put it back after a loader replaced it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [
            (path, module, dict(vars(module)), [dict(vars(module)[kind]) for kind in _REGISTERED])
            for path, module in model.named_modules()
        ]
        self._tensors = [(name, tensor, tensor.data) for name, tensor in tensors_of(model)]

    def check(self, *, has_read_numbers: bool) -> None:
        """Refuse a loader that a trace says too little of. If it has read elements as numbers, those that it
        keeps may come from them.
        """
        moved: list[str] = []
        made: list[str] = []
        for name, tensor, data in self._tensors:
            if tensor.data_ptr() != data.data_ptr() or tensor.device != data.device:
                moved.append(name)
        for path, module, values, registered in self._modules:
            for kind, then in zip(_REGISTERED, registered, strict=True):
                for name, value in vars(module)[kind].items():
                    if value is not then.get(name):
                        (moved if then.get(name) is not None else made).append(within(path, name))
            for name, value in vars(module).items():
                is_number = has_read_numbers and isinstance(value, bool | int | float)
                if value is not values.get(name) and (is_number or _is_unknown(value)):
                    moved.append(within(path, name))
        if moved:
            raise UsageError(
                f"the model's loader gives {len(moved)} parameters or attributes other memory, or another "
                f"value, instead of writing to them, such as {moved[0]!r}, so it cannot be traced"
            )
        if made:
            raise UsageError(
                f"the model does not have {made[0]!r} before its loader makes it: start vllm from a "
                "checkpoint that has it, without --load-format dummy"
            )

    def restore(self) -> None:
        for _, module, values, registered in self._modules:
            vars(module).clear()
            vars(module).update(values)
            for kind, then in zip(_REGISTERED, registered, strict=True):
                values[kind].clear()
                values[kind].update(then)
        for _, tensor, data in self._tensors:
            if _place(tensor) != _place(data):
                tensor.data = data


def _is_unknown(value: object) -> bool:
    """Whether an attribute can only be a checkpoint's, as a trace gives it to loaders."""
    return (isinstance(value, torch.Tensor) and value.is_meta) or (
        isinstance(value, float) and math.isnan(value)
    )


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()
