"""Upload an anchor: the shards of a whole model, and the files beside them.

Tensors are streamed, so that memory is bounded by one of them for each shard that is under way.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Protocol

import torch

from patchstore.format import layout
from patchstore.format.records import Anchor, Part, Payload, StoreHeader, TensorSpec
from patchstore.format.state_sums import Sums
from patchstore.payloads import anchor_file, tensor_file
from patchstore.stores.base import Chunk

SHARDS_AT_ONCE = 4
"""A file in memory takes 2 GB/s from one thread, which is less than a digest and a bus can do."""


class ReadOnly(Protocol):
    """A snapshot, as far as an anchor is made of it; see `snapshot.Snapshot`."""

    def read(self, part: Part) -> tuple[torch.Tensor, Sums]: ...

    def digest(self, tensor: torch.Tensor) -> Sums: ...


def upload_anchor(
    version: int,
    step: int,
    write_id: str,
    header: StoreHeader,
    snapshot: ReadOnly,
    files: Mapping[str, bytes],
    *,
    max_shard_bytes: int,
    upload: Callable[[str, Callable[[], Iterable[Chunk]]], Payload],
) -> tuple[Anchor, dict[str, Sums]]:
    """Upload a whole model; returns where it is, and the digest sums of its tensors.

    Args:
        snapshot: has the tensors.
        files: by name; each is stored beside the shards.
        upload: stores an object by key; may ask for its chunks several times. Called on several threads.
    """
    sums: dict[str, Sums] = {}
    reading = Lock()

    def digested(specs: Sequence[TensorSpec]) -> Iterator[torch.Tensor]:
        for spec in specs:
            with reading:
                tensor, sums[spec.name] = snapshot.read(Part.whole(spec))
            yield tensor

    prefix = layout.anchor_prefix(version, write_id)
    metadata = anchor_file.anchor_metadata(version, step, header.run_id)
    most = tensor_file.max_file_bytes(header.schema.num_bytes, max_shard_bytes)
    shards = tensor_file.split(header.schema.tensors, most)

    def shard(specs: Sequence[TensorSpec]) -> Iterator[Chunk]:
        return tensor_file.write(specs, digested(specs), metadata)

    weight_map: dict[str, str] = {}
    jobs: list[Callable[[], Payload]] = []
    for number, specs in enumerate(shards, 1):
        name = layout.shard_name(number, len(shards))
        weight_map |= {spec.name: name for spec in specs}
        jobs.append(partial(upload, prefix + name, partial(shard, specs)))
    if len(jobs) == 1:
        payloads = [jobs[0]()]
    else:
        with ThreadPoolExecutor(
            min(SHARDS_AT_ONCE, len(jobs)), thread_name_prefix="patchstore-shard"
        ) as pool:
            running = [pool.submit(job) for job in jobs]
            try:
                payloads = [each.result() for each in running]
            finally:
                # After a failure those that have not begun are left out.
                pool.shutdown(wait=True, cancel_futures=True)
    beside = dict(files)
    if len(shards) > 1:
        beside["model.safetensors.index.json"] = anchor_file.index_json(header.schema, weight_map)
    stored = [upload(prefix + name, partial(iter, (data,))) for name, data in sorted(beside.items())]
    return Anchor(payloads=tuple(payloads), files=tuple(stored)), sums
