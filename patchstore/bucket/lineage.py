"""Which payloads lead to a version: read its ancestors, with shortcuts where many lie between, and plan."""

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from patchstore.bucket import history, shortcuts
from patchstore.bucket.digests import digest
from patchstore.bucket.records import REQUEST_BYTES, Ends, Manifest, Plan
from patchstore.errors import CorruptObject, DataError, NotFound, UsageError, VersionNotFound, WrongParent
from patchstore.stores import layout
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)

LONGEST = 4096
"""Deltas from one anchor to the next at most, where another process adds anchors or their distance is `auto`:
all of them are open at once when they are compacted."""

Every = int | Literal["auto"]
"""After how many deltas an anchor is due; or `auto`: when the deltas since the last one have its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """What was published since an anchor."""

    num_deltas: int = 0
    num_bytes: int = 0


def is_due(every: Every, since: Since, anchor_bytes: int) -> bool:
    """Whether the newest version is to get an anchor."""
    if every == "auto":
        return since.num_bytes >= anchor_bytes or since.num_deltas >= LONGEST
    return since.num_deltas >= every


def check_every(every: object) -> Every:
    """Return after how many deltas another process adds an anchor, as a user names it."""
    if every == "auto":
        return "auto"
    try:
        number = int(str(every))
    except ValueError:
        number = 0
    if not 2 <= number <= LONGEST:
        raise UsageError(f"an anchor is due every 2 to {LONGEST} deltas, or `auto`, not {every!r:.80}")
    return number


def plan(manifests: Mapping[int, Manifest], held: int | None, target: int) -> Plan:
    """Return the cheapest plan from `held` to `target`, as `Plan.cost` counts.

    Possible plans: the deltas from `held`, if it is an ancestor of the target and no version between them
    lacks a delta; or an anchor at or before the target and the deltas after it. Deltas win a tie.

    Args:
        manifests: at least the target and its ancestors back to `held` or, failing that, back
            to the nearest anchor; see `lineage.read`.
    """
    goal = manifests[target]
    path: list[Manifest] = []
    ways: list[Plan] = []
    at: Manifest | None = goal
    while at is not None:
        deltas = tuple(reversed(path))
        if at.version == held:
            ways.insert(0, Plan(held=held, target=goal, anchor=None, deltas=deltas))
            break
        if at.anchor is not None:
            ways.append(Plan(held=held, target=goal, anchor=at, deltas=deltas))
        if at.delta is None or at.parent is None:
            break
        path.append(at)
        at = manifests.get(at.parent)
    if not ways:
        raise WrongParent(
            f"version {target} cannot be reached: it does not descend from version {held}, which is "
            "here, and no anchor was found among its ancestors"
        )
    return min(ways, key=lambda way: way.cost)


def delta_cost(manifest: Manifest) -> int:
    """Cost of reaching a version from its parent: the delta, and the parent's manifest."""
    assert manifest.delta is not None
    return manifest.delta.num_bytes + (1 + len(manifest.delta.payloads)) * REQUEST_BYTES


def anchor_cost(manifest: Manifest) -> int:
    """Additional cost of starting from a version's anchor, instead of having that version."""
    assert manifest.anchor is not None
    return manifest.anchor.num_bytes + len(manifest.anchor.payloads) * REQUEST_BYTES


_NEAR = 16
"""Ancestors that are read before shortcuts are looked for: a reader that is near needs none."""
_MOST_DAMAGED = 3
"""Records of shortcuts that are left out, one after the other, before a way is sought without rollups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Without:
    """What a way must not lead over."""

    shortcuts: frozenset[Ends] = frozenset()
    rollups: bool = False
    """All of them. A version that is kept can always be reached without: by its nearest anchor, which may be
    among the shortcuts, and the deltas since. A rollup may lead over payloads that were deleted."""
    anchors: bool = False
    """All that were added to versions."""
    held: bool = False
    """What the reader has: the way begins at an anchor."""

    def rest(self, found: frozenset[Ends]) -> frozenset[Ends]:
        """Return those of some shortcuts that may be used."""
        hidden = {each for each in found if (self.anchors if each.parent is None else self.rollups)}
        return found - self.shortcuts - hidden


NOTHING = Without()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A version, and what was read of its ancestors."""

    target: Manifest
    held: int | None
    ways: Mapping[int, Manifest]
    """By version, how it is reached: its manifest, or the same with a shortcut in place of its own delta."""
    over: frozenset[Ends]
    """The shortcuts among these."""

    def plan(self) -> Plan:
        """Return the cheapest plan from `held` to the target. Raises WrongParent where there is none."""
        found = plan(self.ways, self.held, self.target.version)
        passed = {Ends(each.version, each.parent) for each in found.deltas}
        if found.anchor is not None:
            passed.add(Ends(found.anchor.version, None))
        return replace(found, target=self.target, over=self.over & passed)


def read(
    store: Store,
    target: int,
    held: int | None = None,
    check: history.Check | None = None,
    *,
    without: Without = NOTHING,
) -> Lineage:
    """Read a version, and of its ancestors what the cheapest plan from `held` needs.

    A reader a few versions behind, or near an anchor, pays for no shortcut. Otherwise it lists them once, and
    reads a number of records that grows with the logarithm of the versions between two anchors.

    Args:
        check: is called with the target before anything else is read, for example to check its signature.
            Shortcuts are not used then, because no signature covers them.
    """
    held = None if without.held else held
    found: frozenset[Ends] | None = frozenset()
    if without.rollups and check is None:
        if not without.anchors and (found := _listed(store)) is not None:
            found = without.rest(found)
    else:
        with closing(_Walk(store, target, held, check)) as walk:
            # A reader without weights needs an anchor, which is seldom near.
            if walk.go(None if check is not None else 1 if held is None else _NEAR):
                return walk.lineage()
            found = without.rest(_listed(store) or frozenset())
            if found and (way := _shortest(store, walk.first, found, held)) is not None:
                return way
            if not any(each.parent is None for each in found):
                walk.go()
                return walk.lineage()

    def may_have(version: int) -> bool:
        # Where the shortcuts cannot be listed, versions are asked for an anchor one by one.
        ends = Ends(version, None)
        return ends not in without.shortcuts if found is None else ends in found

    with closing(_Walk(store, target, held, check, may_have)) as walk:
        walk.go()
        return walk.lineage()


class _Damaged(Exception):
    """Shortcuts that cannot be used, and why."""

    def __init__(self, shortcuts: frozenset[Ends], reason: Exception) -> None:
        super().__init__(str(reason))
        self.shortcuts = shortcuts


def _shortest(store: Store, target: Manifest, found: frozenset[Ends], held: int | None) -> Lineage | None:
    """Return the cheapest of the ways over shortcuts, or None where there is none.

    A shortcut whose record is wrong or gone is left out, as long as only few are.
    """
    for _ in range(_MOST_DAMAGED):
        try:
            return _cheapest(store, target, found, held)
        except _Damaged as exc:
            names = " and ".join(layout.shortcut_key(each.version, each.parent) for each in exc.shortcuts)
            logger.warning("%s: %s is not used: %s", store.url, names, exc)
            found -= exc.shortcuts
    return None


def _cheapest(store: Store, target: Manifest, found: frozenset[Ends], held: int | None) -> Lineage | None:
    """As `_shortest`. Raises _Damaged."""
    anchor = shortcuts.newest_anchor(found, target.version)
    best = None
    if anchor is not None or held is None:
        best = _fetched_way(store, target, held, found, _over(target, found, anchor or 0))
    cost = _cost(best)
    if held is not None and held < target.version:
        ends = _over(target, found, held)
        # A small model's anchor costs less than asking for the records of many rollups.
        if cost is None or (len(ends) - 1) * REQUEST_BYTES < cost:
            way = _fetched_way(store, target, held, found, ends, is_held=True)
            its = _cost(way)
            if its is not None and (cost is None or its <= cost):
                return way
    return None if cost is None else best


def _cost(way: Lineage | None) -> int | None:
    """Return the cost of a way; None where it leads nowhere."""
    with suppress(WrongParent):
        return None if way is None else way.plan().cost
    return None


def _listed(store: Store) -> frozenset[Ends] | None:
    """Return which shortcuts there are; None where the reader may not list the store."""
    try:
        return shortcuts.listed(store)
    except UsageError as exc:
        logger.info("shortcuts cannot be listed: %s", exc)
        return None


def since_anchor(store: Store, version: int) -> Since:
    """Return what leads from the nearest anchor to a version."""
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
        may_have: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Prepare; nothing is read yet."""
        self.known: dict[int, Manifest] = {}
        """What was read so far; a version whose anchor is among the shortcuts has it here."""
        self._over: set[Ends] = set()
        self._store, self._target, self._held, self._may_have = store, target, held, may_have
        self._versions = history.ancestry(store, target, held, check)
        self._spent = 0  # as `Plan.cost`, from the last version read to the target
        self._cheapest: int | None = None

    def close(self) -> None:
        self._versions.close()

    def lineage(self) -> Lineage:
        return Lineage(target=self.first, held=self._held, ways=self.known, over=frozenset(self._over))

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
            if found.anchor is None and found.version != self._held and self._may_have(found.version):
                found = _with_anchor(self._store, found)
                if found.anchor is not None:
                    self._over.add(Ends(found.version, None))
            self.known[found.version] = found
            if self._cheapest is None and found.anchor is not None:
                self._cheapest = self._spent + anchor_cost(found)
            if found.delta is None or found.version == self._held:
                return True
            self._spent += delta_cost(found)
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
    store: Store,
    target: Manifest,
    held: int | None,
    found: frozenset[Ends],
    ends: Sequence[Ends],
    *,
    is_held: bool = False,
) -> Lineage | None:
    """Read the records of a way, or return None where it is none. Raises _Damaged.

    Args:
        is_held: whether the reader holds the version where the way begins. Otherwise it begins at that
            version's anchor, if there is one among the shortcuts.
    """
    records = {each for each in ends if each.parent is not None}
    if ends[-1] in found and not is_held:
        records.add(ends[-1])
    try:
        ways = _linked(_fetched(store, ends, records), target, ends, records)
    except (DataError, NotFound) as exc:
        logger.warning("%s: shortcuts to version %d are not used: %s", store.url, target.version, exc)
        return None
    return None if ways is None else Lineage(target=target, held=held, ways=ways, over=frozenset(records))


_Step = tuple[Manifest, str, Manifest]
"""A version's manifest, the digest of its bytes, and how it is reached."""


def _fetched(store: Store, ends: Sequence[Ends], records: Container[Ends]) -> list[_Step]:
    """Read a way. Raises _Damaged: a record is wrong, or is gone."""

    def fetch(each: Ends) -> _Step:
        if each in records:
            try:
                record = shortcuts.read(store, each)
            except (DataError, NotFound) as exc:
                raise _Damaged(frozenset({each}), exc) from exc
            return record.manifest, record.digest, record.way
        manifest, data = history.read_stored(store, each.version)
        return manifest, digest(data), manifest

    return history.read_many(fetch, ends)


def _linked(
    steps: Sequence[_Step], target: Manifest, ends: Sequence[Ends], records: Container[Ends]
) -> dict[int, Manifest] | None:
    """Check that each version is the one on which the next was built; None where one has another parent."""

    def check(is_right: bool, what: str, *places: Ends) -> None:
        wrong = CorruptObject(what)
        if not is_right and (blamed := frozenset(each for each in places if each in records)):
            raise _Damaged(blamed, wrong)
        if not is_right:
            raise wrong

    is_same = steps[0][0] == target
    check(is_same, f"it has another version {target.version} than the store", ends[0])
    for at, ((_, _, child), (parent, found, _)) in enumerate(pairwise(steps)):
        if child.parent != parent.version:
            return None
        what = f"a way to version {child.version} names another version {parent.version}"
        check(child.parent_digest == found, what, ends[at + 1], ends[at])
    return {way.version: way for _, _, way in steps}
