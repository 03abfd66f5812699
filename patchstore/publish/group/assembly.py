"""Anchors of a model that no rank has whole, without a gather.

A rank stores what it has of tensors that other ranks write, as *pieces*. Each writer then streams its files
of the anchor: for one tensor after the other it reads the pieces from the store. So a rank holds one tensor
at a time, and what ranks send goes through the store alone. The pieces are deleted when the anchor is stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import torch

from patchstore.errors import CorruptObject, PublishFailed
from patchstore.format import layout
from patchstore.format.records import Part, Payload, StoreHeader, TensorSpec
from patchstore.format.state_sums import Sums
from patchstore.payloads import anchor_file, tensor_file
from patchstore.publish.anchor_upload import ReadOnly
from patchstore.publish.base_checkpoint import BaseCheckpoint
from patchstore.publish.committer import Attempt
from patchstore.publish.group.ownership import File
from patchstore.publish.uploads import Uploads
from patchstore.stores.base import Chunk, Store
from patchstore.tensors.bits import from_bytes
from patchstore.tensors.parts import of_whole


class Source(NamedTuple):
    """Where one part of a tensor is."""

    part: Part
    key: str
    """Of the object that has it; "" where the writer has it itself."""
    offset: int
    """Bytes from the object's beginning."""


class Pieces(NamedTuple):
    """What a rank stored for writers."""

    key: str = ""
    """"" where it stored nothing."""
    offsets: Mapping[str, int] = MappingProxyType({})
    """By key of the part, bytes from the object's beginning."""
    sums: Mapping[str, Sums] = MappingProxyType({})
    """By key of the part."""


def store_pieces(
    uploads: Uploads, attempt: Attempt, place: int, parts: Sequence[Part], snapshot: ReadOnly
) -> Pieces:
    """Upload what this rank has of tensors that others write.

    Args:
        place: this rank's, in the group.
    """
    some = [part for part in parts if part.num_elements]
    if not some:
        return Pieces()
    named = {f"piece-{number:05d}": part for number, part in enumerate(some)}
    specs = tensor_file.aligned(
        TensorSpec(name=name, dtype=part.spec.dtype, shape=part.size) for name, part in named.items()
    )
    metadata = {"format": "patchstore", "kind": "pieces"}
    key = layout.piece_key(attempt.version, attempt.write_id, place)
    sums: dict[str, Sums] = {}

    def tensors() -> Iterator[torch.Tensor]:
        for spec in specs:
            part = named[spec.name]
            tensor, sums[part.key] = snapshot.read(part)
            yield tensor

    uploads.upload(key, lambda: tensor_file.write(specs, tensors(), metadata))
    starts = accumulate(
        (spec.num_bytes for spec in specs), initial=len(tensor_file.header_bytes(specs, metadata))
    )
    offsets = {named[spec.name].key: start for spec, start in zip(specs, starts, strict=False)}
    return Pieces(key, offsets, sums)


class Written(NamedTuple):
    """What a rank wrote of an anchor."""

    payloads: list[Payload]
    sums: dict[str, Sums]
    """Of the tensors, by name."""
    own: dict[str, Sums]
    """Of the parts in them that are the rank's own, by key."""


def write_files(
    store: Store,
    uploads: Uploads,
    header: StoreHeader,
    attempt: Attempt,
    step: int,
    files: Sequence[tuple[str, File]],
    sources: Mapping[str, Sequence[Source]],
    *,
    snapshot: ReadOnly,
    base: BaseCheckpoint,
) -> Written:
    """Write this rank's files of an anchor.

    Args:
        files: with their names.
        sources: by tensor, where its parts are; not of those that are read from the base checkpoint.

    Raises:
        CorruptObject: a piece is shorter than the rank said that stored it.
        PublishFailed: the store does not take a file.
    """
    metadata = anchor_file.anchor_metadata(attempt.version, step, header.run_id)
    written = Written([], {}, {})

    def tensors(specs: Sequence[TensorSpec]) -> Iterator[torch.Tensor]:
        for spec in specs:
            if spec.name not in sources:
                found = base.read(spec)
                if found is None:
                    raise PublishFailed(f"{spec.name!r} is no longer in the folder of files=")
                written.sums[spec.name] = snapshot.digest(found)
                yield found
                continue
            filled = [source for source in sources[spec.name] if source.part.num_elements]
            if len(filled) == 1 and filled[0].part.is_whole and not filled[0].key:
                tensor, sums = snapshot.read(filled[0].part)
                written.own[spec.name] = sums
            else:
                tensor = _assembled(store, spec, filled, snapshot, written.own)
                sums = snapshot.digest(tensor)
            written.sums[spec.name] = sums
            yield tensor

    def chunks(file: File) -> Iterator[Chunk]:
        return tensor_file.write(file.specs, tensors(file.specs), metadata)

    prefix = layout.anchor_prefix(attempt.version, attempt.write_id)
    for name, file in files:
        written.payloads.append(uploads.upload(prefix + name, partial(chunks, file)))
    return written


def _assembled(
    store: Store, spec: TensorSpec, sources: Sequence[Source], snapshot: ReadOnly, own: dict[str, Sums]
) -> torch.Tensor:
    """Return a whole tensor, in host memory, and fill in the sums of this rank's own parts."""
    whole = from_bytes(spec, bytearray(spec.num_bytes))
    for part, key, offset in sources:
        if not key:
            tensor, own[part.key] = snapshot.read(part)
        else:
            sent = TensorSpec(name=spec.name, dtype=spec.dtype, shape=part.size)
            data = bytearray()
            for chunk in store.read(key, start=offset, end=offset + sent.num_bytes):
                data += chunk
            if len(data) != sent.num_bytes:
                raise CorruptObject(f"{key} ends {sent.num_bytes - len(data):,} bytes early")
            tensor = tensor_file.tensor_of(key, sent, data)
        of_whole(part, whole).copy_(tensor)
    return whole
