"""What one publication has to say against its parent, as the committer takes it.

Either lists positions and values, to be encoded and digested when it is committed, or has been encoded and
digested on the device that found it. Both make the same file.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from patchstore import digest, payload
from patchstore.digest import Sums
from patchstore.encodings import named
from patchstore.model import TensorSpec
from patchstore.stores.base import Chunk
from patchstore.tensors import TensorPatch, raw_bytes


class Change(Protocol):
    """What one publication has to say."""

    @property
    def step(self) -> int: ...

    @property
    def num_changed(self) -> int:
        """Elements whose bits changed."""
        ...

    @property
    def encoding(self) -> str:
        """What a manifest calls the encoding."""
        ...

    def specs(self) -> list[TensorSpec]:
        """Return the tensors that the file has by name, ascending: their positions and values."""
        ...

    def sums(self) -> Mapping[str, Sums]:
        """Return by how much the digest sums of the tensors with changes grow."""
        ...

    def parents(self) -> Mapping[str, Sums]:
        """Return the digest sums of the tensors that the change was coded against; of none if it was not."""
        ...

    def file(self, metadata: Mapping[str, str]) -> Callable[[], Iterator[Chunk]]:
        """Return what writes the delta file, as often as it is called; not for a change of nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A change by its positions, in host memory."""

    step: int
    num_changed: int
    encoding: str
    patches: tuple[tuple[TensorSpec, TensorPatch], ...] = ()
    """Ascending by name; with the positions that the encoding wants stated, unchanged ones among them."""
    before: tuple[torch.Tensor, ...] = ()
    """Per patch the values that it replaces, in the same order; not where `grown` is known."""
    grown: Mapping[str, Sums] | None = None
    """What `sums` returns, where it is known."""

    def specs(self) -> list[TensorSpec]:
        return [spec for spec, _ in self.patches]

    def sums(self) -> Mapping[str, Sums]:
        if self.grown is not None:
            return self.grown
        new = [patch for _, patch in self.patches]
        old = [replace(patch, values=before) for patch, before in zip(new, self.before, strict=True)]
        before = digest.of_patches(old)
        return {name: sums.minus(before[name]) for name, sums in digest.of_patches(new).items()}

    def parents(self) -> Mapping[str, Sums]:
        return {}

    def file(self, metadata: Mapping[str, str]) -> Callable[[], Iterator[Chunk]]:
        specs, tensors = payload.in_order(payload.encoded(self.patches, named(self.encoding)))
        return lambda: payload.write(specs, tensors, metadata)


class Encoded:
    """A change as its payload has it, on its way from the device into one block of host memory."""

    def __init__(
        self,
        step: int,
        num_changed: int,
        encoding: str,
        *,
        specs: Sequence[TensorSpec],
        entries: Sequence[tuple[int, TensorSpec]],
        block: torch.Tensor,
        arrived: torch.cuda.Event | None,
    ) -> None:
        """Wait for nothing.

        Args:
            specs: all tensors of the run.
            entries: in the order of the data, which of `specs` each is of, and its spec but for its length.
            block: uint8 in host memory; what `kernels.compare.encode` writes.
            arrived: what happens on the device when the block is complete; None where it is.
        """
        self.step, self.num_changed, self.encoding = step, num_changed, encoding
        self._specs, self._entries, self._block, self._arrived = specs, entries, block, arrived

    @cached_property
    def _head(self) -> tuple[list[int], list[int]]:
        """Per tensor the number of elements stated; per tensor two sums, one after the other."""
        if self._arrived is not None:
            self._arrived.synchronize()
        count = len(self._specs)
        head = self._block[: 24 * count].view(torch.int64).tolist()
        return head[:count], head[count:]

    @property
    def nums(self) -> list[int]:
        """Elements stated of each tensor of the run."""
        return self._head[0]

    def specs(self) -> list[TensorSpec]:
        nums, _ = self._head
        return sorted(
            (spec for spec, num in zip(self._specs, nums, strict=True) if num), key=lambda spec: spec.name
        )

    def sums(self) -> Mapping[str, Sums]:
        nums, sums = self._head
        return {
            spec.name: Sums(sums[2 * i] % 2**64, sums[2 * i + 1] % 2**64)
            for i, spec in enumerate(self._specs)
            if nums[i]
        }

    def parents(self) -> Mapping[str, Sums]:
        return {}

    def entries(self) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Yield the stored tensors' specs and bytes, in the order of the file; they share the block."""
        nums, _ = self._head
        start = 24 * len(self._specs)
        for tensor, entry in self._entries:
            if nums[tensor]:
                spec = TensorSpec(name=entry.name, dtype=entry.dtype, shape=(nums[tensor],))
                yield spec, self._block[start : start + spec.num_bytes]
                start += spec.num_bytes

    def file(self, metadata: Mapping[str, str]) -> Callable[[], Iterator[Chunk]]:
        nums, _ = self._head
        specs = [
            TensorSpec(name=entry.name, dtype=entry.dtype, shape=(nums[tensor],))
            for tensor, entry in self._entries
            if nums[tensor]
        ]
        for spec, stored in self.entries():
            payload.check_bools("this change cannot be written", spec, stored)
        start = 24 * len(self._specs)
        data = self._block[start : start + sum(spec.num_bytes for spec in specs)]
        header = payload.header_bytes(specs, metadata)

        def chunks() -> Iterator[Chunk]:
            yield header
            view = raw_bytes(data)
            for begin in range(0, len(view), payload.CHUNK_BYTES):
                yield view[begin : begin + payload.CHUNK_BYTES]

        return chunks
