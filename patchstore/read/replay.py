"""Rebuild any version, bit for bit, as a checkpoint folder.

An anchor's files are streamed through, tensor by tensor, with the deltas written into each tensor
on its way: memory holds one tensor or some small ones, not the model. Nothing appears under the
output's name before every payload digest and the state digest have been checked.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from patchstore.errors import CorruptObject, UsageError, VersionNotFound
from patchstore.format import history, planning
from patchstore.format.records import Manifest, Plan, StoreHeader, TensorSpec
from patchstore.format.state_sums import read_sums
from patchstore.payloads import anchor_file, tensor_file
from patchstore.read import download
from patchstore.read.anchors import stream_anchor
from patchstore.read.deltas import Deltas, open_deltas
from patchstore.read.unfinished import flush, unfinished, write_file
from patchstore.stores import Store, opened
from patchstore.support import host
from patchstore.support.arguments import local_path, version_number
from patchstore.tensors import state_digest
from patchstore.tensors.bits import batches

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes in all."""


@host.asked("rebuilding a version", kinds=host.SHORT_OF_MEMORY)
def replay(
    store: Store | str | os.PathLike[str],
    version: int | None = None,
    *,
    out: str | os.PathLike[str],
    progress: Progress | None = None,
) -> Manifest:
    """Write a version as a Hugging Face checkpoint folder.

    Args:
        store: an open store, or the URL or path of one.
        version: None for the head.
        out: a folder that does not exist yet. Its parent needs room for the checkpoint and the
            deltas.

    Returns:
        The version's manifest.

    Raises:
        UsageError: `out` exists, or cannot be created.
        VersionNotFound: no such version.
        WrongParent: the version cannot be reached from an anchor.
        CorruptObject, StateMismatch: the bucket's bytes are wrong. As after every error, nothing
            exists under `out`.
        HostError: there is no space for it, or the system refuses something else.
    """
    target = local_path("out", out)
    version = None if version is None else version_number(version)
    if os.path.lexists(target):
        raise UsageError(f"{target} exists; name a folder that does not")
    with opened(store) as source:
        return _replay(source, version, target, progress)


def _replay(store: Store, version: int | None, target: Path, progress: Progress | None) -> Manifest:
    header, route = route_to(store, version)
    assert route.anchor is not None and route.anchor.anchor is not None
    with unfinished(target, is_folder=True) as partial:
        metadata = anchor_file.anchor_metadata(route.target.version, route.target.step, header.run_id)
        for name, specs, tensors in _files(store, header, route, partial, progress):
            write_file(partial / name, tensor_file.write(specs, tensors, metadata))
        for wanted in route.anchor.anchor.files:
            download.download(store, wanted, partial / wanted.key.rsplit("/", 1)[1])
        for path in (*partial.iterdir(), partial):
            flush(path)
    return route.target


@host.asked("rebuilding a version", kinds=host.SHORT_OF_MEMORY)
def verify(
    store: Store | str | os.PathLike[str], version: int | None = None, *, progress: Progress | None = None
) -> Manifest:
    """Rebuild a version without keeping it, and check every object it names, needed for that or not.

    Checks the chain of manifests from it back to its anchor, and from there to the anchor's parent.

    Args:
        store: an open store, or the URL or path of one.
        version: None for the head.

    Raises:
        As `replay`.
    """
    version = None if version is None else version_number(version)
    with opened(store) as source:
        return _verify(source, version, progress)


def _verify(store: Store, version: int | None, progress: Progress | None) -> Manifest:
    header, route = route_to(store, version)
    assert route.anchor is not None and route.anchor.anchor is not None
    if route.anchor.parent is not None:
        # Rebuilding needs nothing that is older, but the anchor's version claims to descend from it.
        history.read_parent(store, route.anchor)
    deque(tensors_of(store, header, route, progress), maxlen=0)
    # They combine to the total, like those of the rebuilt tensors, so each tensor's sums are the same too.
    read_sums(store, header.schema, route.target)
    for wanted in route.anchor.anchor.files:
        deque(download.chunks(store, wanted), maxlen=0)
    if route.target == route.anchor and route.target.delta is not None:
        # Rebuilding started from the anchor, but readers at the parent take the delta.
        assert route.target.parent is not None, "a manifest with a delta has a parent"
        _, before = route_to(store, route.target.parent)
        by_delta = replace(before, target=route.target, deltas=(*before.deltas, route.target))
        deque(tensors_of(store, header, by_delta), maxlen=0)
    return route.target


def tensors_of(
    store: Store, header: StoreHeader, route: Plan, progress: Progress | None = None
) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Rebuild the tensors of a version, in the order of its anchor's files; few are in memory at a time.

    Raises:
        CorruptObject, StateMismatch: the bucket's bytes are wrong; only known at the end.
    """
    for _, specs, tensors in _files(store, header, route, None, progress):
        yield from zip(specs, tensors, strict=True)


def route_to(store: Store, version: int | None) -> tuple[StoreHeader, Plan]:
    """Return the run, and how to rebuild a version from its nearest anchor; None for the head.

    Raises:
        VersionNotFound, WrongParent
    """
    header = history.read_header(store)
    if header is None:
        raise VersionNotFound(f"{store.url} holds no run")
    if version is None:
        newest = history.head(store)
        if newest is None:
            raise VersionNotFound(f"{store.url} has no version yet")
        version = newest.version
    route = planning.plan(history.read_lineage(store, version), None, version)
    if route.target.run_id != header.run_id:
        raise CorruptObject(
            f"version {version} is of run {route.target.run_id}, but the store of run {header.run_id}"
        )
    return header, route


def _files(
    store: Store, header: StoreHeader, route: Plan, scratch: Path | None, progress: Progress | None
) -> Iterator[tuple[str, list[TensorSpec], Iterator[torch.Tensor]]]:
    """Yield each file of the version: its name, the specs of its tensors, and the tensors in that order.

    All tensors of a file must be taken before the next file. The digests have been checked when
    this iterator ends, and not before.
    """
    assert route.anchor is not None
    schema = header.schema.by_name()
    sums: dict[str, state_digest.Sums] = {}
    done = 0

    def patched(
        specs: list[TensorSpec], tensors: Iterator[torch.Tensor], deltas: Deltas
    ) -> Iterator[torch.Tensor]:
        nonlocal done
        for batch in batches(specs, tensors):
            deltas.apply(batch)
            sums.update(state_digest.of_named({spec.name: tensor for spec, tensor in batch}))
            for spec, tensor in batch:
                yield tensor
                done += spec.num_bytes
                if progress is not None:
                    progress(done, header.schema.num_bytes)

    with open_deltas(store, route.deltas, schema, scratch) as deltas:
        for name, specs, tensors in stream_anchor(store, route.anchor, schema):
            yield name, specs, patched(specs, tensors, deltas)
    state_digest.check_state(store, header.schema, sums, route.target)
