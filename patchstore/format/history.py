"""The history of versions: reading manifests, finding the head, and the one create that commits.

A manifest's key (its slot) is created once and never written or removed again. Every client library may
report its own successful create as "already exists" (it retried after a lost answer). So after a commit that
was refused or got no answer, the slot is read back.
"""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import closing
from itertools import islice
from typing import TypeVar

from patchstore.errors import (
    AlreadyExists,
    CorruptObject,
    DataError,
    NotFound,
    RunExists,
    SchemaMismatch,
    StoreUnavailable,
    UsageError,
    VersionConflict,
    VersionNotFound,
)
from patchstore.format import hashing, layout, manifest_json
from patchstore.format.json_fields import MAX_JSON_BYTES
from patchstore.format.records import Manifest, StoreHeader
from patchstore.stores.base import Store
from patchstore.support import host
from patchstore.support.threads import Threads

_FIRST_BYTES = 1 << 20
"""Size of the first request for a JSON object; few are larger."""
READ_AHEAD = 8
"""At most so many manifests are read at once, if many are read one after the other."""

Check = Callable[[Manifest, bytes], None]
"""Raises if a version must not be used; gets its manifest, and the bytes that it was read from."""

_Value = TypeVar("_Value", Manifest, StoreHeader)


def create_header(store: Store, header: StoreHeader) -> None:
    """Create a run.

    Raises:
        RunExists: the prefix holds another run; nothing was changed.
        SchemaMismatch: readers would refuse the schema; nothing was created.
        StoreUnavailable: unknown whether it was created.
    """
    try:
        data = _spelled(header, manifest_json.header_to_json, manifest_json.header_from_json)
    except UsageError as exc:
        raise SchemaMismatch(
            f"a run of these tensors cannot be created, as no reader would open it: {exc}"
        ) from exc
    try:
        store.put(layout.HEADER, data, if_absent=True)
    except (AlreadyExists, StoreUnavailable) as exc:
        found = read_header(store)
        if found is None:
            raise
        if found.run_id != header.run_id:
            raise RunExists(
                f"{store.url} already holds run {found.run_id}, created {found.created_at}; "
                "use another prefix, or open the publisher with resume=... to go on with that run"
            ) from exc


def read_header(store: Store) -> StoreHeader | None:
    """Return the header of the run at this prefix, or None where there is no run.

    Raises:
        CorruptObject, UnsupportedFormat: `store.json` is invalid, or missing although there are versions.
    """
    data = stored_header(store)
    return None if data is None else manifest_json.header_from_json(data)


def stored_header(store: Store) -> bytes | None:
    """Return `store.json` byte for byte, or None where there is no run.

    Raises:
        CorruptObject: it is missing although there are versions.
    """
    try:
        return _bounded(store, layout.HEADER)
    except NotFound as exc:
        with host.reading(layout.VERSIONS):
            left = next(iter(store.list(layout.VERSIONS)), None)
        if left is not None:
            raise CorruptObject(
                f"{store.url} has {left} but no {layout.HEADER}, which was removed: put it back, or use "
                "another place"
            ) from exc
        return None


def read_manifest(store: Store, version: int) -> Manifest:
    """Return a version's manifest.

    Raises:
        VersionNotFound: not committed.
        CorruptObject, UnsupportedFormat: the object cannot be understood.
    """
    return read_stored(store, version)[0]


def stored_digest(store: Store, version: int) -> str:
    """Digest of a manifest as it is stored, which the next version names as its `parent_digest`.

    Not of the manifest written again: another release may have written fields that this one drops.

    Raises:
        VersionNotFound: not committed.
    """
    return hashing.digest(stored(store, version))


def stored(store: Store, version: int) -> bytes:
    """Return a manifest byte for byte; what it says is not checked.

    Raises:
        VersionNotFound: not committed.
    """
    try:
        return _bounded(store, layout.manifest_key(version))
    except NotFound as exc:
        raise VersionNotFound(f"{store.url} has no version {version}") from exc


def read_stored(store: Store, version: int) -> tuple[Manifest, bytes]:
    """Return a manifest, and its bytes as they are stored. Raises as `read_manifest`."""
    data = stored(store, version)
    return manifest_json.from_json(layout.manifest_key(version), data), data


def read_back(store: Store, newest: int, oldest: int = 0) -> Generator[Manifest, None, None]:
    """Yield all versions from the newest to the oldest, one in each slot, whatever their parents are.

    Raises:
        As `read_manifest`, when it is that version's turn.
    """
    for found, _ in _read_back(store, newest, oldest):
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
        with host.reading(layout.VERSIONS):
            listed = [layout.manifest_version(key) for key in store.list(layout.VERSIONS)]
        last = max((version for version in listed if version is not None), default=None)
        try:
            found = read_manifest(store, 0 if last is None else last)
        except VersionNotFound:
            return None
    while (later := following(store, found)) is not None:
        found = later
    return found


def following(store: Store, found: Manifest) -> Manifest | None:
    """Return the version in the slot after this one, or None while there is nothing new."""
    try:
        return read_manifest(store, found.version + 1)
    except VersionNotFound:
        return None


def check_newest(store: Store, newest: Manifest | None) -> None:
    """Check that the versions do not end before the one that `head.json` names, which is written after it.

    Raises:
        CorruptObject: they do: the newest were removed.
    """
    hint = _stored_hint(store)
    if hint is not None and (newest is None or newest.version < hint):
        there = "there is none" if newest is None else f"the newest is {newest.version}"
        raise CorruptObject(
            f"{store.url}: {layout.HEAD} names version {hint}, but {there}: versions were removed. Put them "
            f"back, or use another prefix; if only {layout.HEAD} is wrong, delete it"
        )


def _stored_hint(store: Store) -> int | None:
    try:
        with host.reading(layout.HEAD):
            data = store.get(layout.HEAD, 0, manifest_json.MAX_HINT_BYTES + 1)
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

    Raises:
        VersionNotFound: an ancestor is not in the store.
        CorruptObject: a manifest is not the one its child was built on.
    """
    child: Manifest | None = None
    at: int | None = target
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
    """Return the manifest of a version's parent, which it must have.

    Raises:
        VersionNotFound: the store has none.
        CorruptObject: the one there has other bytes than the child names, is of another run, or of a later
            epoch.
    """
    assert child.parent is not None
    parent, data = read_stored(store, child.parent)
    check_parent(child, parent, data)
    return parent


def check_parent(child: Manifest, parent: Manifest, data: bytes) -> None:
    if hashing.digest(data) != child.parent_digest:
        raise CorruptObject(
            f"{layout.manifest_key(parent.version)} is not the manifest that version {child.version} "
            f"names as its parent: expected {child.parent_digest}, found {hashing.digest(data)}"
        )
    if parent.run_id != child.run_id or parent.writer.epoch > child.writer.epoch:
        raise CorruptObject(
            f"version {child.version} (run {child.run_id}, epoch {child.writer.epoch}) cannot descend "
            f"from version {parent.version} (run {parent.run_id}, epoch {parent.writer.epoch})"
        )


def commit(store: Store, new: Manifest) -> None:
    """Make a version exist. Its payloads must be stored already.

    Raises:
        UsageError: a reader would refuse the manifest, or read it as another; nothing was created.
        VersionConflict: another writer has the slot; this writer is fenced and must stop.
        StoreUnavailable: no answer, and the slot is still empty or cannot be read; calling again
            with the same manifest is safe.
    """
    key = layout.manifest_key(new.version)
    data = _spelled(new, manifest_json.to_json, lambda spelled: manifest_json.from_json(key, spelled))
    # Readers believe a version exists once its manifest does, so this comes last and never overwrites.
    there = create(store, key, data)
    if there != data:
        raise VersionConflict(
            f"version {new.version} was committed by {_author(key, there)}, not by {new.writer.id} "
            f"(epoch {new.writer.epoch}); another publisher has this run: stop this one"
        )


def create(store: Store, key: str, data: bytes) -> bytes:
    """Create a JSON object unless its key is taken; return what is stored under the key then.

    Raises:
        StoreUnavailable: no answer, and the key is still free or cannot be read; calling again with the same
            bytes is safe.
    """
    try:
        store.put(key, data, if_absent=True)
    except (AlreadyExists, StoreUnavailable) as exc:
        # A client that repeated its own put after a lost answer reports that the key is taken.
        try:
            return _bounded(store, key)
        except NotFound:
            raise StoreUnavailable(f"{key} was not stored: {exc}") from exc
    return data


def _author(key: str, data: bytes) -> str:
    try:
        writer = manifest_json.from_json(key, data).writer
    except DataError:
        return "a publisher of another release"
    return f"{writer.id} (epoch {writer.epoch})"


def _spelled(value: _Value, spell: Callable[[_Value], bytes], read: Callable[[bytes], _Value]) -> bytes:
    """Return the JSON of an object to create, and check that readers will read the same.

    Raises:
        UsageError: they will not.
    """
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
