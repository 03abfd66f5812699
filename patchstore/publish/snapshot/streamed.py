"""Compare the tensors of a stream, which exist one after the other and cannot be read again."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from patchstore.format.records import TensorSpec
from patchstore.publish.snapshot.memory import Stream, served
from patchstore.publish.snapshot.ranges import is_narrowed
from patchstore.tensors.bits import TORCH_DTYPES

STREAMED_BYTES = 256 << 20
"""Of a stream's tensors so many bytes are held at a time, or one tensor."""


def in_groups(
    stream: Stream, specs: Sequence[TensorSpec], device: torch.device
) -> Iterator[tuple[dict[int, torch.Tensor], dict[int, torch.Tensor], int]]:
    """Yield tensors by their places in `specs`, some at a time.

    Yields:
        Tensors as they are served; as they were given, those whose range is to be checked; and the bytes of
        the first.
    """
    numbers = {spec.name: number for number, spec in enumerate(specs)}
    held: dict[int, torch.Tensor] = {}
    narrowed: dict[int, torch.Tensor] = {}
    num_bytes = given_bytes = 0
    for name, given in stream.read():
        number = numbers[name]
        held[number] = served(given, specs[number], device)
        num_bytes += specs[number].num_bytes
        if is_narrowed(given.dtype, TORCH_DTYPES[specs[number].dtype]):
            narrowed[number] = given
            given_bytes += given.nbytes
        if num_bytes + given_bytes >= STREAMED_BYTES:
            yield held, narrowed, num_bytes
            held, narrowed, num_bytes, given_bytes = {}, {}, 0, 0
    yield held, narrowed, num_bytes


def runs(held: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first of each run of numbers that follow each other, and one more than its last."""
    found: list[tuple[int, int]] = []
    for number in sorted(held):
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found


def make_room(found: Any, num_words: int) -> None:
    """Give `kernels.compare.Found` room for so many more changed words, and keep those that it has."""
    used = int(found.cursor)
    if found.capacity >= used + num_words:
        return
    for name in ("places", "new_words", "old_words"):
        old = getattr(found, name)
        new = torch.empty(used + num_words, dtype=old.dtype, device=old.device)
        new[:used].copy_(old[:used])
        setattr(found, name, new)
