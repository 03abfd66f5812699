"""Who publishes what: each element of a model from exactly one rank, and each file of an anchor.

Ranks offer what they have. Replicas offer the same part, and one of them gets it. What is left must be
disjoint and cover every tensor.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from patchstore.errors import SchemaMismatch
from patchstore.format import layout
from patchstore.format.records import DTYPE_BYTES, Part, Schema, TensorSpec
from patchstore.payloads import tensor_file

WRITER_BYTES = 64 << 20
"""Of a model, one rank is used to write an anchor for so many: smaller files are not worth a rank each."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of an anchor."""

    writer: int
    """The place in the group of the rank that writes it."""
    specs: tuple[TensorSpec, ...]
    """In the order of the file."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What all ranks own and write."""

    owned: tuple[tuple[Part, ...], ...]
    """By rank."""
    files: tuple[tuple[str, File], ...]
    """All files of an anchor, with their names."""

    def writers(self) -> dict[str, int]:
        """Return which rank's place in the group writes each tensor of an anchor."""
        return {spec.name: file.writer for _, file in self.files for spec in file.specs}


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank owns and writes."""

    parts: tuple[Part, ...]
    writers: Mapping[str, int]
    """For each tensor that this rank owns a part of, the place of the rank that writes it in an anchor."""
    files: tuple[tuple[str, File], ...]
    """What it writes of an anchor itself, with the names of the files."""


def own(offers: Sequence[Sequence[Part]]) -> list[list[int]]:
    """Choose an owner for every part that is offered.

    Parts that several ranks offer go to those with the fewest bytes so far, the largest first.

    Args:
        offers: the parts of each rank.

    Returns:
        For each rank which of its parts it owns, ascending.

    Raises:
        SchemaMismatch: ranks describe a tensor otherwise, an element is offered by two different parts, or
            by none.
    """
    specs: dict[str, tuple[int, TensorSpec]] = {}
    offered: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
    for rank, parts in enumerate(offers):
        for number, part in enumerate(parts):
            first, spec = specs.setdefault(part.spec.name, (rank, part.spec))
            if spec != part.spec:
                raise SchemaMismatch(
                    f"ranks differ in tensor {spec.name!r}: {spec} on the {_nth(first)} rank of the group, "
                    f"{part.spec} on the {_nth(rank)}"
                )
            offered[spec.name, part.start, part.size].append((rank, number))
    by_name: dict[str, list[Part]] = defaultdict(list)
    owned: list[list[int]] = [[] for _ in offers]
    num_bytes = [0] * len(offers)
    shared: list[tuple[int, str, list[tuple[int, int]]]] = []
    for (name, _, _), takers in offered.items():
        rank, number = takers[0]
        part = offers[rank][number]
        by_name[name].append(part)
        size = part.num_elements * DTYPE_BYTES[part.spec.dtype]
        if len(takers) == 1:
            owned[rank].append(number)
            num_bytes[rank] += size
        else:
            shared.append((size, name, takers))
    for size, _, takers in sorted(shared, key=lambda each: (-each[0], each[1], each[2])):
        rank, number = min(takers, key=lambda taker: (num_bytes[taker[0]], taker[0]))
        owned[rank].append(number)
        num_bytes[rank] += size
    for name, parts in by_name.items():
        _check_cover(specs[name][1], parts)
    return [sorted(numbers) for numbers in owned]


def _check_cover(spec: TensorSpec, parts: Sequence[Part]) -> None:
    """Raises SchemaMismatch unless these parts have each element of the tensor once."""
    filled = [part for part in parts if part.num_elements]
    if len(filled) > 1 and spec.shape:
        starts = np.array([part.start for part in filled], dtype=np.int64)
        ends = starts + np.array([part.size for part in filled], dtype=np.int64)
        order = np.lexsort(starts.T[::-1])
        starts, ends = starts[order], ends[order]
        for i in range(len(filled) - 1):
            both = (starts[i + 1 :] < ends[i]).all(axis=1) & (ends[i + 1 :] > starts[i]).all(axis=1)
            if both.any():
                one, other = filled[order[i]], filled[order[i + 1 + int(both.argmax())]]
                raise SchemaMismatch(
                    f"elements of {spec.name!r} are given twice: as {_box(one)} and as {_box(other)}"
                )
    num = sum(part.num_elements for part in filled)
    if num != spec.num_elements:
        raise SchemaMismatch(
            f"no rank of the group has {spec.num_elements - num:,} of the {spec.num_elements:,} elements of "
            f"{spec.name!r}; if other ranks have them, pass a group= with all ranks that have parts"
        )


def _box(part: Part) -> str:
    sides = (f"{start}:{start + size}" for start, size in zip(part.start, part.size, strict=True))
    return f"[{', '.join(sides)}]"


def _nth(rank: int) -> str:
    return {0: "first", 1: "second", 2: "third"}.get(rank, f"{rank + 1}th")


def plan(schema: Schema, owned: Sequence[Sequence[Part]], max_shard_bytes: int) -> Plan:
    """Say which rank writes which tensors of an anchor, and in which files.

    A tensor that one rank has whole is written there, so that it is not sent. The others are spread.

    Args:
        owned: the parts that each rank owns.
    """
    owners: dict[str, set[int]] = defaultdict(set)
    for place, parts in enumerate(owned):
        for part in parts:
            owners[part.spec.name].add(place)
    writers = range(min(len(owned), max(1, -(-schema.num_bytes // WRITER_BYTES))))
    mine: list[list[TensorSpec]] = [[] for _ in writers]
    num_bytes = [0] * len(writers)
    rest = []
    for spec in schema.tensors:
        (first, *others) = sorted(owners[spec.name])
        if not others and first in writers:
            mine[first].append(spec)
            num_bytes[first] += spec.num_bytes
        else:
            rest.append(spec)
    for spec in sorted(rest, key=lambda each: (-each.num_bytes, each.name)):
        writer = min(writers, key=lambda each: (num_bytes[each], each))
        mine[writer].append(spec)
        num_bytes[writer] += spec.num_bytes
    most = tensor_file.max_file_bytes(schema.num_bytes, max_shard_bytes)
    found = [
        File(writer, tuple(some))
        for writer, its in enumerate(mine)
        for some in tensor_file.split(sorted(its, key=lambda spec: spec.name), most)
        if some
    ]
    named = ((layout.shard_name(number, len(found)), file) for number, file in enumerate(found, 1))
    return Plan(tuple(tuple(parts) for parts in owned), tuple(named))
