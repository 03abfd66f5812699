"""Bring payloads of a plan to this host, verified, in bounded memory.

Given a node cache, processes of one host share what they fetch; without one each fetches for itself.
"""

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import torch

from patchstore import checksum, host, parts, payload
from patchstore.encodings import RELATIVE, EncodedTensor, named
from patchstore.encodings.context import Coded, Tiles, decode_patches
from patchstore.errors import CorruptObject, HostError, NotFound
from patchstore.model import Manifest, Payload, Schema, TensorSpec
from patchstore.stores.base import PART_BYTES, Store
from patchstore.sums import Sums, sums_object, unpack_sums
from patchstore.tensors import TensorPatch, bits, grouped

if TYPE_CHECKING:
    from patchstore.node_cache import NodeCache

SMALL_BYTES = 1 << 16
"""Files up to this size are read into memory: a process may map only 65,530 (`vm.max_map_count`)."""


_UNASKED_BYTES = 64 << 20
"""A payload of at most this size is fetched without asking the store for its size, which takes a request."""


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
    if wanted.size > _UNASKED_BYTES:
        # The room is taken at once, and for a false size that could be all the room that this host has.
        check_size(store, wanted)
    if wanted.size:
        # Spares finding the room block by block (1 GB in 0.7 s instead of 3.2, ext4).
        os.posix_fallocate(file.fileno(), 0, wanted.size)
    file.writelines(chunks(store, wanted))


def cached_sums(store: Store, schema: Schema, manifest: Manifest, cache: "NodeCache") -> dict[str, Sums]:
    """Fetch the digest sums of a version's tensors through the host's cache.

    Raises:
        CorruptObject: the object is missing, or is not what the manifest says.
    """
    with cache.fetch(store, sums_object(schema, manifest)) as file:
        return unpack_sums(schema, manifest, file.read())


class Wanted(NamedTuple):
    """A tensor whose changes are asked for."""

    spec: TensorSpec
    held: torch.Tensor | None
    """The tensor before; may be None where nothing that is stored of it is relative."""
    tiles: Tiles = None
    """Numbers of those tiles that `held` really has, ascending; None for all. Patches that are relative have
    nothing of the others."""


class Deltas:
    """The deltas of a plan on local disk, mapped into memory.

    Decoded of large tensors one at a time, of small ones many.
    """

    def __init__(self, versions: list[tuple[Manifest, str, dict[str, EncodedTensor | Coded]]]) -> None:
        self._versions = versions
        self.names = {name for _, _, stored in versions for name in stored}
        """Tensors that any of the deltas states."""

    def is_relative(self, name: str) -> bool:
        """Whether any of them can be read only beside the tensor that it changes."""
        return any(isinstance(stored.get(name), Coded) for _, _, stored in self._versions)

    def apply(self, tensors: Iterable[tuple[TensorSpec, torch.Tensor]]) -> None:
        """Write into tensors, which are as they were before the first delta, what the deltas change.

        Raises:
            CorruptObject: positions that no encoder writes, or one that two payloads of a version state.
        """
        stated = (Wanted(spec, tensor) for spec, tensor in tensors if spec.name in self.names)
        for group in self._grouped(stated):
            for each, patch in self._patches(group):
                assert each.held is not None
                _write(patch, each.held)

    def _grouped(self, wanted: Iterable[Wanted]) -> Iterator[list[Wanted]]:
        return grouped(wanted, lambda each: each.spec.dtype, lambda each: each.spec.num_elements)

    def _patches(self, group: Sequence[Wanted]) -> Iterator[tuple[Wanted, TensorPatch]]:
        """Yield all patches of tensors of one dtype, delta by delta.

        Coded ones are decoded beside the tensor as it is then, so the caller writes a patch before it takes
        the next one.

        Raises:
            CorruptObject: positions that no encoder writes, or one that two payloads of a version state.
        """
        version, stated = None, dict[str, list[torch.Tensor]]()
        for number, (manifest, key, _) in enumerate(self._versions):
            if manifest.version != version:
                version, stated = manifest.version, {}
            for each, patch in self._decoded(number, group):
                parts = stated.setdefault(patch.name, [])
                parts.append(patch.indices)
                if len(parts) > 1 and len(torch.unique(torch.cat(parts))) < sum(map(len, parts)):
                    raise CorruptObject(
                        f"{key}: it states an element of {patch.name!r} that another payload of version "
                        f"{version} states too"
                    )
                yield each, patch

    def _decoded(self, number: int, group: Sequence[Wanted]) -> Iterator[tuple[Wanted, TensorPatch]]:
        """Yield the patches that one delta has of tensors of one dtype."""
        manifest, key, stored = self._versions[number]
        assert manifest.delta is not None
        coded: list[tuple[Wanted, Coded]] = []
        for each in group:
            its = stored.get(each.spec.name)
            if isinstance(its, Coded):
                coded.append((each, its))
            elif its is not None:
                yield each, named(manifest.delta.encoding).decode(its, each.spec, key)
        if not coded:
            return
        # Neighbours of one shape are cut into tiles together.
        coded.sort(key=lambda pair: pair[0].spec.shape)
        olds = []
        for each, _ in coded:
            assert each.held is not None
            olds.append(each.held.cpu())
        patches = decode_patches(
            [each.spec for each, _ in coded],
            [its for _, its in coded],
            olds,
            [key] * len(coded),
            [each.tiles for each, _ in coded],
        )
        yield from zip((each for each, _ in coded), patches, strict=True)

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
        """Return one patch with the effect of all; see `merged_each`."""
        ((_, patch),) = self.merged_each([Wanted(spec, held, tiles)])
        return patch

    def merged_each(self, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, TensorPatch]]:
        """Yield for each tensor, in any order, one patch with the effect of all: the last value of every
        position wins.

        Args:
            wanted: tensors that the deltas state. Not written to; copied where that takes several relative
                patches. Some of them are held meanwhile, `tensors.TOGETHER` elements or one for each dtype.

        Raises:
            CorruptObject: positions that no encoder writes.
        """
        for group in self._grouped(wanted):
            if len(self._versions) == 1:
                yield from self._decoded(0, group)
                continue
            copies = [
                each._replace(held=each.held.clone())
                if each.held is not None and self.is_relative(each.spec.name)
                else each
                for each in group
            ]
            found: dict[str, list[TensorPatch]] = {each.spec.name: [] for each in group}
            for each, patch in self._patches(copies):
                found[patch.name].append(patch)
                if each.held is not None and self.is_relative(patch.name):
                    _write(patch, each.held)
            yield from ((each, _merged(found[each.spec.name])) for each in group)


def _write(patch: TensorPatch, tensor: torch.Tensor) -> None:
    bits(tensor)[patch.indices.to(tensor.device)] = bits(patch.values).to(tensor.device)


def _merged(patches: Sequence[TensorPatch]) -> TensorPatch:
    """Return one patch of a tensor with the effect of several."""
    if len(patches) == 1:
        return patches[0]
    order = torch.cat([patch.indices.to(torch.int64) for patch in patches])
    indices, by = order.sort(stable=True)
    last = torch.ones(len(indices), dtype=torch.bool, device=indices.device)
    last[:-1] = indices[1:] != indices[:-1]
    values = torch.cat([patch.values for patch in patches])[by[last]]
    return TensorPatch(name=patches[0].name, indices=indices[last], values=values)


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
