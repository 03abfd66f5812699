"""Encode changes on the device that found them; `payloads.delta` does the same on the CPU.

Imports Triton, so only what runs kernels may import it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.encodings import Encoding, IndexEncoding
from patchstore.encodings.context import Coded, Context, Tiling, packed_table
from patchstore.format.records import DTYPE_BYTES, Part, TensorSpec
from patchstore.kernels import context_encode, context_tables, digest
from patchstore.kernels.segments import Kind
from patchstore.payloads import delta_file
from patchstore.payloads.delta import EncodedDelta, listed_parts, part_order, part_tiling, with_bridges
from patchstore.publish.snapshot.block import Block, Span
from patchstore.publish.snapshot.device import DeviceChanges, on
from patchstore.tensors.bits import INTEGERS, TensorPatch, bits, grouped
from patchstore.tensors.parts import positions
from patchstore.tensors.state_digest import Sums, of_elements

Array = npt.NDArray[Any]


def encode(
    schema: Sequence[TensorSpec],
    parts: Mapping[str, Part],
    changes: DeviceChanges,
    encoding: Encoding,
) -> EncodedDelta:
    """Encode changes against the snapshot that they were found with, which is still the parent's.

    Waits for the device.

    Args:
        schema: of the run: whole tensors.
        parts: what each of the snapshot's tensors is a part of, by its name there.
    """
    snapshot = changes.snapshot
    with snapshot.here(), on(snapshot.side):
        if isinstance(encoding, Context):
            return _encode_context(schema, changes, encoding, parts)
        if not _are_whole(parts):
            return _encode_parts(changes, encoding.index, parts)
        block = changes.block(gaps=encoding.name == "gap").on_host()
        return EncodedDelta(
            encoding=encoding.name,
            num_changed=changes.num_changed,
            listed=block.specs,
            entries=block.stored(),
            sum_growth=block.sum_growth(),
        )


def _are_whole(parts: Mapping[str, Part]) -> bool:
    return all(part.is_whole for part in parts.values())


class _Found(NamedTuple):
    """What changed of a part, on the device."""

    part: Part
    span: Span
    """By place in the part."""
    parent: torch.Tensor
    """The part before."""
    cut: Tiling | None
    """How it is coded; None where it is listed."""


def _found(
    changes: DeviceChanges, block: Block, parts: Mapping[str, Part], *, is_coded: bool
) -> list[_Found]:
    """Return what changed, ascending by the names of parts."""
    found, tensors = [], changes.snapshot.tensors
    for span in block.spans():
        part = parts[span.spec.name]
        cut = part_tiling(part, span.num) if is_coded else None
        found.append(_Found(part, span, tensors[span.spec.name], cut))
    return found


def _encode_parts(changes: DeviceChanges, index: IndexEncoding, parts: Mapping[str, Part]) -> EncodedDelta:
    block = changes.block(gaps=False, parts=parts)
    found = _found(changes, block, parts, is_coded=False)
    listed = listed_parts(_stated(block, found, index))
    entries, firsts = delta_file.encoded(listed, index)
    return EncodedDelta(
        encoding=index.name,
        num_changed=changes.num_changed,
        listed=[part.spec for part, _ in listed],
        firsts=firsts,
        entries=entries,
        sum_growth=_growth(block, found),
    )


def _encode_context(
    schema: Sequence[TensorSpec],
    changes: DeviceChanges,
    encoding: Context,
    parts: Mapping[str, Part],
) -> EncodedDelta:
    block = changes.block(gaps=False, parts=None if _are_whole(parts) else parts)
    found = _found(changes, block, parts, is_coded=True)
    listed = listed_parts(_stated(block, [each for each in found if each.cut is None], encoding.index))
    # The host works on one of these while the device works on the other.
    coding = _Coding(block, [each for each in found if each.cut is not None], schema)
    digesting = _Digesting(found, changes.snapshot.device)
    coding.order()
    entries, firsts = delta_file.encoded(listed, encoding.index)
    growth = _growth(block, found)
    return EncodedDelta(
        encoding=encoding.name,
        num_changed=changes.num_changed,
        listed=[part.spec for part, _ in listed],
        firsts=firsts,
        entries={**coding.entries(), **entries},
        sum_growth=growth,
        parent_sums=digesting.sums(),
    )


def _stated(block: Block, found: Sequence[_Found], index: IndexEncoding) -> list[tuple[Part, TensorPatch]]:
    """Return what a file states of parts, by position in the tensor, on the host."""
    stated = []
    patches = [block.patch(each.span) for each in found]
    indices = _on_host([patch.indices for patch in patches])
    values = _on_host([bits(patch.values) for patch in patches])
    for each, there, its_indices, its_values in zip(found, patches, indices, values, strict=True):
        part = each.part
        patch = TensorPatch(name=there.name, indices=its_indices, values=its_values.view(there.values.dtype))
        if not part.is_whole:
            patch = replace(patch, indices=positions(part, patch.indices))
        elif index.with_bridges(patch.indices) is not patch.indices:
            patch = with_bridges(patch, each.parent, index)[0]
        stated.append((part, patch))
    return stated


def _on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Bring flat tensors to the host: those of one dtype together, as hundreds may have a few bytes."""
    brought: dict[int, torch.Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:
        same = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
        held = torch.cat([tensors[number] for number in same]).cpu()
        brought |= zip(same, torch.split(held, [tensors[number].numel() for number in same]), strict=True)
    return [brought[number] for number in range(len(tensors))]


def _growth(block: Block, found: Sequence[_Found]) -> dict[str, Sums]:
    """Return by how much the digest sums of parts grow, by key."""
    growth = block.sum_growth()
    for each in found:
        if each.part.lines is not None:
            continue
        # Cut in three dimensions, which is rare.
        patch = block.patch(each.span)
        local = patch.indices.to(torch.int64)
        at, old = positions(each.part, local), bits(each.parent)[local]
        growth[each.part.key] = of_elements(at, patch.values).minus(of_elements(at, old))
    return growth


class _Coding:
    """Coded parts on their way to a file's entries; see `context_encode.Encoder` for the steps."""

    def __init__(self, block: Block, coded: Sequence[_Found], schema: Sequence[TensorSpec]) -> None:
        places = {spec.name: place for place, spec in enumerate(schema)}
        self._ordered = sorted(coded, key=lambda each: (places[each.part.spec.name], each.part.box_start))
        self._places = [places[each.part.spec.name] for each in self._ordered]
        self._cuts = [each.cut for each in self._ordered if each.cut is not None]
        self._encoder: context_encode.Encoder | None = None
        if not coded:
            return
        # Row sets are chosen in the order in which `payloads.delta` does.
        numbers = {id(each): number for number, each in enumerate(self._ordered)}
        groups = [
            [numbers[id(each)] for each in sorted(group, key=lambda each: part_order(each.part))]
            for group in grouped(
                coded, lambda each: each.part.spec.dtype, lambda each: each.part.num_elements
            )
        ]
        spans = [each.span for each in self._ordered]
        nums, indices, values, index_widths = np.array([span[1:] for span in spans], dtype=np.int64).T
        widths = np.array([DTYPE_BYTES[span.spec.dtype] for span in spans], dtype=np.int64)
        positions_dtype = torch.int64 if (index_widths == 8).any() else torch.int32
        self._encoder = context_encode.Encoder(
            context_tables.geometry(self._cuts),
            np.array(
                [context_tables.FORMATS[each.part.spec.dtype] for each in self._ordered], dtype=np.int64
            ),
            np.array([each.parent.data_ptr() for each in self._ordered], dtype=np.int64),
            _joined(block.data, indices, nums, index_widths, positions_dtype),
            _joined(block.data, values, nums, widths, torch.int16),
            np.concatenate([np.zeros(1, dtype=np.int64), nums.cumsum()]),
            groups,
        )

    def order(self) -> None:
        if self._encoder is not None:
            self._encoder.order()

    def entries(self) -> dict[str, torch.Tensor]:
        """Return the file's entries for coded parts; waits for the device."""
        if self._encoder is None:
            return {}
        found = self._encoder.finish()
        streams = torch.empty(
            found.streams.shape, dtype=torch.uint8, device="cpu", pin_memory=found.streams.is_cuda
        )
        streams.copy_(found.streams, non_blocking=True)
        ends = [*accumulate((cut.num_tiles for cut in self._cuts), initial=0)]
        sets = [found.sets[number] for number in found.row_sets.tolist()]
        nothing = np.zeros(0, dtype=np.uint8)
        items = [
            (place, Coded(tiling=cut, lo=its.lo, rows=its.rows, lengths=found.lengths[at:end], data=nothing))
            for place, cut, its, (at, end) in zip(self._places, self._cuts, sets, pairwise(ends), strict=True)
        ]
        table = packed_table(items)
        if found.streams.is_cuda:
            torch.cuda.current_stream().synchronize()
        return {"table": table, "tiles": streams}


def _joined(
    data: torch.Tensor, starts: Array, nums: Array, widths: Array, dtype: torch.dtype
) -> torch.Tensor:
    """Concatenate lists of integers; without a copy where they lie side by side.

    Args:
        data: uint8, in which they lie.
        starts: int64 [num], at which byte each begins; so are the next two.
        nums: elements of each.
        widths: bytes of an element.
    """
    ends = starts + nums * widths
    # A call for each list would take longer than all kernels, where there are thousands.
    is_first = np.concatenate([[True], (starts[1:] != ends[:-1]) | (widths[1:] != widths[:-1])])
    firsts = np.flatnonzero(is_first)
    lasts = np.concatenate([firsts[1:], [len(starts)]]) - 1
    runs = zip(starts[firsts].tolist(), ends[lasts].tolist(), widths[firsts].tolist(), strict=True)
    held = [data[start:end].view(INTEGERS[width]).to(dtype) for start, end, width in runs]
    return held[0] if len(held) == 1 else torch.cat(held)


class _Digesting:
    """The digests of parts before the change, under way on the device."""

    def __init__(self, found: Sequence[_Found], device: torch.device) -> None:
        """Begin; all parts of one element width and kind of region at once."""
        self._begun: list[tuple[Sequence[_Found], torch.Tensor]] = []
        groups: dict[tuple[int, bool], list[_Found]] = {}
        for each in found:
            key = DTYPE_BYTES[each.part.spec.dtype], each.part.run is not None
            groups.setdefault(key, []).append(each)
        for (width, is_run), same in sorted(groups.items(), key=lambda item: item[0]):
            ranks = 0 if is_run else max(len(each.part.size) for each in same)
            rows = [_region(each, ranks) for each in same]
            counts = np.array([-(-each.part.num_elements // digest.BLOCK) for each in same])
            owners = np.repeat(np.arange(len(same)), counts)
            blocks = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
            kind = Kind(
                value_width=width,
                memory_width=width,
                num_dims=ranks,
                is_narrow=all(each.part.spec.num_elements < 2**31 for each in same),
                is_aligned=is_run and all(row[4] % 16 == 0 for row in rows),
            )
            jobs = torch.from_numpy(np.stack([owners, blocks], axis=1).astype(np.int32))
            table = torch.tensor(rows, device="cpu")
            self._begun.append((same, digest.digest(kind, _sent(table, device), _sent(jobs, device))))

    def sums(self) -> dict[str, Sums]:
        """Return the digest sums by key; waits for the device."""
        return {
            each.part.key: Sums(one % 2**64, two % 2**64)
            for same, digests in self._begun
            for each, (one, two, _) in zip(same, digests.tolist(), strict=True)
        }


def _sent(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy from host memory to the device, without waiting for what that does already."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _region(found: _Found, num_dims: int) -> tuple[int, ...]:
    """Return the row of a part in the table of segments; see `kernels.segments`."""
    part, address = found.part, found.parent.data_ptr()
    if part.run is not None and not num_dims:
        return (0, 0, part.num_elements, 0, address, part.run, part.run + part.num_elements, 0)
    shape = part.spec.shape
    source = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    target = [prod(part.size[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * stride for start, stride in zip(part.start, source, strict=True))
    last = first + sum((size - 1) * stride for size, stride in zip(part.size, source, strict=True))
    # Dimensions of one index in front, where parts of fewer dimensions are digested with these.
    more = num_dims - len(shape)
    dims = (*(1,) * more, *part.size, *(1,) * more, *source, *(1,) * more, *target)
    return (0, 0, part.num_elements, 0, address, first, last + 1, 0, *dims)
