"""The history of versions: reading manifests, finding the head, and the one create that commits.

A manifest's key (its slot) is created once and never removed. Every client library may report its own
successful create as "already exists" (it retried after a lost answer), and bytes may be damaged on the way.
So after a commit the slot is read back, and what was damaged is replaced before anybody is told.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TypeVar

from patchstore.bucket import digests, manifest_json
from patchstore.bucket.manifest_json import MAX_JSON_BYTES
from patchstore.bucket.records import Manifest, StoreHeader
from patchstore.errors import (
    AlreadyExists,
    CorruptObject,
    DataError,
    NotFound,
    RunExists,
    SchemaMismatch,
    StoreReplaced,
    StoreUnavailable,
    UsageError,
    VersionConflict,
    VersionNotFound,
)
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.support import collector, host
from patchstore.support.arguments import version_number
from patchstore.support.threads import Threads

logger = logging.getLogger(__name__)

_REPAIRS = 3
_FIRST_BYTES = 1 << 20
"""Size of the first request for a JSON object; few are larger."""
READ_AHEAD = 8
"""At most this many manifests are read at once, where many are read one after the other."""

Check = Callable[[Manifest, bytes], None]
"""Raises if a version must not be used; gets its manifest, and the bytes that it was read from."""

_Value = TypeVar("_Value", Manifest, StoreHeader)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def create_header(store: Store, header: StoreHeader) -> str:
    """Create a run, and return the digest of its header as it is stored."""
    try:
        data = _spelled(header, manifest_json.header_to_json, manifest_json.header_from_json)
    except UsageError as exc:
        raise SchemaMismatch(
            f"a run of these tensors cannot be created, as no reader would open it: {exc}"
        ) from exc
    there = create(store, layout.HEADER, data)
    if there != data and (found := manifest_json.header_from_json(there)).run_id != header.run_id:
        raise RunExists(
            f"{store.url} already holds run {found.run_id}, created {found.created_at}; "
            "use another prefix, or open the publisher with resume=... to go on with that run"
        )
    return digests.digest(there)


def read_header(store: Store) -> StoreHeader | None:
    """Return the header of the run at this prefix, or None where there is no run."""
    data = stored_header(store)
    return None if data is None else manifest_json.header_from_json(data)


def run_header(store: Store) -> StoreHeader:
    """Return the header of the run at this prefix. Raises VersionNotFound where there is no run."""
    header = read_header(store)
    if header is None:
        path = None if "://" in store.url else Path(store.url)
        what = "is no folder" if path is not None and not path.is_dir() else "holds no run"
        raise VersionNotFound(f"{store.url} {what}; check the URL, or publish a version there")
    return header


def stored_header(store: Store) -> bytes | None:
    """Return `store.json` byte for byte, or None where there is no run."""
    try:
        return _bounded(store, layout.HEADER)
    except NotFound as exc:
        with host.reading(layout.VERSIONS):
            listed = store.list(layout.VERSIONS)
            left = next((key for key in listed if layout.manifest_version(key) is not None), None)
        if left is not None:
            raise CorruptObject(
                f"{store.url} has {left} but no {layout.HEADER}, which was removed: put it back, or use "
                "another place"
            ) from exc
        return None


def read_manifest(store: Store, version: int) -> Manifest:
    """Return a version's manifest. Raises VersionNotFound where it is not committed."""
    return read_stored(store, version)[0]


def stored_digest(store: Store, version: int) -> str:
    """Digest of a manifest as it is stored, which the next version names as its `parent_digest`.

    Not of the manifest written again: another release may have written fields that this one drops.
    """
    return digests.digest(stored(store, version))


def stored(store: Store, version: int) -> bytes:
    """Return a manifest byte for byte; what it says is not checked. Raises VersionNotFound."""
    key = layout.manifest_key(version)
    try:
        return _bounded(store, key)
    except NotFound as exc:
        raise VersionNotFound(f"{store.url} has no version {version}") from exc


def read_stored(store: Store, version: int) -> tuple[Manifest, bytes]:
    """Return a manifest, and its bytes as they are stored. Raises VersionNotFound."""
    data = stored(store, version)
    return manifest_json.from_json(layout.manifest_key(version), data), data


def read_back(store: Store, newest: int, oldest: int = 0) -> Generator[Manifest, None, None]:
    """Yield all versions from the newest to the oldest, one in each slot, whatever their parents are."""
    for found, _ in _read_back(store, version_number(newest), oldest):
        yield found


def _read_back(store: Store, newest: int, oldest: int) -> Generator[tuple[Manifest, bytes], None, None]:
    """Yield manifests and their bytes, and read ahead: not at first, and one further with each one taken.

    Most callers take one or two. A caller that takes thousands must not wait for each. So fewer are read for
    nothing than were taken.
    """
    with Threads(READ_AHEAD, thread_name_prefix="patchstore-log") as pool:
        reads: deque[Future[tuple[Manifest, bytes]]] = deque()
        versions, width = iter(range(newest, oldest - 1, -1)), 1
        while True:
            for version in islice(versions, width - len(reads)):
                reads.append(pool.submit(read_stored, store, version))
            if not reads:
                return
            yield reads.popleft().result()
            width = min(width + 1, READ_AHEAD)


def read_many(read: Callable[[_Item], _Result], wanted: Iterable[_Item]) -> list[_Result]:
    """Read some things at the same time, and return what was read in their order."""
    ordered = [*wanted]
    if not ordered:
        return []
    with ThreadPoolExecutor(min(READ_AHEAD, len(ordered)), "patchstore-read") as pool:
        return [*pool.map(read, ordered)]


def small(store: Store, key: str, max_bytes: int) -> bytes:
    """Read an object of at most so many bytes; if it is larger, one byte more, so that it is noticed."""
    with host.reading(key):
        return store.get(key, 0, max_bytes + 1)


def _bounded(store: Store, key: str) -> bytes:
    """Read a JSON object; if it is too large, just enough to notice that."""
    with host.reading(key):
        # A store allows more time for a request that may return more bytes, so request few at first.
        data = store.get(key, 0, _FIRST_BYTES)
        return data if len(data) < _FIRST_BYTES else store.get(key, 0, MAX_JSON_BYTES + 1)


def head(store: Store, hint: int | None = None) -> Manifest | None:
    """Return the highest committed version's manifest, or None where nothing is committed.

    Costs three reads if `hint` or `head.json` is right: that object, the slot, and the empty slot after it;
    one more for each version that both are behind. Without either, the versions are listed once. A hint is
    never believed without its manifest.
    """
    found = None
    for guess in sorted({guess for guess in (hint, _stored_hint(store)) if guess is not None}, reverse=True):
        try:
            found = read_manifest(store, guess)
            break
        except VersionNotFound:
            continue
    if found is None:
        # Listings may lag, so a listing is where the search starts, and not the answer.
        try:
            found = read_manifest(store, max(listed(store), default=0))
        except VersionNotFound:
            return None
    while (later := following(store, found)) is not None:
        found = later
    return found


def no_version(store: Store) -> VersionNotFound:
    """Return the error about a run before its first version."""
    return VersionNotFound(f"{store.url} holds a run that has no version yet; publish one")


def newest_slot(store: Store, hint: int | None = None) -> int | None:
    """Return the number of the newest version, also where its manifest is damaged; None before the first."""
    try:
        found = head(store, hint)
    except DataError:
        # Perhaps the newest manifest itself is damaged. The keys of manifests also tell their versions.
        if not (there := listed(store)):
            raise
        return max(there)
    return None if found is None else found.version


def listed(store: Store) -> list[int]:
    """Return the versions whose manifests a listing shows, in ascending order of their keys."""
    with host.reading(layout.VERSIONS):
        found = [layout.manifest_version(key) for key in store.list(layout.VERSIONS)]
    return [version for version in found if version is not None]


def check_run(store: Store, found: StoreHeader | Manifest | None, known: str, then: str) -> None:
    """Check that a store still holds the run that its reader knows: versions of each run count from 0.

    Args:
        then: what was left as it is, and what to do.
    """
    if found is None or found.run_id != known:
        there = "no run" if found is None else f"run {found.run_id}"
        raise StoreReplaced(
            f"{store.url} has {there} now, and had run {known}: its objects were removed or replaced. {then}"
        )


def check_same_run(store: Store, found: Manifest, run_id: str) -> None:
    """Check that a version is of the run that the store's header names."""
    if found.run_id != run_id:
        raise CorruptObject(
            f"version {found.version} of {store.url} is of run {found.run_id}, but the store of run {run_id}"
        )


def following(store: Store, found: Manifest) -> Manifest | None:
    """Return the version in the slot after this one, or None while there is nothing new."""
    try:
        return read_manifest(store, found.version + 1)
    except VersionNotFound:
        return None


def check_newest(store: Store, newest: Manifest | None) -> None:
    """Check that the versions do not end before the one that `head.json` names, which is written after it."""
    hint = _stored_hint(store)
    if hint is None or (newest is not None and newest.version >= hint):
        return
    try:
        # Perhaps it was committed since `newest` was found.
        read_manifest(store, 0 if newest is None else newest.version + 1)
    except VersionNotFound as exc:
        there = "there is none" if newest is None else f"the newest is {newest.version}"
        raise CorruptObject(
            f"{store.url}: {layout.HEAD} names version {hint}, but {there}: versions were removed. Put them "
            f"back, or use another prefix; if only {layout.HEAD} is wrong, delete it"
        ) from exc


def _stored_hint(store: Store) -> int | None:
    try:
        data = small(store, layout.HEAD, manifest_json.MAX_HINT_BYTES)
    except NotFound:
        return None
    return manifest_json.hint_from_json(data)


def write_hint(store: Store, version: int) -> None:
    """Tell readers where the head was; without it they need a listing, nothing else."""
    store.put(layout.HEAD, manifest_json.hint_to_json(version))


def ancestry(
    store: Store, target: int, held: int | None = None, check: Check | None = None
) -> Generator[Manifest, None, None]:
    """Yield a version and its ancestors, newest first, each as its child names it.

    Args:
        held: the ancestor beyond which the caller will probably not go, if known: no reading ahead beyond it.
        check: is called with the target; the digests that children name then cover its ancestors.
    """
    child: Manifest | None = None
    at: int | None = version_number(target)
    # It ends: each round yields at least version `at`, whose parent is older, or it would be no manifest.
    while at is not None:
        # Nearly always each is the parent of the version in the next slot, except where a trainer went back.
        oldest = held if held is not None and held <= at else 0
        with closing(_read_back(store, at, oldest)) as versions:
            for found, data in versions:
                if child is not None:
                    check_parent(child, found, data)
                elif check is not None:
                    check(found, data)
                yield found
                child, at = found, found.parent
                if at != found.version - 1:
                    break


def read_parent(store: Store, child: Manifest) -> Manifest:
    """Return the manifest of a version's parent, which it must have."""
    assert child.parent is not None
    parent, data = read_stored(store, child.parent)
    check_parent(child, parent, data)
    return parent


def check_parent(child: Manifest, parent: Manifest, data: bytes) -> None:
    if digests.digest(data) != child.parent_digest:
        raise CorruptObject(
            f"{layout.manifest_key(parent.version)} is not the manifest that version {child.version} "
            f"names as its parent: expected {child.parent_digest}, found {digests.digest(data)}"
        )
    if parent.run_id != child.run_id or parent.writer.epoch > child.writer.epoch:
        raise CorruptObject(
            f"version {child.version} (run {child.run_id}, epoch {child.writer.epoch}) cannot descend "
            f"from version {parent.version} (run {parent.run_id}, epoch {parent.writer.epoch})"
        )


def commit(store: Store, new: Manifest, earlier: Sequence[Manifest] = ()) -> None:
    """Make a version exist. Its payloads must be stored already.

    Args:
        earlier: attempts of the same writer at the same version, any of which may have taken place. One that
            was damaged on the way is replaced: no reader was told that it exists.

    Raises:
        UsageError: a reader would refuse the manifest, or read it as another; nothing was created.
        VersionConflict: another writer has the slot; this writer is fenced and must stop.
        CorruptObject: the slot has one of these attempts with damaged bytes, which could not be replaced.
        StoreUnavailable: no answer, and the slot is still empty or cannot be read; calling again
            with the same manifest is safe.
    """
    key = layout.manifest_key(new.version)
    data = _spelled(new, manifest_json.to_json, lambda spelled: manifest_json.from_json(key, spelled))
    # Readers believe a version exists once its manifest does, so this comes last and never overwrites.
    there = create(store, key, data)
    is_an_attempt = there in {data, *map(manifest_json.to_json, earlier)}
    if not is_an_attempt and any(each.writer.write_id.encode() in there for each in (new, *earlier)):
        # It has the id of an attempt, so it is one that was damaged.
        there = _repaired(store, key, data)
    if there != data:
        raise VersionConflict(
            f"version {new.version} was committed by {_author(key, there)}, not by {new.writer.id} "
            f"(epoch {new.writer.epoch}); another publisher has this run: stop this one"
        )


class Vanished(StoreUnavailable):
    """An object was created and is not there: a fault of the store, unless collectors delete such objects."""


def create(store: Store, key: str, data: bytes) -> bytes:
    """Create a small object unless its key is taken; return what is stored under the key then.

    All objects that are created only once come from here, and each is read back: a store may have taken bytes
    that were damaged on the way, and this key will never be free again.

    Raises:
        CorruptObject: this call created it, but with other bytes, and those could not be replaced.
        Vanished: this call created it, and it is not there.
        StoreUnavailable: no answer, and the key is still free or cannot be read; calling again with the same
            bytes is safe.
    """
    failure: AlreadyExists | StoreUnavailable | None = None
    try:
        store.put(key, data, if_absent=True)
    except (AlreadyExists, StoreUnavailable) as exc:
        failure = exc
    try:
        there = _bounded(store, key)
        # Where the store relies on a promise of one writer, it may be the object of another.
        if failure is None and there != data and not store.single_writer:
            there = _repaired(store, key, data)
    except NotFound as exc:
        if failure is None:
            raise Vanished(f"{key} was not stored: the store took it, but does not show it") from exc
        raise StoreUnavailable(f"{key} was not stored: {failure}") from exc
    # After a lost answer it may be ours or another's.
    return there


def _repaired(store: Store, key: str, data: bytes) -> bytes:
    """Replace an object that this process has just created, as it reads back with other bytes.

    No other process has created it. A put in its place never leaves the key free; were it deleted first, a
    publisher that was fenced could take it.
    """
    for attempt in range(_REPAIRS + 1):
        # At first once more, as perhaps only the answer was damaged.
        if attempt:
            logger.warning("%s: %s was stored with other bytes than were sent; sent again", store.url, key)
            store.put(key, data)
        if _bounded(store, key) == data:
            return data
    raise CorruptObject(
        f"{store.url}: {key} is stored with other bytes than were sent, also after {_REPAIRS} more attempts, "
        "so what it stands for did not take place: something on the way to the store damages bytes, and the "
        "store does not compare their checksum. Use https://, and see what `patchstore doctor` says; if "
        "this process does not try again, delete the object by hand"
    )


def _author(key: str, data: bytes) -> str:
    try:
        writer = manifest_json.from_json(key, data).writer
    except DataError:
        return "a publisher of another release"
    return f"{writer.id} (epoch {writer.epoch})"


@collector.paused()
def _spelled(value: _Value, spell: Callable[[_Value], bytes], read: Callable[[bytes], _Value]) -> bytes:
    """Return the JSON of an object to create, and check that readers will read the same."""
    try:
        data = spell(value)
        found = read(data)
    except (DataError, TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise UsageError(f"not stored, as readers would refuse it: {exc}") from exc
    if found != value:
        raise UsageError(
            f"not stored, as readers would take it for {found!r:.300}, and not for {value!r:.300}"
        )
    return data
