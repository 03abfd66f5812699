"""Coded tensors as the entries of a delta file, and as patches: where arrays meet tensors."""

from collections.abc import Callable, MutableMapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from patchstore.encodings.context.classes import is_coded
from patchstore.encodings.context.decoder import decode_all
from patchstore.encodings.context.stream import Coded
from patchstore.encodings.context.table import order, pack, unpack
from patchstore.encodings.context.tiles import Tiling, tiling
from patchstore.errors import CorruptObject
from patchstore.format.records import TensorSpec
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, index_dtype, unsigned

Tiles = npt.NDArray[np.int64] | None
"""Numbers of some of a part's tiles, ascending; None for all."""
Chosen = Callable[[Tiling], Tiles]
"""Says which tiles of a part are meant."""

MANY_CHANGES = 4096
FEW_TILES = 8

_ENTRIES = ("table", "tiles")


def pays(spec: TensorSpec, num_changed: int, cut: Tiling | None = None) -> bool:
    """Whether changes of a tensor, or of a part of it that is cut so, are to be coded.

    A reader goes through tiles side by side, one change after the other: where tiles are few and changes
    many, it would take longer than the bytes are worth.
    """
    if not is_coded(spec.dtype) or spec.num_elements == 0:
        return False
    return num_changed <= MANY_CHANGES or (cut or tiling(spec.shape)).num_tiles >= FEW_TILES


def packed(coded: Sequence[tuple[int, Coded]]) -> dict[str, torch.Tensor]:
    """Return the file's entries for parts by their tensor's place in the schema; none for none."""
    if not coded:
        return {}
    coded = sorted(coded, key=order)
    streams = np.concatenate([each.data for _, each in coded])
    return {"table": packed_table(coded), "tiles": torch.from_numpy(streams)}


def packed_table(coded: Sequence[tuple[int, Coded]]) -> torch.Tensor:
    """Return the entry `table` of `packed`; not one without any. They ascend as `table.order` says."""
    table, _ = pack(coded)
    return torch.frombuffer(bytearray(table), dtype=torch.uint8)


def unpacked(
    where: str, tensors: MutableMapping[str, torch.Tensor], schema: Sequence[TensorSpec]
) -> dict[str, tuple[Coded, ...]]:
    """Take the entries of coded parts out of a file's; they share its memory.

    Returns: by tensor its parts.

    Raises:
        CorruptObject: one is missing, or they are not what an encoder writes.
    """
    table, streams = (tensors.pop(name, None) for name in _ENTRIES)
    if table is None and streams is None:
        return {}
    for name, entry in zip(_ENTRIES, (table, streams), strict=True):
        if entry is None or entry.dtype != torch.uint8 or entry.dim() != 1:
            raise CorruptObject(f"{where}: its entry {name!r} is not a list of bytes")
    assert table is not None
    assert streams is not None
    data = streams.numpy()
    found = unpack(where, table.numpy(), len(data), schema)
    parts: dict[str, tuple[Coded, ...]] = {}
    for i, place in enumerate(found.indices.tolist()):
        name = schema[place].name
        parts[name] = (*parts.get(name, ()), found.coded(i, data))
    return parts


def decode_patches(
    specs: Sequence[TensorSpec],
    coded: Sequence[Coded],
    olds: Sequence[torch.Tensor],
    where: Sequence[str],
    tiles: Sequence[Tiles],
) -> list[TensorPatch]:
    """Return the changes of some tiles of parts of tensors of one dtype.

    Args:
        olds: the parent's whole tensors on the CPU; nothing but their `tiles` is looked at.

    Raises:
        CorruptObject: no encoder writes this for such parents.
    """
    held = [each.tiling.of_whole(unsigned(old)) for each, old in zip(coded, olds, strict=True)]
    counts, positions, new = decode_all(
        specs, coded, held[0] if len(held) == 1 else np.concatenate(held), where, tiles
    )
    dtype = index_dtype(max(spec.num_elements for spec in specs))
    values = torch.from_numpy(new.view(f"i{new.itemsize}" if new.itemsize > 1 else "u1"))
    return [
        TensorPatch(name=spec.name, indices=its_indices, values=its_values)
        for spec, its_indices, its_values in zip(
            specs,
            torch.split(torch.from_numpy(positions).to(dtype), counts.tolist()),
            torch.split(values.view(TORCH_DTYPES[specs[0].dtype]), counts.tolist()),
            strict=True,
        )
    ]
