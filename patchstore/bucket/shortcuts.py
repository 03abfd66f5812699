"""Shortcuts: further ways to reach a version, added after the version exists.

A shortcut is a small record beside the versions. It names either an anchor of a version, or a *rollup*: one
delta from an older version, in place of all deltas between. Anyone who may write the bucket can add one at
any time. A shortcut changes no version. Readers may use it, and the version's state digest, which its own
manifest names, proves what they reach. No reader needs a rollup. An anchor may become the only way to a
version, when what it replaces is deleted. A record contains the version's manifest, byte for byte, so that a
reader of the record needs no other object to know the version and its parent.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from patchstore.bucket import digests, history, manifest_json
from patchstore.bucket.manifest_json import MAX_JSON_BYTES, Record
from patchstore.bucket.notes import Began, spelled
from patchstore.bucket.records import FORMAT_VERSION, Anchor, Delta, Ends, Manifest, Payload
from patchstore.errors import CorruptObject, NotFound, PublishFailed, UsageError
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.support import host


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
    """Read a shortcut."""
    return parsed(ends, stored(store, ends))


def stored(store: Store, ends: Ends) -> bytes:
    """Return a shortcut byte for byte; what it says is not checked. Raises NotFound."""
    return history.small(store, layout.shortcut_key(ends.version, ends.parent), MAX_JSON_BYTES)


def create(
    store: Store,
    ends: Ends,
    manifest: bytes,
    parent_digest: str | None,
    *,
    part: Anchor | Delta,
    began: Began,
    replaced: bytes | None = None,
) -> bool:
    """Add a shortcut, unless there is one between the same versions. Its payloads must be stored already.

    Args:
        began: before the first of its payloads was stored.
        replaced: a record in its place that was found to be damaged, which is deleted first.
    """
    data = manifest_json.dump(
        {
            "format_version": FORMAT_VERSION,
            "parent": ends.parent,
            "parent_digest": parent_digest,
            "created_at": spelled(began.clock()),
            "delta": manifest_json.delta_fields(part) if isinstance(part, Delta) else None,
            "anchor": manifest_json.anchor_fields(part) if isinstance(part, Anchor) else None,
            "manifest": manifest.decode(),
        }
    )
    try:
        parsed(ends, data)
    except CorruptObject as exc:
        raise UsageError(f"not stored, as readers would refuse it: {exc}") from exc
    if replaced is not None:
        withdraw(store, ends, replaced)
    return put(store, ends, data, began)


class TooLate(PublishFailed):
    """A shortcut was not added: a collector may have deleted its payloads, which nothing named for a day."""


def put(store: Store, ends: Ends, data: bytes, began: Began) -> bool:
    """Create the record of a shortcut, and look once more whether its payloads are stored.

    Returns:
        Whether it was added; False where there is another one.

    Raises:
        TooLate: its payloads are too old, or were deleted; there is no such record. Store them anew, under
            other names.
        StoreUnavailable: unknown whether it was added; calling again is safe.
    """
    key = layout.shortcut_key(ends.version, ends.parent)
    if began.is_too_old:
        raise TooLate(
            f"{key} was not created, as its payloads were stored more than a day ago, and `patchstore "
            "collect` may be deleting them: they have to be stored anew"
        )
    try:
        is_added = history.create(store, key, data) == data
    except history.Vanished as exc:
        raise TooLate(f"{key} was deleted at once, as `patchstore prune` does: store it anew") from exc
    if not is_added:
        return False
    # This process may have slept after it looked at the time, for longer than a collector waits.
    if lost := absent(store, parsed(ends, data).payloads):
        withdraw(store, ends, data)
        raise TooLate(f"{key} was deleted again, as {lost[0].key} was deleted meanwhile: store it anew")
    return True


def absent(store: Store, payloads: Iterable[Payload]) -> list[Payload]:
    """Return those of some payloads that are not stored, or not in their size."""

    def is_there(wanted: Payload) -> bool:
        try:
            with host.reading(wanted.key):
                return store.size(wanted.key) == wanted.size
        except NotFound:
            return False

    wanted = tuple(payloads)
    found = history.read_many(is_there, wanted)
    return [each for each, is_stored in zip(wanted, found, strict=True) if not is_stored]


def whole(store: Store, ends: Ends, data: bytes) -> Shortcut:
    """Read a shortcut from its bytes, and see whether all objects that it names are there.

    Their bytes are not read. Raises CorruptObject, UnsupportedFormat.
    """
    found = parsed(ends, data)
    if lost := absent(store, found.payloads):
        raise CorruptObject(f"{lost[0].key} is missing, or has not {lost[0].size:,} bytes")
    return found


def withdraw(store: Store, ends: Ends, data: bytes) -> None:
    """Delete the record of a damaged shortcut, unless another process has replaced it."""
    with suppress(NotFound):
        if stored(store, ends) == data:
            store.delete(layout.shortcut_key(ends.version, ends.parent))


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
    return Shortcut(manifest=manifest, digest=digests.digest(data_of_version), way=way, created_at=created_at)
