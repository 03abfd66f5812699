"""Pieces: the boxes of whole tensors that a process has, as views of its memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.support.arguments import whole_number


class Piece(NamedTuple):
    """A box of a tensor, with its elements."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...] | None
    """The first index of each dimension in the whole tensor; None for all of it."""
    local: torch.Tensor
    """The elements: a view of the source's memory, perhaps not contiguous."""

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...]]:
        """What stays the same as long as the layout does."""
        return self.shape, self.start, tuple(self.local.shape)


def whole(tensor: torch.Tensor) -> Piece:
    return Piece(tuple(tensor.shape), None, tensor)


def piece(shape: Sequence[int], start: Sequence[int], local: torch.Tensor) -> Piece:
    """Return a piece, which is the whole tensor if it has its shape."""
    shape = tuple(shape)
    return Piece(shape, None if tuple(local.shape) == shape else tuple(start), local)


@dataclass(frozen=True, slots=True)
class LocalPart:
    """A part of a tensor that this process has: a value of a source, in place of a whole tensor.

    It has one of two kinds of place. A box: `start` says where it begins in each dimension. A flat range:
    `offset` says at which element of the flattened, row-major tensor it begins; its elements may have any
    shape.
    """

    tensor: torch.Tensor
    """The elements. They are read in each publication, and not copied before."""
    shape: Sequence[int]
    """Of the whole tensor."""
    start: Sequence[int] | None = None
    offset: int | None = None

    @classmethod
    def shard(cls, tensor: torch.Tensor, dim: int, *, rank: int, size: int) -> "LocalPart":
        """Return the part that one rank has of a tensor cut into equal shards, as over tensor parallel ranks.

        Args:
            tensor: the shard of this rank. It is not copied.
            dim: along which the shards follow each other; a negative one counts from the end.
            rank: of this process among those that have a shard.
            size: how many have one.

        Raises:
            UsageError: there is no such dimension or rank.
        """
        given: object = tensor
        if not isinstance(given, torch.Tensor) or not given.dim():
            raise UsageError(f"a shard must be a tensor with dimensions, not {tensor!r:.100}")
        dim = whole_number("dim", dim, least=-tensor.dim(), most=tensor.dim() - 1) % tensor.dim()
        size = whole_number("size", size, least=1)
        rank = whole_number("rank", rank, least=0, most=size - 1)
        shape, start = list(tensor.shape), [0] * tensor.dim()
        start[dim], shape[dim] = rank * shape[dim], size * shape[dim]
        return cls(tensor, tuple(shape), start=tuple(start))

    def pieces(self, name: str, local: torch.Tensor) -> list[Piece]:
        """Return the boxes that it consists of: one, or for a flat range at most 2 * dimensions - 1.

        Args:
            name: of the whole tensor.
            local: the elements as a plain tensor.

        Raises:
            SchemaMismatch: this is no part of such a tensor.
        """
        shape = tuple(self.shape)
        if any(size < 0 for size in shape):
            raise SchemaMismatch(f"the part of {name!r} is of a tensor of the impossible shape {shape}")
        if (self.start is None) == (self.offset is None):
            raise SchemaMismatch(
                f"the part of {name!r} needs either start=, the first index of each dimension, or offset=, "
                "its first element in the flattened tensor"
            )
        if self.start is not None:
            start, size = tuple(self.start), tuple(local.shape)
            if not len(start) == len(size) == len(shape):
                raise SchemaMismatch(
                    f"the part of {name!r} has the shape {size} and begins at {start}, which is no box of a "
                    f"tensor of shape {shape}: all three need as many dimensions"
                )
            for dim, (first, num, side) in enumerate(zip(start, size, shape, strict=True)):
                if first < 0 or first + num > side:
                    raise SchemaMismatch(
                        f"the part of {name!r} has the indices {first} to {first + num} of dimension {dim}, "
                        f"but the tensor of shape {shape} ends at {side}"
                    )
            return [piece(shape, start, local)]
        assert self.offset is not None
        num, total = local.numel(), prod(shape)
        if self.offset < 0 or self.offset + num > total:
            raise SchemaMismatch(
                f"the part of {name!r} has the elements {self.offset:,} to {self.offset + num:,}, but the "
                f"tensor of shape {shape} has {total:,}; cut off what pads the last part"
            )
        if not local.is_contiguous():
            raise SchemaMismatch(
                f"the part of {name!r} is a flat range, whose elements must follow each other in memory, but "
                f"its shape {tuple(local.shape)} has the strides {local.stride()}; pass boxes with start="
            )
        flat, taken, found = local.reshape(-1), 0, []
        for start, size in boxes(shape, self.offset, num):
            end = taken + prod(size)
            found.append(piece(shape, start, flat[taken:end].view(size)))
            taken = end
        return found


def boxes(shape: tuple[int, ...], offset: int, num: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a range of a flattened tensor into boxes, in the order of their elements.

    Returns:
        The first index and the shape of each. No element is one box without any, or no box of a scalar.

    Example: elements 4 to 9 of shape [3, 4] -> rows 1 to 2, then one element of row 2.
    """
    if num == prod(shape):
        yield (0,) * len(shape), shape
    elif num == 0:
        if shape:
            yield (0,) * len(shape), (0,) * len(shape)
    elif len(shape) == 1:
        yield (offset,), (num,)
    else:
        row = prod(shape[1:])
        first, within = divmod(offset, row)
        if within:
            head = min(num, row - within)
            yield from _of_row(shape, first, within, head)
            first, num = first + 1, num - head
        if rows := num // row:
            yield (first, *(0 for _ in shape[1:])), (rows, *shape[1:])
        if num % row:
            yield from _of_row(shape, first + rows, 0, num % row)


def _of_row(
    shape: tuple[int, ...], index: int, offset: int, num: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for start, size in boxes(shape[1:], offset, num):
        yield (index, *start), (1, *size)
