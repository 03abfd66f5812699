"""Bring payloads of a plan to this host, verified, in bounded memory."""

import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from patchstore import checksum, payload
from patchstore.encodings import EncodedTensor, named
from patchstore.errors import CorruptObject, NotFound
from patchstore.model import Manifest, Payload, TensorSpec
from patchstore.stores.base import Store
from patchstore.tensors import TensorPatch


def chunks(store: Store, wanted: Payload) -> Iterator[bytes]:
    """Stream a payload; what it yields is proved only when the iterator ends.

    Raises:
        CorruptObject: missing, or not the bytes that the manifest names.
    """
    try:
        # One byte more than there should be, so that a longer object is noticed without asking for its size.
        yield from checksum.verified(store.read(wanted.key, end=wanted.size + 1), wanted)
    except NotFound as exc:
        raise CorruptObject(f"{wanted.key} is missing from {store.url}, though its version names it") from exc


def download(store: Store, wanted: Payload, path: Path) -> None:
    """Copy a payload to a local file; on an error the file is incomplete and must not be used.

    Raises:
        CorruptObject: as `chunks`.
    """
    with path.open("xb") as file:
        for chunk in chunks(store, wanted):
            file.write(chunk)


class Deltas:
    """The deltas of a plan on local disk, mapped into memory, decoded one tensor at a time."""

    def __init__(self, versions: list[tuple[Manifest, str, dict[str, EncodedTensor]]]) -> None:
        self._versions = versions

    @property
    def names(self) -> set[str]:
        """Tensors that any of the deltas states."""
        return {name for _, _, stored in self._versions for name in stored}

    def patches(self, spec: TensorSpec) -> Iterator[TensorPatch]:
        """Yield one tensor's patches, to be applied in this order.

        Raises:
            CorruptObject: positions that no encoder writes.
        """
        for manifest, key, stored in self._versions:
            if spec.name in stored:
                assert manifest.delta is not None
                yield named(manifest.delta.encoding).decode(stored[spec.name], spec, key)

    def merged(self, spec: TensorSpec) -> TensorPatch:
        """Return one patch with the effect of all: the last value of every position wins."""
        patches = list(self.patches(spec))
        if len(patches) == 1:
            return patches[0]
        order = torch.cat([patch.indices.to(torch.int64) for patch in patches])
        indices, by = order.sort(stable=True)
        last = torch.ones(len(indices), dtype=torch.bool)
        last[:-1] = indices[1:] != indices[:-1]
        values = torch.cat([patch.values for patch in patches])[by[last]]
        return TensorPatch(name=spec.name, indices=indices[last], values=values)


def _mapped(path: Path) -> memoryview:
    """Map a file privately: torch wants writable memory, and the file must stay as it is."""
    if path.stat().st_size == 0:
        return memoryview(b"")  # cannot be mapped; whoever parses it says what is wrong
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


@contextmanager
def deltas(
    store: Store, manifests: tuple[Manifest, ...], schema: Mapping[str, TensorSpec], scratch: Path | None
) -> Iterator[Deltas]:
    """Download and open the deltas of these versions; their files are gone when the block ends.

    Args:
        scratch: folder for temporary files of the deltas' size; None for the system's.

    Raises:
        CorruptObject: a payload is not what its manifest names, or not a delta of this run.
    """
    with TemporaryDirectory(prefix="patchstore-", dir=scratch) as folder:
        versions = []
        for manifest in manifests:
            assert manifest.delta is not None
            # Before anything is fetched, so that a newer release's bucket fails at once.
            named(manifest.delta.encoding)
            for number, wanted in enumerate(manifest.delta.payloads):
                path = Path(folder) / f"{manifest.version}-{number}"
                download(store, wanted, path)
                stored = payload.read_delta(wanted.key, _mapped(path), manifest, schema)
                versions.append((manifest, wanted.key, stored))
        yield Deltas(versions)


def anchor(
    store: Store, manifest: Manifest, schema: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, list[TensorSpec], Iterator[torch.Tensor]]]:
    """Stream an anchor, file by file.

    Yields:
        A file's name, what it holds, and its tensors in the same order, one in memory at a time. All
        must be taken before the next file; they are proved only when their iterator ends.

    Raises:
        CorruptObject: not a file that the manifest names, or together they do not hold each tensor of
            the run once.
    """
    assert manifest.anchor is not None
    seen: set[str] = set()
    for wanted in manifest.anchor.payloads:
        stream = payload.read_stream(wanted.key, wanted.size, chunks(store, wanted))
        header = next(stream)
        assert isinstance(header, payload.FileHeader)
        payload.check_metadata(
            wanted.key, header, payload.anchor_metadata(manifest.version, manifest.step, manifest.run_id)
        )
        specs = [entry.spec for entry in header.entries]
        for spec in specs:
            if schema.get(spec.name) != spec:
                raise CorruptObject(
                    f"{wanted.key}: it holds {spec}, but the run has {schema.get(spec.name)} under that name"
                )
            if spec.name in seen:
                raise CorruptObject(f"{wanted.key}: {spec.name!r} is in another file of this anchor too")
            seen.add(spec.name)
        tensors = (item[1] for item in stream if not isinstance(item, payload.FileHeader))
        yield wanted.key.rsplit("/", 1)[1], specs, tensors
    if missing := schema.keys() - seen:
        raise CorruptObject(
            f"the anchor of version {manifest.version} lacks {len(missing)} tensors, such as {min(missing)!r}"
        )
