"""Which versions are kept: all but those that are retired. Here tags are set, and retired versions refused.

A tag outranks a retirement. Both may be written at the same moment, and then the version is kept.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from patchstore.errors import UsageError, VersionNotFound, VersionRetired
from patchstore.format import history, retired, tags
from patchstore.format.json_fields import time_of
from patchstore.format.missing import PayloadMissing
from patchstore.format.records import StoreHeader
from patchstore.format.tags import Tag
from patchstore.format.times import CLOCK_MARGIN, Clock, spelled, utc_now
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)


def check(store: Store, version: int) -> None:
    """Refuse a version that is retired. A reader that may not list the store is told nothing.

    Costs a listing if nothing is retired in this store; otherwise also a read for each record.

    Raises:
        VersionRetired: it is; the message names the nearest version that is kept.
        CorruptObject, UnsupportedFormat: a record cannot be understood.
    """
    try:
        found = retired.read(store)
    except UsageError as exc:
        logger.info("whether version %d is retired is not known: %s", version, exc)
        return
    record = found.find(version)
    if record is None:
        return
    tagged = {tag.version for tag in tags.read_all(store).values()}
    newest = history.head(store)
    if version in tagged or newest is None or version >= newest.version:
        return
    gone = found.up_to(newest.version - 1).keys() - tagged
    # The newest version is always kept, so there is one.
    later = next(each for each in range(version, newest.version + 1) if each not in gone)
    earlier = next((each for each in range(version, -1, -1) if each not in gone), None)
    nearest = later if earlier is None or later - version <= version - earlier else earlier
    raise VersionRetired(
        f"version {version} of {store.url} is retired since {record.created_at}; the nearest kept version is "
        f"{nearest}"
    )


def retired_versions(store: Store, newest: int) -> set[int]:
    """Return all versions that are retired.

    Args:
        newest: the newest version, which never is.

    Raises:
        CorruptObject, UnsupportedFormat: a record cannot be understood.
    """
    found = retired.read(store).up_to(newest - 1).keys()
    return found - {tag.version for tag in tags.read_all(store).values()} if found else set()


@contextmanager
def explained(store: Store, version: int) -> Iterator[None]:
    """Say of a payload that the block misses whether it was deleted because the version was retired.

    Raises:
        VersionRetired: so it was.
        PayloadMissing: it was not.
    """
    try:
        yield
    except PayloadMissing as exc:
        check(store, version)
        if exc.version in {None, version} or _is_retired(store, exc) is not True:
            raise
        raise PayloadMissing(
            f"{exc}. It was deleted with retired version {exc.version}, as an anchor nearer to version "
            f"{version} was added; try again, which takes that one. Readers that require keys use no added "
            "anchor, since no signature covers it: sign before you collect, or read this one without keys",
            exc.key,
        ) from exc


def is_given_up(store: Store, missed: PayloadMissing) -> bool:
    """Whether a payload that is missing may have been deleted, and another way may lead to the same version.

    So it is if it was stored for a version that is retired, or if no manifest names it, but a shortcut did.
    A reader that may not list the store does not know, and may look for another way.
    """
    if missed.version is None:
        return False
    if _is_retired(store, missed) is not False:
        return True
    found = history.read_manifest(store, missed.version)
    return all(each.key != missed.key for each in found.objects)


def _is_retired(store: Store, missed: PayloadMissing) -> bool | None:
    try:
        return is_of_retired(store, missed)
    except UsageError as exc:
        logger.info("whether version %s is retired is not known: %s", missed.version, exc)
        return None


def is_of_retired(store: Store, missed: PayloadMissing) -> bool:
    """Whether a payload that is missing was stored for a version that is retired."""
    return missed.version is not None and retired.read(store).find(missed.version) is not None


def tag(store: Store, name: str, version: int, *, clock: Clock = utc_now) -> Tag:
    """Give a version a name. A tag of that name moves.

    Raises:
        UsageError: no tag can have this name; nothing was written.
        VersionNotFound: no such version; nothing was written.
        VersionRetired: the version is retired. The tag has no version then, if another process retired it
            just now; otherwise nothing was written.
        StoreUnavailable: unknown whether it was written; calling again is safe.
    """
    tags.check_name(name)
    if isinstance(version, str):
        raise UsageError(f"give the number of the version to tag, and not {version!r:.100}")
    number = tags.version_of(store, version)
    header = _header(store)
    history.read_manifest(store, number)
    check(store, number)
    new = Tag(name=name, run_id=header.run_id, version=number, created_at=spelled(clock()))
    key = tags.put(store, new)
    # This process may have slept since it looked, for longer than the grace period of a retirement.
    record = retired.read(store, header.run_id).find(number)
    newest = history.head(store)
    if record is not None and newest is not None and number < newest.version:
        tags.withdraw(store, key, new)
        raise VersionRetired(
            f"version {number} of {store.url} was retired at {record.created_at}, while it was tagged. So "
            f"tag {name!r} was deleted again; tag another version"
        )
    return new


def delete_tag(store: Store, name: str, *, clock: Clock = utc_now) -> Tag:
    """Delete a tag, and return what it was.

    Raises:
        UsageError: no tag can have this name.
        VersionNotFound: there is no such tag. As after the error above nothing was written.
        StoreUnavailable: unknown whether it was written; calling again is safe.
    """
    tags.check_name(name)
    header = _header(store)
    before = tags.read(store, name, header.run_id)
    if before is None:
        raise VersionNotFound(f"{store.url} has no tag {name!r}; `patchstore tag STORE` lists the tags")
    tags.put(store, Tag(name=name, run_id=header.run_id, version=None, created_at=spelled(clock())))
    return before


def _header(store: Store) -> StoreHeader:
    header = history.read_header(store)
    if header is None:
        raise VersionNotFound(f"{store.url} holds no run")
    return header


def check_clock(newest_created_at: str, clock: Clock) -> None:
    """Refuse to go on with a clock that is far behind the trainer's.

    Args:
        newest_created_at: when the newest version was created.

    Raises:
        UsageError: it is.
    """
    now = clock()
    if time_of(newest_created_at) > now + CLOCK_MARGIN:
        raise UsageError(
            f"this machine's clock says {spelled(now)}, but the newest version was created at "
            f"{newest_created_at}: one of the two clocks is wrong. Correct it, and try again"
        )
