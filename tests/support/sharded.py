"""Versions of several payloads, each of which states one process's parts of the tensors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from patchstore.bucket import digests, history
from patchstore.bucket.manifest_json import to_json
from patchstore.bucket.records import Delta, Manifest, Part, Payload, Schema, StateDigest, TensorSpec
from patchstore.bucket.state_sums import SumsArray, pack_sums, read_sums, state_total
from patchstore.codec import ENCODINGS
from patchstore.codec.delta import DeltaEncoder, EncodedDelta
from patchstore.codec.part_table import PartSums, PartTable
from patchstore.publish.ownership import told_sums, total_sums
from patchstore.stores import layout
from patchstore.stores.base import Chunk, Store
from patchstore.tensors.columns import Block
from patchstore.tensors.parts import of_whole

State = Mapping[str, torch.Tensor]


def cut(spec: TensorSpec, dim: int, edges: Sequence[int]) -> list[Part]:
    """Cut a tensor along one dimension, one part between each two edges; they may be empty."""
    found = []
    for start, end in pairwise(edges):
        starts, sizes = [0] * len(spec.shape), list(spec.shape)
        starts[dim], sizes[dim] = start, end - start
        found.append(Part(spec, tuple(starts), tuple(sizes)))
    return found


def chunks(spec: TensorSpec, dim: int, num: int) -> list[Part]:
    """Cut a tensor as `torch.chunk` does, with empty parts at the end where it has fewer."""
    side = spec.shape[dim]
    step = -(-side // num)
    return cut(spec, dim, [min(side, number * step) for number in range(num + 1)])


def encoded(schema: Schema, held: Sequence[Part], old: State, new: State, encoding: str) -> EncodedDelta:
    """What one process publishes."""
    table = table_of(schema, held)
    parts, encoder = table.parts, DeltaEncoder(schema, table, ENCODINGS[encoding])
    for dtype in sorted({part.spec.dtype for part in parts}):
        numbers = [number for number, part in enumerate(parts) if part.spec.dtype == dtype]
        before, after = (
            [of_whole(parts[number], state[parts[number].spec.name]).contiguous() for number in numbers]
            for state in (old, new)
        )
        block = Block.of(numbers, before)
        encoder.add(block.changed(after, block.numbers), block)
    return encoder.delta()


def publish(
    store: Store, ranks: Sequence[Sequence[Part]], old: State, new: State, encoding: str
) -> tuple[Manifest, list[EncodedDelta]]:
    """Commit one more version, each rank's parts in a payload of their own."""
    header, parent = history.read_header(store), history.head(store)
    assert header is not None
    assert parent is not None
    version, write_id = parent.version + 1, f"{parent.version + 1:016x}"
    found = [encoded(header.schema, held, old, new, encoding) for held in ranks]
    stated = [each for each in found if each.num_changed]
    growth = added(header.schema, ranks, [each.growth for each in found])
    after = read_sums(store, header.schema, parent) + growth
    payloads = []
    for number, each in enumerate(stated, 1):
        file = replace(each, encoding=encoding).file(
            header.schema, version=version, parent=parent.version, step=version, run_id=header.run_id
        )
        payloads.append(_put(store, layout.delta_key(version, write_id, number, len(stated)), file))
    sums = pack_sums(header.schema, after)
    key = layout.sums_key(version, write_id)
    store.put(key, sums)
    manifest = replace(
        parent,
        version=version,
        parent=parent.version,
        parent_digest=digests.digest(to_json(parent)),
        step=version,
        writer=replace(parent.writer, write_id=write_id),
        state=StateDigest(
            total=state_total(header.schema, after),
            sums=Payload(key=key, size=len(sums), digest=digests.digest(sums)),
        ),
        delta=Delta(
            encoding=encoding,
            num_changed=sum(each.num_changed for each in stated),
            payloads=tuple(payloads),
        ),
        anchor=None,
    )
    store.put(layout.manifest_key(version), to_json(manifest))
    return manifest, found


def _put(store: Store, key: str, file: Callable[[], Iterable[Chunk]]) -> Payload:
    data = b"".join(file())
    store.put(key, data)
    return Payload(key=key, size=len(data), digest=digests.digest(data))


def table_of(schema: Schema, held: Sequence[Part]) -> PartTable:
    parts = sorted(held, key=lambda part: part.key)
    return PartTable(parts, [schema.places[part.spec.name] for part in parts])


def by_number(sums: PartSums) -> dict[int, list[int]]:
    return dict(zip(sums.numbers.tolist(), sums.sums.tolist(), strict=True))


def added(schema: Schema, ranks: Sequence[Sequence[Part]], sums: Sequence[PartSums]) -> SumsArray:
    """Add up digest sums of parts, of each tensor of the schema."""
    each = [told_sums(table_of(schema, held), its) for held, its in zip(ranks, sums, strict=True)]
    return total_sums(schema, each)
