"""Follow what a loader does with tensors that have shapes and no elements.

A dispatch mode sees every operation. Copies into the model are written down instead of executed, and followed
back through slices, transpositions, gathers and copies of copies. All else that touches the checkpoint's
tensors runs on shapes alone; what does not, such as working out which experts are whose, runs for real.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.format.records import Schema
from patchstore.tensors.bits import TORCH_DTYPES
from vllm_plugin.regions import Region, View, boxed, compose, is_nested, normal, onto, outside
from vllm_plugin.resolve import Runtime, Trace, Write, meet, resolve

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

_MAX_COPIES = 1024
"""A copy that repeats its source, or gathers runs of rows, more often than this is treated as calculated."""


@dataclass(slots=True)
class _Node:
    """What is known of a tensor's memory that is not the model's: checkpoint data, on its way."""

    shape: tuple[int, ...]
    """As the memory is laid out, slowest dimension first."""
    dtype: torch.dtype
    parts: list[tuple[str | None, Region]] = field(default_factory=list)
    """Stored name, or None for a constant, and where its elements lie: targets are boxes of `shape`."""
    tainted: set[str] = field(default_factory=set)
    """Names from which it was calculated; it then has no parts."""
    company: set[str] = field(default_factory=set)
    """All names that the loader read before it put this together, also those of elements that are gone."""

    @property
    def whole(self) -> Region:
        view = View.contiguous(self.shape)
        return Region(source=view, target=view)

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.parts if name is not None} | self.tainted

    def taint(self, names: Collection[str]) -> None:
        """Say that it was calculated, from what it held and from these names."""
        self.tainted = self.names.union(names)
        self.parts = [] if self.tainted else [(None, self.whole)]

    def put(self, where: View, parts: Iterable[tuple[str | None, Region]]) -> bool:
        """Note what a view of it holds from now on; False if that cannot be said, and nothing was noted."""
        boxes = boxed(Region(source=where, target=where), self.shape)
        found = [(name, boxed(region, self.shape)) for name, region in parts]
        if boxes is None or any(each is None for _, each in found):
            return False
        for box in boxes:
            self.parts = [
                (name, rest) for name, part in self.parts for rest in outside(part, box.target, self.shape)
            ]
        self.parts += [(name, each) for name, several in found for each in several or ()]
        return True


class KnownIndices(TorchFunctionMode):
    """Keeps lists of indices known: tensors without elements would make them tensors without elements too."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__ or func is torch.Tensor.__setitem__:
            args = (args[0], _indexed(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, models: Iterable[torch.nn.Module], schema: Schema) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.at = "before it read a tensor"
        self._specs = schema.by_name()
        self._tied = schema.tied
        self._current: str | None = None
        self._looked: set[str] = set()
        """Names of which a loader has read an element as a number."""
        self._pending: set[str] = set()
        """Those of them that it has not used since, as far as one can see."""
        self._nodes: dict[int, _Node] = {}
        self._made: dict[int, tuple[int, ...]] = {}
        """Memory that a loader made for itself, and how it is laid out."""
        self._unwritten: set[int] = set()
        """Such memory that nothing was written to."""
        self._known: list[StorageWeakRef] = []
        """Keep the address of a storage from being used again, which is what tells storages apart."""
        self._runtime: dict[int, int] = {}
        self._writes: list[list[Write]] = []
        self._parameters: list[list[tuple[str, View]]] = []
        found: list[tuple[torch.UntypedStorage, torch.dtype]] = []
        names: list[dict[str, None]] = []
        for model in models:
            for name, tensor in tensors_of(model):
                index = self._runtime.setdefault(memory(tensor), len(found))
                if index == len(found):
                    found.append((tensor.untyped_storage(), tensor.dtype))
                    names.append({})
                    self._writes.append([])
                    self._parameters.append([])
                names[index][name] = None
                if isinstance(tensor, torch.nn.Parameter):
                    self._parameters[index].append((name, View.of(tensor)))
        self.runtimes = tuple(
            Runtime(names=tuple(called), storage=storage, dtype=dtype)
            for called, (storage, dtype) in zip(names, found, strict=True)
        )

    def checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what a loader is given: every name of the checkpoint, tied ones too."""
        every = {name: name for name in self._specs} | dict(self._tied)
        for name, stored in sorted(every.items()):
            spec = self._specs[stored]
            tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
            node = self._new_node(tensor)
            node.parts = [(stored, node.whole)]
            node.company = {stored}
            self.at = f"when it had read up to {name!r} {tuple(tensor.shape)} {tensor.dtype}"
            self._current = stored
            yield name, tensor
        self._current = None

    # What a loader does.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func is aten._unsafe_view.default:
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            self._copy(args[0], args[1])
            return args[0]
        if func is aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                self._copy(target, source)
            return None
        if func in _FILLS:
            self._fill(func, args)
            return args[0]
        if func is aten._local_scalar_dense.default:
            return self._number(func, args[0])
        if func is aten._to_copy.default and not self._is_unknown(args[0]):
            # Indices that are moved to where the checkpoint's tensors are must stay known.
            kwargs = {name: value for name, value in kwargs.items() if value != torch.device("meta")}
        return self._other(func, args, kwargs)

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = list(_flat((*args, *kwargs.values())))
        written = _written(func, args, kwargs)
        is_harmless = all(self._index(tensor) is None for tensor in written)
        if is_harmless and not any(self._is_unknown(tensor) for tensor in tensors):
            made = func(*args, **kwargs)
            self._note(func, made, written)
            return made
        if not written:
            return self._derive(func, args, kwargs, tensors)
        if func in _REMAKES:
            raise UsageError(
                f"the model's loader gives tensors other memory ({func}), so it cannot be traced"
            )
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if not self._scatter(func, args, kwargs):
            self._change(written, tensors)
        return written[0] if len(func._schema.returns) == 1 else tuple(written) or None

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        index, node = self._index(target), self._node(source)
        names = self._names(source)
        if index is None:
            if node or names or self._node(target):
                self._into_node(target, source, names)
            else:
                self._unwritten.discard(memory(target))
                aten.copy_.default(target, source)
            return
        parts = self._parts(target, source, self.runtimes[index].dtype) if node else None
        if parts is not None and sum(region.num_elements for _, region in parts) == target.numel():
            copied = tuple(
                (name, each) for name, region in parts if name is not None for each in normal(region)
            )
            self._write(index, target, copied, company=node.company if node else ())
        else:
            # Calculated, or partly left as the loader's memory happened to be.
            self._write(index, target, names=names, company=node.company if node else ())

    def _write(
        self,
        index: int,
        target: torch.Tensor,
        parts: tuple[tuple[str, Region], ...] = (),
        names: Collection[str] = (),
        company: Collection[str] = (),
    ) -> None:
        runtime = self.runtimes[index]
        where = View.of(target)
        if target.element_size() != runtime.dtype.itemsize:
            # Parts of elements: count all of them.
            where = View.contiguous((runtime.storage.nbytes() // runtime.dtype.itemsize,))
        if where.num_elements:
            self._writes[index].append(
                Write(
                    target=where,
                    parts=parts,
                    names=frozenset(names),
                    company=frozenset(company),
                    during=self._current,
                )
            )

    def _parts(
        self, target: torch.Tensor, source: torch.Tensor, dtype: torch.dtype
    ) -> list[tuple[str | None, Region]] | None:
        """Where in the checkpoint the elements of a copy come from, or None if they were calculated.

        Args:
            dtype: of the elements of the memory that `target` is a view of.

        Returns:
            Regions whose targets are positions in `target`'s storage: not all of it where nothing was ever
            written to parts of `source`.
        """
        node = self._nodes[memory(source)]
        goal = View.of(target)
        if node.tainted or not is_nested(goal) or not self._is_moved(node, source, target, dtype):
            return None
        try:
            wide = source.expand(target.shape)
        except RuntimeError as exc:
            raise SchemaMismatch(
                f"the model's loader failed {self.at}: it copies {tuple(source.shape)} "
                f"to {tuple(target.shape)}"
            ) from exc
        view = View.of(wide)
        if math.prod(n for n, s in zip(view.shape, view.strides, strict=True) if s == 0) > _MAX_COPIES:
            return None
        found: list[tuple[str | None, Region]] = []
        for name, region in node.parts:
            if region.source == region.target and region.num_elements == math.prod(node.shape):
                # All of a tensor as the checkpoint has it, so that its positions are the checkpoint's.
                parts: list[Region] | None = [Region(source=view, target=goal)]
            else:
                parts = compose(view, [region], node.shape)
                parts = parts and [onto(part, goal) for part in parts]
            if parts is None:
                return None
            if name is None:
                parts = [Region(source=part.target, target=part.target) for part in parts]
            found += [(name, part) for part in parts]
        return found

    def _is_moved(self, node: _Node, source: torch.Tensor, target: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether a copy moves bits as they are, or widens bfloat16, which is the upper half of float32."""
        if source.element_size() != node.dtype.itemsize or target.element_size() != dtype.itemsize:
            return False
        if source.dtype == target.dtype:
            return True
        is_widened = source.dtype == torch.bfloat16 and target.dtype == torch.float32
        return is_widened and all(self._specs[name].dtype == "BF16" for name in node.names)

    def _into_node(self, target: torch.Tensor, source: torch.Tensor, names: Collection[str]) -> None:
        """Follow a copy into memory of the loader's own."""
        node = self._node(target) or self._adopted(target)
        if origin := self._node(source):
            node.company |= origin.company
            parts = self._parts(target, source, node.dtype)
        else:
            parts = _constant(target) if not names else None
        is_known = parts is not None and not node.tainted and target.element_size() == node.dtype.itemsize
        if not is_known or not node.put(View.of(target), parts or ()):
            node.taint(names)

    def _fill(self, func: Any, args: tuple[Any, ...]) -> None:
        target, value = args[0], args[1] if len(args) > 1 else 0
        if isinstance(value, torch.Tensor):
            self._copy(target, value.expand(target.shape))
            return
        names = self._blamed(isinstance(value, float) and math.isnan(value))
        index, node = self._index(target), self._node(target)
        if index is not None:
            self._write(index, target, names=names)
        elif node is None and not names:
            self._unwritten.discard(memory(target))
            func(*args)
        else:
            node = node or self._adopted(target)
            is_known = not names and not node.tainted and target.element_size() == node.dtype.itemsize
            if not is_known or not node.put(View.of(target), _constant(target)):
                node.taint(names)

    def _number(self, func: Any, tensor: torch.Tensor) -> Any:
        """Answer a loader that reads an element as a number. Some fill parameters of one element by value."""
        node = self._node(tensor)
        names = self._company([tensor]).union(self._names(tensor))
        self._pending |= names
        self._looked |= names
        if node is None:
            return func(tensor)
        if tensor.dtype == torch.bool:
            raise UsageError(f"the model's loader {self.at} decides by elements, so it cannot be traced")
        # Whatever is calculated from it is recognised by being no number.
        return math.nan if tensor.is_floating_point() else 0

    def _blamed(self, is_unknown: bool) -> Collection[str]:
        """Names that a constant may have been calculated from, by way of numbers."""
        if not is_unknown:
            return set(self._pending)
        names = set(self._pending or self._looked)
        self._pending.clear()
        return names

    def _change(self, written: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        """Note that an operation calculates in place, or into tensors that it was given."""
        names = {name for tensor in tensors for name in self._names(tensor)}
        company = self._company(tensors)
        for tensor in written:
            index = self._index(tensor)
            if index is not None:
                self._write(index, tensor, names=names, company=company)
            else:
                node = self._node(tensor) or self._adopted(tensor)
                node.taint(names)
                node.company |= company

    def _derive(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """Run an operation on shapes alone, and say where its result's elements come from."""
        names = {name for tensor in tensors for name in self._names(tensor)}
        if torch.Tag.data_dependent_output in func.tags:
            listed = ", ".join(sorted(names)[:3])
            raise UsageError(
                f"the model's loader looks at the elements of {listed} ({func}), so it cannot be traced"
            )
        if func is aten.index.Tensor:
            args = (args[0], self._without_masks(args[1]))
        made = func(
            *_on_meta(args), **_on_meta({**kwargs, **({"device": "meta"} if "device" in kwargs else {})})
        )
        given = {memory(tensor) for tensor in tensors}
        for result in _flat((made,)):
            if memory(result) in given:
                continue  # a view: its memory says where it came from
            node = self._new_node(result)
            if func in _EMPTY:
                continue
            node.company = self._company(tensors)
            follow = _FOLLOWED.get(func)
            if follow is None or not follow(self, result, *args, **kwargs):
                node.taint(names)
        return made

    # Operations that only move elements. Each returns whether it could be followed.

    def _clone(self, result: torch.Tensor, source: torch.Tensor, **_: Any) -> bool:
        self._copy(result, source)
        return True

    def _cat(self, result: torch.Tensor, given: list[torch.Tensor], dim: int = 0) -> bool:
        start = 0
        for each in given:
            if each.dim() == 1 and each.numel() == 0:
                continue
            self._copy(result.narrow(dim, start, each.shape[dim]), each)
            start += each.shape[dim]
        return True

    def _stack(self, result: torch.Tensor, given: list[torch.Tensor], dim: int = 0) -> bool:
        return self._cat(result, [each.unsqueeze(dim) for each in given], dim)

    def _repeat(self, result: torch.Tensor, source: torch.Tensor, repeats: list[int]) -> bool:
        shape = (*(1,) * (len(repeats) - source.dim()), *source.shape)
        split = [n for pair in zip(repeats, shape, strict=True) for n in pair]
        once = [n for size in shape for n in (1, size)]
        self._copy(result.view(split), source.view(once).expand(split))
        return True

    def _index_rows(self, result: torch.Tensor, source: torch.Tensor, indices: list[Any]) -> bool:
        dims = [dim for dim, index in enumerate(indices) if index is not None]
        return len(dims) == 1 and self._select_rows(result, source, dims[0], indices[dims[0]])

    def _select_rows(self, result: torch.Tensor, source: torch.Tensor, dim: int, rows: torch.Tensor) -> bool:
        """Follow a gather of whole rows along one dimension, by indices that are known."""
        runs = self._runs(rows, source.shape[dim])
        if runs is None:
            return False
        dim %= source.dim()
        listed = result.unsqueeze(dim) if rows.dim() == 0 else result.flatten(dim, dim + rows.dim() - 1)
        if memory(listed) != memory(result):
            return False  # two dimensions of indices that do not lie together
        for first, row, count in runs:
            self._copy(listed.narrow(dim, first, count), source.narrow(dim, row, count))
        return True

    def _runs(self, rows: torch.Tensor, size: int) -> list[tuple[int, int, int]] | None:
        """Ascending runs of row numbers as (position in the list, first row, length), if they are known."""
        if self._is_unknown(rows) or rows.is_meta or rows.is_floating_point() or rows.dtype == torch.bool:
            return None
        runs: list[tuple[int, int, int]] = []
        for i, row in enumerate(rows.flatten().remainder(size).tolist()):
            if runs and row == runs[-1][1] + runs[-1][2]:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
            else:
                runs.append((i, row, 1))
        return runs if len(runs) <= _MAX_COPIES else None

    def _scatter(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Follow a write to whole rows along one dimension, by indices that are known."""
        if func is aten.index_put_.default and not (args[3] if len(args) > 3 else kwargs.get("accumulate")):
            target, indices, source = args[:3]
            indices = self._without_masks(indices)
            dims = [dim for dim, index in enumerate(indices) if index is not None]
            if len(dims) != 1:
                return False
            dim, rows = dims[0], indices[dims[0]]
        elif func is aten.index_copy_.default:
            target, dim, rows, source = args
        else:
            return False
        if rows.dim() != 1 or (runs := self._runs(rows, target.shape[dim])) is None:
            return False
        shape = list(target.shape)
        shape[dim] = len(rows)
        source = source.expand(shape)
        for first, row, count in runs:
            self._copy(target.narrow(dim, row, count), source.narrow(dim, first, count))
        return True

    def _without_masks(self, indices: Iterable[Any]) -> list[Any]:
        """Turn known masks into row numbers: without elements, a mask selects nobody knows how many."""
        found: list[Any] = []
        for index in indices:
            is_mask = index is not None and index.dtype == torch.bool
            if is_mask and not self._is_unknown(index) and not index.is_meta:
                found += index.nonzero(as_tuple=True)
            else:
                found.append(index)
        return found

    def _pad(self, result: torch.Tensor, source: torch.Tensor, pad: list[int], value: float = 0) -> bool:
        self._constant(result, float(value))
        for k in range(len(pad) // 2):
            dim, (low, high) = source.dim() - 1 - k, pad[2 * k : 2 * k + 2]
            source = source.narrow(dim, max(0, -low), source.shape[dim] - max(0, -low) - max(0, -high))
            result = result.narrow(dim, max(0, low), source.shape[dim])
        self._copy(result, source)
        return True

    def _constant(self, result: torch.Tensor, *args: Any, **_: Any) -> bool:
        """Follow a result of which only the shape is the given tensor's."""
        is_unknown = any(math.isnan(value) for value in args if isinstance(value, float))
        self._nodes[memory(result)].taint(self._blamed(is_unknown))
        return True

    # Which memory a tensor is in, and what is known of it.

    def _index(self, tensor: torch.Tensor) -> int | None:
        return self._runtime.get(memory(tensor))

    def _node(self, tensor: torch.Tensor) -> _Node | None:
        return self._nodes.get(memory(tensor))

    def _names(self, tensor: torch.Tensor) -> Collection[str]:
        """Names whose elements are in a tensor, or that it was calculated from."""
        node, index = self._node(tensor), self._index(tensor)
        if node is not None:
            return node.names
        if index is not None:
            writes = [write for write in self._writes[index] if write.parts or write.names]
            where = View.of(tensor)
            return {name for write in writes if meet(write.target, where) for name in write.sources}
        if not self._looked or tensor.is_meta:
            return self._blamed(False)
        return self._blamed(tensor.is_floating_point() and bool(tensor.isnan().any()))

    def _company(self, tensors: Iterable[torch.Tensor]) -> set[str]:
        nodes = (self._node(tensor) for tensor in tensors)
        return {name for node in nodes if node is not None for name in node.company}

    def _is_unknown(self, tensor: torch.Tensor) -> bool:
        """Whether its elements are, or may come from, the checkpoint's."""
        return self._node(tensor) is not None or (
            self._index(tensor) is not None and bool(self._names(tensor))
        )

    def _note(self, func: Any, made: Any, written: list[torch.Tensor]) -> None:
        """Remember memory that a loader made for itself, should it put elements of the checkpoint there."""
        for tensor in written:
            self._unwritten.discard(memory(tensor))
        for tensor in _flat((made,)):
            if memory(tensor) not in self._made and self._index(tensor) is None:
                self._made[memory(tensor)] = _layout(tensor)
                self._known.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
                if func in _EMPTY:
                    self._unwritten.add(memory(tensor))

    def _new_node(self, tensor: torch.Tensor) -> _Node:
        node = self._nodes[memory(tensor)] = _Node(shape=_layout(tensor), dtype=tensor.dtype)
        self._known.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
        return node

    def _adopted(self, tensor: torch.Tensor) -> _Node:
        """Follow memory from now on that held constants so far, or nothing."""
        node = self._new_node(tensor)
        shape = self._made.get(memory(tensor), node.shape)
        if math.prod(shape) == math.prod(node.shape):
            node.shape = shape
        if memory(tensor) not in self._unwritten:
            node.parts = [(None, node.whole)]
        return node

    def result(self) -> Trace:
        """Say what came of it."""
        return resolve(self.runtimes, self._writes, self._parameters, frozenset(self._specs))


_FOLLOWED: Mapping[Any, Callable[..., bool]] = {
    aten.clone.default: Tracer._clone,
    aten._to_copy.default: Tracer._clone,
    aten.cat.default: Tracer._cat,
    aten.stack.default: Tracer._stack,
    aten.repeat.default: Tracer._repeat,
    aten.index.Tensor: Tracer._index_rows,
    aten.index_select.default: Tracer._select_rows,
    aten.constant_pad_nd.default: Tracer._pad,
    aten.zeros_like.default: Tracer._constant,
    aten.ones_like.default: Tracer._constant,
    aten.full_like.default: Tracer._constant,
    aten.new_zeros.default: Tracer._constant,
    aten.new_ones.default: Tracer._constant,
    aten.new_full.default: Tracer._constant,
}


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that a loader may write to: parameters, buffers, and tensors that are plain attributes."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield (f"{path}.{name}" if path else name), value


def _constant(target: torch.Tensor) -> list[tuple[str | None, Region]]:
    """What is put into a tensor that is set to a constant."""
    where = View.of(target)
    return [(None, Region(source=where, target=where))]


def memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _layout(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor's memory, slowest dimension first."""
    dims = sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda dim: (-dim[1], dim[0] == 1))
    shape = tuple(n for n, _ in dims)
    num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return shape if math.prod(shape) == num_elements else (num_elements,)


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
