"""Who publishes what: each element of a model from exactly one rank, and each file of an anchor.

Ranks offer what they have. Replicas offer the same part, and one of them gets it. What is left must be
disjoint and cover every tensor.
"""

import base64
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from patchstore.bucket.records import DTYPE_BYTES, Part, Schema, TensorSpec
from patchstore.bucket.state_sums import SumsArray
from patchstore.codec import tensor_file
from patchstore.codec.part_table import PartSums, PartTable
from patchstore.errors import SchemaMismatch
from patchstore.stores import layout

WRITER_BYTES = 64 << 20
"""Of a model, one rank is used to write an anchor for so many: smaller files are not worth a rank each."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank owns and writes."""

    parts: tuple[Part, ...]
    writers: Mapping[str, int]
    """For each tensor that this rank owns a part of, the place of the rank that writes it in an anchor."""
    files: Sequence[tuple[str, Sequence[str]]]
    """What it writes of an anchor itself: names of files, and of the tensors of each in their order."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What all ranks own and write."""

    owned: tuple[tuple[Part, ...], ...]
    """By rank."""
    writers: Mapping[str, int]
    """For each tensor of an anchor, the place in the group of the rank that writes it."""
    files: tuple[tuple[str, tuple[TensorSpec, ...]], ...]
    """All files of an anchor: their names, and the tensors of each in their order."""

    def told(self, place: int, own: Sequence[int]) -> dict[str, Any]:
        """Return what to tell a rank; `own` are the numbers of its parts among those that it offered."""
        return {
            "own": own,
            "writers": {part.spec.name: self.writers[part.spec.name] for part in self.owned[place]},
            "files": [
                (name, [spec.name for spec in specs])
                for name, specs in self.files
                if self.writers[specs[0].name] == place
            ],
        }


def told_sums(table: PartTable, sums: PartSums) -> dict[str, str]:
    """Return the digest sums of some parts as ranks tell them: those of a tensor added up."""
    places, added = table.by_tensor(sums)
    columns = {"places": places.astype("<u4"), "sums": added.astype("<u8")}
    return {name: base64.b64encode(column.tobytes()).decode() for name, column in columns.items()}


def total_sums(schema: Schema, told: Iterable[Mapping[str, str]]) -> SumsArray:
    """Add up what ranks told of their parts: [T, 2] by place in the schema, zeros where none told any."""
    totals = np.zeros((len(schema.tensors), 2), dtype=np.uint64)
    for each in told:
        places = np.frombuffer(base64.b64decode(each["places"]), dtype="<u4")
        totals[places] += np.frombuffer(base64.b64decode(each["sums"]), dtype="<u8").reshape(-1, 2)
    return totals


def own(offers: Sequence[Sequence[Part]]) -> list[list[int]]:
    """Choose an owner for every part that ranks offer; return for each rank which of its parts it owns,
    ascending.

    Parts that several ranks offer go to those with the fewest bytes so far, the largest first.
    """
    specs: dict[str, tuple[int, TensorSpec]] = {}
    offered: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for rank, parts in enumerate(offers):
        for number, part in enumerate(parts):
            first, spec = specs.setdefault(part.spec.name, (rank, part.spec))
            if spec != part.spec and first == rank:
                raise SchemaMismatch(
                    f"parts of tensor {spec.name!r} would be served as {spec.kind} and as {part.spec.kind}; "
                    f"give them one dtype, or say which: dtype={{{spec.name!r}: 'bfloat16'}}"
                )
            if spec != part.spec:
                raise SchemaMismatch(
                    f"ranks differ in tensor {spec.name!r}: {spec} on the {_nth(first)} rank of the group, "
                    f"{part.spec} on the {_nth(rank)}"
                )
            offered[part.key].append((rank, number))
    by_name: dict[str, list[Part]] = defaultdict(list)
    owned: list[list[int]] = [[] for _ in offers]
    num_bytes = [0] * len(offers)
    shared: list[tuple[int, str, list[tuple[int, int]]]] = []
    for takers in offered.values():
        rank, number = takers[0]
        part = offers[rank][number]
        by_name[part.spec.name].append(part)
        size = part.num_elements * DTYPE_BYTES[part.spec.dtype]
        if len(takers) == 1:
            owned[rank].append(number)
            num_bytes[rank] += size
        else:
            shared.append((size, part.spec.name, takers))
    for size, _, takers in sorted(shared, key=lambda each: (-each[0], each[1], each[2])):
        rank, number = min(takers, key=lambda taker: (num_bytes[taker[0]], taker[0]))
        owned[rank].append(number)
        num_bytes[rank] += size
    for name, parts in by_name.items():
        if len(parts) > 1 or not parts[0].is_whole:
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


def plan(
    schema: Schema, owned: Sequence[Sequence[Part]], max_shard_bytes: int, single: str | None = None
) -> Plan:
    """Say which rank writes which tensors of an anchor, and in which files.

    A tensor that one rank has whole is written there, so that it is not sent. The others are spread. With
    `single`, the first rank writes all of them into the file of that name.
    """
    places = tuple(tuple(parts) for parts in owned)
    if single is not None:
        return Plan(places, dict.fromkeys(schema.by_name(), 0), ((single, schema.tensors),))
    owner: dict[str, int | None] = {}
    for place, parts in enumerate(owned):
        for part in parts:
            owner[part.spec.name] = place if owner.get(part.spec.name, place) == place else None
    num_writers = min(len(owned), max(1, -(-schema.num_bytes // WRITER_BYTES)))
    writers: dict[str, int] = {}
    num_bytes = [0] * num_writers

    def write(spec: TensorSpec, writer: int) -> None:
        writers[spec.name] = writer
        num_bytes[writer] += spec.num_bytes

    rest = []
    for spec in schema.tensors:
        first = owner[spec.name]
        if first is not None and first < num_writers:
            write(spec, first)
        else:
            rest.append(spec)
    for spec in sorted(rest, key=lambda each: (-each.num_bytes, each.name)):
        write(spec, min(range(num_writers), key=lambda each: (num_bytes[each], each)))
    mine: list[list[TensorSpec]] = [[] for _ in range(num_writers)]
    for spec in schema.tensors:
        mine[writers[spec.name]].append(spec)
    most = tensor_file.max_file_bytes(schema.num_bytes, max_shard_bytes)
    found = [tuple(some) for its in mine for some in tensor_file.split(its, most) if some]
    named = ((layout.shard_name(number, len(found)), specs) for number, specs in enumerate(found, 1))
    return Plan(places, writers, tuple(named))
