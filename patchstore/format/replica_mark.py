"""The mark of a replica: `replica.json`, beside `store.json`.

A replica is written by `patchstore replicate` alone. A publisher that opened it would commit versions that
the source does not have. So the mark is created before anything else, and publishers look for it. Once the
source is lost, `promote` ends that.
"""

from dataclasses import dataclass, replace

from patchstore.errors import CorruptObject, IsReplica, NotFound, UsageError
from patchstore.format import history, layout
from patchstore.format.json_fields import Record
from patchstore.format.manifest_json import dump
from patchstore.format.records import FORMAT_VERSION, Manifest
from patchstore.stores.base import Store
from patchstore.support import host

_MAX_BYTES = 100_000
"""Of `replica.json`, which has four short fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMark:
    """The content of `replica.json`."""

    run_id: str
    """Of the run that is replicated."""
    source: str
    """The URL of the store that it is copied from, as the replicator names it; for people."""
    created_at: str
    """UTC, ISO 8601."""
    promoted_at: str | None = None
    """When it was promoted to a place for publishers: UTC, ISO 8601. None while it is a replica."""


def to_json(mark: ReplicaMark) -> bytes:
    """Spell a mark."""
    return dump(
        {
            "format_version": FORMAT_VERSION,
            "run_id": mark.run_id,
            "source": mark.source,
            "created_at": mark.created_at,
            "promoted_at": mark.promoted_at,
        }
    )


def from_json(data: bytes) -> ReplicaMark:
    """Read a mark.

    Raises:
        CorruptObject: not a mark; the message names the field.
        UnsupportedFormat: written by a release with another format version.
    """
    if len(data) > _MAX_BYTES:
        raise CorruptObject(f"{layout.REPLICA} has more than {_MAX_BYTES:,} bytes, which no release writes")
    record = Record.parse(layout.REPLICA, data)
    return ReplicaMark(
        run_id=record.text("run_id"),
        source=record.text("source"),
        created_at=record.time("created_at"),
        promoted_at=None if record.is_null("promoted_at") else record.time("promoted_at"),
    )


def read(store: Store) -> ReplicaMark | None:
    """Return a store's mark, or None where there is none: it is no replica, and never was.

    Raises:
        CorruptObject, UnsupportedFormat: there is one that cannot be understood.
    """
    try:
        with host.reading(layout.REPLICA):
            return from_json(store.get(layout.REPLICA, 0, _MAX_BYTES + 1))
    except NotFound:
        return None


def create(store: Store, mark: ReplicaMark) -> ReplicaMark:
    """Mark a store as a replica unless it has a mark; return the mark that it has then.

    Raises:
        StoreUnavailable: unknown whether it was created; calling again is safe.
    """
    return from_json(history.create(store, layout.REPLICA, to_json(mark)))


def check_writable(store: Store) -> None:
    """Refuse a store that a publisher must not write to.

    Raises:
        IsReplica: it is a replica.
        CorruptObject, UnsupportedFormat: its mark cannot be understood.
    """
    mark = read(store)
    if mark is not None and mark.promoted_at is None:
        raise IsReplica(
            f"{store.url} is a replica of {mark.source}: publish there. If that place is lost for good, stop "
            f"the replicator, run `patchstore promote {store.url}`, and open the publisher again"
        )


def promote(store: Store, now: str) -> tuple[ReplicaMark, Manifest]:
    """Make a replica a place for publishers; a replicator writes nothing to it any more.

    Does nothing where that is done already. Versions that were not replicated are lost to this place.

    Args:
        now: UTC, ISO 8601.

    Returns:
        The mark as it is then, and the newest version.

    Raises:
        UsageError: it is no replica, or has no version yet; nothing was written. Only `replica.json` is
            written, so after any other error either nothing or all was done, and calling again is safe.
    """
    mark = read(store)
    if mark is None:
        raise UsageError(f"{store.url} is no replica, as it has no {layout.REPLICA}: nothing to promote")
    header = history.read_header(store)
    newest = None if header is None else history.head(store)
    if newest is None:
        raise UsageError(
            f"{store.url} is a replica of {mark.source} without a version, so no publisher could "
            "continue from it; open the publisher at another place"
        )
    if mark.promoted_at is None:
        mark = replace(mark, promoted_at=now)
        store.put(layout.REPLICA, to_json(mark))
    return mark, newest
