"""A process beside the trainer that adds anchors and rollups, so that no publication waits for an anchor.

It runs `patchstore.ops.compact.beside` on the publisher's host, and reads what it needs from the store. It
ends with the publisher, also if the trainer is killed. What goes wrong there is a warning here, never an
error.
"""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from patchstore.bucket.lineage import Every
from patchstore.errors import UsageError
from patchstore.stores import opened_elsewhere
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)

INTERVAL_S = 30.0
"""From one look at the store to the next."""
AGAIN_S = 60.0
"""Until a process that ended is started again; twice as long each time, up to an hour."""
_LONGEST_S = 3600.0
_END_S = 10.0
"""Time to end, in which the process deletes its temporary files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """What the process beside a publisher has done so far."""

    num_anchors: int = 0
    num_rollups: int = 0
    newest_anchor: int | None = None
    """The newest version to which it added an anchor."""
    num_failures: int = 0
    failure: str | None = None
    """The last failure; None again once anything is added."""


def job_of(store: Store, every: Every) -> dict[str, Any]:
    """Return what the process is told. Contains secrets: it goes through a pipe."""
    url, options = opened_elsewhere(store)
    job = {"url": url, "options": dict(options), "anchor_every": every}
    try:
        json.dumps(job)
    except (TypeError, ValueError) as exc:
        raise UsageError(
            f"{url}: another process cannot be told the store's options ({exc}): give values that JSON has, "
            "or leave compact=False, and run `patchstore compact --follow`"
        ) from exc
    return job


class CompactorProcess:
    """Runs the process, and starts it again if it ends. From `start` to `stop`."""

    def __init__(self, job: Mapping[str, Any], encoding: str) -> None:
        """`encoding` is that of rollups; no process runs yet."""
        self._job = {**job, "encoding": encoding, "interval_s": INTERVAL_S, "parent": os.getpid()}
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._done = Compaction()
        self._thread = threading.Thread(target=self._run, name="patchstore-compact", daemon=True)

    @property
    def done(self) -> Compaction:
        return self._done

    def start(self) -> None:
        """Begin. Nothing is raised: a process that does not start is reported, and tried again."""
        try:
            self._thread.start()
        except RuntimeError as exc:
            self._failed(f"no thread for it could be started: {exc}")

    def stop(self) -> None:
        """End the process; what it has under way is dropped, and the next one does it."""
        self._stopping.set()
        with self._lock:
            process = self._process
        if process is not None:
            assert process.stdin is not None
            # A process that the trainer forked may hold the other end of its standard input.
            with suppress(OSError):
                process.stdin.close()
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def _run(self) -> None:
        pause_s = AGAIN_S
        while not self._stopping.is_set():
            before = self._done.num_anchors + self._done.num_rollups
            ended = self._run_once()
            if self._stopping.is_set():
                return
            if self._done.num_anchors + self._done.num_rollups > before:
                pause_s = AGAIN_S
            self._failed(f"it {ended}; it is started again in {pause_s:.0f} s")
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)

    def _run_once(self) -> str:
        """Start a process, take note of what it says until it ends, and return how it ended."""
        root = str(Path(__file__).parents[2])
        paths = [root, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            # The trainer's GPUs are not for it.
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        try:
            with self._lock:
                if self._stopping.is_set():
                    return "was not started"
                self._process = process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "patchstore.ops.compact.beside"],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
        except OSError as exc:
            return f"could not be started: {exc}"
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):
            process.stdin.write(json.dumps(self._job) + "\n")
            process.stdin.flush()
        with process.stdout:
            for line in process.stdout:
                self._hear(line)
        return f"ended with status {process.wait()}"

    def _hear(self, line: str) -> None:
        try:
            said = json.loads(line)
            if said["event"] == "failed":
                self._failed(f"{said['kind']}: {said['message']}")
                return
            anchors = [each["version"] for each in said["added"] if each["parent"] is None]
            num_rollups = len(said["added"]) - len(anchors)
        except (ValueError, LookupError, TypeError):
            # A library printed something.
            logger.info("the process that adds anchors said: %s", line.rstrip()[:500])
            return
        done = self._done
        self._done = replace(
            done,
            num_anchors=done.num_anchors + len(anchors),
            num_rollups=done.num_rollups + num_rollups,
            newest_anchor=max([*anchors, done.newest_anchor or 0]) if anchors else done.newest_anchor,
            failure=None,
        )
        logger.info(
            "versions %d to %d: %d anchors and %d rollups added, %.1f s",
            *(said["first"], said["last"], len(anchors), num_rollups, said["seconds"]),
        )

    def _failed(self, what: str) -> None:
        self._done = replace(self._done, num_failures=self._done.num_failures + 1, failure=what)
        logger.warning("the process that adds anchors beside the publisher: %s. Publications go on", what)
