"""Parts of a checkpoint's tensors and where they are served, copied in batches.

A model of experts has thousands of tensors of a megabyte. What lies side by side in a file is brought
together, so that the cost of a copy does not grow with their number.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from patchstore.format.records import TensorSpec
from vllm_plugin.runtime_bits import widened
from vllm_plugin.transfers import BLOCK_BYTES, Job, Lane
from vllm_plugin.upload import memory_end, memory_of

_APART = 64
"""Bytes between neighbours in a file, at most."""


class Piece(NamedTuple):
    """A part of a checkpoint's tensor, and where it is served."""

    spec: TensorSpec
    given: torch.Tensor
    """Integers, of the checkpoint."""
    held: torch.Tensor
    """Integers of the same shape, perhaps wider: live."""


class Batch(NamedTuple):
    """Pieces that are moved as bytes."""

    given: torch.Tensor
    """uint8 [num_bytes], from the first piece to the last: a file's memory, or a copy on the device."""
    parts: tuple[tuple[int, torch.Tensor], ...]
    """Where each piece begins, and where it is served: uint8, flat."""
    pieces: tuple[Piece, ...]
    """Keep the memory."""


def batched(pieces: Iterable[Piece]) -> tuple[list[Batch], list[Piece]]:
    """Sort pieces by where they are, and join neighbours into batches of at most `BLOCK_BYTES`.

    Args:
        pieces: on the CPU, each at most `BLOCK_BYTES`.

    Returns:
        The batches, and those pieces that are not contiguous on both sides, or served in wider numbers.
    """
    runs: list[list[Piece]] = []
    others: list[Piece] = []
    for piece in sorted(pieces, key=lambda each: each.given.data_ptr()):
        given, held = piece.given, piece.held
        if not given.numel():
            continue
        is_wider = given.element_size() != held.element_size()
        if is_wider or not (given.is_contiguous() and held.is_contiguous()):
            others.append(piece)
            continue
        if runs:
            first, last = runs[-1][0].given, runs[-1][-1].given
            is_near = 0 <= given.data_ptr() - memory_end(last) < _APART
            if is_near and memory_end(given) - first.data_ptr() <= BLOCK_BYTES:
                runs[-1].append(piece)
                continue
        runs.append([piece])
    return [_joined(run) for run in runs], others


def _joined(run: Sequence[Piece]) -> Batch:
    start = run[0].given.data_ptr()
    return Batch(
        given=memory_of(start, memory_end(run[-1].given) - start),
        parts=tuple(
            (piece.given.data_ptr() - start, piece.held.reshape(-1).view(torch.uint8)) for piece in run
        ),
        pieces=tuple(run),
    )


class Comparison:
    """Of pieces of a checkpoint with what is served."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.differs = False
        """Whether a piece is not served; complete once `jobs` are done."""
        batches, others = batched(pieces)
        self.jobs: list[Job] = [
            *(partial(self._compare, each) for each in batches),
            *(partial(self._compare_piece, each) for each in others),
        ]

    def _compare(self, batch: Batch, lane: Lane) -> None:
        if not self.differs:
            given = lane.to_device(batch.given)
            wrong = [_differ(given[at : at + held.numel()], held) for at, held in batch.parts]
            # Asked once: each answer has to be waited for.
            if torch.stack(wrong).any():
                self.differs = True

    def _compare_piece(self, piece: Piece, lane: Lane) -> None:
        if not self.differs:
            given = widened(lane.to_device(piece.given), piece.spec, piece.held)
            if not torch.equal(piece.held, given):
                self.differs = True


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether bytes differ: eight at a time where they can be, as each comparison takes a byte of memory."""
    places = (at for each in (one, other) for at in (each.numel(), each.data_ptr(), each.storage_offset()))
    if all(at % 8 == 0 for at in places):
        one, other = one.view(torch.int64), other.view(torch.int64)
    return (one != other).any()
