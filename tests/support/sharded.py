"""Versions of several payloads, each of which states one process's parts of the tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from patchstore.encodings import ENCODINGS
from patchstore.format import hashing, history, layout
from patchstore.format.manifest_json import to_json
from patchstore.format.records import Delta, Manifest, Part, Payload, StateDigest, TensorSpec
from patchstore.format.state_sums import Sums, pack_sums, read_sums, state_total
from patchstore.payloads import delta_file
from patchstore.payloads.delta import DeltaEncoder, EncodedDelta, PartChange
from patchstore.stores.base import Store
from patchstore.tensors import parts
from patchstore.tensors.bits import TensorPatch, bits

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


def changes_of(part: Part, old: State, new: State) -> PartChange | None:
    """What changed of a part; None where nothing did."""
    before, after = (parts.of_whole(part, state[part.spec.name]).contiguous() for state in (old, new))
    at = (bits(before) != bits(after)).nonzero().view(-1)
    if not len(at):
        return None
    return part, TensorPatch(name=part.spec.name, indices=at, values=after.reshape(-1)[at]), before


def encoded(
    schema: Sequence[TensorSpec], held: Sequence[Part], old: State, new: State, encoding: str
) -> EncodedDelta:
    """What one process publishes."""
    encoder = DeltaEncoder(schema, ENCODINGS[encoding])
    encoder.add_parts(each for each in (changes_of(part, old, new) for part in held) if each is not None)
    return encoder.delta()


def publish(
    store: Store, ranks: Sequence[Sequence[Part]], old: State, new: State, encoding: str
) -> tuple[Manifest, list[EncodedDelta]]:
    """Commit one more version, each rank's parts in a payload of their own."""
    header, parent = history.read_header(store), history.head(store)
    assert header is not None
    assert parent is not None
    version, write_id = parent.version + 1, f"{parent.version + 1:016x}"
    found = [encoded(header.schema.tensors, held, old, new, encoding) for held in ranks]
    stated = [each for each in found if each.num_changed]
    before = read_sums(store, header.schema, parent)
    after = dict(before)
    payloads = []
    for number, each in enumerate(stated, 1):
        for name, growth in added([each.sum_growth]).items():
            after[name] = after[name].plus(growth)
        metadata = delta_file.delta_metadata(
            version, parent.version, version, header.run_id, encoding, each.listed, each.firsts
        )
        payloads.append(_put(store, layout.delta_key(version, write_id, number, len(stated)), each, metadata))
    sums = pack_sums(header.schema, after)
    key = layout.sums_key(version, write_id)
    store.put(key, sums)
    manifest = replace(
        parent,
        version=version,
        parent=parent.version,
        parent_digest=hashing.digest(to_json(parent)),
        step=version,
        writer=replace(parent.writer, write_id=write_id),
        state=StateDigest(
            total=state_total(header.schema, after),
            sums=Payload(key=key, size=len(sums), digest=hashing.digest(sums)),
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


def _put(store: Store, key: str, delta: EncodedDelta, metadata: Mapping[str, str]) -> Payload:
    data = b"".join(delta.file(metadata)())
    store.put(key, data)
    return Payload(key=key, size=len(data), digest=hashing.digest(data))


def added(sums: Sequence[Mapping[str, Sums]]) -> dict[str, Sums]:
    """Add up digest sums of parts, by the names of tensors."""
    found: dict[str, Sums] = {}
    for each in sums:
        for key, its in each.items():
            # See `Part.key`.
            name = key.partition("\t")[0]
            found[name] = found.get(name, Sums()).plus(its)
    return found
