"""Merge the changes of several versions on the device: each element is written once, with its last value.

Gaps are listed as positions. A stream of `context` can only be decoded with the values that it was made from.
So a tensor with such streams is copied, and each version is written to the copy before the next is decoded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from patchstore.bucket.records import Schema
from patchstore.codec.delta_file import Content
from patchstore.tensors.bits import TORCH_DTYPES, bits, index_dtype
from vllm_plugin.gpu.decode import Patches, Place, Places, decode, list_positions, table_on
from vllm_plugin.live.copies import PIECE
from vllm_plugin.map.mapping import Box

MERGED = 1 << 25
"""Changes of several versions that are merged at a time, in about 2 GB of the device's memory.

A tensor of which they state more is copied and written to: twice the tensor, and changes of one version.
"""

_MERGING_BYTES = 64
"""Of the device's memory, for each change that is merged: keys, values, and what sorting takes."""


class Merger:
    """Merges changes of the tensors that a rank serves."""

    def __init__(
        self,
        schema: Schema,
        boxes: Mapping[str, Sequence[Box] | None],
        base: Mapping[str, torch.Tensor],
        gathered: Callable[[str], torch.Tensor],
        device: torch.device,
    ) -> None:
        """Keep what is served before the versions: tensors of `base`, as checkpoints have them, or
        `gathered`.
        """
        self._schema, self._specs = schema, schema.by_name()
        self._boxes, self._base, self._gathered = boxes, base, gathered
        self._device = device

    def merged(
        self, versions: Sequence[Content], names: Sequence[str], free_bytes: int
    ) -> Iterator[tuple[Patches, tuple[torch.Tensor, torch.Tensor]]]:
        """Yield patches with the effect of all versions, and the tensors that hold them, for some names each.

        Of each position the last value counts: a stable sort brings equal ones together, oldest first.
        """
        # Half of what is free: memory that was used before lies in pieces.
        at_a_time = min(MERGED, free_bytes // 2 // _MERGING_BYTES)
        coded = {self._schema.tensors[number].name for each in versions for number in each.coded.numbers}
        for some, num_stated in self._parts(versions, names, at_a_time):
            numbers = self._numbers(some)
            # Where kernels read whole vectors.
            sizes = [-(-self._specs[name].num_elements // 128) * 128 for name in some]
            firsts = dict(zip(some, accumulate(sizes, initial=0), strict=False))
            is_large = num_stated > at_a_time
            relative = [name for name in some if is_large or name in coded]
            copy = self._copied(relative, firsts, sum(sizes))
            places = Places(
                self._schema,
                {
                    name: Place.copied(
                        self._specs[name],
                        copy.data_ptr() + firsts[name] * copy.element_size(),
                        None if name in self._base else self._boxes[name],
                    )
                    for name in relative
                },
            )
            keys, values = [], []
            for content in versions:
                for where, new in self._listed(content.of(numbers), firsts, places):
                    if relative:
                        copy[where] = new
                    if not is_large:
                        keys.append(where)
                        values.append(new)
            if is_large:
                yield self._differing(some[0], copy)
                continue
            if not keys:
                continue
            order, by = torch.cat(keys).sort(stable=True)
            last = torch.ones(len(order), dtype=torch.bool, device=self._device)
            torch.ne(order[1:], order[:-1], out=last[:-1])
            order, chosen = order[last], torch.cat(values)[by[last]]
            bounds = torch.searchsorted(
                order, table_on(self._device, [*firsts.values(), sum(sizes)])
            ).tolist()
            owners = table_on(self._device, np.repeat(np.array(list(firsts.values())), np.diff(bounds)))
            positions = (order - owners).to(index_dtype(max(sizes)))
            patches = Patches.between(some, np.array(bounds, dtype=np.int64), positions, chosen)
            yield patches, (positions, chosen)

    def _listed(
        self, content: Content, firsts: Mapping[str, int], places: Places
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """List one version's changes of tensors of one element width: where, int64 [num], and their bits."""
        yield from list_positions(content.listed, self._schema, firsts, self._device)
        found = decode(content.coded, places, self._schema, self._device)
        if found.values.numel():
            owners = np.repeat(np.array([firsts[name] for name in found.names]), np.diff(found.bounds))
            positions = found.positions.to(torch.int64) + table_on(self._device, owners)
            yield positions, found.narrow if (found.widths == 1).any() else found.values

    def _copied(
        self,
        names: Sequence[str],
        firsts: Mapping[str, int],
        num_elements: int,
    ) -> torch.Tensor:
        """Copy tensors of one element width as checkpoints have them: from `base`, or what is served."""
        if not names:
            return torch.empty(0, dtype=torch.int16, device=self._device)
        dtype = bits(torch.empty(0, dtype=TORCH_DTYPES[self._specs[names[0]].dtype])).dtype
        copy = torch.empty(num_elements, dtype=dtype, device=self._device)
        for name in names:
            held = self._before(name)
            copy[firsts[name] : firsts[name] + self._specs[name].num_elements] = bits(held).to(self._device)
        return copy

    def _differing(self, name: str, copy: torch.Tensor) -> tuple[Patches, tuple[torch.Tensor, torch.Tensor]]:
        """Return a patch that makes of a tensor what its copy has become, and the tensors that hold it."""
        num_elements = self._specs[name].num_elements
        held = bits(self._before(name))
        narrow = index_dtype(num_elements)
        found = []
        for start in range(0, num_elements, PIECE):
            end = min(start + PIECE, num_elements)
            differs = held[start:end].to(self._device) != copy[start:end]
            found.append((differs.nonzero()[:, 0] + start).to(narrow))
        positions = torch.cat(found) if found else torch.empty(0, dtype=narrow, device=self._device)
        values = copy[positions.to(torch.int64)]
        bounds = np.array([0, values.numel()], dtype=np.int64)
        return Patches.between([name], bounds, positions, values), (positions, values)

    def _parts(
        self, versions: Sequence[Content], names: Sequence[str], at_a_time: int
    ) -> Iterator[tuple[list[str], int]]:
        """Cut names into parts whose elements have one width, and count what the versions state of each part.

        That is at most so many changes at a time, but for a part of one name.
        """
        stated_of = np.zeros(len(self._schema.tensors), dtype=np.int64)
        for each in versions:
            for listed in each.listed:
                stated_of[listed.numbers] += listed.counts
            # The tensor is copied, too.
            coded, num_bytes = each.coded, np.diff(each.coded.bytes_at)
            np.add.at(stated_of, coded.numbers, 2 * num_bytes + coded.cuts.num_elements // 32)
        by_width: dict[int, list[str]] = {}
        for name in names:
            by_width.setdefault(TORCH_DTYPES[self._specs[name].dtype].itemsize, []).append(name)
        for same in by_width.values():
            some, stated = list[str](), 0
            for name in same:
                num = int(stated_of[self._schema.places[name]])
                if some and stated + num > at_a_time:
                    yield some, stated
                    some, stated = [], 0
                some.append(name)
                stated += num
            yield some, stated

    def _numbers(self, names: Sequence[str]) -> np.ndarray:
        """Return the places of tensors in the schema, ascending."""
        return np.sort(np.array([self._schema.places[name] for name in names], dtype=np.int64))

    def _before(self, name: str) -> torch.Tensor:
        return self._base[name] if name in self._base else self._gathered(name)
