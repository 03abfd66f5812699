"""Open the files of an anchor, verified: one tensor after the other, or mapped into memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch

from patchstore.bucket.records import Manifest, Payload, Schema, TensorSpec
from patchstore.bucket.state_sums import SumsArray
from patchstore.codec import tensor_file
from patchstore.errors import CorruptObject
from patchstore.read.download import chunks, downloading, in_memory, parts_of
from patchstore.stores.base import Store
from patchstore.tensors import elements

if TYPE_CHECKING:
    from patchstore.read.host_cache import HostCache

FILES_AT_ONCE = 8
"""Files of an anchor that are downloaded at the same time: one thread digests 2 GB/s at most."""


def stream_anchor(
    store: Store, manifest: Manifest, schema: Mapping[str, TensorSpec], cache: "HostCache | None" = None
) -> Iterator[tuple[str, list[TensorSpec], Iterator[torch.Tensor]]]:
    """Stream an anchor, file by file.

    Yields:
        A file's name, the specs of its tensors, and the tensors in the same order, one in memory at a time.
        All must be taken before the next file; they are verified only when their iterator ends.
    """
    assert manifest.anchor is not None
    seen: set[str] = set()
    with ExitStack() as files:
        lend = None if cache is None else files.enter_context(cache.lease())
        for wanted in manifest.anchor.payloads:
            source = chunks(store, wanted) if lend is None else _read(lend(store, wanted))
            stream = tensor_file.read_stream(wanted.key, wanted.size, source)
            header = next(stream)
            assert isinstance(header, tensor_file.FileHeader)
            specs = _admitted(wanted.key, header, manifest, schema, seen)
            tensors = (item[1] for item in stream if not isinstance(item, tensor_file.FileHeader))
            yield wanted.key.rsplit("/", 1)[1], specs, tensors
    _check_complete(manifest, schema, seen)


def _read(file: BinaryIO) -> Iterator[bytes]:
    with file:
        yield from parts_of(file)


@contextmanager
def open_anchor(
    store: Store, manifest: Manifest, schema: Mapping[str, TensorSpec], cache: "HostCache"
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Open an anchor's tensors by name, in any order, all of them verified.

    They are private mappings of the cache's files: memory is the page cache, which all processes of the
    host share. A tensor that is written to keeps its own copy of the pages, and the files stay as they
    are. Tensors may outlive the block, which then keep their file's disk space.
    """
    assert manifest.anchor is not None
    seen: set[str] = set()
    tensors: dict[str, torch.Tensor] = {}
    with cache.lease() as lend:
        buffers = _mapped(lend, store, manifest.anchor.payloads)
        for wanted, buffer in zip(manifest.anchor.payloads, buffers, strict=True):
            header, found = tensor_file.open_buffer(wanted.key, buffer)
            _admitted(wanted.key, header, manifest, schema, seen)
            tensors |= found
        _check_complete(manifest, schema, seen)
        yield tensors


def copy_anchor(store: Store, manifest: Manifest, schema: Schema, folder: Path) -> SumsArray:
    """Copy the files with an anchor's tensors into a folder, and sum up the tensors as their bytes pass.

    A file is digested, written and summed up at the same time, while its bytes are in the processor's cache.

    Returns:
        The digest sums of all tensors. The files are verified, but for that these are the version's.
    """
    assert manifest.anchor is not None
    seen: set[str] = set()
    sums = np.zeros((len(schema.tensors), 2), dtype=np.uint64)
    sizes = np.array(schema.sizes, dtype=np.int64)
    for wanted in manifest.anchor.payloads:
        with downloading(store, wanted, folder / wanted.key.rpartition("/")[2]) as passing:
            header, runs = tensor_file.read_runs(wanted.key, wanted.size, passing)
            _admitted(wanted.key, header, manifest, schema.by_name(), seen)
            places = np.array([schema.places[name] for name in header.names], dtype=np.int64)
            for some, values in runs:
                its = places[some]
                sums[its] = np.stack(elements.sum_each(values, sizes[its]), axis=1)
    _check_complete(manifest, schema.by_name(), seen)
    return sums


def _mapped(
    lend: Callable[[Store, Payload], BinaryIO], store: Store, payloads: Sequence[Payload]
) -> list[memoryview]:
    """Map files of a cache into memory, several at once; after a failure those not begun are left out."""

    def one(wanted: Payload) -> memoryview:
        with lend(store, wanted) as file:
            return in_memory(file)

    if len(payloads) == 1:
        return [one(payloads[0])]
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="patchstore-anchor") as pool:
        running = [pool.submit(one, wanted) for wanted in payloads]
        try:
            return [each.result() for each in running]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _admitted(
    where: str,
    header: tensor_file.FileHeader,
    manifest: Manifest,
    schema: Mapping[str, TensorSpec],
    seen: set[str],
) -> list[TensorSpec]:
    """Return the specs of a file of an anchor, and add them to `seen`, if the anchor may have them."""
    tensor_file.check_metadata(
        where, header, tensor_file.anchor_metadata(manifest.version, manifest.step, manifest.run_id)
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
