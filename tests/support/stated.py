"""What a file states of one tensor by positions and values, as a publisher writes it."""

import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from patchstore.bucket.records import Schema, TensorSpec
from patchstore.codec import IndexEncoding, delta_file
from patchstore.codec.context import Coded
from patchstore.codec.delta_file import Content
from patchstore.codec.index import Gap, Listed
from patchstore.codec.listing import Column, Stated, bridged, listing
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, index_dtype, unsigned
from patchstore.tensors.columns import Group, patches


def group_of(patch: TensorPatch, number: int = 0) -> Group:
    found = np.array([number]), np.array([len(patch.indices)])
    return Group(*found, patch.indices.numpy(), unsigned(patch.values))


def with_bridges(encoding: IndexEncoding, changed: torch.Tensor) -> torch.Tensor:
    """The positions that a publisher of a whole tensor states for these changed ones."""
    if not isinstance(encoding, Gap) or not len(changed):
        return changed
    patch = TensorPatch(name="", indices=changed, values=torch.zeros(len(changed), dtype=torch.uint8))
    found = bridged(group_of(patch))
    return changed if found is None else torch.from_numpy(found[0].positions).to(changed.dtype)


def encoded(encoding: IndexEncoding, patch: TensorPatch, spec: TensorSpec) -> Listed:
    """What is stored for a patch of positions from `with_bridges`."""
    if not len(patch.indices):
        return listed(torch.empty(0, dtype=idx_dtype(encoding, spec)), patch.values)
    idx, val = listing(Schema(tensors=(spec,)), [Stated(group_of(patch))], encoding).columns
    if idx.suffix == ".val":
        idx, val = val, idx
    return listed(idx.data.view(TORCH_DTYPES[idx.dtype]), val.data.view(TORCH_DTYPES[val.dtype]))


def content_of(encoding: IndexEncoding, schema: Schema, given: Iterable[TensorPatch]) -> Content:
    """What a payload states, of patches of different tensors with positions from `with_bridges`."""
    groups = [Stated(group_of(patch, schema.places[patch.name])) for patch in given if len(patch.indices)]
    columns = listing(schema, groups, encoding).columns
    found = []
    for idx in (column for column in columns if column.suffix == ".idx"):
        (val,) = (
            each for each in columns if each.suffix == ".val" and np.array_equal(each.numbers, idx.numbers)
        )
        found.append(
            Listed(
                where="a/key",
                numbers=val.numbers,
                counts=val.counts,
                firsts=np.zeros_like(val.counts),
                starts=val.counts.cumsum() - val.counts,
                idx=as_in_a_file(idx),
                val=as_in_a_file(val),
            )
        )
    return Content(found, Coded.none())


def as_in_a_file(column: Column) -> torch.Tensor:
    """A copy of the data that begins anywhere that 8 divides."""
    memory = torch.zeros(8 + column.data.nbytes, dtype=torch.uint8)
    memory[8:] = column.data.view(torch.uint8)
    return memory[8:].view(TORCH_DTYPES[column.dtype])


def listed(idx: torch.Tensor, val: torch.Tensor, *, first: int = 0, where: str = "here") -> Listed:
    """What a payload lists of a schema's one tensor."""
    number, count, begin, start = (np.array([each]) for each in (0, len(idx), first, 0))
    return Listed(where, number, count, begin, start, idx, val)


def decoded(encoding: IndexEncoding, stored: Listed, spec: TensorSpec) -> TensorPatch:
    schema = Schema(tensors=(spec,))
    if not len(stored.idx):
        dtype = index_dtype(spec.num_elements)
        return TensorPatch(name=spec.name, indices=torch.empty(0, dtype=dtype), values=stored.val)
    return next(patches(encoding.decode(stored, schema), schema))


def from_file(
    encoding: IndexEncoding, spec: TensorSpec, idx: torch.Tensor, val: torch.Tensor, where: str
) -> TensorPatch:
    """What is decoded of a delta file that lists one tensor so."""
    told = json.dumps({spec.name: {"dtype": spec.dtype, "shape": [*spec.shape]}})
    metadata = delta_file.identity(1, 0, 1, "run", encoding.name) | {"tensors": told}
    data = bytearray(save({f"{spec.name}.idx": idx, f"{spec.name}.val": val}, metadata))
    delta = SimpleNamespace(encoding=encoding.name)
    manifest: Any = SimpleNamespace(version=1, parent=0, step=1, run_id="run", delta=delta)
    content = delta_file.read_delta(where, data, manifest, Schema(tensors=(spec,)))
    return decoded(encoding, content.listed[0], spec)


def idx_dtype(encoding: IndexEncoding, spec: TensorSpec) -> torch.dtype:
    if isinstance(encoding, Gap):
        return torch.uint16
    return torch.int32 if spec.num_elements < 2**31 else torch.int64
