"""Parts of tensors, see `bucket.records.Part`, as far as they need torch."""

import torch

from patchstore.bucket.records import Part
from patchstore.tensors import state_digest
from patchstore.tensors.bits import bits
from patchstore.tensors.state_digest import Sums

_TOGETHER = 1 << 22
"""Elements whose positions are listed at a time."""


def name_of(key: str) -> str:
    """Return the tensor's name of a key. The key of a part has more, behind a tab; names have no tabs."""
    return key.partition("\t")[0]


def positions(part: Part, local: torch.Tensor) -> torch.Tensor:
    """Return where elements of a flattened part stand in the flattened tensor, int64 [num]."""
    found: torch.Tensor = part.positions(local.to(torch.int64))
    return found


def of_whole(part: Part, whole: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor; it shares memory, and may not be contiguous."""
    for dim, (start, size) in enumerate(zip(part.start, part.size, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def digest(part: Part, held: torch.Tensor) -> Sums:
    """Return what a part, whose elements `held` are contiguous, adds to its tensor's digest sums."""
    if part.run is not None:
        return state_digest.of_run(part.run, held)
    flat, total = bits(held), Sums()
    for start in range(0, len(flat), _TOGETHER):
        some = flat[start : start + _TOGETHER]
        at = positions(part, torch.arange(start, start + len(some), device=flat.device))
        total = total.plus(state_digest.of_elements(at, some))
    return total
