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
        yield from checksum.verified(store.read(wanted.key, end=wanted.size), wanted)
        beyond = store.size(wanted.key) - wanted.size
    except NotFound as exc:
        raise CorruptObject(f"{wanted.key} is missing from {store.url}, though its version names it") from exc
    if beyond > 0:
        raise CorruptObject(f"{wanted.key} should have {wanted.size:,} bytes but has {beyond:,} more")


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
                with path.open("rb") as file:
                    # A private mapping: torch wants writable memory, and nothing may write to it.
                    buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                stored = payload.read_delta(wanted.key, memoryview(buffer), manifest, schema)
                versions.append((manifest, wanted.key, stored))
        yield Deltas(versions)


def anchor_file(
    store: Store, wanted: Payload, schema: Mapping[str, TensorSpec]
) -> tuple[list[TensorSpec], Iterator[torch.Tensor]]:
    """Open one file of an anchor as a stream.

    Returns:
        What it holds, and the tensors in the same order, one in memory at a time; they are proved
        only when that iterator ends.

    Raises:
        CorruptObject: not the file that the manifest names, or a tensor that is not the run's.
    """
    stream = payload.read_stream(wanted.key, wanted.size, chunks(store, wanted))
    header = next(stream)
    assert isinstance(header, payload.FileHeader)
    specs = [entry.spec for entry in header.entries]
    for spec in specs:
        if schema.get(spec.name) != spec:
            raise CorruptObject(
                f"{wanted.key}: it holds {spec}, but the run has {schema.get(spec.name)} under that name"
            )
    return specs, (item[1] for item in stream if not isinstance(item, payload.FileHeader))
