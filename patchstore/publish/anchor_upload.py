"""Upload an anchor: the shards of a whole model, and the files beside them.

Tensors are streamed, so that memory is bounded by one of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch

from patchstore.format import layout
from patchstore.format.records import Anchor, Payload, Schema, StoreHeader, TensorSpec
from patchstore.format.state_sums import Sums
from patchstore.payloads import anchor_file, tensor_file
from patchstore.stores.base import Chunk


def upload_anchor(
    version: int,
    step: int,
    write_id: str,
    header: StoreHeader,
    tensors: Callable[[str], tuple[torch.Tensor, Sums]],
    files: Mapping[str, bytes],
    *,
    max_shard_bytes: int,
    upload: Callable[[str, Callable[[], Iterable[Chunk]]], Payload],
) -> tuple[Anchor, dict[str, Sums]]:
    """Upload a whole model; returns where it is, and the digest sums of its tensors.

    Args:
        tensors: returns a tensor of the schema by name, in host memory, and its digest sums.
        files: by name; each is stored beside the shards.
        upload: stores an object by key; may ask for its chunks several times.
    """
    sums: dict[str, Sums] = {}

    def digested(specs: Sequence[TensorSpec]) -> Iterator[torch.Tensor]:
        for spec in specs:
            tensor, sums[spec.name] = tensors(spec.name)
            yield tensor

    prefix = layout.anchor_prefix(version, write_id)
    metadata = anchor_file.anchor_metadata(version, step, header.run_id)
    shards = _split(header.schema, max_shard_bytes)

    def shard(specs: Sequence[TensorSpec]) -> Iterator[Chunk]:
        return tensor_file.write(specs, digested(specs), metadata)

    payloads: list[Payload] = []
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(shards, 1):
        name = layout.shard_name(number, len(shards))
        weight_map |= {spec.name: name for spec in specs}
        payloads.append(upload(prefix + name, partial(shard, specs)))
    beside = dict(files)
    if len(shards) > 1:
        beside["model.safetensors.index.json"] = anchor_file.index_json(header.schema, weight_map)
    stored = [upload(prefix + name, partial(iter, (data,))) for name, data in sorted(beside.items())]
    return Anchor(payloads=tuple(payloads), files=tuple(stored)), sums


def _split(schema: Schema, max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Group tensors into the shards of an anchor, in order; a larger tensor has a shard of its own."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in tensor_file.aligned(schema.tensors):
        if shards[-1] and size + spec.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.num_bytes
    return shards
