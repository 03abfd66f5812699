"""The process that a publisher starts to add anchors and rollups: `python -m patchstore.ops.compact.beside`.

The first line of its standard input says what to do. It ends when that input ends, or when its parent does: a
process that the trainer forked may hold the other end of the pipe. It says what it did in JSON lines.
"""

import json
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

_LONGEST_S = 600.0
"""From one failure to the next attempt, at most."""
_END_S = 5.0
"""From the end of the parent until this process ends, also in the middle of a request."""


def main() -> None:
    """Add what is due, again and again, until the publisher ends."""
    # Ctrl-C reaches the trainer too, which says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
    told = sys.stdin.readline()
    if not told:
        return
    job = json.loads(told)
    with _ended_with(job["parent"]) as scratch:
        _compact(job, scratch)


def _compact(job: dict[str, Any], scratch: Path) -> None:
    import torch

    from patchstore.errors import PatchstoreError
    from patchstore.follow.backoff import Pauses
    from patchstore.ops.compact.service import Compactor
    from patchstore.stores import open_store

    torch.set_num_threads(1)
    interval_s = job["interval_s"]
    pauses = Pauses(interval_s, interval_s, most_after_failures_s=max(_LONGEST_S, interval_s))
    with closing(open_store(job["url"], **job["options"])) as store:
        compactor = Compactor(
            store, anchor_every=job["anchor_every"], encoding=job["encoding"], scratch=scratch
        )
        while True:
            try:
                for done in compactor.compact():
                    _say(done.to_dict())
                pause_s = pauses.after(is_new=True)
            except PatchstoreError as exc:
                _say({"event": "failed", "kind": exc.kind, "message": str(exc)})
                pause_s = pauses.after(is_new=False, is_failed=True)
            time.sleep(pause_s)


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


@contextmanager
def _ended_with(parent: int) -> Iterator[Path]:
    """Yield a folder for temporary files, and delete it when the parent ends, or this process is told to."""
    with tempfile.TemporaryDirectory(prefix="patchstore-compact-", ignore_cleanup_errors=True) as name:

        def leave(*_: object) -> None:
            # The main thread may have to wait for threads that wait for the store.
            threading.Thread(target=_leave_late, args=(Path(name),), daemon=True).start()
            raise SystemExit(0)

        signal.signal(signal.SIGTERM, leave)
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
        yield Path(name)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], 1.0)[0] and not os.read(sys.stdin.fileno(), 1024):
            break
    os.kill(os.getpid(), signal.SIGTERM)


def _leave_late(scratch: Path) -> None:
    time.sleep(_END_S)
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
