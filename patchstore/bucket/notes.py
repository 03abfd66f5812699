"""Small records beside the versions: tags, retirements, reservations, orphans and the mark of a replica.

`_KINDS` is the table: the kind of each type, its fields, and how they are read. A record is created once and
never overwritten. What changes, such as the version of a tag, changes by one more record in a numbered
*series*. So two processes that write at the same time both succeed, one behind the other, and no reader sees
half of a record.
"""

import logging
import time
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, TypeVar

from patchstore.bucket import history
from patchstore.bucket.manifest_json import Record, dump, time_of
from patchstore.bucket.records import FORMAT_VERSION, Manifest
from patchstore.errors import (
    CorruptObject,
    IsReplica,
    NotFound,
    PatchstoreError,
    UnsupportedFormat,
    UsageError,
    VersionNotFound,
)
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.support import host
from patchstore.support.arguments import version_number

logger = logging.getLogger(__name__)

MAX_BYTES = 1_000_000
"""Of one record. Readers ask for no more."""
_MAX_RANGES = 10_000
"""Of one record of retired versions: this many fit into `MAX_BYTES`."""
_MAX_ATTEMPTS = 5000
"""Of one record of orphans: this many fit into `MAX_BYTES`."""

# Times, as the format spells them, and by how much clocks may be wrong.

Clock = Callable[[], datetime]
"""Returns the time now, with a time zone."""

CLOCK_MARGIN = timedelta(hours=2)
"""How far the clocks of two machines may be apart: each of them may be wrong by an hour."""
GRACE = timedelta(hours=24)
"""From the retirement of a version until its payloads may be deleted, and as long for objects that no
manifest names. A part of the format, and no option: readers and writers that began before rely on it."""


def utc_now() -> datetime:
    return datetime.now(UTC)


def spelled(at: datetime) -> str:
    """Return a time as the format spells it: UTC, ISO 8601, to the millisecond."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Began:
    """When an attempt began to store payloads. A collector may delete what nothing names a day later.

    Two clocks are asked: one may stand still while the machine sleeps, and the other may be set back.
    """

    def __init__(self, clock: Clock = utc_now) -> None:
        self.clock = clock
        self._at, self._monotonic_s = clock(), time.monotonic()

    @property
    def is_too_old(self) -> bool:
        """Whether nothing may name these payloads any more."""
        passed = timedelta(seconds=time.monotonic() - self._monotonic_s)
        return max(self.clock() - self._at, passed) >= GRACE


# The table.

Range = tuple[int, int]
"""The first and the last of versions that follow each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What all records have."""

    run_id: str
    created_at: str
    """UTC, ISO 8601."""
    key: str = field(default="", compare=False)
    """Where the record is stored; empty before it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired(Note):
    """Some versions are given up: a record of the series `retired/`, of which all count.

    A retired version keeps its manifest for ever. Its payloads may be deleted once `not_before` has passed.
    """

    versions: tuple[Range, ...]
    """Ascending, and apart from each other."""
    not_before: str
    """When payloads may be deleted at the earliest: `GRACE` after `created_at`, or later."""

    def has(self, version: int) -> bool:
        return any(first <= version <= last for first, last in self.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag(Note):
    """A name of a version, such as `best`: a record of the series `tags/<name>/`, of which the newest counts.

    A tag may move, and its version is never retired.
    """

    name: str
    version: int | None
    """None: the tag was deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation(Note):
    """A publisher is about to build on an older version, whose payloads stay: `reservations/<random>.json`.

    It ends when the next version exists: then that version needs these payloads, or another publisher was
    faster. No clock counts, however long the publisher sleeps.
    """

    version: int
    until_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphans(Note):
    """Attempts that no manifest names, and when they were seen: a record of the series `unnamed/`.

    A store does not say when an object was written. So a first pass of a collector notes what it sees: the
    object is at least as old as the record. A later pass deletes what was noted long enough ago.
    """

    attempts: tuple[str, ...]
    """What all objects of an attempt begin with, as `layout.attempt_of` returns it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMark(Note):
    """This place is a replica: `replica.json`, beside `store.json`.

    A replica is written by `patchstore replicate` alone. A publisher that opened it would commit versions
    that the source does not have. So the mark is created before anything else, and publishers look for it.
    """

    source: str
    """The URL of the store that it is copied from, as the replicator names it; for people."""
    promoted_at: str | None = None
    """When it was promoted to a place for publishers: UTC, ISO 8601. None while it is a replica."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a type of record is spelled."""

    name: str | None
    """The field `kind`; None for a record without one, as its key says it."""
    fields: Mapping[str, str]
    """The fields behind `kind` and `run_id`, in their order, and how `Record` reads each. A ? allows null."""
    check: Callable[[Any, Record], None] | None = None
    """Raises CorruptObject for a record whose fields contradict each other, or its key."""
    max_bytes: int = MAX_BYTES


def _check_grace(found: Retired, record: Record) -> None:
    # Times are spelled to the millisecond at least, and a grace period must not be shorter by more.
    if time_of(found.not_before) - time_of(found.created_at) < GRACE - timedelta(milliseconds=1):
        raise record.corrupt("not_before", f"must be at least {GRACE} after created_at")


def _check_name(found: Tag, record: Record) -> None:
    if layout.tag_name(found.key) != found.name:
        raise record.corrupt("name", f"is {found.name!r:.120}, which does not belong under this key")


_KINDS: Mapping[type[Note], _Kind] = {
    Retired: _Kind(
        "retired", {"versions": "ranges", "created_at": "time", "not_before": "time"}, _check_grace
    ),
    Tag: _Kind("tag", {"name": "text", "version": "count?", "created_at": "time"}, _check_name),
    Reservation: _Kind("reservation", {"version": "count", "until_version": "count", "created_at": "time"}),
    Orphans: _Kind("unnamed", {"attempts": "texts", "created_at": "time"}),
    # It has four short fields.
    ReplicaMark: _Kind(
        None, {"source": "text", "created_at": "time", "promoted_at": "time?"}, max_bytes=100_000
    ),
}

N = TypeVar("N", bound=Note)


def to_json(note: Note) -> bytes:
    kind = _KINDS[type(note)]
    named = {} if kind.name is None else {"kind": kind.name}
    values = {name: _spelled_as(how, getattr(note, name)) for name, how in kind.fields.items()}
    return dump({"format_version": FORMAT_VERSION, **named, "run_id": note.run_id, **values})


def from_json(of: type[N], key: str, data: bytes, run_id: str | None = None) -> N:
    """Read a record."""
    kind = _KINDS[of]
    if len(data) > kind.max_bytes:
        raise CorruptObject(f"{key} has more than {kind.max_bytes:,} bytes, which no release writes")
    record = Record.parse(key, data)
    if kind.name is not None and (found := record.text("kind")) != kind.name:
        raise UnsupportedFormat(
            f"{key} is of kind {found!r:.80}, but this release knows only {kind.name!r} there: use the "
            "release that wrote it, or a later one"
        )
    if (run := record.text("run_id")) != run_id and run_id is not None:
        raise CorruptObject(
            f"{key} is of run {run}, but the store holds run {run_id}: it was left by a run that was "
            "deleted; delete it too"
        )
    values = {name: _read_as(how, record, name) for name, how in kind.fields.items()}
    note = of(run_id=run, key=key, **values)
    if kind.check is not None:
        kind.check(note, record)
    return note


def _spelled_as(how: str, value: Any) -> Any:
    return [{"first": first, "last": last} for first, last in value] if how == "ranges" else value


def _read_as(how: str, record: Record, name: str) -> Any:
    if how.endswith("?") and record.is_null(name):
        return None
    if how == "ranges":
        return _read_ranges(record, name)
    return getattr(record, how.removesuffix("?"))(name)


def _read_ranges(record: Record, name: str) -> tuple[Range, ...]:
    found: list[Range] = []
    for item in record.items(name):
        first, last = item.count("first"), item.count("last")
        if last < first or (found and first <= found[-1][1]):
            raise item.corrupt("first", "must be at most `last`, and ranges must ascend")
        found.append((first, last))
    return tuple(found)


# Series, and records by themselves.


def keys(store: Store, prefix: str) -> list[str]:
    """Return the keys of all objects under a prefix, ascending."""
    with host.reading(prefix):
        return [*store.list(prefix)]


def get_all(store: Store, of: type[N], wanted: Iterable[str], run_id: str | None) -> list[N]:
    """Read records, several at once, in the order of their keys. Leaves out those that are gone by now."""

    def found(key: str) -> N | None:
        try:
            return from_json(of, key, history.small(store, key, MAX_BYTES), run_id)
        except NotFound:
            return None

    return [each for each in history.read_many(found, wanted) if each is not None]


def _newest(store: Store, prefix: str) -> tuple[str, bytes] | None:
    """Return the key and the bytes of the newest record of a series; None where there is none.

    Costs a listing and two reads. A listing may lag, so what comes after it is looked for.
    """
    numbers = [layout.record_number(prefix, key) for key in keys(store, prefix)]
    at = max((number for number in numbers if number is not None), default=0)
    found: tuple[str, bytes] | None = None
    while True:
        key = layout.record_key(prefix, at)
        try:
            found = key, history.small(store, key, MAX_BYTES)
        except NotFound:
            return found
        at += 1


def append(store: Store, prefix: str, data: bytes) -> str:
    """Create the next record of a series, and return its key.

    If another process creates that one at the same moment, this one comes after it.
    """
    last = _newest(store, prefix)
    number = 0 if last is None else (layout.record_number(prefix, last[0]) or 0) + 1
    while True:
        key = layout.record_key(prefix, number)
        if history.create(store, key, data) == data:
            return key
        number += 1


# Retired versions.


class Retirements:
    """All records of a store. A record may claim any range, also of versions that never existed."""

    def __init__(self, store: Store, records: Iterable[Retired]) -> None:
        self.records = tuple(records)
        self._store = store

    def find(self, version: int) -> Retired | None:
        """Return the first record that retires a version; None where none does."""
        return next((record for record in self.records if record.has(version)), None)

    def up_to(self, newest: int) -> dict[int, Retired]:
        """Return the record of each retired version up to the newest one, of those that the store lists.

        Costs a listing of the manifests if anything is retired.
        """
        if not self.records:
            return {}
        return self.among(each for each in history.listed(self._store) if each <= newest)

    def among(self, versions: Iterable[int]) -> dict[int, Retired]:
        """Return the record of each of these versions that is retired."""
        ordered = sorted(versions)
        found: dict[int, Retired] = {}
        for record in self.records:
            for first, last in record.versions:
                for at in range(bisect_left(ordered, first), bisect_right(ordered, last)):
                    found.setdefault(ordered[at], record)
        return found


def ranges(versions: Iterable[int]) -> tuple[Range, ...]:
    """Return versions as ranges, ascending.

    Example: 0, 1, 2, 5 -> (0, 2), (5, 5).
    """
    found = []
    for _, group in groupby(enumerate(sorted(set(versions))), key=lambda each: each[1] - each[0]):
        members = [version for _, version in group]
        found.append((members[0], members[-1]))
    return tuple(found)


def retirements(store: Store, run_id: str | None = None) -> Retirements:
    """Return all records of retired versions. Costs a listing, and a read for each record."""
    listed = keys(store, layout.RETIRED)
    wanted = [key for key in listed if layout.record_number(layout.RETIRED, key) is not None]
    return Retirements(store, get_all(store, Retired, wanted, run_id))


def retire(store: Store, run_id: str, versions: Iterable[int], now: datetime) -> list[Retired]:
    """Retire versions: create one more record, or several for very many ranges."""
    created, wanted = [], ranges(versions)
    for begin in range(0, len(wanted), _MAX_RANGES):
        record = Retired(
            run_id=run_id,
            versions=wanted[begin : begin + _MAX_RANGES],
            created_at=spelled(now),
            not_before=spelled(now + GRACE),
        )
        append(store, layout.RETIRED, to_json(record))
        created.append(record)
    return created


# Tags.


_HEAD = "head"
"""Names the newest version, wherever a tag may name one."""


def check_version_name(name: str) -> str:
    """Return a tag's name, or `head`, and refuse what cannot be one: raises UsageError."""
    return name if name.lower() == _HEAD else check_tag_name(name)


def check_tag_name(name: Any) -> str:
    """Return a name, or refuse what cannot name a tag: raises UsageError."""
    if not isinstance(name, str):
        raise UsageError(f"a tag is a name, not {name!r:.100} ({type(name).__name__})")
    if name.lower() == _HEAD:
        raise UsageError(f"a tag cannot be called {name!r}, which stands for the newest version")
    if name.isdecimal():
        raise UsageError(f"{name!r:.120} cannot name a tag, and a version is an integer, not a text")
    if not layout.is_tag_name(name):
        raise UsageError(
            f"{name!r:.120} cannot name a tag: begin with a letter, and go on with letters, digits, '.', '_' "
            "and '-', at most 100 in all"
        )
    return name


def read_tag(store: Store, name: str, run_id: str | None = None) -> Tag | None:
    """Return a tag; None if there is none of that name, or it was deleted."""
    found = _newest(store, layout.tag_prefix(check_tag_name(name)))
    tag = None if found is None else from_json(Tag, *found, run_id)
    return None if tag is None or tag.version is None else tag


def read_tags(store: Store, run_id: str | None = None) -> dict[str, Tag]:
    """Return all tags that have a version, by name in ascending order. Costs as `newest_tags`."""
    return {name: tag for name, tag in newest_tags(store, run_id).items() if tag.version is not None}


def newest_tags(store: Store, run_id: str | None = None) -> dict[str, Tag]:
    """Return the newest record of each tag, also of deleted ones, by name in ascending order.

    Costs a listing, and a read for each tag.
    """
    found = get_all(store, Tag, [each[-1] for each in _keys_of_tags(store)], run_id)
    return {tag.name: tag for tag in found}


def left_tags(store: Store, counts: Callable[[Tag], bool]) -> list[tuple[int, Tag]]:
    """Return versions that a tag left, each with the record by which it did.

    Costs a listing, and for each tag a read of its newest record and of those before it as far back as they
    count.

    Args:
        counts: whether a record is of interest. Those before one that is not are neither; called on several
            threads.
    """

    def walk(its_keys: list[str]) -> list[tuple[int, Tag]]:
        found: list[tuple[int, Tag]] = []
        later: Tag | None = None
        for key in reversed(its_keys):
            for tag in get_all(store, Tag, [key], None):
                if later is not None and tag.version is not None and tag.version != later.version:
                    found.append((tag.version, later))
                if not counts(tag):
                    return found
                later = tag
        return found

    return [each for found in history.read_many(walk, _keys_of_tags(store)) for each in found]


def _keys_of_tags(store: Store) -> list[list[str]]:
    """Return the keys of the records of each tag, the newest last, by name in ascending order."""
    found: dict[str, list[tuple[int, str]]] = {}
    for key in keys(store, layout.TAGS):
        if (name := layout.tag_name(key)) is not None:
            number = layout.record_number(layout.tag_prefix(name), key)
            assert number is not None
            found.setdefault(name, []).append((number, key))
    return [[key for _, key in sorted(each)] for each in found.values()]


def put_tag(store: Store, tag: Tag) -> str:
    """Create the next record of a tag, and return its key."""
    return append(store, layout.tag_prefix(check_tag_name(tag.name)), to_json(tag))


def withdraw_tag(store: Store, key: str, tag: Tag) -> None:
    """Take back a record: the next one has no version, unless another process set the tag meanwhile."""
    prefix = layout.tag_prefix(tag.name)
    number = layout.record_number(prefix, key)
    assert number is not None
    history.create(store, layout.record_key(prefix, number + 1), to_json(replace(tag, version=None)))


def version_of(store: Store, version: Any) -> int:
    """Return the number of a version that is named by its number, by a tag, or as `head`: the newest.

    Costs nothing for a number, and for a tag a listing and two reads.
    """
    if not isinstance(version, str):
        return version_number(version)
    if version.lower() == _HEAD:
        newest = history.head(store)
        if newest is None:
            raise history.no_version(store)
        return newest.version
    check_tag_name(version)
    header = history.read_header(store)
    found = read_tag(store, version, None if header is None else header.run_id)
    if found is None or found.version is None:
        raise VersionNotFound(
            f"{store.url} has no tag {version!r}; `patchstore tag STORE` lists the tags, and the newest "
            "version needs no name"
        )
    return found.version


# Reservations.


def reserve(store: Store, run_id: str, version: int, until_version: int) -> str:
    """Keep the payloads that lead to a version until another one exists, and return the record's key."""
    record = Reservation(
        run_id=run_id, version=version, until_version=until_version, created_at=spelled(utc_now())
    )
    key = f"{layout.RESERVATIONS}{uuid.uuid4().hex}.json"
    history.create(store, key, to_json(record))
    return key


def release(store: Store, key: str) -> None:
    """Delete the record of `reserve`. One that cannot be deleted ends by itself."""
    try:
        store.delete(key)
    except PatchstoreError as exc:
        logger.info("%s stays until its version exists: %s", key, exc)


def reservations(store: Store, run_id: str | None = None) -> list[Reservation]:
    """Return all reservations, also those that ended. Costs a listing, and a read for each."""
    wanted = [key for key in keys(store, layout.RESERVATIONS) if layout.is_reservation_key(key)]
    return get_all(store, Reservation, wanted, run_id)


# Orphans.


def orphans(store: Store, wanted: Iterable[str], run_id: str) -> dict[str, Orphans]:
    """Return records of orphans by key."""
    return {each.key: each for each in get_all(store, Orphans, wanted, run_id)}


def note_orphans(store: Store, run_id: str, attempts: Iterable[str], now: datetime) -> None:
    """Note attempts whose objects are stored now."""
    wanted = sorted(attempts)
    for begin in range(0, len(wanted), _MAX_ATTEMPTS):
        some = tuple(wanted[begin : begin + _MAX_ATTEMPTS])
        append(store, layout.UNNAMED, to_json(Orphans(run_id=run_id, attempts=some, created_at=spelled(now))))


# The mark of a replica.


def read_mark(store: Store) -> ReplicaMark | None:
    """Return a store's mark, or None where there is none: it is no replica, and never was."""
    try:
        data = history.small(store, layout.REPLICA, _KINDS[ReplicaMark].max_bytes)
    except NotFound:
        return None
    return from_json(ReplicaMark, layout.REPLICA, data)


def create_mark(store: Store, mark: ReplicaMark) -> ReplicaMark:
    """Mark a store as a replica unless it has a mark; return the mark that it has then."""
    return from_json(ReplicaMark, layout.REPLICA, history.create(store, layout.REPLICA, to_json(mark)))


def check_writable(store: Store) -> None:
    """Refuse a store that a publisher must not write to."""
    mark = read_mark(store)
    if mark is not None and mark.promoted_at is None:
        raise IsReplica(
            f"{store.url} is a replica of {mark.source}: publish there. If that place is lost for good, stop "
            f"the replicator, run `patchstore replicate --promote {store.url}`, and open the publisher again"
        )


def promote(store: Store, now: str, *, dry_run: bool = True) -> tuple[ReplicaMark, Manifest]:
    """Make a replica a place for publishers; a replicator writes nothing to it any more. It cannot be undone.

    Does nothing where that is done already. Versions that were not replicated are lost to this place.

    Raises:
        UsageError: it is no replica, or has no version yet; nothing was written. Only `replica.json` is
            written, so after any other error either nothing or all was done, and calling again is safe.
    """
    mark = read_mark(store)
    if mark is None:
        raise UsageError(f"{store.url} is no replica, as it has no {layout.REPLICA}: nothing to promote")
    header = history.read_header(store)
    newest = None if header is None else history.head(store)
    if newest is None:
        raise UsageError(
            f"{store.url} is a replica of {mark.source} without a version, so no publisher could "
            "continue from it; open the publisher at another place"
        )
    if mark.promoted_at is None and not dry_run:
        mark = replace(mark, promoted_at=now)
        store.put(layout.REPLICA, to_json(mark))
    return mark, newest
