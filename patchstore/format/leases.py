"""Records of leases: until one expires, the payloads of its versions are not deleted.

The records of a holder are a series under `leases/<holder>/`. The newest one counts.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from patchstore.errors import UnsupportedFormat
from patchstore.format import layout, series
from patchstore.format.json_fields import time_of
from patchstore.format.manifest_json import dump
from patchstore.format.records import FORMAT_VERSION
from patchstore.format.times import CLOCK_MARGIN
from patchstore.stores.base import Store

_KIND = "lease"
MAX_LIFETIME = timedelta(hours=24)
"""Of one record. A reader that needs longer renews its lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """The content of one record of a lease."""

    run_id: str
    holder: str
    """Names the lease, and stands in its keys."""
    versions: tuple[int, ...]
    created_at: str
    """UTC, ISO 8601, by the holder's clock."""
    expires_at: str

    def is_live(self, now: datetime) -> bool:
        """Whether the lease may still count, also if the clocks here and there are wrong."""
        return time_of(self.expires_at) + CLOCK_MARGIN > now


def to_json(record: LeaseRecord) -> bytes:
    """Spell a record."""
    return dump(
        {
            "format_version": FORMAT_VERSION,
            "kind": _KIND,
            "run_id": record.run_id,
            "holder": record.holder,
            "versions": [{"version": version} for version in record.versions],
            "created_at": record.created_at,
            "expires_at": record.expires_at,
        }
    )


def from_json(key: str, data: bytes, run_id: str | None = None) -> LeaseRecord:
    """Read a record.

    Raises:
        CorruptObject: not a record of that holder, or of another run; the message names the field.
        UnsupportedFormat: of another format version or kind.
    """
    record = series.parse(key, data, _KIND, run_id)
    holder = record.text("holder")
    if layout.lease_holder(key) != holder:
        raise record.corrupt("holder", f"is {holder!r:.80}, which does not belong under this key")
    created_at, expires_at = record.time("created_at"), record.time("expires_at")
    if not timedelta() <= time_of(expires_at) - time_of(created_at) <= MAX_LIFETIME:
        raise record.corrupt("expires_at", f"must be at most {MAX_LIFETIME} after created_at")
    return LeaseRecord(
        run_id=record.text("run_id"),
        holder=holder,
        versions=tuple(item.count("version") for item in record.items("versions")),
        created_at=created_at,
        expires_at=expires_at,
    )


def read_newest(store: Store, run_id: str | None = None) -> tuple[list[LeaseRecord], dict[str, list[str]]]:
    """Return the newest record of each lease, expired or not, and the keys of all records by holder.

    Raises:
        CorruptObject, UnsupportedFormat: a newest record cannot be understood, or an object is no record.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for key in series.keys(store, layout.LEASES):
        holder = layout.lease_holder(key)
        if holder is None:
            raise UnsupportedFormat(
                f"{store.url} has {key}, which this release does not know: use the release that wrote it, or "
                "a later one; if no tool wrote it, delete it"
            )
        number = layout.record_number(layout.lease_prefix(holder), key)
        assert number is not None
        found.setdefault(holder, []).append((number, key))
    newest = [max(each)[1] for each in found.values()]
    keys = {holder: [key for _, key in sorted(each)] for holder, each in found.items()}
    return series.get_all(store, newest, partial(from_json, run_id=run_id)), keys
