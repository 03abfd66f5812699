"""The changes that kernels found, as a payload holds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.format.records import DTYPE_BYTES, TensorSpec
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch
from patchstore.tensors.state_digest import Sums

Array = npt.NDArray[Any]

_POSITIONS = {4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """In which order the data of a block has the positions, or gaps, and the values of T tensors."""

    specs: Sequence[TensorSpec]
    """[T], in the order of the head."""
    entries: Sequence[tuple[int, TensorSpec]]
    """[2 * T], which of `specs` each is of, and its spec but for its length."""
    tensors: Array
    """int64 [2 * T], which of `specs` each entry is of."""
    widths: Array
    """int64 [2 * T], bytes of an element of each entry; never ascending."""
    indices: Array
    """int64 [T], which entry has the positions of each tensor."""
    values: Array
    """int64 [T], which entry has its values."""
    by_name: Array
    """int64 [T], the tensors ascending by name."""

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], entries: Sequence[tuple[int, TensorSpec]]) -> "Layout":
        """Describe entries `<name>.idx` and `<name>.val`."""
        places = np.zeros((2, len(specs)), dtype=np.int64)
        for place, (tensor, entry) in enumerate(entries):
            places[int(entry.name.endswith(".val")), tensor] = place
        names = sorted(range(len(specs)), key=lambda tensor: specs[tensor].name)
        return cls(
            specs=specs,
            entries=entries,
            tensors=np.array([tensor for tensor, _ in entries], dtype=np.int64),
            widths=np.array([DTYPE_BYTES[entry.dtype] for _, entry in entries], dtype=np.int64),
            indices=places[0],
            values=places[1],
            by_name=np.array(names, dtype=np.int64),
        )


class Span(NamedTuple):
    """Where the data of a block has what changed of one tensor."""

    spec: TensorSpec
    num: int
    """Changed elements."""
    indices: int
    """At which byte the positions begin."""
    values: int
    """At which byte the values begin."""
    index_width: int
    """Bytes of a position."""


class Block:
    """All changes as `kernels.index_encode` writes them: a head, and the data of a payload."""

    def __init__(self, layout: Layout, memory: torch.Tensor, data_start: int) -> None:
        """Take a block that is complete, on the device or in host memory; waits for the head.

        Args:
            memory: uint8.
            data_start: bytes of the head.
        """
        self._layout, self._memory, self._data_start = layout, memory, data_start
        head = memory[:data_start].cpu().view(torch.int64).numpy()
        self._nums = head[: len(layout.specs)]
        self._sums = head[len(layout.specs) :].view(np.uint64).reshape(-1, 2)

    @property
    def data(self) -> torch.Tensor:
        """The positions and values of all tensors, uint8."""
        return self._memory[self._data_start :]

    @property
    def specs(self) -> list[TensorSpec]:
        """The tensors with changes, ascending by name."""
        return [self._layout.specs[tensor] for tensor in self._changed().tolist()]

    def _changed(self) -> Array:
        by_name = self._layout.by_name
        changed: Array = by_name[self._nums[by_name] > 0]
        return changed

    def sum_growth(self) -> dict[str, Sums]:
        """By how much the digest sums of the tensors with changes grow."""
        changed = self._changed()
        sums = zip(changed.tolist(), self._sums[changed].tolist(), strict=True)
        return {self._layout.specs[tensor].name: Sums(*both) for tensor, both in sums}

    def on_host(self) -> "Block":
        """Return a copy in host memory, pinned where it comes from a GPU."""
        memory = torch.empty_like(self._memory, device="cpu", pin_memory=self._memory.is_cuda)
        memory.copy_(self._memory)
        return Block(self._layout, memory, self._data_start)

    def stored(self) -> dict[str, torch.Tensor]:
        """The payload's tensors by name, which share the block: positions or gaps, and values."""
        sizes = self._sizes().tolist()
        parts: tuple[torch.Tensor, ...] = self.data[: sum(sizes)].split(sizes)  # type: ignore[no-untyped-call]
        return {
            entry.name: part.view(TORCH_DTYPES[entry.dtype])
            for (_, entry), part, size in zip(self._layout.entries, parts, sizes, strict=True)
            if size
        }

    def _sizes(self) -> Array:
        """Return how many bytes each entry has."""
        sizes: Array = self._nums[self._layout.tensors] * self._layout.widths
        return sizes

    def spans(self) -> list[Span]:
        """Say where the changes are, of a block in encoding `raw`; ascending by name."""
        layout, sizes, changed = self._layout, self._sizes(), self._changed()
        starts = sizes.cumsum() - sizes
        indices, values = layout.indices[changed], layout.values[changed]
        columns = self._nums[changed], starts[indices], starts[values], layout.widths[indices]
        rows = np.stack(columns, axis=1).tolist()
        return [Span(layout.specs[tensor], *row) for tensor, row in zip(changed.tolist(), rows, strict=True)]

    def patch(self, span: Span) -> TensorPatch:
        """Return what changed of one tensor, which shares the block."""
        data, width = self.data, span.num * DTYPE_BYTES[span.spec.dtype]
        indices = data[span.indices : span.indices + span.num * span.index_width]
        return TensorPatch(
            name=span.spec.name,
            indices=indices.view(_POSITIONS[span.index_width]),
            values=data[span.values : span.values + width].view(TORCH_DTYPES[span.spec.dtype]),
        )

    def patches(self) -> list[tuple[TensorSpec, TensorPatch]]:
        """The changes, of a block in encoding `raw`; ascending by name, and sharing the block."""
        return [(span.spec, self.patch(span)) for span in self.spans()]
