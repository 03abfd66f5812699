"""Encode changes on the device that found them; `payloads.delta` does the same on the CPU.

Imports Triton, so only what runs kernels may import it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from patchstore.encodings import Encoding, IndexEncoding
from patchstore.encodings.context import Coded, Context, Tiling, packed_table
from patchstore.format.records import DTYPE_BYTES, Part, TensorSpec
from patchstore.kernels import context_encode, context_tables, digest
from patchstore.kernels.segments import Kind
from patchstore.payloads import delta_file
from patchstore.payloads.delta import EncodedDelta, listed_parts, part_order, part_tiling, with_bridges
from patchstore.publish.snapshot.block import Block
from patchstore.publish.snapshot.device import DeviceChanges, on
from patchstore.tensors.bits import TensorPatch, bits, grouped
from patchstore.tensors.parts import positions
from patchstore.tensors.state_digest import Sums, of_elements


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
    patch: TensorPatch
    """By place in the part."""
    parent: torch.Tensor
    """The part before."""
    cut: Tiling | None
    """How it is coded; None where it is listed."""


def _found(
    changes: DeviceChanges, block: Block, parts: Mapping[str, Part], *, is_coded: bool
) -> list[_Found]:
    """Return what changed, ascending by the names of parts."""
    found = []
    for spec, patch in block.patches():
        part = parts[spec.name]
        cut = part_tiling(part, len(patch.indices)) if is_coded else None
        found.append(_Found(part, patch, changes.snapshot.tensors[spec.name], cut))
    return found


def _encode_parts(changes: DeviceChanges, index: IndexEncoding, parts: Mapping[str, Part]) -> EncodedDelta:
    block = changes.block(gaps=False, parts=parts)
    found = _found(changes, block, parts, is_coded=False)
    listed = listed_parts(_stated(found, index))
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
    places = {spec.name: place for place, spec in enumerate(schema)}
    coded = [each for each in found if each.cut is not None]
    listed = listed_parts(_stated([each for each in found if each.cut is None], encoding.index))
    entries, firsts = delta_file.encoded(listed, encoding.index)
    return EncodedDelta(
        encoding=encoding.name,
        num_changed=changes.num_changed,
        listed=[part.spec for part, _ in listed],
        firsts=firsts,
        entries={**_coded(coded, places), **entries},
        sum_growth=_growth(block, found),
        parent_sums=_digests(found, changes.snapshot.device),
    )


def _stated(found: Sequence[_Found], index: IndexEncoding) -> list[tuple[Part, TensorPatch]]:
    """Return what a file states of parts, by position in the tensor, on the host."""
    stated = []
    indices = _on_host([each.patch.indices for each in found])
    values = _on_host([bits(each.patch.values) for each in found])
    for each, its_indices, its_values in zip(found, indices, values, strict=True):
        part, patch = each.part, each.patch
        patch = replace(patch, indices=its_indices, values=its_values.view(patch.values.dtype))
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
        brought |= zip(same, torch.split(held, [len(tensors[number]) for number in same]), strict=True)
    return [brought[number] for number in range(len(tensors))]


def _growth(block: Block, found: Sequence[_Found]) -> dict[str, Sums]:
    """Return by how much the digest sums of parts grow, by key."""
    growth = block.sum_growth()
    for each in found:
        if each.part.lines is not None:
            continue
        # Cut in three dimensions, which is rare.
        local = each.patch.indices.to(torch.int64)
        at, old = positions(each.part, local), bits(each.parent)[local]
        growth[each.part.key] = of_elements(at, each.patch.values).minus(of_elements(at, old))
    return growth


def _coded(coded: Sequence[_Found], places: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return the file's entries for coded parts."""
    if not coded:
        return {}
    # Row sets are chosen in the order in which `payloads.delta` does.
    grouped_parts = list(
        grouped(coded, lambda each: each.part.spec.dtype, lambda each: each.part.num_elements)
    )
    ordered = sorted(coded, key=lambda each: (places[each.part.spec.name], each.part.box_start))
    numbers = {id(each): number for number, each in enumerate(ordered)}
    groups = [
        [numbers[id(each)] for each in sorted(group, key=lambda each: part_order(each.part))]
        for group in grouped_parts
    ]
    cuts = [each.cut for each in ordered if each.cut is not None]
    is_wide = any(each.patch.indices.dtype == torch.int64 for each in ordered)
    found = context_encode.encode(
        context_tables.geometry(cuts),
        np.array([context_tables.FORMATS[each.part.spec.dtype] for each in ordered], dtype=np.int64),
        np.array([each.parent.data_ptr() for each in ordered], dtype=np.int64),
        _joined([each.patch.indices for each in ordered], torch.int64 if is_wide else torch.int32),
        _joined([bits(each.patch.values) for each in ordered], torch.int16),
        np.array([0, *accumulate(len(each.patch.indices) for each in ordered)], dtype=np.int64),
        groups,
    )
    streams = torch.empty(
        found.streams.shape, dtype=torch.uint8, device="cpu", pin_memory=found.streams.is_cuda
    )
    streams.copy_(found.streams)
    lengths = np.split(found.lengths, np.cumsum([cut.num_tiles for cut in cuts])[:-1])
    sets = [found.sets[number] for number in found.row_sets.tolist()]
    nothing = np.zeros(0, dtype=np.uint8)
    items = [
        (
            places[each.part.spec.name],
            Coded(tiling=cut, lo=its.lo, rows=its.rows, lengths=its_lengths, data=nothing),
        )
        for each, cut, its, its_lengths in zip(ordered, cuts, sets, lengths, strict=True)
    ]
    return {"table": packed_table(items), "tiles": streams}


def _joined(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Concatenate flat tensors; without a copy where they already lie side by side."""
    first = parts[0]
    step = first.element_size()
    ends = [each.data_ptr() + len(each) * step for each in parts]
    if all(each.dtype == dtype for each in parts) and all(
        each.data_ptr() == end for each, end in zip(parts[1:], ends[:-1], strict=True)
    ):
        return first.as_strided((sum(len(each) for each in parts),), (1,))
    return torch.cat([each.to(dtype) for each in parts])


def _digests(found: Sequence[_Found], device: torch.device) -> dict[str, Sums]:
    """Digest parts before the change, all of one element width and kind of region at once."""
    sums: dict[str, Sums] = {}
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
        jobs = np.stack([owners, blocks], axis=1).astype(np.int32)
        table = torch.tensor(rows, device="cpu").to(device)
        results = digest.digest(kind, table, torch.from_numpy(jobs).to(device)).tolist()
        for each, (one, two, _) in zip(same, results, strict=True):
            sums[each.part.key] = Sums(one % 2**64, two % 2**64)
    return sums


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
