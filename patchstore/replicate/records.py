"""Bring a replica's tags and retirements to the source's, by what they say and not byte for byte.

A replica has series of its own, so its numbers differ, and its readers have their full grace period from the
moment at which the replica has a retirement.
"""

import logging

from patchstore.format import retired, tags
from patchstore.format.tags import Tag
from patchstore.format.times import Clock, spelled, utc_now
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)


def copy_tags(source: Store, target: Store, run_id: str, newest: int, *, clock: Clock = utc_now) -> int:
    """Set each tag of the target to the version that it has in the source; return how many changed.

    Tags that only the target has stay. So does one whose version the target does not have yet, or has retired
    by itself.

    Args:
        newest: version of the target.

    Raises:
        CorruptObject, UnsupportedFormat: a record cannot be understood.
        StoreUnavailable: a store did not answer; calling again is safe.
    """
    num_set, gone = 0, None
    wanted, there = tags.read_newest(source, run_id), tags.read_newest(target, run_id)
    for name, tag in wanted.items():
        before = there.get(name)
        if tag.version == (None if before is None else before.version) or (tag.version or 0) > newest:
            continue
        if tag.version is not None and gone is None:
            gone = retired.read(target, run_id).up_to(newest - 1)
        if tag.version is not None and gone and tag.version in gone:
            logger.warning(
                "%s: tag %r is not set to version %d, which is retired there", target.url, name, tag.version
            )
            continue
        tags.put(target, Tag(name=name, run_id=run_id, version=tag.version, created_at=spelled(clock())))
        num_set += 1
    return num_set


def copy_retirements(
    source: Store, target: Store, run_id: str, newest: int, *, clock: Clock = utc_now
) -> int:
    """Retire the versions that are retired in the source, and return how many there were.

    Only those before the newest one of the target, and none that a tag has in either. Copy tags before.

    Args:
        newest: version of the target.

    Raises:
        CorruptObject, UnsupportedFormat: a record cannot be understood.
        StoreUnavailable: a store did not answer; calling again is safe.
    """
    gone = retired.read(source, run_id).up_to(newest - 1).keys()
    if not gone:
        return 0
    # Read after the retirements: a tag that is older than one of them is here.
    tagged = {tag.version for store in (source, target) for tag in tags.read_newest(store, run_id).values()}
    missing = gone - tagged - retired.read(target, run_id).up_to(newest - 1).keys()
    if missing:
        retired.put(target, run_id, missing, clock())
    return len(missing)
