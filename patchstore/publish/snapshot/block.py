"""The changes that kernels found, as a payload holds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.format.records import DTYPE_BYTES, TensorSpec
from patchstore.tensors.bits import INTEGERS, TORCH_DTYPES, TensorPatch, index_dtype
from patchstore.tensors.state_digest import Sums

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """In which order the data of a block has the positions, or gaps, and the values of T tensors.

    The widest elements first, then by the dtypes of tensors, so that what is alike lies side by side.
    """

    specs: Sequence[TensorSpec]
    """[T], in the order of the head."""
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
    gaps: bool
    """Whether there are gaps in the place of positions."""

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], *, gaps: bool) -> "Layout":
        """Order the entries of tensors."""
        by_name = sorted(range(len(specs)), key=lambda tensor: specs[tensor].name)
        entries: list[tuple[int, str, bool, int]] = []
        for place, tensor in enumerate(by_name):
            spec = specs[tensor]
            index_bytes = 2 if gaps else index_dtype(spec.num_elements).itemsize
            entries += [
                (-width, spec.dtype, is_value, place)
                for is_value, width in ((False, index_bytes), (True, DTYPE_BYTES[spec.dtype]))
            ]
        entries.sort()
        tensors = np.array([by_name[place] for *_, place in entries], dtype=np.int64)
        is_value = np.array([each[2] for each in entries], dtype=bool)
        indices, values = np.zeros((2, len(specs)), dtype=np.int64)
        indices[tensors[~is_value]] = np.flatnonzero(~is_value)
        values[tensors[is_value]] = np.flatnonzero(is_value)
        return cls(
            specs=specs,
            tensors=tensors,
            widths=np.array([-each[0] for each in entries], dtype=np.int64),
            indices=indices,
            values=values,
            by_name=np.array(by_name, dtype=np.int64),
            gaps=gaps,
        )


class Span(NamedTuple):
    """Where the data of a block has what changed of one tensor."""

    spec: TensorSpec
    num: int
    """Elements that are stated."""
    indices: int
    """At which byte the positions, or gaps, begin."""
    values: int
    """At which byte the values begin."""
    index_width: int
    """Bytes of a position; 2 of a gap."""


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
        """The payload's tensors, which share the block: by tensor, ascending by name, its positions or gaps,
        and its values.
        """
        found = {}
        for span in self.spans():
            found[f"{span.spec.name}.idx"], found[f"{span.spec.name}.val"] = self._views(span)
        return found

    def spans(self) -> list[Span]:
        """Say where the changes are; ascending by name."""
        layout, changed = self._layout, self._changed()
        sizes = self._nums[layout.tensors] * layout.widths
        starts = sizes.cumsum() - sizes
        indices, values = layout.indices[changed], layout.values[changed]
        columns = self._nums[changed], starts[indices], starts[values], layout.widths[indices]
        rows = np.stack(columns, axis=1).tolist()
        return [Span(layout.specs[tensor], *row) for tensor, row in zip(changed.tolist(), rows, strict=True)]

    def _views(self, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions, or gaps, and the values."""
        data, dtype = self.data, TORCH_DTYPES[span.spec.dtype]
        indices = data[span.indices : span.indices + span.num * span.index_width]
        values = data[span.values : span.values + span.num * dtype.itemsize]
        integer = torch.uint16 if self._layout.gaps else INTEGERS[span.index_width]
        return indices.view(integer), values.view(dtype)

    def patch(self, span: Span) -> TensorPatch:
        """Return what changed of one tensor, of a block in encoding `raw`; it shares the block."""
        indices, values = self._views(span)
        return TensorPatch(name=span.spec.name, indices=indices, values=values)

    def patches(self) -> list[tuple[TensorSpec, TensorPatch]]:
        """The changes, of a block in encoding `raw`; ascending by name, and sharing the block."""
        return [(span.spec, self.patch(span)) for span in self.spans()]
