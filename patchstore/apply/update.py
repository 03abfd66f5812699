"""An update of weights to a version of a run: whole, or not at all.

`Update` is the state machine of every update: stage, verify, apply, then accept or roll back. It keeps which
version the weights have. It reads and writes them through `Weights`, an interface that a dict of tensors
(`patchstore.apply.replica`) and one rank of a vLLM server (`vllm_plugin.live.rank_weights`) implement.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

from patchstore.bucket import history
from patchstore.bucket.records import Manifest, Plan
from patchstore.errors import HalfApplied, UsageError, VersionNotFound
from patchstore.read.run import Around, Run


class StagedUpdate(Protocol):
    """An update that is fetched and decoded, and not written."""

    @property
    def plan(self) -> Plan: ...

    @property
    def timings(self) -> dict[str, float]:
        """Seconds that each part of staging took."""
        ...


ReadGate = Callable[[], AbstractContextManager[None]]
"""Returns what is entered before live weights are read, on any thread, for one use each.

Entering it raises if the update is no longer wanted.
"""

S = TypeVar("S", bound=StagedUpdate)


class Weights(Protocol[S]):
    """Weights that are brought from one version to another. Methods raise; `Update` keeps the state."""

    def stage(self, plan: Plan, reading: ReadGate) -> S:
        """Fetch and decode what a plan names; reads the weights and writes nothing."""
        ...

    def verify(self, staged: S, reports: Sequence[Any]) -> None:
        """Check that the staged update leads to its version.

        Args:
            reports: what each rank found of the staged update; empty where there are no ranks.
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

    def __init__(self, run: Run, weights: Weights[S]) -> None:
        """Begin without a version."""
        self.run = run
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
        self.around = Around(run.store)
        """What the update that is under way goes round."""
        self._is_written = False

    @property
    def version(self) -> int | None:
        """The number of the version that is held."""
        return None if self.held is None else self.held.version

    # What the store holds.

    def head(self) -> Manifest | None:
        """Return the store's newest version, or None before the first."""
        newest = self.run.newest(hint=self.version)
        if self.held is not None:
            if newest is None or newest.version < self.held.version:
                there = "has no version" if newest is None else f"ends with version {newest.version}"
                raise self.run.replaced(f"{there}, but version {self.version} of the same run is held")
            if newest.version == self.held.version:
                self._check_held(newest)
        return newest

    def check_held(self) -> None:
        """Check that the store still has the held version."""
        assert self.version is not None
        try:
            found = history.read_manifest(self.run.store, self.version)
        except VersionNotFound as exc:
            self.run.check(history.read_header(self.run.store))
            raise self.run.replaced(f"no longer has version {self.version}, which is held") from exc
        self._check_held(found)

    def _check_held(self, found: Manifest) -> None:
        self.run.check(found)
        if found != self.held:
            raise self.run.replaced(f"has another version {self.version} than the one that is held")

    # The update.

    def prepare(
        self, version: int, gate: ReadGate = nullcontext, verify: Callable[[S], None] | None = None
    ) -> S:
        """Return a staged update to a version. The state stays as it is; `put` it to apply it.

        Damaged shortcuts, and payloads that were deleted, are gone round where there is another way.

        Args:
            verify: checks what was staged, where that takes no other ranks.
        """

        def use(plan: Plan) -> S:
            staged = self._weights.stage(plan, gate)
            if verify is not None:
                try:
                    verify(staged)
                except BaseException:
                    self._weights.release(staged)
                    raise
            return staged

        return self.run.reach(version, use, held=self.held, around=self.around)

    def put(self, staged: S) -> None:
        """Have `apply` write this update. What was staged before is dropped."""
        self.drop()
        self.staged = staged
        self.timings = dict(staged.timings)

    def verify(self, reports: Sequence[Any] = ()) -> None:
        """Check that what is staged leads to its version.

        Args:
            reports: what each rank found; see `Weights.verify`.
        """
        self._weights.verify(self._due(), reports)

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
        # In one step: after an interrupt before it `roll_back` undoes what was written, later nothing.
        self.held, self._is_written = staged.plan.target, False
        self.half_applied = False
        self.num_applied += 1
        self.around.forget()
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
        except BaseException:
            # An interrupt may have come between any two writes.
            self.mark_half_applied()
            raise
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
