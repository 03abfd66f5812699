"""Notes of objects that no manifest names: the series `unnamed/`.

A store does not say when an object was written. So a first pass of `patchstore collect` notes what it sees,
and when: the object is at least as old as the note. A later pass deletes what was noted long enough ago.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from patchstore.format import layout, series
from patchstore.format.manifest_json import dump
from patchstore.format.records import FORMAT_VERSION
from patchstore.format.times import spelled
from patchstore.stores.base import Store

_KIND = "unnamed"
_MAX_ATTEMPTS = 5000
"""Of one note: so many fit into `series.MAX_BYTES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The content of one record."""

    run_id: str
    attempts: tuple[str, ...]
    """What all objects of an attempt begin with, as `layout.attempt_of` returns it."""
    created_at: str
    """UTC, ISO 8601."""


def to_json(note: Note) -> bytes:
    """Spell a note."""
    return dump(
        {
            "format_version": FORMAT_VERSION,
            "kind": _KIND,
            "run_id": note.run_id,
            "attempts": list(note.attempts),
            "created_at": note.created_at,
        }
    )


def from_json(key: str, data: bytes, run_id: str | None = None) -> Note:
    """Read a note.

    Raises:
        CorruptObject: not a note, or of another run; the message names the field.
        UnsupportedFormat: of another format version or kind.
    """
    record = series.parse(key, data, _KIND, run_id)
    return Note(
        run_id=record.text("run_id"),
        attempts=record.texts("attempts"),
        created_at=record.time("created_at"),
    )


def read_all(store: Store, keys: Iterable[str], run_id: str) -> dict[str, Note]:
    """Return notes by key.

    Raises:
        CorruptObject, UnsupportedFormat: one cannot be understood.
    """

    def read(key: str, data: bytes) -> tuple[str, Note]:
        return key, from_json(key, data, run_id)

    return dict(series.get_all(store, keys, read))


def put(store: Store, run_id: str, attempts: Iterable[str], now: datetime) -> None:
    """Note attempts whose objects are stored now.

    Raises:
        StoreUnavailable: unknown whether all were noted; calling again is safe.
    """
    wanted = sorted(attempts)
    for begin in range(0, len(wanted), _MAX_ATTEMPTS):
        some = tuple(wanted[begin : begin + _MAX_ATTEMPTS])
        note = Note(run_id=run_id, attempts=some, created_at=spelled(now))
        series.append(store, layout.UNNAMED, to_json(note))
