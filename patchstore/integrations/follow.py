"""Keep a server at the head of a store: the loop behind `patchstore follow STORE --server URL`.

It remembers nothing that it could not ask again: both it and the server may be restarted at any
moment, so each step begins with what the server says about itself.
"""

import logging
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from patchstore import log
from patchstore.errors import PatchstoreError
from patchstore.integrations.vllm_server import VllmServer
from patchstore.model import Manifest
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step did."""

    did: Literal["initialised", "applied", "resumed", "nothing", "failed"]
    """`resumed`: ended what a killed process had begun. `nothing`: the server is at the head, or the store
    has no version yet."""
    version: int | None = None
    """What the server holds after the step; for `failed`, the version that was tried, if any."""
    error: PatchstoreError | None = None
    """Why it failed."""
    seconds: float = 0.0
    """How long the step took."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each part of an update, as the server's first rank measured them."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values; what does not apply is left out."""
        record: dict[str, Any] = {"event": self.did, "version": self.version, "seconds": self.seconds}
        if self.timings:
            record["timings"] = dict(self.timings)
        if self.error is not None:
            record["error"] = {"kind": self.error.kind, "message": str(self.error)}
        return record

    def __str__(self) -> str:
        match self.did:
            case "initialised":
                held = "no version" if self.version is None else f"version {self.version}"
                return f"initialised the server, which holds {held}"
            case "applied":
                return f"applied version {self.version}"
            case "resumed":
                return f"ended an interrupted switch to version {self.version}"
            case "failed":
                assert self.error is not None
                what = "step" if self.version is None else f"version {self.version}"
                return f"{what} failed: [{self.error.kind}] {self.error}"
            case "nothing":
                return "nothing new"


class Follow:
    """Brings one server to each new head, directly: versions in between are not served."""

    def __init__(
        self,
        store: Store,
        server: VllmServer,
        *,
        storage_options: Mapping[str, Any] | None = None,
        min_interval_s: float = 0.1,
        max_interval_s: float = 2.0,
    ) -> None:
        """Prepare to follow; nothing is read yet.

        Args:
            store: must have the same URL for the server as here.
            storage_options: what the server needs to open the store.
            min_interval_s: wait after a step that changed something; doubled by each that did not.
            max_interval_s: the longest wait, also between attempts that fail.
        """
        self.store = store
        self.server = server
        self._storage_options = storage_options
        self._min_interval_s, self._max_interval_s = min_interval_s, max_interval_s
        self.interval_s = min_interval_s
        """Seconds until the next step is due."""
        self._head: Manifest | None = None

    def step(self) -> Step:
        """Do the one thing that is needed next, and say what it was.

        Returns:
            A failure is returned too: it is tried again in the next step, never skipped.
        """
        began = time.monotonic()
        done = replace(self._try(), seconds=time.monotonic() - began)
        changed = done.did in {"initialised", "applied", "resumed"}
        self.interval_s = self._min_interval_s if changed else min(2 * self.interval_s, self._max_interval_s)
        return done

    def _try(self) -> Step:
        wanted: int | None = None
        try:
            self._head = self._newest()
            status = self.server.status()
            if self._head is None:
                return Step(did="nothing")
            if not status.initialised or status.run_id != self._head.run_id:
                self.server.init_weight_transfer(self.store.url, self._storage_options)
                held = self.server.status().held
                if held is not None:
                    # A server that was started from an anchor does not know the number yet.
                    self.server.set_weight_version(str(held))
                return Step(did="initialised", version=held)
            if status.held == self._head.version and status.switch is None:
                return Step(did="nothing", version=status.held)
            if status.held == self._head.version and status.switch is not None and status.num_engines == 1:
                self.server.end_switch(status.switch)
                return Step(did="resumed", version=status.held)
            # Of several engines the others may hold something else: applying again brings all to one version.
            wanted = self._head.version
            self.server.apply(wanted)
            return Step(did="applied", version=wanted, timings=self.server.status().ranks[0]["timings"])
        except PatchstoreError as exc:
            return Step(did="failed", version=wanted, error=exc)

    def _newest(self) -> Manifest | None:
        if self._head is None:
            return log.head(self.store)
        newest = self._head
        # A version that was seen stays committed, so only the slots after it are asked for.
        while (later := log.following(self.store, newest)) is not None:
            newest = later
        return newest

    def run(self, stop: threading.Event) -> Iterator[Step]:
        """Step until `stop` is set, yielding what was done. A step under way is finished first."""
        while not stop.is_set():
            done = self.step()
            if done.did == "failed":
                logger.info("%s: %s; next try in %.1f s", self.server.url, done, self.interval_s)
            elif done.did != "nothing":
                logger.info("%s: %s", self.server.url, done)
            if done.did != "nothing":
                yield done
            stop.wait(self.interval_s)


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set; a second one ends the process. For the main thread."""
    stop = threading.Event()

    def set_once(number: int, _frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, set_once)
    return stop
