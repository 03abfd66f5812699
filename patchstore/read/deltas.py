"""Open the deltas of a plan, verified, and turn them into patches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import TYPE_CHECKING, NamedTuple

import torch

from patchstore.encodings import encoding
from patchstore.encodings.context import Chosen, Coded, Context, Tiles, Tiling, decode_patches
from patchstore.encodings.gap import Gap
from patchstore.format.records import Manifest, Payload, TensorSpec
from patchstore.format.state_sums import Sums
from patchstore.payloads import delta_file
from patchstore.payloads.delta_file import Stored
from patchstore.read import ranges
from patchstore.read.download import OwnMemory, fill, in_memory, room_for
from patchstore.read.parts import Parts, check_boxes, check_listed, check_patches
from patchstore.stores.base import Store
from patchstore.support import host
from patchstore.support.threads import Threads
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, bits, grouped
from patchstore.tensors.state_digest import of_elements

if TYPE_CHECKING:
    from patchstore.read.host_cache import HostCache


_AT_A_TIME = 8
"""Payloads of which ranges are read at the same time."""
OWN_BYTES = 256 << 20
"""The most that is read into a process's own memory, of all deltas of a plan."""


class Wanted(NamedTuple):
    """A tensor whose changes are to be read."""

    spec: TensorSpec
    held: torch.Tensor | None
    """The parent's tensor; None if no stored change of it is relative to the parent."""
    tiles: Chosen | None = None
    """Which tiles of a part `held` really has; None for all. Relative patches contain nothing of the other
    tiles."""


Version = tuple[Manifest, Mapping[str, Parts]]
"""A version, and by name what its payloads state of each tensor."""


class Deltas:
    """The deltas of a plan on local disk, mapped into memory.

    Large tensors are decoded one at a time, small ones many at a time.
    """

    def __init__(self, versions: Sequence[Version], schema: Mapping[str, TensorSpec]) -> None:
        self._versions = versions
        self._schema = schema
        self.names = {name for _, stored in versions for name in stored}
        """Tensors that any of the deltas states."""

    def is_relative(self, name: str) -> bool:
        """Whether any of them is relative: it can be decoded only beside the tensor that it changes."""
        return any(
            isinstance(each, Coded) for _, stored in self._versions for _, each in stored.get(name, ())
        )

    def apply(self, tensors: Iterable[tuple[TensorSpec, torch.Tensor]]) -> None:
        """Write the changes of all deltas into tensors that have the version before the first delta.

        Raises:
            CorruptObject: positions that no encoder writes, or one that two payloads of a version state.
        """
        stated = (Wanted(spec, tensor) for spec, tensor in tensors if spec.name in self.names)
        for group in self._grouped(stated):
            for each, patch in self._patches(group):
                assert each.held is not None
                _write(patch, each.held)

    def apply_counted(self, tensors: Iterable[tuple[TensorSpec, torch.Tensor]]) -> dict[str, Sums]:
        """`apply`, and return by how much the digest sums of each changed tensor grew. Raises as `apply`."""
        growth: dict[str, Sums] = {}
        stated = (Wanted(spec, tensor) for spec, tensor in tensors if spec.name in self.names)
        for group in self._grouped(stated):
            for each, patch in self._patches(group):
                assert each.held is not None
                before = each.held.view(-1)[patch.indices.to(torch.int64)]
                added = of_elements(patch.indices, patch.values).minus(of_elements(patch.indices, before))
                growth[patch.name] = growth.get(patch.name, Sums()).plus(added)
                _write(patch, each.held)
        return growth

    def after(self, spec: TensorSpec, before: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor with all deltas applied. Raises as `apply`."""
        tensor = before.clone()
        self.apply([(spec, tensor)])
        return tensor

    def _grouped(self, wanted: Iterable[Wanted]) -> Iterator[list[Wanted]]:
        return grouped(wanted, lambda each: each.spec.dtype, lambda each: each.spec.num_elements)

    def _patches(self, group: Sequence[Wanted]) -> Iterator[tuple[Wanted, TensorPatch]]:
        """Yield all patches of tensors of one dtype, delta by delta.

        A coded patch is decoded beside the tensor as it is at that moment. So the caller must write a patch
        before it takes the next one.

        Raises:
            CorruptObject: positions that no encoder writes, or one that two payloads of a version state.
        """
        for number in range(len(self._versions)):
            yield from self._decoded(number, group)

    def _decoded(self, number: int, group: Sequence[Wanted]) -> Iterator[tuple[Wanted, TensorPatch]]:
        """Yield the patches that one version has of tensors of one dtype. Raises as `_patches`."""
        manifest, stored = self._versions[number]
        assert manifest.delta is not None
        index = encoding(manifest.delta.encoding).index
        coded: list[tuple[Wanted, str, Coded, Tiles]] = []
        for each in group:
            parts = stored.get(each.spec.name, ())
            listed = []
            for key, its in parts:
                if isinstance(its, Coded):
                    tiles = None if each.tiles is None else each.tiles(its.tiling)
                    if tiles is None or len(tiles):
                        coded.append((each, key, its, tiles))
                else:
                    listed.append((key, index.decode(its, each.spec, key)))
            if len(parts) > 1:
                check_patches(manifest.version, each.spec, parts, listed)
            yield from ((each, patch) for _, patch in listed)
        if not coded:
            return
        # Neighbours that are cut alike are cut into tiles together.
        coded.sort(key=lambda one: one[0].spec.shape)
        olds = []
        for each, *_ in coded:
            assert each.held is not None
            olds.append(each.held.cpu())
        patches = decode_patches(
            [each.spec for each, *_ in coded],
            [its for _, _, its, _ in coded],
            olds,
            [key for _, key, *_ in coded],
            [tiles for *_, tiles in coded],
        )
        yield from zip((each for each, *_ in coded), patches, strict=True)

    def tilings(self) -> Iterator[tuple[str, Tiling]]:
        """Yield for each coded part its tensor's name, and how it is cut into tiles."""
        for _, stored in self._versions:
            for name, parts in stored.items():
                yield from ((name, each.tiling) for _, each in parts if isinstance(each, Coded))

    def stored(self) -> list[Mapping[str, Parts]] | None:
        """Return for each version, oldest first, by name what is stored, and the keys of its objects.

        None where any of them has positions that are not gaps.

        Raises:
            CorruptObject: positions that no encoder writes, or one that two payloads of a version state.
        """
        for manifest, stored in self._versions:
            assert manifest.delta is not None
            index = encoding(manifest.delta.encoding).index
            if not isinstance(index, Gap):
                return None
            for name, parts in stored.items():
                check_listed(manifest.version, self._schema[name], parts, index)
        return [stored for _, stored in self._versions]

    def merged(self, spec: TensorSpec, held: torch.Tensor | None, tiles: Chosen | None = None) -> TensorPatch:
        """Return one patch with the effect of all; see `merged_each`."""
        ((_, patch),) = self.merged_each([Wanted(spec, held, tiles)])
        return patch

    def merged_each(self, wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, TensorPatch]]:
        """Yield for each tensor, in any order, one patch with the effect of all: the last value of every
        position wins.

        Args:
            wanted: tensors that the deltas state. Not written to; copied where that takes several relative
                patches. Some are kept in memory meanwhile: `tensors.bits.TOGETHER` elements, or one per
                dtype.

        Raises:
            CorruptObject: positions that no encoder writes.
        """
        for group in self._grouped(wanted):
            found: dict[str, list[TensorPatch]] = {each.spec.name: [] for each in group}
            if len(self._versions) == 1:
                for _, patch in self._decoded(0, group):
                    found[patch.name].append(patch)
            else:
                copies = [
                    each._replace(held=each.held.clone())
                    if each.held is not None and self.is_relative(each.spec.name)
                    else each
                    for each in group
                ]
                for each, patch in self._patches(copies):
                    found[patch.name].append(patch)
                    if each.held is not None and self.is_relative(patch.name):
                        _write(patch, each.held)
            yield from ((each, _merged(each.spec, found[each.spec.name])) for each in group)


def _write(patch: TensorPatch, tensor: torch.Tensor) -> None:
    bits(tensor)[patch.indices.to(tensor.device)] = bits(patch.values).to(tensor.device)


def _merged(spec: TensorSpec, patches: Sequence[TensorPatch]) -> TensorPatch:
    """Return one patch of a tensor with the effect of several."""
    if len(patches) == 1:
        return patches[0]
    if not patches:
        nothing = torch.empty(0, dtype=TORCH_DTYPES[spec.dtype], device="cpu")
        return TensorPatch(
            name=spec.name, indices=torch.empty(0, dtype=torch.int32, device="cpu"), values=nothing
        )
    order = torch.cat([patch.indices.to(torch.int64) for patch in patches])
    indices, by = order.sort(stable=True)
    last = torch.ones(len(indices), dtype=torch.bool, device=indices.device)
    last[:-1] = indices[1:] != indices[:-1]
    values = torch.cat([patch.values for patch in patches])[by[last]]
    return TensorPatch(name=patches[0].name, indices=indices[last], values=values)


@contextmanager
def open_deltas(
    store: Store,
    manifests: tuple[Manifest, ...],
    schema: Mapping[str, TensorSpec],
    scratch: Path | None,
    cache: "HostCache | None" = None,
    needs: ranges.Needs | None = None,
    allocate: Callable[[int], torch.Tensor] | None = None,
) -> Iterator[Deltas]:
    """Download and open the deltas of these versions; their files are gone when the block ends.

    Args:
        scratch: folder for temporary files of the deltas' size; None for the system's.
        cache: where their files are instead, if given, and may stay.
        needs: which tiles of coded tensors to read, if not all; see `ranges` for what is not checked then.
        allocate: returns host memory, into which deltas of at most `OWN_BYTES` are read if the store is on
            this host: a second file of the same bytes would gain nothing, and takes long to write.

    Raises:
        CorruptObject: a payload is not what its manifest names, or not a delta of this run.
        HostError: this host has no space for them, or is short of something else.
    """
    payloads = [payload for each in manifests if each.delta is not None for payload in each.delta.payloads]

    def local(wanted: Payload) -> memoryview:
        # The file is closed at once: of a chain of any length, one is open at a time.
        if lend is not None:
            with lend(store, wanted) as file:
                return in_memory(file)
        with (
            room_for(store, wanted, scratch or gettempdir()),
            TemporaryFile(prefix="patchstore-", dir=scratch) as file,
        ):
            fill(file, store, wanted)
            file.flush()
            return in_memory(file)

    with ExitStack() as files:
        if allocate is not None and needs is None and _are_near(store, payloads):
            # Nothing here refers to that memory: it is free when the caller needs it no more.
            yield _opened(store, manifests, schema, None, partial(OwnMemory(payloads, allocate).read, store))
            return
        lend = None if cache is None else files.enter_context(cache.lease())
        yield _opened(store, manifests, schema, needs, local)


def _are_near(store: Store, payloads: Sequence[Payload]) -> bool:
    """Whether payloads are files of this host, and few bytes."""
    if not payloads or OwnMemory.size_of(payloads) > OWN_BYTES:
        return False
    # The first one tells: where others are elsewhere they are read just as well, and only slower.
    key = payloads[0].key
    with host.reading(key):
        return store.is_on_this_host(key)


def _opened(
    store: Store,
    manifests: Sequence[Manifest],
    schema: Mapping[str, TensorSpec],
    needs: ranges.Needs | None,
    local: Callable[[Payload], memoryview],
) -> Deltas:
    """Read deltas. Raises as `open_deltas`.

    Args:
        local: fetches a payload, and maps it or reads it into memory.
    """
    versions: list[Version] = []
    for manifest in manifests:
        assert manifest.delta is not None
        # Before anything is fetched, so that a newer release's bucket fails at once.
        is_coded = isinstance(encoding(manifest.delta.encoding), Context)
        stored: dict[str, Parts] = {}
        if needs is not None and is_coded:
            payloads = _ranges(store, manifest, schema, needs)
        else:
            payloads = (
                (wanted.key, delta_file.read_delta(wanted.key, local(wanted), manifest, schema))
                for wanted in manifest.delta.payloads
            )
        for key, found in payloads:
            for name, parts in found.items():
                stored[name] = (*stored.get(name, ()), *[(key, each) for each in parts])
        for name, its in stored.items():
            check_boxes(manifest.version, schema[name], its)
        versions.append((manifest, stored))
    return Deltas(versions, schema)


def _ranges(
    store: Store, manifest: Manifest, schema: Mapping[str, TensorSpec], needs: ranges.Needs
) -> Iterator[tuple[str, dict[str, tuple[Stored, ...]]]]:
    """Read what is needed of the payloads of a version, some of them at a time."""
    assert manifest.delta is not None

    def read(wanted: Payload) -> tuple[str, dict[str, tuple[Stored, ...]]]:
        with room_for(store, wanted, "memory"):
            return wanted.key, ranges.read(store, wanted, manifest, schema, needs)

    payloads = manifest.delta.payloads
    if len(payloads) < 2:
        yield from map(read, payloads)
        return
    with Threads(min(_AT_A_TIME, len(payloads)), "patchstore-ranges") as pool:
        yield from pool.map(read, payloads)
