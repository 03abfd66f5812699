"""Encode changes on the device that found them; `payloads.delta` does the same on the CPU.

Imports Triton, so only what runs kernels may import it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from patchstore.encodings import Encoding
from patchstore.encodings.context import Coded, Context, packed_table, pays, tiling
from patchstore.format.records import DTYPE_BYTES, TensorSpec
from patchstore.kernels import context_encode, context_tables, digest
from patchstore.kernels.segments import Kind
from patchstore.payloads import delta_file
from patchstore.payloads.delta import EncodedDelta, with_bridges
from patchstore.publish.snapshot.device import DeviceChanges, on
from patchstore.tensors.bits import TensorPatch, bits
from patchstore.tensors.state_digest import Sums


def encode(schema: Sequence[TensorSpec], changes: DeviceChanges, encoding: Encoding) -> EncodedDelta:
    """Encode changes against the snapshot that they were found with, which is still the parent's.

    Waits for the device.
    """
    snapshot = changes.snapshot
    with snapshot.here(), on(snapshot.side):
        if isinstance(encoding, Context):
            return _encode_context(schema, changes, encoding)
        block = changes.block(gaps=encoding.name == "gap").on_host()
        return EncodedDelta(
            encoding=encoding.name,
            num_changed=changes.num_changed,
            listed=block.specs,
            entries=block.stored(),
            sum_growth=block.sum_growth(),
        )


def _encode_context(schema: Sequence[TensorSpec], changes: DeviceChanges, encoding: Context) -> EncodedDelta:
    block, parents = changes.block(gaps=False), changes.snapshot.tensors
    patches = {spec.name: found for spec, found in block.patches()}
    changed = [(place, spec) for place, spec in enumerate(schema) if spec.name in patches]
    coded = [(place, spec) for place, spec in changed if pays(spec, len(patches[spec.name].indices))]
    rest = [spec for _, spec in changed if not pays(spec, len(patches[spec.name].indices))]
    stated = [
        (spec, with_bridges(_on_host(patches[spec.name]), parents[spec.name], encoding.index)[0])
        for spec in rest
    ]
    return EncodedDelta(
        encoding=encoding.name,
        num_changed=changes.num_changed,
        listed=rest,
        entries={**_coded(coded, patches, parents), **delta_file.encoded(stated, encoding.index)},
        sum_growth=block.sum_growth(),
        parent_sums=_digests([spec for _, spec in changed], parents, changes.snapshot.device),
    )


def _on_host(found: TensorPatch) -> TensorPatch:
    return replace(found, indices=found.indices.cpu(), values=found.values.cpu())


def _coded(
    coded: Sequence[tuple[int, TensorSpec]],
    patches: Mapping[str, TensorPatch],
    parents: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return the file's entries for coded tensors."""
    if not coded:
        return {}
    mine = [patches[spec.name] for _, spec in coded]
    is_wide = any(each.indices.dtype == torch.int64 for each in mine)
    found = context_encode.encode(
        context_tables.geometry([tiling(spec.shape) for _, spec in coded]),
        np.array([context_tables.FORMATS[spec.dtype] for _, spec in coded], dtype=np.int64),
        np.array([parents[spec.name].data_ptr() for _, spec in coded], dtype=np.int64),
        _joined([each.indices for each in mine], torch.int64 if is_wide else torch.int32),
        _joined([bits(each.values) for each in mine], torch.int16),
        np.array([0, *accumulate(len(each.indices) for each in mine)], dtype=np.int64),
    )
    streams = torch.empty(
        found.streams.shape, dtype=torch.uint8, device="cpu", pin_memory=found.streams.is_cuda
    )
    streams.copy_(found.streams)
    num_tiles = [tiling(spec.shape).num_tiles for _, spec in coded]
    rows = np.split(found.rows, np.cumsum(found.num_classes)[:-1])
    lengths = np.split(found.lengths, np.cumsum(num_tiles)[:-1])
    nothing = np.zeros(0, dtype=np.uint8)
    items = [
        (place, Coded(lo=int(lo), rows=its_rows, lengths=its_lengths, data=nothing))
        for (place, _), lo, its_rows, its_lengths in zip(coded, found.lo, rows, lengths, strict=True)
    ]
    return {"table": packed_table(items), "tiles": streams}


def _joined(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Concatenate flat tensors; without a copy where they already lie side by side."""
    first = parts[0]
    step = first.element_size()
    ends = [each.data_ptr() + len(each) * step for each in parts]
    if all(each.dtype == dtype for each in parts) and all(
        each.data_ptr() == end for each, end in zip(parts[1:], ends[:-1], strict=True)
    ):
        return first.as_strided((sum(len(each) for each in parts),), (1,))
    return torch.cat([each.to(dtype) for each in parts])


def _digests(
    specs: Sequence[TensorSpec], tensors: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, Sums]:
    """Digest tensors, all of one element width at once."""
    found: dict[str, Sums] = {}
    for width in sorted({DTYPE_BYTES[spec.dtype] for spec in specs}):
        same = [spec for spec in specs if DTYPE_BYTES[spec.dtype] == width]
        rows = [
            (0, 0, spec.num_elements, 0, tensors[spec.name].data_ptr(), 0, spec.num_elements, 0)
            for spec in same
        ]
        counts = np.array([-(-spec.num_elements // digest.BLOCK) for spec in same])
        owners = np.repeat(np.arange(len(same)), counts)
        blocks = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        kind = Kind(
            value_width=width,
            memory_width=width,
            num_dims=0,
            is_narrow=all(spec.num_elements < 2**31 for spec in same),
            is_aligned=all(row[4] % 16 == 0 for row in rows),
        )
        jobs = np.stack([owners, blocks], axis=1).astype(np.int32)
        table = torch.tensor(rows, device="cpu").to(device)
        sums = digest.digest(kind, table, torch.from_numpy(jobs).to(device)).tolist()
        found |= {
            spec.name: Sums(one % 2**64, two % 2**64) for spec, (one, two, _) in zip(same, sums, strict=True)
        }
    return found
