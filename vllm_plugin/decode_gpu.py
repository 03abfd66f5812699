"""Coded deltas on a GPU: decoded where the weights are, and only the tiles that this rank holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.encodings.context import Coded, tiling
from patchstore.errors import CorruptObject
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
    """Where the tiles of one tensor lie on the device, in boxes of them."""

    geometry: Array
    """int64 [1, 7]; see `context_tables.geometry`."""
    format: tuple[int, int, int]
    boxes: Array
    """int64 [num_boxes, 6]: first level, tile row and tile column, and how many of them."""
    addresses: Array
    """int64 [num_boxes], at which the tensor's first element would be."""
    strides: Array
    """int64 [num_boxes, 3], in elements: of levels, rows and columns."""
    memory_widths: Array
    """int64 [num_boxes], bytes of an element."""

    @classmethod
    def served(cls, spec: TensorSpec, boxes: Sequence[Box], memories: Mapping[int, torch.Tensor]) -> "Places":
        """Describe tiles that are served.

        Args:
            memories: flat, by index of the runtime.
        """
        owners = [memories[box.index] for box in boxes]
        widths = np.array([each.element_size() for each in owners], dtype=np.int64)
        firsts = np.array([each.data_ptr() for each in owners], dtype=np.int64)
        origins = np.array([box.origin for box in boxes], dtype=np.int64)
        return cls(
            geometry=context_tables.geometry([tiling(spec.shape)]),
            format=FORMATS[spec.dtype],
            boxes=_ranges(boxes),
            addresses=firsts + origins * widths,
            strides=np.array([box.strides for box in boxes], dtype=np.int64).reshape(-1, 3),
            memory_widths=widths,
        )

    @classmethod
    def copied(cls, spec: TensorSpec, address: int, boxes: Sequence[Box] | None) -> "Places":
        """Describe a tensor that lies there as checkpoints have it; all of its tiles, or those of boxes."""
        tiles = tiling(spec.shape)
        every = np.array([[0, 0, 0, tiles.levels, tiles.row_tiles, tiles.col_tiles]], dtype=np.int64)
        found = every if boxes is None else _ranges(boxes)
        return cls(
            geometry=context_tables.geometry([tiles]),
            format=FORMATS[spec.dtype],
            boxes=found,
            addresses=np.full(len(found), address, dtype=np.int64),
            strides=np.tile(
                np.array([tiles.rows * tiles.cols, tiles.cols, 1], dtype=np.int64), (len(found), 1)
            ),
            memory_widths=np.full(len(found), DTYPE_BYTES[spec.dtype], dtype=np.int64),
        )


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
    names: Sequence[str],
    coded: Sequence[tuple[str, Coded]],
    places: Sequence[Places],
    device: torch.device,
) -> Listed:
    """Decode what changed of some tensors.

    Args:
        coded: of each, the key of the object that has it, and what that says.

    Raises:
        CorruptObject: a stream that no encoder writes for such a parent.
    """
    if not names:
        nothing = torch.empty(0, dtype=torch.int16, device=device)
        return Listed(names, [], nothing, nothing, nothing, [0])
    (streams,) = send([torch.from_numpy(_joined([each.data for _, each in coded]))], device)
    tensors = context_tables.tensors(
        np.concatenate([each.geometry for each in places]),
        np.array([each.format for each in places], dtype=np.int64),
        np.array([each.lo for _, each in coded], dtype=np.int64),
        np.array([len(each.rows) for _, each in coded], dtype=np.int64),
        device,
    )
    num_boxes = np.array([len(each.boxes) for each in places])
    segments = context_tables.segments(
        tensors,
        np.repeat(np.arange(len(names)), num_boxes),
        np.concatenate([each.boxes for each in places]),
        np.concatenate([each.addresses for each in places]),
        np.concatenate([each.strides for each in places]),
        np.concatenate([each.memory_widths for each in places]),
    )
    rows = np.concatenate([each.rows for _, each in coded]).astype(np.int32)
    ends = np.concatenate([each.lengths for _, each in coded]).cumsum(dtype=np.int64)
    found = context_decode.decode(
        tensors,
        segments,
        torch.from_numpy(rows[:, 0] | rows[:, 1] << 8 | rows[:, 2] << 16).to(device),
        torch.from_numpy(np.concatenate([np.zeros(1, dtype=np.int64), ends])).to(device),
        streams,
    )
    firsts = np.concatenate([np.zeros(1, dtype=np.int64), num_boxes.cumsum()])
    if found.first_wrong is not None:
        wrong = int(np.searchsorted(firsts, found.first_wrong, side="right")) - 1
        raise CorruptObject(
            f"{coded[wrong][0]}: what it says of {names[wrong]!r} is no change of the tensor that is served"
        )
    widths = [each.format[0] for each in places]
    narrow = found.values.to(torch.uint8) if 1 in widths else found.values[:0]
    return Listed(names, widths, found.positions, found.values, narrow, found.bounds[firsts].tolist())


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


def _ranges(boxes: Sequence[Box]) -> Array:
    sides = [(box.levels, box.row_tiles, box.col_tiles) for box in boxes]
    return np.array(
        [[*(side.start for side in each), *(len(side) for side in each)] for each in sides], dtype=np.int64
    ).reshape(-1, 6)
