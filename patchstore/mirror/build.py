"""Make the folder of a version from the folder of an earlier one, and deltas.

Where the file system can share blocks between files (XFS, Btrfs), a file is cloned, and the changed blocks
are written. Elsewhere it is written anew, and the kernel copies what did not change. Nothing is written to
the earlier folder. Memory is bounded by the largest tensor, twice.
"""

import errno
import fcntl
import logging
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from patchstore.errors import CorruptObject
from patchstore.format import hashing, lineage
from patchstore.format.json_fields import json_object
from patchstore.format.records import Manifest, Payload, StoreHeader, TensorSpec
from patchstore.format.state_sums import Sums, read_sums, state_total
from patchstore.payloads import anchor_file, tensor_file
from patchstore.payloads.tensor_file import Entry, FileHeader
from patchstore.read import download
from patchstore.read.deltas import Deltas, open_deltas
from patchstore.read.replay import replay
from patchstore.read.unfinished import flush, unfinished
from patchstore.signing.required import RequiredKeys, checks
from patchstore.stores.base import Store
from patchstore.support import host
from patchstore.tensors import state_digest
from patchstore.tensors.bits import batches, raw_bytes

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_FICLONE = 0x40049409
_NOT_SHARED = {
    errno.EXDEV,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.ENOTTY,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EPERM,
    errno.EBADF,
}
_BLOCK_BYTES = 4096
_PIECE_BYTES = 8 << 20
_SLACK = 64
"""Spaces that a new header gets, so that it can be replaced by one with longer numbers."""


def verify(
    store: Store,
    header: StoreHeader,
    manifest: Manifest,
    folder: Path,
    required: RequiredKeys | None = None,
) -> None:
    """Check that a folder has a version's weights, and the files of its anchor beside them. Reads all of it.

    Raises:
        Unsigned, WrongSignature: keys are required, and none has signed the version.
        CorruptObject, StateMismatch: it has not.
        WrongParent, VersionNotFound: the version cannot be reached from an anchor.
    """
    route = lineage.read(store, manifest.version, check=checks(required, store, header)).plan()
    sums: dict[str, Sums] = {}
    places: dict[str, str] = {}
    for path in weight_files(folder):
        found = _header(path)
        specs = [entry.spec for entry in found.entries]
        with path.open("rb", buffering=0) as file:
            tensors = (_tensor(path, file.fileno(), found, entry) for entry in found.entries)
            for batch in batches(specs, tensors):
                sums |= state_digest.of_named({spec.name: tensor for spec, tensor in batch})
        _check_specs(path, specs, header)
        places |= {spec.name: path.name for spec in specs}
    if sums.keys() != header.schema.by_name().keys():
        raise CorruptObject(f"{folder} does not have each tensor of the run")
    state_digest.check_state(store, header.schema, sums, manifest)
    assert route.anchor is not None and route.anchor.anchor is not None
    _check_others(folder, route.anchor.anchor.files, places)


def _check_others(folder: Path, files: Sequence[Payload], places: Mapping[str, str]) -> None:
    """Check the files beside the weights.

    Args:
        places: which file has which tensor.
    """
    wanted = {_name(each): each.digest for each in files if _name(each) != INDEX}
    found = {each.name for each in folder.iterdir()} - set(places.values()) - {INDEX}
    if wrong := sorted(found ^ wanted.keys()):
        raise CorruptObject(f"{folder}: {wrong[0]} is {'missing' if wrong[0] in wanted else 'no file of it'}")
    for name, digest in wanted.items():
        if hashing.digest((folder / name).read_bytes()) != digest:
            raise CorruptObject(f"{folder / name} is not what was published")
    index = folder / INDEX
    if index.exists() or len(set(places.values())) > 1:
        listed = json_object(str(index), index.read_bytes()) if index.exists() else {}
        if listed.get("weight_map") != places:
            raise CorruptObject(f"{index} does not say which file has which tensor")


def _name(payload: Payload) -> str:
    return payload.key.rpartition("/")[2]


def rebuild(store: Store, version: int, out: Path, required: RequiredKeys | None = None) -> None:
    """Write the folder of a version from its nearest anchor; see `replay`.

    Raises:
        As `replay`.
    """
    replay(store, version, out=out, required_keys=required)
    _protect(out)


def patch(
    store: Store,
    header: StoreHeader,
    source: Path,
    held: Manifest,
    deltas: Sequence[Manifest],
    out: Path,
) -> None:
    """Write the folder of a version that deltas lead to from the one that a folder has.

    Args:
        source: the folder of `held`.
        deltas: versions in ascending order; the last one is written.
        out: does not exist yet. It appears when all digests have been checked and all bytes are on the disk.

    Raises:
        CorruptObject, StateMismatch: the bucket's bytes or those of the folder are wrong. As after every
            error, nothing exists under `out`.
        HostError: there is no space.
    """
    target = deltas[-1]
    sums = read_sums(store, header.schema, held)
    with unfinished(out, is_folder=True) as partial:
        with open_deltas(store, tuple(deltas), header.schema.by_name(), partial) as opened:
            seen: set[str] = set()
            for path in weight_files(source):
                seen |= _patch_file(path, partial / path.name, header, target, opened, sums)
            if seen != header.schema.by_name().keys():
                raise CorruptObject(f"{source} does not have each tensor of the run")
        if state_total(header.schema, sums) != target.state.total:
            state_digest.check_state(store, header.schema, sums, target)
        _other_files(store, source, deltas, partial)
        _protect(partial)
        with host.asked(f"writing {partial}"):
            for path in (*partial.iterdir(), partial):
                flush(path)


def _protect(folder: Path) -> None:
    """Make a folder's files read-only: the next version is made from them."""
    with host.asked(f"writing {folder}"):
        for path in folder.iterdir():
            path.chmod(0o444)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in a fixed order."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX))


def _patch_file(
    source: Path,
    out: Path,
    header: StoreHeader,
    target: Manifest,
    deltas: Deltas,
    sums: dict[str, Sums],
) -> set[str]:
    """Write one file of the target, and update the sums of what changed; returns the names of its tensors."""
    found = _header(source)
    specs = [entry.spec for entry in found.entries]
    _check_specs(source, specs, header)
    metadata = anchor_file.anchor_metadata(target.version, target.step, header.run_id)
    beginning = tensor_file.header_bytes(specs, metadata)
    with (
        host.asked(f"writing {out}"),
        source.open("rb", buffering=0) as old,
        out.open("x+b", buffering=0) as new,
    ):
        is_shared = len(beginning) <= found.data_start and _share(old.fileno(), new.fileno())
        room = found.data_start if is_shared else len(beginning) + _SLACK
        _write(new.fileno(), 0, memoryview(_padded(beginning, room)))
        writer = _Writer(old.fileno(), found.data_start, new.fileno(), room, is_shared=is_shared)
        changed = [entry for entry in found.entries if entry.spec.name in deltas.names]
        tensors = (_tensor(source, old.fileno(), found, entry) for entry in changed)
        where = {entry.spec.name: entry for entry in changed}
        if not is_shared:
            writer.copy_all_but(found.entries, deltas.names)
        for batch in batches([entry.spec for entry in changed], tensors):
            before = {spec.name: raw_bytes(t.clone()) for spec, t in batch} if is_shared else {}
            deltas.apply(batch)
            sums |= state_digest.of_named({spec.name: tensor for spec, tensor in batch})
            for spec, tensor in batch:
                writer.write(where[spec.name], raw_bytes(tensor), before.get(spec.name))
    return {spec.name for spec in specs}


class _Writer:
    """Writes the data of a file whose header is written."""

    def __init__(self, old: int, old_start: int, new: int, new_start: int, *, is_shared: bool) -> None:
        self._old, self._old_start, self._new, self._new_start = old, old_start, new, new_start
        self._is_shared = is_shared

    def copy_all_but(self, entries: Sequence[Entry], names: set[str]) -> None:
        """Copy the tensors that do not have these names; neighbours together."""
        first = end = 0
        for entry in entries:
            if entry.spec.name in names:
                self._copy(first, end)
                first = entry.start + entry.spec.num_bytes
            end = entry.start + entry.spec.num_bytes
        self._copy(first, end)

    def _copy(self, start: int, end: int) -> None:
        at = start
        while at < end:
            piece = min(end - at, _PIECE_BYTES)
            try:
                done = os.copy_file_range(
                    self._old, self._new, piece, self._old_start + at, self._new_start + at
                )
            except OSError as exc:
                if exc.errno not in _NOT_SHARED:
                    raise
                done = 0
            if not done:
                # No such call between these files, or a file system that makes its files up as they are read.
                data = os.pread(self._old, piece, self._old_start + at)
                if not data:
                    raise CorruptObject("a file of the mirror ended while it was copied")
                _write(self._new, self._new_start + at, memoryview(data))
                done = len(data)
            at += done

    def write(self, entry: Entry, data: memoryview, before: memoryview | None) -> None:
        """Write a tensor; only what differs from `before` where the file has that."""
        start = self._new_start + entry.start
        if before is None:
            _write(self._new, start, data)
            return
        for first, end in _changed(start, before, data):
            _write(self._new, start + first, data[first:end])


def _changed(start: int, before: memoryview, after: memoryview) -> Iterator[tuple[int, int]]:
    """Yield ranges of bytes that cover all differences: whole blocks of the file, neighbours together."""
    first = end = 0
    size = len(after)
    for at in range(0, size, _PIECE_BYTES):
        old = np.frombuffer(before[at : at + _PIECE_BYTES], dtype=np.uint8)
        new = np.frombuffer(after[at : at + _PIECE_BYTES], dtype=np.uint8)
        places = np.flatnonzero(old != new)
        for block in np.unique((places + (start + at)) // _BLOCK_BYTES).tolist():
            begin = max(0, block * _BLOCK_BYTES - start)
            if begin > end:
                if end > first:
                    yield first, end
                first = begin
            end = min(size, (block + 1) * _BLOCK_BYTES - start)
    if end > first:
        yield first, end


def _share(old: int, new: int) -> bool:
    """Let a new, empty file have the blocks of another; False where the file system cannot."""
    try:
        fcntl.ioctl(new, _FICLONE, old)
    except OSError as exc:
        if exc.errno not in _NOT_SHARED:
            raise
        return False
    return True


def _padded(beginning: bytes, room: int) -> bytes:
    """Return a header with so many spaces behind it that the data begins at `room`."""
    return struct.pack("<Q", room - 8) + beginning[8:].ljust(room - 8)


def _write(file: int, at: int, data: memoryview) -> None:
    rest = data.cast("B")
    while rest:
        done = os.pwrite(file, rest[: 1 << 30], at)
        rest, at = rest[done:], at + done


def _header(path: Path) -> FileHeader:
    with host.asked(f"reading {path}"), path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        return tensor_file.read_header(
            str(path), size, lambda num_bytes: _read(path, file.fileno(), 0, num_bytes)
        )


def _tensor(path: Path, file: int, found: FileHeader, entry: Entry) -> torch.Tensor:
    with host.asked(f"reading {path}", kinds=(OSError,)):
        data = _read(path, file, found.data_start + entry.start, entry.spec.num_bytes)
    return tensor_file.tensor_of(str(path), entry.spec, data)


def _read(path: Path, file: int, start: int, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        done = os.preadv(file, [view[at : at + (1 << 30)]], start + at)
        if not done:
            raise CorruptObject(f"{path} ends {size - at:,} bytes early")
        at += done
    return data


def _check_specs(path: Path, specs: Sequence[TensorSpec], header: StoreHeader) -> None:
    schema = header.schema.by_name()
    for spec in specs:
        if schema.get(spec.name) != spec:
            raise CorruptObject(f"{path}: it holds {spec}, but the run has {schema.get(spec.name)}")


def _other_files(store: Store, source: Path, deltas: Sequence[Manifest], partial: Path) -> None:
    """Give a folder its config, tokenizer and index: those of the newest anchor, as a replay has them.

    The index says which file has which tensor, and the tensors stay in the files in which they were.
    """
    newest = next((each.anchor for each in reversed(deltas) if each.anchor is not None), None)
    wanted: Mapping[str, Payload] | None = None
    if newest is not None:
        wanted = {_name(each): each for each in newest.files}
        for name, payload in wanted.items():
            if name != INDEX and not name.endswith(SUFFIX):
                download.download(store, payload, partial / name)
    with host.asked(f"writing {partial}"):
        for path in source.iterdir():
            if path.name.endswith(SUFFIX) or (wanted is not None and path.name != INDEX):
                continue
            try:
                os.link(path, partial / path.name)
            except OSError:
                # A file system without links.
                (partial / path.name).write_bytes(path.read_bytes())
