"""The table of coded parts: what they are, how each is coded, and how long the streams of its tiles are.

A front of fixed length, a compressed head in columns, and the lengths. The columns of a whole model's tensors
compress to almost nothing, and so do those of a shard of it. In a delta file it is the entry `table`, beside
the streams in `tiles`.
"""

import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.records import Box, Schema, view_of
from patchstore.codec.context.bits import Array, field_dtype, fields_of, joined_fields
from patchstore.codec.context.classes import MAX_CLASSES, is_coded
from patchstore.codec.context.coded import Coded, ascend
from patchstore.codec.context.rows import Sets, valid_rows
from patchstore.codec.context.tiles import SLICES, Cuts, Tiling, slices_of, tiling
from patchstore.errors import CorruptObject

_FRONT = 12
_COLUMNS = (
    *(("place", "<u4"), ("level", "<u8"), ("levels", "<u8"), ("row", "<u8"), ("rows", "<u8")),
    *(
        ("col", "<u8"),
        ("cols", "<u8"),
        ("slices", "u1"),
        ("row_set", "<u4"),
        ("bits", "u1"),
        ("least", "<u4"),
    ),
)
_PART_BYTES = sum(np.dtype(kind).itemsize for _, kind in _COLUMNS)
_MOST_SET_BYTES = 2 + 3 * MAX_CLASSES
_MAX_BITS = 32
_LEVEL = 9
_LONG, _LONG_LEVEL = 1 << 18, 6
"""From how many bytes of a head on, and how, it is compressed in an eighth of the time, and is 3 % longer."""
_TOGETHER = 1 << 18
"""Tiles."""
MANY_CHANGES = 4096
FEW_TILES = 8


def pack(coded: Coded) -> bytes:
    """Return the table of parts, which are in the order of a file."""
    cuts, lengths, num_tiles = coded.cuts, coded.lengths, coded.cuts.num_tiles
    starts = coded.tiles_at[:-1]
    least = np.minimum.reduceat(lengths, starts)
    bits = np.frexp((np.maximum.reduceat(lengths, starts) - least).astype(np.float64))[1].astype(np.int64)
    # Sets are numbered as parts use them first.
    sets, row_sets = coded.sets.at(coded.row_sets).distinct()
    sides = cuts.each(lambda cut: (*_sides(cut), _code_of(cut))).T
    columns = {
        "place": np.diff(coded.numbers, prepend=0),
        **dict(zip(("level", "levels", "row", "rows", "col", "cols", "slices"), sides, strict=True)),
        "row_set": row_sets,
        "bits": bits,
        "least": least,
    }
    head = b"".join(_planes(columns[name].astype(kind)) for name, kind in _COLUMNS)
    head += sets.lo.astype(np.uint8).tobytes() + sets.nums.astype(np.uint8).tobytes()
    head += sets.listed.T.tobytes()
    squeezed = zlib.compress(head, _LEVEL if len(head) <= _LONG else _LONG_LEVEL)
    front = np.array([len(coded), len(sets), len(squeezed)], dtype="<u4").tobytes()
    num_bytes = -(-num_tiles * bits // 8)
    packed, begins = np.empty(int(num_bytes.sum()), dtype=np.uint8), num_bytes.cumsum() - num_bytes
    for width, num, parts in _alike(num_tiles, bits):
        fields = np.zeros((len(parts), -(-num // 8) * 8), dtype=field_dtype(width))
        its = _items(lengths, num)[starts[parts]].view(lengths.dtype).reshape(-1, num)
        np.subtract(its, least[parts, None], out=fields[:, :num], casting="unsafe")
        octets = joined_fields(fields.reshape(-1), width).reshape(len(parts), -1)
        _put_items(packed, begins[parts], octets[:, : -(-num * width // 8)])
    return b"".join([front, squeezed, packed.tobytes()])


def unpack(where: str, table: npt.NDArray[np.uint8], tiles: npt.NDArray[np.uint8], schema: Schema) -> Coded:
    """Return what a table says, over the entry `tiles`; `where` is the payload's key."""
    front, rest = _take(where, np.ascontiguousarray(table), _FRONT)
    num_parts, num_sets, num_squeezed = front.view("<u4").tolist()
    if not num_parts:
        raise CorruptObject(f"{where}: a table of no tensors")
    # Before the head is inflated, which may have a thousand times the bytes that are stored. Parts have no
    # element in common, and where anything of a part changes, a stream of it has a byte.
    kinds, of = schema.kinds
    sizes, are_coded = np.array(schema.sizes), np.array([is_coded(dtype) for dtype, _ in kinds])
    most = min(int(sizes[are_coded[of]].sum()), len(tiles))
    if num_parts > most:
        raise CorruptObject(f"{where}: {num_parts} parts, where the tensors and the streams can have {most}")
    if not num_sets or num_sets > num_parts:
        raise CorruptObject(f"{where}: {num_sets} row sets of {num_parts} parts")
    squeezed, rest = _take(where, rest, num_squeezed)
    head = _inflated(where, squeezed, num_parts * _PART_BYTES + num_sets * _MOST_SET_BYTES)
    columns, head = _columns(where, head, num_parts)
    sets = _sets(where, head, num_sets)
    row_sets = columns["row_set"]
    if (row_sets >= num_sets).any():
        raise CorruptObject(f"{where}: a part has a row set that is none of the {num_sets}")
    indices, bits = columns["place"].cumsum(), columns["bits"]
    if (indices >= len(sizes)).any():
        raise CorruptObject(f"{where}: a part is of none of the schema's {len(sizes)} tensors")
    if (bits > _MAX_BITS).any():
        raise CorruptObject(f"{where}: a part's lengths have too many bits")
    cuts = _cuts(where, schema, indices, columns)
    num_tiles = cuts.num_tiles
    num_bytes = -(-num_tiles * bits // 8)
    packed, rest = _take(where, rest, int(num_bytes.sum()))
    if len(rest):
        raise CorruptObject(f"{where}: {len(rest)} bytes follow the table")
    used = num_tiles * bits & 7
    last = num_bytes.cumsum()[used > 0] - 1
    if (packed[last] >> used[used > 0].astype(np.uint8)).any():
        raise CorruptObject(f"{where}: the padding of lengths is not zero")
    least = columns["least"]
    longest = int(least.max()) + (1 << int(bits.max()))
    lengths = np.repeat(least.astype(np.int32 if longest < 2**31 else np.int64), num_tiles)
    begins, starts = num_bytes.cumsum() - num_bytes, num_tiles.cumsum() - num_tiles
    for width, num, parts in _alike(num_tiles, bits):
        size = -(-num * width // 8)
        octets = np.zeros((len(parts), -(-num // 8) * width), dtype=np.uint8)
        octets[:, :size] = _items(packed, size)[begins[parts]].view(np.uint8).reshape(-1, size)
        fields = fields_of(octets.reshape(-1), width).reshape(len(parts), -1)[:, :num]
        _put_items(lengths, starts[parts], fields + least.astype(lengths.dtype)[parts, None])
    if (num := int(lengths.sum())) != len(tiles):
        raise CorruptObject(f"{where}: streams of {num} bytes, but {len(tiles)} bytes of tiles")
    return Coded(indices, cuts, sets, row_sets, lengths, tiles, [where])


def _sides(cut: Tiling) -> tuple[int, ...]:
    """Return the first and the number of levels, rows and columns; 0 and 0 of a side that is whole."""
    box, levels = cut.box, cut.whole_levels
    found: list[int] = []
    for first, size, side in (
        (box.level, box.levels, levels),
        (box.row, box.rows, cut.rows),
        (box.col, box.cols, cut.cols),
    ):
        found += (0, 0) if size == side else (first, size)
    return tuple(found)


def _code_of(cut: Tiling) -> int:
    """Return the logarithms of the numbers of slices, of columns in the upper half."""
    return (cut.down.slices.bit_length() - 1) | (cut.across.slices.bit_length() - 1) << 4


def _planes(column: Array) -> bytes:
    """Return numbers as their lowest bytes, then their second lowest, and so on."""
    if not column.any():
        return bytes(column.nbytes)
    return column.view(np.uint8).reshape(len(column), -1).T.tobytes()


def _inflated(where: str, squeezed: Array, most: int) -> Array:
    stream = zlib.decompressobj()
    try:
        head = stream.decompress(squeezed.tobytes(), most + 1)
    except zlib.error as exc:
        raise CorruptObject(f"{where}: the head of its table is not compressed: {exc}") from exc
    if len(head) > most or not stream.eof or stream.unused_data:
        raise CorruptObject(f"{where}: the head of its table has another length than it says")
    return np.frombuffer(head, dtype=np.uint8)


def _columns(where: str, head: Array, num: int) -> tuple[dict[str, npt.NDArray[np.int64]], Array]:
    """Return the columns of parts, and what follows them."""
    found = {}
    for name, kind in _COLUMNS:
        planes, head = _take(where, head, num * np.dtype(kind).itemsize)
        column = np.ascontiguousarray(planes.reshape(-1, num).T).view(kind).reshape(-1)
        if kind == "<u8" and (column >> np.uint64(48)).any():
            raise CorruptObject(f"{where}: a part lies beyond every tensor")
        found[name] = column.astype(np.int64)
    return found, head


def _sets(where: str, head: Array, num: int) -> Sets:
    lo, head = _take(where, head, num)
    num_classes, head = _take(where, head, num)
    if (num_classes < 1).any() or (num_classes > MAX_CLASSES).any():
        raise CorruptObject(f"{where}: a row set has no classes, or too many")
    packed, head = _take(where, head, 3 * int(num_classes.sum(dtype=np.int64)))
    if len(head):
        raise CorruptObject(f"{where}: {len(head)} bytes follow the head of the table")
    rows = np.ascontiguousarray(packed.reshape(3, -1).T)
    if not valid_rows(rows).all():
        raise CorruptObject(f"{where}: a class has a code without meaning")
    return Sets.of(lo.astype(np.int64), num_classes.astype(np.int64), rows)


def _cuts(where: str, schema: Schema, indices: Array, columns: dict[str, npt.NDArray[np.int64]]) -> Cuts:
    """Return how parts of these tensors are cut."""
    # A model has few shapes: what they say is found once for each, and then for all parts together.
    numbers, of = schema.kinds
    kind = np.array(of, dtype=np.int64)[indices]
    is_fit = np.array([is_coded(dtype) and 0 not in shape for dtype, shape in numbers])[kind]
    whole = np.array([view_of(shape) for _, shape in numbers], dtype=np.int64)[kind]
    boxes = np.stack([columns[name] for name in ("level", "levels", "row", "rows", "col", "cols")], axis=1)
    slices = 1 << np.stack([columns["slices"] & 15, columns["slices"] >> 4], axis=1)
    firsts, sizes = boxes[:, ::2], boxes[:, 1::2]
    is_beyond = ((firsts + sizes > whole) | ((firsts > 0) & (sizes == 0))).any(axis=1)
    is_uneven = ((slices > SLICES) | (whole[:, 1:] % slices != 0)).any(axis=1)
    for number in np.flatnonzero(~is_fit | is_beyond | is_uneven)[:1].tolist():
        spec = schema.tensors[indices[number]]
        if not is_fit[number]:
            raise CorruptObject(
                f"{where}: {spec.name!r} ({spec.dtype}, {spec.shape}) cannot be coded by context"
            )
        if is_beyond[number]:
            raise CorruptObject(f"{where}: a part of {spec.name!r} reaches beyond it")
        raise CorruptObject(f"{where}: {spec.name!r} cannot be cut in {(*slices[number].tolist(),)} slices")
    usual = np.array([slices_of(shape) for _, shape in numbers])[kind]
    is_part = boxes.any(axis=1) | (slices != usual).any(axis=1)
    boxes[:, 1::2] = np.where(sizes > 0, sizes, whole)
    if not ascend(np.column_stack([indices, boxes[:, ::2]])):
        raise CorruptObject(f"{where}: parts do not ascend")
    # Before anything as large as the tiles is made.
    stated = np.bincount(indices, weights=boxes[:, 1::2].prod(axis=1))
    for number in np.flatnonzero(stated > np.array(schema.sizes)[: len(stated)])[:1].tolist():
        raise CorruptObject(f"{where}: parts of {schema.tensors[number].name!r} overlap")
    # Of shapes that are not coded, there is no part.
    kinds = [tiling(shape) if 0 not in shape else tiling(()) for _, shape in numbers]
    known = {each: number for number, each in enumerate(kinds)}
    for number in np.flatnonzero(is_part).tolist():
        down, across = slices[number].tolist()
        cut = tiling(numbers[kind[number]][1], Box(*boxes[number].tolist()), (down, across))
        kind[number] = known.setdefault(cut, len(kinds))
        if kind[number] == len(kinds):
            kinds.append(cut)
    return Cuts(kinds, kind)


def _take(where: str, data: Array, num: int) -> tuple[Array, Array]:
    if num > len(data):
        raise CorruptObject(f"{where}: the table ends {num - len(data)} bytes early")
    return data[:num], data[num:]


def _alike(num_tiles: Array, bits: Array) -> Iterator[tuple[int, int, Array]]:
    """Yield the bits of lengths, the tiles of a part, and parts that have both: some, so that their lengths
    stay in the cache. Those whose lengths have no bits are left out.
    """
    keys = num_tiles * (_MAX_BITS + 1) + bits
    some = np.flatnonzero(bits)
    some = some[keys[some].argsort(kind="stable")]
    for parts in np.split(some, np.flatnonzero(np.diff(keys[some])) + 1) if len(some) else ():
        num = int(num_tiles[parts[0]])
        step = max(1, _TOGETHER // num)
        for first in range(0, len(parts), step):
            yield int(bits[parts[0]]), num, parts[first : first + step]


def _items(flat: Array, num: int) -> Array:
    """Return a view of so many numbers from each place on, each as one item, which is copied as a whole."""
    dtype = f"V{num * flat.itemsize}"
    return np.ndarray((max(len(flat) - num + 1, 0),), dtype, flat, strides=(flat.itemsize,))


def _put_items(flat: Array, at: Array, rows: Array) -> None:
    """Write rows of numbers, each from a place on."""
    num = rows.shape[1]
    its = np.ascontiguousarray(rows, dtype=flat.dtype)
    _items(flat, num)[at] = its.view(f"V{num * flat.itemsize}").reshape(-1)


def pays(num_changed: Array, num_tiles: Array) -> Array:
    """Whether parts with so many changes, of dtypes that can be coded, are to be.

    A reader goes through tiles side by side, one change after the other: where tiles are few and changes
    many, it would take longer than the bytes are worth.
    """
    return (num_changed <= MANY_CHANGES) | (num_tiles >= FEW_TILES)


def packed(coded: Coded) -> dict[str, torch.Tensor]:
    """Return the file's entries for parts in any order; none for none."""
    if not len(coded):
        return {}
    ordered = coded.at(coded.order())
    return {"table": packed_table(ordered), "tiles": torch.from_numpy(ordered.data)}


def packed_table(coded: Coded) -> torch.Tensor:
    """Return the entry `table` of `packed`; not one without any. They are in the order of a file."""
    return torch.frombuffer(bytearray(pack(coded)), dtype=torch.uint8)
