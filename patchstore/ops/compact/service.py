"""Add the shortcuts that a run lacks, once or for as long as it grows.

Any number of these may run at once, on any host that may write to the bucket. Each adds records that are
created once, so two of them do work twice and no harm. What one has added stays when it is killed.
"""

import logging
import threading
import time
from collections.abc import Generator, Iterator, Set
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from patchstore.bucket import history, kept, shortcuts
from patchstore.bucket.digests import PayloadMissing
from patchstore.bucket.lineage import Every, check_every
from patchstore.bucket.notes import Clock, utc_now
from patchstore.bucket.records import Ends, Manifest
from patchstore.bucket.shortcuts import Shortcut
from patchstore.codec import ENCODINGS
from patchstore.errors import CorruptObject, DataError, NotFound, UsageError, VersionNotFound
from patchstore.follow.loop import Event, Loop, LoopSettings
from patchstore.ops.compact.build import Builder, Segment, segments
from patchstore.read import download
from patchstore.read.rebuild import Progress, check_anchor
from patchstore.read.run import Run
from patchstore.stores import layout
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """A segment that has its shortcuts now."""

    first: int
    """The version of its anchor."""
    last: int
    added: tuple[Ends, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the parent of an anchor is null."""
        added = [{"version": each.version, "parent": each.parent} for each in self.added]
        found = {"event": "compacted", "first": self.first, "last": self.last}
        return {**found, "added": added, "seconds": self.seconds}

    def event(self) -> Event:
        """Return what is reported of it."""
        num_anchors = sum(each.parent is None for each in self.added)
        return Event(
            outcome="compacted",
            version=self.last,
            seconds=self.seconds,
            detail=f"{len(self.added) - num_anchors} rollups and {num_anchors} anchors behind version "
            f"{self.first}",
            more=self.to_dict(),
        )


class Compactor:
    """Adds shortcuts to one run. Not for use from several threads at once."""

    def __init__(
        self,
        store: Store,
        *,
        anchor_every: Every | str = 64,
        encoding: str = "gap",
        scratch: Path | None = None,
        clock: Clock = utc_now,
        progress: Progress | None = None,
    ) -> None:
        """Prepare; nothing is read or written yet.

        Args:
            progress: told of the tensors of each segment.
            anchor_every: deltas between two anchors; `auto`: an anchor when the deltas since the last one
                have its size.
            scratch: folder for temporary files: the deltas of a segment, and one file of an anchor. None for
                the system's.
        """
        self.store, self._every = store, check_every(anchor_every)
        if encoding not in ENCODINGS:
            raise UsageError(f"encoding must be one of {', '.join(ENCODINGS)}, not {encoding!r:.80}")
        if scratch is not None and not scratch.is_dir():
            raise UsageError(f"{scratch} is no folder; name one for temporary files")
        self._encoding = ENCODINGS[encoding]
        self._scratch = scratch or Path(gettempdir())
        self._clock, self._progress = clock, progress
        self._run: Run | None = None
        self._tried: set[Ends] = set()
        """Rollups that were made, or were found to save too little."""
        self._given_up: set[int] = set()
        """First versions of segments that have lost payloads."""
        self._path: list[Manifest] = []
        """From an anchor to the head, oldest first."""
        self._known: set[Ends] = set()
        """Shortcuts that were looked at and found whole; each is looked at once."""
        self._damaged: dict[Ends, bytes] = {}
        """Shortcuts that are wrong, and their records."""

    def has_run(self) -> bool:
        """Whether the store holds a run."""
        if self._run is None and (header := history.read_header(self.store)) is not None:
            self._run = Run(self.store, header)
        return self._run is not None

    def compact(self) -> Generator[Compacted]:
        """Add what is due, oldest first, and yield each segment that got something.

        After every error what was added stays, and calling again is safe.
        """
        if not self.has_run():
            raise VersionNotFound(f"{self.store.url} holds no run, so there is nothing to compact")
        self._extend()
        if not self._path:
            # A run that has no version yet.
            return
        found = self._whole(shortcuts.listed(self.store))
        gone = cache(self._retired)
        for lacking in segments(self._path, found, self._every, self._damaged.keys()):
            if lacking.first.version in self._given_up or (segment := self._with_anchor(lacking)) is None:
                continue
            # `collect` deletes rollups over retired versions.
            useless = {each for each in segment.rollups() if each.leads_over(gone())}
            began = time.monotonic()
            try:
                added = self._built(segment, found | useless)
            except DataError as exc:
                if self._is_given_up(segment, exc):
                    continue
                if lacking.first.anchor is not None or not self._is_wrong(lacking.first):
                    raise
                # It begins with an added anchor that is damaged, and that the segment before replaces.
                yield from self.compact()
                return
            if added:
                # By version, and those of one version from the oldest parent to its anchor.
                added.sort(
                    key=lambda each: (each.version, each.version if each.parent is None else each.parent)
                )
                yield Compacted(
                    first=segment.first.version,
                    last=segment.last.version,
                    added=tuple(added),
                    seconds=time.monotonic() - began,
                )
        for ends, data in self._damaged.items():
            if ends.parent is not None:
                # It saves too little by now, or another `anchor_every` has none here. No reader needs it.
                shortcuts.withdraw(self.store, ends, data)

    def _retired(self) -> list[int]:
        return sorted(kept.retired_versions(self.store, self._path[-1].version))

    def _is_given_up(self, segment: Segment, exc: DataError) -> bool:
        """Whether deltas of a segment were deleted, as its versions are retired: they need no shortcuts."""
        if not isinstance(exc, PayloadMissing) or not kept.is_of_retired(self.store, exc):
            return False
        self._given_up.add(segment.first.version)
        logger.info("no shortcuts after version %d: %s", segment.first.version, exc)
        return True

    def _built(self, segment: Segment, found: Set[Ends]) -> list[Ends]:
        """Make what a segment lacks; return what was added. Once more if it was too late for that."""
        assert self._run is not None
        added: list[Ends] = []
        for _ in range(2):
            builder = Builder(
                self._run,
                segment,
                found | self._tried | set(added),
                self._encoding,
                self._scratch,
                self._damaged,
                self._clock,
                self._progress,
            )
            if not builder.has_work:
                break
            for each in builder.build():
                added.append(each)
                self._known.add(each)
                self._damaged.pop(each, None)
            if not builder.is_late:
                self._tried |= builder.rollups
                break
        return added

    def _extend(self) -> None:
        """Read the versions that came since the last call."""
        newest = history.head(self.store, self._path[-1].version if self._path else None)
        if newest is None or (self._path and newest == self._path[-1]):
            return
        known = {each.version: place for place, each in enumerate(self._path)}
        new: list[Manifest] = []
        with closing(history.ancestry(self.store, newest.version)) as versions:
            for each in versions:
                if each.version in known:
                    # A trainer that went back has left the versions behind this one.
                    del self._path[known[each.version] + 1 :]
                    break
                new.append(each)
            else:
                self._path.clear()
        self._path += reversed(new)

    def _with_anchor(self, segment: Segment) -> Segment | None:
        """Return a segment whose first version names its anchor, also one among the shortcuts.

        None if there is none, as the segment before has lost its payloads.
        """
        first = segment.first
        if first.anchor is not None:
            return segment
        if Ends(first.version, None) in self._damaged:
            logger.warning("no shortcuts after version %d, whose added anchor is damaged", first.version)
            return None
        try:
            return replace(segment, first=shortcuts.read(self.store, Ends(first.version, None)).way)
        except NotFound:
            logger.info("no shortcuts after version %d, which has no anchor", first.version)
            return None

    # Which shortcuts are damaged.

    def _whole(self, listed: frozenset[Ends]) -> set[Ends]:
        """Return shortcuts without those that are damaged. Only those to versions of the path are looked at.

        Of each that is new the record is read, and the sizes of its objects. The newest anchor, with which
        most readers begin, is read too, and so are the rollups behind it.
        """
        there = {each.version: each for each in self._path}
        added = {each.version for each in listed if each.parent is None}
        newest = next((v for v in reversed(there) if v in added or there[v].anchor is not None), 0)
        gone = set[Ends]()

        def look(ends: Ends) -> None:
            try:
                data = shortcuts.stored(self.store, ends)
            except NotFound:
                # A collector deleted it.
                gone.add(ends)
                return
            try:
                record = shortcuts.whole(self.store, ends, data)
                if record.manifest != there[ends.version]:
                    raise CorruptObject(f"it has another version {ends.version} than the store")
                if ends.version >= newest:
                    self._prove(record)
                self._known.add(ends)
            except DataError as exc:
                self._note(ends, data, exc)

        history.read_many(
            look, (each for each in listed - self._known - self._damaged.keys() if each.version in there)
        )
        for each in self._damaged.keys() - listed:
            del self._damaged[each]
        return set(listed - gone - self._damaged.keys())

    def _is_wrong(self, first: Manifest) -> bool:
        """Whether the anchor that was added to a version is damaged. It is read for that."""
        ends = Ends(first.version, None)
        with suppress(NotFound):
            data = shortcuts.stored(self.store, ends)
            try:
                self._prove(shortcuts.parsed(ends, data))
            except DataError as exc:
                self._note(ends, data, exc)
                return True
        return False

    def _prove(self, record: Shortcut) -> None:
        """Read all objects of a shortcut, and prove the weights of an anchor."""
        assert self._run is not None
        if record.is_anchor:
            check_anchor(self.store, self._run.header, record.way)
            return
        for each in record.payloads:
            download.check(self.store, each)

    def _note(self, ends: Ends, data: bytes, error: DataError) -> None:
        logger.warning(
            "%s of %s is damaged, and made anew if that is possible: %s",
            layout.shortcut_key(ends.version, ends.parent),
            self.store.url,
            error,
        )
        self._damaged[ends] = data
        self._known.discard(ends)


def follow(compactor: Compactor, stop: threading.Event, settings: LoopSettings) -> Generator[Event]:
    """Compact again and again until `stop` is set; failures are yielded too, and tried again."""

    def work() -> Iterator[Event]:
        if not compactor.has_run():
            yield Event(outcome="waiting")
            return
        for done in compactor.compact():
            yield done.event()

    yield from Loop("compact", compactor.store, settings).run(work, stop)
