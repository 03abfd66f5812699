"""Bring payloads of a plan to this host, verified, in bounded memory.

Given a node cache, processes of one host share what they fetch; without one each fetches for itself.
"""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import TYPE_CHECKING, BinaryIO

import torch

from patchstore import checksum, host, parts, payload
from patchstore.encodings import RELATIVE, EncodedTensor, named
from patchstore.encodings.context import Coded, Tiles, decode_patch
from patchstore.errors import CorruptObject, HostError, NotFound
from patchstore.model import Manifest, Payload, TensorSpec
from patchstore.stores.base import PART_BYTES, Store
from patchstore.tensors import TensorPatch, bits

if TYPE_CHECKING:
    from patchstore.node_cache import NodeCache

SMALL_BYTES = 1 << 16
"""Files up to this size are read into memory: a process may map only 65,530 (`vm.max_map_count`)."""


def chunks(store: Store, wanted: Payload) -> Iterator[bytes]:
    """Stream a payload; what it yields is proved only when the iterator ends.

    Raises:
        CorruptObject: missing, or not the bytes that the manifest names.
    """
    try:
        # One byte more than there should be, so that a longer object is noticed without asking for its size.
        with host.reading(wanted.key):
            yield from checksum.verified(store.read(wanted.key, end=wanted.size + 1), wanted)
    except NotFound as exc:
        raise _missing(store, wanted) from exc


def check_size(store: Store, wanted: Payload) -> None:
    """Ask the store for a payload's size, before more room is made for it than it takes.

    Raises:
        CorruptObject: missing, or not of the size that the manifest says.
    """
    try:
        with host.reading(wanted.key):
            size = store.size(wanted.key)
    except NotFound as exc:
        raise _missing(store, wanted) from exc
    if size != wanted.size:
        raise CorruptObject(f"{wanted.key} should have {wanted.size:,} bytes but has {size:,}")


def _missing(store: Store, wanted: Payload) -> CorruptObject:
    return CorruptObject(f"{wanted.key} is missing from {store.url}, though its version names it")


def download(store: Store, wanted: Payload, path: Path) -> None:
    """Copy a payload to a local file; on an error the file is incomplete and must not be used.

    Raises:
        CorruptObject: as `chunks`.
        HostError: there is no room, which shows before anything is fetched, or the disk fails.
    """
    with _room(store, wanted, path.parent), path.open("xb") as file:
        _fill(file, store, wanted)


def _fill(file: BinaryIO, store: Store, wanted: Payload) -> None:
    """Write a payload to a new file; callers turn what goes wrong with that into `_room`'s errors."""
    if wanted.size:
        # Takes the room at once, and spares finding it block by block (1 GB in 0.7 s instead of 3.2, ext4).
        os.posix_fallocate(file.fileno(), 0, wanted.size)
    file.writelines(chunks(store, wanted))


class Deltas:
    """The deltas of a plan on local disk, mapped into memory, decoded one tensor at a time."""

    def __init__(self, versions: list[tuple[Manifest, str, dict[str, EncodedTensor | Coded]]]) -> None:
        self._versions = versions

    @property
    def names(self) -> set[str]:
        """Tensors that any of the deltas states."""
        return {name for _, _, stored in self._versions for name in stored}

    def is_relative(self, name: str) -> bool:
        """Whether any of them can be read only beside the tensor that it changes."""
        return any(isinstance(stored.get(name), Coded) for _, _, stored in self._versions)

    def patches(
        self, spec: TensorSpec, held: torch.Tensor | None, tiles: Tiles = None
    ) -> Iterator[TensorPatch]:
        """Yield one tensor's patches, in order; each is to be applied to `held` before the next is taken.

        Args:
            held: the tensor as it was before the first; may be None where none of them `is_relative`.
            tiles: numbers of those tiles that `held` really has, ascending; None for all. Patches that
                are relative have nothing of the others.

        Raises:
            CorruptObject: positions that no encoder writes.
        """
        for manifest, key, stored in self._versions:
            each = stored.get(spec.name)
            if isinstance(each, Coded):
                assert held is not None
                yield decode_patch(spec, each, bits(held).cpu(), key, tiles)
            elif each is not None:
                assert manifest.delta is not None
                yield named(manifest.delta.encoding).decode(each, spec, key)

    def stored(self) -> list[Mapping[str, tuple[str, EncodedTensor | Coded]]] | None:
        """Return for each version, oldest first, by name what is stored, and the key of its object.

        None where any of them has positions that are not gaps.
        """
        found: dict[int, dict[str, tuple[str, EncodedTensor | Coded]]] = {}
        for manifest, key, stored in self._versions:
            assert manifest.delta is not None
            if manifest.delta.encoding not in {"gap", RELATIVE}:
                return None
            mine = found.setdefault(manifest.version, {})
            if mine.keys() & stored.keys():
                return None
            mine |= {name: (key, encoded) for name, encoded in stored.items()}
        return list(found.values())

    def merged(self, spec: TensorSpec, held: torch.Tensor | None, tiles: Tiles = None) -> TensorPatch:
        """Return one patch with the effect of all: the last value of every position wins.

        Args:
            held, tiles: as of `patches`. Not written to; copied where that takes several relative ones.
        """
        patches = []
        if held is not None and len(self._versions) > 1 and self.is_relative(spec.name):
            held = held.clone()
            for patch in self.patches(spec, held, tiles):
                bits(held)[patch.indices.to(held.device)] = bits(patch.values).to(held.device)
                patches.append(patch)
        else:
            patches += self.patches(spec, held, tiles)
        if len(patches) == 1:
            return patches[0]
        order = torch.cat([patch.indices.to(torch.int64) for patch in patches])
        indices, by = order.sort(stable=True)
        last = torch.ones(len(indices), dtype=torch.bool)
        last[:-1] = indices[1:] != indices[:-1]
        values = torch.cat([patch.values for patch in patches])[by[last]]
        return TensorPatch(name=spec.name, indices=indices[last], values=values)


def _in_memory(file: BinaryIO) -> memoryview:
    """Map a file, or read a small one. The file may be closed afterwards, and stays as it is.

    Raises:
        HostError: it cannot be mapped.
    """
    size = os.fstat(file.fileno()).st_size
    if size <= SMALL_BYTES:
        file.seek(0)
        return memoryview(bytearray(file.read()))
    try:
        # Python's own `mmap` keeps a descriptor for each mapping, and a chain may be of a thousand.
        pages = torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as exc:
        raise HostError(
            f"a file of {size:,} bytes cannot be mapped on this host: {exc}; free some memory, raise "
            "`ulimit -v`, or the sysctl vm.max_map_count"
        ) from exc
    # Writable, as torch wants its memory to be; what is written is a page's copy, and not the file.
    return pages.numpy().data


@contextmanager
def _room(store: Store, wanted: Payload, where: object) -> Iterator[None]:
    """Say that there is no room for a payload, unless its manifest is wrong about how much that is.

    Raises:
        CorruptObject, HostError
    """
    try:
        yield
    except (OSError, MemoryError, OverflowError) as exc:
        check_size(store, wanted)
        number = exc.errno if isinstance(exc, OSError) else errno.ENOMEM
        raise host.refused(
            number, f"holding {wanted.size:,} bytes of {wanted.key} in {where}", reason=str(exc)
        ) from exc


@contextmanager
def deltas(
    store: Store,
    manifests: tuple[Manifest, ...],
    schema: Mapping[str, TensorSpec],
    scratch: Path | None,
    cache: "NodeCache | None" = None,
    needs: parts.Needs | None = None,
) -> Iterator[Deltas]:
    """Download and open the deltas of these versions; their files are gone when the block ends.

    Args:
        scratch: folder for temporary files of the deltas' size; None for the system's.
        cache: where their files are instead, if given, and may stay.
        needs: which tiles of coded tensors to read, if not all; `parts` says what is not checked then.

    Raises:
        CorruptObject: a payload is not what its manifest names, or not a delta of this run.
        HostError: this host has no room for them, or is short of something else.
    """

    def local(wanted: Payload) -> memoryview:
        # The file is closed at once: of a chain of any length, one is open at a time.
        if lend is not None:
            with lend(store, wanted) as file:
                return _in_memory(file)
        with (
            _room(store, wanted, scratch or gettempdir()),
            TemporaryFile(prefix="patchstore-", dir=scratch) as file,
        ):
            _fill(file, store, wanted)
            file.flush()
            return _in_memory(file)

    with ExitStack() as files:
        lend = None if cache is None else files.enter_context(cache.lease())
        versions: list[tuple[Manifest, str, dict[str, EncodedTensor | Coded]]] = []
        for manifest in manifests:
            assert manifest.delta is not None
            # Before anything is fetched, so that a newer release's bucket fails at once.
            named(manifest.delta.encoding)
            first = len(versions)
            for wanted in manifest.delta.payloads:
                if needs is not None and manifest.delta.encoding == RELATIVE:
                    with _room(store, wanted, "memory"):
                        found = parts.read(store, wanted, manifest, schema, needs)
                else:
                    found = payload.read_delta(wanted.key, local(wanted), manifest, schema)
                for _, _, others in versions[first:]:
                    # Each is coded against the parent, and not against what another one has changed.
                    both = found.keys() & others.keys()
                    if any(isinstance(each[name], Coded) for name in both for each in (found, others)):
                        raise CorruptObject(
                            f"{wanted.key}: it has a coded tensor that another payload has too"
                        )
                versions.append((manifest, wanted.key, found))
        yield Deltas(versions)


def anchor(
    store: Store, manifest: Manifest, schema: Mapping[str, TensorSpec], cache: "NodeCache | None" = None
) -> Iterator[tuple[str, list[TensorSpec], Iterator[torch.Tensor]]]:
    """Stream an anchor, file by file.

    Args:
        cache: where its files are streamed from, if given; in use there until this iterator ends.

    Yields:
        A file's name, what it holds, and its tensors in the same order, one in memory at a time. All
        must be taken before the next file; they are proved only when their iterator ends.

    Raises:
        CorruptObject: not a file that the manifest names, or together they do not hold each tensor of
            the run once.
    """
    assert manifest.anchor is not None
    seen: set[str] = set()
    with ExitStack() as files:
        lend = None if cache is None else files.enter_context(cache.lease())
        for wanted in manifest.anchor.payloads:
            source = chunks(store, wanted) if lend is None else _read(lend(store, wanted))
            stream = payload.read_stream(wanted.key, wanted.size, source)
            header = next(stream)
            assert isinstance(header, payload.FileHeader)
            specs = _admitted(wanted.key, header, manifest, schema, seen)
            tensors = (item[1] for item in stream if not isinstance(item, payload.FileHeader))
            yield wanted.key.rsplit("/", 1)[1], specs, tensors
    _check_complete(manifest, schema, seen)


def _read(file: BinaryIO) -> Iterator[bytes]:
    with file:
        yield from iter(partial(file.read, PART_BYTES), b"")


@contextmanager
def local_anchor(
    store: Store, manifest: Manifest, schema: Mapping[str, TensorSpec], cache: "NodeCache"
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Open an anchor's tensors by name, in any order, all of them proved.

    They are private mappings of the cache's files: memory is the page cache, which all processes of the
    host share. A tensor that is written to keeps its own copy of the pages, and the files stay as they
    are. Tensors may outlive the block, which then keep their file's disk space.

    Raises:
        CorruptObject: as `anchor`; nothing was yielded.
    """
    assert manifest.anchor is not None
    seen: set[str] = set()
    tensors: dict[str, torch.Tensor] = {}
    with cache.lease() as lend:
        for wanted in manifest.anchor.payloads:
            with lend(store, wanted) as file:
                buffer = _in_memory(file)
            header, found = payload.open_buffer(wanted.key, buffer)
            _admitted(wanted.key, header, manifest, schema, seen)
            tensors |= found
        _check_complete(manifest, schema, seen)
        yield tensors


def _admitted(
    where: str,
    header: payload.FileHeader,
    manifest: Manifest,
    schema: Mapping[str, TensorSpec],
    seen: set[str],
) -> list[TensorSpec]:
    """Return what a file of an anchor holds, and add it to `seen`, unless the anchor must not hold it.

    Raises:
        CorruptObject
    """
    payload.check_metadata(
        where, header, payload.anchor_metadata(manifest.version, manifest.step, manifest.run_id)
    )
    specs = [entry.spec for entry in header.entries]
    for spec in specs:
        if schema.get(spec.name) != spec:
            raise CorruptObject(
                f"{where}: it holds {spec}, but the run has {schema.get(spec.name)} under that name"
            )
        if spec.name in seen:
            raise CorruptObject(f"{where}: {spec.name!r} is in another file of this anchor too")
        seen.add(spec.name)
    return specs


def _check_complete(manifest: Manifest, schema: Mapping[str, TensorSpec], seen: set[str]) -> None:
    if missing := schema.keys() - seen:
        raise CorruptObject(
            f"the anchor of version {manifest.version} lacks {len(missing)} tensors, such as {min(missing)!r}"
        )
