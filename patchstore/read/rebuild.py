"""Rebuild the tensors of a version: stream an anchor, write deltas into each tensor, and count its digest.

Tensors pass one after the other, on several threads: memory holds a few of them, not the model. What was
yielded must not be trusted before the digests are checked at the end.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch

from patchstore.bucket.records import Manifest, Plan, Schema, StoreHeader, TensorSpec
from patchstore.bucket.state_sums import Sums, SumsArray
from patchstore.read import download
from patchstore.read.anchors import stream_anchor
from patchstore.read.deltas import Deltas, open_deltas
from patchstore.read.run import Run
from patchstore.stores.base import Store
from patchstore.support.threads import Threads
from patchstore.tensors import state_digest
from patchstore.tensors.bits import batches

T = TypeVar("T")
Batch = list[tuple[TensorSpec, torch.Tensor]]
Rebuilt = tuple[Batch, dict[str, Sums]]
"""A batch as the version has it, and the digest sums of its tensors by name."""
File = tuple[str, list[TensorSpec], Iterator[torch.Tensor]]
"""The name of a file of an anchor, its tensors, and their values in the same order."""

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes in all."""

MAX_THREADS = 8
UNDER_WAY_BYTES = 256 << 20
"""Of tensors that threads rebuild at a time."""


class Elsewhere(Protocol):
    """Rebuilds batches in other memory than the anchor's, which stays as it is. Several threads call it."""

    together: int
    """See `batches`."""
    under_way_bytes: int
    """Of tensors that are rebuilt at a time."""

    def __call__(self, batch: Batch) -> Rebuilt:
        """Rebuild a batch. Raises torch.OutOfMemoryError: there is no room for it."""


def rebuild(
    run: Run, route: Plan, scratch: Path | None = None, progress: Progress | None = None
) -> Iterator[File]:
    """Yield each file of the version that a plan leads to, verified once this iterator ends.

    All tensors of a file must be taken before the next file.
    """
    assert route.anchor is not None
    sums = np.zeros((len(run.schema.tensors), 2), dtype=np.uint64)
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, run.schema.num_bytes)

    files = stream_anchor(run.store, route.anchor, run.schema.by_name())
    with open_deltas(run.store, route.deltas, run.schema, scratch) as deltas:
        yield from patched(files, run.schema, deltas, sums, advance=advance)
    state_digest.check_state(run.store, run.schema, sums, route.target)


def patched(
    files: Iterable[File],
    schema: Schema,
    deltas: Deltas,
    sums: SumsArray,
    *,
    advance: Callable[[int], None] | None = None,
    elsewhere: Elsewhere | None = None,
) -> Iterator[File]:
    """`rebuild` with deltas that are open; fills `sums`, which the caller compares with the target's.

    Args:
        files: of an anchor; their tensors are written to, if not `elsewhere`.
        elsewhere: what it has no room for is rebuilt in host memory.
    """
    together, most = None, UNDER_WAY_BYTES
    if elsewhere is not None:
        together, most = elsewhere.together, elsewhere.under_way_bytes

    def here(batch: Batch) -> Rebuilt:
        deltas.apply(batch)
        return batch, state_digest.of_named({spec.name: tensor for spec, tensor in batch})

    def work(batch: Batch) -> Rebuilt:
        if elsewhere is not None:
            with suppress(torch.OutOfMemoryError):
                return elsewhere(batch)
            batch = [(spec, tensor.clone()) for spec, tensor in batch]
        return here(batch)

    def written(specs: list[TensorSpec], tensors: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        for batch, found in _beside(work, batches(specs, tensors, together), most):
            sums[[schema.places[name] for name in found]] = list(found.values())
            for spec, tensor in batch:
                yield tensor
                if advance is not None:
                    advance(spec.num_bytes)

    for name, specs, tensors in files:
        yield name, specs, written(specs, tensors)


def prove(run: Run, route: Plan, progress: Progress | None = None) -> None:
    """Rebuild a version without keeping it. Raises CorruptObject, StateMismatch."""
    for _, _, tensors in rebuild(run, route, progress=progress):
        deque(tensors, maxlen=0)


def check_anchor(store: Store, header: StoreHeader, manifest: Manifest) -> None:
    """Read all files of an anchor, and compare its weights with the state digest."""
    assert manifest.anchor is not None
    prove(Run(store, header), Plan(held=None, target=manifest, anchor=manifest, deltas=()))
    for wanted in manifest.anchor.files:
        download.check(store, wanted)


def _beside(work: Callable[[Batch], T], given: Iterable[Batch], most: int) -> Iterator[T]:
    """Work on batches on several threads; yield the results in order.

    At most so many bytes are under way, or one batch.
    """
    under_way: deque[tuple[int, Future[T]]] = deque()
    held = 0
    with Threads(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="patchstore-rebuild") as pool:
        for batch in given:
            num_bytes = sum(spec.num_bytes for spec, _ in batch)
            while under_way and held + num_bytes > most:
                held -= under_way[0][0]
                # Kept by no name here: the caller may be done with it before the next one is due.
                yield under_way.popleft()[1].result()
            under_way.append((num_bytes, pool.submit(work, batch)))
            held += num_bytes
            del batch
        while under_way:
            yield under_way.popleft()[1].result()
