"""The versions of a run, how they follow each other, and the paths along which they are proved.

A *path* is an anchor, and versions that build on it one after the other. It ends before nothing builds on it,
or with a version that has an anchor of its own. Where a trainer went back, paths have a beginning in common.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from patchstore.errors import (
    CorruptObject,
    DataError,
    HostError,
    NotFound,
    PatchstoreError,
    StoreUnavailable,
)
from patchstore.format import hashing, history, layout, manifest_json, shortcuts
from patchstore.format.records import Manifest, StoreHeader
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Slot:
    """What is known of a version so far."""

    version: int
    manifest: Manifest | None = None
    digest: str | None = None
    error: PatchstoreError | None = None
    is_derived: bool = False
    """Whether the error is that of a version that this one builds on."""
    is_linked: bool = False
    """Whether the manifest is of this run and follows its parent, so that a path may go through it."""
    children: list[int] = field(default_factory=list)
    left: set[str] = field(default_factory=set)
    """Proofs that are not done, of `anchor` and `delta`."""


class RunPaths:
    """All manifests of a run."""

    def __init__(self, store: Store, header: StoreHeader, check: history.Check | None) -> None:
        """Prepare; nothing is read yet.

        Args:
            check: raises for a version that no required key signed.
        """
        self._store, self._header, self._check_signed = store, header, check
        self.slots: dict[int, Slot] = {}
        """By version, ascending."""
        self.added: dict[int, Manifest] = {}
        """Versions that have an anchor among the shortcuts alone, with that anchor."""

    def read(self, newest: int) -> None:
        """Read all manifests, some of them ahead, and check how each follows its parent."""
        before: tuple[Manifest, bytes] | None = None
        with ThreadPoolExecutor(history.READ_AHEAD, thread_name_prefix="patchstore-log") as pool:
            coming: deque[tuple[Slot, Future[bytes | None]]] = deque()
            versions = iter(range(newest + 1))
            while True:
                for version in islice(versions, 4 * history.READ_AHEAD - len(coming)):
                    slot = self.slots[version] = Slot(version=version)
                    coming.append((slot, pool.submit(self._read, slot)))
                if not coming:
                    return
                slot, read = coming.popleft()
                data = read.result()
                if slot.is_linked:
                    found = found_in(slot)
                    if (error := caught(partial(self._check_link, found, before))) is not None:
                        slot.error, slot.is_linked = error, False
                before = None if slot.manifest is None or data is None else (slot.manifest, data)

    def read_added(self) -> None:
        """Read the anchors among the shortcuts. Paths begin and end with them too from then on.

        One that cannot be used is left out.
        """
        for ends in shortcuts.listed(self._store):
            slot = self.slots.get(ends.version)
            if ends.parent is not None or slot is None or slot.manifest is None or slot.manifest.anchor:
                continue
            try:
                found = shortcuts.read(self._store, ends)
            except (DataError, NotFound) as exc:
                logger.warning("an anchor that was added to version %d is not used: %s", ends.version, exc)
                continue
            if found.manifest == slot.manifest:
                self.added[ends.version] = found.way

    def _has_anchor(self, slot: Slot) -> bool:
        return found_in(slot).anchor is not None or slot.version in self.added

    def _read(self, slot: Slot) -> bytes | None:
        """Read a manifest, and check its run and its signature."""
        data = None
        try:
            data = history.stored(self._store, slot.version)
            slot.digest = hashing.digest(data)
            slot.manifest = found = manifest_json.from_json(layout.manifest_key(slot.version), data)
            if found.run_id != self._header.run_id:
                raise CorruptObject(
                    f"version {slot.version} is of run {found.run_id}, but the store of run "
                    f"{self._header.run_id}"
                )
            # A path may lead through an unsigned version: the chain of digests covers it.
            slot.is_linked = True
            if self._check_signed is not None:
                self._check_signed(found, data)
        except PatchstoreError as exc:
            slot.error = blamed(exc)
        return data

    def _check_link(self, found: Manifest, before: "tuple[Manifest, bytes] | None") -> None:
        if found.parent is None:
            return
        if before is not None and before[0].version == found.parent:
            history.check_parent(found, *before)
        else:
            history.read_parent(self._store, found)

    def paths(self, known: Mapping[int, str]) -> tuple[list[list[Manifest]], set[int]]:
        """Return the paths to prove, and the versions of paths that are known."""
        linked = [slot for slot in self.slots.values() if slot.is_linked]
        for slot in linked:
            found = found_in(slot)
            if self._has_anchor(slot):
                slot.left.add("anchor")
            if found.delta is not None and found.parent is not None:
                slot.left.add("delta")
                self.slots[found.parent].children.append(found.version)
        paths, left_out = [], set[int]()
        for slot in linked:
            for way in self._ways(slot.version) if "anchor" in slot.left else ():
                path = [self.slots[each] for each in way]
                if all(known.get(each.version) == each.digest for each in path):
                    left_out.update(way)
                    path[0].left.discard("anchor")
                    for each in path[1:]:
                        each.left.discard("delta")
                else:
                    first = self.added.get(path[0].version) or found_in(path[0])
                    paths.append([first, *(found_in(each) for each in path[1:])])
        return paths, left_out

    def _ways(self, anchor: int) -> Iterator[list[int]]:
        """Yield the ways from an anchor to each last version that is reached from it by deltas."""
        ways = [[anchor]]
        while ways:
            way = ways.pop()
            while len(way) == 1 or not self._has_anchor(self.slots[way[-1]]):
                # Not a copy of the way for each version: there may be a hundred thousand.
                if len(self.slots[way[-1]].children) != 1:
                    break
                way.append(self.slots[way[-1]].children[0])
            last = self.slots[way[-1]]
            # A version with an anchor ends the way; its own way begins with it.
            is_end = len(way) > 1 and self._has_anchor(last)
            if is_end or not last.children:
                yield way
            else:
                ways += [[*way, each] for each in last.children]


def found_in(slot: Slot) -> Manifest:
    assert slot.manifest is not None
    return slot.manifest


def derived(error: PatchstoreError, version: int) -> PatchstoreError:
    return type(error)(f"builds on version {version}, which is wrong: {error}")


def caught(what: Callable[[], None]) -> PatchstoreError | None:
    """Return what is wrong with the bucket; errors of the store and of this host are raised."""
    try:
        what()
    except PatchstoreError as exc:
        return blamed(exc)
    return None


def blamed(error: PatchstoreError) -> PatchstoreError:
    """Return an error that the bucket is to blame for; raise one of the store or of this host."""
    if isinstance(error, StoreUnavailable | HostError):
        raise error
    return error
