"""What is known of the memory that a loader works in: which elements of the checkpoint are where.

A loader reads tensors that have shapes and no elements. `Provenance` keeps for each memory the regions of
the checkpoint that were copied there, or the names that it was calculated from, and lists what is written
to the model. `trace` tells it what the loader does. `resolve` says what the writes come to: where elements
are copied to, and what only the loader itself can load.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from patchstore.bucket.records import Schema
from patchstore.errors import SchemaMismatch
from patchstore.tensors.bits import TORCH_DTYPES
from vllm_plugin.map.regions import Region, View, boxed, compose, is_nested, normal, onto, outside, overlap


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
    uncovered: Mapping[str, int]
    """Parameter -> how many of its elements neither come from the checkpoint nor are set to a constant."""
    filled: Mapping[int, tuple[tuple[View, bool], ...]] = field(default_factory=dict)
    """Index into `runtimes`, where a loader sets constants -> its writes there, in order; True for those."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Write:
    """One write into the model's memory. Neither parts nor names: a constant."""

    target: View
    parts: tuple[tuple[str, Region], ...] = ()
    names: frozenset[str] = frozenset()
    """Of what was calculated."""
    company: frozenset[str] = frozenset()
    """Names that must be there too for the loader to make this write."""
    during: str | None
    """The name that the loader had read last; None before the first and after the last one."""

    @property
    def sources(self) -> frozenset[str]:
        return self.names.union(name for name, _ in self.parts)


def resolve(
    runtimes: tuple[Runtime, ...],
    writes: Sequence[list[Write]],
    parameters: Sequence[list[tuple[str, View]]],
) -> Trace:
    """Say what the writes of a loader into each runtime mean, in the order in which they were made."""
    groups = _Groups()
    kept: list[list[Write]] = []
    for each in writes:
        last = {write.target: write for write in each}
        kept.append([write for write in each if last[write.target] is write])
        for write in kept[-1]:
            groups.join(write.sources | write.company)
            if write.names or not all(is_nested(region.source) for _, region in write.parts):
                groups.mark(write.sources)
        for earlier, later in _collisions(kept[-1]):
            groups.join(earlier.sources | later.sources | ({later.during} if later.during else set()))
            groups.mark(earlier.sources)
    _join_side_effects(groups, writes, kept)
    calculated = groups.marked()
    alone = frozenset().union(*calculated)
    regions: dict[str, list[tuple[int, Region]]] = {}
    for index, each in enumerate(kept):
        for write in each:
            for name, region in write.parts:
                if name not in alone:
                    regions.setdefault(name, []).append((index, region))
    return Trace(
        runtimes=runtimes,
        regions={name: tuple(found) for name, found in regions.items()},
        computed=tuple((group, _written_with(group, writes)) for group in calculated),
        uncovered={
            name: missing
            for index, views in enumerate(parameters)
            for name, view in views
            if (missing := _missing(view, kept[index]))
        },
        filled={
            index: tuple((write.target, not write.sources) for write in each)
            for index, each in enumerate(kept)
            if not all(write.sources for write in each)
        },
    )


def _join_side_effects(groups: "_Groups", writes: Sequence[list[Write]], kept: Sequence[list[Write]]) -> None:
    """Join to calculated names those whose elements are written over when a loader loads just them."""
    while True:
        marked = groups.marked()
        for names in marked:
            for each, remaining in zip(writes, kept, strict=True):
                for write in (write for write in each if _is_repeated(write, names)):
                    for other in remaining:
                        is_new = bool(other.sources) and not other.sources <= names
                        if is_new and meet(write.target, other.target):
                            groups.join(names | other.sources)
        if groups.marked() == marked:
            return


def _written_with(names: frozenset[str], writes: Sequence[list[Write]]) -> frozenset[int]:
    """The runtimes that a loader writes to when it loads just these names."""
    return frozenset(
        index for index, each in enumerate(writes) if any(_is_repeated(write, names) for write in each)
    )


class _Groups:
    """Sets of names that must be loaded together, of which some are marked: only a loader can load them."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}
        self._marked: set[str] = set()

    def _root(self, name: str) -> str:
        self._parents.setdefault(name, name)
        while (parent := self._parents[name]) != name:
            self._parents[name] = self._parents[parent]
            name = parent
        return name

    def join(self, names: Collection[str]) -> None:
        roots = [self._root(name) for name in names]
        for root in roots[1:]:
            self._parents[self._root(root)] = self._root(roots[0])

    def mark(self, names: Collection[str]) -> None:
        self._marked |= set(names)

    def marked(self) -> list[frozenset[str]]:
        roots = {self._root(name) for name in self._marked}
        groups: dict[str, set[str]] = {}
        for name in list(self._parents):
            if (root := self._root(name)) in roots:
                groups.setdefault(root, set()).add(name)
        return sorted((frozenset(names) for names in groups.values()), key=min)


def joined(sets: Iterable[Collection[str]]) -> list[frozenset[str]]:
    """Join sets that share a name; ascending by their first names."""
    groups = _Groups()
    for each in sets:
        groups.join(each)
        groups.mark(each)
    return groups.marked()


def meet(one: View, other: View) -> bool:
    """Whether two views share a position."""
    if not one.num_elements or not other.num_elements:
        return False
    return one.offset < other.end and other.offset < one.end and overlap([one, other])


def _is_repeated(write: Write, names: frozenset[str]) -> bool:
    """Whether a loader that loads just these names makes this write."""
    return not names.isdisjoint(write.sources) or (
        not write.sources and (write.during is None or write.during in names)
    )


def _collisions(writes: list[Write]) -> Iterator[tuple[Write, Write]]:
    """Writes of which a part, but not all, was written over by a later one, and that later one."""
    if not overlap([write.target for write in writes]):
        return
    for i, earlier in enumerate(writes):
        if earlier.sources:
            for later in writes[i + 1 :]:
                if meet(earlier.target, later.target):
                    yield earlier, later


def _missing(view: View, writes: list[Write]) -> int:
    """How many elements of a parameter no write reaches."""
    if not view.num_elements:
        return 0
    near = [
        write.target for write in writes if write.target.offset < view.end and view.offset < write.target.end
    ]
    is_inside = all(view.offset <= each.offset and each.end <= view.end for each in near)
    if is_inside and view.num_elements == view.end - view.offset and not overlap(near):
        return view.num_elements - sum(each.num_elements for each in near)
    low = min(each.offset for each in (view, *near))
    painted = torch.zeros(max(each.end for each in (view, *near)) - low, dtype=torch.bool)
    for each in near:
        painted.as_strided(each.shape, each.strides, each.offset - low).fill_(True)
    return int((~painted.as_strided(view.shape, view.strides, view.offset - low)).sum())


aten = torch.ops.aten

MAX_COPIES = 1024
"""A copy that repeats its source, or gathers runs of rows, more often than this is treated as calculated."""


@dataclass(slots=True)
class Node:
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
    _spans: list[tuple[int, int]] = field(default_factory=list)
    """From where to where parts lie, ascending; what overlaps is told only roughly."""
    _seen: object = None
    """The list of parts that the spans are of."""

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
        is_cut = False
        for box in boxes:
            if not self._is_apart(box.target):
                is_cut = True
                self.parts = [
                    (name, rest)
                    for name, part in self.parts
                    for rest in outside(part, box.target, self.shape)
                ]
        self.parts += [(name, each) for name, several in found for each in several or ()]
        if is_cut:
            self._seen = None
        return True

    def _is_apart(self, box: View) -> bool:
        """Whether a box lies behind, before or between all that was put here, so that nothing is cut.

        A layer of experts gets hundreds of parts, and would look at all of them for each.
        """
        if self._seen is not self.parts:
            # Something else than `put` said what is held.
            self._spans, self._seen = [(-1, -1)], self.parts
            for start, end in sorted((part.target.offset, part.target.end) for _, part in self.parts):
                self._spans.append((start, max(end, self._spans[-1][1])))
        at = bisect_left(self._spans, (box.offset, box.end))
        is_apart = self._spans[at - 1][1] <= box.offset and (
            at == len(self._spans) or box.end <= self._spans[at][0]
        )
        if is_apart:
            self._spans.insert(at, (box.offset, box.end))
        return is_apart


class Provenance:
    """Where the elements of all memory come from that a loader touches, and what it wrote to the model."""

    def __init__(self, models: Iterable[torch.nn.Module], schema: Schema) -> None:
        self.at = "before it read a tensor"
        """How far the loader came, for messages."""
        self._schema, self._specs = schema, schema.by_name()
        self._current: str | None = None
        self._looked: set[str] = set()
        """Names of which a loader has read an element as a number."""
        self._pending: set[str] = set()
        """Those of them that it has not used since, as far as one can see."""
        self._nodes: dict[int, Node] = {}
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
        for name, stored in handed_names(self._schema):
            spec = self._specs[stored]
            tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
            node = self.new_node(tensor)
            node.parts = [(stored, node.whole)]
            node.company = {stored}
            self.at = f"when it had read up to {name!r} {tuple(tensor.shape)} {tensor.dtype}"
            self._current = stored
            yield name, tensor
        self._current = None

    # What a loader copies.

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Follow a copy. It runs only where neither side is the checkpoint's or the model's."""
        index, node = self.index(target), self.node(source)
        names = self.names(source)
        if index is None:
            if node or names or self.node(target):
                self._into_node(target, source, names)
            else:
                self.wrote(target)
                aten.copy_.default(target, source)
            return
        parts = self._parts(target, source, self.runtimes[index].dtype) if node else None
        if parts is not None and sum(region.num_elements for _, region in parts) == target.numel():
            copied = tuple(
                (name, each) for name, region in parts if name is not None for each in normal(region)
            )
            self.write(index, target, copied, company=node.company if node else ())
        else:
            # Calculated, or partly left as the loader's memory happened to be.
            self.write(index, target, names=names, company=node.company if node else ())

    def write(
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

        `dtype` is of the memory that `target` is a view of, and targets of the regions are positions there.
        They are not all of it where nothing was ever written to parts of `source`.
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
        if math.prod(n for n, s in zip(view.shape, view.strides, strict=True) if s == 0) > MAX_COPIES:
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

    def _is_moved(self, node: Node, source: torch.Tensor, target: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether a copy moves bits as they are, or widens bfloat16, which is the upper half of float32."""
        if source.element_size() != node.dtype.itemsize or target.element_size() != dtype.itemsize:
            return False
        if source.dtype == target.dtype:
            return True
        is_widened = source.dtype == torch.bfloat16 and target.dtype == torch.float32
        return is_widened and all(self._specs[name].dtype == "BF16" for name in node.names)

    def _into_node(self, target: torch.Tensor, source: torch.Tensor, names: Collection[str]) -> None:
        """Follow a copy into memory of the loader's own."""
        node = self.node(target) or self.adopted(target)
        if origin := self.node(source):
            node.company |= origin.company
            parts = self._parts(target, source, node.dtype)
        else:
            parts = constant(target) if not names else None
        is_known = parts is not None and not node.tainted and target.element_size() == node.dtype.itemsize
        if not is_known or not node.put(View.of(target), parts or ()):
            node.taint(names)

    # Numbers that a loader reads.

    def read_number(self, tensor: torch.Tensor) -> None:
        """Note that a loader reads an element of a tensor as a number."""
        names = self.company([tensor]).union(self.names(tensor))
        self._pending |= names
        self._looked |= names

    def blamed(self, is_unknown: bool) -> Collection[str]:
        """Names that a constant may have been calculated from, by way of numbers."""
        if not is_unknown:
            return set(self._pending)
        names = set(self._pending or self._looked)
        self._pending.clear()
        return names

    # Which memory a tensor is in, and what is known of it.

    def index(self, tensor: torch.Tensor) -> int | None:
        """The number of the model's memory that a tensor is in; None if it is not the model's."""
        return self._runtime.get(memory(tensor))

    def node(self, tensor: torch.Tensor) -> Node | None:
        return self._nodes.get(memory(tensor))

    def names(self, tensor: torch.Tensor) -> Collection[str]:
        """Names whose elements are in a tensor, or that it was calculated from."""
        node, index = self.node(tensor), self.index(tensor)
        if node is not None:
            return node.names
        if index is not None:
            writes = [write for write in self._writes[index] if write.parts or write.names]
            where = View.of(tensor)
            return {name for write in writes if meet(write.target, where) for name in write.sources}
        if not self._looked or tensor.is_meta:
            return self.blamed(False)
        return self.blamed(tensor.is_floating_point() and bool(tensor.isnan().any()))

    def company(self, tensors: Iterable[torch.Tensor]) -> set[str]:
        """See `Node.company`; of all the tensors together."""
        nodes = (self.node(tensor) for tensor in tensors)
        return {name for node in nodes if node is not None for name in node.company}

    def is_unknown(self, tensor: torch.Tensor) -> bool:
        """Whether its elements are, or may come from, the checkpoint's."""
        return self.node(tensor) is not None or (self.index(tensor) is not None and bool(self.names(tensor)))

    def wrote(self, target: torch.Tensor) -> None:
        """Note that a loader wrote something to memory that it made for itself."""
        self._unwritten.discard(memory(target))

    def taint(self, tensor: torch.Tensor, names: Collection[str]) -> None:
        self._nodes[memory(tensor)].taint(names)

    def note(self, made: Iterable[torch.Tensor], written: Iterable[torch.Tensor], *, is_empty: bool) -> None:
        """Remember memory that a loader made for itself, in case it puts elements of the checkpoint there."""
        for tensor in written:
            self.wrote(tensor)
        for tensor in made:
            if memory(tensor) not in self._made and self.index(tensor) is None:
                self._made[memory(tensor)] = _layout(tensor)
                self._known.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
                if is_empty:
                    self._unwritten.add(memory(tensor))

    def new_node(self, tensor: torch.Tensor) -> Node:
        node = self._nodes[memory(tensor)] = Node(shape=_layout(tensor), dtype=tensor.dtype)
        self._known.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
        return node

    def adopted(self, tensor: torch.Tensor) -> Node:
        """Follow memory from now on that held constants so far, or nothing."""
        node = self.new_node(tensor)
        shape = self._made.get(memory(tensor), node.shape)
        if math.prod(shape) == math.prod(node.shape):
            node.shape = shape
        if memory(tensor) not in self._unwritten:
            node.parts = [(None, node.whole)]
        return node

    @property
    def has_read_numbers(self) -> bool:
        """Whether a loader has read any element as a number."""
        return bool(self._looked)

    def result(self) -> Trace:
        return resolve(self.runtimes, self._writes, self._parameters)


def handed_names(schema: Schema) -> list[tuple[str, str]]:
    """Return all names that a loader is handed in a trace, in that order, and what they are stored under."""
    return sorted(({spec.name: spec.name for spec in schema.tensors} | dict(schema.tied)).items())


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that a loader may write to: parameters, buffers, and tensors that are plain attributes."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield within(path, name), value


def within(path: str, name: str) -> str:
    """What is called `name` in a module."""
    return f"{path}.{name}" if path else name


def constant(target: torch.Tensor) -> list[tuple[str | None, Region]]:
    where = View.of(target)
    return [(None, Region(source=where, target=where))]


def memory(tensor: torch.Tensor) -> int:
    """Identify the storage that a tensor is a view of."""
    return int(tensor.untyped_storage()._cdata)


def _layout(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor's memory, slowest dimension first."""
    dims = sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda dim: (-dim[1], dim[0] == 1))
    shape = tuple(n for n, _ in dims)
    num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return shape if math.prod(shape) == num_elements else (num_elements,)
