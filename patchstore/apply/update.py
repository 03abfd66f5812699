"""An update of weights to a version of a run: whole, or not at all.

`Update` is the state machine of every update: stage, verify, apply, then accept or roll back. It keeps which
version the weights have. It reads and writes them through `Weights`, an interface that a dict of tensors
(`patchstore.apply.tensor_weights`) and one rank of a vLLM server (`vllm_plugin.rank_weights`) implement.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from patchstore.errors import HalfApplied, StoreReplaced, UsageError, VersionNotFound
from patchstore.format import history, kept, lineage
from patchstore.format.missing import PayloadMissing
from patchstore.format.records import Manifest, Plan, StoreHeader
from patchstore.signing.required import RequiredKeys, checks
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)


class StagedUpdate(Protocol):
    """An update that is fetched and decoded, and not written."""

    @property
    def plan(self) -> Plan: ...

    @property
    def timings(self) -> dict[str, float]:
        """Seconds that each part of staging took."""
        ...


class Reading:
    """Is entered before the weights are read. Raises if the update is no longer wanted."""

    def __init__(self, beside: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Take over what makes context managers, each for one use."""
        self.beside = beside
        """For another thread, which reads weights while payloads are fetched."""
        self._entered: list[AbstractContextManager[None]] = []

    @property
    def was_entered(self) -> bool:
        """Whether all was fetched."""
        return bool(self._entered)

    def __enter__(self) -> None:
        self._entered.append(self.beside())
        self._entered[-1].__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered[-1].__exit__(kind, exc, trace)


S = TypeVar("S", bound=StagedUpdate)


class Weights(Protocol[S]):
    """Weights that are brought from one version to another. Methods raise; `Update` keeps the state."""

    def stage(self, plan: Plan, reading: Reading) -> S:
        """Fetch and decode what a plan names; reads the weights and writes nothing."""
        ...

    def verify(self, staged: S, told: Sequence[Any]) -> None:
        """Check that the staged update leads to its version.

        Args:
            told: what each rank found of the staged update; empty where there are no ranks.

        Raises:
            StateMismatch: it does not.
        """
        ...

    def check(self, staged: S) -> None:
        """Check that the weights are still those that it was staged on; writes nothing."""
        ...

    def write(self, staged: S) -> None:
        """Write the staged update. If this raises, some of it may be written."""
        ...

    def undo(self, staged: S) -> None:
        """Put back all that `write` replaced, also after a `write` that raised."""
        ...

    def accept(self, staged: S) -> None:
        """Keep what the next update needs to know of the version that was written. Does not raise."""
        ...

    def release(self, staged: S) -> None:
        """Free what a staged update holds: files, memory. Does not raise."""
        ...


class Update(Generic[S]):
    """Moves weights between versions: `stage`, `verify`, `apply`, then `accept` or `roll_back`."""

    def __init__(
        self,
        store: Store,
        header: StoreHeader,
        weights: Weights[S],
        *,
        reopen: str,
        required: RequiredKeys | None = None,
    ) -> None:
        """Begin without a version.

        Args:
            header: of the run that the weights follow.
            reopen: what a user does to follow what the store holds now; errors end with it.
            required: keys, one of which must have signed each version that the weights are brought to.
        """
        self.store = store
        self.header = header
        self.held: Manifest | None = None
        """The version that the weights are known to have; None while that is unknown."""
        self.staged: S | None = None
        """The update that `apply` writes."""
        self.half_applied = False
        """The weights are parts of two versions, or of none; the next update starts from an anchor."""
        self.num_applied = 0
        self.timings: dict[str, float] = {}
        """Seconds of the last update: those of staging, and `apply`."""
        self._weights = weights
        self._reopen = reopen
        self.check_signed = checks(required, store, header)
        """Raises for a version that must not be used; None if no key is required."""
        self._is_written = False

    @property
    def version(self) -> int | None:
        """The number of the version that is held."""
        return None if self.held is None else self.held.version

    # What the store holds.

    def head(self) -> Manifest | None:
        """Return the store's newest version, or None before the first.

        Raises:
            StoreReplaced: the store holds another run, or its versions end before the held one.
        """
        newest = history.head(self.store, hint=self.version)
        if newest is None:
            self._check_header()
        else:
            self.check_run(newest)
        if self.held is not None:
            if newest is None or newest.version < self.held.version:
                there = "has no version" if newest is None else f"ends with version {newest.version}"
                raise self._replaced(f"{there}, but version {self.version} of the same run is held")
            if newest.version == self.held.version:
                self._check_held(newest)
        return newest

    def check_held(self) -> None:
        """Check that the store still has the held version.

        Raises:
            StoreReplaced: it has not, or has another version of that number.
        """
        assert self.version is not None
        try:
            found = history.read_manifest(self.store, self.version)
        except VersionNotFound as exc:
            self._check_header()
            raise self._replaced(f"no longer has version {self.version}, which is held") from exc
        self._check_held(found)

    def plan(self, version: int) -> Plan:
        """Plan the way from the held version to another.

        Raises:
            VersionNotFound, WrongParent: the store has no way to that version.
            StoreReplaced: it has another run than when it was opened, or another version of the held number.
            Unsigned, WrongSignature: keys are required, and none has signed the version. Nothing but its
                manifest was read.
        """
        # Read once: another thread may apply an update meanwhile.
        before = self.held
        held = None if before is None else before.version
        try:
            found = lineage.read(self.store, version, held, self.check_signed)
        except VersionNotFound:
            self._check_header()
            raise
        self.check_run(found.target)
        if held is not None and held in found.ways and found.ways[held] != before:
            raise self._replaced(f"has another version {held} than the one that is held")
        return found.plan()

    def check_run(self, found: Manifest) -> None:
        """Check that a version is of the run that was opened. Raises StoreReplaced."""
        if found.run_id != self.header.run_id:
            raise self._replaced(
                f"has version {found.version} of run {found.run_id}, but run {self.header.run_id} was opened"
            )

    def _check_header(self) -> None:
        header = history.read_header(self.store)
        if header is None or header.run_id != self.header.run_id:
            there = "no run" if header is None else f"run {header.run_id}"
            raise self._replaced(f"has {there}, but run {self.header.run_id} was opened")

    def _check_held(self, found: Manifest) -> None:
        self.check_run(found)
        if found != self.held:
            raise self._replaced(f"has another version {self.version} than the one that is held")

    def _replaced(self, what: str) -> StoreReplaced:
        return StoreReplaced(
            f"{self.store.url} {what}. Its objects were removed or replaced. "
            f"The weights were left as they are; {self._reopen} to follow what is there now"
        )

    # The update.

    def prepare(self, version: int, reading: Reading | None = None) -> S:
        """Return a staged update to a version. The state stays as it is; `put` it to apply it.

        Raises:
            VersionRetired: the version is retired, and its payloads are deleted.
            As `plan`, and as `Weights.stage`.
        """
        plan, reading = self.plan(version), reading or Reading()
        try:
            return self._weights.stage(plan, reading)
        except PayloadMissing as exc:
            around = None if reading.was_entered else self._plan_around(plan, exc)
            if around is None:
                with kept.explained(self.store, version):
                    raise
            logger.warning("payloads after version %s were deleted, so %s: %s", plan.held, around, exc)
        return self._weights.stage(around, reading)

    def _plan_around(self, plan: Plan, missed: PayloadMissing) -> Plan | None:
        """Return a plan from the nearest anchor, if another one failed because it led over what was deleted.

        Raises:
            VersionRetired: the target itself is retired.
        """
        target = plan.target.version
        kept.check(self.store, target)
        if not kept.is_given_up(self.store, missed):
            return None
        found = lineage.read(self.store, target, None, self.check_signed, over_rollups=False)
        around = replace(found.plan(), held=plan.held)
        # Of another manifest it is not known whether it may be read, such as whether it is signed.
        return None if around == plan or around.target != plan.target else around

    def put(self, staged: S) -> None:
        """Have `apply` write this update. What was staged before is dropped."""
        self.drop()
        self.staged = staged
        self.timings = dict(staged.timings)

    def verify(self, told: Sequence[Any] = ()) -> None:
        """Check that what is staged leads to its version.

        Args:
            told: what each rank found; see `Weights.verify`.

        Raises:
            StateMismatch: it does not: the payloads are wrong, or the weights are not the held version.
        """
        self._weights.verify(self._due(), told)

    def apply(self) -> None:
        """Write what is staged into the weights. `accept` or `roll_back` must follow, also if this raises.

        Raises:
            UsageError: nothing is staged, or it was staged on another version than the held one.
            Anything that `Weights.check` or `Weights.write` raises.
        """
        staged = self._due()
        if staged.plan.held != self.version:
            raise UsageError(
                f"this update was staged on version {staged.plan.held}, but {self.version} is held now: "
                "stage it again"
            )
        began = time.monotonic()
        self._weights.check(staged)
        self._is_written = True
        self._weights.write(staged)
        self.timings["apply"] = time.monotonic() - began

    def accept(self) -> None:
        """Make the update final: the weights have its version from here on."""
        staged = self._due()
        self._weights.accept(staged)
        self.held = staged.plan.target
        self.half_applied = self._is_written = False
        self.num_applied += 1
        self.drop()

    def roll_back(self) -> None:
        """Put back the weights from before `apply`, and drop what is staged. The held version stays.

        Raises:
            HalfApplied: that failed too. `mark_half_applied` is to follow, in all ranks.
        """
        try:
            if self._is_written and self.staged is not None:
                self._weights.undo(self.staged)
        except Exception as exc:
            raise HalfApplied(
                f"undoing a failed update failed too, so the weights are parts of two versions: {exc}; "
                "update again, which will load an anchor, or restart the server"
            ) from exc
        finally:
            self._is_written = False
            self.drop()

    def drop(self) -> None:
        """Forget what is staged."""
        staged, self.staged = self.staged, None
        if staged is not None:
            self._weights.release(staged)

    def forget(self) -> None:
        """Hold no version: the next update starts from an anchor."""
        self.held = None
        self.drop()

    def mark_half_applied(self) -> None:
        """Hold no version, and say so, until an update from an anchor succeeds."""
        self.half_applied = True
        self.forget()

    def _due(self) -> S:
        if self.staged is None:
            raise UsageError("no version is staged; call update_weights with a version before finishing")
        return self.staged
