"""Gaps in plain torch, on any device: what kernels are measured beside."""

import torch

from patchstore.tensors.elements import MAX_GAP


def bridge(indices: torch.Tensor) -> torch.Tensor:
    """Return `indices` with as many positions added as it takes for no gap to exceed 65,535."""
    if indices.numel() == 0 or int(indices[-1]) <= MAX_GAP:
        return indices
    before = torch.cat([indices.new_full((1,), -1), indices[:-1]])
    num_bridges = (indices - before - 1) // (MAX_GAP + 1)
    if not bool(num_bridges.any()):
        return indices
    counts = num_bridges + 1
    last = counts.cumsum(0) - 1  # where each given position comes to stand
    owner = torch.repeat_interleave(torch.arange(len(indices), device=indices.device), counts)
    nth = torch.arange(len(owner), device=indices.device) - (last - num_bridges)[owner] + 1
    bridged = before[owner] + nth.to(indices.dtype) * (MAX_GAP + 1)
    bridged[last] = indices
    return bridged


def to_gaps(indices: torch.Tensor) -> torch.Tensor:
    """Return uint16 gaps [num]: the positions skipped before each index. Example: [3, 4, 10] -> [3, 0, 5]."""
    before = torch.cat([indices.new_full((1,), -1), indices[:-1]])[: len(indices)]
    return (indices - before - 1).to(torch.uint16)


def from_gaps(gaps: torch.Tensor) -> torch.Tensor:
    """Return the int64 positions [num] that uint16 gaps stand for. Example: [3, 0, 5] -> [3, 4, 10]."""
    return (gaps.to(torch.int64) + 1).cumsum(0) - 1
