"""A publisher with a process beside it that adds anchors."""

import time
from collections.abc import Callable
from pathlib import Path

from patchstore import Replica
from patchstore.bucket import history, lineage
from patchstore.stores.base import Store
from tests.support.weights import Run, State, assert_same_bits

EVERY = 4


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until a condition holds, and fail if it does not in time."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended; an ended one that was not waited for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children() -> set[int]:
    """Processes that this one has started."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


def check_beside(store: Store, secrets: tuple[str, ...] = ()) -> None:
    """Publish beside a compactor, and fail unless it adds anchors, keeps secrets and ends."""
    run, others = Run(store), children()
    publisher = run.open(anchor_every=EVERY, compact=True)
    run.publish_versions(10)
    until(lambda: publisher.compaction is not None and publisher.compaction.newest_anchor == 8)
    assert publisher.compaction is not None
    assert (publisher.compaction.num_anchors, publisher.compaction.failure) == (2, None)
    (pid,) = children() - others
    command = Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/environ").read_text()
    assert not [each for each in secrets if each in command]
    run.close()
    assert not is_running(pid)
    assert [each.version for each in history.read_back(store, 9) if each.anchor is not None] == [0]
    plan = lineage.read(store, 9).plan()
    assert plan.anchor is not None and plan.anchor.version == 8
    tensors: State = {}
    Replica(store, tensors).update(9)
    assert_same_bits(tensors, run.history[9])
