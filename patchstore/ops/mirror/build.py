"""Make the folder of a version from the folder of an earlier one, and deltas.

Files are written anew, and the kernel copies what did not change. Nothing is written to the earlier folder.
Memory is bounded by the largest tensor, twice.
"""

import errno
import os
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import torch

from patchstore.bucket import digests
from patchstore.bucket.manifest_json import json_object
from patchstore.bucket.records import Manifest, Payload, Schema, TensorSpec
from patchstore.bucket.state_sums import Sums, by_name
from patchstore.codec import tensor_file
from patchstore.codec.checkpoint import INDEX, weight_files
from patchstore.codec.tensor_file import Entry, FileHeader
from patchstore.errors import CorruptObject
from patchstore.read import download
from patchstore.read.deltas import Deltas, open_deltas
from patchstore.read.download import unfinished
from patchstore.read.run import Run
from patchstore.stores.base import Store
from patchstore.support import host
from patchstore.tensors import state_digest
from patchstore.tensors.bits import batches, raw_bytes

_SUFFIX = ".safetensors"
_NO_COPY = {
    errno.EXDEV,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.ENOTTY,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EPERM,
    errno.EBADF,
}
_PIECE_BYTES = 8 << 20


def verify(run: Run, manifest: Manifest, folder: Path) -> None:
    """Check that a folder has a version's weights, and the files of its anchor. Reads all of it."""
    route = run.plan(manifest.version)
    sums: dict[str, Sums] = {}
    places: dict[str, str] = {}
    for path in _weight_files(folder):
        found = _header(path)
        specs = [entry.spec for entry in found.entries]
        with path.open("rb", buffering=0) as file:
            tensors = (_tensor(path, file.fileno(), found, entry) for entry in found.entries)
            for batch in batches(specs, tensors):
                sums |= state_digest.of_named({spec.name: tensor for spec, tensor in batch})
        _check_specs(path, specs, run.schema)
        places |= {spec.name: path.name for spec in specs}
    _check_complete(folder, sums.keys(), run.schema)
    state_digest.check_state(run.store, run.schema, sums, manifest)
    assert route.anchor is not None and route.anchor.anchor is not None
    _check_others(folder, route.anchor.anchor.files, places)


def _check_others(folder: Path, files: Sequence[Payload], places: Mapping[str, str]) -> None:
    """Check the files beside the weights."""
    wanted = {_name(each): each.digest for each in files if _name(each) != INDEX}
    found = {each.name for each in folder.iterdir()} - set(places.values()) - {INDEX}
    if wrong := sorted(found ^ wanted.keys()):
        raise CorruptObject(f"{folder}: {wrong[0]} is {'missing' if wrong[0] in wanted else 'no file of it'}")
    for name, digest in wanted.items():
        if digests.digest((folder / name).read_bytes()) != digest:
            raise CorruptObject(f"{folder / name} is not what was published")
    index = folder / INDEX
    if index.exists() or len(set(places.values())) > 1:
        listed = json_object(str(index), index.read_bytes()) if index.exists() else {}
        if listed.get("weight_map") != places:
            raise CorruptObject(f"{index} does not say which file has which tensor")


def _name(payload: Payload) -> str:
    return payload.key.rpartition("/")[2]


def patch(
    run: Run, source: Path, held: Manifest, deltas: Sequence[Manifest], out: Path, *, is_durable: bool = True
) -> None:
    """Write the folder of a version that deltas lead to from the folder of `held`.

    Args:
        out: does not exist yet. It appears when all digests have been checked.
        is_durable: as of `download.unfinished`.
    """
    target = deltas[-1]
    sums = by_name(run.schema, run.sums(held))
    with unfinished(out, is_folder=True, is_durable=is_durable) as partial:
        with open_deltas(run.store, tuple(deltas), run.schema, partial) as opened:
            seen: set[str] = set()
            for path in _weight_files(source):
                seen |= _patch_file(path, partial / path.name, run, target, opened, sums)
            _check_complete(source, seen, run.schema)
        state_digest.check_state(run.store, run.schema, sums, target)
        _other_files(run.store, source, deltas, partial)
        protect(partial)


def protect(folder: Path) -> None:
    """Make a folder's files read-only: the next version is made from them."""
    with host.asked(f"writing {folder}"):
        for path in folder.iterdir():
            path.chmod(0o444)


def _weight_files(folder: Path) -> list[Path]:
    """Return the files with weights of a folder that are there, in a fixed order."""
    return [path for path in weight_files(folder) if path.is_file()]


def _patch_file(
    source: Path,
    out: Path,
    run: Run,
    target: Manifest,
    deltas: Deltas,
    sums: dict[str, Sums],
) -> set[str]:
    """Write one file of the target, and update the sums of what changed; returns the names of its tensors."""
    found = _header(source)
    specs = [entry.spec for entry in found.entries]
    _check_specs(source, specs, run.schema)
    metadata = tensor_file.anchor_metadata(target.version, target.step, run.header.run_id)
    beginning = tensor_file.header_bytes(specs, metadata)
    with (
        host.asked(f"writing {out}"),
        source.open("rb", buffering=0) as old,
        out.open("x+b", buffering=0) as new,
    ):
        write_at(new.fileno(), 0, memoryview(beginning))
        first = end = 0
        for entry in found.entries:
            if entry.spec.name in deltas.names:
                # What lies between changed tensors, neighbours together.
                _copy(old.fileno(), found.data_start, new.fileno(), len(beginning), first, end)
                first = entry.start + entry.spec.num_bytes
            end = entry.start + entry.spec.num_bytes
        _copy(old.fileno(), found.data_start, new.fileno(), len(beginning), first, end)
        changed = {entry.spec.name: entry for entry in found.entries if entry.spec.name in deltas.names}
        tensors = (_tensor(source, old.fileno(), found, entry) for entry in changed.values())
        for batch in batches([entry.spec for entry in changed.values()], tensors):
            deltas.apply(batch)
            sums |= state_digest.of_named({spec.name: tensor for spec, tensor in batch})
            for spec, tensor in batch:
                write_at(new.fileno(), len(beginning) + changed[spec.name].start, raw_bytes(tensor))
    return {spec.name for spec in specs}


def _copy(old: int, old_start: int, new: int, new_start: int, first: int, end: int) -> None:
    """Copy bytes from `first` to `end` of the data of a file, which begins at `old_start`, to another."""
    at = first
    while at < end:
        piece = min(end - at, _PIECE_BYTES)
        try:
            done = os.copy_file_range(old, new, piece, old_start + at, new_start + at)
        except OSError as exc:
            if exc.errno not in _NO_COPY:
                raise
            done = 0
        if not done:
            # No such call between these files, or a file system that makes its files up as they are read.
            data = os.pread(old, piece, old_start + at)
            if not data:
                raise CorruptObject("a file of the mirror ended while it was copied")
            write_at(new, new_start + at, memoryview(data))
            done = len(data)
        at += done


def write_at(file: int, at: int, data: memoryview) -> None:
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


def _check_specs(path: Path, specs: Sequence[TensorSpec], schema: Schema) -> None:
    for spec in specs:
        if (wanted := schema.by_name().get(spec.name)) != spec:
            raise CorruptObject(f"{path}: it holds {spec}, but the run has {wanted}")


def _check_complete(folder: Path, names: Set[str], schema: Schema) -> None:
    if names != schema.by_name().keys():
        raise CorruptObject(f"{folder} does not have each tensor of the run")


def _other_files(store: Store, source: Path, deltas: Sequence[Manifest], partial: Path) -> None:
    """Give a folder its config, tokenizer and index: those of the newest anchor, as a replay has them.

    The index says which file has which tensor, and the tensors stay in the files in which they were.
    """
    newest = next((each.anchor for each in reversed(deltas) if each.anchor is not None), None)
    wanted: Mapping[str, Payload] | None = None
    if newest is not None:
        wanted = {_name(each): each for each in newest.files}
        for name, payload in wanted.items():
            if name != INDEX and not name.endswith(_SUFFIX):
                download.download(store, payload, partial / name)
    with host.asked(f"writing {partial}"):
        for path in source.iterdir():
            if path.name.endswith(_SUFFIX) or (wanted is not None and path.name != INDEX):
                continue
            try:
                os.link(path, partial / path.name)
            except OSError:
                # A file system without links.
                (partial / path.name).write_bytes(path.read_bytes())
