"""Read only the ranges of a coded payload that some tiles need.

The digest of the whole object cannot be checked then. So the caller must check the digest sums of the tensors
before it applies the result.
"""

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from patchstore.encodings.context import Tiles, Tiling, unpack
from patchstore.errors import CorruptObject, NotFound
from patchstore.format.missing import missing
from patchstore.format.records import REQUEST_BYTES, Manifest, Payload, TensorSpec
from patchstore.payloads import delta_file, tensor_file
from patchstore.payloads.delta_file import Stored
from patchstore.stores.base import Store
from patchstore.support import host

FIRST_BYTES = 1 << 16
"""Size of the first request: contains header and table of most payloads."""

Needs = Callable[[TensorSpec, Tiling], Tiles]
"""Which tiles of a part of a tensor are needed, ascending; None for all."""


def read(
    store: Store, wanted: Payload, manifest: Manifest, schema: Mapping[str, TensorSpec], needs: Needs
) -> dict[str, tuple[Stored, ...]]:
    """Read the parts of a delta of encoding `context` that some tiles need.

    Returns:
        As `delta_file.read_delta`; streams of other tiles are zeros. Memory: what was read.

    Raises:
        CorruptObject: as `delta_file.read_delta`, or the object is missing or shorter than its manifest says.
    """
    try:
        view = memoryview(_room(store, wanted))[: wanted.size]
        done = 0

        def beginning(num_bytes: int) -> bytes:
            nonlocal done
            done = _fill(store, wanted, view, done, max(num_bytes, FIRST_BYTES))
            return bytes(view[:done])

        header = tensor_file.read_header(wanted.key, wanted.size, beginning)
        entries = {entry.spec.name: entry for entry in header.entries}
        tiles = entries.get("tiles")
        end = wanted.size if tiles is None else header.data_start + tiles.start
        _fill(store, wanted, view, done, end)
        if tiles is not None and "table" in entries:
            table = entries["table"]
            start = header.data_start + table.start
            listed = np.frombuffer(view[start : start + table.spec.num_bytes], dtype=np.uint8)
            for first, last in _ranges(wanted.key, listed, tiles.spec.num_bytes, schema, needs):
                _fill(store, wanted, view, max(end + first, done), end + last)
    except NotFound as exc:
        raise missing(store, wanted) from exc
    return delta_file.read_delta(wanted.key, view, manifest, schema)


def _room(store: Store, wanted: Payload) -> mmap.mmap:
    """Reserve address space for a payload; only pages that are written take memory.

    Raises:
        CorruptObject: this host cannot have so much, and the object is of another size.
        OSError: this host cannot have so much.
    """
    try:
        return mmap.mmap(-1, max(wanted.size, 1))
    except OSError as exc:
        if (size := store.size(wanted.key)) != wanted.size:
            raise CorruptObject(f"{wanted.key} should have {wanted.size:,} bytes but has {size:,}") from exc
        raise


def _fill(store: Store, wanted: Payload, view: memoryview, start: int, end: int) -> int:
    """Read bytes from `start` to `end` to their place in the buffer; return the end of the last range."""
    at, end = start, min(end, wanted.size)
    if at < end:
        with host.reading(wanted.key):
            for chunk in store.read(wanted.key, start=at, end=end):
                view[at : at + len(chunk)] = chunk
                at += len(chunk)
        if at < end:
            raise CorruptObject(f"{wanted.key} ends {end - at:,} bytes early")
    return max(start, end)


def _ranges(
    where: str, table: np.ndarray, num_bytes: int, schema: Mapping[str, TensorSpec], needs: Needs
) -> Iterator[tuple[int, int]]:
    """Yield ranges of the entry `tiles` with all streams that are needed, ascending and apart."""
    specs = list(schema.values())
    found = unpack(where, table, num_bytes, specs)
    ends = np.cumsum(found.lengths)
    chosen = np.zeros(len(ends), dtype=np.bool_)
    for number, place in enumerate(found.indices.tolist()):
        mine = chosen[found.lengths_at[number] : found.lengths_at[number + 1]]
        tiles = needs(specs[place], found.cuts[number])
        mine[slice(None) if tiles is None else tiles] = True
    chosen &= found.lengths > 0
    yield from _joined(zip((ends - found.lengths)[chosen].tolist(), ends[chosen].tolist(), strict=True))


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join ascending ranges that are near each other."""
    start, end = 0, 0
    for first, last in ranges:
        # Reading what lies between takes no longer than one more request.
        if first - end > REQUEST_BYTES:
            if end > start:
                yield start, end
            start = first
        elif end == start:
            start = first
        end = last
    if end > start:
        yield start, end
