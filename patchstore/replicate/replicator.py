"""Copy the versions of a run to another store, oldest first, payloads before manifests.

The order is that of a publisher: a version exists in the target once its manifest does, and that comes last.
So a reader of the target never sees a version whose payloads are absent, also after a kill at any moment.
The exception are versions that the source retired and that lost payloads there: they are committed together
with the first version behind them that can be rebuilt.
Manifests and `store.json` are copied byte for byte, each by one create-only put. So several replicators of
one source may write to one target at once: what one finds taken has the bytes that it would have written.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta

from patchstore.errors import (
    CorruptObject,
    DataError,
    NotFound,
    PatchstoreError,
    RunExists,
    StoreReplaced,
    UsageError,
    VersionConflict,
    VersionNotFound,
)
from patchstore.format import history, kept, layout, manifest_json, replica_mark, series, shortcuts
from patchstore.format.json_fields import is_printable
from patchstore.format.missing import PayloadMissing
from patchstore.format.records import Manifest, Payload
from patchstore.format.replica_mark import ReplicaMark
from patchstore.format.shortcuts import Ends
from patchstore.replicate import records
from patchstore.replicate.copying import copy
from patchstore.retention.lease import Lease
from patchstore.serve.logs import utc
from patchstore.signing import stored as signatures
from patchstore.signing.required import RequiredKeys, checks
from patchstore.stores.base import Store
from patchstore.stores.probe import check_create_only

logger = logging.getLogger(__name__)

_NUM_COPIES = 4
"""Payloads that are copied at once; each takes 8 parts of 8 MiB each way."""
_HINT_EVERY = 64
"""Versions after which `head.json` is written, while there are more; always after the last."""
_LEASE_AFTER_S = 600.0
"""A call of `versions` that takes longer holds a lease on what it has still to copy."""
_NUM_REMEMBERED = 1000
"""Payloads that are known to be in the target: versions with equal weights name the same sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A version that the target has now."""

    manifest: Manifest
    num_bytes: int
    """Of payloads that were copied for it; what several versions name counts for one of them."""
    seconds: float
    """From the end of the version before, or from the begin."""


@dataclass(slots=True, kw_only=True)
class _Coming:
    """A version whose payloads are being copied."""

    data: bytes
    manifest: Manifest
    copies: "list[Future[int]]"
    num_bytes: int | None = None
    """Of its payloads, once they are copied; None also if it is retired and lost some of them."""
    added: bytes | None = None
    """The record of an anchor that was added to it, if that is what its readers begin with."""


class Replicator:
    """Copies one run from a source to a target. Not for use from several threads at once."""

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        stop: threading.Event | None = None,
        required: RequiredKeys | None = None,
    ) -> None:
        """Prepare; nothing is read or written yet.

        Args:
            stop: ends a call of `versions` soon after it is set, between two parts of a payload.
            required: keys, one of which must have signed each version that is copied.

        Raises:
            UsageError: both are the same place.
        """
        if source.url == target.url:
            raise UsageError(f"{source.url} cannot be a replica of itself: name another place")
        self.source, self.target = source, target
        self.newest: Manifest | None = None
        """The newest version that both have, as far as it is known."""
        self._stop = threading.Event() if stop is None else stop
        self._required = required
        self._check: history.Check | None = None
        self._run_id: str | None = None
        self._copies: dict[Payload, Future[int]] = {}
        self._lock = threading.Lock()
        self._added: set[int] = set()
        """Versions of the source that have an anchor among the shortcuts, when a gap began."""
        self._gone: set[int] = set()
        """Versions that are retired at the source, as far as that was looked for."""
        self._seen: tuple[int | str, ...] = ()
        """The newest version, and the keys of the source's records, when these were copied."""

    def open(self) -> None:
        """Make the target a replica of the source's run, or find that it is one; and find what it has.

        Raises:
            VersionNotFound: the source holds no run.
            RunExists: the target holds another run, or one that is no replica.
            UsageError: the target was promoted.
            UnsupportedStore: the target does not create an object only once.
            StoreReplaced: the source lacks a version that the target has, or has another.
            CorruptObject, UnsupportedFormat: what a store has cannot be understood.
            StoreUnavailable: a store did not answer. After each of these calling again is safe.
        """
        data = history.stored_header(self.source)
        if data is None:
            raise VersionNotFound(f"{self.source.url} holds no run, so there is nothing to replicate")
        header = manifest_json.header_from_json(data)
        run_id, self._check = header.run_id, checks(self._required, self.source, header)
        mark = replica_mark.read(self.target)
        if mark is None:
            mark = self._create_mark(run_id)
        if mark.run_id != run_id:
            raise RunExists(
                f"{self.target.url} is a replica of run {mark.run_id} (from {mark.source}), but "
                f"{self.source.url} holds run {run_id}: replicate to another place"
            )
        self._run_id = run_id
        self._check_not_promoted(mark)
        there = history.stored_header(self.target)
        if there is None:
            there = history.create(self.target, layout.HEADER, data)
        if there != data:
            raise RunExists(
                f"{self.target.url} has another {layout.HEADER} than {self.source.url}, although it is "
                "marked as its replica: replicate to another place"
            )
        self.newest = history.head(self.target)
        self.check_source()

    def _create_mark(self, run_id: str) -> ReplicaMark:
        if (found := history.read_header(self.target)) is not None:
            which = "this run" if found.run_id == run_id else f"run {found.run_id}"
            raise RunExists(
                f"{self.target.url} holds {which} already and is no replica, as it has no {layout.REPLICA}: "
                "replicate to an empty place"
            )
        check_create_only(self.target)
        url = self.source.url
        mark = ReplicaMark(
            run_id=run_id, source=url if is_printable(url) else ascii(url), created_at=utc(time.time())
        )
        return replica_mark.create(self.target, mark)

    def _check_not_promoted(self, mark: ReplicaMark) -> None:
        if mark.promoted_at is not None:
            raise UsageError(
                f"{self.target.url} was promoted at {mark.promoted_at}, so publishers may write there and it "
                "is no replica any more: replicate to another place"
            )

    def check_source(self) -> None:
        """Check that the source has the newest version that was copied, and that none after it was lost.

        Raises:
            StoreReplaced: it lacks that version, or has another.
            CorruptObject: it lacks a version in between.
        """
        newest = self.newest
        if newest is not None:
            ours = history.stored(self.target, newest.version)
            try:
                theirs = history.stored(self.source, newest.version)
            except VersionNotFound:
                theirs = None
            if theirs != ours:
                raise StoreReplaced(
                    f"{self.source.url} {'lacks' if theirs is None else 'has another'} version "
                    f"{newest.version} of run {newest.run_id}, which {self.target.url} has: the source was "
                    "emptied, replaced or set back. The replica was left as it is: put the source's objects "
                    f"back, or run `patchstore promote {self.target.url}` and publish there"
                )
        try:
            history.check_newest(self.source, newest)
        except CorruptObject:
            # Perhaps it has the version by now, and had not when it was looked for.
            if not self._is_there(0 if newest is None else newest.version + 1):
                raise

    def _is_there(self, version: int) -> bool:
        try:
            history.stored(self.source, version)
        except VersionNotFound:
            return False
        return True

    def versions(self) -> Generator[Copied]:
        """Copy each version that the target lacks, and yield it when the target has it.

        Costs one read of the source if there is none. The first version is read alone, then twice as many at
        once with each, up to 8, whose payloads are copied at the same time. They are committed in order.

        Raises:
            CorruptObject, UnsupportedFormat: a version of the source is wrong, or cannot be understood. It
                and all after it were not copied.
            VersionRetired: keys are required, and a version of the source is retired, and its payloads are
                deleted. Without keys such a version is copied without payloads, and retired here too.
            Unsigned, WrongSignature: keys are required, and none has signed a version of the source. It and
                all after it were not copied.
            VersionConflict: the target has another version of that number.
            UsageError: the target was promoted meanwhile.
            StoreUnavailable: a store did not answer, several times.
            Stopped: the event `stop` was set.
        """
        began, num_done = time.monotonic(), 0
        ended = _Ended(self._stop)
        readers = ThreadPoolExecutor(history.READ_AHEAD, thread_name_prefix="patchstore-replicate")
        movers = ThreadPoolExecutor(_NUM_COPIES, thread_name_prefix="patchstore-copy")
        coming: deque[Future[_Coming | None]] = deque()
        version, width = self._next, 1
        lease: Lease | None = None
        started, held = began, ExitStack()
        waiting: list[_Coming] = []
        """Versions whose payloads are gone, and those behind them."""
        try:
            while True:
                while len(coming) < width:
                    coming.append(readers.submit(self._begin, version, movers, ended))
                    version += 1
                found = coming.popleft().result()
                if found is None:
                    self._check_no_gap(waiting)
                    return
                if lease is None and time.monotonic() - started > _LEASE_AFTER_S:
                    # What is far behind takes long: versions may be retired at the source, and collected.
                    lease = held.enter_context(self._lease(found.manifest.version))
                width = min(2 * width, history.READ_AHEAD)
                with kept.explained(self.source, found.manifest.version):
                    found.num_bytes = self._copied_bytes(found)
                waiting.append(found)
                is_gap = waiting[0].num_bytes is None
                if is_gap and not self._ends_gap(waiting):
                    # No reader is to meet these as the newest: a version must come that can be rebuilt.
                    continue
                for each in waiting:
                    self._commit(each)
                    num_done += 1
                    if num_done % _HINT_EVERY == 0:
                        self._write_hint()
                if is_gap:
                    self._end_gap(found)
                seconds = time.monotonic() - began
                for each in waiting:
                    # What is behind a gap took the time.
                    took_s = seconds if each is found else 0.0
                    yield Copied(manifest=each.manifest, num_bytes=each.num_bytes or 0, seconds=took_s)
                waiting.clear()
                began = time.monotonic()
        finally:
            ended.set()
            held.close()
            for pool in (readers, movers):
                pool.shutdown(wait=True, cancel_futures=True)
            # Copies that were ended have no result.
            self._copies = {each: copy for each, copy in self._copies.items() if _succeeded(copy)}
            if num_done:
                self._write_hint()

    def _copied_bytes(self, found: _Coming) -> int | None:
        """Wait until the payloads of a version are copied; return their bytes, or None if it lost some.

        Raises:
            PayloadMissing: it is not retired, or keys are required: no signature covers a retirement.
        """
        num_bytes, is_lost = 0, False
        for each in found.copies:
            try:
                num_bytes += each.result()
            except PayloadMissing:
                if self._required is not None or not self._is_retired(found.manifest.version):
                    raise
                is_lost = True
        return None if is_lost else num_bytes

    def _is_retired(self, version: int) -> bool:
        """Whether a version is retired at the source, where nothing comes back."""
        if version not in self._gone:
            head = history.head(self.source, version)
            self._gone = set() if head is None else kept.retired_versions(self.source, head.version)
        return version in self._gone

    def _check_no_gap(self, waiting: Sequence[_Coming]) -> None:
        """Raises CorruptObject where there are versions that wait for one that can be rebuilt."""
        if waiting:
            first, last = waiting[0].manifest.version, waiting[-1].manifest.version
            raise CorruptObject(
                f"{self.source.url} has lost payloads of version {first}, and no version up to {last} can be "
                "rebuilt: these were not copied. If they were published just now, try again"
            )

    def _ends_gap(self, waiting: Sequence[_Coming]) -> bool:
        """Whether the last of some versions can be rebuilt without those that lost payloads.

        Copies the anchor that was added to it, if there is one.
        """
        found, first = waiting[-1], waiting[0].manifest.version
        if found is waiting[0]:
            self._added = {each.version for each in shortcuts.listed(self.source) if each.parent is None}
        if found.num_bytes is None:
            return False
        version, parent = found.manifest.version, found.manifest.parent
        if found.manifest.anchor is None and version in self._added:
            found.added = self._copied_shortcut(Ends(version, None))
        # A trainer that went back builds on a version from before the gap.
        is_behind = parent is not None and parent < first
        return found.manifest.anchor is not None or found.added is not None or is_behind

    def _end_gap(self, found: _Coming) -> None:
        """Create the record of its added anchor, and retire the versions before it as the source did."""
        version = found.manifest.version
        if found.added is not None:
            history.create(self.target, layout.shortcut_key(version, None), found.added)
        assert self._run_id is not None
        records.copy_tags(self.source, self.target, self._run_id, version)
        records.copy_retirements(self.source, self.target, self._run_id, version)

    def _lease(self, first: int) -> Lease:
        """Return a lease on what is to be copied: the versions of the source from `first` on.

        Without those that are retired already: they have a day from their retirement.
        """
        head = history.head(self.source, first)
        assert head is not None and self._run_id is not None
        versions = set(range(first, head.version + 1)) - kept.retired_versions(self.source, head.version)
        return Lease(self.source, self._run_id, versions, after=timedelta())

    def copy_shortcuts(self) -> int:
        """Copy the shortcuts of versions that the target has; return how many. Costs a listing of each store.

        None is copied if keys are required: no signature covers a shortcut. Nor are rollups over versions
        that the target has retired.

        One that was removed from the source meanwhile, or cannot be understood, is left out: no reader needs
        it.

        Raises:
            StoreUnavailable: a store did not answer, several times.
            Stopped: the event `stop` was set.
        """
        if self._required is not None or self.newest is None:
            return 0
        wanted = shortcuts.listed(self.source) - shortcuts.listed(self.target)
        gone = sorted(kept.retired_versions(self.target, self.newest.version)) if wanted else []
        num_copied = 0
        for ends in sorted(wanted, key=lambda each: each.version):
            if ends.version >= self._next:
                break
            if ends.leads_over(gone):
                # `collect` deletes rollups over retired versions.
                continue
            if (data := self._copied_shortcut(ends)) is None:
                continue
            history.create(self.target, layout.shortcut_key(ends.version, ends.parent), data)
            num_copied += 1
            logger.info("copied the shortcut %s", layout.shortcut_key(ends.version, ends.parent))
        return num_copied

    def _copied_shortcut(self, ends: Ends) -> bytes | None:
        """Copy the payloads of a shortcut; return its record, or None if there is none that can be used."""
        try:
            data = shortcuts.stored(self.source, ends)
            way = shortcuts.parsed(ends, data).way
            for each in (replace(way, delta=None) if ends.parent is None else way).objects:
                copy(self.source, self.target, each, self._stop)
        except (NotFound, DataError) as exc:
            logger.warning("a shortcut to version %d is not copied: %s", ends.version, exc)
            return None
        return data

    def copy_records(self) -> int:
        """Copy what tags and retirements say of versions that the target has; return how many changed.

        With required keys nothing is copied, as no signature covers them. If nothing is new, this costs two
        listings of the source.

        Raises:
            CorruptObject, UnsupportedFormat: a record cannot be understood.
            StoreUnavailable: a store did not answer, several times.
        """
        if self.newest is None or self._required is not None:
            return 0
        newest, run_id = self.newest.version, self.newest.run_id
        seen: tuple[int | str, ...] = (
            newest,
            *series.keys(self.source, layout.TAGS),
            *series.keys(self.source, layout.RETIRED),
        )
        if seen == self._seen:
            return 0
        num_set = records.copy_tags(self.source, self.target, run_id, newest)
        num_retired = records.copy_retirements(self.source, self.target, run_id, newest)
        if num_set or num_retired:
            logger.info("%d tags were set, and %d versions were retired", num_set, num_retired)
        self._seen = seen
        return num_set + num_retired

    @property
    def _next(self) -> int:
        return 0 if self.newest is None else self.newest.version + 1

    def _begin(self, version: int, movers: ThreadPoolExecutor, ended: threading.Event) -> _Coming | None:
        """Read a manifest, and begin to copy what it names; None where there is none."""
        try:
            data = history.stored(self.source, version)
        except VersionNotFound:
            return None
        manifest = manifest_json.from_json(layout.manifest_key(version), data)
        if manifest.run_id != self._run_id:
            raise StoreReplaced(
                f"{self.source.url}: version {version} is of run {manifest.run_id}, not of {self._run_id}, "
                f"which {self.target.url} is a replica of: the source was emptied and begun anew"
            )
        if self._check is not None:
            self._check(manifest, data)
        with self._lock:
            return _Coming(
                data=data,
                manifest=manifest,
                copies=[self._copied(each, movers, ended) for each in manifest.objects],
            )

    def _copied(self, wanted: Payload, movers: ThreadPoolExecutor, ended: threading.Event) -> "Future[int]":
        """Begin to copy a payload, unless that was begun for another version."""
        if wanted in self._copies:
            found: Future[int] = Future()
            self._copies[wanted].add_done_callback(lambda other: _pass_on(other, found))
            return found
        while len(self._copies) >= _NUM_REMEMBERED:
            del self._copies[next(iter(self._copies))]
        self._copies[wanted] = movers.submit(copy, self.source, self.target, wanted, ended)
        return self._copies[wanted]

    def _commit(self, coming: _Coming) -> None:
        """Make a version exist in the target, which has its payloads."""
        new = coming.manifest
        mark = replica_mark.read(self.target)
        if mark is None or mark.run_id != self._run_id:
            raise StoreReplaced(
                f"{self.target.url} is no replica of run {self._run_id} any more: its {layout.REPLICA} was "
                "removed or replaced"
            )
        self._check_not_promoted(mark)
        if new.parent is not None:
            history.read_parent(self.target, new)
        for key in self.source.list(layout.signature_prefix(new.version)):
            # Before the manifest, as a publisher stores them. Readers verify them, and this does not.
            if layout.is_signature_key(key) and (bundle := signatures.read(self.source, key)) is not None:
                signatures.create(self.target, key, bundle)
        there = history.create(self.target, layout.manifest_key(new.version), coming.data)
        if there != coming.data:
            raise VersionConflict(
                f"{self.target.url} has another version {new.version} than {self.source.url}: a publisher "
                "wrote there. The versions before are equal; replicate to another place"
            )
        self.newest = new

    def _write_hint(self) -> None:
        assert self.newest is not None
        try:
            history.write_hint(self.target, self.newest.version)
        except PatchstoreError as exc:
            logger.info("head.json was not updated, which costs readers a listing: %s", exc)


class _Ended(threading.Event):
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


def _pass_on(done: "Future[int]", waiting: "Future[int]") -> None:
    """Give a copy's end to another version that needs it; the bytes count once."""
    if done.cancelled():
        waiting.cancel()
    elif (error := done.exception()) is not None:
        waiting.set_exception(error)
    else:
        waiting.set_result(0)


def _succeeded(done: "Future[int]") -> bool:
    return done.done() and not done.cancelled() and done.exception() is None
