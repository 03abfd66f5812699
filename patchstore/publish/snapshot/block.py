"""The changes that kernels found, as a payload holds them."""

from collections.abc import Sequence

import torch

from patchstore.format.records import DTYPE_BYTES, TensorSpec
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch
from patchstore.tensors.state_digest import Sums


class Block:
    """All changes as `kernels.index_encode` writes them: a head, and the data of a payload."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        entries: Sequence[tuple[int, TensorSpec]],
        memory: torch.Tensor,
        data_start: int,
    ) -> None:
        """Take a block that is complete, on the device or in host memory; waits for the head.

        Args:
            specs: all tensors of the run, in the order of the head.
            entries: in the order of the data, which of `specs` each is of, and its spec but for its length.
            memory: uint8.
            data_start: bytes of the head.
        """
        self._specs, self._entries, self._memory, self._data_start = specs, entries, memory, data_start
        count = len(specs)
        head = memory[:data_start].cpu().view(torch.int64).tolist()
        self._nums = head[:count]
        self._sums = head[count:]

    @property
    def specs(self) -> list[TensorSpec]:
        """The tensors with changes, ascending by name."""
        found = (spec for spec, num in zip(self._specs, self._nums, strict=True) if num)
        return sorted(found, key=lambda spec: spec.name)

    def sum_growth(self) -> dict[str, Sums]:
        """By how much the digest sums of the tensors with changes grow."""
        return {
            spec.name: Sums(self._sums[2 * i] % 2**64, self._sums[2 * i + 1] % 2**64)
            for i, spec in enumerate(self._specs)
            if self._nums[i]
        }

    def on_host(self) -> "Block":
        """Return a copy in host memory, pinned where it comes from a GPU."""
        memory = torch.empty_like(self._memory, device="cpu", pin_memory=self._memory.is_cuda)
        memory.copy_(self._memory)
        return Block(self._specs, self._entries, memory, self._data_start)

    def stored(self) -> dict[str, torch.Tensor]:
        """The payload's tensors by name, which share the block: positions or gaps, and values."""
        sizes = [self._nums[tensor] * DTYPE_BYTES[entry.dtype] for tensor, entry in self._entries]
        data = self._memory[self._data_start : self._data_start + sum(sizes)]
        parts: tuple[torch.Tensor, ...] = data.split(sizes)  # type: ignore[no-untyped-call]
        return {
            entry.name: part.view(TORCH_DTYPES[entry.dtype])
            for (_, entry), part, size in zip(self._entries, parts, sizes, strict=True)
            if size
        }

    def patches(self) -> list[tuple[TensorSpec, TensorPatch]]:
        """The changes, of a block in encoding `raw`; ascending by name, and sharing the block."""
        stored = self.stored()
        return [
            (
                spec,
                TensorPatch(
                    name=spec.name, indices=stored[f"{spec.name}.idx"], values=stored[f"{spec.name}.val"]
                ),
            )
            for spec in self.specs
        ]
