"""Copy the versions of a run to another store, oldest first, payloads before manifests.

The order is that of a publisher: a version exists in the target once its manifest does, and that comes last.
So a reader of the target never sees a version whose payloads are absent, also after a kill at any moment.
The newest version of the target can be rebuilt there, from its anchor on: what its way needs is copied again,
if the target retired and deleted it.
The exception are versions that are given up here: those that lost payloads at the source, which retired them,
and those that no required key has signed, or that are of another run. Their slots must be taken, so they are
committed without payloads, retired, and together with the first version behind them that can be used.
Manifests and `store.json` are copied byte for byte, each by one create-only put. So several replicators of
one source may write to one target at once: what one finds taken has the bytes that it would have written.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from patchstore.bucket import history, kept, manifest_json, notes
from patchstore.bucket.digests import PayloadMissing
from patchstore.bucket.manifest_json import is_printable
from patchstore.bucket.notes import Began, ReplicaMark, utc_now
from patchstore.bucket.records import Ends, Manifest
from patchstore.errors import (
    CorruptObject,
    PatchstoreError,
    RunExists,
    StoreReplaced,
    Unsigned,
    UsageError,
    VersionConflict,
    VersionNotFound,
    WrongSignature,
)
from patchstore.follow.logs import utc
from patchstore.ops.replicate.copying import (
    NUM_COPIES,
    Copies,
    Ended,
    Shortcuts,
    complete,
    copy,
    copy_retirements,
    copy_tags,
)
from patchstore.signing import statement
from patchstore.signing.required import RequiredKeys, checks
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.stores.probe import check_create_only

if TYPE_CHECKING:
    # It imports torch, which a copy does not need.
    from patchstore.read.rebuild import Progress

logger = logging.getLogger(__name__)

REFUSED_S = 30.0
"""Many versions that no required key has signed are looked at again after this time, or when one comes."""


_HINT_EVERY = 64
"""Versions after which `head.json` is written, while there are more; always after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A version that the target has now."""

    manifest: Manifest
    num_bytes: int
    """Of payloads that were copied for it; what several versions name counts for one of them."""
    seconds: float
    """From the end of the version before, or from the begin."""
    is_given_up: bool
    """Whether it has no payloads in the target, and is retired there."""


@dataclass(slots=True, kw_only=True)
class _Coming:
    """A version whose payloads are being copied."""

    data: bytes
    manifest: Manifest
    copies: "list[tuple[Future[int], bool]]"
    refused: Unsigned | WrongSignature | CorruptObject | None = None
    """Why it is not to be used: no required key signed it, or it is of another run. Nothing of it is copied
    then but its manifest, unless a signed version is rebuilt from it: that one's digests cover it."""
    num_bytes: int | None = None
    """Of its payloads, once they are copied; None also if it lost some of them, or is refused."""
    added: bytes | None = None
    """The record of an anchor that was added to it, if that is what its readers begin with."""
    began: Began = field(default_factory=Began)
    """Before that anchor was copied."""


class Replicator:
    """Copies one run from a source to a target. Not for use from several threads at once."""

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        stop: threading.Event | None = None,
        required: RequiredKeys | None = None,
        progress: "Progress | None" = None,
    ) -> None:
        """Prepare; nothing is read or written yet. `progress` is told of payloads, those begun being all."""
        if source.url == target.url:
            raise UsageError(f"{source.url} cannot be a replica of itself: name another place")
        self.source, self.target = source, target
        self.newest: Manifest | None = None
        """The newest version that both have, as far as it is known."""
        self._is_checked = False
        """Whether it is known if the newest version can be used in the target."""
        self._why: PatchstoreError | None = None
        """Why it cannot."""
        self._is_on_retired = False
        """Whether it, or a version since the last anchor, builds on one that the target retired. A collector
        that looked before may still delete what these are rebuilt from."""
        self._stop = threading.Event() if stop is None else stop
        self._required = required
        self._check: history.Check | None = None
        self._run_id: str | None = None
        self._num_unhinted = 0
        """Versions that were created since `head.json` was written."""
        self._copies = Copies(source, target, progress)
        self._shortcuts = Shortcuts(source, target, self._stop) if required is None else None
        """None where keys are required: no signature covers a shortcut."""
        self._gone: set[int] = set()
        """Versions that are retired at the source, as far as that was looked for."""
        self._refused: tuple[PatchstoreError, int, float] | None = None
        """Why the newest version of the source cannot be used, its number, and when that was found."""
        self._seen: tuple[int | str, ...] = ()
        """The newest version, and the keys of the source's records, when these were copied."""

    def open(self) -> None:
        """Make the target a replica of the source's run, or find that it is one; and find what it has."""
        data = history.stored_header(self.source)
        if data is None:
            raise VersionNotFound(f"{self.source.url} holds no run, so there is nothing to replicate")
        header = manifest_json.header_from_json(data)
        run_id, self._check = header.run_id, checks(self._required, self.source, header)
        self._open_target(run_id, data)
        self._run_id = run_id
        newest = history.head(self.target)
        self._is_checked = self._is_checked and self._why is None and newest == self.newest
        self.newest = newest
        self._check_source()

    def check_source(self) -> None:
        """Check that the source has the newest version that was copied, and that none after it was lost.

        The target comes first: a place that was promoted meanwhile has versions of its own.
        """
        self._check_mark()
        self._check_source()

    def _check_source(self) -> None:
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
                    f"back, or run `patchstore replicate --promote {self.target.url}` and publish there"
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
        once with each, up to 8, whose payloads are copied at the same time. They are committed in order. The
        first call looks whether the target has all that its newest version is rebuilt from.
        """
        began = time.monotonic()
        ended = Ended(self._stop)
        readers = ThreadPoolExecutor(history.READ_AHEAD, thread_name_prefix="patchstore-replicate")
        movers = ThreadPoolExecutor(NUM_COPIES, thread_name_prefix="patchstore-copy")
        coming: deque[Future[_Coming | None]] = deque()
        version, width = self._next, 1
        waiting: list[_Coming] = []
        """Versions that cannot be used in the target, and those behind them."""
        try:
            self._check_refused()
            self._check_newest()
            while True:
                while len(coming) < width:
                    coming.append(readers.submit(self._begin, version, movers, ended))
                    version += 1
                found = coming.popleft().result()
                if found is None:
                    self._check_none_waits(waiting)
                    return
                width = min(2 * width, history.READ_AHEAD)
                waiting.append(found)
                with kept.explained(self.source, found.manifest.version):
                    found.num_bytes = self._copied_bytes(found)
                    used = self._used(waiting)
                if used is None:
                    # No reader is to meet these as the newest: a version must come that can be used.
                    continue
                if self._were_signed(waiting):
                    coming.clear()
                    waiting.clear()
                    version, width = self._next, 1
                    continue
                self._commit_all(waiting, used)
                seconds = time.monotonic() - began
                for each in waiting:
                    yield Copied(
                        manifest=each.manifest,
                        num_bytes=each.num_bytes or 0,
                        # What is behind the others took the time.
                        seconds=seconds if each is found else 0.0,
                        is_given_up=each.manifest.version not in used,
                    )
                waiting.clear()
                began = time.monotonic()
        finally:
            ended.set()
            for pool in (readers, movers):
                pool.shutdown(wait=True, cancel_futures=True)
            self._copies.forget_ended()
            self._write_hint()

    def _check_refused(self) -> None:
        """Raise the error of the call before, if many versions were refused then, and none came since."""
        if self._refused is not None:
            error, last, looked = self._refused
            if time.monotonic() - looked < REFUSED_S and not self._is_there(last + 1):
                raise error
        self._refused = None

    def _check_newest(self) -> None:
        """Look whether the newest version of the target can be used there; copy what its way lacks."""
        if self._is_checked:
            return
        self._why = None
        if self.newest is not None:
            version = self.newest.version
            self._why = self._refusal(self.newest, history.stored(self.target, version))
            if self._why is None:
                try:
                    num_bytes = self._complete(version, version)
                except PayloadMissing as exc:
                    self._why = exc
                else:
                    if num_bytes:
                        what = f"version {version} could not be rebuilt in {self.target.url}"
                        logger.warning("%s: %d bytes were copied again", what, num_bytes)
        self._is_checked = True

    def check_way(self) -> None:
        """Copy again what a collector of the target deleted that had looked before the version was there.

        Costs nothing unless the newest version is rebuilt from one that the target retired before.
        """
        if self._is_on_retired:
            self._is_checked = False
            self._check_newest()
            if self._why is not None:
                raise self._why

    def _refusal(self, found: Manifest, data: bytes) -> Unsigned | WrongSignature | CorruptObject | None:
        """Return why a version is not to be used."""
        if found.run_id != self._run_id:
            what = f"{self.source.url}: version {found.version} is of run {found.run_id}"
            return CorruptObject(f"{what}, and was not used: the store is of run {self._run_id}")
        if self._check is not None:
            try:
                self._check(found, data)
            except (Unsigned, WrongSignature) as exc:
                return exc
        return None

    def _were_signed(self, waiting: Sequence[_Coming]) -> bool:
        """Whether one of some versions has a signature by now that it lacked before."""
        refused = [each for each in waiting if each.refused is not None]
        return any(self._refusal(each.manifest, each.data) is None for each in refused)

    def _copied_bytes(self, found: _Coming) -> int | None:
        """Wait until the payloads of a version are copied; return their bytes, or None if it has not all."""
        if found.refused is not None:
            return None
        num_bytes, is_lost = 0, False
        for each, is_mine in found.copies:
            try:
                # What several versions name counts for one of them.
                num_bytes += each.result() * is_mine
            except PayloadMissing:
                if not self._may_lose(found.manifest.version):
                    raise
                is_lost = True
        return None if is_lost else num_bytes

    def _may_lose(self, version: int) -> bool:
        """Whether a version may lack payloads: it is retired at the source, where nothing comes back."""
        if self._required is None and version not in self._gone:
            head = history.head(self.source, version)
            self._gone = set() if head is None else kept.retired_versions(self.source, head.version)
        return self._required is None and version in self._gone

    def _check_none_waits(self, waiting: Sequence[_Coming]) -> None:
        """Check that the newest version of the target can be used, and no version waits for one that can."""
        if not waiting:
            if self._why is not None:
                raise self._why
            return
        first, last = waiting[0].manifest.version, waiting[-1].manifest.version
        if (refused := waiting[-1].refused) is not None:
            if len(waiting) > history.READ_AHEAD:
                self._refused = refused, last, time.monotonic()
            raise refused
        raise CorruptObject(
            f"{self.source.url} has lost payloads that version {first} is rebuilt from, and no version up to "
            f"{last} can be rebuilt: these were not copied. If they were published just now, try again. The "
            "next anchor of the trainer ends this"
        )

    def _used(self, waiting: Sequence[_Coming]) -> set[int] | None:
        """Return which of some versions the last one is rebuilt from, itself among them.

        None if it cannot be used. Copies what the target lacks of its way: the payloads of versions that the
        target retired and deleted, or the anchor that the source added to it.
        """
        found = waiting[-1]
        if found is waiting[0] and self._shortcuts is not None:
            self._shortcuts.look_again()
        if found.refused is not None or found.num_bytes is None:
            return None
        coming = {each.manifest.version: each for each in waiting}
        used: set[int] = set()
        at, is_whole = found, False
        while True:
            new = at.manifest
            used.add(new.version)
            if at.num_bytes is None and not self._copy_vouched(at):
                break
            if new.parent is None or new.anchor is not None:
                is_whole, self._is_on_retired = True, False
                break
            parent = coming.get(new.parent)
            if parent is None:
                is_whole = self._has_way(found, new.parent)
                break
            history.check_parent(new, parent.manifest, parent.data)
            at = parent
        if is_whole:
            return used
        version = found.manifest.version
        if self._shortcuts is not None and version in self._shortcuts.added_anchors():
            found.added = self._shortcuts.copied(Ends(version, None))
        return None if found.added is None else {version}

    def _copy_vouched(self, coming: _Coming) -> bool:
        """Copy the payloads of a version that no required key has signed, but one that is built on it."""
        if coming.refused is None:
            return False
        with ThreadPoolExecutor(NUM_COPIES, thread_name_prefix="patchstore-copy") as pool:
            copies = [
                pool.submit(copy, self.source, self.target, each, self._stop)
                for each in coming.manifest.objects
            ]
        coming.num_bytes = sum(each.result() for each in copies)
        return True

    def _has_way(self, found: _Coming, parent: int) -> bool:
        """Whether the version of the target on which one builds can be rebuilt; copies what its way lacks."""
        if self.newest is not None and parent == self.newest.version and self._why is None:
            return True
        try:
            num_bytes = self._complete(parent, found.manifest.version)
        except PayloadMissing:
            shortcuts, version = self._shortcuts, found.manifest.version
            has_own = shortcuts is not None and version in shortcuts.added_anchors()
            if not has_own and not self._may_lose(version):
                raise
            return False
        found.num_bytes = (found.num_bytes or 0) + num_bytes
        self._is_on_retired = notes.retirements(self.target, self._run_id).find(parent) is not None
        self._is_checked = not self._is_on_retired
        return True

    def _complete(self, version: int, child: int) -> int:
        """Copy what the target lacks of the way to one of its versions; return how many bytes.

        Args:
            child: the version for which this is done. If it is signed, readers that require keys may want it,
                and use no anchor among the shortcuts.
        """
        is_signed = next(iter(self.source.list(layout.signature_prefix(child))), None) is not None
        if self._shortcuts is None or is_signed:
            try:
                return complete(self.source, self.target, version, self._stop)
            except PayloadMissing:
                if self._shortcuts is None:
                    raise
        return complete(self.source, self.target, version, self._stop, self._shortcuts.copy_anchor)

    def _commit_all(self, waiting: Sequence[_Coming], used: Collection[int]) -> None:
        """Make versions exist in the target, the last of which can be used.

        Those that are going to have no payloads are retired before, so that no kill in between leaves one
        that readers would take for damaged.
        """
        found, gone = waiting[-1], [each for each in waiting if each.manifest.version not in used]
        if gone:
            versions = [each.manifest.version for each in gone]
            notes.retire(self.target, found.manifest.run_id, versions, utc_now())
        for each in gone:
            if each.refused is not None:
                logger.warning("copied without payloads: %s", each.refused)
        for each in waiting:
            # A version without a signature may name any parent, and no reader here is to use it.
            has_parent = each.manifest.version in used or each.refused is None
            self._commit(each, has_parent=has_parent)
        if found.added is not None and self._shortcuts is not None:
            self._shortcuts.put(Ends(found.manifest.version, None), found.added, found.began)
        self._why = None
        # Now that the version is there, no collector that begins deletes what it needs.
        self._check_newest()
        if self._why is not None:
            raise self._why

    # The target: its mark, its header, and what is committed there.

    def _open_target(self, run_id: str, header: bytes) -> None:
        """Make the target a replica of the run, or find that it is one."""
        mark = notes.read_mark(self.target)
        if mark is None:
            mark = self._create_mark(run_id)
        if mark.run_id != run_id:
            raise RunExists(
                f"{self.target.url} is a replica of run {mark.run_id} (from {mark.source}), but "
                f"{self.source.url} holds run {run_id}: replicate to another place"
            )
        self._check_not_promoted(mark)
        there = history.stored_header(self.target)
        if there is None:
            there = history.create(self.target, layout.HEADER, header)
        if there != header:
            raise RunExists(
                f"{self.target.url} has another {layout.HEADER} than {self.source.url}, although it is "
                "marked as its replica: replicate to another place"
            )

    def _create_mark(self, run_id: str) -> ReplicaMark:
        if (found := history.read_header(self.target)) is not None:
            which = "this run" if found.run_id == run_id else f"run {found.run_id}"
            raise RunExists(
                f"{self.target.url} holds {which} already and is no replica, as it has no {layout.REPLICA}: "
                "replicate to an empty place"
            )
        check_create_only(self.target)
        url = self.source.url
        named = url if is_printable(url) else ascii(url)
        mark = ReplicaMark(run_id=run_id, source=named, created_at=utc(time.time()))
        return notes.create_mark(self.target, mark)

    def _check_mark(self) -> None:
        """Check that the target is still a replica of this run."""
        mark = notes.read_mark(self.target)
        if mark is None or mark.run_id != self._run_id:
            raise StoreReplaced(
                f"{self.target.url} is no replica of run {self._run_id} any more: its {layout.REPLICA} was "
                "removed or replaced"
            )
        self._check_not_promoted(mark)

    def _check_not_promoted(self, mark: ReplicaMark) -> None:
        if mark.promoted_at is not None:
            raise UsageError(
                f"{self.target.url} was promoted at {mark.promoted_at}, so publishers may write there and "
                "it is no replica any more: replicate to another place"
            )

    def _commit(self, coming: _Coming, *, has_parent: bool) -> None:
        """Make a version exist, which has its payloads here, or was given up."""
        new, data = coming.manifest, coming.data
        self._check_mark()
        if new.parent is not None and has_parent:
            history.read_parent(self.target, new)
        # Before the manifest, as a publisher stores them. Readers verify them, and this does not.
        statement.copy(self.source, self.target, new.version)
        there = history.create(self.target, layout.manifest_key(new.version), data)
        if there != data:
            raise VersionConflict(
                f"{self.target.url} has another version {new.version} than {self.source.url}: a publisher "
                "wrote there. The versions before are equal; replicate to another place"
            )
        self.newest = new
        self._num_unhinted += 1
        if self._num_unhinted == _HINT_EVERY:
            self._write_hint()

    def _write_hint(self) -> None:
        """Say in `head.json` which version is the newest, if that changed."""
        if not self._num_unhinted or self.newest is None:
            return
        self._num_unhinted = 0
        try:
            history.write_hint(self.target, self.newest.version)
        except PatchstoreError as exc:
            logger.info("head.json was not updated, which costs readers a listing: %s", exc)

    # Records.

    def copy_shortcuts(self) -> int:
        """Copy the shortcuts of versions that the target has; return how many."""
        if self._shortcuts is None or self.newest is None:
            return 0
        return self._shortcuts.copy_all(self.newest)

    def copy_records(self) -> int:
        """Copy what tags and retirements say of versions that the target has; return how many changed.

        With required keys nothing is copied, as no signature covers them. If nothing is new, this costs two
        listings of the source.
        """
        if self.newest is None or self._required is not None:
            return 0
        newest, run_id = self.newest.version, self.newest.run_id
        seen: tuple[int | str, ...] = (
            newest,
            *notes.keys(self.source, layout.TAGS),
            *notes.keys(self.source, layout.RETIRED),
        )
        if seen == self._seen:
            return 0
        num_set = copy_tags(self.source, self.target, run_id, newest)
        num_retired = copy_retirements(self.source, self.target, run_id, newest)
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
            # The source was emptied and begun anew, or a program that follows another run wrote there.
            assert self._run_id is not None
            then = f"{self.target.url} was left as it is: replicate to another place"
            history.check_run(self.source, history.read_header(self.source), self._run_id, then)
        refused = self._refusal(manifest, data)
        wanted = manifest.objects if refused is None else []
        copies = self._copies.begin(wanted, movers, ended)
        return _Coming(data=data, manifest=manifest, copies=copies, refused=refused)
