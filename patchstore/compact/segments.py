"""Which shortcuts a run lacks: a pure function of its manifests and of the shortcuts that it has."""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from patchstore.format.anchoring import Every, Since, is_due
from patchstore.format.records import Manifest
from patchstore.format.shortcuts import Ends

SHORTEST = 8
"""Deltas that the shortest rollup replaces. Shorter ones would save few requests, and take as many bytes."""
STRIDE = 16
"""Behind the last anchor, rollups are made for so many deltas at a time: a reader reads so many one by one
before it looks for shortcuts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """An anchor, and the deltas behind it up to where the next anchor is due or is."""

    first: Manifest
    """Has an anchor, perhaps among the shortcuts."""
    path: Sequence[Manifest]
    """The versions behind it, each the child of the one before."""
    needs_anchor: bool
    """The last version of the path is to get an anchor."""

    @property
    def last(self) -> Manifest:
        return self.path[-1]

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield which rollups the segment should have: each from and to a place in `[first, *path]`.

        Each has a power of two deltas, and begins at a multiple of that. Shorter ones come first.
        """
        length = SHORTEST
        while length <= len(self.path):
            yield from ((end - length, end) for end in range(length, len(self.path) + 1, length))
            length *= 2

    def rollups(self) -> Iterator[Ends]:
        """Yield the same as shortcuts are named."""
        versions = [self.first, *self.path]
        for begin, end in self.blocks():
            yield Ends(versions[end].version, versions[begin].version)


def segments(path: Iterable[Manifest], found: Set[Ends], every: Every) -> Iterator[Segment]:
    """Cut a lineage where anchors are due, and yield each segment that lacks shortcuts, as far as keys tell.

    A segment whose last version has an anchor among the shortcuts lacks none: that is made last. The deltas
    behind the last anchor that is there or due make a segment too, `STRIDE` at a time.

    Args:
        path: a version with an anchor, perhaps among the shortcuts, and all its descendants that lead to the
            head, oldest first.
        found: the shortcuts that there are.
    """
    versions = iter(path)
    first = next(versions)
    size = _anchor_bytes(first)
    since: list[Manifest] = []
    spent = 0
    for each in versions:
        if each.delta is None:
            # The version after a publication that was not stored. No delta leads to it.
            first, since, spent, size = each, [], 0, _anchor_bytes(each)
            continue
        since.append(each)
        spent += each.delta.num_bytes
        has_anchor = each.anchor is not None or Ends(each.version, None) in found
        if has_anchor or is_due(every, Since(num_deltas=len(since), num_bytes=spent), size):
            if Ends(each.version, None) not in found:
                yield Segment(first=first, path=tuple(since), needs_anchor=not has_anchor)
            first, since, spent = each, [], 0
    if num := len(since) - len(since) % STRIDE:
        yield Segment(first=first, path=tuple(since[:num]), needs_anchor=False)


def _anchor_bytes(manifest: Manifest) -> int:
    return 0 if manifest.anchor is None else manifest.anchor.num_bytes
