"""Which versions a policy keeps, and deletion of payloads that no kept version needs.

Readers refuse a retired version from then on. Its manifest stays, so the chain of digests still proves what a
version descends from. A day later a collector may delete its payloads: objects below `anchors/`, `deltas/`,
`states/` and `pieces/`, and shortcuts over retired versions. An anchor that was added to a version later may
take the place of all that the version was rebuilt from; it is read and proved first.

What may go is found first, without writing, and deleted then. What may go now may also go later: a retired
version does not come back after its grace period, and a number that was taken is taken for ever. So a
collector may sleep, be killed at any point, or run twice at once.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

from patchstore.bucket import history, kept, notes, shortcuts
from patchstore.bucket.kept import delete_tag, tag
from patchstore.bucket.manifest_json import time_of
from patchstore.bucket.notes import CLOCK_MARGIN, GRACE, Clock, Range, Retired, Tag
from patchstore.bucket.records import Ends, Manifest
from patchstore.bucket.shortcuts import Shortcut
from patchstore.errors import CorruptObject, NotFound, StateMismatch, UsageError, VersionNotFound
from patchstore.stores import layout, opens_store
from patchstore.stores.base import Store

__all__ = ["Collection", "Retention", "Retirement", "collect", "delete_tag", "retire", "tag"]

_MAX_DAYS = 36_500
_NUM_AT_ONCE = 8
"""Requests that delete."""
_PROBE = re.compile(rf"{layout.PROBES}(time-)?[0-9a-f]{{32}}(/[\w-]+)?")
"""Keys that patchstore gives to what it stores for a moment."""


# What a store holds, from which anchors its versions are rebuilt, and over which other versions.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """The keys of a store, sorted into kinds. Those of no kind are of others, and left alone."""

    stored: frozenset[str]
    """All keys."""
    attempts: dict[str, list[str]]
    """The objects of each attempt, by what `layout.attempt_of` returns."""
    versions: dict[str, int]
    """The version that each attempt was for."""
    notes: tuple[str, ...]
    """Records of the series `unnamed/`."""
    shortcuts: tuple[Ends, ...]

    @classmethod
    def of(cls, store: Store) -> "_Listing":
        """List a store. No object is read."""
        keys = notes.keys(store, "")
        attempts: dict[str, list[str]] = {}
        versions: dict[str, int] = {}
        for key in keys:
            if (found := layout.attempt_of(key)) is not None:
                attempts.setdefault(found[1], []).append(key)
                versions[found[1]] = found[0]
        ends = (layout.shortcut_ends(key) for key in keys)
        return cls(
            stored=frozenset(keys),
            attempts=attempts,
            versions=versions,
            notes=tuple(key for key in keys if layout.record_number(layout.UNNAMED, key) is not None),
            shortcuts=tuple(Ends(*each) for each in ends if each is not None),
        )


def _signed_versions(store: Store) -> set[int]:
    """Return the versions that have a signature. A publisher stores it before the manifest."""
    found = map(layout.signed_version, notes.keys(store, layout.SIGNATURES))
    return {version for version in found if version is not None}


def _read_all(store: Store) -> tuple[dict[int, Manifest], Manifest]:
    """Return all manifests by version, and the newest."""
    header = history.read_header(store)
    newest = None if header is None else history.head(store)
    if header is None or newest is None:
        raise VersionNotFound(f"{store.url} holds no version")
    history.check_newest(store, newest)
    try:
        found = {each.version: each for each in history.read_back(store, newest.version)}
    except VersionNotFound as exc:
        raise CorruptObject(
            f"{exc}, though it has version {newest.version}: a manifest was removed, so it is not known "
            "which payloads the others need. Put it back"
        ) from exc
    for each in found.values():
        history.check_same_run(store, each, header.run_id)
    return found, newest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The ways to some versions."""

    versions: Set[int]
    """These versions, and all that they are rebuilt from."""
    anchors: Set[int]
    """Of these the ones where the ways begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """The way to a version begins at its nearest anchor.

    An anchor that was added later counts, except for a version that is signed: no signature covers that
    anchor, so readers that require keys do not use it.
    """

    manifests: Mapping[int, Manifest]
    """Of the run, by version."""
    added: Set[int]
    """Versions that have an anchor among the shortcuts."""
    signed: Set[int]

    def to(self, wanted: Iterable[int]) -> _Found:
        """Return what versions are rebuilt from. Raises CorruptObject."""
        wanted = set(wanted)
        signed, plain = self._walked(wanted & self.signed, frozenset()), self.to_plain(wanted - self.signed)
        return _Found(versions=signed.versions | plain.versions, anchors=signed.anchors | plain.anchors)

    def to_plain(self, wanted: Iterable[int]) -> _Found:
        """Return the same for readers that require no keys."""
        return self._walked(wanted, self.added)

    def relied_on(self, wanted: Iterable[int], is_lost: Callable[[int], bool]) -> list[int]:
        """Return the versions whose added anchors take the place of what is lost of those before them."""
        found = []
        for version in sorted(self.to_plain(set(wanted) - self.signed).anchors & self.added):
            parent = self.manifests[version].parent
            before = self.to_plain([] if parent is None else [parent]).versions
            if any(map(is_lost, before)):
                found.append(version)
        return found

    def _walked(self, wanted: Iterable[int], added: Set[int]) -> _Found:
        versions, anchors = set[int](), set[int]()
        for version in sorted(wanted):
            at: int | None = version
            # Most versions share their way with one before, so each step is taken once.
            while at not in versions:
                found = None if at is None else self.manifests.get(at)
                if found is None:
                    raise CorruptObject(
                        f"version {version} cannot be rebuilt: there is no anchor among its ancestors"
                    )
                versions.add(found.version)
                if found.anchor is not None or found.version in added:
                    anchors.add(found.version)
                    break
                at = found.parent
        return _Found(versions=versions, anchors=anchors)


def _read_shortcuts(store: Store, listed: Iterable[Ends]) -> dict[Ends, Shortcut]:
    """Read shortcuts."""

    def read(ends: Ends) -> tuple[Ends, Shortcut] | None:
        try:
            return ends, shortcuts.read(store, ends)
        except NotFound:
            # Another collector deleted it.
            return None
        except CorruptObject as exc:
            raise CorruptObject(
                f"{exc}. So it is not known which payloads it names, and nothing was changed: delete this "
                "record, run `patchstore compact`, and try again"
            ) from exc

    return dict(each for each in history.read_many(read, listed) if each is not None)


def _whole_anchors(
    found: Iterable[Shortcut], manifests: Mapping[int, Manifest], stored: Set[str]
) -> dict[int, Shortcut]:
    """Return the anchors among some shortcuts whose objects are there, by version. They are not read here."""
    return {
        each.manifest.version: each
        for each in found
        if each.is_anchor
        and each.created_at is not None
        and each.manifest.anchor is None
        and manifests.get(each.manifest.version) == each.manifest
        and all(payload.key in stored for payload in each.payloads)
    }


def _prove(store: Store, versions: Iterable[int]) -> None:
    """Read the anchors among the shortcuts of versions, and compare them with the versions' digests."""
    from patchstore.read.rebuild import check_anchor

    header = history.read_header(store)
    assert header is not None
    for version in versions:
        ends = Ends(version, None)
        try:
            check_anchor(store, header, shortcuts.read(store, ends).way)
        except (CorruptObject, StateMismatch) as exc:
            raise type(exc)(
                f"the anchor that was added to version {version} is wrong, so nothing was changed: {exc}. "
                f"Delete {layout.shortcut_key(version, None)}, run `patchstore compact`, and try again a day "
                "later"
            ) from exc


# Retirement.


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which versions to keep: those that any of the rules keeps, and always the newest one.

    Raises:
        UsageError: no rule is given, or one is impossible.
    """

    keep_last: int | None = None
    """The newest so many versions."""
    keep_every: int | None = None
    """Versions whose number is a multiple of this."""
    keep_days: float | None = None
    """Versions that were created in the last so many days, and two hours more, as clocks may be wrong."""
    keep_tags: bool = True
    """Versions that have a tag. With False a tagged version that no other rule keeps is an error; it is never
    retired."""

    def __post_init__(self) -> None:
        # It imports numpy, which commands that only look at a bucket do without.
        from patchstore.support.arguments import whole_number

        if self.keep_last is None and self.keep_every is None and self.keep_days is None:
            raise UsageError(
                "say which versions to keep: keep_last, keep_every or keep_days. With none of them all but "
                "the newest would be retired"
            )
        for name in ("keep_last", "keep_every"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), least=1)
        days = self.keep_days
        if days is not None and (type(days) not in (int, float) or not 0 <= days <= _MAX_DAYS):
            raise UsageError(f"keep_days must be a number of days from 0 to {_MAX_DAYS}, not {days!r:.100}")
        if type(self.keep_tags) is not bool:
            raise UsageError(f"keep_tags must be True or False, not {self.keep_tags!r:.100}")

    def keeps(self, version: Manifest, newest: Manifest, now: datetime) -> bool:
        """Whether a rule other than `keep_tags` keeps a version."""
        if version.version == newest.version:
            return True
        if self.keep_last is not None and version.version > newest.version - self.keep_last:
            return True
        if self.keep_every is not None and version.version % self.keep_every == 0:
            return True
        if self.keep_days is None:
            return False
        return time_of(version.created_at) + timedelta(days=self.keep_days) + CLOCK_MARGIN >= now


@dataclass(frozen=True, slots=True, kw_only=True)
class Retirement:
    """What `retire` found, and did if it was told to."""

    newest: int
    """The newest version."""
    kept: tuple[Range, ...]
    """Versions that stay, as ranges."""
    retired: tuple[Range, ...]
    """Versions that this call retires, or would retire."""
    num_retired: int
    num_before: int
    """Versions that were retired before."""
    not_before: str | None
    """When their payloads may be deleted; None if nothing was written."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


@opens_store
def retire(
    store: Store, retention: Retention, *, dry_run: bool = True, clock: Clock | None = None
) -> Retirement:
    """Retire all versions that a policy does not keep.

    Kept besides, whatever the policy says: the newest version, all that have a tag, and for each kept version
    the one whose anchor it is rebuilt from, which may be among the shortcuts.

    Args:
        dry_run: write nothing.
        clock: see `kept.now`.

    Raises:
        VersionNotFound: the store holds no version.
        CorruptObject, UnsupportedFormat: a manifest or record is missing, or cannot be understood. Nothing
            was retired.
        CorruptObject, StateMismatch: an anchor that was added to a version, and that takes the place of what
            is retired, is wrong. Nothing was retired.
        UsageError: a tagged version is kept by no rule, and the policy has `keep_tags=False`; or a clock is
            far behind the trainer's or the store's. Nothing was retired.
        StoreUnavailable: unknown whether it was written; calling again is safe.
    """
    manifests, newest = _read_all(store)
    now = kept.now(store, clock, may_write=not dry_run)
    kept.check_clock(newest.created_at, lambda: now)
    before = notes.retirements(store, newest.run_id).among(manifests)
    tagged = {tag.version: tag.name for tag in notes.read_tags(store, newest.run_id).values()}
    wanted = {v for v, manifest in manifests.items() if retention.keeps(manifest, newest, now)}
    if not retention.keep_tags and (stray := sorted(v for v in tagged if v is not None and v not in wanted)):
        raise UsageError(
            f"version {stray[0]} has the tag {tagged[stray[0]]!r}, and no other rule keeps it: delete the "
            "tag, or keep tagged versions"
        )
    # A version that an earlier call retired stays retired, and is not worth an anchor.
    wanted = {v for v in wanted if v not in before or v == newest.version}
    wanted |= {version for version in tagged if version in manifests}
    found = _read_shortcuts(store, (each for each in shortcuts.listed(store) if each.parent is None))
    # Also those that `collect` does not count yet: a day later it does.
    added = _whole_anchors(found.values(), manifests, frozenset(notes.keys(store, "anchors/"))).keys()
    ways = _Ways(manifests=manifests, added=added, signed=_signed_versions(store))
    wanted |= ways.to(wanted).anchors
    gone = [version for version in manifests if version not in wanted and version not in before]
    stay = {version for version in wanted if version not in before or version in tagged} | {newest.version}
    not_before = None
    if gone and not dry_run:
        _prove(store, ways.relied_on(wanted, set(gone).__contains__))
        # Asked anew, as this process may have slept: the grace period begins with the record.
        retired_at = kept.now(store, clock, may_write=True)
        not_before = notes.retire(store, newest.run_id, gone, retired_at)[-1].not_before
    return Retirement(
        newest=newest.version,
        kept=notes.ranges(stay),
        retired=notes.ranges(gone),
        num_retired=len(gone),
        num_before=len(before.keys() - stay),
        not_before=not_before,
    )


# Collection.


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What a pass found, and did if it was told to."""

    deleted: bool
    """Whether the objects were deleted, and the attempts were noted."""
    num_versions: int
    """Retired versions with payloads that may go."""
    num_waiting: int
    """Retired versions whose grace period has not passed."""
    num_reserved: int
    """Retired versions that a publisher is about to build on."""
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
        return {name: value for name, value in asdict(self).items() if name != "keys"}


@opens_store
def collect(store: Store, *, dry_run: bool = True, clock: Clock | None = None) -> Collection:
    """Delete the payloads of retired versions, and objects of attempts that came to nothing.

    An attempt that no manifest names is noted by one pass, and deleted by a later one: 24 hours later,
    and only if the version that it was for exists without it.

    Args:
        dry_run: write nothing and delete nothing.
        clock: see `kept.now`.

    Raises:
        VersionNotFound: the store holds no version.
        CorruptObject: a manifest or record is missing or damaged, or a kept version cannot be rebuilt.
        StateMismatch: an anchor that was added to a version has other weights.
        UnsupportedFormat: a manifest or record is of a format or kind that this release does not know.
        UsageError: a clock is far behind the trainer's or the store's. After each of these nothing was
            deleted.
        StoreUnavailable: some objects may be deleted, and others not. Calling again is safe.
    """
    # Before all reads: what may go at this time was retired a day before them.
    now = kept.now(store, clock, may_write=not dry_run)
    # The order is the protocol, as this process may sleep between any two reads. The listing comes first: an
    # object that it shows, and that no manifest read later names, was for a version that another attempt
    # took. Tags come after retirements: a tag that outranks one was set before it. The manifests come last: a
    # publisher that builds on an older version reserves it until the new version exists, and does so before
    # it looks for retirements. So its reservation is seen here, or else its version.
    listing = _Listing.of(store)
    header = history.read_header(store)
    run_id = None if header is None else header.run_id
    records = notes.retirements(store, run_id)
    tagged = {tag.version for tag in notes.read_tags(store, run_id).values()}
    reservations = notes.reservations(store, run_id)
    manifests, newest = _read_all(store)
    # As the listing may be older than a version and its signature.
    signed = _signed_versions(store)
    kept.check_clock(newest.created_at, lambda: now)
    run_id = newest.run_id
    gone = records.among(manifests.keys() - tagged - {newest.version})
    # The version of one that ended exists for all from now on, so it does not matter since when.
    live = {each.version for each in reservations if newest.version < each.until_version}
    waiting = _waiting(store, records.records, gone, now)
    reserved = (gone.keys() & live) - waiting
    stay = manifests.keys() - gone.keys() | waiting | reserved
    ripe = {version: manifests[version] for version in gone.keys() - stay}
    shorter = _read_shortcuts(store, listing.shortcuts)
    ways = _Ways(
        manifests=manifests,
        added=_old(store, _whole_anchors(shorter.values(), manifests, listing.stored), now),
        signed=signed,
    )
    found = ways.to(stay)
    spare = _spare(shorter, ripe.keys(), found, ways.to_plain(stay))
    needed = {each.key for version in found.versions for each in manifests[version].objects}
    needed |= {each.key for ends in shorter.keys() - spare for each in shorter[ends].payloads}
    owned = [*(manifest.objects for manifest in ripe.values()), *(shorter[ends].payloads for ends in spare)]
    garbage = _garbage([[each.key for each in some] for some in owned], listing, needed)
    names = {each.key for manifest in manifests.values() for each in manifest.objects}
    names |= {each.key for shortcut in shorter.values() for each in shortcut.payloads}
    strays = _strays(listing, names | needed, newest.version)
    noted_orphans = notes.orphans(store, listing.notes, run_id)
    due = {
        attempt
        for key, note in noted_orphans.items()
        if kept.has_passed(store, key, note.created_at, GRACE + CLOCK_MARGIN, now)
        for attempt in note.attempts
    }
    noted = {attempt for note in noted_orphans.values() for attempt in note.attempts}
    old = [key for attempt in sorted(strays.keys() & due) for key in strays[attempt]]
    sizes = {each.key: each.size for some in owned for each in some}
    versions = {v for v, manifest in ripe.items() if any(each.key in garbage for each in manifest.objects)}
    to_prove = ways.relied_on(
        stay,
        lambda before: (
            Ends(before, None) in spare or any(each.key in garbage for each in manifests[before].objects)
        ),
    )
    objects = (*sorted(garbage), *old)
    # Their publishers were killed.
    ended = [each.key for each in reservations if newest.version >= each.until_version]
    # An earlier pass deleted all their attempts.
    old_notes = [
        key
        for key, note in noted_orphans.items()
        if all(attempt in due and attempt not in strays for attempt in note.attempts)
    ]
    new = tuple(sorted(strays.keys() - noted))
    if not dry_run:
        _prove(store, to_prove)
        if new:
            # The time is later than the listing that showed them.
            notes.note_orphans(store, run_id, new, kept.now(store, clock, may_write=True))
        # Before what they name, so that no reader chooses a way that is being deleted.
        _delete(store, sorted(layout.shortcut_key(each.version, each.parent) for each in spare))
        _delete(store, objects)
        _delete(store, [*ended, *old_notes, *_old_probes(store, now)])
    return Collection(
        deleted=not dry_run,
        num_versions=len(versions),
        num_waiting=len(waiting),
        num_reserved=len(reserved),
        num_objects=len(objects),
        num_bytes=sum(sizes.get(key, 0) for key in garbage),
        num_unnamed=len(old),
        num_proved=len(to_prove),
        num_noted=len(new),
        keys=objects,
    )


def _delete(store: Store, keys: Iterable[str]) -> None:
    with ThreadPoolExecutor(_NUM_AT_ONCE, thread_name_prefix="patchstore-collect") as pool:
        try:
            for _ in pool.map(store.delete, keys):
                pass
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _old_probes(store: Store, now: datetime) -> list[str]:
    """Return what killed processes left below `probes/`, if it is a day old by the store's clock."""

    def is_old(key: str) -> bool:
        try:
            at = store.stored_at(key)
        except NotFound:
            return False
        return at is not None and at + GRACE <= now

    return [key for key in notes.keys(store, layout.PROBES) if _PROBE.fullmatch(key) and is_old(key)]


def _waiting(
    store: Store, records: Sequence[Retired], gone: Mapping[int, Retired], now: datetime
) -> set[int]:
    """Return the retired versions whose grace period has not passed.

    It begins when the version was retired, and anew when a tag left it: until then readers were not refused.
    """
    young = set()
    for record in reversed(records):
        if kept.has_passed(store, record.key, record.created_at, GRACE, now):
            # So it has for those that were there before.
            break
        young.add(record.key)
    found = {v for v, record in gone.items() if record.key in young or time_of(record.not_before) > now}
    if found == gone.keys():
        return found

    def counts(tag: Tag) -> bool:
        return not kept.has_passed(store, tag.key, tag.created_at, GRACE, now)

    return found | (gone.keys() & {version for version, _ in notes.left_tags(store, counts)})


def _old(store: Store, anchors: Mapping[int, Shortcut], now: datetime) -> set[int]:
    """Return the versions whose added anchors may take the place of what leads to them.

    Such an anchor is as old as a retirement must be, so that readers which began without it have their day.
    """

    def is_old(version: int) -> bool:
        created_at = anchors[version].created_at
        key = layout.shortcut_key(version, None)
        return created_at is not None and kept.has_passed(store, key, created_at, GRACE, now)

    counts = history.read_many(is_old, anchors)
    return {version for version, is_counted in zip(anchors, counts, strict=True) if is_counted}


def _spare(listed: Iterable[Ends], ripe: Set[int], ways: _Found, plain: _Found) -> set[Ends]:
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


def _garbage(ripe: Iterable[Iterable[str]], listing: _Listing, needed: set[str]) -> set[str]:
    """Return the stored objects of attempts that retired versions name, and that nothing else needs."""
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


def _strays(listing: _Listing, names: Iterable[str], newest: int) -> dict[str, list[str]]:
    """Return the objects of attempts that nothing names, by attempt.

    Without those for a version that does not exist yet: a publisher that slept may still commit it.
    """
    kept_attempts = {found[1] for key in names if (found := layout.attempt_of(key)) is not None}
    return {
        attempt: keys
        for attempt, keys in listing.attempts.items()
        if attempt not in kept_attempts and listing.versions[attempt] <= newest
    }
