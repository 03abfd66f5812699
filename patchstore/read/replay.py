"""Rebuild any version, bit for bit, as a checkpoint folder.

An anchor's files are streamed through, tensor by tensor, with the deltas written into each tensor
on its way, on several threads: memory holds a few tensors, not the model. Nothing appears under the
output's name before every payload digest and the state digest have been checked.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from patchstore.errors import CorruptObject, UsageError, VersionNotFound
from patchstore.format import history, kept, lineage, tags
from patchstore.format.missing import PayloadMissing
from patchstore.format.records import Manifest, Plan, StoreHeader, TensorSpec
from patchstore.format.state_sums import read_sums
from patchstore.payloads import anchor_file, tensor_file
from patchstore.read import download
from patchstore.read.anchors import stream_anchor
from patchstore.read.deltas import Deltas, open_deltas
from patchstore.read.unfinished import flush, unfinished, write_file
from patchstore.retention.lease import Lease
from patchstore.signing.required import Keys, RequiredKeys, checks
from patchstore.stores import Store, opened
from patchstore.support import host
from patchstore.support.arguments import local_path, version_number
from patchstore.support.threads import Threads
from patchstore.tensors import state_digest
from patchstore.tensors.bits import batches

logger = logging.getLogger(__name__)

T = TypeVar("T")
Batch = list[tuple[TensorSpec, torch.Tensor]]

_MAX_THREADS = 8
_UNDER_WAY_BYTES = 256 << 20
"""Of tensors that threads rebuild at a time."""

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes in all."""


@host.asked("rebuilding a version", kinds=host.SHORT_OF_MEMORY)
def replay(
    store: Store | str | os.PathLike[str],
    version: int | str | None = None,
    *,
    out: str | os.PathLike[str],
    progress: Progress | None = None,
    required_keys: RequiredKeys | Keys | Sequence[Keys] | None = None,
) -> Manifest:
    """Write a version as a Hugging Face checkpoint folder.

    Args:
        store: an open store, or the URL or path of one.
        version: its number, or a tag; None for the head.
        out: a folder that does not exist yet. Its parent needs room for the checkpoint and the
            deltas.
        required_keys: PEM files with public keys, one of which must have signed the version.

    Returns:
        The version's manifest.

    Raises:
        UsageError: `out` exists, or cannot be created.
        VersionNotFound: no such version, or no such tag.
        VersionRetired: the version is retired, or was retired while it was read.
        WrongParent: the version cannot be reached from an anchor.
        CorruptObject, StateMismatch: the bucket's bytes are wrong. As after every error, nothing
            exists under `out`.
        Unsigned, WrongSignature: no required key has signed the version; no payload was read.
        HostError: there is no space for it, or the system refuses something else.
    """
    target = local_path("out", out)
    version = _version(version)
    required = RequiredKeys.of(required_keys)
    if os.path.lexists(target):
        raise UsageError(f"{target} exists; name a folder that does not")
    with opened(store) as source:
        return _replay(source, version, target, progress, required)


def _version(version: int | str | None) -> int | str | None:
    """Return a version's number, or a tag as it is. Raises UsageError before a store is opened."""
    if isinstance(version, str):
        return tags.check_name(version)
    return None if version is None else version_number(version)


def _kept(store: Store, version: int | str | None) -> int | None:
    """Return the number of a version, which is not retired; None for the head, which never is.

    Raises:
        VersionNotFound, VersionRetired
    """
    if version is None:
        return None
    number = tags.version_of(store, version)
    kept.check(store, number)
    return number


def _replay(
    store: Store,
    version: int | str | None,
    target: Path,
    progress: Progress | None,
    required: RequiredKeys | None,
) -> Manifest:
    def rebuild(header: StoreHeader, route: Plan) -> None:
        assert route.anchor is not None and route.anchor.anchor is not None
        with unfinished(target, is_folder=True) as partial:
            metadata = anchor_file.anchor_metadata(route.target.version, route.target.step, header.run_id)
            for name, specs, tensors in _files(store, header, route, partial, progress):
                write_file(partial / name, tensor_file.write(specs, tensors, metadata))
            for wanted in route.anchor.anchor.files:
                download.download(store, wanted, partial / wanted.key.rsplit("/", 1)[1])
            for path in (*partial.iterdir(), partial):
                flush(path)

    return _rebuilt(store, _kept(store, version), required, rebuild)


def _rebuilt(
    store: Store,
    version: int | None,
    required: RequiredKeys | None,
    rebuild: Callable[[StoreHeader, Plan], None],
) -> Manifest:
    """Have a version rebuilt, under a lease; if the way leads over deleted payloads, from the nearest anchor.

    Raises:
        VersionRetired: it was retired meanwhile.
    """
    header, route = route_to(store, version, required)
    number = route.target.version
    with kept.explained(store, number), Lease(store, header.run_id, [number]):
        try:
            rebuild(header, route)
        except PayloadMissing as exc:
            _, around = route_to(store, number, required, over_rollups=False)
            if around == route or not kept.is_given_up(store, exc):
                raise
            logger.warning("version %d is rebuilt in another way: %s", number, exc)
            rebuild(header, around)
    return route.target


@host.asked("rebuilding a version", kinds=host.SHORT_OF_MEMORY)
def verify(
    store: Store | str | os.PathLike[str],
    version: int | str | None = None,
    *,
    progress: Progress | None = None,
    required_keys: RequiredKeys | Keys | Sequence[Keys] | None = None,
) -> Manifest:
    """Rebuild a version without keeping it, and check every object it names, needed for that or not.

    Checks the chain of manifests from it back to its anchor, and from there to the anchor's parent.

    Args:
        store: an open store, or the URL or path of one.
        version: its number, or a tag; None for the head.
        required_keys: PEM files with public keys, one of which must have signed the version.

    Raises:
        As `replay`.
    """
    version = _version(version)
    required = RequiredKeys.of(required_keys)
    with opened(store) as source:
        return _verify(source, version, progress, required)


def _verify(
    store: Store, version: int | str | None, progress: Progress | None, required: RequiredKeys | None
) -> Manifest:
    def rebuild(header: StoreHeader, route: Plan) -> None:
        _verify_route(store, header, route, progress)

    return _rebuilt(store, _kept(store, version), required, rebuild)


def _verify_route(store: Store, header: StoreHeader, route: Plan, progress: Progress | None) -> None:
    assert route.anchor is not None and route.anchor.anchor is not None
    if route.anchor.parent is not None:
        # Rebuilding needs nothing that is older, but the anchor's version claims to descend from it.
        history.read_parent(store, route.anchor)
    deque(tensors_of(store, header, route, progress), maxlen=0)
    # They combine to the total, like those of the rebuilt tensors, so each tensor's sums are the same too.
    read_sums(store, header.schema, route.target)
    for wanted in route.anchor.anchor.files:
        deque(download.chunks(store, wanted), maxlen=0)
    if route.target.delta is not None and route.target not in route.deltas:
        # Rebuilding did not need the delta, but readers at the parent take it.
        assert route.target.parent is not None, "a manifest with a delta has a parent"
        _, before = route_to(store, route.target.parent)
        by_delta = replace(before, target=route.target, deltas=(*before.deltas, route.target))
        try:
            deque(tensors_of(store, header, by_delta), maxlen=0)
        except PayloadMissing as exc:
            # No reader can be at the parent any more, if what it was rebuilt from was given up.
            if not kept.is_of_retired(store, exc):
                raise


def tensors_of(
    store: Store, header: StoreHeader, route: Plan, progress: Progress | None = None
) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Rebuild the tensors of a version, in the order of its anchor's files; few are in memory at a time.

    Raises:
        CorruptObject, StateMismatch: the bucket's bytes are wrong; only known at the end.
    """
    for _, specs, tensors in _files(store, header, route, None, progress):
        yield from zip(specs, tensors, strict=True)


def route_to(
    store: Store,
    version: int | None,
    required: RequiredKeys | None = None,
    *,
    over_rollups: bool = True,
) -> tuple[StoreHeader, Plan]:
    """Return the run, and how to rebuild a version from its nearest anchor; None for the head.

    Args:
        over_rollups: see `lineage.read`.

    Raises:
        VersionNotFound, WrongParent
        Unsigned, WrongSignature: keys are required, and none has signed the version.
    """
    header = history.read_header(store)
    if header is None:
        raise VersionNotFound(f"{store.url} holds no run")
    if version is None:
        newest = history.head(store)
        if newest is None:
            raise VersionNotFound(f"{store.url} has no version yet")
        version = newest.version
    check = checks(required, store, header)
    route = lineage.read(store, version, check=check, over_rollups=over_rollups).plan()
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

        def work(batch: Batch) -> tuple[Batch, dict[str, state_digest.Sums]]:
            deltas.apply(batch)
            return batch, state_digest.of_named({spec.name: tensor for spec, tensor in batch})

        for batch, found in _beside(work, batches(specs, tensors)):
            sums.update(found)
            for spec, tensor in batch:
                yield tensor
                done += spec.num_bytes
                if progress is not None:
                    progress(done, header.schema.num_bytes)

    with open_deltas(store, route.deltas, schema, scratch) as deltas:
        for name, specs, tensors in stream_anchor(store, route.anchor, schema):
            yield name, specs, patched(specs, tensors, deltas)
    state_digest.check_state(store, header.schema, sums, route.target)


def _beside(work: Callable[[Batch], T], given: Iterable[Batch]) -> Iterator[T]:
    """Work on batches on several threads; yield the results in order.

    At most `_UNDER_WAY_BYTES` are under way, or one batch.
    """
    under_way: deque[tuple[int, Future[T]]] = deque()
    held = 0
    with Threads(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="patchstore-replay") as pool:
        for batch in given:
            num_bytes = sum(spec.num_bytes for spec, _ in batch)
            while under_way and held + num_bytes > _UNDER_WAY_BYTES:
                held -= under_way[0][0]
                # Kept by no name here: the caller may be done with it before the next one is due.
                yield under_way.popleft()[1].result()
            under_way.append((num_bytes, pool.submit(work, batch)))
            held += num_bytes
            del batch
        while under_way:
            yield under_way.popleft()[1].result()
