"""Copy payloads, shortcuts, tags and retirements from a store to another; payloads verified on their way.

A replica may retire versions by itself, and delete their payloads. Where a trainer goes back to such a
version, the versions after it need those payloads again.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from patchstore.bucket import digests, history, kept, notes, shortcuts
from patchstore.bucket.digests import PayloadMissing, missing
from patchstore.bucket.manifest_json import time_of
from patchstore.bucket.notes import GRACE, Began, Tag, spelled, utc_now
from patchstore.bucket.records import Ends, Manifest, Payload
from patchstore.errors import CorruptObject, DataError, NotFound, PatchstoreError, StoreUnavailable
from patchstore.stores import layout, tries
from patchstore.stores.base import Store
from patchstore.support import host

if TYPE_CHECKING:
    # It imports torch, which a copy does not need.
    from patchstore.read.rebuild import Progress

logger = logging.getLogger(__name__)

NUM_COPIES = 4
"""Payloads that are copied at once; each takes 8 parts of 8 MiB each way."""
_NUM_REMEMBERED = 1000
"""Payloads that are known to be in the target: versions with equal weights name the same sums."""
_CORRUPT_ATTEMPTS = 2
"""Tries of a copy whose bytes arrive wrong or not at all: they may be wrong there, or only on their way."""


class Stopped(Exception):
    """The caller asked for an end; nothing of the object was stored."""


def copy(source: Store, target: Store, wanted: Payload, stop: threading.Event) -> int:
    """Make sure that the target has a payload; return how many bytes were copied, 0 if it had it.

    An object that is there is read and verified. If it has other bytes, it is replaced: no version of the
    target needs those, and a store that kept only a part of an upload would stop the replica for ever. What
    is stored always has the digest that the manifest names. Memory: 8 parts each way.
    """
    num_sent, num_corrupt, pause_s = 0, 0, tries.FIRST_PAUSE_S
    for num_tries in range(1, tries.ATTEMPTS + 1):
        try:
            if _has(target, wanted, stop):
                return num_sent
            num_sent = wanted.size
            _send(source, target, wanted, stop)
        except (StoreUnavailable, _Arrived) as exc:
            num_corrupt += isinstance(exc, _Arrived)
            if num_tries == tries.ATTEMPTS or num_corrupt == _CORRUPT_ATTEMPTS:
                raise (exc.error if isinstance(exc, _Arrived) else exc) from exc
            logger.warning("copying %s failed, trying again in %.1f s: %s", wanted.key, pause_s, exc)
            if stop.wait(pause_s):
                raise Stopped from exc
            pause_s *= 2
        else:
            return num_sent
    raise AssertionError("unreachable")


class _Arrived(Exception):
    """Wrong bytes arrived."""

    def __init__(self, error: PatchstoreError) -> None:
        super().__init__(str(error))
        self.error = error


def _send(source: Store, target: Store, wanted: Payload, stop: threading.Event) -> None:
    target.upload(wanted.key, _verified(source, wanted, stop))
    try:
        stored = target.size(wanted.key)
    except NotFound as exc:
        raise StoreUnavailable(f"{target.url}: {wanted.key} was sent, but is not stored") from exc
    if stored != wanted.size:
        raise StoreUnavailable(
            f"{target.url}: {wanted.key}: sent {wanted.size:,} bytes, but {stored:,} are stored"
        )


def _verified(source: Store, wanted: Payload, stop: threading.Event) -> Iterator[bytes]:
    """Stream a payload from the source; raises at the end, before it is stored, if its bytes are wrong."""
    try:
        with host.reading(wanted.key):
            yield from digests.verified(
                until_stopped(stop, source.read(wanted.key, end=wanted.size + 1)), wanted
            )
    except NotFound as exc:
        raise missing(source, wanted) from exc
    except CorruptObject as exc:
        raise _Arrived(CorruptObject(f"{source.url}: {exc}")) from exc


def _has(target: Store, wanted: Payload, stop: threading.Event) -> bool:
    """Whether the target has a payload with the right bytes, as a replicator leaves it that was killed."""
    try:
        if target.size(wanted.key) != wanted.size:
            raise CorruptObject(f"{wanted.key} should have {wanted.size:,} bytes")
        with host.reading(wanted.key):
            deque(
                digests.verified(until_stopped(stop, target.read(wanted.key, end=wanted.size + 1)), wanted),
                maxlen=0,
            )
    except NotFound:
        return False
    except CorruptObject as exc:
        logger.warning("%s: %s. It is replaced by the source's", target.url, exc)
        return False
    return True


def until_stopped(stop: threading.Event, chunks: Iterator[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        if stop.is_set():
            raise Stopped
        yield chunk


class Copies:
    """Copies of payloads, each begun once for all versions that name it."""

    def __init__(self, source: Store, target: Store, progress: "Progress | None" = None) -> None:
        self._source, self._target, self._progress = source, target, progress
        self._num_done = self._num_all = 0
        self._begun: dict[Payload, Future[int]] = {}
        # A copy may have ended when it is begun.
        self._lock = threading.RLock()

    def begin(
        self, wanted: Iterable[Payload], pool: ThreadPoolExecutor, stop: threading.Event
    ) -> list[tuple[Future[int], bool]]:
        """Begin to copy payloads; return each copy, and whether it was begun by this call."""
        found = []
        with self._lock:
            for each in wanted:
                if is_new := each not in self._begun:
                    while len(self._begun) >= _NUM_REMEMBERED:
                        del self._begun[next(iter(self._begun))]
                    self._begun[each] = pool.submit(copy, self._source, self._target, each, stop)
                    self._num_all += each.size
                    self._begun[each].add_done_callback(partial(self._advance, each.size))
                found.append((self._begun[each], is_new))
        return found

    def _advance(self, size: int, _: Future[int]) -> None:
        with self._lock:
            self._num_done += size
            if self._progress is not None:
                self._progress(self._num_done, self._num_all)

    def forget_ended(self) -> None:
        """Forget copies that were ended, or failed."""
        self._begun = {
            each: done
            for each, done in self._begun.items()
            if done.done() and not done.cancelled() and done.exception() is None
        }


class Ended(threading.Event):
    """Set by its owner, or through an event of the owner's caller."""

    def __init__(self, stop: threading.Event) -> None:
        super().__init__()
        self._outer = stop

    def is_set(self) -> bool:
        return super().is_set() or self._outer.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            left_s = 0.1 if end is None else min(0.1, end - time.monotonic())
            if left_s <= 0:
                break
            super().wait(left_s)
        return self.is_set()


# The way to a version, back to its nearest anchor: the one that `ops.retention` keeps.


def complete(
    source: Store,
    target: Store,
    version: int,
    stop: threading.Event,
    copy_anchor: Callable[[int], bool] | None = None,
) -> int:
    """Copy what the target lacks of the way to a version that it has; return how many bytes.

    Objects that are there are not read.

    Args:
        copy_anchor: copies the anchor that the source added to a version, and returns whether the target has
            it then. None where anchors among the shortcuts do not count, as for readers that require keys.
    """
    path, missing = lacking(target, version, over_added=copy_anchor is not None)
    num_bytes = 0
    with ThreadPoolExecutor(NUM_COPIES, thread_name_prefix="patchstore-copy") as pool:
        copies = [(of, pool.submit(copy, source, target, each, stop)) for of, each in missing]
        for of, done in copies:
            try:
                num_bytes += done.result()
            except PayloadMissing:
                pool.shutdown(cancel_futures=True)
                between = [each for each in path if each >= of]
                if copy_anchor is None or not any(copy_anchor(each) for each in between):
                    raise
                break
    return num_bytes


def lacking(
    target: Store, version: int, *, over_added: bool = True
) -> tuple[list[int], list[tuple[int, Payload]]]:
    """Return the way from a version back to its nearest anchor, and what a store lacks of it.

    Returns:
        The versions, newest first; and the objects, each with the version that names it.
    """
    added: set[int] = set()
    if over_added:
        added = {each.version for each in shortcuts.listed(target) if each.parent is None}
    path: list[int] = []
    wanted: list[tuple[int, Payload]] = []
    with closing(history.ancestry(target, version)) as versions:
        for found in versions:
            path.append(found.version)
            is_added = found.anchor is None and found.version in added and has_anchor(target, found)
            wanted += [(found.version, each) for each in ([found.state.sums] if is_added else found.objects)]
            if is_added or found.anchor is not None:
                break
    # Their bytes were verified when they were copied.
    lost = {each.key for each in shortcuts.absent(target, [payload for _, payload in wanted])}
    return path, [each for each in wanted if each[1].key in lost]


def has_anchor(target: Store, found: Manifest) -> bool:
    """Whether the anchor that was added to a version can be used, and all its payloads are there."""
    try:
        ends = Ends(found.version, None)
        return shortcuts.whole(target, ends, shortcuts.stored(target, ends)).manifest == found
    except (NotFound, DataError) as exc:
        logger.warning("the anchor that was added to version %d is not used: %s", found.version, exc)
        return False


# Shortcuts are copied byte for byte, and tags and retirements by what they say. A replica has series of its
# own, so its numbers differ, and its readers have their full grace period from its own retirement on.


def copy_tags(source: Store, target: Store, run_id: str, newest: int) -> int:
    """Set each tag of the target to the version that it has in the source; return how many changed.

    Tags that only the target has stay. So does one whose version the target does not have yet, or has retired
    by itself.
    """
    num_set, gone = 0, None
    wanted, there = notes.newest_tags(source, run_id), notes.newest_tags(target, run_id)
    for name, tag in wanted.items():
        before = there.get(name)
        if tag.version == (None if before is None else before.version) or (tag.version or 0) > newest:
            continue
        if tag.version is not None and gone is None:
            gone = notes.retirements(target, run_id).up_to(newest - 1)
        if tag.version is not None and gone and tag.version in gone:
            logger.warning(
                "%s: tag %r is not set to version %d, which is retired there", target.url, name, tag.version
            )
            continue
        notes.put_tag(
            target, Tag(name=name, run_id=run_id, version=tag.version, created_at=spelled(utc_now()))
        )
        num_set += 1
    return num_set


def copy_retirements(source: Store, target: Store, run_id: str, newest: int) -> int:
    """Retire the versions that are retired in the source, and return how many there were.

    Only those before the newest one of the target, and none that a tag has in either. Copy tags before.
    """
    gone = notes.retirements(source, run_id).up_to(newest - 1).keys()
    if not gone:
        return 0
    # Read after the retirements: a tag that is older than one of them is here.
    tagged = {tag.version for store in (source, target) for tag in notes.newest_tags(store, run_id).values()}
    missing = gone - tagged - notes.retirements(target, run_id).up_to(newest - 1).keys()
    if missing:
        notes.retire(target, run_id, missing, utc_now())
    return len(missing)


class Shortcuts:
    """Copies the shortcuts of a run. No signature covers one, so none is copied where keys are required."""

    def __init__(self, source: Store, target: Store, stop: threading.Event) -> None:
        self._source, self._target, self._stop = source, target, stop
        self._looked_at: set[Ends] = set()
        """Shortcuts of the target that were there with their payloads."""
        self._added: set[int] | None = None

    def look_again(self) -> None:
        """Forget which anchors the source has added."""
        self._added = None

    def added_anchors(self) -> set[int]:
        """Return the versions of the source that have an anchor among the shortcuts."""
        if self._added is None:
            self._added = {each.version for each in shortcuts.listed(self._source) if each.parent is None}
        return self._added

    def copy_anchor(self, version: int) -> bool:
        """Copy the anchor that the source added to a version, and return whether the target has one then."""
        ends, began = Ends(version, None), Began()
        data = self.copied(ends) if version in self.added_anchors() else None
        if data is None:
            return False
        self.put(ends, data, began)
        return has_anchor(self._target, history.read_manifest(self._target, version))

    def copy_all(self, newest: Manifest) -> int:
        """Copy the shortcuts of versions that the target has; return how many. Costs a listing of each store.

        Anchors of versions that the target has retired are not copied, nor rollups over these. Those that are
        there are looked at once: if their payloads are not there too, they are copied again. One that was
        removed from the source meanwhile, or cannot be understood, is left out: no reader needs it.
        """
        there = shortcuts.listed(self._target)
        broken = self._broken(there)
        wanted = shortcuts.listed(self._source) - (there - broken.keys())
        gone = sorted(kept.retired_versions(self._target, newest.version)) if wanted else []
        old = self._old_attempts(newest.run_id) if wanted else frozenset()
        num_copied = 0
        for ends in sorted(wanted, key=lambda each: each.version):
            if ends.version > newest.version:
                break
            if ends.leads_over(gone) or (ends.parent is None and ends.version in gone):
                # `collect` would delete them again.
                continue
            began = Began()
            # What a record names is not deleted.
            if (data := self.copied(ends, frozenset() if ends in broken else old)) is None:
                continue
            if broken.get(ends, data) != data:
                shortcuts.withdraw(self._target, ends, broken[ends])
            if not self.put(ends, data, began):
                continue
            num_copied += 1
            logger.info("copied the shortcut %s", layout.shortcut_key(ends.version, ends.parent))
        return num_copied

    def _broken(self, there: Set[Ends]) -> dict[Ends, bytes]:
        """Return shortcuts of the target that lack payloads or cannot be read, and their records."""

        def look(ends: Ends) -> bytes | None:
            try:
                data = shortcuts.stored(self._target, ends)
            except NotFound:
                return None
            try:
                shortcuts.whole(self._target, ends, data)
            except DataError:
                return data
            return None

        new = sorted(there - self._looked_at, key=lambda each: each.version)
        found = dict(zip(new, history.read_many(look, new), strict=True))
        self._looked_at |= {ends for ends, data in found.items() if data is None}
        return {ends: data for ends, data in found.items() if data is not None}

    def _old_attempts(self, run_id: str) -> Set[str]:
        """Return the attempts that a collector of the target noted a day ago, and may be deleting now."""
        keys = notes.keys(self._target, layout.UNNAMED)
        found = notes.orphans(self._target, keys, run_id).values()
        due = [note for note in found if time_of(note.created_at) + GRACE <= utc_now()]
        return {attempt for note in due for attempt in note.attempts}

    def put(self, ends: Ends, data: bytes, began: Began) -> bool:
        """Create a shortcut's record; return False if it is to be copied again, or there is another one."""
        try:
            return shortcuts.put(self._target, ends, data, began)
        except shortcuts.TooLate as exc:
            logger.warning("a shortcut to version %d is copied again later: %s", ends.version, exc)
            return False

    def copied(self, ends: Ends, old: Set[str] = frozenset()) -> bytes | None:
        """Copy the payloads of a shortcut; return its record, or None if there is none that can be used."""
        try:
            data = shortcuts.stored(self._source, ends)
            found = shortcuts.parsed(ends, data)
            way = found.way
            if any((layout.attempt_of(payload.key) or (0, ""))[1] in old for payload in found.payloads):
                logger.info("a shortcut to version %d waits for `patchstore prune`", ends.version)
                return None
            for each in (replace(way, delta=None) if ends.parent is None else way).objects:
                copy(self._source, self._target, each, self._stop)
        except (NotFound, DataError) as exc:
            logger.warning("a shortcut to version %d is not copied: %s", ends.version, exc)
            return None
        return data
