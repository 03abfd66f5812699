"""Keep one server at its desired version: the steps behind `patchstore follow`.

Both this process and the server may be restarted at any moment. So each step begins with the server's status,
and this process keeps no state that it could not read again.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from patchstore.errors import (
    DriverConflict,
    InternalError,
    NotFound,
    PatchstoreError,
    RollbackRefused,
    SchemaMismatch,
    StateMismatch,
    StoreReplaced,
    StoreUnavailable,
    UnsupportedStore,
    UsageError,
    VersionNotFound,
)
from patchstore.format import history, mismatch
from patchstore.format.records import Manifest
from patchstore.serve.desired import HeadWatcher
from patchstore.serve.settings import DEFAULTS
from patchstore.serve.vllm_protocol import ServerStatus
from patchstore.serve.vllm_server import UpdateTimings, VllmServer
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)

Outcome = Literal[
    "initialised",
    "applied",
    "resumed",
    "labelled",
    "verified",
    "diverged",
    "waiting",
    "old-head",
    "new-head",
    "nothing",
    "failed",
]

_OUTDATED = {
    each.kind
    for each in (UsageError, UnsupportedStore, StoreUnavailable, StoreReplaced, NotFound, VersionNotFound)
}
"""Failures of updates that may come from how the server opened the store: its credentials expired, its
endpoint changed, or the store had another run then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The outcome of one step."""

    outcome: Outcome
    """`resumed`: ended an update that a killed process had begun. `labelled`: answers had another version's
    number, which was corrected. `verified`: the weights are those of the version. `diverged`: they are not,
    so the store was opened again, and the next step loads an anchor. `nothing`: the server serves its desired
    version, or must wait, or the store has no version yet. Only polls of the store report `waiting` (it has
    no version yet), `old-head` (its newest version is older than it may be) and `new-head` (no longer)."""
    version: int | None = None
    """What the server serves after the step; for `failed`, the version that was tried, if any."""
    error: PatchstoreError | None = None
    """Why it failed, or how the difference was noticed."""
    seconds: float = 0.0
    """How long the step took."""
    timings: UpdateTimings | None = None
    """How long an update took."""
    before: ServerStatus | None = None
    """The server's status before the step; None if it did not answer."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without fields that do not apply."""
        record: dict[str, Any] = {"event": self.outcome, "version": self.version, "seconds": self.seconds}
        if self.timings is not None:
            record["timings"] = asdict(self.timings)
        if self.error is not None:
            record["error"] = {"kind": self.error.kind, "message": str(self.error)}
        return record

    def __str__(self) -> str:
        version = "no version" if self.version is None else f"version {self.version}"
        if self.outcome == "failed":
            assert self.error is not None
            what = "step" if self.version is None else version
            return f"{what} failed: [{self.error.kind}] {self.error}"
        return {
            "initialised": f"initialised the server, which serves {version}",
            "applied": f"applied {version}",
            "resumed": f"ended an interrupted switch to {version}",
            "labelled": f"corrected the label of answers to {version}",
            "verified": f"verified {version}",
            "diverged": f"opened the store again: [{StateMismatch.kind}] {self.error}",
            "waiting": "holds no version yet; servers wait for the first one",
            "old-head": f"{version} is the newest, and is older than --max-head-age allows: did the trainer "
            "stop, or does the store answer with an old state?",
            "new-head": f"{version} is the newest, and is as new as --max-head-age wants",
            "nothing": "nothing new",
        }[self.outcome]


class Reconciler:
    """Brings one server to its desired version, directly: versions in between are not served."""

    def __init__(
        self,
        store: Store,
        server: VllmServer,
        *,
        desired: Callable[[], Manifest | None] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        update_interval_s: float = DEFAULTS.update_interval_s,
        verify_every_s: float | None = DEFAULTS.verify_every_s,
        min_poll_interval_s: float = DEFAULTS.min_poll_interval_s,
        max_poll_interval_s: float = DEFAULTS.max_poll_interval_s,
        is_signed: bool = False,
        allow_rollback: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare to follow; nothing is read yet.

        Args:
            store: must have the same URL for the server as here.
            desired: returns the desired version. Its owner also requests a step when that changes. By default
                the store's newest, read each time.
            storage_options: what the server needs to open the store.
            update_interval_s: least time between two updates; a server that serves no version does not wait.
            verify_every_s: how often the weights of an idle server are verified; None for never.
            min_poll_interval_s: wait after a step that changed something; doubled by each step that did not,
                or failed.
            max_poll_interval_s: the longest wait, also between attempts that fail.
            is_signed: `desired` returns only versions that a required key has signed. A server that does not
                require a key itself is refused: it reads the store again, and could be given other bytes.
            allow_rollback: whether a server that requires signatures may go to an older version than it
                served; asked before each update.
        """
        self.store = store
        self.server = server
        self._desired = desired or HeadWatcher(store).refresh
        self._is_called = desired is not None
        self._is_signed, self._allow_rollback = is_signed, allow_rollback
        self._storage_options = storage_options
        self._update_interval_s, self._verify_every_s = update_interval_s, verify_every_s
        self._min_poll_interval_s, self._max_poll_interval_s = min_poll_interval_s, max_poll_interval_s
        self.interval_s = min_poll_interval_s
        """Seconds until the next step is due."""
        self._num_failures = 0
        """In a row."""
        self._opened_as: str | None = None
        """The server's name for the store that it opened for this process; a path may be a link there."""
        self._is_fresh = False
        """Whether the server opened the store for this process, and applied nothing since."""
        self._is_outdated = False
        """Whether the server is to open the store again next."""
        self._known: set[int | None] = set()
        """The version at the last status, and versions given since; empty before the first status."""
        self._applied_at: float | None = None
        self._verified_at = time.monotonic()

    def step(self) -> StepResult:
        """Do the one thing that is needed next, and return what it was.

        Returns:
            The outcome. A failure is returned too; the next step tries again and never skips it.
        """
        began = time.monotonic()
        done = replace(self._try(), seconds=time.monotonic() - began)
        self._num_failures = self._num_failures + 1 if done.outcome == "failed" else 0
        if done.outcome == "failed":
            # Bounded before it is multiplied: after a night of failures the number would be too large.
            self._wait_for(self._min_poll_interval_s * 2 ** min(self._num_failures, 20))
        elif self._is_called and done.outcome in {"nothing", "applied", "verified"}:
            # Only the server itself may have something new.
            self._wait_for(self._max_poll_interval_s)
        else:
            self._wait_for(2 * self.interval_s if done.outcome == "nothing" else self._min_poll_interval_s)
        if done.outcome == "nothing" and (left_s := self._throttled_s()) > 0:
            self.interval_s = min(self.interval_s, left_s)
        return done

    def _wait_for(self, seconds: float) -> None:
        self.interval_s = min(seconds, self._max_poll_interval_s)

    def _try(self) -> StepResult:
        wanted: int | None = None
        status: ServerStatus | None = None
        try:
            desired, unknown = self._find_desired()
            is_due = unknown is None and self._throttled_s() <= 0
            status = self.server.status(desired=desired if is_due else None)
            is_whole = status.serving is not None and status.may_answer
            if status.switch is not None and is_whole:
                # Also if the desired version is unknown: the server generates nothing until this is done.
                self.server.end_switch(status.switch)
                return StepResult(outcome="resumed", version=status.serving, before=status)
            if unknown is not None:
                raise unknown
            if desired is None:
                if status.serving is not None and status.store in {self.store.url, self._opened_as}:
                    raise StoreReplaced(
                        f"{self.store.url} has no version, but {self.server.url} serves version "
                        f"{status.serving} of run {status.run_id} from there: its objects were removed. The "
                        "server was left as it is"
                    )
                return StepResult(outcome="nothing", version=status.serving, before=status)
            self._check_keys(status)
            self._check_alone(status, desired)
            if not self._is_open(status, desired):
                return self._initialise(status, desired)
            if status.serving == desired.version:
                return self._keep(status)
            if status.serving is not None and self._throttled_s() > 0:
                return StepResult(outcome="nothing", version=status.serving, before=status)
            wanted = desired.version
            self._check_not_older(status, desired)
            return self._apply(wanted, status)
        except PatchstoreError as exc:
            return StepResult(outcome="failed", version=wanted, error=exc, before=status)
        except Exception as exc:
            logger.exception("%s: a step failed", self.server.url)
            error = InternalError(f"{type(exc).__name__}: {exc}")
            return StepResult(outcome="failed", version=wanted, error=error, before=status)

    def _find_desired(self) -> tuple[Manifest | None, Exception | None]:
        """Return the desired version, or the error because of which it is unknown."""
        try:
            return self._desired(), None
        except Exception as exc:  # noqa: BLE001  (the caller raises it after the server's status)
            return None, exc

    def _check_keys(self, status: ServerStatus) -> None:
        if self._is_signed and not status.required_keys:
            raise UsageError(
                f"{self.server.url} requires no signatures, so it would apply what no key has signed: start "
                "it with PATCHSTORE_REQUIRED_KEYS in its environment, which names files with the public keys"
            )

    def _check_not_older(self, status: ServerStatus, desired: Manifest) -> None:
        """Refuse an older version than the server serves, which a process that follows anew may be offered.

        Raises:
            RollbackRefused: it is older, and keys are required.
        """
        serving = status.serving
        if (
            self._is_signed
            and serving is not None
            and desired.version < serving
            and not self._allow_rollback()
        ):
            raise RollbackRefused(
                f"{self.server.url} serves version {serving}, and version {desired.version} is older: the "
                "store was set back, or something answers with an old state of it. The server was left as it "
                "is. If it is meant, pin that version with --allow-rollback, or start this process with it"
            )

    def _check_alone(self, status: ServerStatus, desired: Manifest) -> None:
        """Report that another process drives this server too, once for each of its changes.

        Raises:
            DriverConflict: the server has another store open, or another version, than it was given here.
        """
        known, self._known = self._known, {status.serving}
        opened = self._opened_as
        if opened is not None and status.initialised and status.store not in {None, opened, self.store.url}:
            self._opened_as = None
            what = f"follows {status.store}, although this process made it follow {self.store.url}"
        elif known and status.serving not in {None, desired.version, *known}:
            what = f"serves version {status.serving}, which this process did not give it"
        else:
            return
        raise DriverConflict(
            f"{self.server.url} {what}: does another `patchstore follow`, or a script, drive this server? "
            "Stop one of them"
        )

    def _is_open(self, status: ServerStatus, desired: Manifest) -> bool:
        """Whether the server has this store open, and no failure suggests to open it again."""
        if not status.initialised or status.run_id != desired.run_id or self._is_outdated:
            return False
        # Ranks on several hosts may have different names for it; the server then reports none.
        return status.store in {None, self.store.url, self._opened_as}

    def _initialise(self, status: ServerStatus, desired: Manifest) -> StepResult:
        # If it cannot, the next step updates as before: the server may know the better way.
        self._is_outdated = False
        try:
            if not self.server.init_weight_transfer(self.store.url, self._storage_options):
                return StepResult(outcome="nothing", version=status.serving, before=status)
        except (SchemaMismatch, NotFound) as exc:
            raise self._explained(exc, self.store.url) from exc
        opened = self.server.status()
        if opened.run_id != desired.run_id:
            raise UsageError(
                f"{self.server.url} finds run {opened.run_id} at {self.store.url}, but this process finds "
                f"run {desired.run_id}: is the URL the same place for both, and was it emptied just now?"
            )
        self._opened_as, self._is_fresh, self._known = opened.store, True, {opened.serving}
        if opened.serving is not None:
            # A server that was started from an anchor does not know the number yet.
            self.server.set_weight_version(str(opened.serving))
        return StepResult(outcome="initialised", version=opened.serving, before=status)

    def _keep(self, status: ServerStatus) -> StepResult:
        label = self.server.weight_version()
        if label is not None and label != str(status.serving):
            self.server.set_weight_version(str(status.serving))
            return StepResult(outcome="labelled", version=status.serving, before=status)
        if self._verify_every_s is None or time.monotonic() - self._verified_at < self._verify_every_s:
            return StepResult(outcome="nothing", version=status.serving, before=status)
        # Imports torch, which takes seconds and memory.
        from patchstore.serve.verify import verify_server

        try:
            verify_server(self.store, self.server)
        except StateMismatch as exc:
            self.server.init_weight_transfer(self.store.url, self._storage_options)
            return StepResult(
                outcome="diverged", version=self.server.status().serving, error=exc, before=status
            )
        finally:
            self._verified_at = time.monotonic()
        return StepResult(outcome="verified", version=status.serving, before=status)

    def _apply(self, wanted: int, status: ServerStatus) -> StepResult:
        # Before the answer, which may be lost.
        self._known.add(wanted)
        try:
            timings = self.server.apply(wanted, status, allow_rollback=self._allow_rollback())
        except PatchstoreError as exc:
            self._is_outdated = exc.kind in _OUTDATED and not self._is_fresh
            if isinstance(exc, SchemaMismatch | NotFound):
                raise self._explained(exc, status.store) from exc
            raise
        if timings is None:
            return StepResult(outcome="nothing", version=status.serving, before=status)
        self._is_fresh = False
        self._applied_at = time.monotonic()
        return StepResult(outcome="applied", version=wanted, timings=timings, before=status)

    def _explained(self, exc: PatchstoreError, opened: str | None) -> PatchstoreError:
        """Add what only this process knows to an error of the server.

        Args:
            opened: the server's name for the store that it has open; None if its ranks differ.
        """
        said = mismatch.brief(str(exc))
        if isinstance(exc, SchemaMismatch):
            header = history.read_header(self.store)
            return SchemaMismatch(said if header is None else mismatch.explain(header.schema, said))
        if opened == self.store.url:
            where = f"this process reads {opened} too: is that the same place on the server's machine?"
        else:
            theirs = opened or "stores that its ranks call differently"
            where = f"the server has {theirs} open, and this process reads {self.store.url}"
        return type(exc)(f"{said}; {where}")

    def _throttled_s(self) -> float:
        """Seconds until another version may be applied."""
        if self._applied_at is None:
            return 0.0
        return self._applied_at + self._update_interval_s - time.monotonic()
