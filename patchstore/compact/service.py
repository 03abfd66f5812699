"""Add the shortcuts that a run lacks, once or for as long as it grows.

Any number of these may run at once, on any host that may write to the bucket. Each adds records that are
created once, so two of them do work twice and no harm. What one has added stays when it is killed.
"""

import logging
import threading
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from patchstore.compact.build import Builder
from patchstore.compact.segments import Segment, segments
from patchstore.encodings import ENCODINGS
from patchstore.errors import NotFound, PublishFailed, StoreUnavailable, UsageError, VersionNotFound
from patchstore.format import history, kept, shortcuts
from patchstore.format.anchoring import Every, check_every
from patchstore.format.missing import PayloadMissing
from patchstore.format.records import Manifest, StoreHeader
from patchstore.format.shortcuts import Ends
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
        """Return the event as JSON has it; the parent of an anchor is null."""
        added = [{"version": each.version, "parent": each.parent} for each in self.added]
        return {
            "event": "compacted",
            "first": self.first,
            "last": self.last,
            "added": added,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        anchors = sum(each.parent is None for each in self.added)
        return (
            f"versions {self.first} to {self.last}: {len(self.added) - anchors} rollups and "
            f"{anchors} anchors added, {self.seconds:.1f} s"
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
    ) -> None:
        """Prepare; nothing is read or written yet.

        Args:
            anchor_every: deltas between two anchors; `auto`: an anchor when the deltas since the last one
                have its size.
            encoding: of rollups: `raw`, `gap` or `context`.
            scratch: folder for temporary files: the deltas of a segment, and one file of an anchor. None for
                the system's.

        Raises:
            UsageError: an argument is none of these.
        """
        self._store, self._every = store, check_every(anchor_every)
        if encoding not in ENCODINGS:
            raise UsageError(f"encoding must be one of {', '.join(ENCODINGS)}, not {encoding!r:.80}")
        if scratch is not None and not scratch.is_dir():
            raise UsageError(f"{scratch} is no folder; name one for temporary files")
        self._encoding = ENCODINGS[encoding]
        self._scratch = scratch or Path(gettempdir())
        self._header: StoreHeader | None = None
        self._tried: set[Ends] = set()
        """Rollups that were made, or were found to save too little."""
        self._given_up: set[int] = set()
        """First versions of segments that have lost payloads."""
        self._path: list[Manifest] = []
        """From an anchor to the head, oldest first."""

    def compact(self) -> Generator[Compacted]:
        """Add what is due, oldest first, and yield each segment that got something.

        Raises:
            VersionNotFound: the store holds no run.
            CorruptObject, StateMismatch, UnsupportedFormat: the bucket's bytes are wrong.
            StoreUnavailable, PublishFailed: the store does not answer. Calling again is safe.
            HostError: there is no space for temporary files.
        """
        if self._header is None:
            self._header = history.read_header(self._store)
            if self._header is None:
                raise VersionNotFound(f"{self._store.url} holds no run, so there is nothing to compact")
        found = shortcuts.listed(self._store)
        self._extend()
        if not self._path:
            # A run that has no version yet.
            return
        gone: list[int] | None = None
        for lacking in segments(self._path, found, self._every):
            if lacking.first.version in self._given_up or (segment := self._with_anchor(lacking)) is None:
                continue
            if gone is None:
                gone = sorted(kept.retired_versions(self._store, self._path[-1].version))
            # `collect` deletes rollups over retired versions.
            useless = {each for each in segment.rollups() if each.leads_over(gone)}
            builder = Builder(
                *(self._store, self._header, segment, found | self._tried | useless),
                *(self._encoding, self._scratch),
            )
            if builder.has_work:
                began = time.monotonic()
                try:
                    added = builder.build()
                except PayloadMissing as exc:
                    # Its deltas were deleted, as its versions are retired: they need no shortcuts.
                    if not kept.is_of_retired(self._store, exc):
                        raise
                    self._given_up.add(segment.first.version)
                    logger.info("no shortcuts after version %d: %s", segment.first.version, exc)
                    continue
                seconds = time.monotonic() - began
                self._tried |= builder.rollups
                if added:
                    first, last = segment.first.version, segment.last.version
                    yield Compacted(
                        first=first, last=last, added=tuple(sorted(added, key=_order)), seconds=seconds
                    )

    def _extend(self) -> None:
        """Read the versions that came since the last call."""
        newest = history.head(self._store, self._path[-1].version if self._path else None)
        if newest is None or (self._path and newest == self._path[-1]):
            return
        known = {each.version: place for place, each in enumerate(self._path)}
        new: list[Manifest] = []
        with closing(history.ancestry(self._store, newest.version)) as versions:
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
        try:
            return replace(segment, first=shortcuts.read(self._store, Ends(first.version, None)).way)
        except NotFound:
            logger.info("no shortcuts after version %d, which has no anchor", first.version)
            return None


def _order(ends: Ends) -> tuple[int, int]:
    """Order shortcuts by version, and those of one version from the oldest parent to its anchor."""
    return ends.version, ends.version if ends.parent is None else ends.parent


def follow(compactor: Compactor, stop: threading.Event, *, interval_s: float) -> Generator[Compacted]:
    """Compact again and again until `stop` is set.

    A store that does not answer is asked again; every other error ends it.

    Args:
        interval_s: seconds between two looks at the store.
    """
    while not stop.is_set():
        try:
            yield from compactor.compact()
        except (StoreUnavailable, PublishFailed) as exc:
            logger.warning("trying again in %.0f s: %s", interval_s, exc)
        stop.wait(interval_s)
