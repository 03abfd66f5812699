"""Series of small records: numbered objects that are created once, of which the newest or all count.

A record is never overwritten. What changes, such as the version of a tag, changes by one more record. So two
processes that write at the same time both succeed, one behind the other, and no reader sees half of a record.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from patchstore.errors import CorruptObject, NotFound, UnsupportedFormat
from patchstore.format import history, layout
from patchstore.format.json_fields import Record
from patchstore.stores.base import Store
from patchstore.support import host

MAX_BYTES = 1_000_000
"""Of one record. Readers ask for no more."""

T = TypeVar("T")


def parse(key: str, data: bytes, kind: str, run_id: str | None) -> Record:
    """Read what all records have: the format's version, the kind and the run.

    Args:
        kind: the only one that belongs under this key.
        run_id: of the store's run; None where that is not known.

    Raises:
        CorruptObject: not a record, or of another run.
        UnsupportedFormat: of another format version, or of a kind that this release does not know.
    """
    if len(data) > MAX_BYTES:
        raise CorruptObject(f"{key} has more than {MAX_BYTES:,} bytes, which no release writes")
    record = Record.parse(key, data)
    if (found := record.text("kind")) != kind:
        raise UnsupportedFormat(
            f"{key} is of kind {found!r:.80}, but this release knows only {kind!r} there: use the release "
            "that wrote it, or a later one"
        )
    if (run := record.text("run_id")) != run_id and run_id is not None:
        raise CorruptObject(
            f"{key} is of run {run}, but the store holds run {run_id}: it was left by a run that was "
            "deleted; delete it too"
        )
    return record


def get(store: Store, key: str) -> bytes:
    """Return a record byte for byte; if it is too large, just enough to notice that.

    Raises:
        NotFound: there is none.
    """
    with host.reading(key):
        return store.get(key, 0, MAX_BYTES + 1)


def get_all(store: Store, keys: Iterable[str], read: Callable[[str, bytes], T]) -> list[T]:
    """Read records, several at once, in the order of the keys. Leaves out those that are gone by now."""

    def found(key: str) -> T | None:
        try:
            return read(key, get(store, key))
        except NotFound:
            return None

    wanted = [*keys]
    if not wanted:
        return []
    with ThreadPoolExecutor(min(history.READ_AHEAD, len(wanted)), "patchstore-records") as pool:
        return [each for each in pool.map(found, wanted) if each is not None]


def keys(store: Store, prefix: str) -> list[str]:
    """Return the keys of all objects under a prefix, ascending."""
    with host.reading(prefix):
        return [*store.list(prefix)]


def newest(store: Store, prefix: str) -> tuple[str, bytes] | None:
    """Return the key and the bytes of the newest record of a series; None where there is none.

    Costs a listing and two reads. A listing may lag, so what comes after it is looked for.
    """
    numbers = [layout.record_number(prefix, key) for key in keys(store, prefix)]
    number = max((number for number in numbers if number is not None), default=None)
    found: tuple[str, bytes] | None = None
    at = 0 if number is None else number
    while True:
        key = layout.record_key(prefix, at)
        try:
            found = key, get(store, key)
        except NotFound:
            return found
        at += 1


def append(store: Store, prefix: str, data: bytes) -> str:
    """Create the next record of a series, and return its key.

    If another process creates that one at the same moment, this one comes after it.

    Raises:
        StoreUnavailable: unknown whether it was created.
    """
    last = newest(store, prefix)
    number = 0 if last is None else (layout.record_number(prefix, last[0]) or 0) + 1
    while True:
        key = layout.record_key(prefix, number)
        if history.create(store, key, data) == data:
            return key
        number += 1
