"""Torch operations that only move elements: how each one's result follows from what it was given.

Each rule takes the provenance of all memory, the operation's result, and its arguments. It returns whether
the operation could be followed. Where it could not, the result counts as calculated.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from vllm_plugin.provenance import MAX_COPIES, Provenance, memory

aten = torch.ops.aten


def _clone(known: Provenance, result: torch.Tensor, source: torch.Tensor, **_: Any) -> bool:
    known.copy(result, source)
    return True


def _cat(known: Provenance, result: torch.Tensor, given: list[torch.Tensor], dim: int = 0) -> bool:
    start = 0
    for each in given:
        if each.dim() == 1 and each.numel() == 0:
            continue
        known.copy(result.narrow(dim, start, each.shape[dim]), each)
        start += each.shape[dim]
    return True


def _stack(known: Provenance, result: torch.Tensor, given: list[torch.Tensor], dim: int = 0) -> bool:
    return _cat(known, result, [each.unsqueeze(dim) for each in given], dim)


def _repeat(known: Provenance, result: torch.Tensor, source: torch.Tensor, repeats: list[int]) -> bool:
    shape = (*(1,) * (len(repeats) - source.dim()), *source.shape)
    split = [n for pair in zip(repeats, shape, strict=True) for n in pair]
    once = [n for size in shape for n in (1, size)]
    known.copy(result.view(split), source.view(once).expand(split))
    return True


def _index_rows(known: Provenance, result: torch.Tensor, source: torch.Tensor, indices: list[Any]) -> bool:
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    return len(dims) == 1 and _select_rows(known, result, source, dims[0], indices[dims[0]])


def _select_rows(
    known: Provenance, result: torch.Tensor, source: torch.Tensor, dim: int, rows: torch.Tensor
) -> bool:
    """Follow a gather of whole rows along one dimension, by indices that are known."""
    runs = _runs(known, rows, source.shape[dim])
    if runs is None:
        return False
    dim %= source.dim()
    listed = result.unsqueeze(dim) if rows.dim() == 0 else result.flatten(dim, dim + rows.dim() - 1)
    if memory(listed) != memory(result):
        return False  # two dimensions of indices that do not lie together
    for first, row, count in runs:
        known.copy(listed.narrow(dim, first, count), source.narrow(dim, row, count))
    return True


def _runs(known: Provenance, rows: torch.Tensor, size: int) -> list[tuple[int, int, int]] | None:
    """Ascending runs of row numbers as (position in the list, first row, length), if they are known."""
    if known.is_unknown(rows) or rows.is_meta or rows.is_floating_point() or rows.dtype == torch.bool:
        return None
    runs: list[tuple[int, int, int]] = []
    for i, row in enumerate(rows.flatten().remainder(size).tolist()):
        if runs and row == runs[-1][1] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((i, row, 1))
    return runs if len(runs) <= MAX_COPIES else None


def scatter(known: Provenance, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Follow a write to whole rows along one dimension, by indices that are known."""
    if func is aten.index_put_.default and not (args[3] if len(args) > 3 else kwargs.get("accumulate")):
        target, indices, source = args[:3]
        indices = without_masks(known, indices)
        dims = [dim for dim, index in enumerate(indices) if index is not None]
        if len(dims) != 1:
            return False
        dim, rows = dims[0], indices[dims[0]]
    elif func is aten.index_copy_.default:
        target, dim, rows, source = args
    else:
        return False
    if rows.dim() != 1 or (runs := _runs(known, rows, target.shape[dim])) is None:
        return False
    shape = list(target.shape)
    shape[dim] = len(rows)
    source = source.expand(shape)
    for first, row, count in runs:
        known.copy(target.narrow(dim, row, count), source.narrow(dim, first, count))
    return True


def without_masks(known: Provenance, indices: Iterable[Any]) -> list[Any]:
    """Turn known masks into row numbers: without elements, a mask selects an unknown number."""
    found: list[Any] = []
    for index in indices:
        is_mask = index is not None and index.dtype == torch.bool
        if is_mask and not known.is_unknown(index) and not index.is_meta:
            found += index.nonzero(as_tuple=True)
        else:
            found.append(index)
    return found


def _pad(
    known: Provenance, result: torch.Tensor, source: torch.Tensor, pad: list[int], value: float = 0
) -> bool:
    _constant(known, result, float(value))
    for k in range(len(pad) // 2):
        dim, (low, high) = source.dim() - 1 - k, pad[2 * k : 2 * k + 2]
        source = source.narrow(dim, max(0, -low), source.shape[dim] - max(0, -low) - max(0, -high))
        result = result.narrow(dim, max(0, low), source.shape[dim])
    known.copy(result, source)
    return True


def _constant(known: Provenance, result: torch.Tensor, *args: Any, **_: Any) -> bool:
    """Follow a result of which only the shape is the given tensor's."""
    is_unknown = any(math.isnan(value) for value in args if isinstance(value, float))
    known.taint(result, known.blamed(is_unknown))
    return True


FOLLOWED: Mapping[Any, Callable[..., bool]] = {
    aten.clone.default: _clone,
    aten._to_copy.default: _clone,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.repeat.default: _repeat,
    aten.index.Tensor: _index_rows,
    aten.index_select.default: _select_rows,
    aten.constant_pad_nd.default: _pad,
    aten.zeros_like.default: _constant,
    aten.ones_like.default: _constant,
    aten.full_like.default: _constant,
    aten.new_zeros.default: _constant,
    aten.new_ones.default: _constant,
    aten.new_full.default: _constant,
}
