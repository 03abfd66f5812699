"""Parts of a checkpoint's tensors and where they are served, copied in batches.

A model of experts has thousands of tensors of a megabyte. What lies side by side in a file is brought
together, so that the cost of a copy does not grow with their number.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from patchstore.format.records import TensorSpec
from vllm_plugin.runtime_bits import widened
from vllm_plugin.transfers import BLOCK_BYTES, Job, Lane
from vllm_plugin.upload import memory_end, memory_of, neighbours

logger = logging.getLogger(__name__)


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
    whole: list[Piece] = []
    others: list[Piece] = []
    for piece in pieces:
        given, held = piece.given, piece.held
        if not given.numel():
            continue
        is_wider = given.element_size() != held.element_size()
        is_apart = is_wider or not (given.is_contiguous() and held.is_contiguous())
        (others if is_apart else whole).append(piece)
    runs = neighbours([piece.given for piece in whole], BLOCK_BYTES)
    return [_joined([whole[number] for number in run]) for run in runs], others


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
        self.shortage: torch.OutOfMemoryError | None = None
        """What ended the comparison: the device has no room for a batch."""
        batches, others = batched(pieces)
        every: list[Batch | Piece] = [*batches, *others]
        self.jobs: list[Job] = [partial(self._compare, each) for each in every]

    def proves(self) -> bool:
        """Whether all was compared, and is served. Says why not, if the device had no room."""
        if self.shortage is not None:
            logger.warning("weights were not compared with their checkpoint: %s", self.shortage)
        return self.shortage is None and not self.differs

    def _compare(self, each: Batch | Piece, lane: Lane) -> None:
        if self.differs or self.shortage is not None:
            return
        try:
            given = lane.to_device(each.given)
            if isinstance(each, Piece):
                is_wrong = not torch.equal(each.held, widened(given, each.spec, each.held))
            else:
                wrong = [_differ(given[at : at + held.numel()], held) for at, held in each.parts]
                # Asked once: each answer has to be waited for.
                is_wrong = bool(torch.stack(wrong).any())
        except torch.OutOfMemoryError as exc:
            self.shortage = exc.with_traceback(None)
        else:
            self.differs |= is_wrong


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether bytes differ: eight at a time where they can be, as each comparison takes a byte of memory."""
    places = (at for each in (one, other) for at in (each.numel(), each.data_ptr(), each.storage_offset()))
    if all(at % 8 == 0 for at in places):
        one, other = one.view(torch.int64), other.view(torch.int64)
    return (one != other).any()
