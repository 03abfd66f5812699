"""What one version stores, brought to the device: gaps as they are, and streams decoded."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
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
from vllm_plugin.decode_gpu import Listed, Patch, Places, decode
from vllm_plugin.upload import send

Stored = Mapping[str, Parts]
"""One version: by name what its payloads have of each tensor."""
Listing = tuple[str, str, EncodedTensor]
"""A tensor's name, the key of an object, and what that lists."""


class Gaps(NamedTuple):
    """Patches of one version on the device."""

    patches: list[Patch]
    starts: torch.Tensor
    """int64 [num_tiles]: one past the position before each tile."""
    jobs: torch.Tensor
    """int32 [num_tiles, 2]: which of the patches, and which of its tiles."""
    lists: list[torch.Tensor]
    """Gaps and values in turn, which the patches point to."""


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
    lists = send([each for *_, one in listed for each in (one.idx, bits(one.val))], device)
    patches = [
        Patch(gaps.data_ptr(), values.data_ptr(), values.numel(), 2)
        for gaps, values in zip(lists[::2], lists[1::2], strict=True)
    ]
    jobs = table_on(device, jobs_of(np.array([each.num for each in patches]), TILE))
    sums = gap_decode.sum_gaps(table_on(device, [(each.positions, each.num, 0, 0) for each in patches]), jobs)
    ends = torch.cat([sums.new_zeros(1), sums.cumsum(0)])
    bounds = ends[table_on(device, [0, *accumulate(num_tiles(each.num) for each in patches)])]
    firsts = table_on(device, np.array([encoded.first for *_, encoded in listed], dtype=np.int64))
    reach = bounds[1:] - bounds[:-1] + firsts
    sizes = np.array([specs[name].num_elements for name, *_ in listed], dtype=np.int64)
    if wrong := (reach > table_on(device, sizes)).nonzero()[:, 0].tolist():
        name, key, _ = listed[wrong[0]]
        raise CorruptObject(
            f"{key}: gaps of {name!r} reach position {int(reach[wrong[0]]) - 1}, beyond its "
            f"{specs[name].num_elements} elements"
        )
    return Gaps(patches, ends[:-1] + (firsts - bounds[:-1])[jobs[:, 0]], jobs, lists)


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
        begins = accumulate((each.num for each in gaps.patches), initial=0)
        streams = [
            (each.positions, each.num, begin, firsts[name])
            for (name, *_), each, begin in zip(short, gaps.patches, begins, strict=False)
        ]
        yield (
            gap_decode.list_positions(table_on(device, streams), gaps.jobs, gaps.starts, num),
            torch.cat(gaps.lists[1::2]),
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


def num_tiles(num: int) -> int:
    """How many tiles so many changes, or gaps, are cut into."""
    return -(-num // TILE)


def jobs_of(sizes: "np.ndarray[Any, np.dtype[np.int64]]", size: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """List (which of `sizes`, which part of it) for all parts of at most `size`: int32 [num_jobs, 2]."""
    counts = -(-sizes.astype(np.int64) // size)
    owners = np.repeat(np.arange(len(sizes)), counts)
    parts = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([owners, parts], axis=1).astype(np.int32)
