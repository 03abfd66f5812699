"""Follow what a loader does with tensors that have shapes and no elements.

A dispatch mode sees every operation. Copies into the model are recorded instead of executed, and followed
back through slices, transpositions, gathers and copies of copies. `moves` has the rules for operations that
only move elements. All else that touches the checkpoint's tensors runs on shapes alone. What does not touch
them, such as working out which experts a rank has, runs for real.
"""

import math
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from patchstore.errors import UsageError
from vllm_plugin.moves import FOLLOWED, scatter, without_masks
from vllm_plugin.provenance import Provenance, constant, memory
from vllm_plugin.regions import View

aten = torch.ops.aten

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
    """Which arguments an operation writes to."""
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
    """The tensors that an operation writes to."""
    return list(_flat(args[i] if i < len(args) else kwargs.get(name) for i, name in _outputs(func)))
