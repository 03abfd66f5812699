"""Retire versions: from now on readers refuse them, and later their payloads may be deleted.

Nothing is deleted here, and no manifest is changed, so the chain of digests still proves what a version
descends from.
"""

from dataclasses import dataclass
from typing import Any

from patchstore.errors import CorruptObject, UsageError, VersionNotFound
from patchstore.format import history, kept, layout, retired, series, shortcuts, tags
from patchstore.format.records import Manifest
from patchstore.format.retired import Range
from patchstore.format.times import Clock, utc_now
from patchstore.retention.policy import Retention
from patchstore.retention.ways import Ways
from patchstore.stores.base import Store


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
        return {
            "newest": self.newest,
            "kept": [list(each) for each in self.kept],
            "retired": [list(each) for each in self.retired],
            "num_retired": self.num_retired,
            "num_before": self.num_before,
            "not_before": self.not_before,
        }


def retire(store: Store, retention: Retention, *, dry_run: bool = True, clock: Clock = utc_now) -> Retirement:
    """Retire all versions that a policy does not keep.

    Kept besides, whatever the policy says: the newest version, all that have a tag, and for each kept version
    the one whose anchor it is rebuilt from, which may be among the shortcuts.

    Args:
        dry_run: write nothing.

    Raises:
        VersionNotFound: the store holds no version.
        CorruptObject, UnsupportedFormat: a manifest or record is missing, or cannot be understood. Nothing
            was written.
        UsageError: a tagged version is kept by no rule, and the policy has `keep_tags=False`; or this
            machine's clock is far behind the trainer's. Nothing was written.
        StoreUnavailable: unknown whether it was written; calling again is safe.
    """
    manifests, newest = read_all(store)
    kept.check_clock(newest.created_at, clock)
    now = clock()
    before = retired.read(store, newest.run_id).up_to(newest.version)
    tagged = {tag.version: tag.name for tag in tags.read_all(store, newest.run_id).values()}
    wanted = {v for v, manifest in manifests.items() if retention.keeps(manifest, newest, now)}
    if not retention.keep_tags and (stray := sorted(v for v in tagged if v is not None and v not in wanted)):
        raise UsageError(
            f"version {stray[0]} has the tag {tagged[stray[0]]!r}, and no other rule keeps it: delete the "
            "tag, or keep tagged versions"
        )
    # A version that an earlier call retired stays retired, and is not worth an anchor.
    wanted = {v for v in wanted if v not in before or v == newest.version}
    wanted |= {version for version in tagged if version in manifests}
    added = {each.version for each in shortcuts.listed(store) if each.parent is None}
    signed = {
        version
        for key in series.keys(store, layout.SIGNATURES)
        if (version := layout.signed_version(key)) is not None
    }
    wanted |= Ways(manifests=manifests, added=added, signed=signed).to(wanted).anchors
    gone = [version for version in manifests if version not in wanted and version not in before]
    stay = {version for version in wanted if version not in before or version in tagged} | {newest.version}
    not_before = None
    if gone and not dry_run:
        not_before = retired.put(store, newest.run_id, gone, now)[-1].not_before
    return Retirement(
        newest=newest.version,
        kept=retired.ranges(stay),
        retired=retired.ranges(gone),
        num_retired=len(gone),
        num_before=len(before.keys() - stay),
        not_before=not_before,
    )


def read_all(store: Store) -> tuple[dict[int, Manifest], Manifest]:
    """Return all manifests by version, and the newest.

    Raises:
        VersionNotFound: the store holds no version.
        CorruptObject, UnsupportedFormat: a manifest is missing, or cannot be understood.
    """
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
        if each.run_id != header.run_id:
            raise CorruptObject(
                f"version {each.version} of {store.url} is of run {each.run_id}, but the store of run "
                f"{header.run_id}"
            )
    return found, newest
