"""What one version stores, brought to the device: gaps as they are, and streams decoded."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.encodings.base import EncodedTensor, check_stored
from patchstore.encodings.context import Coded
from patchstore.encodings.gap import Gap
from patchstore.errors import CorruptObject
from patchstore.format.records import TensorSpec
from patchstore.kernels import gap_decode
from patchstore.kernels.gap_decode import TILE
from patchstore.read.parts import Parts
from patchstore.tensors.bits import bits
from vllm_plugin.decode_gpu import Listed, Patches, Places, decode
from vllm_plugin.upload import aligned, send, send_memory, tables_on

Array = npt.NDArray[Any]

Stored = Mapping[str, Parts]
"""One version: by name what its payloads have of each tensor."""
Listing = tuple[str, str, EncodedTensor]
"""A tensor's name, the key of an object, and what that lists."""


class Gaps(NamedTuple):
    """Patches of one version on the device."""

    patches: Patches
    starts: torch.Tensor
    """int64 [num_tiles]: one past the position before each tile."""
    jobs: torch.Tensor
    """int32 [num_tiles, 2]: which of the patches, and which of its tiles."""
    memory: torch.Tensor
    """uint8: gaps and values, which the patches point to."""

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all values, of elements of one width, one patch after the other."""
        firsts = self.patches.values - self.memory.data_ptr()
        ends = firsts + self.patches.nums * dtype.itemsize
        parts = [self.memory[i:j] for i, j in zip(firsts.tolist(), ends.tolist(), strict=True)]
        return torch.cat(parts).view(dtype)


def listings(stored: Stored, names: Sequence[str]) -> list[Listing]:
    """Return what a version lists of some names by position or gap."""
    return [
        (name, key, each) for name in names for key, each in stored[name] if isinstance(each, EncodedTensor)
    ]


def is_gaps(parts: Parts) -> bool:
    """Whether a tensor is stored as one list of gaps."""
    return len(parts) == 1 and isinstance(parts[0][1], EncodedTensor) and _has_gaps(parts[0][1])


def send_gaps(listed: Sequence[Listing], specs: Mapping[str, TensorSpec], device: torch.device) -> Gaps:
    """Bring lists of gaps to the device.

    Raises:
        CorruptObject: of another dtype or length, or beyond the end of a tensor.
    """
    for name, key, encoded in listed:
        check_stored(encoded, specs[name], torch.uint16, key)
    lists = [each.contiguous() for *_, one in listed for each in (one.idx, one.val)]
    nums = np.array([each.numel() for each in lists[::2]], dtype=np.int64)
    widths = np.array([each.element_size() for each in lists], dtype=np.int64)
    addresses = np.array([each.data_ptr() for each in lists], dtype=np.int64)
    for i in np.flatnonzero(addresses % widths).tolist():
        lists[i] = aligned(lists[i])
        addresses[i] = lists[i].data_ptr()
    memory, places = send_memory(addresses, np.repeat(nums, 2) * widths, device)
    positions, values = (memory.data_ptr() + places).reshape(-1, 2).T
    firsts = np.array([encoded.first for *_, encoded in listed], dtype=np.int64)
    sizes = np.array([specs[name].num_elements for name, *_ in listed], dtype=np.int64)
    begins = np.concatenate([np.zeros(1, dtype=np.int64), num_tiles(nums).cumsum()])
    streams = np.column_stack([positions, nums, np.zeros_like(nums), np.zeros_like(nums)])
    jobs, streams_there, begins_there, firsts_there, sizes_there = tables_on(
        device, jobs_of(nums, TILE), streams, begins, firsts, sizes
    )
    sums = gap_decode.sum_gaps(streams_there, jobs)
    ends = torch.cat([sums.new_zeros(1), sums.cumsum(0)])
    bounds = ends[begins_there]
    reach = bounds[1:] - bounds[:-1] + firsts_there
    if wrong := (reach > sizes_there).nonzero()[:, 0].tolist():
        name, key, _ = listed[wrong[0]]
        raise CorruptObject(
            f"{key}: gaps of {name!r} reach position {int(reach[wrong[0]]) - 1}, beyond its "
            f"{specs[name].num_elements} elements"
        )
    patches = Patches([name for name, *_ in listed], positions, values, nums, np.full_like(nums, 2))
    return Gaps(patches, ends[:-1] + (firsts_there - bounds[:-1])[jobs[:, 0]], jobs, memory)


def list_positions(
    listed: Sequence[Listing],
    specs: Mapping[str, TensorSpec],
    firsts: Mapping[str, int],
    device: torch.device,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what tensors of one element width list: positions, int64 [num], and the bits of values.

    Args:
        firsts: by name, what is added to positions.

    Raises:
        CorruptObject: as `send_gaps`.
    """
    short = [each for each in listed if _has_gaps(each[2])]
    if num := sum(each.val.numel() for *_, each in short):
        gaps = send_gaps(short, specs, device)
        nums = gaps.patches.nums
        added = np.array([firsts[name] for name, *_ in short], dtype=np.int64)
        streams = np.column_stack([gaps.patches.positions, nums, nums.cumsum() - nums, added])
        yield (
            gap_decode.list_positions(table_on(device, streams), gaps.jobs, gaps.starts, num),
            gaps.values(bits(short[0][2].val).dtype),
        )
    for name, key, each in listed:
        if not _has_gaps(each):
            patch = Gap().decode(each, specs[name], key)
            positions, values = send([patch.indices, bits(patch.values)], device)
            yield positions.to(torch.int64) + firsts[name], values


def _has_gaps(encoded: EncodedTensor) -> bool:
    """Whether it has gaps; anything else is for `Gap.decode` to judge."""
    return encoded.idx.dtype == torch.uint16


def decode_coded(
    stored: Stored, names: Sequence[str], places: Mapping[str, Places], device: torch.device
) -> Listed:
    """Decode one version's changes of what is coded of some names.

    Raises:
        CorruptObject: a stream that no encoder writes for such a parent.
    """
    coded = [(name, key, each) for name in names for key, each in stored[name] if isinstance(each, Coded)]
    return decode(coded, places, device)


def table_on(device: torch.device, rows: object) -> torch.Tensor:
    """Return rows of numbers as a tensor on the device."""
    array = np.array(rows) if not isinstance(rows, np.ndarray) else rows
    return torch.from_numpy(array).to(device)


def num_tiles(nums: Array) -> Array:
    """How many tiles so many changes, or gaps, each are cut into."""
    tiles: Array = -(-nums // TILE)
    return tiles


def jobs_of(sizes: Array, size: int) -> Array:
    """List (which of `sizes`, which part of it) for all parts of at most `size`: int32 [num_jobs, 2]."""
    counts = -(-sizes.astype(np.int64) // size)
    jobs = np.empty((int(counts.sum()), 2), dtype=np.int32)
    jobs[:, 0] = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
    jobs[:, 1] = np.arange(len(jobs)) - np.repeat(counts.cumsum() - counts, counts)
    return jobs
