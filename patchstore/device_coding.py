"""Changes coded against the parent on the device that found them; `relative` does the same on the CPU.

Imports Triton, so only what runs kernels may import it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from patchstore import payload
from patchstore.digest import Sums
from patchstore.encodings import RELATIVE, named
from patchstore.encodings.context import Coded, packed_table, pays, tiling
from patchstore.kernels import context_encode, context_tables, patch
from patchstore.model import DTYPE_BYTES, TensorSpec
from patchstore.relative import Contents, bridged, gap_bytes
from patchstore.tensors import TORCH_DTYPES, TensorPatch, bits


@dataclass(frozen=True, slots=True)
class Raw:
    """A change as `kernels.compare.encode` writes it in encoding `raw`, on the device."""

    specs: Sequence[TensorSpec]
    """All tensors of the run, in the order of the head."""
    entries: Sequence[tuple[int, TensorSpec]]
    """In the order of the data, which of `specs` each is of, and its spec but for its length."""
    block: torch.Tensor
    nums: Sequence[int]
    """Changed elements of each of `specs`."""

    def patches(self) -> dict[str, TensorPatch]:
        """Return the changes by name; they share the block."""
        found: dict[str, torch.Tensor] = {}
        start = 24 * len(self.specs)
        for tensor, entry in self.entries:
            end = start + self.nums[tensor] * DTYPE_BYTES[entry.dtype]
            if end > start:
                found[entry.name] = self.block[start:end].view(TORCH_DTYPES[entry.dtype])
            start = end
        return {
            spec.name: TensorPatch(
                name=spec.name, indices=found[f"{spec.name}.idx"], values=found[f"{spec.name}.val"]
            )
            for spec, num in zip(self.specs, self.nums, strict=True)
            if num
        }


def code(
    schema: Sequence[TensorSpec],
    raw: Raw,
    grown: Mapping[str, Sums],
    parents: Mapping[str, torch.Tensor],
    *,
    may_be_gap: bool,
) -> Contents:
    """Code a change; waits for the current stream.

    Args:
        grown: by how much the digest sums of the tensors with changes grow.
        parents: of the run by name, contiguous, where the device can address them.
        may_be_gap: whether encoding `gap` will do where it is smaller.
    """
    patches = raw.patches()
    changed = [(place, spec) for place, spec in enumerate(schema) if spec.name in patches]
    nums = {spec.name: len(patches[spec.name].indices) for _, spec in changed}
    coded = [(place, spec) for place, spec in changed if pays(spec, nums[spec.name])]
    stored = _coded(coded, patches, parents)
    listed = [spec for _, spec in changed if not pays(spec, nums[spec.name])]
    encoding = RELATIVE
    least = gap_bytes((spec, nums[spec.name]) for _, spec in coded)
    if may_be_gap and sum(each.nbytes for each in stored.values()) >= least:
        encoding, stored, listed = "gap", {}, [spec for _, spec in changed]
    stated = [
        (spec, bridged(spec, _on_host(patches[spec.name]), bits(parents[spec.name]))) for spec in listed
    ]
    return Contents(
        encoding=encoding,
        listed=listed,
        stored={**stored, **payload.encoded(stated, named("gap"))},
        grown=grown,
        parents=_digests([spec for _, spec in changed], parents, raw.block.device),
    )


def _on_host(found: TensorPatch) -> TensorPatch:
    return TensorPatch(name=found.name, indices=found.indices.cpu(), values=found.values.cpu())


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
        counts = np.array([-(-spec.num_elements // patch.BLOCK) for spec in same])
        owners = np.repeat(np.arange(len(same)), counts)
        blocks = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        kind = patch.Kind(
            value_width=width,
            memory_width=width,
            num_dims=0,
            is_narrow=all(spec.num_elements < 2**31 for spec in same),
            is_aligned=all(row[4] % 16 == 0 for row in rows),
        )
        jobs = np.stack([owners, blocks], axis=1).astype(np.int32)
        table = torch.tensor(rows, device="cpu").to(device)
        sums = patch.digest(kind, table, torch.from_numpy(jobs).to(device)).tolist()
        found |= {
            spec.name: Sums(one % 2**64, two % 2**64) for spec, (one, two, _) in zip(same, sums, strict=True)
        }
    return found
