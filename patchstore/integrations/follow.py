"""Keep one server at the version that it should hold: the steps behind `patchstore follow`.

They remember nothing that they could not ask again: both this process and the server may be restarted at
any moment, so each step begins with what the server says about itself.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from patchstore import log, mismatch
from patchstore.errors import (
    DriverConflict,
    NotFound,
    PatchstoreError,
    SchemaMismatch,
    StateMismatch,
    StoreReplaced,
    StoreUnavailable,
    UnsupportedStore,
    UsageError,
    VersionNotFound,
)
from patchstore.integrations.goal import Newest
from patchstore.integrations.vllm_server import ServerStatus, Switched, VllmServer
from patchstore.model import Manifest
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)

Did = Literal[
    "initialised", "applied", "resumed", "labelled", "proved", "diverged", "waiting", "nothing", "failed"
]


_OUTDATED = {
    each.kind
    for each in (UsageError, UnsupportedStore, StoreUnavailable, StoreReplaced, NotFound, VersionNotFound)
}
"""Failures of updates that may come from how the server opened the store: with credentials that are not valid
any more, at an endpoint that is another now, or when another run was in it."""


class UnexpectedError(PatchstoreError):
    """A step failed in a way that nobody foresaw; the log has where."""

    kind = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step did."""

    did: Did
    """`resumed`: ended what a killed process had begun. `labelled`: answers had another version's number,
    which was corrected. `proved`: the weights are those of the version.
    `diverged`: they are not, so the store was opened again, and the next step loads an anchor. `waiting`: the
    store has no version yet, which only a look at the store says. `nothing`: the server holds what it should,
    or must wait, or the store has no version yet."""
    version: int | None = None
    """What the server holds after the step; for `failed`, the version that was tried, if any."""
    error: PatchstoreError | None = None
    """Why it failed, or what showed that it diverged."""
    seconds: float = 0.0
    """How long the step took."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each part of an update, as the server's first rank measured them."""
    before: ServerStatus | None = None
    """What the server said before the step; None where it did not answer."""
    switched: Switched | None = None
    """How long an update took, seen from here."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values; what does not apply is left out."""
        record: dict[str, Any] = {"event": self.did, "version": self.version, "seconds": self.seconds}
        if self.timings:
            record["timings"] = dict(self.timings)
        if self.error is not None:
            record["error"] = {"kind": self.error.kind, "message": str(self.error)}
        return record

    def __str__(self) -> str:
        held = "no version" if self.version is None else f"version {self.version}"
        if self.did == "failed":
            assert self.error is not None
            what = "step" if self.version is None else held
            return f"{what} failed: [{self.error.kind}] {self.error}"
        return {
            "initialised": f"initialised the server, which holds {held}",
            "applied": f"applied {held}",
            "resumed": f"ended an interrupted switch to {held}",
            "labelled": f"corrected the label of answers to {held}",
            "proved": f"proved {held}",
            "diverged": f"opened the store again: [{StateMismatch.kind}] {self.error}",
            "waiting": "holds no version yet; servers wait for the first one",
            "nothing": "nothing new",
        }[self.did]


class Follow:
    """Brings one server to each new goal, directly: versions in between are not served."""

    def __init__(
        self,
        store: Store,
        server: VllmServer,
        *,
        goal: Callable[[], Manifest | None] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        commit_interval_s: float = 0.0,
        prove_every_s: float | None = None,
        min_interval_s: float = 0.1,
        max_interval_s: float = 2.0,
    ) -> None:
        """Prepare to follow; nothing is read yet.

        Args:
            store: must have the same URL for the server as here.
            goal: returns the version that the server should hold, for whoever also calls for a step when
                that changes; by default the store's newest, read each time.
            storage_options: what the server needs to open the store.
            commit_interval_s: least time between two versions; a server that holds none does not wait.
            prove_every_s: how often the weights of an idle server are proved; None for never.
            min_interval_s: wait after a step that changed something; doubled by each that did not, or failed.
            max_interval_s: the longest wait, also between attempts that fail.
        """
        self.store = store
        self.server = server
        self._goal = goal or Newest(store).look
        self._is_called = goal is not None
        self._storage_options = storage_options
        self._commit_interval_s, self._prove_every_s = commit_interval_s, prove_every_s
        self._min_interval_s, self._max_interval_s = min_interval_s, max_interval_s
        self.interval_s = min_interval_s
        """Seconds until the next step is due."""
        self._num_failures = 0
        """In a row."""
        self._opened_as: str | None = None
        """What the server calls the store that it was told to open; a path may be a link there."""
        self._is_fresh = False
        """Whether the server opened the store when it was told so here, and applied nothing since."""
        self._is_outdated = False
        """Whether the server is to open the store again next."""
        self._known: set[int | None] = set()
        """What the server held at the last look, and was given since; empty before the first look."""
        self._committed: float | None = None
        self._proved = time.monotonic()

    def step(self) -> Step:
        """Do the one thing that is needed next, and say what it was.

        Returns:
            A failure is returned too: it is tried again in the next step, never skipped.
        """
        began = time.monotonic()
        done = replace(self._try(), seconds=time.monotonic() - began)
        self._num_failures = self._num_failures + 1 if done.did == "failed" else 0
        if done.did == "failed":
            # Bounded before it is multiplied, as a night of failures would be too large a number.
            self._wait_for(self._min_interval_s * 2 ** min(self._num_failures, 20))
        elif self._is_called and done.did in {"nothing", "applied", "proved"}:
            # Only the server itself may have something new.
            self._wait_for(self._max_interval_s)
        else:
            self._wait_for(2 * self.interval_s if done.did == "nothing" else self._min_interval_s)
        if done.did == "nothing" and (left_s := self._throttled_s()) > 0:
            self.interval_s = min(self.interval_s, left_s)
        return done

    def _wait_for(self, seconds: float) -> None:
        self.interval_s = min(seconds, self._max_interval_s)

    def _try(self) -> Step:
        wanted: int | None = None
        status: ServerStatus | None = None
        try:
            status = self.server.status()
            is_whole = status.held is not None and not (status.torn or status.engines_differ)
            if status.switch is not None and is_whole:
                # Whatever it should hold, and also while nobody can tell: it serves nothing until then.
                self.server.end_switch(status.switch)
                return Step(did="resumed", version=status.held, before=status)
            goal = self._goal()
            if goal is None:
                if status.held is not None and status.store in {self.store.url, self._opened_as}:
                    raise StoreReplaced(
                        f"{self.store.url} has no version, but {self.server.url} serves version "
                        f"{status.held} of run {status.run_id} from there: its objects were removed. The "
                        "server was left as it is"
                    )
                return Step(did="nothing", version=status.held, before=status)
            self._check_alone(status, goal)
            if not self._is_open(status, goal):
                return self._initialise(status, goal)
            if status.held == goal.version:
                return self._keep(status)
            if status.held is not None and self._throttled_s() > 0:
                return Step(did="nothing", version=status.held, before=status)
            wanted = goal.version
            return self._apply(wanted, status)
        except PatchstoreError as exc:
            return Step(did="failed", version=wanted, error=exc, before=status)
        except Exception as exc:
            logger.exception("%s: a step failed", self.server.url)
            error = UnexpectedError(f"{type(exc).__name__}: {exc}")
            return Step(did="failed", version=wanted, error=error, before=status)

    def _check_alone(self, status: ServerStatus, goal: Manifest) -> None:
        """Notice that something else drives this server too, once for each of its changes.

        Raises:
            DriverConflict: the server has another store open, or another version, than it was given here.
        """
        known, self._known = self._known, {status.held}
        opened = self._opened_as
        if opened is not None and status.initialised and status.store not in {None, opened, self.store.url}:
            self._opened_as = None
            what = f"follows {status.store}, though it was told to follow {self.store.url}"
        elif known and status.held not in {None, goal.version, *known}:
            what = f"serves version {status.held}, which it was not given here"
        else:
            return
        raise DriverConflict(
            f"{self.server.url} {what}: is another `patchstore follow`, or a script, at work on this server? "
            "Stop one of them"
        )

    def _is_open(self, status: ServerStatus, goal: Manifest) -> bool:
        """Whether the server has this store open, in a way that nothing speaks against."""
        if not status.initialised or status.run_id != goal.run_id or self._is_outdated:
            return False
        # Ranks of several hosts may each call it otherwise; the server then names none.
        return status.store in {None, self.store.url, self._opened_as}

    def _initialise(self, status: ServerStatus, goal: Manifest) -> Step:
        # If it cannot, the next step updates as before: the server may know the better way.
        self._is_outdated = False
        try:
            self.server.init_weight_transfer(self.store.url, self._storage_options)
        except (SchemaMismatch, NotFound) as exc:
            raise self._explained(exc, self.store.url) from exc
        opened = self.server.status()
        if opened.run_id != goal.run_id:
            raise UsageError(
                f"{self.server.url} finds run {opened.run_id} at {self.store.url}, but here it holds run "
                f"{goal.run_id}: is that the same place for both, and was it emptied just now?"
            )
        self._opened_as, self._is_fresh, self._known = opened.store, True, {opened.held}
        if opened.held is not None:
            # A server that was started from an anchor does not know the number yet.
            self.server.set_weight_version(str(opened.held))
        return Step(did="initialised", version=opened.held, before=status)

    def _keep(self, status: ServerStatus) -> Step:
        label = self.server.weight_version()
        if label is not None and label != str(status.held):
            self.server.set_weight_version(str(status.held))
            return Step(did="labelled", version=status.held, before=status)
        if self._prove_every_s is None or time.monotonic() - self._proved < self._prove_every_s:
            return Step(did="nothing", version=status.held, before=status)
        # Imports torch, which takes seconds and memory.
        from patchstore.integrations.proof import prove

        try:
            prove(self.store, self.server)
        except StateMismatch as exc:
            self.server.init_weight_transfer(self.store.url, self._storage_options)
            return Step(did="diverged", version=self.server.status().held, error=exc, before=status)
        finally:
            self._proved = time.monotonic()
        return Step(did="proved", version=status.held, before=status)

    def _apply(self, wanted: int, status: ServerStatus) -> Step:
        # Before it is known to have succeeded, as the answer may be lost.
        self._known.add(wanted)
        try:
            switched = self.server.apply(wanted)
        except PatchstoreError as exc:
            self._is_outdated = exc.kind in _OUTDATED and not self._is_fresh
            if isinstance(exc, SchemaMismatch | NotFound):
                raise self._explained(exc, status.store) from exc
            raise
        if switched is None:
            return Step(did="nothing", version=status.held, before=status)
        self._is_fresh = False
        self._committed = time.monotonic()
        timings = self.server.status().ranks[0]["timings"]
        return Step(did="applied", version=wanted, timings=timings, before=status, switched=switched)

    def _explained(self, exc: PatchstoreError, opened: str | None) -> PatchstoreError:
        """Add to what the server refuses what only this process knows of it.

        Args:
            opened: the store that the server has open, as it calls it; None where its ranks differ.
        """
        said = mismatch.brief(str(exc))
        if isinstance(exc, SchemaMismatch):
            header = log.read_header(self.store)
            return SchemaMismatch(said if header is None else mismatch.explain(header.schema, said))
        if opened == self.store.url:
            where = f"this process reads {opened} too: is that the same place on the server's machine?"
        else:
            theirs = opened or "stores that its ranks call differently"
            where = f"the server has {theirs} open, and this process reads {self.store.url}"
        return type(exc)(f"{said}; {where}")

    def _throttled_s(self) -> float:
        """Seconds until another version may be written."""
        if self._committed is None:
            return 0.0
        return self._committed + self._commit_interval_s - time.monotonic()
