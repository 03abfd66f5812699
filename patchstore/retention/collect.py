"""Delete payloads that no kept version needs.

Deleted are only objects below `anchors/`, `deltas/`, `states/` and `pieces/`, and shortcuts over retired
versions, never a manifest. An anchor that was added to a version later may take the place of all that the
version was rebuilt from; it is read and proved first. What may go is found first, without writing, and
deleted then. What may go now may also go later: a retired version does not come back after its grace period,
and a number that was taken is taken for ever. So a collector may sleep, be killed at any point, or run twice
at once.
"""

from collections.abc import Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from patchstore.errors import CorruptObject, NotFound, StateMismatch
from patchstore.format import history, kept, layout, leases, retired, shortcuts, tags, unnamed
from patchstore.format.json_fields import time_of
from patchstore.format.leases import LeaseRecord
from patchstore.format.records import Manifest
from patchstore.format.shortcuts import Ends, Shortcut
from patchstore.format.times import CLOCK_MARGIN, GRACE, Clock, utc_now
from patchstore.retention.listing import Listing
from patchstore.retention.retire import read_all
from patchstore.retention.ways import Found, Ways
from patchstore.stores.base import Store

_NUM_AT_ONCE = 8
"""Requests that delete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What a pass found, and did if it was told to."""

    deleted: bool
    """Whether the objects were deleted, and the attempts were noted."""
    num_versions: int
    """Retired versions with payloads that may go."""
    num_waiting: int
    """Retired versions whose grace period has not passed."""
    num_leased: int
    """Retired versions that a lease holds."""
    num_objects: int
    """Objects that may go."""
    num_bytes: int
    """Of those that a manifest or a shortcut names; the size of others is not known."""
    num_unnamed: int
    """Of the objects that may go, those of attempts that no manifest names."""
    num_proved: int
    """Anchors that were added later and take the place of what may go. They are read before that goes."""
    num_noted: int
    """Such attempts that were seen for the first time, and may go after the grace period."""
    keys: tuple[str, ...] = field(repr=False)
    """The objects that may go."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the keys."""
        names = [name for name in Collection.__dataclass_fields__ if name != "keys"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Findings:
    """What may be done in one store."""

    run_id: str
    to_prove: tuple[int, ...]
    """Versions whose anchors among the shortcuts take the place of what goes."""
    shortcuts: tuple[str, ...]
    """Records of shortcuts that go."""
    objects: tuple[str, ...]
    """Payloads of retired versions, and of attempts that no manifest names."""
    records: tuple[str, ...]
    """Records that say nothing any more: of leases that expired, and notes of what is gone."""
    new_attempts: tuple[str, ...]
    report: Collection


def collect(store: Store, *, dry_run: bool = True, clock: Clock = utc_now) -> Collection:
    """Delete the payloads of retired versions, and objects of attempts that came to nothing.

    An attempt that no manifest names is noted by one pass, and deleted by a later one: `times.GRACE` later,
    and only if the version that it was for exists without it.

    Args:
        dry_run: write nothing and delete nothing.

    Raises:
        VersionNotFound: the store holds no version.
        CorruptObject: a manifest or record is missing or damaged, or a kept version cannot be rebuilt.
        StateMismatch: an anchor that was added to a version has other weights.
        UnsupportedFormat: a manifest or record is of a format or kind that this release does not know.
        UsageError: this machine's clock is far behind the trainer's. After each of these nothing was deleted.
        StoreUnavailable: some objects may be deleted, and others not. Calling again is safe.
    """
    found = _find(store, clock)
    if not dry_run:
        _prove(store, found.to_prove)
        if found.new_attempts:
            unnamed.put(store, found.run_id, found.new_attempts, clock())
        # Before what they name, so that no reader chooses a way that is being deleted.
        _delete(store, found.shortcuts)
        _delete(store, found.objects)
        _delete(store, found.records)
    return replace(found.report, deleted=not dry_run)


def _delete(store: Store, keys: Iterable[str]) -> None:
    with ThreadPoolExecutor(_NUM_AT_ONCE, thread_name_prefix="patchstore-collect") as pool:
        try:
            for _ in pool.map(store.delete, keys):
                pass
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _find(store: Store, clock: Clock) -> _Findings:
    # The listing comes first: an object that it shows, and that no manifest read later names, was for a
    # version that another attempt took.
    listing = Listing.of(store)
    manifests, newest = read_all(store)
    kept.check_clock(newest.created_at, clock)
    now = clock()
    run_id = newest.run_id
    gone = retired.read(store, run_id).up_to(newest.version - 1)
    for tag in tags.read_all(store, run_id).values():
        gone.pop(-1 if tag.version is None else tag.version, None)
    held, lease_keys = leases.read_newest(store, run_id)
    live = {version for lease in held if lease.is_live(now) for version in lease.versions}
    waiting = {v for v, record in gone.items() if time_of(record.not_before) > now}
    leased = (gone.keys() & live) - waiting
    stay = manifests.keys() - gone.keys() | waiting | leased
    ripe = {version: manifests[version] for version in gone.keys() - stay}
    shorter = _shortcuts(store, listing.shortcuts)
    ways = Ways(
        manifests=manifests,
        added=_added(shorter.values(), manifests, listing.stored, now),
        signed=listing.signed,
    )
    found = ways.to(stay)
    spare = _spare(shorter, ripe.keys(), found, ways.to_plain(stay))
    needed = {each.key for version in found.versions for each in manifests[version].objects}
    needed |= listing.named_elsewhere(store)
    needed |= {each.key for ends in shorter.keys() - spare for each in shorter[ends].payloads}
    owned = [*(manifest.objects for manifest in ripe.values()), *(shorter[ends].payloads for ends in spare)]
    garbage = _garbage([[each.key for each in some] for some in owned], listing, needed)
    names = {each.key for manifest in manifests.values() for each in manifest.objects}
    names |= {each.key for shortcut in shorter.values() for each in shortcut.payloads}
    strays = _strays(listing, names | needed, newest.version)
    notes = unnamed.read_all(store, listing.notes, run_id)
    due = {
        attempt
        for note in notes.values()
        if time_of(note.created_at) + GRACE + CLOCK_MARGIN <= now
        for attempt in note.attempts
    }
    noted = {attempt for note in notes.values() for attempt in note.attempts}
    old = [key for attempt in sorted(strays.keys() & due) for key in strays[attempt]]
    sizes = {each.key: each.size for some in owned for each in some}
    versions = {v for v, manifest in ripe.items() if any(each.key in garbage for each in manifest.objects)}
    to_prove = [
        version
        for version in sorted(ways.to_plain(stay - listing.signed).anchors & ways.added)
        if any(
            Ends(before, None) in spare or any(each.key in garbage for each in manifests[before].objects)
            for before in ways.before(version)
        )
    ]
    objects = (*sorted(garbage), *old)
    new = tuple(sorted(strays.keys() - noted))
    return _Findings(
        run_id=run_id,
        to_prove=tuple(to_prove),
        shortcuts=tuple(sorted(layout.shortcut_key(each.version, each.parent) for each in spare)),
        objects=objects,
        records=(*_spent_leases(held, lease_keys, now), *_spent_notes(notes, strays, due)),
        new_attempts=new,
        report=Collection(
            deleted=False,
            num_versions=len(versions),
            num_waiting=len(waiting),
            num_leased=len(leased),
            num_objects=len(objects),
            num_bytes=sum(sizes.get(key, 0) for key in garbage),
            num_unnamed=len(old),
            num_proved=len(to_prove),
            num_noted=len(new),
            keys=objects,
        ),
    )


def _shortcuts(store: Store, listed: Iterable[Ends]) -> dict[Ends, Shortcut]:
    """Read shortcuts. Raises CorruptObject, UnsupportedFormat: one cannot be understood."""

    def read(ends: Ends) -> tuple[Ends, Shortcut] | None:
        try:
            return ends, shortcuts.read(store, ends)
        except NotFound:
            # Another collector deleted it.
            return None

    with ThreadPoolExecutor(history.READ_AHEAD, thread_name_prefix="patchstore-collect") as pool:
        return dict(each for each in pool.map(read, listed) if each is not None)


def _added(
    shorter: Iterable[Shortcut], manifests: Mapping[int, Manifest], stored: Set[str], now: datetime
) -> set[int]:
    """Return the versions whose anchor among the shortcuts may take the place of what leads to them.

    That anchor is as old as a retirement must be, so that readers which began without it have their day.
    """
    return {
        each.manifest.version
        for each in shorter
        if each.is_anchor
        and each.created_at is not None
        and time_of(each.created_at) + GRACE <= now
        and each.manifest.anchor is None
        and manifests.get(each.manifest.version) == each.manifest
        and all(payload.key in stored for payload in each.payloads)
    }


def _spare(listed: Iterable[Ends], ripe: Set[int], ways: Found, plain: Found) -> set[Ends]:
    """Return the shortcuts that go: rollups over versions that are lost, and anchors beside all ways.

    An anchor stays at every version that a way passes, also where it does not count: it may count for another
    collector, which sees more of the store. It stays beside the way of a signed version, which takes longer.
    """
    found, lost = set(), sorted(ripe - ways.versions)
    for each in listed:
        if each.parent is None:
            is_spare = each.version in ripe and each.version not in plain.versions
        else:
            is_spare = each.version in ripe or each.leads_over(lost)
        if is_spare:
            found.add(each)
    return found


def _prove(store: Store, versions: Iterable[int]) -> None:
    """Read the anchors among the shortcuts of versions, and compare them with the versions' digests.

    Raises:
        CorruptObject, StateMismatch: one is wrong.
    """
    from patchstore.read.anchors import check_anchor

    header = history.read_header(store)
    assert header is not None
    for version in versions:
        ends = Ends(version, None)
        try:
            check_anchor(store, header, shortcuts.read(store, ends).way)
        except (CorruptObject, StateMismatch) as exc:
            raise type(exc)(
                f"the anchor that was added to version {version} is wrong, so nothing was deleted: {exc}. "
                f"Delete {layout.shortcut_key(version, None)}, run `patchstore compact`, and try again a day "
                "later"
            ) from exc


def _garbage(ripe: Iterable[Iterable[str]], listing: Listing, needed: set[str]) -> set[str]:
    """Return the stored objects of attempts that retired versions name, and that nothing else needs.

    Args:
        ripe: the keys that each of these versions names.
    """
    needed_attempts = {found[1] for key in needed if (found := layout.attempt_of(key)) is not None}
    garbage = set()
    for keys in ripe:
        for key in keys:
            found = layout.attempt_of(key)
            if found is None:
                # A writer may name its folders in another way. Then only what the manifest names may go.
                if key not in needed and key in listing.stored:
                    garbage.add(key)
            elif found[1] not in needed_attempts:
                garbage.update(listing.attempts.get(found[1], ()))
    return garbage


def _strays(listing: Listing, names: Iterable[str], newest: int) -> dict[str, list[str]]:
    """Return the objects of attempts that nothing names, by attempt.

    Without those for a version that does not exist yet: a publisher that slept may still commit it.

    Args:
        names: all keys that anything names.
    """
    kept_attempts = {found[1] for key in names if (found := layout.attempt_of(key)) is not None}
    return {
        attempt: keys
        for attempt, keys in listing.attempts.items()
        if attempt not in kept_attempts and listing.versions[attempt] <= newest
    }


def _spent_leases(held: list[LeaseRecord], keys: Mapping[str, list[str]], now: datetime) -> list[str]:
    """Return all records of leases that expired long ago. Their holders were killed."""
    dead = [lease.holder for lease in held if time_of(lease.expires_at) + GRACE + CLOCK_MARGIN <= now]
    return [key for holder in dead for key in keys[holder]]


def _spent_notes(
    notes: Mapping[str, unnamed.Note], strays: Mapping[str, list[str]], due: set[str]
) -> list[str]:
    """Return notes whose attempts are all gone: deleted by an earlier pass."""
    return [
        key
        for key, note in notes.items()
        if all(attempt in due and attempt not in strays for attempt in note.attempts)
    ]
