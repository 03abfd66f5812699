"""Coded deltas on a GPU: decoded where the weights are, and only the tiles that this rank holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.encodings.context import Coded, tiling
from patchstore.errors import CorruptObject
from patchstore.format import records
from patchstore.format.records import DTYPE_BYTES, TensorSpec
from patchstore.kernels import context_decode, context_tables
from patchstore.kernels.context_tables import FORMATS
from vllm_plugin.tiles import Box, tiles_within
from vllm_plugin.upload import send, tables_on

Array = npt.NDArray[Any]
_NO_BOXES = np.zeros((0, 6), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """Patches on the device, of one tensor each."""

    names: Sequence[str]
    positions: Array
    """int64 [num], addresses of positions or gaps."""
    values: Array
    """int64 [num], addresses of values."""
    nums: Array
    """int64 [num], how many there are of both."""
    position_widths: Array
    """int64 [num], bytes of a position; 2 for gaps."""

    def joined(self, other: "Patches") -> "Patches":
        """Return these patches, and then those of other names."""
        return Patches(
            [*self.names, *other.names],
            np.concatenate([self.positions, other.positions]),
            np.concatenate([self.values, other.values]),
            np.concatenate([self.nums, other.nums]),
            np.concatenate([self.position_widths, other.position_widths]),
        )

    @classmethod
    def between(
        cls, names: Sequence[str], bounds: Array, positions: torch.Tensor, values: torch.Tensor
    ) -> "Patches":
        """Return the patches of names that are listed one after the other.

        Args:
            bounds: int [num + 1], where the changes of each name begin, and the end.
            positions: on the device, as are the values; the caller keeps both.
        """
        firsts, width = np.asarray(bounds, dtype=np.int64)[:-1], positions.element_size()
        return cls(
            names,
            positions.data_ptr() + firsts * width,
            values.data_ptr() + firsts * values.element_size(),
            np.diff(bounds),
            np.full(len(names), width, dtype=np.int64),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where elements of one tensor lie on the device, in boxes of them."""

    format: tuple[int, int, int]
    boxes: Array
    """int64 [num_boxes, 6]: first level, levels, first row, rows, first column and columns, in the tensor."""
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
            boxes=_rows([box.elements for box in boxes]),
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
            boxes=_rows(found),
            addresses=np.full(len(found), address, dtype=np.int64),
            strides=np.tile(strides, (len(found), 1)),
            memory_widths=np.full(len(found), DTYPE_BYTES[spec.dtype], dtype=np.int64),
        )


def _rows(boxes: Sequence[records.Box]) -> Array:
    rows = [(each.level, each.levels, each.row, each.rows, each.col, each.cols) for each in boxes]
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


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
    bounds: Array
    """int64 [num_names + 1], where the changes of each name begin, and the end."""

    def patches(self) -> Patches:
        """Return patches, which point to the tensors here."""
        found = Patches.between(self.names, self.bounds, self.positions, self.values)
        narrow = self.narrow.data_ptr() + self.bounds[:-1]
        return replace(found, values=np.where(np.array(self.widths) == 1, narrow, found.values))


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
    geometry = context_tables.geometry([each.tiling for *_, each in coded])
    where = [places[name] for name, _, _ in coded]
    # Every part with every box of its tensor, and then those that have elements in common.
    num_boxes = np.array([len(each.boxes) for each in where], dtype=np.int64)
    owners = np.repeat(np.arange(len(coded)), num_boxes)
    boxes, is_held = tiles_within(
        geometry[owners], np.concatenate([_NO_BOXES, *(each.boxes for each in where)])
    )
    picked = np.flatnonzero(is_held)
    if not len(picked):
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        values = torch.empty(0, dtype=torch.int16, device=device)
        return Listed(
            names, widths, nothing, values, values.to(torch.uint8), np.zeros(len(names) + 1, dtype=np.int64)
        )
    some, owners = np.unique(owners[picked], return_inverse=True)
    coded = [coded[number] for number in some.tolist()]
    (streams,) = send([torch.from_numpy(_joined([each.data for *_, each in coded]))], device)
    tensors = context_tables.tensors(
        geometry[some],
        np.array([places[name].format for name, _, _ in coded], dtype=np.int64),
        np.array([each.lo for *_, each in coded], dtype=np.int64),
        np.array([len(each.rows) for *_, each in coded], dtype=np.int64),
        device,
    )
    segments = context_tables.segments(
        tensors,
        owners,
        boxes[picked],
        np.concatenate([each.addresses for each in where])[picked],
        np.concatenate([each.strides for each in where])[picked],
        np.concatenate([each.memory_widths for each in where])[picked],
    )
    rows = np.concatenate([each.rows for *_, each in coded]).astype(np.int32)
    ends = np.concatenate([each.lengths for *_, each in coded]).cumsum(dtype=np.int64)
    starts, codes = tables_on(
        device,
        np.concatenate([np.zeros(1, dtype=np.int64), ends]),
        rows[:, 0] | rows[:, 1] << 8 | rows[:, 2] << 16,
    )
    found = context_decode.decode(tensors, segments, codes, starts, streams)
    if found.first_wrong is not None:
        name, key, _ = coded[int(owners[found.first_wrong])]
        raise CorruptObject(f"{key}: what it says of {name!r} is no change of the tensor that is served")
    narrow = found.values.to(torch.uint8) if 1 in widths else found.values[:0]
    # Where the parts of each name end; a name of which nothing is here ends where it begins.
    order = {name: number for number, name in enumerate(names)}
    of_name = np.array([order[name] for name, _, _ in coded])[owners]
    last = np.searchsorted(of_name, np.arange(len(names)), side="right")
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), found.bounds[last]])
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
