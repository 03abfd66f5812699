"""What one version stores, brought to the device: gaps as they are, and streams decoded."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from patchstore.encodings.base import EncodedTensor, check_stored
from patchstore.encodings.context import Coded
from patchstore.errors import CorruptObject
from patchstore.format.records import TensorSpec
from patchstore.kernels import gap_decode
from patchstore.kernels.gap_decode import TILE
from patchstore.tensors.bits import bits
from vllm_plugin.decode_gpu import Listed, Patch, Places, decode
from vllm_plugin.upload import send

Stored = Mapping[str, tuple[str, EncodedTensor | Coded]]
"""One version: by name the key of an object, and what it has."""


class Gaps(NamedTuple):
    """One version's patches of some names on the device."""

    patches: dict[str, Patch]
    starts: torch.Tensor
    """int64 [num_tiles]: one past the position before each tile."""
    jobs: torch.Tensor
    """int32 [num_tiles, 2]: which of the patches, and which of its tiles."""
    lists: list[torch.Tensor]
    """Gaps and values in turn, which the patches point to."""


def send_gaps(
    stored: Stored, names: Sequence[str], specs: Mapping[str, TensorSpec], device: torch.device
) -> Gaps:
    """Bring one version's patches of those names that it stores as gaps to the device.

    Raises:
        CorruptObject: of another dtype or length, or beyond the end of a tensor.
    """
    names = [name for name in names if not isinstance(stored[name][1], Coded)]
    found: list[EncodedTensor] = []
    for name in names:
        where, encoded = stored[name]
        assert isinstance(encoded, EncodedTensor)
        check_stored(encoded, specs[name], torch.uint16, where)
        found.append(encoded)
    lists = send([each for one in found for each in (one.idx, bits(one.val))], device)
    patches = [
        Patch(gaps.data_ptr(), values.data_ptr(), values.numel(), 2)
        for gaps, values in zip(lists[::2], lists[1::2], strict=True)
    ]
    jobs = table_on(device, jobs_of(np.array([each.num for each in patches]), TILE))
    sums = gap_decode.sum_gaps(table_on(device, [(each.positions, each.num, 0, 0) for each in patches]), jobs)
    ends = torch.cat([sums.new_zeros(1), sums.cumsum(0)])
    bounds = ends[table_on(device, [0, *accumulate(num_tiles(each.num) for each in patches)])]
    reach = bounds[1:] - bounds[:-1]
    if wrong := (reach > table_on(device, [specs[n].num_elements for n in names])).nonzero()[:, 0].tolist():
        name = names[wrong[0]]
        raise CorruptObject(
            f"{stored[name][0]}: gaps of {name!r} reach position {int(reach[wrong[0]]) - 1}, beyond its "
            f"{specs[name].num_elements} elements"
        )
    return Gaps(dict(zip(names, patches, strict=True)), ends[:-1] - bounds[jobs[:, 0]], jobs, lists)


def decode_coded(
    stored: Stored, names: Sequence[str], places: Sequence[Places], device: torch.device
) -> Listed:
    """Decode one version's changes of some coded names.

    Raises:
        CorruptObject: a stream that no encoder writes for such a parent.
    """
    coded = [(key, each) for key, each in (stored[name] for name in names) if isinstance(each, Coded)]
    return decode(names, coded, places, device)


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
