"""Records of retired versions: the series `retired/`, of which all records count.

A retired version keeps its manifest for ever. Its payloads may be deleted once `not_before` has passed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import groupby

from patchstore.format import layout, series
from patchstore.format.json_fields import time_of
from patchstore.format.manifest_json import dump
from patchstore.format.records import FORMAT_VERSION
from patchstore.format.times import GRACE, spelled
from patchstore.stores.base import Store

_KIND = "retired"
_MAX_RANGES = 10_000
"""Of one record: so many fit into `series.MAX_BYTES`."""

Range = tuple[int, int]
"""The first and the last of versions that follow each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    """The content of one record."""

    run_id: str
    versions: tuple[Range, ...]
    """Ascending, and apart from each other."""
    created_at: str
    """UTC, ISO 8601."""
    not_before: str
    """When payloads may be deleted at the earliest: `GRACE` after `created_at`, or later."""

    def has(self, version: int) -> bool:
        """Whether this record retires a version."""
        return any(first <= version <= last for first, last in self.versions)


class Retirements:
    """All records of a store."""

    def __init__(self, records: Iterable[Retired]) -> None:
        self.records = tuple(records)

    def find(self, version: int) -> Retired | None:
        """Return the first record that retires a version; None where none does."""
        return next((record for record in self.records if record.has(version)), None)

    def up_to(self, newest: int) -> dict[int, Retired]:
        """Return the record of each retired version up to the newest one. A record may claim any range."""
        found: dict[int, Retired] = {}
        for record in self.records:
            for first, last in record.versions:
                for version in range(first, min(last, newest) + 1):
                    found.setdefault(version, record)
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


def to_json(record: Retired) -> bytes:
    """Spell a record."""
    return dump(
        {
            "format_version": FORMAT_VERSION,
            "kind": _KIND,
            "run_id": record.run_id,
            "versions": [{"first": first, "last": last} for first, last in record.versions],
            "created_at": record.created_at,
            "not_before": record.not_before,
        }
    )


def from_json(key: str, data: bytes, run_id: str | None = None) -> Retired:
    """Read a record.

    Raises:
        CorruptObject: not a record, or of another run; the message names the field.
        UnsupportedFormat: of another format version or kind.
    """
    record = series.parse(key, data, _KIND, run_id)
    found: list[Range] = []
    for item in record.items("versions"):
        first, last = item.count("first"), item.count("last")
        if last < first or (found and first <= found[-1][1]):
            raise item.corrupt("first", "must be at most `last`, and ranges must ascend")
        found.append((first, last))
    created_at, not_before = record.time("created_at"), record.time("not_before")
    # Times are spelled to the millisecond at least, and a grace period must not be shorter by more.
    if time_of(not_before) - time_of(created_at) < GRACE - timedelta(milliseconds=1):
        raise record.corrupt("not_before", f"must be at least {GRACE} after created_at")
    return Retired(
        run_id=record.text("run_id"), versions=tuple(found), created_at=created_at, not_before=not_before
    )


def read(store: Store, run_id: str | None = None) -> Retirements:
    """Return all records. Costs a listing, and a read for each record.

    Raises:
        CorruptObject, UnsupportedFormat: a record cannot be understood.
    """
    wanted = [
        key
        for key in series.keys(store, layout.RETIRED)
        if layout.record_number(layout.RETIRED, key) is not None
    ]
    return Retirements(series.get_all(store, wanted, partial(from_json, run_id=run_id)))


def put(store: Store, run_id: str, versions: Iterable[int], now: datetime) -> list[Retired]:
    """Retire versions: create one more record, or several for very many ranges.

    Raises:
        StoreUnavailable: unknown whether all were created; calling again is safe.
    """
    created, wanted = [], ranges(versions)
    for begin in range(0, len(wanted), _MAX_RANGES):
        some = wanted[begin : begin + _MAX_RANGES]
        record = Retired(
            run_id=run_id, versions=some, created_at=spelled(now), not_before=spelled(now + GRACE)
        )
        series.append(store, layout.RETIRED, to_json(record))
        created.append(record)
    return created
