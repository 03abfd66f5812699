"""Open the deltas of a plan, verified, and turn them into patches."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import TYPE_CHECKING, NamedTuple

import torch

from patchstore.encodings import EncodedTensor, encoding
from patchstore.encodings.context import Coded, Context, Tiles, decode_patches
from patchstore.encodings.gap import Gap
from patchstore.errors import CorruptObject
from patchstore.format.records import Manifest, Payload, TensorSpec
from patchstore.payloads import delta_file
from patchstore.read import ranges
from patchstore.read.download import fill, in_memory, room_for
from patchstore.stores.base import Store
from patchstore.tensors.bits import TensorPatch, bits, grouped

if TYPE_CHECKING:
    from patchstore.read.host_cache import HostCache


class Wanted(NamedTuple):
    """A tensor whose changes are to be read."""

    spec: TensorSpec
    held: torch.Tensor | None
    """The parent's tensor; None if no stored change of it is relative to the parent."""
    tiles: Tiles = None
    """Numbers of those tiles that `held` really has, ascending; None for all. Relative patches contain
    nothing of the other tiles."""


class Deltas:
    """The deltas of a plan on local disk, mapped into memory.

    Large tensors are decoded one at a time, small ones many at a time.
    """

    def __init__(self, versions: list[tuple[Manifest, str, dict[str, EncodedTensor | Coded]]]) -> None:
        self._versions = versions
        self.names = {name for _, _, stored in versions for name in stored}
        """Tensors that any of the deltas states."""

    def is_relative(self, name: str) -> bool:
        """Whether any of them is relative: it can be decoded only beside the tensor that it changes."""
        return any(isinstance(stored.get(name), Coded) for _, _, stored in self._versions)

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

    def _grouped(self, wanted: Iterable[Wanted]) -> Iterator[list[Wanted]]:
        return grouped(wanted, lambda each: each.spec.dtype, lambda each: each.spec.num_elements)

    def _patches(self, group: Sequence[Wanted]) -> Iterator[tuple[Wanted, TensorPatch]]:
        """Yield all patches of tensors of one dtype, delta by delta.

        A coded patch is decoded beside the tensor as it is at that moment. So the caller must write a patch
        before it takes the next one.

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
                yield each, encoding(manifest.delta.encoding).index.decode(its, each.spec, key)
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
            if not isinstance(encoding(manifest.delta.encoding).index, Gap):
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
                patches. Some are kept in memory meanwhile: `tensors.bits.TOGETHER` elements, or one per
                dtype.

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


@contextmanager
def open_deltas(
    store: Store,
    manifests: tuple[Manifest, ...],
    schema: Mapping[str, TensorSpec],
    scratch: Path | None,
    cache: "HostCache | None" = None,
    needs: ranges.Needs | None = None,
) -> Iterator[Deltas]:
    """Download and open the deltas of these versions; their files are gone when the block ends.

    Args:
        scratch: folder for temporary files of the deltas' size; None for the system's.
        cache: where their files are instead, if given, and may stay.
        needs: which tiles of coded tensors to read, if not all; see `ranges` for what is not checked then.

    Raises:
        CorruptObject: a payload is not what its manifest names, or not a delta of this run.
        HostError: this host has no space for them, or is short of something else.
    """

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
        lend = None if cache is None else files.enter_context(cache.lease())
        versions: list[tuple[Manifest, str, dict[str, EncodedTensor | Coded]]] = []
        for manifest in manifests:
            assert manifest.delta is not None
            # Before anything is fetched, so that a newer release's bucket fails at once.
            encoding(manifest.delta.encoding)
            first = len(versions)
            for wanted in manifest.delta.payloads:
                if needs is not None and isinstance(encoding(manifest.delta.encoding), Context):
                    with room_for(store, wanted, "memory"):
                        found = ranges.read(store, wanted, manifest, schema, needs)
                else:
                    found = delta_file.read_delta(wanted.key, local(wanted), manifest, schema)
                for _, _, others in versions[first:]:
                    # Each is coded against the parent, and not against the result of another payload.
                    both = found.keys() & others.keys()
                    if any(isinstance(each[name], Coded) for name in both for each in (found, others)):
                        raise CorruptObject(
                            f"{wanted.key}: it has a coded tensor that another payload has too"
                        )
                versions.append((manifest, wanted.key, found))
        yield Deltas(versions)
