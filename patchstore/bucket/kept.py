"""Which versions are kept, and which are retired: readers are refused those, and tags keep a version.

A tag outranks a retirement. Both may be written at the same moment, and then the version is kept.
"""

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta

from patchstore.bucket import history, notes
from patchstore.bucket.digests import PayloadMissing
from patchstore.bucket.manifest_json import time_of
from patchstore.bucket.notes import CLOCK_MARGIN, Clock, Tag, spelled, utc_now
from patchstore.errors import NotFound, PatchstoreError, UsageError, VersionNotFound, VersionRetired
from patchstore.stores import layout, opens_store
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)


def check(store: Store, version: int) -> None:
    """Refuse a version that is retired. A reader that may not list the store is told nothing.

    Costs a listing if nothing is retired in this store; otherwise also a read for each record.
    """
    try:
        found = notes.retirements(store)
    except UsageError as exc:
        logger.info("whether version %d is retired is not known: %s", version, exc)
        return
    record = found.find(version)
    if record is None:
        return
    tagged = {tag.version for tag in notes.read_tags(store).values()}
    newest = history.head(store)
    if version in tagged or newest is None or version >= newest.version:
        return
    listed = {each for each in history.listed(store) if each < newest.version}
    left = listed - (found.among(listed).keys() - tagged)
    # The newest version is always kept, so there is one. Of two that are as near, the later one.
    nearest = min([*left, newest.version], key=lambda each: (abs(each - version), -each))
    raise VersionRetired(
        f"version {version} of {store.url} is retired since {record.created_at}; the nearest kept version is "
        f"{nearest}"
    )


def retired_versions(store: Store, newest: int) -> set[int]:
    """Return all versions that are retired."""
    found = notes.retirements(store).up_to(newest - 1).keys()
    return found - {tag.version for tag in notes.read_tags(store).values()} if found else set()


@contextmanager
def explained(store: Store, version: int) -> Iterator[None]:
    """Say of a payload that the block misses whether it was deleted because the version was retired."""
    try:
        yield
    except PayloadMissing as exc:
        check(store, version)
        if exc.version in {None, version} or _is_retired(store, exc) is not True:
            raise
        raise PayloadMissing(
            f"{exc}. It was deleted with retired version {exc.version}, as an anchor nearer to version "
            f"{version} was added; try again, which takes that one. Readers that require keys use no added "
            "anchor, since no signature covers it: sign before you prune, or read this one without keys",
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
    return missed.version is not None and notes.retirements(store).find(missed.version) is not None


@opens_store
def tag(store: Store, name: str, version: int, *, clock: Clock = utc_now) -> Tag:
    """Give a version a name. A tag of that name moves.

    Raises:
        UsageError: no tag can have this name; nothing was written.
        VersionNotFound: no such version; nothing was written.
        VersionRetired: the version is retired. The tag has no version then, if another process retired it
            just now; otherwise nothing was written.
        StoreUnavailable: unknown whether it was written; calling again is safe.
    """
    notes.check_tag_name(name)
    if isinstance(version, str):
        raise UsageError(f"give the number of the version to tag, and not {version!r:.100}")
    number = notes.version_of(store, version)
    header = history.run_header(store)
    history.read_manifest(store, number)
    check(store, number)
    new = Tag(name=name, run_id=header.run_id, version=number, created_at=spelled(clock()))
    key = notes.put_tag(store, new)
    # This process may have slept since it looked, for longer than the grace period of a retirement.
    record = notes.retirements(store, header.run_id).find(number)
    newest = history.head(store)
    if record is not None and newest is not None and number < newest.version:
        notes.withdraw_tag(store, key, new)
        raise VersionRetired(
            f"version {number} of {store.url} was retired at {record.created_at}, while it was tagged. So "
            f"tag {name!r} was deleted again; tag another version"
        )
    return new


@opens_store
def delete_tag(store: Store, name: str, *, clock: Clock = utc_now) -> Tag:
    """Delete a tag, and return what it was.

    Raises:
        UsageError: no tag can have this name.
        VersionNotFound: there is no such tag. As after the error above nothing was written.
        StoreUnavailable: unknown whether it was written; calling again is safe.
    """
    notes.check_tag_name(name)
    header = history.run_header(store)
    before = notes.read_tag(store, name, header.run_id)
    if before is None:
        raise VersionNotFound(f"{store.url} has no tag {name!r}; `patchstore tag STORE` lists the tags")
    notes.put_tag(store, Tag(name=name, run_id=header.run_id, version=None, created_at=spelled(clock())))
    return before


def now(store: Store, clock: Clock | None, *, may_write: bool) -> datetime:
    """Return the time by which to judge what a store's records say: the store's own, if it tells.

    Then the clock of this machine does not count. Nor do those of the records' writers, for `has_passed`.

    Args:
        clock: counts in place of the store's time and of this machine's clock, unless it is behind.
        may_write: whether a small object may be stored for a moment, to ask for its time. Otherwise, and if
            the store does not tell, it is the time of this machine's clock.
    """
    at = _measured(store) if may_write else _stored_at(store, layout.HEAD)
    if clock is None and may_write and at is not None:
        return at
    here = (clock or utc_now)()
    if at is not None and at > here + CLOCK_MARGIN:
        raise UsageError(
            f"this machine's clock says {spelled(here)}, but by the clock of {store.url} it is {spelled(at)} "
            "or later. Correct the clock that is wrong, and try again"
        )
    return here


def _measured(store: Store) -> datetime | None:
    key = f"{layout.PROBES}time-{uuid.uuid4().hex}"
    store.put(key, b"")
    try:
        return _stored_at(store, key)
    finally:
        # An empty object left behind is no harm, and `retire` need not have the right to delete.
        with suppress(PatchstoreError):
            store.delete(key)


def _stored_at(store: Store, key: str) -> datetime | None:
    try:
        return store.stored_at(key)
    except NotFound:
        return None


def has_passed(store: Store, key: str, created_at: str, span: timedelta, now: datetime) -> bool:
    """Whether a time has passed since a record began to count: by its writer's clock, and by the store's.

    A writer may sleep between a look at its clock and the put, or have a clock that is behind.
    """
    if time_of(created_at) + span > now:
        return False
    at = _stored_at(store, key)
    return at is None or at + span <= now


def check_clock(newest_created_at: str, clock: Clock) -> None:
    """Refuse to go on with a time that is far behind the trainer's."""
    here = clock()
    if time_of(newest_created_at) > here + CLOCK_MARGIN:
        raise UsageError(
            f"the clock says {spelled(here)}, but the newest version was created at {newest_created_at}: the "
            "clock of this machine or the store, or that of the trainer, is wrong. Correct it, and try again"
        )
