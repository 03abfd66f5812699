"""Coded deltas on a GPU: decoded where the weights are, and only the tiles that this rank holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.encodings.context import Coded, Tiling, tiling
from patchstore.errors import CorruptObject
from patchstore.format import records
from patchstore.format.records import DTYPE_BYTES, TensorSpec
from patchstore.kernels import context_decode, context_tables
from patchstore.kernels.context_tables import FORMATS
from vllm_plugin.tiles import Box
from vllm_plugin.upload import send

Array = npt.NDArray[Any]


class Patch(NamedTuple):
    """A patch on the device: addresses of positions or gaps, and of values."""

    positions: int
    values: int
    num: int
    position_width: int


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where elements of one tensor lie on the device, in boxes of them."""

    format: tuple[int, int, int]
    boxes: Sequence[records.Box]
    addresses: Array
    """int64 [num_boxes], at which the tensor's first element would be."""
    strides: Array
    """int64 [num_boxes, 3], in elements: of levels, rows and columns."""
    memory_widths: Array
    """int64 [num_boxes], bytes of an element."""

    @classmethod
    def served(cls, spec: TensorSpec, boxes: Sequence[Box], memories: Mapping[int, torch.Tensor]) -> "Places":
        """Describe elements that are served.

        Args:
            memories: flat, by index of the runtime.
        """
        owners = [memories[box.index] for box in boxes]
        widths = np.array([each.element_size() for each in owners], dtype=np.int64)
        firsts = np.array([each.data_ptr() for each in owners], dtype=np.int64)
        origins = np.array([box.origin for box in boxes], dtype=np.int64)
        return cls(
            format=FORMATS[spec.dtype],
            boxes=[box.elements for box in boxes],
            addresses=firsts + origins * widths,
            strides=np.array([box.strides for box in boxes], dtype=np.int64).reshape(-1, 3),
            memory_widths=widths,
        )

    @classmethod
    def copied(cls, spec: TensorSpec, address: int, boxes: Sequence[Box] | None) -> "Places":
        """Describe a tensor that lies there as checkpoints have it; all of it, or what is in boxes."""
        tiles = tiling(spec.shape)
        found = [tiles.box] if boxes is None else [box.elements for box in boxes]
        strides = np.array([tiles.rows * tiles.cols, tiles.cols, 1], dtype=np.int64)
        return cls(
            format=FORMATS[spec.dtype],
            boxes=found,
            addresses=np.full(len(found), address, dtype=np.int64),
            strides=np.tile(strides, (len(found), 1)),
            memory_widths=np.full(len(found), DTYPE_BYTES[spec.dtype], dtype=np.int64),
        )

    def tiles(self, cut: Tiling) -> tuple[Array, Array]:
        """Return the tiles of a part that lie here.

        Returns: int64 [num, 6], first level, tile row and tile column in the part, and how many of them; and
            int64 [num], the box of each.
        """
        found, picked = [], []
        for number, box in enumerate(self.boxes):
            ranges = cut.ranges_within(box)
            if ranges is not None:
                found.append(ranges)
                picked.append(number)
        return np.array(found, dtype=np.int64).reshape(-1, 6), np.array(picked, dtype=np.int64)


class Listed(NamedTuple):
    """What was decoded."""

    names: Sequence[str]
    widths: Sequence[int]
    """Bytes of an element of each."""
    positions: torch.Tensor
    """int32 or int64 [num], of one name after the other."""
    values: torch.Tensor
    """int16 [num]; one-byte elements in the lower byte."""
    narrow: torch.Tensor
    """uint8 [num]: the same, or nothing where no element is of one byte."""
    bounds: list[int]
    """Where the changes of each name begin, and the end."""

    def patches(self) -> dict[str, Patch]:
        """Return patches by name, which point to the tensors here."""
        step = self.positions.element_size()
        return {
            name: Patch(
                self.positions.data_ptr() + first * step,
                self.narrow.data_ptr() + first if width == 1 else self.values.data_ptr() + 2 * first,
                end - first,
                step,
            )
            for name, width, (first, end) in zip(self.names, self.widths, pairwise(self.bounds), strict=True)
        }


def decode(
    coded: Sequence[tuple[str, str, Coded]], places: Mapping[str, Places], device: torch.device
) -> Listed:
    """Decode what changed of some parts of tensors.

    Args:
        coded: of each the tensor's name, the key of the object that has it, and what that says; parts of one
            tensor follow each other.
        places: by name. No box cuts through a tile.

    Raises:
        CorruptObject: a stream that no encoder writes for such a parent.
    """
    names = list(dict.fromkeys(name for name, _, _ in coded))
    widths = [places[name].format[0] for name in names]
    held = [places[name].tiles(each.tiling) for name, _, each in coded]
    some = [number for number, (boxes, _) in enumerate(held) if len(boxes)]
    if not some:
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        values = torch.empty(0, dtype=torch.int16, device=device)
        return Listed(names, widths, nothing, values, values.to(torch.uint8), [0] * (len(names) + 1))
    coded, held = [coded[number] for number in some], [held[number] for number in some]
    (streams,) = send([torch.from_numpy(_joined([each.data for *_, each in coded]))], device)
    tensors = context_tables.tensors(
        context_tables.geometry([each.tiling for *_, each in coded]),
        np.array([places[name].format for name, _, _ in coded], dtype=np.int64),
        np.array([each.lo for *_, each in coded], dtype=np.int64),
        np.array([len(each.rows) for *_, each in coded], dtype=np.int64),
        device,
    )
    num_boxes = np.array([len(boxes) for boxes, _ in held])
    where = [(places[name], picked) for (name, _, _), (_, picked) in zip(coded, held, strict=True)]
    segments = context_tables.segments(
        tensors,
        np.repeat(np.arange(len(coded)), num_boxes),
        np.concatenate([boxes for boxes, _ in held]),
        np.concatenate([each.addresses[picked] for each, picked in where]),
        np.concatenate([each.strides[picked] for each, picked in where]),
        np.concatenate([each.memory_widths[picked] for each, picked in where]),
    )
    rows = np.concatenate([each.rows for *_, each in coded]).astype(np.int32)
    ends = np.concatenate([each.lengths for *_, each in coded]).cumsum(dtype=np.int64)
    found = context_decode.decode(
        tensors,
        segments,
        torch.from_numpy(rows[:, 0] | rows[:, 1] << 8 | rows[:, 2] << 16).to(device),
        torch.from_numpy(np.concatenate([np.zeros(1, dtype=np.int64), ends])).to(device),
        streams,
    )
    firsts = np.concatenate([np.zeros(1, dtype=np.int64), num_boxes.cumsum()])
    if found.first_wrong is not None:
        name, key, _ = coded[int(np.searchsorted(firsts, found.first_wrong, side="right")) - 1]
        raise CorruptObject(f"{key}: what it says of {name!r} is no change of the tensor that is served")
    narrow = found.values.to(torch.uint8) if 1 in widths else found.values[:0]
    # Where the parts of each name end; a name of which nothing is here ends where it begins.
    order = {name: number for number, name in enumerate(names)}
    owners = np.array([order[name] for name, _, _ in coded])
    last = np.searchsorted(owners, np.arange(len(names)), side="right")
    bounds = [0, *found.bounds[firsts[last]].tolist()]
    return Listed(names, widths, found.positions, found.values, narrow, bounds)


def _joined(parts: Sequence[Array]) -> Array:
    """Concatenate arrays of bytes; without a copy where they already lie side by side in one."""
    base = parts[0].base
    if isinstance(base, np.ndarray) and all(each.base is base for each in parts):
        firsts = [each.__array_interface__["data"][0] for each in parts]
        ends = [first + len(each) for first, each in zip(firsts, parts, strict=True)]
        begin = firsts[0] - base.__array_interface__["data"][0]
        if firsts[1:] == ends[:-1] and base.dtype == np.uint8 and base.ndim == 1:
            return base[begin : begin + ends[-1] - firsts[0]]
    return np.concatenate(parts)
