"""Bring payloads of a plan to this host, verified, in bounded memory.

Given a node cache, processes of one host share what they fetch; without one each fetches for itself.
"""

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, BinaryIO

import torch

from patchstore import checksum, parts, payload
from patchstore.encodings import RELATIVE, EncodedTensor, named
from patchstore.encodings.context import Coded, Tiles, decode_patch
from patchstore.errors import CorruptObject, NotFound
from patchstore.model import Manifest, Payload, TensorSpec
from patchstore.stores.base import PART_BYTES, Store
from patchstore.tensors import TensorPatch, bits

if TYPE_CHECKING:
    from patchstore.node_cache import NodeCache


_UNASKED_BYTES = 64 << 20
"""A payload of at most this size is fetched without asking the store for its size, which takes a request."""


def chunks(store: Store, wanted: Payload) -> Iterator[bytes]:
    """Stream a payload; what it yields is proved only when the iterator ends.

    Raises:
        CorruptObject: missing, or not the bytes that the manifest names.
    """
    try:
        # One byte more than there should be, so that a longer object is noticed without asking for its size.
        yield from checksum.verified(store.read(wanted.key, end=wanted.size + 1), wanted)
    except NotFound as exc:
        raise _missing(store, wanted) from exc


def check_size(store: Store, wanted: Payload) -> None:
    """Ask the store for a payload's size, before more room is made for it than it takes.

    Raises:
        CorruptObject: missing, or not of the size that the manifest says.
    """
    try:
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
        OSError: there is no room, which shows before anything is fetched, or the disk fails.
    """
    with path.open("xb") as file:
        _fill(file, store, wanted)


def _fill(file: BinaryIO, store: Store, wanted: Payload) -> None:
    """Write a payload to a new file."""
    if wanted.size > _UNASKED_BYTES:
        # The room is taken at once, and for a false size that could be all the room that this host has.
        check_size(store, wanted)
    if wanted.size:
        # Spares finding the room block by block (1 GB in 0.7 s instead of 3.2, ext4).
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
            CorruptObject: positions that no encoder writes, or one that two payloads of a version state.
        """
        version, stated = None, list[torch.Tensor]()
        for manifest, key, stored in self._versions:
            each = stored.get(spec.name)
            if isinstance(each, Coded):
                assert held is not None
                yield decode_patch(spec, each, bits(held).cpu(), key, tiles)
            elif each is not None:
                assert manifest.delta is not None
                patch = named(manifest.delta.encoding).decode(each, spec, key)
                if manifest.version != version:
                    version, stated = manifest.version, []
                stated.append(patch.indices)
                if len(stated) > 1 and len(torch.unique(torch.cat(stated))) < sum(map(len, stated)):
                    raise CorruptObject(
                        f"{key}: it states an element of {spec.name!r} that another payload of version "
                        f"{version} states too"
                    )
                yield patch

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


def _mapped(file: BinaryIO) -> memoryview:
    """Map a file privately: torch wants writable memory, and the file must stay as it is."""
    if os.fstat(file.fileno()).st_size == 0:
        return memoryview(b"")  # cannot be mapped; whoever parses it says what is wrong
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


@contextmanager
def _temporary(store: Store, wanted: Payload, scratch: Path | None) -> Iterator[BinaryIO]:
    with TemporaryFile(prefix="patchstore-", dir=scratch) as file:
        _fill(file, store, wanted)
        file.flush()
        yield file


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
    """

    def local(wanted: Payload) -> AbstractContextManager[BinaryIO]:
        return _temporary(store, wanted, scratch) if cache is None else cache.fetch(store, wanted)

    with ExitStack() as files:
        versions: list[tuple[Manifest, str, dict[str, EncodedTensor | Coded]]] = []
        for manifest in manifests:
            assert manifest.delta is not None
            # Before anything is fetched, so that a newer release's bucket fails at once.
            named(manifest.delta.encoding)
            for wanted in manifest.delta.payloads:
                if needs is not None and manifest.delta.encoding == RELATIVE:
                    found = parts.read(store, wanted, manifest, schema, needs)
                else:
                    buffer = _mapped(files.enter_context(local(wanted)))
                    found = payload.read_delta(wanted.key, buffer, manifest, schema)
                for earlier, _, others in versions:
                    # Each is coded against the parent, and not against what another one has changed.
                    both = found.keys() & others.keys() if earlier.version == manifest.version else ()
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
        for wanted in manifest.anchor.payloads:
            source: Iterable[bytes] = chunks(store, wanted)
            if cache is not None:
                file = files.enter_context(cache.fetch(store, wanted))
                source = iter(partial(file.read, PART_BYTES), b"")
            stream = payload.read_stream(wanted.key, wanted.size, source)
            header = next(stream)
            assert isinstance(header, payload.FileHeader)
            specs = _admitted(wanted.key, header, manifest, schema, seen)
            tensors = (item[1] for item in stream if not isinstance(item, payload.FileHeader))
            yield wanted.key.rsplit("/", 1)[1], specs, tensors
    _check_complete(manifest, schema, seen)


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
    with ExitStack() as files:
        for wanted in manifest.anchor.payloads:
            buffer = _mapped(files.enter_context(cache.fetch(store, wanted)))
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
