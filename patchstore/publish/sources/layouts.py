"""Layouts that Megatron and its relatives give fused tensors, as what a rule of `mapped` returns.

Each function takes the whole tensor as the trainer would have it without sharding, and says which of its rows
are which rows of the checkpoint's tensors. It only names views, so it copies nothing, works for every dtype,
and leaves NaN as it is.
"""

from collections.abc import Sequence

import torch

from patchstore.errors import UsageError
from patchstore.publish.sources.pieces import LocalPart
from patchstore.support.arguments import whole_number

Parts = list[tuple[str, LocalPart]]


def interleaved_qkv(
    tensor: torch.Tensor, names: Sequence[str], *, num_heads: int, num_query_groups: int
) -> Parts:
    """Return query, key and value of a tensor whose rows are ordered by query group.

    Megatron's `linear_qkv` has for each group the rows of its query heads, then of its key head, then of its
    value head. Checkpoints have all query heads in one tensor, all key heads and all value heads in others.

    Args:
        tensor: the whole weight, [(num_heads + 2 * num_query_groups) * head_dim, hidden], or the bias, [the
            same rows].
        names: of the query, key and value tensors in the checkpoint.
        num_heads: query heads of a layer, on all ranks together.
        num_query_groups: key heads of a layer, on all ranks together; num_heads without grouped queries.

    Raises:
        UsageError: these numbers of heads do not fit each other or the tensor.
    """
    what = "interleaved_qkv"
    _check_tensor(what, tensor)
    _check_names(what, names, 3)
    num_heads = whole_number("num_heads", num_heads, least=1)
    num_query_groups = whole_number("num_query_groups", num_query_groups, least=1)
    rows = tensor.shape[0]
    num_slices = num_heads + 2 * num_query_groups
    if num_heads % num_query_groups or rows % num_slices:
        raise UsageError(
            f"{what}: {rows} rows are not those of {num_heads} query heads in {num_query_groups} groups, "
            f"which are {num_slices} heads with key and value; pass the tensor and the numbers of the whole "
            "layer, not those of one rank"
        )
    head = rows // num_slices
    sizes = num_heads // num_query_groups * head, head, head
    return _dealt(tensor, names, sizes, num_query_groups)


def joined_gate_up(tensor: torch.Tensor, names: Sequence[str], *, num_shards: int) -> Parts:
    """Return gate and up projection of a tensor of which each tensor parallel rank has its gate, then its up.

    Megatron's `linear_fc1` with a gated activation is cut so. Without tensor parallelism, num_shards is 1.

    Args:
        tensor: the whole weight, [2 * intermediate, hidden], or the bias, [2 * intermediate].
        names: of the gate and up tensors in the checkpoint.
        num_shards: ranks over which the layer is sharded: tensor parallel ranks, of experts those of expert
            tensor parallelism.

    Raises:
        UsageError: the rows cannot be divided so.
    """
    what = "joined_gate_up"
    _check_tensor(what, tensor)
    _check_names(what, names, 2)
    num_shards = whole_number("num_shards", num_shards, least=1)
    rows = tensor.shape[0]
    if rows % (2 * num_shards):
        raise UsageError(
            f"{what}: {rows} rows are not {num_shards} shards with as many gate as up rows; pass the whole "
            "tensor, not that of one rank"
        )
    half = rows // (2 * num_shards)
    return _dealt(tensor, names, (half, half), num_shards)


def without_padding(tensor: torch.Tensor, name: str, *, num_rows: int) -> Parts:
    """Return the first rows of a tensor: of an embedding or head those of the real vocabulary.

    Megatron pads the vocabulary so that each rank has as many rows. Checkpoints have no such rows.

    Args:
        tensor: [padded rows, ...].
        name: in the checkpoint.
        num_rows: of the checkpoint's tensor: `vocab_size` in its config.

    Raises:
        UsageError: the tensor has fewer rows.
    """
    what = "without_padding"
    _check_tensor(what, tensor)
    _check_names(what, [name], 1)
    num_rows = whole_number("num_rows", num_rows, least=0)
    if num_rows > tensor.shape[0]:
        raise UsageError(
            f"{what}: {name!r} has {tensor.shape[0]} rows, which is less than num_rows={num_rows}; pass the "
            "whole tensor, not that of one rank"
        )
    kept = tensor[:num_rows]
    return [(name, LocalPart(kept, tuple(kept.shape), start=(0,) * kept.dim()))]


def _dealt(tensor: torch.Tensor, names: Sequence[str], sizes: Sequence[int], times: int) -> Parts:
    """Cut rows into runs of these sizes, again and again, and append each to the tensor of its name."""
    rest = tuple(tensor.shape[1:])
    found, first = [], 0
    for turn in range(times):
        for name, size in zip(names, sizes, strict=True):
            start = (turn * size, *(0 for _ in rest))
            found.append((name, LocalPart(tensor[first : first + size], (times * size, *rest), start=start)))
            first += size
    return found


def _check_tensor(what: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor) or not tensor.dim():
        raise UsageError(f"{what} takes a tensor with rows, not {tensor!r}")


def _check_names(what: str, names: Sequence[str], num: int) -> None:
    if isinstance(names, str) or len(names) != num or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{what} takes {num} names, not {names!r}")
