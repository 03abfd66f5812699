"""Shortcuts: further ways to reach a version, added after the version exists.

A shortcut is a small record beside the versions. It names either an anchor of a version, or a *rollup*: one
delta from an older version, in place of all deltas between. Anyone who may write the bucket can add one at
any time. A shortcut changes no version. Readers may use it, and the version's state digest, which its own
manifest names, proves what they reach. No reader needs a rollup. An anchor may become the only way to a
version, when what it replaces is deleted. A record contains the version's manifest, byte for byte, so that a
reader of the record needs no other object to know the version and its parent.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from patchstore.errors import CorruptObject, UsageError
from patchstore.format import hashing, history, layout, manifest_json
from patchstore.format.json_fields import MAX_JSON_BYTES, Record, json_object
from patchstore.format.records import FORMAT_VERSION, Anchor, Delta, Manifest, Payload
from patchstore.format.times import Clock, spelled, utc_now
from patchstore.stores.base import Store
from patchstore.support import host


@dataclass(frozen=True, slots=True, order=True)
class Ends:
    """What a shortcut's key says of it."""

    version: int
    parent: int | None
    """The older version that its delta builds on; None for an anchor."""

    def leads_over(self, versions: Sequence[int]) -> bool:
        """Whether a rollup begins or ends at one of some versions, or replaces its delta.

        Args:
            versions: ascending.
        """
        if self.parent is None:
            return False
        at = bisect_left(versions, self.parent)
        return at < len(versions) and versions[at] <= self.version


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortcut:
    """Another way to reach a version."""

    manifest: Manifest
    """Of the version, as it is in `versions/`."""
    digest: str
    """Of that manifest, byte for byte."""
    way: Manifest
    """The same manifest with the shortcut's way in place of its own: an anchor; or the older parent, and the
    delta to that."""
    created_at: str | None
    """UTC, ISO 8601. None: its writer did not say. Then it replaces nothing that is to be deleted."""

    @property
    def payloads(self) -> tuple[Payload, ...]:
        """All objects that the shortcut names beside those of the version."""
        part = self.way.anchor if self.is_anchor else self.way.delta
        assert part is not None
        return (*part.payloads, *getattr(part, "files", ()))

    @property
    def is_anchor(self) -> bool:
        return self.way.anchor is not None


def listed(store: Store) -> frozenset[Ends]:
    """Return which shortcuts there are. Costs one request per thousand; some stores show new ones late."""
    with host.reading(layout.SHORTCUTS):
        found = [layout.shortcut_ends(key) for key in store.list(layout.SHORTCUTS)]
    return frozenset(Ends(*each) for each in found if each is not None)


def read(store: Store, ends: Ends) -> Shortcut:
    """Read a shortcut.

    Raises:
        NotFound: there is none, or none any more.
        CorruptObject, UnsupportedFormat: it cannot be understood.
    """
    return parsed(ends, stored(store, ends))


def stored(store: Store, ends: Ends) -> bytes:
    """Return a shortcut byte for byte; what it says is not checked. Raises NotFound."""
    key = layout.shortcut_key(ends.version, ends.parent)
    with host.reading(key):
        return store.get(key, 0, MAX_JSON_BYTES + 1)


def create(
    store: Store,
    manifest: bytes,
    *,
    parent: tuple[int, str] | None,
    part: Anchor | Delta,
    clock: Clock = utc_now,
) -> bool:
    """Add a shortcut, unless there is one between the same versions. Its payloads must be stored already.

    Args:
        manifest: of the version, byte for byte.
        parent: for a delta, the version that it builds on, and the digest of that manifest.

    Returns:
        Whether it was added; False where there is another one, whose payloads serve as well.

    Raises:
        UsageError: readers would refuse it; nothing was created.
        StoreUnavailable: unknown whether it was added; calling again is safe.
    """
    version = Record("", "", json_object("", manifest)).count("version")
    key = layout.shortcut_key(version, None if parent is None else parent[0])
    data = manifest_json.dump(
        {
            "format_version": FORMAT_VERSION,
            "parent": None if parent is None else parent[0],
            "parent_digest": None if parent is None else parent[1],
            "created_at": spelled(clock()),
            "delta": manifest_json.delta_fields(part) if isinstance(part, Delta) else None,
            "anchor": manifest_json.anchor_fields(part) if isinstance(part, Anchor) else None,
            "manifest": manifest.decode(),
        }
    )
    try:
        parsed(Ends(version, None if parent is None else parent[0]), data)
    except CorruptObject as exc:
        raise UsageError(f"not stored, as readers would refuse it: {exc}") from exc
    return history.create(store, key, data) == data


def newest_anchor(found: Iterable[Ends], before: int) -> int | None:
    """Return the newest version, up to and including `before`, that has an anchor among shortcuts."""
    return max(
        (each.version for each in found if each.parent is None and each.version <= before), default=None
    )


def parsed(ends: Ends, data: bytes) -> Shortcut:
    """Read a shortcut from its bytes. Raises CorruptObject, UnsupportedFormat."""
    record = Record.parse(layout.shortcut_key(ends.version, ends.parent), data)
    text = record.value.get("manifest")
    if not isinstance(text, str):
        raise record.corrupt("manifest", "must be a text: the version's manifest")
    data_of_version = text.encode()
    manifest = manifest_json.from_json(layout.manifest_key(ends.version), data_of_version)
    delta, anchor = manifest_json.delta_of(record), manifest_json.anchor_of(record)
    if ends.parent is None:
        if anchor is None or delta is not None or not record.is_null("parent"):
            raise record.corrupt("anchor", "must be the only way of this record, as its key says")
        way = replace(manifest, anchor=anchor)
    else:
        if delta is None or anchor is not None or record.count("parent") != ends.parent:
            raise record.corrupt("delta", f"must lead from version {ends.parent}, as its key says")
        digest = record.digest("parent_digest")
        way = replace(manifest, parent=ends.parent, parent_digest=digest, delta=delta, anchor=None)
    created_at = record.time("created_at") if "created_at" in record.value else None
    return Shortcut(manifest=manifest, digest=hashing.digest(data_of_version), way=way, created_at=created_at)
