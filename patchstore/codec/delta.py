"""Encode changes on the CPU: from changes and the parent's tensors to the bytes of a delta."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.records import DTYPE_BYTES, Schema
from patchstore.bucket.state_sums import SumsArray
from patchstore.codec import Encoding, IndexEncoding, delta_file
from patchstore.codec.context import Coded, Context, Cuts, RowSets, encode_all, packed
from patchstore.codec.context.bits import bounds_of
from patchstore.codec.context.classes import is_coded
from patchstore.codec.context.coded import runs_of
from patchstore.codec.index import Gap
from patchstore.codec.listing import Listing, Stated, bridged, listing
from patchstore.codec.part_table import PartSums, PartTable
from patchstore.stores.base import Chunk
from patchstore.tensors.columns import Group
from patchstore.tensors.elements import sum_each

Array = npt.NDArray[Any]

NO_SUMS = PartSums(np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.uint64))


class Parents(Protocol):
    """The tensors before a change, by the numbers of a group."""

    def at(self, group: Group) -> Array:
        """Return the bit patterns at the group's positions, unsigned integers [num]."""
        ...

    def whole(self, numbers: Array) -> Array:
        """Return all bit patterns of these, one after the other, in host memory."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDelta:
    """The bytes of a delta, and by how much it changes the digest sums."""

    encoding: str
    num_changed: int
    """Elements whose bits changed."""
    listing: Listing = field(default_factory=Listing)
    """What the file states by positions and values."""
    coded: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The entries of coded parts, uint8: `table` and `tiles`; empty where there are none."""
    growth: PartSums = NO_SUMS
    """By how much the digest sums of parts with changes grow."""
    parents: PartSums = NO_SUMS
    """The digest sums of those parts before the change, if the encoding depends on them; otherwise empty."""

    @property
    def num_bytes(self) -> int:
        """What the file's tensors take."""
        return self.listing.num_bytes + sum(entry.nbytes for entry in self.coded.values())

    def file(
        self, schema: Schema, *, version: int, parent: int, step: int, run_id: str
    ) -> Callable[[], Iterator[Chunk]]:
        """Return a function that streams the delta file; it may be called again for a retry.

        Not for a delta without changes, which has no file.
        """
        identity = delta_file.identity(version, parent, step, run_id, self.encoding)
        return delta_file.write(schema, identity, self.listing, self.coded)


NO_CHANGES = EncodedDelta(encoding="gap", num_changed=0)
"""The delta of a publication in which no bit changed. Every release reads `gap`."""


def encode(
    schema: Schema, table: PartTable, groups: Iterable[Group], parents: Parents, encoding: Encoding
) -> EncodedDelta:
    """Encode changes against the parent's tensors, which are on any device and stay as they are.

    Memory beside the result: one large tensor, or a few million elements of small ones.
    """
    encoder = DeltaEncoder(schema, table, encoding)
    for group in groups:
        encoder.add(group, parents)
    return encoder.delta()


def least_bytes(schema: Schema, num_changed: int, encoding: Encoding) -> int:
    """Return how many bytes a delta of so many changes takes at least.

    Elements that `context` does not code are listed, each with a position of at least two bytes.
    """
    may_code = isinstance(encoding, Context)
    sizes = Counter[int]()
    kinds, of = schema.kinds
    for (dtype, shape), num in zip(kinds, np.bincount(np.array(of, dtype=np.int64)).tolist(), strict=True):
        is_listed = not (may_code and is_coded(dtype))
        sizes[2 + DTYPE_BYTES[dtype] if is_listed else 0] += num * prod(shape)
    num_bytes = 0
    for each, num in sorted(sizes.items()):
        num_bytes += each * min(num, num_changed)
        num_changed -= min(num, num_changed)
    return num_bytes


class DeltaEncoder:
    """Builds a delta from groups of changes; see `columns.Group`."""

    def __init__(self, schema: Schema, table: PartTable, encoding: Encoding) -> None:
        self._schema, self._table, self._encoding = schema, table, encoding
        self._only_dense = isinstance(encoding, Context) and encoding.only_dense
        self._num_changed = 0
        self._row_sets = defaultdict[int, RowSets](RowSets)
        """By kind: see `part_table.Together`; so are the next two."""
        self._coded = defaultdict[int, list[Coded]](list)
        self._waiting = defaultdict[int, list[_Coding]](list)
        """Small parts of one group, which are coded together."""
        self._stated: list[Stated] = []
        self._growth: list[PartSums] = []
        self._parents: list[PartSums] = []

    def add(self, group: Group, parents: Parents) -> None:
        """Encode what changed of tensors, or parts, of one dtype. Groups of a dtype ascend by number."""
        if not len(group.numbers):
            return
        replaced = parents.at(group) if group.replaced is None else group.replaced
        at = self._table.positions(group)
        self._growth.append(
            PartSums(
                group.numbers,
                _sums(group.values, group.counts, at) - _sums(replaced, group.counts, at),
            )
        )
        self._num_changed += len(group.positions)
        is_listed = np.ones(len(group.numbers), dtype=np.bool_)
        if isinstance(self._encoding, Context):
            is_cut, cuts = self._cuts(group)
            is_listed = ~is_cut
            told = group.numbers[~is_listed] if self._only_dense else group.numbers
            if len(told):
                self._parents.append(self._table.digested(told, parents.whole(told)))
            self._code(group.at(np.flatnonzero(is_cut)), cuts, parents)
        if is_listed.any():
            index = self._encoding.index
            self._stated += stated(self._table, group.at(np.flatnonzero(is_listed)), parents.at, index)

    def _cuts(self, group: Group) -> tuple[Array, Cuts]:
        """Return which parts are coded, and how those are cut."""
        is_cut, cuts = self._table.cuts(group.numbers, group.counts)
        if self._only_dense:
            are_dense = self._table.are_dense(group)
            return is_cut & are_dense, cuts.at(are_dense[is_cut])
        return is_cut, cuts

    def _code(self, group: Group, cuts: Cuts, parents: Parents) -> None:
        """Code parts of one dtype: large ones alone, and small ones a group at a time; the last one waits."""
        kinds, groups = (column[group.numbers] for column in self._table.together)
        for kind in np.unique(kinds).tolist():
            its = np.flatnonzero(kinds == kind)
            for some in np.split(its, np.flatnonzero(np.diff(groups[its])) + 1):
                waiting = self._waiting[kind]
                if waiting and waiting[0].number != groups[some[0]]:
                    self._write(kind)
                self._waiting[kind].append(_Coding.of(group, cuts, some, parents, int(groups[some[0]])))
                if kind % 2:
                    # At most one large part is in memory.
                    self._write(kind)

    def _write(self, kind: int) -> None:
        group, old, cuts = _joined(self._waiting.pop(kind))
        # Parts that are cut alike, beside each other, are cut into tiles together.
        order = self._table.alike[group.numbers].argsort(kind="stable")
        if (order[1:] < order[:-1]).any():
            old = np.concatenate([old[i:end] for i, end in runs_of(order, bounds_of(cuts.num_elements))])
            group, cuts = group.at(order), cuts.at(order)
        owners = self._table.owners[group.numbers]
        dtype = self._table.parts[group.numbers[0]].spec.dtype
        changes = group.counts, group.positions, group.values
        self._coded[kind].append(encode_all(dtype, owners, cuts, old, *changes, self._row_sets[kind]))

    def delta(self) -> EncodedDelta:
        for kind in sorted(self._waiting):
            self._write(kind)
        index = self._encoding.index
        is_listed = self._only_dense and not self._coded
        return EncodedDelta(
            encoding=index.name if is_listed else self._encoding.name,
            num_changed=self._num_changed,
            listing=listing(self._schema, self._stated, index),
            coded=packed(joined_kinds((its, self._row_sets[kind]) for kind, its in self._coded.items())),
            growth=joined_sums(self._growth),
            parents=joined_sums(self._parents),
        )


def stated(
    table: PartTable, group: Group, held: Callable[[Group], Array], index: IndexEncoding
) -> Iterator[Stated]:
    """Yield what a file states of parts by positions and values.

    `held` returns the parent's bit patterns at a group's positions, and is asked where there are bridges.
    """
    is_whole = table.is_whole[group.numbers]
    for mine, is_part in ((is_whole, False), (~is_whole, True)):
        if not mine.any():
            continue
        some = group.at(np.flatnonzero(mine))
        # A publisher of a part does not know what lies between its elements.
        if not is_part and isinstance(index, Gap) and (found := bridged(some)) is not None:
            some, is_bridge = found
            values = held(some)
            some = some._replace(values=np.where(is_bridge, values, some.values))
        yield Stated(
            some._replace(numbers=table.owners[some.numbers], positions=table.positions(some)), is_part
        )


class _Coding(NamedTuple):
    """Parts that are coded together: what changed, and all bits before."""

    group: Group
    old: Array
    cuts: Cuts
    number: int
    """Of `Together.groups`."""

    @classmethod
    def of(cls, group: Group, cuts: Cuts, some: Array, parents: Parents, number: int) -> "_Coding":
        """Return those at some places, ascending."""
        picked = group.at(some)
        return cls(picked, parents.whole(picked.numbers), cuts.at(some), number)


def _joined(some: Sequence[_Coding]) -> tuple[Group, Array, Cuts]:
    if len(some) == 1:
        return some[0].group, some[0].old, some[0].cuts
    columns = zip(*(each.group.stated for each in some), strict=True)
    group = Group(*(np.concatenate(column) for column in columns))
    return group, np.concatenate([each.old for each in some]), Cuts.joined([each.cuts for each in some])


def joined_kinds(kinds: Iterable[tuple[Sequence[Coded], RowSets]]) -> Coded:
    """Join what is coded: parts of each kind, which number the row sets of that kind."""
    return Coded.joined([Coded.joined(some, row_sets.sets) for some, row_sets in kinds])


def _sums(bits: Array, counts: Array, at: Array) -> SumsArray:
    return np.stack(sum_each(bits, counts, at), axis=1)


def joined_sums(each: Sequence[PartSums]) -> PartSums:
    """Join the sums of different parts."""
    if not each:
        return NO_SUMS
    return PartSums(*(np.concatenate(column) for column in zip(*each, strict=True)))
