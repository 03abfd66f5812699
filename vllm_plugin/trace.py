"""Find where a model's own loader puts each element of a checkpoint, without loading anything.

`load_weights` runs once on meta tensors, which have shapes and no elements. Every copy that it makes into
the model is written down instead of executed, and followed back through slices, transpositions, gathers and
copies of copies. What is calculated instead of copied has no place of its own, and is listed as such.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.model import Schema
from patchstore.tensors import TORCH_DTYPES
from vllm_plugin.regions import Region, View, boxed, compose, is_nested, normal, onto, outside, overlap

aten = torch.ops.aten

_EMPTY = frozenset({aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default})
_FILLED = frozenset(
    {
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
    }
)
_LOOKS = frozenset(
    {aten.equal.default, aten.nonzero.default, aten.masked_select.default, aten.is_nonzero.default}
)

_MAX_COPIES = 1024
"""A copy that repeats its source, or gathers rows, more often than this is treated as calculated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Memory that the model serves from: the storage of one or more parameters and buffers."""

    names: tuple[str, ...]
    """Of the parameters and buffers that live in it, as the model calls them."""
    storage: torch.UntypedStorage
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a loader does with each tensor of a schema. Names are those that the schema stores."""

    runtimes: tuple[Runtime, ...]
    regions: Mapping[str, tuple[tuple[int, Region], ...]]
    """Name -> (index into `runtimes`, where in the checkpoint's tensor -> where in the storage), normal."""
    computed: tuple[tuple[frozenset[str], frozenset[int]], ...]
    """Names that only the loader itself can load, together -> the runtimes that it writes then. Disjoint."""
    unread: frozenset[str]
    """Names that the loader has no use for on this rank."""
    uncovered: Mapping[str, int]
    """Parameter -> how many of its elements neither come from the checkpoint nor are set to a constant."""


@dataclass
class _Node:
    """What is known of a tensor's memory that is not the model's: checkpoint data, on its way."""

    shape: tuple[int, ...]
    """As the memory is laid out, slowest dimension first."""
    dtype: torch.dtype
    parts: list[tuple[str, Region]] = field(default_factory=list)
    """Stored name, and where its elements lie: targets are boxes of `shape`."""
    tainted: set[str] = field(default_factory=set)
    """Names from which it was calculated; it then has no parts."""
    filled: bool = False
    """What no part covers is a constant, and not unwritten memory."""

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.parts} | self.tainted


@dataclass(frozen=True, kw_only=True)
class _Write:
    """One write into the model's memory. Neither parts nor names: a constant."""

    target: View
    parts: tuple[tuple[str, Region], ...] = ()
    names: frozenset[str] = frozenset()
    """Of what was calculated."""


def trace(
    models: Iterable[torch.nn.Module],
    schema: Schema,
    load: Callable[[torch.nn.Module, Iterator[tuple[str, torch.Tensor]]], object],
) -> Trace:
    """Trace the loaders of models that are loaded from one checkpoint. Nothing is written to them.

    Args:
        models: the target, then possibly a draft model.
        load: calls a model's loader; here so that the caller can set up what loaders expect around them.

    Raises:
        SchemaMismatch: a loader does not take this schema's names or shapes.
        UsageError: a loader looks at elements, or gives parameters other memory, so it cannot be traced.
    """
    tracer = _Tracer(models, schema)
    for model in models:
        before = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
        try:
            with torch.no_grad(), tracer:
                load(model, tracer.checkpoint())
        except (KeyError, ValueError, AttributeError, AssertionError, TypeError) as exc:
            # What vLLM's loaders raise for names and shapes that their model does not have.
            raise SchemaMismatch(
                f"the model's loader failed {tracer.at}: {type(exc).__name__}: {exc}"
            ) from exc
        except (RuntimeError, NotImplementedError, IndexError) as exc:
            raise UsageError(
                f"the model's loader cannot be traced; it failed {tracer.at}: {type(exc).__name__}: {exc}"
            ) from exc
        finally:
            moved = [t for t, data in before if t.data_ptr() != data.data_ptr() or t.device != data.device]
            for tensor, data in before:
                tensor.data = data
        if moved:
            raise UsageError(
                f"the model's loader gives {len(moved)} parameters other memory instead of writing to them, "
                "so it cannot be traced"
            )
    return tracer.result()


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, models: Iterable[torch.nn.Module], schema: Schema) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.at = "before it read a tensor"
        self._schema = schema
        self._current: str | None = None
        self._touched: set[str] = set()
        self._scalars: set[str] = set()
        self._nodes: dict[int, _Node] = {}
        self._alive: list[torch.UntypedStorage] = []
        """Keeps the address of a storage from being used again, which is what tells storages apart."""
        self._runtime: dict[int, int] = {}
        self.runtimes: list[Runtime] = []
        self._writes: list[list[_Write]] = []
        self._parameters: list[list[tuple[str, View]]] = []
        names: dict[int, list[str]] = {}
        for model in models:
            for name, tensor in _tensors(model):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._runtime:
                    self._runtime[storage._cdata] = len(self.runtimes)
                    self.runtimes.append(Runtime(names=(), storage=storage, dtype=tensor.dtype))
                    self._writes.append([])
                    self._parameters.append([])
                index = self._runtime[storage._cdata]
                names.setdefault(index, []).append(name)
                if isinstance(tensor, torch.nn.Parameter):
                    self._parameters[index].append((name, View.of(tensor)))
        self.runtimes = [
            Runtime(names=tuple(dict.fromkeys(names[i])), storage=each.storage, dtype=each.dtype)
            for i, each in enumerate(self.runtimes)
        ]
        self._tensors = {spec.name: self._source(spec.name) for spec in schema.tensors}

    def _source(self, name: str) -> torch.Tensor:
        spec = self._schema.by_name()[name]
        tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
        node = self._new_node(tensor)
        whole = View.of(tensor)
        node.parts.append((name, Region(source=whole, target=whole)))
        return tensor

    def checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what a loader is given: every name of the checkpoint, tied ones too."""
        every = {spec.name: spec.name for spec in self._schema.tensors} | dict(self._schema.tied)
        for name, stored in sorted(every.items()):
            tensor = self._tensors[stored]
            self.at = f"when it had read up to {name!r} {tuple(tensor.shape)} {tensor.dtype}"
            self._current = stored
            self._scalars.clear()
            yield name, tensor

    # What a loader does.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default:
            self._copy(args[0], args[1])
            return args[0]
        if func is aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                self._copy(target, source)
            return None
        if func in (aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default):
            self._fill(func, args)
            return args[0]
        if func is aten._local_scalar_dense.default:
            return self._scalar(func, args[0])
        tensors = list(_flat((*args, *kwargs.values())))
        if written := [tensor for tensor in _written(func, args, kwargs) if self._index(tensor) is not None]:
            for tensor in written:
                self._calculated(tensor, tensors)
            return _returned(func, args, kwargs)
        tracked = [tensor for tensor in tensors if self._node(tensor) is not None]
        if not tracked:
            return func(*args, **kwargs)
        return self._derive(func, args, kwargs, tracked)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        index, node = self._index(target), self._node(source)
        if index is None:
            if node is None and self._node(target) is None:
                aten.copy_.default(target, source)
            else:
                self._into_node(target, source)
            return
        where = View.of(target)
        parts = self._parts(target, source) if target.dtype == self.runtimes[index].dtype else None
        if parts is None:
            names = frozenset(node.names if node else self._blamed(index, where))
            self._writes[index].append(_Write(target=where, names=names))
            return
        self._touched |= {name for name, _ in parts}
        self._writes[index].append(_Write(target=where, parts=tuple(parts)))

    def _blamed(self, index: int, where: View) -> set[str]:
        """Names that calculated data must come from: those that were last copied there, or the latest."""
        for write in reversed(self._writes[index]):
            if write.target == where and write.parts:
                return {name for name, _ in write.parts}
        return {self._current} if self._current else set()

    def _parts(self, target: torch.Tensor, source: torch.Tensor) -> list[tuple[str, Region]] | None:
        """Where in the checkpoint the elements of a copy come from, or None if they were calculated.

        The regions' targets are positions in `target`'s storage.
        """
        node = self._node(source)
        if node is None or node.tainted or source.dtype != node.dtype:
            return None
        if not _is_exact(node.dtype, target.dtype):
            return None
        try:
            wide = source.expand(target.shape)
        except RuntimeError as exc:
            raise SchemaMismatch(
                f"the model's loader failed {self.at}: it copies {tuple(source.shape)} "
                f"to {tuple(target.shape)}"
            ) from exc
        copies = 1
        for n, s in zip(wide.shape, wide.stride(), strict=True):
            copies *= n if s == 0 else 1
        if copies > _MAX_COPIES:
            return None
        goal = View.of(target)
        if not is_nested(goal):
            return None
        found: list[tuple[str, Region]] = []
        for name, region in node.parts:
            if region.source == region.target and region.num_elements == _size(node.shape):
                # The checkpoint's own memory.
                found.append((name, Region(source=View.of(wide), target=goal)))
                continue
            composed = compose(View.of(wide), [region], node.shape)
            if composed is None:
                return None
            for part in composed:
                found.append((name, onto(part, goal)))
        if not node.filled and sum(region.num_elements for _, region in found) != target.numel():
            return None  # the loader left some of it as it happened to be
        return found

    def _into_node(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Follow a copy into memory of the loader's own."""
        node = self._node(target) or self._new_node(target)
        if node.tainted:
            node.tainted |= self._names(source)
            return
        parts = self._parts(target, source)
        origin = self._node(source)
        if parts is None or (origin is not None and origin.filled and target.numel() != _size(node.shape)):
            self._taint(node, self._names(source))
            return
        node.filled |= origin is not None and origin.filled
        boxes = [(name, boxed(region, node.shape)) for name, region in parts]
        for name, found in boxes:
            if found is None:
                self._taint(node, self._names(source))
                return
            for box in found:
                node.parts = [(n, o) for n, r in node.parts for o in outside(r, box.target, node.shape)]
                node.parts.append((name, box))

    def _names(self, tensor: torch.Tensor) -> set[str]:
        node = self._node(tensor)
        return set(node.names) if node else ({self._current} if self._current else set())

    def _taint(self, node: _Node, names: set[str]) -> None:
        node.tainted |= node.names | names
        node.parts.clear()

    def _fill(self, func: Any, args: tuple[Any, ...]) -> None:
        target = args[0]
        index = self._index(target)
        given = [tensor for tensor in _flat(args[1:]) if self._node(tensor) is not None]
        if index is not None:
            names = self._scalars | {name for tensor in given for name in self._names(tensor)}
            self._writes[index].append(_Write(target=View.of(target), names=frozenset(names)))
        elif (node := self._node(target)) is None:
            func(*args)
        elif given or self._scalars or View.of(target).num_elements != _size(node.shape):
            self._taint(node, self._names(target))
        else:
            node.parts.clear()
            node.filled = True

    def _scalar(self, func: Any, tensor: torch.Tensor) -> Any:
        node = self._node(tensor)
        if node is None:
            return func(tensor)
        # Loaders fill one-element parameters by value: whatever they fill now counts as calculated.
        self._scalars |= node.names
        return 0

    def _calculated(self, target: torch.Tensor, given: list[torch.Tensor]) -> None:
        index = self._index(target)
        assert index is not None
        names = {name for tensor in given if self._node(tensor) is not None for name in self._names(tensor)}
        where = View.of(target)
        names |= self._blamed(index, where)
        self._writes[index].append(_Write(target=where, names=frozenset(names)))

    def _derive(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: list[torch.Tensor]
    ) -> Any:
        """Run an operation on shapes alone, and say where its result's elements come from."""
        if func in _LOOKS:
            names = sorted({name for tensor in tracked for name in self._names(tensor)})
            raise UsageError(f"{func} looks at the elements of {', '.join(names[:3])}")
        indices = (
            args[1] if func is aten.index.Tensor else args[2:3] if func is aten.index_select.default else ()
        )
        made = func(
            *_on_meta(args), **{**_on_meta(kwargs), **({"device": "meta"} if "device" in kwargs else {})}
        )
        known = {_memory(tensor) for tensor in tracked}
        for result in _flat((made,)):
            if _memory(result) in known:
                continue  # a view: its memory says where it came from
            if self._node(result) is not None:
                self._taint(self._nodes[_memory(result)], self._names(tracked[0]))
                continue
            self._new_node(result)
            if func in (aten.clone.default, aten._to_copy.default):
                self._into_node(result, args[0])
            elif func is aten.cat.default:
                self._cat(result, args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0))
            elif func is aten.stack.default:
                dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
                self._cat(result, [each.unsqueeze(dim) for each in args[0]], dim)
            elif func in (aten.index.Tensor, aten.index_select.default):
                self._gather(result, args[0], args[1] if func is aten.index_select.default else None, indices)
            elif func is aten.constant_pad_nd.default:
                self._pad(result, args[0], args[1])
            elif func in _FILLED:
                self._nodes[_memory(result)].filled = True
            elif func not in _EMPTY:
                names = {name for tensor in tracked for name in self._names(tensor)}
                self._taint(self._nodes[_memory(result)], names)
        if func._schema.is_mutable:
            for tensor in _written(func, args, kwargs):
                if (node := self._node(tensor)) is not None:
                    self._taint(node, {name for each in tracked for name in self._names(each)})
        return made

    def _cat(self, result: torch.Tensor, given: list[torch.Tensor], dim: int) -> None:
        start = 0
        for each in given:
            if each.numel() == 0 and each.dim() == 1:
                continue
            self._into_node(result.narrow(dim, start, each.shape[dim]), each)
            start += each.shape[dim]

    def _gather(
        self, result: torch.Tensor, source: torch.Tensor, dim: int | None, indices: Iterable[Any]
    ) -> None:
        """Follow a gather of whole rows along one dimension, by indices that are known."""
        listed = list(indices)
        dims = [k for k, index in enumerate(listed) if index is not None] if dim is None else [dim]
        rows = listed[dims[0]] if dim is None and dims else listed[0]
        known = isinstance(rows, torch.Tensor) and self._node(rows) is None and rows.device.type != "meta"
        if (
            len(dims) != 1
            or not known
            or rows.dim() != 1
            or rows.dtype == torch.bool
            or len(rows) > _MAX_COPIES
        ):
            self._taint(self._nodes[_memory(result)], self._names(source))
            return
        for i, row in enumerate(rows.tolist()):
            self._into_node(result.select(dims[0], i), source.select(dims[0], row))

    def _pad(self, result: torch.Tensor, source: torch.Tensor, pad: list[int]) -> None:
        inner = result
        for k in range(len(pad) // 2):
            dim = source.dim() - 1 - k
            if pad[2 * k] < 0 or pad[2 * k + 1] < 0:
                self._taint(self._nodes[_memory(result)], self._names(source))
                return
            inner = inner.narrow(dim, pad[2 * k], source.shape[dim])
        self._into_node(inner, source)
        self._nodes[_memory(result)].filled = True

    # Which memory a tensor is in.

    def _index(self, tensor: torch.Tensor) -> int | None:
        return self._runtime.get(_memory(tensor))

    def _node(self, tensor: torch.Tensor) -> _Node | None:
        return self._nodes.get(_memory(tensor))

    def _new_node(self, tensor: torch.Tensor) -> _Node:
        storage = tensor.untyped_storage()
        dims = sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda d: (-d[1], d[0] == 1))
        elements = storage.nbytes() // tensor.element_size()
        shape = tuple(n for n, _ in dims)
        if _size(shape) != elements:
            shape = (elements,)
        node = _Node(shape=shape, dtype=tensor.dtype)
        self._nodes[storage._cdata] = node
        self._alive.append(storage)
        return node

    # What it comes to.

    def result(self) -> Trace:
        regions: dict[str, list[tuple[int, Region]]] = {}
        groups: list[tuple[set[str], set[int]]] = []
        uncovered: dict[str, int] = {}
        for index, writes in enumerate(self._writes):
            last = {write.target: write for write in writes}
            ordered = [write for write in writes if last[write.target] is write]
            copies = [write for write in ordered if write.parts]
            unclear = _overwritten(ordered)
            for write in ordered:
                if write.names or write in unclear:
                    groups.append((set(write.names) | {name for name, _ in write.parts}, {index}))
            for write in copies:
                for name, region in write.parts:
                    regions.setdefault(name, []).extend((index, part) for part in normal(region))
            for name, view in self._parameters[index]:
                if missing := _missing(view, ordered):
                    uncovered[name] = missing
        for name, found in regions.items():
            if not all(is_nested(region.source) for _, region in found):
                groups.append(({name}, {index for index, _ in found}))
        computed = _joined(groups)
        for names, indices in computed:
            for name in names:
                indices |= {index for index, _ in regions.pop(name, [])}
        loaded = regions.keys() | {name for names, _ in computed for name in names}
        return Trace(
            runtimes=tuple(self.runtimes),
            regions={name: tuple(found) for name, found in regions.items()},
            computed=tuple((frozenset(names), frozenset(indices)) for names, indices in computed if names),
            unread=frozenset(spec.name for spec in self._schema.tensors) - loaded,
            uncovered=uncovered,
        )


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _flat(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _flat(value)


def _on_meta(value: Any) -> Any:
    """The same arguments without elements, since no operation mixes real tensors with meta ones."""
    if isinstance(value, torch.Tensor):
        return value if value.device.type == "meta" else value.to("meta")
    if isinstance(value, list | tuple):
        return type(value)(_on_meta(each) for each in value)
    if isinstance(value, dict):
        return {name: _on_meta(each) for name, each in value.items()}
    return value


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes to."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += _flat((value,))
    return found


def _returned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    written = _written(func, args, kwargs)
    return written[0] if len(func._schema.returns) == 1 else tuple(written) or None


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether copying keeps every bit pattern apart, also NaNs, and in a way that can be read back."""
    return source == target or (source == torch.bfloat16 and target == torch.float32)


def _overwritten(writes: list[_Write]) -> set[_Write]:
    """Copies of which a part was written over, by another copy or a constant: their place is not theirs."""
    loaded = [write for write in writes if write.parts or write.names]
    if overlap([write.target for write in loaded]):
        return {write for write in writes if write.parts}
    spoilt = set()
    earlier: list[_Write] = []
    for write in writes:
        if write.parts or write.names:
            earlier.append(write)
            continue
        for other in earlier:
            apart = other.target.end <= write.target.offset or write.target.end <= other.target.offset
            if not apart and overlap([other.target, write.target]):
                spoilt.add(other)
    return {write for write in spoilt if write.parts}


def _missing(view: View, writes: list[_Write]) -> int:
    """How many elements of a parameter no write reaches."""
    if sum(write.target.num_elements for write in writes if write.parts or write.names) == view.num_elements:
        return 0
    if not writes:
        return view.num_elements
    low = min(view.offset, *(write.target.offset for write in writes))
    high = max(view.end, *(write.target.end for write in writes))
    painted = torch.zeros(high - low, dtype=torch.bool)
    for write in writes:
        where = write.target
        painted.as_strided(where.shape, where.strides, where.offset - low).fill_(True)
    return int((~painted.as_strided(view.shape, view.strides, view.offset - low)).sum())


def _joined(groups: list[tuple[set[str], set[int]]]) -> list[tuple[set[str], set[int]]]:
    """Join groups that share a name."""
    joined: list[tuple[set[str], set[int]]] = []
    for names, indices in groups:
        shared = [each for each in joined if each[0] & names]
        joined = [each for each in joined if each not in shared]
        every = names.union(*(each[0] for each in shared)), indices.union(*(each[1] for each in shared))
        joined.append(every)
    return joined
