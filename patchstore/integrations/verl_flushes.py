"""What a version changes, in the format of verl's receivers inside of vLLM and SGLang."""

import json
from collections.abc import Iterator
from typing import NamedTuple

import torch
from verl.checkpoint_engine.delta_sync.encode import DeltaParam, checksum

from patchstore.apply.replica import Replica
from patchstore.apply.staged import Staged
from patchstore.errors import SchemaMismatch

_MAX_ENTRY = 64 << 20
"""Elements of one entry of a flush: verl's receivers take 8 bytes for each, and more, while they decode."""

Flush = list[tuple[str, torch.Tensor]]


class Entry(NamedTuple):
    """Elements of one tensor."""

    name: str
    shape: tuple[int, ...]
    indices: torch.Tensor | None
    """Positions in the flattened tensor; None for all of it."""
    values: torch.Tensor


def has_nan(staged: Staged) -> bool:
    """Whether NaN is among changed elements, which verl's receivers take for elements that did not change."""
    values = (patch.values for patch in staged.patches.values())
    return any(each.is_floating_point() and bool(each.isnan().any()) for each in values)


def flushes(wanted: Iterator[Entry], most_bytes: int, device: torch.device) -> Iterator[Flush]:
    """Yield entries in verl's format: of one dtype each, and of about `most_bytes`."""
    held: list[Entry] = []
    num_bytes = 0
    for entry in wanted:
        if held and (num_bytes >= most_bytes or held[0].values.dtype != entry.values.dtype):
            yield _flush(held, device)
            held, num_bytes = [], 0
        held.append(entry)
        num_bytes += entry.values.nbytes + (0 if entry.indices is None else 4 * len(entry.indices))
    if held:
        yield _flush(held, device)


def all_entries(replica: Replica) -> Iterator[Entry]:
    """Yield all tensors as they are."""
    for spec in sorted(replica.header.schema.tensors, key=lambda spec: (spec.dtype, spec.name)):
        yield Entry(spec.name, spec.shape, None, replica.tensors[spec.name].reshape(-1))


def entries(staged: Staged, replica: Replica) -> Iterator[Entry]:
    """Yield what an update writes."""
    specs = replica.header.schema.by_name()
    for name in sorted(staged.names, key=lambda name: (specs[name].dtype, name)):
        spec = specs[name]
        if name in staged.full:
            yield Entry(name, spec.shape, None, staged.full[name].reshape(-1))
            continue
        patch = staged.patches[name]
        if spec.num_elements >= 1 << 31:
            raise SchemaMismatch(f"{spec} has more elements than verl's receivers can address, 2**31 - 1")
        for first in range(0, len(patch.indices), _MAX_ENTRY):
            some = slice(first, first + _MAX_ENTRY)
            yield Entry(name, spec.shape, patch.indices[some].to(torch.int32), patch.values[some])


def _flush(entries: list[Entry], device: torch.device) -> Flush:
    is_dense = entries[0].indices is None
    params = []
    end = 0
    for entry in entries:
        start, end = end, end + len(entry.values)
        params.append(
            DeltaParam(
                name=entry.name,
                dtype=str(entry.values.dtype).removeprefix("torch."),
                shape=list(entry.shape),
                pos_start=0 if is_dense else 4 * start,
                pos_end=0 if is_dense else 4 * end,
                pos_width=4,
                val_start=start,
                val_end=end,
            )
        )
    values = torch.cat([entry.values for entry in entries]).to(device)
    listed = [entry.indices for entry in entries if entry.indices is not None]
    positions = torch.cat(listed).view(torch.uint8) if listed else torch.empty(0, dtype=torch.uint8)
    positions = positions.to(device)
    told = {
        "encoding": "dense" if is_dense else "indices",
        "verify": False,
        "params": [vars(param) for param in params],
        "checksum": int(checksum(positions, values)),
    }
    spec = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8).to(device)
    found = [("__delta_spec__", spec), ("__values__", values)]
    return found if is_dense else [found[0], ("__positions__", positions), found[1]]
