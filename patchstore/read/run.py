"""The run that a store holds: its versions, and how a reader reaches them.

Signatures, retirements, tags and shortcuts stand behind it. A reader names a version, and gets a way to it:
the version is signed by a required key and not given up, and the way leads round what is damaged.
"""

import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from patchstore.bucket import history, kept, lineage, notes
from patchstore.bucket.digests import PayloadMissing
from patchstore.bucket.lineage import NOTHING, Without
from patchstore.bucket.records import Ends, Manifest, Payload, Plan, Schema, StoreHeader
from patchstore.errors import CorruptObject, DataError, StoreReplaced, VersionNotFound
from patchstore.read.versions import Marks, Unreadable, Version, read_versions
from patchstore.signing.required import Keys, RequiredKeys, checks
from patchstore.stores import layout, opened
from patchstore.stores.base import Store
from patchstore.support.arguments import whole_number

if TYPE_CHECKING:
    import torch

    from patchstore.bucket.state_sums import SumsArray
    from patchstore.read.diff import Diff
    from patchstore.read.load import Into
    from patchstore.read.rebuild import Progress

logger = logging.getLogger(__name__)

T = TypeVar("T")


LEFT = "The weights were left as they are; {} to follow what is there now"
"""For `Run(then=)` of a reader that keeps weights at a version, with what it opens again."""


class Run:
    """A run, as one reader follows it. `patchstore.open` opens one; close it, or use it in a `with`."""

    def __init__(
        self,
        store: Store,
        header: StoreHeader,
        required: RequiredKeys | None = None,
        *,
        then: str = "",
    ) -> None:
        """Read the versions of a run whose header is known. Nothing is read yet.

        Args:
            then: what was left as it is, and what to do, if the store holds another run by now; see `LEFT`.
                Empty for a reader that has just read the header.
        """
        self.store, self.header = store, header
        self.check_signed = checks(required, store, header)
        """Raises for a version that must not be used; None if no key is required."""
        self._then = then
        self._closing = ExitStack()

    @classmethod
    def open(
        cls,
        store: Store | str | os.PathLike[str],
        required_keys: RequiredKeys | Keys | Sequence[Keys] | None = None,
    ) -> "Run":
        """Open the run that a store holds, to look at its versions and to load their weights.

        Args:
            store: an open store, or the URL or path of one, which `close` closes.
            required_keys: PEM files with public keys, one of which must have signed each version that is
                loaded or compared. `versions` only lists signatures.

        Raises:
            VersionNotFound: there is no run.
        """
        required = RequiredKeys.of(required_keys)
        with ExitStack() as closing:
            source = closing.enter_context(opened(store))
            run = cls(source, history.run_header(source), required)
            run._closing = closing.pop_all()
        return run

    def close(self) -> None:
        """Close the store, if `open` opened it."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        schema = self.schema
        return (
            f"<Run {self.header.run_id} in {self.store.url}: {len(schema.tensors):,} tensors, "
            f"{schema.num_elements:,} elements, {schema.num_bytes:,} bytes>"
        )

    @property
    def schema(self) -> Schema:
        """The tensors of every version: names, dtypes and shapes."""
        return self.header.schema

    # For people and scripts.

    def versions(self, last: int | None = None) -> list[Version]:
        """Return the versions of the run, oldest first: numbers, steps, times, bytes, tags and other marks.

        Args:
            last: only so many, the newest.

        Raises:
            CorruptObject, VersionNotFound: one of them cannot be read; `patchstore log STORE` shows the
                others.
        """
        if last is not None:
            last = whole_number("last", last, least=1)
        newest = self.newest()
        if newest is None:
            return []
        marks = Marks.read(self.store, newest.version)
        return self._versions(newest, last, lambda: marks)

    def _versions(
        self, newest: Manifest, last: int | None, marks: Callable[[], Marks | None]
    ) -> list[Version]:
        found: list[Version] = []
        for each in read_versions(self.store, self.header, newest.version, last=last, marks=marks):
            if isinstance(each, Unreadable):
                raise each.error
            found.append(each)
        return found

    @property
    def latest(self) -> Version:
        """The newest version; asks the store each time. Raises VersionNotFound before the first.

        Costs five reads. Its tags and other marks are listed when one of them is first asked for.
        """
        newest = self.head()
        return self._versions(newest, 1, cache(partial(Marks.read, self.store, newest.version)))[0]

    def load(
        self,
        version: int | str | None = None,
        *,
        into: "Into | None" = None,
        progress: "Progress | None" = None,
    ) -> "dict[str, torch.Tensor]":
        """Rebuild a version in memory, bit for bit, verified as a whole.

        Args:
            version: its number, or a tag; None for the newest.
            into: a model, or a dict of tensors by checkpoint name, on any device, whose memory gets the
                weights. All names, shapes and dtypes must be those of the run. They are compared before
                anything is fetched, and written when everything is verified.
            progress: called with the bytes done so far and the bytes in all.

        Returns:
            The tensors by checkpoint name: those of `into`, or new ones on the CPU. A tied tensor has one
            name, and `schema.tied` the others. Memory: the whole version on the CPU, also with `into`.

        Raises:
            SchemaMismatch, UsageError: `into` has other tensors, or tensors that are sharded or computed.
            VersionNotFound, VersionRetired: there is no such version or tag, or no longer.
            CorruptObject, StateMismatch: the bucket's bytes are wrong.
            Unsigned, WrongSignature: no required key has signed the version. After each of these errors
                `into` is as it was.
        """
        from patchstore.read import load

        return load.load(self, version, into, progress)

    def diff(self, before: int | str, after: int | str, *, progress: "Progress | None" = None) -> "Diff":
        """Compare two versions, tensor by tensor and bit by bit. Both are verified as a whole.

        Reads both from their anchors on. Memory: a few tensors; if their anchors have them in another order,
        at most one of the two versions.

        Raises as `load`.
        """
        from patchstore.read import diff

        return diff.diff(self, before, after, progress)

    # Which versions there are.

    def newest(self, hint: int | None = None) -> Manifest | None:
        """Return the newest version, or None before the first; see `history.head`."""
        found = history.head(self.store, hint)
        self.check(found if found is not None else history.read_header(self.store))
        return found

    def head(self, hint: int | None = None) -> Manifest:
        """Return the newest version. Raises VersionNotFound before the first."""
        newest = self.newest(hint)
        if newest is None:
            raise history.no_version(self.store)
        return newest

    def named(self, version: int | str | None) -> int:
        """Return the number of a version, which is not retired."""
        if version is None:
            return self.head().version
        number = notes.version_of(self.store, version)
        kept.check(self.store, number)
        return number

    def manifest(self, version: int) -> Manifest:
        """Return a version that may be used. Raises as `plan`."""
        return self.stored(version)[0]

    def stored(self, version: int) -> tuple[Manifest, bytes]:
        """Return a version that may be used, and its manifest's bytes. Raises as `plan`."""
        found, data = history.read_stored(self.store, version)
        self.check(found)
        if self.check_signed is not None:
            self.check_signed(found, data)
        return found, data

    def sums(self, manifest: Manifest) -> "SumsArray":
        # Not above: it takes numpy, and commands that only list versions start at once.
        from patchstore.bucket.state_sums import read_sums

        return read_sums(self.store, self.schema, manifest)

    def check(self, found: StoreHeader | Manifest | None) -> None:
        """Check that what the store has is of this run. Raises StoreReplaced or CorruptObject; see `then`."""
        if self._then:
            history.check_run(self.store, found, self.header.run_id, self._then)
        elif isinstance(found, Manifest):
            history.check_same_run(self.store, found, self.header.run_id)

    def replaced(self, what: str) -> StoreReplaced:
        """Return the error about a store whose versions are not those that were there."""
        found = f"{self.store.url} {what}. Its objects were removed or replaced. {self._then}"
        return StoreReplaced(found.rstrip())

    # How one is reached.

    def plan(self, version: int, held: Manifest | None = None, *, without: Without = NOTHING) -> Plan:
        """Plan the cheapest way to a version.

        Raises:
            VersionNotFound, WrongParent: the store has no way to that version.
            StoreReplaced: it has another run than before, or another version of the held number.
            Unsigned, WrongSignature: keys are required, and none has signed the version. Nothing but its
                manifest was read.
        """
        number = None if held is None else held.version
        try:
            found = lineage.read(self.store, version, number, self.check_signed, without=without)
        except VersionNotFound:
            self.check(history.read_header(self.store))
            raise
        self.check(found.target)
        if number is not None and number in found.ways and found.ways[number] != held:
            raise self.replaced(f"has another version {number} than the one that is held")
        return replace(found.plan(), held=number)

    def reach(
        self,
        version: int,
        use: Callable[[Plan], T],
        *,
        held: Manifest | None = None,
        around: "Around | None" = None,
    ) -> T:
        """Use the cheapest way to a version; where it leads over what is damaged or deleted, another one.

        Args:
            use: is called again with another way if it raises DataError, and must leave nothing behind then.
            around: what was left out before, which stays so if this succeeds.
        """

        def plan(without: Without) -> Plan:
            if without.held:
                # Payloads were deleted. Another way may lead to a version that is retired too.
                kept.check(self.store, version)
            return self.plan(version, held, without=without)

        with kept.explained(self.store, version):
            return (around or Around(self.store)).tried(plan, use)


open = Run.open  # noqa: A001 -- `patchstore.open`


# The way round what is gone or damaged. A version's own objects lead to it without any shortcut, until a
# collector deletes what an added anchor replaces. So a shortcut that does not lead where it should is left
# out, and the way is planned again. Where payloads were deleted, the way begins at the nearest anchor left.

_MOST = 3
"""Damaged rollups that are left out one by one, and damaged anchors. After this many all others are left out
too: each of them costs a whole attempt."""


class Around:
    """What the way to one version must not lead over, as far as that was found out."""

    def __init__(self, store: Store) -> None:
        self.without = NOTHING
        self._store = store

    def tried(self, plan: Callable[[Without], Plan], use: Callable[[Plan], T]) -> T:
        """Plan a way and use it; where it leads over damage, plan another one."""
        try:
            return self._tried(plan, use)
        except BaseException:
            # Another attempt begins anew: bytes may have been damaged on their way to this host alone.
            self.forget()
            raise

    def _tried(self, plan: Callable[[Without], Plan], use: Callable[[Plan], T]) -> T:
        way, first = plan(self.without), None
        while True:
            try:
                return use(way)
            except DataError as exc:
                before = self.without
                other = plan(self.without) if self._leave_out(way, exc) else way
                # Of another manifest it is not known whether it may be read, such as whether it is signed.
                if other == way or other.target != way.target:
                    raise self._explained(exc, first) from first
                if first is None and self.without.shortcuts != before.shortcuts:
                    # The frames may hold a model, for as long as the error is kept.
                    traceback.clear_frames(exc.__traceback__)
                    first = exc
                way = other

    def suspect(self, over: Set[Ends]) -> Set[Ends]:
        """Leave out what may have made a way lead to other weights: all rollups; without any, its anchor."""
        rollups = {each for each in over if each.parent is not None}
        self._add(rollups or over)
        self.without = replace(self.without, rollups=True)
        return rollups or over

    def _add(self, shortcuts: Set[Ends]) -> None:
        left_out = self.without.shortcuts | shortcuts
        self.without = replace(
            self.without,
            shortcuts=left_out,
            rollups=self.without.rollups or sum(each.parent is not None for each in left_out) >= _MOST,
            anchors=self.without.anchors or sum(each.parent is None for each in left_out) >= _MOST,
        )

    def join(self, others: Iterable[Without]) -> None:
        """Leave out also what others do, so that the ranks of a server take the same way."""
        every = (self.without, *others)
        self.without = Without(
            shortcuts=frozenset().union(*(each.shortcuts for each in every)),
            rollups=any(each.rollups for each in every),
            anchors=any(each.anchors for each in every),
            held=any(each.held for each in every),
        )

    def forget(self) -> None:
        """Begin anew, for another version: what was damaged may be repaired by then."""
        self.without = NOTHING

    def _leave_out(self, way: Plan, exc: DataError) -> bool:
        """Leave out what of a way may be to blame for an error; return False if nothing is."""
        if named := {ends for ends, payload in payloads_over(way) if payload.key in str(exc)}:
            self._add(named)
        if blamed := named or (self.suspect(way.over) if _is_of_weights(way, exc) else named):
            logger.warning(
                "version %d is reached in another way, without %s of %s: %s. If this comes again, "
                "`patchstore verify STORE --all` says what is damaged, and what to do",
                way.target.version,
                " and ".join(layout.shortcut_key(each.version, each.parent) for each in blamed),
                self._store.url,
                exc,
            )
            return True
        is_from_anchor = self.without.held and self.without.rollups
        if is_from_anchor or not isinstance(exc, PayloadMissing) or not kept.is_given_up(self._store, exc):
            return False
        self.without = replace(self.without, held=True, rollups=True)
        logger.warning(
            "payloads on the way to version %d were deleted, so it is reached from the nearest anchor: %s",
            way.target.version,
            exc,
        )
        return True

    def _explained(self, exc: DataError, first: DataError | None) -> DataError:
        """Return what to raise: where the last way was deleted, the shortcut in its place is to blame."""
        if first is None or not isinstance(exc, PayloadMissing) or not kept.is_given_up(self._store, exc):
            return exc
        return CorruptObject(
            f"{first}; and the way without that shortcut leads over what was deleted ({exc}): put the "
            "damaged object back, or take a newer version"
        )


def _is_of_weights(way: Plan, exc: DataError) -> bool:
    """Whether an error may be about what the shortcuts of a way led to: it names no object of the way."""
    if not way.over or isinstance(exc, PayloadMissing):
        return False
    steps = (way.target, *way.deltas, *((way.anchor,) if way.anchor is not None else ()))
    return not any(payload.key in str(exc) for step in steps for payload in step.objects)


def payloads_over(way: Plan) -> Iterator[tuple[Ends, Payload]]:
    """Yield the shortcuts of a way with each of their objects."""
    if way.anchor is not None and (ends := Ends(way.anchor.version, None)) in way.over:
        assert way.anchor.anchor is not None
        yield from ((ends, each) for each in (*way.anchor.anchor.payloads, *way.anchor.anchor.files))
    for step in way.deltas:
        if (ends := Ends(step.version, step.parent)) in way.over:
            assert step.delta is not None
            yield from ((ends, each) for each in step.delta.payloads)
