"""Read what a plan needs: the target and its ancestors, with shortcuts where many versions lie between."""

import logging
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from patchstore.errors import CorruptObject, DataError, NotFound, UsageError, VersionNotFound, WrongParent
from patchstore.format import history, planning, shortcuts
from patchstore.format.anchoring import Since
from patchstore.format.hashing import digest
from patchstore.format.records import REQUEST_BYTES, Manifest, Plan
from patchstore.format.shortcuts import Ends
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)

_NEAR = 16
"""Ancestors that are read before shortcuts are looked for: a reader that is near needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A version, and what was read of its ancestors."""

    target: Manifest
    held: int | None
    ways: Mapping[int, Manifest]
    """By version, how it is reached: its manifest, or the same with a shortcut in place of its own delta."""

    def plan(self) -> Plan:
        """Return the cheapest plan from `held` to the target. Raises WrongParent where there is none."""
        return replace(planning.plan(self.ways, self.held, self.target.version), target=self.target)


def read(
    store: Store,
    target: int,
    held: int | None = None,
    check: history.Check | None = None,
    *,
    over_rollups: bool = True,
) -> Lineage:
    """Read a version, and of its ancestors what the cheapest plan from `held` needs.

    A reader a few versions behind, or near an anchor, pays for no shortcut. Otherwise it lists them once, and
    reads a number of records that grows with the logarithm of the versions between two anchors.

    Args:
        held: the version that the reader has; None for none.
        check: is called with the target before anything else is read. Shortcuts are not used then: what it
            checks, such as a signature, does not cover them.
        over_rollups: whether rollups may be used. A version that is kept can always be reached without: by
            its nearest anchor, which may be among the shortcuts, and the deltas since. A rollup, and a way
            from an older anchor, may lead over payloads that were deleted.

    Raises:
        VersionNotFound: the target, or an ancestor that the plan needs, is not in the store.
        CorruptObject: a manifest is not the one its child was built on.
    """
    added: Container[int] = ()
    if over_rollups or check is not None:
        with closing(_Walk(store, target, held, check)) as walk:
            # A reader without weights needs an anchor, which is seldom near.
            if walk.go(None if check is not None else 1 if held is None else _NEAR):
                return Lineage(target=walk.first, held=held, ways=walk.known)
            found = _listed(store) or frozenset()
            if found and (ways := _shortest(store, walk.first, found, held)) is not None:
                return Lineage(target=walk.first, held=held, ways=ways)
            added = {each.version for each in found if each.parent is None}
            if not added:
                walk.go()
                return Lineage(target=walk.first, held=held, ways=walk.known)
    elif (listed := _listed(store)) is None:
        added = _Any()
    else:
        added = {each.version for each in listed if each.parent is None}
    with closing(_Walk(store, target, held, check, added)) as walk:
        walk.go()
        return Lineage(target=walk.first, held=held, ways=walk.known)


class _Any(Container[int]):
    """All versions: one by one they are asked for an anchor, because the shortcuts cannot be listed."""

    def __contains__(self, version: object) -> bool:
        return True


def _shortest(
    store: Store, target: Manifest, found: frozenset[Ends], held: int | None
) -> Mapping[int, Manifest] | None:
    """Return the cheapest of the ways over shortcuts, or None where there is none."""
    anchor = shortcuts.newest_anchor(found, target.version)
    best, cost = None, None
    if anchor is not None or held is None:
        best, cost = _cheaper(
            _fetched_way(store, target, found, _over(target, found, anchor or 0)), held, target
        )
    if held is not None and held < target.version:
        ends = _over(target, found, held)
        # A small model's anchor costs less than asking for the records of many rollups.
        if cost is None or (len(ends) - 1) * REQUEST_BYTES < cost:
            way, its = _cheaper(_fetched_way(store, target, found, ends, is_held=True), held, target)
            if its is not None and (cost is None or its <= cost):
                best = way
    return best


def _cheaper(
    way: Mapping[int, Manifest] | None, held: int | None, target: Manifest
) -> tuple[Mapping[int, Manifest] | None, int | None]:
    """Return a way and its cost; None for both where it leads nowhere."""
    with suppress(WrongParent):
        if way is not None:
            return way, planning.plan(way, held, target.version).cost
    return None, None


def _listed(store: Store) -> frozenset[Ends] | None:
    """Return which shortcuts there are; None where the reader may not list the store."""
    try:
        return shortcuts.listed(store)
    except UsageError as exc:
        logger.info("shortcuts cannot be listed: %s", exc)
        return None


def since_anchor(store: Store, version: int) -> Since:
    """Return what leads from the nearest anchor to a version.

    Raises:
        VersionNotFound, CorruptObject: as `read`.
    """
    added = shortcuts.newest_anchor(_listed(store) or (), version)
    with closing(history.ancestry(store, version)) as versions:
        num, num_bytes = 0, 0
        for found in versions:
            if found.anchor is not None or found.version == added:
                return Since(num_deltas=num, num_bytes=num_bytes)
            num, num_bytes = num + 1, num_bytes + (0 if found.delta is None else found.delta.num_bytes)
    raise CorruptObject(f"{store.url}: no anchor was found among the ancestors of version {version}")


class _Walk:
    """A way back from a version: to the nearest anchor, and on to `held` if that may cost less."""

    def __init__(
        self,
        store: Store,
        target: int,
        held: int | None,
        check: history.Check | None,
        added: Container[int] = (),
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            added: versions that may have an anchor among the shortcuts.
        """
        self.known: dict[int, Manifest] = {}
        """What was read so far; a version whose anchor is among the shortcuts has it here."""
        self._store, self._target, self._held, self._added = store, target, held, added
        self._versions = history.ancestry(store, target, held, check)
        self._spent = 0  # as `Plan.cost`, from the last version read to the target
        self._cheapest: int | None = None

    def close(self) -> None:
        self._versions.close()

    def go(self, limit: int | None = None) -> bool:
        """Go on until `limit` versions are read; return whether what is read is all that a plan needs."""
        while limit is None or len(self.known) < limit:
            try:
                found = next(self._versions, None)
            except VersionNotFound:
                if self._cheapest is None:
                    raise
                return True
            if found is None:
                return True
            if found.version == self._target:
                self.first = found
            if found.version in self._added and found.anchor is None and found.version != self._held:
                found = _with_anchor(self._store, found)
            self.known[found.version] = found
            if self._cheapest is None and found.anchor is not None:
                self._cheapest = self._spent + planning.anchor_cost(found)
            if found.delta is None or found.version == self._held:
                return True
            self._spent += planning.delta_cost(found)
            if self._cheapest is not None and (
                self._held is None or found.version < self._held or self._spent > self._cheapest
            ):
                return True
        return False


def _with_anchor(store: Store, found: Manifest) -> Manifest:
    """Return a version with its anchor among the shortcuts; as it is where there is none that can be used."""
    try:
        record = shortcuts.read(store, Ends(found.version, None))
        if record.manifest != found:
            raise CorruptObject(f"a shortcut has another version {found.version} than the store")
    except NotFound:
        return found
    except (DataError, UsageError) as exc:
        what = f"{store.url}: the anchor that was added to version {found.version}"
        logger.warning("%s is not used: %s", what, exc)
        return found
    return record.way


def _over(target: Manifest, found: frozenset[Ends], goal: int) -> list[Ends]:
    """Return a way back from the target to `goal`, an older version, over the longest rollups, by their keys.

    Where a trainer went back to an older version, slots that follow each other are no lineage: then this may
    be no way, and another one is not found.
    """
    parents: dict[int, int] = {}
    for each in found:
        if each.parent is not None and each.parent >= goal:
            parents[each.version] = min(each.parent, parents.get(each.version, each.parent))
    ends = [Ends(target.version, parents.get(target.version))]
    while (last := ends[-1]).version > goal:
        at = last.version - 1 if last.parent is None else last.parent
        ends.append(Ends(at, parents.get(at)))
    # Of the last one, everything but its anchor would lead beyond the goal.
    ends[-1] = Ends(goal, None)
    return ends


def _fetched_way(
    store: Store, target: Manifest, found: frozenset[Ends], ends: Sequence[Ends], *, is_held: bool = False
) -> dict[int, Manifest] | None:
    """Read the records of a way, or return None where it is none.

    Args:
        is_held: whether the reader holds the version where the way begins. Otherwise it begins at that
            version's anchor, if there is one among the shortcuts.
    """
    has_anchor = ends[-1] in found and not is_held
    try:
        return _linked(_fetched(store, ends, has_anchor=has_anchor), target)
    except (DataError, NotFound, VersionNotFound) as exc:
        logger.warning("%s: shortcuts to version %d are not used: %s", store.url, target.version, exc)
        return None


_Step = tuple[Manifest, str, Manifest]
"""A version's manifest, the digest of its bytes, and how it is reached."""


def _fetched(store: Store, ends: Sequence[Ends], *, has_anchor: bool) -> list[_Step]:
    def fetch(each: Ends) -> _Step:
        if each.parent is not None or (has_anchor and each == ends[-1]):
            record = shortcuts.read(store, each)
            return record.manifest, record.digest, record.way
        manifest, data = history.read_stored(store, each.version)
        return manifest, digest(data), manifest

    with ThreadPoolExecutor(min(history.READ_AHEAD, len(ends)), "patchstore-shortcuts") as pool:
        return list(pool.map(fetch, ends))


def _linked(steps: Sequence[_Step], target: Manifest) -> dict[int, Manifest] | None:
    """Check that each version is the one on which the next was built; None where one has another parent.

    Raises:
        CorruptObject: a record contains another manifest than its child names.
    """
    if steps[0][0] != target:
        raise CorruptObject(f"a shortcut has another version {target.version} than the store")
    for (_, _, child), (parent, found, _) in pairwise(steps):
        if child.parent != parent.version:
            return None
        if child.parent_digest != found:
            raise CorruptObject(f"a way to version {child.version} names another version {parent.version}")
    return {way.version: way for _, _, way in steps}
