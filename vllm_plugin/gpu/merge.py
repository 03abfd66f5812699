"""Merge the changes of several versions on the device: each element is written once, with its last value.

Gaps are listed as positions. A stream of `context` can only be decoded with the values that it was made from.
So a tensor with such streams is copied, and each version is written to the copy before the next is decoded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from patchstore.bucket.records import Schema
from patchstore.codec.delta_file import Content
from patchstore.tensors.bits import INTEGERS, TORCH_DTYPES, bits, index_dtype
from vllm_plugin.gpu.decode import Array, Patches, Places, list_changes, table_on
from vllm_plugin.live.copies import PIECE, Transfers

MERGED = 1 << 25
"""Changes of several versions that are merged at a time, in about 2 GB of the device's memory.

A tensor of which they state more is copied and written to: twice the tensor, and changes of one version.
"""

COMPARED = 4 * PIECE
"""Elements of such a tensor that are compared with the copy at a time."""

_MERGING_BYTES = 64
"""Of the device's memory, for each change that is merged: keys, values, and what sorting takes."""


class Merger:
    """Merges changes of the tensors that a rank serves."""

    def __init__(
        self,
        schema: Schema,
        served: Places,
        base: Mapping[str, torch.Tensor],
        gathered: Callable[[str], torch.Tensor],
        transfers: Transfers,
        device: torch.device,
    ) -> None:
        """Keep what is served before the versions: tensors of `base`, as checkpoints have them on the CPU, or
        `gathered`, which have what `served` says.
        """
        self._schema, self._served, self._gathered = schema, served, gathered
        self._transfers, self._device = transfers, device
        self._sizes = np.array(schema.sizes, dtype=np.int64)
        """int64 [T], of the schema, as all of these."""
        kinds, of = schema.kinds
        widths = [TORCH_DTYPES[dtype].itemsize for dtype, _ in kinds]
        self._widths = np.array(widths, dtype=np.int64)[of]
        self._addresses = np.zeros(len(of), dtype=np.int64)
        """Of what is in `base`; 0 for all else."""
        for name in base.keys() & schema.places:
            self._addresses[schema.places[name]] = base[name].data_ptr()

    def merged(
        self, versions: Sequence[Content], numbers: Array, free_bytes: int
    ) -> Iterator[tuple[Patches, tuple[torch.Tensor, torch.Tensor]]]:
        """Yield patches with the effect of all versions, and the tensors that hold them, for some of these
        tensors each, which ascend.

        Of each position the last value counts: a stable sort brings equal ones together, oldest first.
        """
        # Half of what is free: memory that was used before lies in pieces.
        at_a_time = min(MERGED, free_bytes // 2 // _MERGING_BYTES)
        every = [numbers[:0], *(each.coded.numbers for each in versions)]
        coded = np.intersect1d(numbers, np.concatenate(every))
        copies = self._served.copies(self._schema, coded, self._addresses[coded] > 0)
        for some, num_stated in self._parts(versions, numbers, at_a_time):
            # Where kernels read whole vectors.
            sizes = -(-self._sizes[some] // 128) * 128
            ends = sizes.cumsum()
            firsts, num_elements = ends - sizes, int(ends[-1])
            is_large, is_coded = num_stated > at_a_time, np.isin(some, coded)
            relative = is_coded | is_large
            copy = self._copied(some[relative], firsts[relative], num_elements)
            begins = copy.data_ptr() + firsts[is_coded] * copy.element_size()
            places = copies.at(some[is_coded], begins)
            keys, values = [], []
            for content in versions:
                stated = list_changes(content.of(some), some, firsts, places, self._schema, self._device)
                for where, new in stated:
                    if relative.any():
                        copy[where] = new
                    if not is_large:
                        keys.append(where)
                        values.append(new)
            if is_large:
                yield self._differing(int(some[0]), copy)
                continue
            if not keys:
                continue
            order, by = torch.cat(keys).sort(stable=True)
            last = torch.ones(len(order), dtype=torch.bool, device=self._device)
            torch.ne(order[1:], order[:-1], out=last[:-1])
            order, chosen = order[last], torch.cat(values)[by[last]]
            bounds = (
                torch.searchsorted(order, table_on(self._device, np.append(firsts, num_elements)))
                .cpu()
                .numpy()
            )
            owners = table_on(self._device, np.repeat(firsts, np.diff(bounds)))
            positions = (order - owners).to(index_dtype(int(sizes.max())))
            yield Patches.between(some, bounds, positions, chosen), (positions, chosen)

    def _copied(self, numbers: Array, firsts: Array, num_elements: int) -> torch.Tensor:
        """Copy tensors of one element width as checkpoints have them: from `base`, or what is served."""
        if not len(numbers):
            return torch.empty(0, dtype=torch.int16, device=self._device)
        width = int(self._widths[numbers[0]])
        copy = torch.empty(num_elements, dtype=INTEGERS[width], device=self._device)
        is_near = self._addresses[numbers] > 0
        near = numbers[is_near]
        num_bytes, places = self._sizes[near] * width, firsts[is_near] * width
        self._transfers.bring(self._addresses[near], num_bytes, copy.view(torch.uint8), places)
        for number, first in zip(numbers[~is_near].tolist(), firsts[~is_near].tolist(), strict=True):
            held = bits(self._gathered(self._schema.tensors[number].name))
            copy[first : first + len(held)] = held
        return copy

    def _differing(
        self, number: int, copy: torch.Tensor
    ) -> tuple[Patches, tuple[torch.Tensor, torch.Tensor]]:
        """Return a patch that makes of a tensor what its copy has become, and the tensors that hold it."""
        num_elements, width, found = int(self._sizes[number]), copy.element_size(), []
        address, nothing, held = self._addresses[[number]], np.zeros(1, dtype=np.int64), None
        if not address[0]:
            held = bits(self._gathered(self._schema.tensors[number].name))
        near = torch.empty(COMPARED * width if held is None else 0, dtype=torch.uint8, device=self._device)
        for start in range(0, num_elements, COMPARED):
            num = min(COMPARED, num_elements - start)
            if held is None:
                self._transfers.bring(address + start * width, np.array([num * width]), near, nothing)
            before = near[: num * width].view(copy.dtype) if held is None else held[start : start + num]
            differs = before != copy[start : start + num]
            found.append((differs.nonzero()[:, 0] + start).to(index_dtype(num_elements)))
        positions = torch.cat(found)
        values = copy[positions.to(torch.int64)]
        bounds = np.array([0, values.numel()], dtype=np.int64)
        return Patches.between(np.array([number]), bounds, positions, values), (positions, values)

    def _parts(
        self, versions: Sequence[Content], numbers: Array, at_a_time: int
    ) -> Iterator[tuple[Array, int]]:
        """Cut tensors into parts whose elements have one width, and count what versions state of each part.

        That is at most so many changes at a time, but for a part of one tensor.
        """
        stated_of, copied_of = np.zeros((2, len(self._schema.tensors)), dtype=np.int64)
        for each in versions:
            for listed in each.listed:
                stated_of[listed.numbers] += listed.counts
            coded, of_this = each.coded, np.zeros_like(copied_of)
            np.add.at(stated_of, coded.numbers, 2 * np.diff(coded.bytes_at))
            np.add.at(of_this, coded.numbers, coded.cuts.num_elements)
            np.maximum(copied_of, of_this, out=copied_of)
        # Each is copied once, for all versions; two bytes an element are a 32nd of `_MERGING_BYTES`.
        stated_of += copied_of // 32
        widths = self._widths[numbers]
        for same in (numbers[widths == width] for width in np.unique(widths)):
            ends, first = stated_of[same].cumsum(), 0
            while first < len(same):
                before = int(ends[first - 1]) if first else 0
                end = max(first + 1, int(np.searchsorted(ends, before + at_a_time, side="right")))
                yield same[first:end], int(ends[end - 1]) - before
                first = end
