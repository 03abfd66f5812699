"""Keep one server at its desired version: the steps behind `patchstore follow`.

Both this process and the server may be restarted at any moment. So each step begins with the server's status,
and this process keeps no state that it could not read again.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from patchstore.bucket import history, schema_text
from patchstore.bucket.records import Manifest
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
from patchstore.follow.desired import HeadWatcher, NotKnown
from patchstore.follow.server import Server, UpdateTimings
from patchstore.follow.settings import DEFAULTS, Settings
from patchstore.follow.vllm_protocol import ServerStatus
from patchstore.follow.vllm_server import VllmServer
from patchstore.stores.base import Store
from patchstore.support.tracing import Attributes, Stages, in_trace_of

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
        server: Server,
        settings: Settings = DEFAULTS,
        *,
        desired: Callable[[], Manifest | NotKnown | None] | None = None,
        allow_rollback: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare to follow; nothing is read yet. The store must have the same URL for the server as here.

        `desired` returns the desired version; None where the store has none, `NOT_KNOWN` before it was read.
        Its owner also requests a step when that changes. By default it is the store's newest, read each time.
        Where keys are required, it returns only versions that one of them has signed. A server that does not
        require a key itself is then refused: it reads the store again, and could be given other bytes.

        A server that serves no version does not wait for `update_interval_s`. If the user did not name a run,
        a server that has another one from the same place stays as it is.
        """
        self.store = store
        self.server = server
        self._opener = server if isinstance(server, VllmServer) else None
        """The server, if it has one store open, from which all its versions come. An adapter's versions say
        themselves where they come from."""
        self._settings = settings
        self._desired = desired or HeadWatcher(store).refresh
        self._is_called = desired is not None
        self._allow_rollback = allow_rollback
        self.interval_s = settings.min_poll_interval_s
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
        """Do the one thing that is needed next, and return what it was. A failure is returned too; the next
        step tries again and never skips it.
        """
        began = time.monotonic()
        done = replace(self._try(), seconds=time.monotonic() - began)
        self._num_failures = self._num_failures + 1 if done.outcome == "failed" else 0
        if done.outcome == "failed":
            # Bounded before it is multiplied: after a night of failures the number would be too large.
            self._wait_for(self._settings.min_poll_interval_s * 2 ** min(self._num_failures, 20))
        elif self._is_called and done.outcome in {"nothing", "applied", "verified"}:
            # Only the server itself may have something new.
            self._wait_for(self._settings.max_poll_interval_s)
        else:
            self._wait_for(
                2 * self.interval_s if done.outcome == "nothing" else self._settings.min_poll_interval_s
            )
        if done.outcome == "nothing" and (left_s := self._throttled_s()) > 0:
            self.interval_s = min(self.interval_s, left_s)
        return done

    def _wait_for(self, seconds: float) -> None:
        self.interval_s = min(seconds, self._settings.max_poll_interval_s)

    def _try(self) -> StepResult:
        wanted: int | None = None
        status: ServerStatus | None = None
        stages = Stages()
        try:
            desired, unknown = self._find_desired()
            due = desired if isinstance(desired, Manifest) and self._throttled_s() <= 0 else None
            stages.begin("notice")
            status = self.server.status(desired=due)
            stages.end()
            is_whole = status.serving is not None and status.may_answer
            if self._opener is not None and status.switch is not None and is_whole:
                # Also if the desired version is unknown: the server generates nothing until this is done.
                self._opener.end_switch(status.switch)
                return StepResult(outcome="resumed", version=status.serving, before=status)
            if unknown is not None:
                raise unknown
            if not isinstance(desired, Manifest):
                if desired is None:
                    self._check_not_removed(status)
                return StepResult(outcome="nothing", version=status.serving, before=status)
            self._check_keys(status)
            self._check_run(status, desired)
            self._check_alone(status, desired)
            if self._opener is not None and not self._is_open(status, desired):
                return self._initialise(self._opener, status, desired)
            if (status.serving, status.run_id) == (desired.version, desired.run_id):
                return self._keep(status)
            if status.serving is not None and self._throttled_s() > 0:
                return StepResult(outcome="nothing", version=status.serving, before=status)
            wanted = desired.version
            self._check_not_older(status, desired)
            about: Attributes = {"patchstore.server": self.server.url}
            with in_trace_of(desired.run_id, wanted, "update", stages, about):
                return self._apply(wanted, status)
        except PatchstoreError as exc:
            return StepResult(outcome="failed", version=wanted, error=exc, before=status)
        except Exception as exc:
            logger.exception("%s: a step failed", self.server.url)
            error = InternalError(f"{type(exc).__name__}: {exc}")
            return StepResult(outcome="failed", version=wanted, error=error, before=status)

    def _find_desired(self) -> tuple[Manifest | NotKnown | None, Exception | None]:
        """Return the desired version, or the error because of which it is unknown."""
        try:
            return self._desired(), None
        except Exception as exc:  # noqa: BLE001  (the caller raises it after the server's status)
            return NotKnown.NOT_KNOWN, exc

    def _check_not_removed(self, status: ServerStatus) -> None:
        """Report that the store has no version any more, although the server has one from there."""
        if status.serving is not None and status.store in {self.store.url, self._opened_as}:
            raise StoreReplaced(
                f"{self.store.url} has no version, but {self.server.url} serves version {status.serving} of "
                f"run {status.run_id} from there: its objects were removed. The server was left as it is"
            )

    def _check_run(self, status: ServerStatus, desired: Manifest) -> None:
        """Check that the store has the run that the server had from there before this process began."""
        # An adapter of another run may be from anywhere: `apply` refuses to replace it.
        is_known = self._opener is None or self._opened_as is not None
        serves = None if status.serving is None or is_known else status.run_id
        if serves is not None and status.store == self.store.url and self._settings.run_id != desired.run_id:
            history.check_run(
                self.store,
                desired,
                serves,
                f"{self.server.url} serves version {status.serving} of the run before and was left as it is; "
                f"put the objects back, or start this process with --run {desired.run_id}",
            )

    def _check_keys(self, status: ServerStatus) -> None:
        # An adapter's version is known by the manifest whose signature was checked here.
        if self._settings.required_keys is not None and self._opener is not None and not status.required_keys:
            raise UsageError(
                f"{self.server.url} requires no signatures, so it would apply what no key has signed: start "
                "it with PATCHSTORE_REQUIRED_KEYS in its environment, which names files with the public keys"
            )

    def _check_not_older(self, status: ServerStatus, desired: Manifest) -> None:
        """Refuse an older version than the server serves, as may be offered to a process that just began."""
        serving = status.serving
        if (
            self._settings.required_keys is not None
            and serving is not None
            and status.run_id == desired.run_id
            and desired.version < serving
            and not self._allow_rollback()
        ):
            raise RollbackRefused(
                f"{self.server.url} serves version {serving}, and version {desired.version} is older: the "
                "store was set back, or something answers with an old state of it. The server was left as it "
                "is. If it is meant, pin that version with --allow-rollback, or start this process with it"
            )

    def _check_alone(self, status: ServerStatus, desired: Manifest) -> None:
        """Report that another process drives this server too: as long as it wants another version; or, once
        for each change, where the server has another store open, or another version, than it was given here.
        """
        wants = self.server.wants
        for other in status.drivers:
            if wants is not None and other["wants"] != wants:
                raise DriverConflict(
                    f"another driver wants {self.server.url} to serve {other['wants']}, and this one wants "
                    f"{wants}. The server was left as it is: stop one of them. A driver that was killed is "
                    "forgotten after some seconds"
                )
        known, self._known = self._known, {status.serving}
        opened = self._opened_as
        if opened is not None and status.initialised and status.store not in {None, opened, self.store.url}:
            self._opened_as = None
            what = f"follows {status.store}, although this process made it follow {self.store.url}"
        elif known and not status.drivers and status.serving not in {None, desired.version, *known}:
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

    def _initialise(self, server: VllmServer, status: ServerStatus, desired: Manifest) -> StepResult:
        # If it cannot, the next step updates as before: the server may know the better way.
        self._is_outdated = False
        try:
            if not server.init_weight_transfer(self.store.url, self._settings.storage_options):
                return StepResult(outcome="nothing", version=status.serving, before=status)
        except (SchemaMismatch, NotFound) as exc:
            raise self._explained(exc, self.store.url) from exc
        opened = server.status()
        if opened.run_id != desired.run_id:
            raise UsageError(
                f"{self.server.url} finds run {opened.run_id} at {self.store.url}, but this process finds "
                f"run {desired.run_id}: is the URL the same place for both, and was it emptied just now?"
            )
        self._opened_as, self._is_fresh, self._known = opened.store, True, {opened.serving}
        return StepResult(outcome="initialised", version=opened.serving, before=status)

    def _keep(self, status: ServerStatus) -> StepResult:
        if self.server.keep(status):
            return StepResult(outcome="labelled", version=status.serving, before=status)
        every_s = self._settings.verify_every_s
        if every_s is None or time.monotonic() - self._verified_at < every_s:
            return StepResult(outcome="nothing", version=status.serving, before=status)
        try:
            self.server.verify(self.store)
        except StateMismatch as exc:
            if self._opener is None:
                raise
            self._opener.init_weight_transfer(self.store.url, self._settings.storage_options)
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
        """Add what only this process knows to an error of the server, which calls its store `opened`; None if
        its ranks differ.
        """
        said = schema_text.brief(str(exc))
        if isinstance(exc, SchemaMismatch):
            header = history.read_header(self.store)
            # PEFT's names are those of a wrapped model.
            if header is None or header.adapter is not None:
                return SchemaMismatch(said)
            return SchemaMismatch(schema_text.explain(header.schema, said))
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
        return self._applied_at + self._settings.update_interval_s - time.monotonic()
