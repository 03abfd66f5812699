"""Payloads: safetensors files written and read as streams, with every byte accounted for.

The safetensors library reads files and writes whole buffers; anchors here are streamed from the
model to the store and from the store into a replay, so that memory is bounded by one tensor. The
format is its own; the tests read what this writes with the library, and the other way round.
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from patchstore.errors import CorruptObject
from patchstore.format.json_fields import json_object, tensor_spec
from patchstore.format.records import DTYPE_BYTES, TensorSpec
from patchstore.stores.base import Chunk
from patchstore.tensors.bits import TORCH_DTYPES, bits, from_bytes, raw_bytes

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """What a safetensors file says before its data."""

    entries: tuple[Entry, ...]
    """In the order of their data, which they cover without holes or overlaps."""
    metadata: Mapping[str, str]
    data_start: int
    """Bytes from the beginning of the file."""


def header_bytes(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Return the length field and header of a file that holds these tensors in this order."""
    record: dict[str, object] = {_METADATA: dict(metadata)}
    offset = 0
    for spec in specs:
        end = offset + spec.num_bytes
        record[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def aligned(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Order tensors so that each begins at a multiple of its element size: wide dtypes first."""
    return sorted(specs, key=lambda spec: -DTYPE_BYTES[spec.dtype])


def max_file_bytes(num_bytes: int, limit: int) -> int:
    """Return how large the files of a model of `num_bytes` may be.

    Args:
        limit: the most that they may be.
    """
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

    Args:
        tensors: one for each spec, in the same order; taken from the iterable as they are written.
    """
    together = bytearray(header_bytes(specs, metadata))
    for spec, tensor in zip(specs, tensors, strict=True):
        is_meant = tensor.dtype == TORCH_DTYPES[spec.dtype] and tensor.shape == spec.shape
        assert is_meant, f"{spec} is not what is being written"
        check_bools("this file cannot be written", spec, tensor)
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
    """Read the header of a file.

    Args:
        where: the object's key, to name in errors.
        file_size: bytes of the whole file.
        beginning: returns so many of the file's first bytes, or more. Called twice where the header is longer
            than what the first call returned.

    Raises:
        CorruptObject: not a safetensors file, or one whose entries overlap, leave holes, or do not
            add up to the file's size.
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
    record = json_object(f"{where}: its header", first[8 : 8 + length])
    metadata = record.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptObject(f"{where}: its metadata must map strings to strings")
    entries = sorted(
        [_entry(where, name, value) for name, value in record.items()], key=attrgetter("start", "end")
    )
    expected = 0
    for entry in entries:
        if entry.start != expected:
            raise CorruptObject(
                f"{where}: the bytes of {entry.spec.name!r} begin at {entry.start}, expected {expected}: "
                "tensors must not overlap or leave holes"
            )
        expected = entry.end
    if 8 + length + expected != file_size:
        raise CorruptObject(
            f"{where}: header and tensors need {8 + length + expected:,} bytes, "
            f"but the file has {file_size:,}"
        )
    return FileHeader(entries=tuple(entries), metadata=metadata, data_start=8 + int(length))


def listed_spec(where: str, name: str, value: object) -> TensorSpec:
    """Read an object with the fields `dtype` and `shape`, as headers and lists of tensors have them.

    Raises:
        CorruptObject
    """
    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
        raise CorruptObject(f"{where}: {name!r:.100} must have a dtype and a shape, not {value!r:.100}")
    return tensor_spec(where, name, value["dtype"], value.get("shape"))


def is_listed_as(spec: TensorSpec, value: object) -> bool:
    """Whether an object with the fields `dtype` and `shape` says what a spec says."""
    if not isinstance(value, dict) or value.get("dtype") != spec.dtype:
        return False
    shape = value.get("shape")
    # JSON's true and 1.0 are equal to 1, and are no sizes.
    return shape == [*spec.shape] and all(type(n) is int for n in shape)


def _entry(where: str, name: str, value: object) -> Entry:
    spec = listed_spec(where, name, value)
    assert isinstance(value, dict)
    offsets = value.get("data_offsets")
    if not isinstance(offsets, list) or [type(n) for n in offsets] != [int, int]:
        raise CorruptObject(f"{where}: data_offsets of {name!r} must be two integers")
    start, end = offsets
    if start < 0 or end - start != spec.num_bytes:
        raise CorruptObject(
            f"{where}: {name!r} needs {spec.num_bytes} bytes, but its data_offsets are {offsets}"
        )
    return Entry(spec=spec, start=start, end=end)


def read_stream(
    where: str, file_size: int, chunks: Iterable[bytes]
) -> Iterator[FileHeader | tuple[TensorSpec, torch.Tensor]]:
    """Yield a file's header and then its tensors, in the order of their data, from a stream.

    Holds one tensor and one chunk at a time. Consumes `chunks` to the end, so that a check behind
    them (`hashing.verified`) has run when this iterator ends; nothing it yielded may be trusted
    before that.

    Raises:
        CorruptObject: as `read_header`, or the stream ends early.
    """
    source = _Source(where, iter(chunks))
    header = _stream_header(where, file_size, source)
    yield header
    for entry in header.entries:
        yield entry.spec, tensor_of(where, entry.spec, source.take(entry.spec.num_bytes))
    source.finish()


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

    def finish(self) -> None:
        for chunk in self._chunks:
            if chunk:
                raise CorruptObject(f"{self._where} goes on after its last tensor")


def open_buffer(where: str, buffer: bytearray | memoryview) -> tuple[FileHeader, dict[str, torch.Tensor]]:
    """Read a whole file that is in memory or mapped; the tensors share the buffer.

    Raises:
        CorruptObject: as `read_header`.
    """
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
        check_bools(where, spec, tensor)
        tensors[spec.name] = tensor if spec.shape == (num,) else tensor.view(spec.shape)
    return header, tensors


def tensor_of(where: str, spec: TensorSpec, data: bytearray | memoryview) -> torch.Tensor:
    """Return a tensor over its bytes in a file, sharing their memory.

    Raises:
        CorruptObject: bytes that no element of this dtype has.
    """
    tensor = from_bytes(spec, data)
    check_bools(where, spec, tensor)
    return tensor


def check_bools(where: str, spec: TensorSpec, tensor: torch.Tensor) -> None:
    """Refuse a BOOL tensor with other bytes than 0 and 1: some of torch's copies change them to 1.

    Raises:
        CorruptObject
    """
    if spec.dtype == "BOOL" and bool((bits(tensor) > 1).any()):
        raise CorruptObject(f"{where}: {spec.name!r} is of dtype BOOL, and has a byte other than 0 and 1")


def check_metadata(where: str, header: FileHeader, expected: Mapping[str, str]) -> None:
    """Refuse a file whose metadata contradicts its manifest.

    Raises:
        CorruptObject
    """
    for field, value in expected.items():
        if header.metadata.get(field) != value:
            raise CorruptObject(f"{where}: its {field} is {header.metadata.get(field)!r}, expected {value!r}")
