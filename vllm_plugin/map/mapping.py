"""Which checkpoint names a server serves, and from where, as all of its ranks agree.

A rank holds slices, whole tensors or nothing of a name, and others may hold the same slice again. Every
rank says which slices it holds, so all know which names the server holds in full: those can be proved.
Of a tensor that is stored as tiles (see `patchstore.codec.context`) a rank decodes those that it holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from patchstore.bucket import records
from patchstore.bucket.records import DTYPE_BYTES, Schema, TensorSpec
from patchstore.bucket.schema_text import alike
from patchstore.bucket.state_sums import SumsArray
from patchstore.codec.context import Tiling, tiling
from patchstore.errors import StateMismatch
from patchstore.tensors.state_digest import Sums
from vllm_plugin.map.provenance import Trace, joined
from vllm_plugin.map.regions import Region, View, boxed, contiguous_strides, indices, overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlices:
    """What one rank tells the others about its map."""

    slices: Mapping[str, tuple[View, ...]]
    """Per name that is copied, the slices of the checkpoint's tensor that this rank holds."""
    computed: tuple[frozenset[str], ...]
    """Groups of names that are calculated here."""


@dataclass(frozen=True, slots=True, eq=False)
class SliceSums:
    """What a rank says of its weights: the digest sums of each slice that it holds.

    Arrays, as ranks tell each other while generation waits, of 18,867 names in a model that has so many.
    """

    slices: np.ndarray[Any, np.dtype[np.int64]]
    """[num], as `WeightMap.number` counts them; one that is held twice is there twice."""
    sums: SumsArray


@dataclass(frozen=True, slots=True, eq=False)
class StagedSums:
    """What a rank says of a change, as `SliceSums`: digest sums of the elements that it replaces."""

    slices: np.ndarray[Any, np.dtype[np.int64]]
    before: SumsArray
    after: SumsArray

    @classmethod
    def of(cls, rows: Sequence[tuple[int, Sums, Sums]]) -> "StagedSums":
        return cls(
            np.array([row[0] for row in rows], dtype=np.int64),
            np.array([row[1] for row in rows], dtype=np.uint64).reshape(-1, 2),
            np.array([row[2] for row in rows], dtype=np.uint64).reshape(-1, 2),
        )

    def joined(self, other: "StagedSums") -> "StagedSums":
        return StagedSums(
            np.concatenate([self.slices, other.slices]),
            np.concatenate([self.before, other.before]),
            np.concatenate([self.after, other.after]),
        )


class WeightMap:
    """One rank's trace, after all ranks agreed on what it means."""

    def __init__(self, schema: Schema, trace: Trace, shares: Sequence[RankSlices]) -> None:
        """Agree on the shares of all ranks, in the same order everywhere."""
        self.schema = schema
        self.runtimes = trace.runtimes
        self.filled = trace.filled
        """See `Trace`."""
        # Ascending by their first names, so that all ranks load in one order.
        groups = joined(group for share in shares for group in share.computed)
        self.computed = frozenset(name for group in groups for name in group)
        """Names that some rank calculates: all ranks keep them in full and have the loader load them."""
        self.regions: Mapping[str, Sequence[tuple[int, Region]]] = {
            name: found for name, found in trace.regions.items() if name not in self.computed
        }
        """Per name, where its elements are copied to on this rank: index into `runtimes`, and region."""
        self.groups: Sequence[tuple[frozenset[str], frozenset[int]]] = tuple(
            (group, frozenset(self._written(trace, group))) for group in groups
        )
        """Calculated names that must be loaded together, and the runtimes which that writes on this rank."""
        slices: dict[str, set[View]] = {}
        for share in shares:
            for name, views in share.slices.items():
                slices.setdefault(name, set()).update(views)
        specs = schema.by_name()
        copied = slices.keys() - self.computed
        self.proved = frozenset(
            name
            for name in copied
            if sum(view.num_elements for view in slices[name]) == specs[name].num_elements
            and not overlap(list(slices[name]))
        )
        """Names that the ranks hold entirely, in slices that are equal or apart."""
        self.partial = frozenset(copied - self.proved)
        """Names of which no rank holds some part, so that their digest cannot be told."""
        self.absent = frozenset(specs.keys() - copied - self.computed)
        """Names that no rank has a use for, such as a vision tower that is switched off."""
        # Of the names that this rank serves, as it may have the layers of one stage of a pipeline alone.
        is_wider = dict(self._wider())
        self.wider = frozenset(name for name, wider in is_wider.items() if wider)
        """Names of which this rank serves each element in more bits than the run stores."""
        # A server with --dtype float32 widens all of them, and that is meant.
        self.widened_apart = alike(self.wider) if len(self.wider) < len(is_wider) / 2 else ""
        """Lists these where most are not: then the run may have lost what the model keeps. Else empty."""
        self.aliases: Mapping[str, tuple[str, str]] = dict(self._aliases())
        """Names of memory that this rank loads from another name too -> what the model calls that memory, and
        the other name."""

        positions = {spec.name: i for i, spec in enumerate(schema.tensors)}
        keys = [(name, view) for name in sorted(copied) for view in sorted(slices[name])]
        keys += [(name, View.contiguous(specs[name].shape)) for name in sorted(self.computed)]
        self.slices: Sequence[tuple[str, View]] = keys
        """The slices of all ranks, by number."""
        self._numbers = {key: number for number, key in enumerate(keys)}
        self._owners = np.array([positions[name] for name, _ in keys], dtype=np.int64)
        """Of each slice, the tensor of the schema."""
        self.is_proved = np.ones(len(schema.tensors), dtype=np.bool_)
        """Of each tensor of the schema, whether its digest can be told."""
        self.is_proved[[positions[name] for name in self.partial | self.absent]] = False

    def number(self, name: str, view: View) -> int:
        """Return a slice's number, the same in all ranks; a calculated name has one slice, all of it."""
        return self._numbers[name, view]

    def sum_staged(self, changes: Sequence[StagedSums]) -> SumsArray:
        """Add up what the changes of all ranks do to each tensor of the schema, each slice once.

        Returns how much the sums grow, modulo 2**64; meaningless where `is_proved` is false.
        """
        both = [(each.slices, np.concatenate([each.before, each.after], axis=1)) for each in changes]
        claimed, _ = self._claimed(both, 4)
        growth = np.zeros((len(self.schema.tensors), 2), dtype=np.uint64)
        np.add.at(growth, self._owners, claimed[:, 2:] - claimed[:, :2])
        return growth

    def total(self, told: Sequence[SliceSums]) -> tuple[SumsArray, npt.NDArray[np.bool_]]:
        """Add up what all ranks claim of each tensor of the schema, each slice once.

        Returns the sums, and which of them mean anything: those of tensors that were told, and `is_proved`.
        """
        claimed, is_told = self._claimed([(each.slices, each.sums) for each in told], 2)
        sums = np.zeros((len(self.schema.tensors), 2), dtype=np.uint64)
        np.add.at(sums, self._owners, claimed)
        told_of = np.zeros(len(sums), dtype=np.bool_)
        told_of[self._owners[is_told]] = True
        return sums, told_of & self.is_proved

    def _claimed(
        self, told: Sequence[tuple[np.ndarray[Any, np.dtype[np.int64]], SumsArray]], width: int
    ) -> tuple[SumsArray, npt.NDArray[np.bool_]]:
        """Return what is said of each slice, zeros where nothing is, and whether anything is."""
        claimed = np.zeros((len(self._owners), width), dtype=np.uint64)
        seen = np.zeros(len(self._owners), dtype=np.bool_)
        for slices, sums in told:
            is_new = ~seen[slices]
            claimed[slices[is_new]] = sums[is_new]
            seen[slices] = True
            differ = (claimed[slices] != sums).any(axis=1) & self.is_proved[self._owners[slices]]
            if differ.any():
                name = self.schema.tensors[self._owners[slices[differ][0]]].name
                raise StateMismatch(f"copies of {name!r} in this server differ from each other")
        return claimed, seen

    def _wider(self) -> Iterator[tuple[str, bool]]:
        """Yield each name that this rank serves, and whether it does so in more bits than the run stores."""
        specs = self.schema.by_name()
        served = {name: {index for index, _ in found} for name, found in self.regions.items()}
        served |= {name: set(indices) for group, indices in self.groups for name in group}
        for name, runtimes in served.items():
            stored = DTYPE_BYTES[specs[name].dtype]
            if runtimes:
                yield name, all(self.runtimes[index].dtype.itemsize > stored for index in runtimes)

    def _aliases(self) -> Iterator[tuple[str, tuple[str, str]]]:
        specs = self.schema.by_name()
        for index, runtime in enumerate(self.runtimes):
            if len(runtime.names) < 2:
                continue
            # Of a calculated name only its group's memory is known, so these go by what they are called.
            called = {
                name: alias
                for name in sorted(self.absent | self.computed)
                for alias in runtime.names
                if _is_called(name, alias)
            }
            copied = [name for name, found in self.regions.items() if any(at == index for at, _ in found)]
            for name, alias in called.items():
                others = [each for each in called if each in self.computed and called[each] != alias]
                if name in self.absent:
                    others = copied + others
                elif alias == runtime.names[0]:
                    continue
                for other in others:
                    if specs[other].shape == specs[name].shape:
                        yield name, (alias, other)

    def _written(self, trace: Trace, group: frozenset[str]) -> set[int]:
        indices = {index for names, written in trace.computed if names & group for index in written}
        return indices | {index for name in group for index, _ in trace.regions.get(name, ())}


def share(trace: Trace) -> RankSlices:
    """Return what the other ranks need to know of this rank's trace."""
    return RankSlices(
        slices={
            name: tuple({region.source: None for _, region in found}) for name, found in trace.regions.items()
        },
        computed=tuple(names for names, _ in trace.computed),
    )


def _is_called(name: str, alias: str) -> bool:
    """Whether a checkpoint's name is what a model calls a tensor: modules may be nested deeper in either."""
    return f".{name}".endswith(f".{alias}") or f".{alias}".endswith(f".{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Elements of one tensor that are in one place of memory."""

    elements: records.Box
    index: int
    """Of `WeightMap.runtimes`."""
    origin: int
    """Position in that storage at which the tensor's first element would be; may be outside of it."""
    strides: tuple[int, int, int]
    """In elements of the storage, from one level, row and column of the tensor to the next."""


def boxes(spec: TensorSpec, regions: Sequence[tuple[int, Region]]) -> list[Box] | None:
    """Say of which boxes the regions of a tensor are made; each tile of the tensor is in one at most.

    None where a region cuts through a tile: this rank cannot decode the tensor from what it holds.
    """
    tiles = tiling(spec.shape)
    shape = (tiles.levels, tiles.rows, tiles.cols)
    found: dict[records.Box, Box] = {}
    for index, region in regions:
        parts = boxed(Region(source=region.target, target=region.source), shape)
        if parts is None:
            return None
        for part in parts:
            box = _box(shape, index, part)
            if tiles.is_cut(box.elements):
                return None
            # Tied weights, and heads that are held twice: one of them will do.
            found.setdefault(box.elements, box)
    kept = list(found.values())
    for number, box in enumerate(kept):
        if any(box.elements.overlaps(other.elements) for other in kept[:number]):
            return None
    return kept


def numbers(tiles: Tiling, held: Sequence[Box]) -> npt.NDArray[np.int64]:
    """Number the tiles of a part that have elements in any of the boxes, ascending."""
    found = [tiles.within(box.elements) for box in held]
    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *found]))


def are_cut(tiles: Tiling, held: Sequence[Box]) -> bool:
    """Whether a tile of a part has elements in a box, and others too."""
    return any(tiles.is_cut(box.elements) for box in held)


def _box(shape: tuple[int, int, int], index: int, part: Region) -> Box:
    level, row, col = indices(part.target.offset, contiguous_strides(shape))
    levels, rows, cols = part.target.shape
    strides = part.source.strides
    return Box(
        elements=records.Box(level, levels, row, rows, col, cols),
        index=index,
        origin=part.source.offset - level * strides[0] - row * strides[1] - col * strides[2],
        strides=(strides[0], strides[1], strides[2]),
    )
