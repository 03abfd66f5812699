"""The table of a payload's coded tensors: which they are, their classes, and the lengths of their streams."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from patchstore.encodings.context.bits import bounds_of, put, ramps, windows
from patchstore.encodings.context.classes import MAX_CLASSES, is_coded
from patchstore.encodings.context.parameters import valid_rows
from patchstore.encodings.context.stream import Coded
from patchstore.encodings.context.tiles import tiling
from patchstore.errors import CorruptObject
from patchstore.format.records import TensorSpec

_RECORD = np.dtype(
    [("index", "<u4"), ("lo", "u1"), ("num_classes", "u1"), ("bits", "u1"), ("zero", "u1"), ("least", "<u4")]
)
_MAX_BITS = 32

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What a table says of T tensors, K classes and N tiles in all."""

    indices: npt.NDArray[np.int64]
    """[T], ascending, the tensors' places in the run's schema."""
    lo: npt.NDArray[np.int64]
    """[T]"""
    rows: npt.NDArray[np.uint8]
    """[K, 3], tensor by tensor."""
    rows_at: npt.NDArray[np.int64]
    """[T + 1], where each tensor's rows begin, and the end."""
    lengths: npt.NDArray[np.int64]
    """[N], bytes of each tile's stream, tensor by tensor."""
    lengths_at: npt.NDArray[np.int64]
    """[T + 1], where each tensor's lengths begin, and the end."""
    bytes_at: npt.NDArray[np.int64]
    """[T + 1], where each tensor's streams begin in the tiles, and the end."""

    def coded(self, number: int, tiles: npt.NDArray[np.uint8]) -> Coded:
        """Return the change of the table's tensor of this number, over the entry `tiles`."""
        return Coded(
            lo=int(self.lo[number]),
            rows=self.rows[self.rows_at[number] : self.rows_at[number + 1]],
            lengths=self.lengths[self.lengths_at[number] : self.lengths_at[number + 1]],
            data=tiles[self.bytes_at[number] : self.bytes_at[number + 1]],
        )


def pack(items: Sequence[tuple[int, Coded]]) -> tuple[bytes, list[npt.NDArray[np.uint8]]]:
    """Return the table of some (index in the schema, change), ascending, and the parts of `tiles`."""
    records = np.zeros(len(items), dtype=_RECORD)
    num_tiles = np.array([len(coded.lengths) for _, coded in items])
    lengths = np.concatenate([coded.lengths for _, coded in items])
    starts = num_tiles.cumsum() - num_tiles
    least = np.minimum.reduceat(lengths, starts)
    bits = np.frexp((np.maximum.reduceat(lengths, starts) - least).astype(np.float64))[1].astype(np.int64)
    records["index"] = [index for index, _ in items]
    records["lo"] = [coded.lo for _, coded in items]
    records["num_classes"] = [len(coded.rows) for _, coded in items]
    records["bits"] = bits
    records["least"] = least
    num_bytes = -(-num_tiles * bits // 8)
    words = np.zeros(int(num_bytes.sum()) // 8 + 2, dtype=np.uint64)
    at, _ = _fields(num_tiles, bits, num_bytes)
    put(words, at, (lengths - np.repeat(least, num_tiles)).astype(np.uint64))
    packed = words.view(np.uint8)[: int(num_bytes.sum())]
    rows = np.concatenate([coded.rows for _, coded in items])
    return _head(records) + rows.tobytes() + packed.tobytes(), [coded.data for _, coded in items]


def unpack(
    where: str, table: npt.NDArray[np.uint8], num_tile_bytes: int, specs: Sequence[TensorSpec]
) -> Table:
    """Return what a table says.

    Args:
        where: names the payload in errors.
        num_tile_bytes: size of the entry `tiles`.
        specs: the run's tensors, in the schema's order.

    Raises:
        CorruptObject: the table breaks the format's rules, or does not suit the tensors or the tiles.
    """
    rest = np.ascontiguousarray(table)
    count, rest = _take(where, rest, 4)
    num_tensors = int(count.view("<u4")[0])
    head, rest = _take(where, rest, num_tensors * _RECORD.itemsize)
    records = head.view(_RECORD)
    if not num_tensors:
        raise CorruptObject(f"{where}: a table of no tensors")
    indices = records["index"].astype(np.int64)
    num_classes = records["num_classes"].astype(np.int64)
    bits = records["bits"].astype(np.int64)
    if (np.diff(indices) <= 0).any() or (indices >= len(specs)).any():
        raise CorruptObject(f"{where}: tensors do not ascend, or are none of the schema's {len(specs)}")
    named = [specs[index] for index in indices.tolist()]
    for spec in named:
        if not is_coded(spec.dtype) or spec.num_elements == 0:
            raise CorruptObject(
                f"{where}: {spec.name!r} ({spec.dtype}, {spec.shape}) cannot be coded by context"
            )
    if (
        (num_classes < 1).any()
        or (num_classes > MAX_CLASSES).any()
        or (bits > _MAX_BITS).any()
        or records["zero"].any()
    ):
        raise CorruptObject(f"{where}: a tensor's record has a field out of range")
    packed_rows, rest = _take(where, rest, 3 * int(num_classes.sum()))
    rows = packed_rows.reshape(-1, 3)
    if not valid_rows(rows).all():
        raise CorruptObject(f"{where}: a class has a code without meaning")

    num_tiles = np.array([tiling(spec.shape).num_tiles for spec in named], dtype=np.int64)
    num_bytes = -(-num_tiles * bits // 8)
    packed, rest = _take(where, rest, int(num_bytes.sum()))
    if len(rest):
        raise CorruptObject(f"{where}: {len(rest)} bytes follow the table")
    used = num_tiles * bits & 7
    last = num_bytes.cumsum()[used > 0] - 1
    if (packed[last] >> used[used > 0].astype(np.uint8)).any():
        raise CorruptObject(f"{where}: the padding of lengths is not zero")
    at, owner_bits = _fields(num_tiles, bits, num_bytes)
    every = windows(np.concatenate([packed, np.zeros(9, dtype=np.uint8)]))
    field = every[at >> 3] >> (at & 7).view(np.uint64)
    field &= (np.uint64(1) << owner_bits.view(np.uint64)) - np.uint64(1)
    lengths = field.view(np.int64) + np.repeat(records["least"].astype(np.int64), num_tiles)
    lengths_at = bounds_of(num_tiles)
    bytes_at = bounds_of(lengths)[lengths_at]
    if bytes_at[-1] != num_tile_bytes:
        raise CorruptObject(f"{where}: streams of {bytes_at[-1]} bytes, but {num_tile_bytes} bytes of tiles")
    return Table(
        indices=indices,
        lo=records["lo"].astype(np.int64),
        rows=rows,
        rows_at=bounds_of(num_classes),
        lengths=lengths,
        lengths_at=lengths_at,
        bytes_at=bytes_at,
    )


def _head(records: Array) -> bytes:
    return len(records).to_bytes(4, "little") + records.tobytes()


def _take(where: str, data: Array, num: int) -> tuple[Array, Array]:
    if num > len(data):
        raise CorruptObject(f"{where}: the table ends {num - len(data)} bytes early")
    return data[:num], data[num:]


def _fields(num_tiles: Array, bits: Array, num_bytes: Array) -> tuple[Array, Array]:
    """Return where the field of each length begins, in bits, and how many bits it has."""
    of_each = np.repeat(bits, num_tiles)
    return ramps(num_tiles) * of_each + np.repeat((num_bytes.cumsum() - num_bytes) * 8, num_tiles), of_each
