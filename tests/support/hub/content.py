"""What hf-xet stores: xorbs, which are runs of compressed chunks, and of which of them a file consists.

hf-xet cuts, hashes, compresses and checks; this keeps what it sends as files of a folder, and says where a
range of bytes lies. A hash is written as hf-xet does: four little-endian words, each as 16 digits.
"""

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

EMPTY = "0" * 64
"""Hash of a file without bytes."""
_CHUNK_HEADER = 8
_ENTRY = 48
_END = b"\xff" * 32
_HAS_VERIFICATION, _HAS_METADATA = 0x80000000, 0x40000000
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """One compressed chunk of a xorb."""

    end: int
    """Where it ends in the xorb, in bytes."""
    size: int
    """Its bytes, unpacked."""


@dataclass(frozen=True, slots=True)
class Term:
    """Chunks `start` to `end` of a xorb, as a part of a file."""

    xorb: str
    size: int
    start: int
    end: int


class ContentStore:
    """Xorbs and files by their hashes. May be used from several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._num_writes = 0
        self._chunks: dict[str, list[Chunk]] = {}
        self._files: dict[str, list[Term]] = {EMPTY: []}

    def has_xorb(self, xorb: str) -> bool:
        return xorb in self._chunks

    def has_file(self, file: str) -> bool:
        return file in self._files

    def file_size(self, file: str) -> int:
        return sum(term.size for term in self._files[file])

    def xorb_path(self, xorb: str) -> Path:
        return self._folder / xorb

    def add_xorb(self, xorb: str, body: IO[bytes], size: int) -> bool:
        """Keep a xorb; return whether it is new.

        Raises:
            ValueError: it is cut off.
        """
        chunks = _read_chunks(body, size)
        with self._lock:
            self._num_writes += 1
            unfinished = self._folder / f"{xorb}.{self._num_writes}"
        body.seek(0)
        with unfinished.open("wb") as file:
            while part := body.read(_COPY_BYTES):
                file.write(part)
        with self._lock:
            unfinished.replace(self.xorb_path(xorb))
            is_new = xorb not in self._chunks
            if is_new:
                self._chunks[xorb] = chunks
        return is_new

    def add_shard(self, shard: bytes) -> None:
        """Learn of which chunks some files consist.

        Raises:
            ValueError: it names a xorb that is not here, or chunks that do not have the size it says.
        """
        position = _ENTRY
        while shard[position : position + 32] != _END:
            file = _hash(shard, position)
            flags, num_terms = struct.unpack_from("<II", shard, position + 32)
            position += _ENTRY
            terms = []
            for _ in range(num_terms):
                _, size, start, end = struct.unpack_from("<4I", shard, position + 32)
                terms.append(Term(_hash(shard, position), size, start, end))
                position += _ENTRY
            position += _ENTRY * num_terms * bool(flags & _HAS_VERIFICATION)
            position += _ENTRY * bool(flags & _HAS_METADATA)
            for term in terms:
                chunks = self._chunks.get(term.xorb, [])[term.start : term.end]
                if sum(chunk.size for chunk in chunks) != term.size:
                    raise ValueError(f"file {file} wants other chunks of {term.xorb} than are here")
            with self._lock:
                self._files[file] = terms

    def reconstruction(self, file: str, first: int, last: int | None, base_url: str) -> dict[str, Any] | None:
        """Say where bytes `first` to `last` (inclusive) of a file lie, or None where it has none of them."""
        size = self.file_size(file)
        last = size - 1 if last is None else min(last, size - 1)
        if first > last:
            return None
        terms: list[dict[str, Any]] = []
        wanted: dict[str, list[range]] = {}
        skipped, position = 0, 0
        for term in self._files[file]:
            chunks = self._chunks[term.xorb]
            numbers: list[int] = []
            for number in range(term.start, term.end):
                begin, position = position, position + chunks[number].size
                if position > first and begin <= last:
                    if not terms and not numbers:
                        skipped = max(0, first - begin)
                    numbers.append(number)
            if numbers:
                wanted.setdefault(term.xorb, []).append(range(numbers[0], numbers[-1] + 1))
                terms.append(
                    {
                        "hash": term.xorb,
                        "unpacked_length": sum(chunks[number].size for number in numbers),
                        "range": _bounds(wanted[term.xorb][-1]),
                    }
                )
        fetches = {
            xorb: [
                _fetch(f"{base_url}/xorb-data/{xorb}", self._chunks[xorb], numbers)
                for numbers in _merged(ranges)
            ]
            for xorb, ranges in wanted.items()
        }
        return {"offset_into_first_range": skipped, "terms": terms, "fetch_info": fetches}

    def corrupt(self, file: str, offset: int) -> None:
        """Turn one bit of the stored byte from which a file's byte at `offset` is made, or one near it."""
        for term in self._files[file]:
            for number in range(term.start, term.end):
                chunk = self._chunks[term.xorb][number]
                if offset >= chunk.size:
                    offset -= chunk.size
                    continue
                begin = self._chunks[term.xorb][number - 1].end if number else 0
                packed = chunk.end - begin - _CHUNK_HEADER
                with self.xorb_path(term.xorb).open("r+b") as xorb:
                    xorb.seek(begin + _CHUNK_HEADER + min(offset, packed - 1))
                    (byte,) = xorb.read(1)
                    xorb.seek(-1, 1)
                    xorb.write(bytes([byte ^ 1]))
                return
        raise IndexError(f"file {file} has no byte {offset}")


def _hash(data: bytes, position: int) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack_from("<4Q", data, position))


def _read_chunks(body: IO[bytes], size: int) -> list[Chunk]:
    """Chunks of a xorb; each has its version, packed size, scheme and size before it."""
    position, chunks = 0, []
    while position + _CHUNK_HEADER <= size:
        body.seek(position)
        header = body.read(_CHUNK_HEADER)
        if header[:7] == b"XETBLOB":
            break
        position += _CHUNK_HEADER + int.from_bytes(header[1:4], "little")
        chunks.append(Chunk(position, int.from_bytes(header[5:8], "little")))
    if not chunks or position > size:
        raise ValueError(f"a xorb of {size} bytes is cut off")
    return chunks


def _merged(ranges: Sequence[range]) -> list[range]:
    """Cover the same numbers without overlaps: hf-xet looks for a term in the first range that begins so."""
    merged: list[range] = []
    for numbers in sorted(ranges, key=lambda numbers: numbers.start):
        if merged and numbers.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, numbers.stop))
        else:
            merged.append(numbers)
    return merged


def _fetch(url: str, chunks: Sequence[Chunk], numbers: range) -> dict[str, Any]:
    begin = chunks[numbers.start - 1].end if numbers.start else 0
    return {
        "range": _bounds(numbers),
        "url": url,
        "url_range": {"start": begin, "end": chunks[numbers.stop - 1].end - 1},
    }


def _bounds(numbers: range) -> dict[str, int]:
    return {"start": numbers.start, "end": numbers.stop}
