"""What a loader's writes come to: where elements are copied to, and what only the loader itself can load."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_plugin.regions import Region, View, is_nested, overlap


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
    names: frozenset[str],
) -> Trace:
    """Say what the writes of a loader mean.

    Args:
        writes: into each runtime, in the order in which they were made.
        parameters: that live in each runtime, and where.
        names: all that the loader was given.
    """
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
        unread=names - regions.keys() - alone,
        uncovered={
            name: missing
            for index, views in enumerate(parameters)
            for name, view in views
            if (missing := _missing(view, kept[index]))
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
