"""What a store holds, by what the keys say."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from patchstore.errors import CorruptObject, UnsupportedFormat
from patchstore.format import layout, series
from patchstore.format.shortcuts import Ends
from patchstore.stores.base import Store

_PAYLOADS = ("anchors/", "deltas/", "states/", layout.PIECES)
_RECORDS = (layout.TAGS, layout.RETIRED, layout.LEASES, layout.UNNAMED)
_SINGLE = {layout.HEADER, layout.HEAD, layout.REPLICA}
_NO_RECORDS = (".safetensors", ".sums")
"""Ends of keys of objects that name no others."""
_PAYLOAD_KEY = re.compile(r"(?:anchors|deltas|states|pieces)/[A-Za-z0-9._+=@/-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All keys of a store, sorted into kinds."""

    stored: frozenset[str]
    """Objects where payloads lie."""
    attempts: dict[str, list[str]]
    """Of these the objects of each attempt, by what `layout.attempt_of` returns."""
    versions: dict[str, int]
    """The version that each attempt was for."""
    notes: tuple[str, ...]
    """Records of the series `unnamed/`."""
    shortcuts: tuple[Ends, ...]
    signed: frozenset[int]
    """Versions that have a signature."""
    others: tuple[str, ...]
    """Objects of kinds that this release does not know."""

    @classmethod
    def of(cls, store: Store) -> "Listing":
        """List a store.

        Raises:
            UnsupportedFormat: an object lies among the records, and is none that this release knows.
        """
        stored: set[str] = set()
        attempts: dict[str, list[str]] = {}
        versions: dict[str, int] = {}
        notes: list[str] = []
        found_ends: list[Ends] = []
        signed: set[int] = set()
        others: list[str] = []
        for key in series.keys(store, ""):
            if key.startswith(_PAYLOADS):
                stored.add(key)
                if (found := layout.attempt_of(key)) is not None:
                    attempts.setdefault(found[1], []).append(key)
                    versions[found[1]] = found[0]
            elif key.startswith(_RECORDS):
                _check_record(store, key)
                if key.startswith(layout.UNNAMED):
                    notes.append(key)
            elif (ends := layout.shortcut_ends(key)) is not None:
                found_ends.append(Ends(*ends))
            elif (is_signed := layout.signed_version(key)) is not None:
                signed.add(is_signed)
            elif (
                key not in _SINGLE
                and not key.startswith((layout.PROBES, layout.SIGNATURES))
                and layout.manifest_version(key) is None
            ):
                others.append(key)
        return cls(
            stored=frozenset(stored),
            attempts=attempts,
            versions=versions,
            notes=tuple(notes),
            shortcuts=tuple(found_ends),
            signed=frozenset(signed),
            others=tuple(others),
        )

    def named_elsewhere(self, store: Store) -> set[str]:
        """Return all payloads that objects of other kinds name, whatever these objects mean.

        Raises:
            CorruptObject: such an object is JSON, and too large to be read for that.
        """
        found: set[str] = set()
        wanted = [key for key in self.others if not key.endswith(_NO_RECORDS)]
        for names in series.get_all(store, wanted, _names):
            found |= names
        return found


def _check_record(store: Store, key: str) -> None:
    series_of = layout.RETIRED if key.startswith(layout.RETIRED) else layout.UNNAMED
    if (
        layout.tag_name(key) is None
        and layout.lease_holder(key) is None
        and layout.record_number(series_of, key) is None
    ):
        raise UnsupportedFormat(
            f"{store.url} has {key}, which this release does not know: use the release that wrote it, or a "
            "later one; if no tool wrote it, delete it"
        )


def _names(key: str, data: bytes) -> set[str]:
    """Return the keys of payloads that occur in an object: in the strings of JSON, or in any other text.

    A large object that is not JSON is no record, but data; its beginning is looked at.
    """
    if len(data) > series.MAX_BYTES and key.endswith(".json"):
        raise CorruptObject(
            f"{key} has more than {series.MAX_BYTES:,} bytes and is of a kind that this release does not "
            "know, so it cannot say which payloads the object names: use a later release, or move it away"
        )
    try:
        texts = [*_strings(json.loads(data))]
    except (ValueError, RecursionError):
        texts = [data.decode(errors="replace")]
    return {match for text in texts for match in _PAYLOAD_KEY.findall(text)}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
