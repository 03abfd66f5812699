"""Payloads: safetensors files written and read as streams, with every byte accounted for.

The safetensors library reads files and writes whole buffers; anchors here are streamed from the
model to the store and from the store into a replay, so that memory is bounded by one tensor. The
format is its own; the tests read what this writes with the library, and the other way round.
"""

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.manifest_json import DECODER, is_printable, json_object, tensor_spec
from patchstore.bucket.records import DTYPE_BYTES, FORMAT_VERSION, Schema, TensorSpec
from patchstore.errors import CorruptObject
from patchstore.stores.base import Chunk
from patchstore.support import collector
from patchstore.tensors.bits import TORCH_DTYPES, bits, from_bytes, raw_bytes


def anchor_metadata(manifest_version: int, step: int, run_id: str) -> dict[str, str]:
    """The metadata of an anchor's files. `format` is what `transformers` insists on."""
    return {
        "format": "pt",
        "format_version": str(FORMAT_VERSION),
        "kind": "anchor",
        "run_id": run_id,
        "version": str(manifest_version),
        "step": str(step),
    }


def index_json(schema: Schema, weight_map: Mapping[str, str]) -> bytes:
    """The `model.safetensors.index.json` of a sharded checkpoint folder."""
    record = {"metadata": {"total_size": schema.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(record, indent=2, ensure_ascii=False).encode() + b"\n"


Array = npt.NDArray[Any]

CHUNK_BYTES = 8 << 20
_NUM_FILES = 8
"""Files of a large model: one is written or digested at 2 GB/s at most, so several are moved at once."""
_LEAST_BYTES = 1_000_000_000
"""Of a file, where a model has more than one only to be moved faster."""
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_METADATA = "__metadata__"
_SMALL_BYTES = 1 << 16
"""Tensors up to this size are copied, `_TOGETHER_BYTES` at a time: a chunk costs as much as copying them."""
_TOGETHER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file and where its bytes are."""

    spec: TensorSpec
    start: int
    """Bytes from the beginning of the data."""
    end: int
    """`spec.num_bytes` behind it."""


@dataclass(frozen=True, kw_only=True)
class FileHeader:
    """What a safetensors file says before its data: of each tensor, in the order of their data."""

    names: Sequence[str]
    kinds: Sequence[tuple[str, tuple[int, ...]]]
    """Dtypes and shapes, in elements, as of `TensorSpec`."""
    kind: Array
    """int64 [T], which of `kinds` each tensor has."""
    bounds: Array
    """int64 [T + 1], bytes from the beginning of the data to each tensor's, and to the end: there are no
    holes and no overlaps."""
    metadata: Mapping[str, str]
    data_start: int
    """Bytes from the beginning of the file."""

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The same, with an object for each tensor."""
        bounds = self.bounds.tolist()
        kinds = [self.kinds[kind] for kind in self.kind.tolist()]
        each = zip(self.names, kinds, bounds, bounds[1:], strict=False)
        return tuple(
            Entry(spec=TensorSpec(name=name, dtype=dtype, shape=shape), start=start, end=end)
            for name, (dtype, shape), start, end in each
        )


@collector.paused()
def header_bytes(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Return the length field and header of a file that holds these tensors in this order."""
    record: dict[str, object] = {_METADATA: dict(metadata)}
    offset = 0
    for spec in specs:
        end = offset + spec.num_bytes
        record[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.listed_shape),
            "data_offsets": [offset, end],
        }
        offset = end
    return framed(json.dumps(record, separators=(",", ":"), ensure_ascii=False))


def framed(record: str) -> bytes:
    """Return the length field and header of a file, from its JSON."""
    text = record.encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def aligned(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Order tensors so that each begins at a multiple of its element size: wide dtypes first."""
    return sorted(specs, key=lambda spec: -DTYPE_BYTES[spec.dtype])


def max_file_bytes(num_bytes: int, limit: int) -> int:
    """Return how large the files of a model of `num_bytes` may be, at most `limit`."""
    return min(limit, max(_LEAST_BYTES, -(-num_bytes // _NUM_FILES)))


def split(tensors: Iterable[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Group tensors into files, each in the order of `aligned`; a larger tensor has a file of its own."""
    files: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in aligned(tensors):
        if files[-1] and size + spec.num_bytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(spec)
        size += spec.num_bytes
    return files


def write(
    specs: Sequence[TensorSpec], tensors: Iterable[torch.Tensor], metadata: Mapping[str, str]
) -> Iterator[Chunk]:
    """Yield a safetensors file, one tensor at a time, as views of the tensors' memory; small ones together.

    `tensors` has one for each spec, in the same order, and is asked for each as it is written.
    """

    def checked() -> Iterator[torch.Tensor]:
        for spec, tensor in zip(specs, tensors, strict=True):
            is_meant = tensor.dtype == TORCH_DTYPES[spec.dtype] and tensor.shape == spec.shape
            assert is_meant, f"{spec} is not what is being written"
            check_bools("this file cannot be written", spec.name, spec.dtype, tensor)
            yield tensor

    return stream(header_bytes(specs, metadata), checked())


def stream(header: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[Chunk]:
    """Yield a file with this header, one tensor at a time; as `write`."""
    together = bytearray(header)
    for tensor in tensors:
        view = raw_bytes(tensor)
        if len(view) <= _SMALL_BYTES:
            together += view
            if len(together) < _TOGETHER_BYTES:
                continue
        if together:
            yield together
            together = bytearray()
        if len(view) > _SMALL_BYTES:
            for start in range(0, len(view), CHUNK_BYTES):
                yield view[start : start + CHUNK_BYTES]
    if together:
        yield together


def read_header(where: str, file_size: int, beginning: Callable[[int], bytes | bytearray]) -> FileHeader:
    """Read the header of a file of `file_size` bytes; errors name `where`.

    `beginning` returns that number of the file's first bytes, or more. It is called twice where the header is
    longer than what the first call returned.
    """
    first = beginning(min(8, file_size))
    if file_size < 8 or len(first) < 8:
        raise CorruptObject(f"{where}: {file_size} bytes are too few for a safetensors file")
    (length,) = struct.unpack_from("<Q", first)
    if length > min(MAX_HEADER_BYTES, file_size - 8):
        raise CorruptObject(
            f"{where}: its header claims {length:,} bytes, but the file has {file_size:,} and a header "
            f"at most {MAX_HEADER_BYTES:,}"
        )
    if len(first) < 8 + length:
        first = beginning(8 + length)
        assert len(first) >= 8 + length
    told = as_written(first[8 : 8 + length]) or _parsed(where, first[8 : 8 + length])
    names, metadata = told.names, told.metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptObject(f"{where}: its metadata must map strings to strings")
    specs, kind = _kinds(where, told)
    num_bytes = np.array([spec.num_bytes for spec in specs], dtype=np.int64)[kind]
    starts, ends = told.offsets.T
    for place in np.flatnonzero((starts < 0) | (ends - starts != num_bytes))[:1]:
        raise CorruptObject(
            f"{where}: {names[place]!r} needs {num_bytes[place]} bytes, but its data_offsets are "
            f"{[int(starts[place]), int(ends[place])]}"
        )
    order = np.lexsort((ends, starts))
    if (order[1:] < order[:-1]).any():
        starts, ends, kind = starts[order], ends[order], kind[order]
        names = [names[place] for place in order.tolist()]
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    for place in np.flatnonzero(starts != bounds[:-1])[:1]:
        raise CorruptObject(
            f"{where}: the bytes of {names[place]!r} begin at {starts[place]}, expected {bounds[place]}: "
            "tensors must not overlap or leave holes"
        )
    if 8 + length + bounds[-1] != file_size:
        raise CorruptObject(
            f"{where}: header and tensors need {8 + length + bounds[-1]:,} bytes, "
            f"but the file has {file_size:,}"
        )
    return FileHeader(
        names=names,
        kinds=[(spec.dtype, spec.shape) for spec in specs],
        kind=kind,
        bounds=bounds,
        metadata=metadata,
        data_start=8 + int(length),
    )


class _Told(NamedTuple):
    """What the JSON of a header says, unchecked: of each tensor, in its order."""

    metadata: Any
    names: Sequence[str]
    kinds: Sequence[str]
    """A text for each: those with the same have the same dtype and shape."""
    values: Mapping[str, Any]
    """By such a text, an object with the fields `dtype` and `shape`."""
    offsets: Array
    """int64 [T, 2], `data_offsets`."""


_SIZE = "(?:0|[1-9][0-9]{0,17})"
_ENTRY = re.compile(
    rf',"([^"\\]+)":{{("dtype":"[^"\\]*","shape":\[[0-9,]*\]),"data_offsets":\[({_SIZE},{_SIZE})\]}}'
)
_BETWEEN = len(',"":{,"data_offsets":[]}')
"""Characters of an entry that are in none of its groups."""


@collector.paused()
def as_written(data: bytes | bytearray) -> _Told | None:
    """Read a header that is spelled as this release and the safetensors library do; None for any other.

    A fifth of the time of `_parsed`, which makes an object for each tensor.
    """
    try:
        text = data.decode().rstrip(" ")
        metadata, beginning = dict[str, Any](), f'{{"{_METADATA}":'
        if text.startswith(beginning):
            metadata, end = DECODER.raw_decode(text, len(beginning))
            text = text[end:]
        else:
            text = f",{text[1:]}" if text.startswith("{") else ""
        entries = _ENTRY.findall(text, 0, len(text) - 1)
        names, kinds, offsets = ([entry[at] for entry in entries] for at in range(3))
        # That the text is entries and nothing else.
        if len("".join([*names, *kinds, *offsets])) + _BETWEEN * len(names) != len(text) - 1:
            return None
        if text[-1] != "}" or len({*names, _METADATA}) <= len(names):
            return None
        values = {kind: DECODER.decode(f"{{{kind}}}") for kind in dict.fromkeys(kinds)}
    except (ValueError, RecursionError):
        return None
    pairs = np.fromstring(",".join(offsets), dtype=np.int64, sep=",")
    return _Told(metadata, names, kinds, values, pairs.reshape(-1, 2))


def _parsed(where: str, data: bytes | bytearray) -> _Told:
    """Read any header."""
    record = json_object(f"{where}: its header", data)
    metadata = record.pop(_METADATA, {})
    names, values = list(record), list(record.values())
    # A value that is no object is one of a kind.
    kinds = [
        f"{value.get('dtype')} {value.get('shape')!r}" if isinstance(value, dict) else "" for value in values
    ]
    return _Told(
        metadata, names, kinds, dict(zip(kinds, values, strict=True)), _offsets(where, names, values)
    )


def _kinds(where: str, told: _Told) -> tuple[list[TensorSpec], Array]:
    """Return a spec of each dtype and shape, and which each tensor has; refuse those of none."""
    places = {kind: place for place, kind in enumerate(dict.fromkeys(told.kinds))}
    # Of each the first tensor that has it is named.
    specs = [listed_spec(where, told.names[told.kinds.index(kind)], told.values[kind]) for kind in places]
    names = told.names
    if names and not (all(names) and is_printable("".join(names))):
        wrong = next(name for name in names if not is_printable(name))
        raise CorruptObject(f"{where}: {wrong!r:.100} cannot name a tensor")
    return specs, np.array([places[kind] for kind in told.kinds], dtype=np.int64)


def _offsets(where: str, names: Sequence[str], values: Sequence[Any]) -> Array:
    """Return where the bytes of tensors begin and end, int64 [T, 2]."""
    pairs: list[Any] = [value.get("data_offsets") if isinstance(value, dict) else None for value in values]
    for name, pair in zip(names, pairs, strict=True):
        if type(pair) is not list or [*map(type, pair)] != [int, int]:
            raise CorruptObject(f"{where}: data_offsets of {name!r} must be two integers")
    try:
        return np.fromiter(chain.from_iterable(pairs), dtype=np.int64, count=2 * len(pairs)).reshape(-1, 2)
    except OverflowError:
        raise CorruptObject(f"{where}: data_offsets reach beyond every file") from None


def listed_spec(where: str, name: str, value: object) -> TensorSpec:
    """Read an object with the fields `dtype` and `shape`, as headers and lists of tensors have them."""
    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
        raise CorruptObject(f"{where}: {name!r:.100} must have a dtype and a shape, not {value!r:.100}")
    return tensor_spec(where, name, value["dtype"], value.get("shape"))


def read_stream(
    where: str, file_size: int, chunks: Iterable[bytes]
) -> Iterator[FileHeader | tuple[TensorSpec, torch.Tensor]]:
    """Yield a file's header and then its tensors, in the order of their data, from a stream.

    Holds one tensor and one chunk at a time. Consumes `chunks` to the end, so that a check behind
    them (`digests.verified`) has run when this iterator ends; nothing it yielded may be trusted
    before that.
    """
    source = _Source(where, iter(chunks))
    header = _stream_header(where, file_size, source)
    yield header
    for entry in header.entries:
        yield entry.spec, tensor_of(where, entry.spec, source.take(entry.spec.num_bytes))
    source.finish()


def read_runs(
    where: str, file_size: int, chunks: Iterable[bytes]
) -> tuple[FileHeader, Iterator[tuple[slice, Array]]]:
    """Read a file's header, and then its tensors' bits from a stream, as `read_stream`; many tensors at once.

    Returns:
        The header, and an iterator over neighbours of one dtype, as many as have arrived whole: their places
        in the header, and unsigned integers, tensor after tensor, which must not be written to. A tensor is
        copied only if it lies in several chunks.
    """
    source = _Source(where, iter(chunks))
    header = _stream_header(where, file_size, source)

    def runs() -> Iterator[tuple[slice, Array]]:
        dtypes = [dtype for dtype, _ in header.kinds]
        which = np.array([dtypes.index(dtype) for dtype in dtypes], dtype=np.int64)[header.kind]
        first, bounds = 0, header.bounds
        while first < len(which):
            arrived = int(np.searchsorted(bounds, bounds[first] + source.num_arrived, side="right")) - 1
            end = max(first + 1, arrived)
            end -= int(np.count_nonzero(np.logical_or.accumulate(which[first:end] != which[first])))
            dtype = dtypes[which[first]]
            data = source.lend(int(bounds[end] - bounds[first]))
            values = np.frombuffer(data, dtype=f"u{DTYPE_BYTES[dtype]}")
            if dtype == "BOOL" and (values > 1).any():
                place = np.searchsorted(bounds, bounds[first] + np.argmax(values > 1), side="right") - 1
                raise _no_bool(where, header.names[place])
            yield slice(first, end), values
            first = end
        source.finish()

    return header, runs()


def _stream_header(where: str, file_size: int, source: "_Source") -> FileHeader:
    first = bytearray()

    def beginning(num_bytes: int) -> bytearray:
        first.extend(source.take(num_bytes - len(first)))
        return first

    return read_header(where, file_size, beginning)


class _Source:
    """A stream of chunks of any sizes, read in pieces of other sizes."""

    def __init__(self, where: str, chunks: Iterator[bytes]) -> None:
        self._where, self._chunks = where, chunks
        self._rest = memoryview(b"")

    def take(self, size: int) -> bytearray:
        """Return exactly `size` bytes.

        Allocates as data arrives, and not the size that a header claims.
        """
        piece = bytearray()
        while len(piece) < size:
            if not self._rest:
                chunk = next(self._chunks, None)
                if chunk is None:
                    raise CorruptObject(f"{self._where} ends {size - len(piece):,} bytes early")
                self._rest = memoryview(chunk)
            part = self._rest[: size - len(piece)]
            piece += part
            self._rest = self._rest[len(part) :]
        return piece

    @property
    def num_arrived(self) -> int:
        """Bytes that can be had before another chunk is."""
        return len(self._rest)

    def lend(self, size: int) -> bytearray | memoryview:
        """Return the same as `take`, without a copy if it has arrived."""
        if size > len(self._rest):
            return self.take(size)
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece

    def finish(self) -> None:
        for chunk in self._chunks:
            if chunk:
                raise CorruptObject(f"{self._where} goes on after its last tensor")


def open_buffer(where: str, buffer: bytearray | memoryview) -> tuple[FileHeader, dict[str, torch.Tensor]]:
    """Read a whole file that is in memory or mapped; the tensors share the buffer."""
    view = memoryview(buffer).cast("B")
    header = read_header(where, len(view), lambda num_bytes: bytes(view[:num_bytes]))
    tensors = {}
    for entry in header.entries:
        spec = entry.spec
        num, dtype = spec.num_elements, TORCH_DTYPES[spec.dtype]
        if num:
            tensor = torch.frombuffer(view, dtype=dtype, count=num, offset=header.data_start + entry.start)
        else:
            tensor = torch.empty(0, dtype=dtype, device="cpu")
        check_bools(where, spec.name, spec.dtype, tensor)
        tensors[spec.name] = tensor if spec.shape == (num,) else tensor.view(spec.shape)
    return header, tensors


def tensor_of(where: str, spec: TensorSpec, data: bytearray | memoryview) -> torch.Tensor:
    """Return a tensor over its bytes in a file, sharing their memory."""
    tensor = from_bytes(spec, data)
    check_bools(where, spec.name, spec.dtype, tensor)
    return tensor


def check_bools(where: str, name: str, dtype: str, tensor: torch.Tensor) -> None:
    """Refuse a BOOL tensor with other bytes than 0 and 1: some of torch's copies change them to 1."""
    if dtype == "BOOL" and bool((bits(tensor) > 1).any()):
        raise _no_bool(where, name)


def _no_bool(where: str, name: str) -> CorruptObject:
    return CorruptObject(f"{where}: {name!r} is of dtype BOOL, and has a byte other than 0 and 1")


def check_metadata(where: str, header: FileHeader, expected: Mapping[str, str]) -> None:
    """Refuse a file whose metadata contradicts its manifest."""
    for field, value in expected.items():
        if header.metadata.get(field) != value:
            raise CorruptObject(f"{where}: its {field} is {header.metadata.get(field)!r}, expected {value!r}")
