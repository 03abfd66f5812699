"""A publisher with a process beside it that adds anchors."""

import time
from collections.abc import Callable
from pathlib import Path

from patchstore import Replica
from patchstore.format import history, lineage
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
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def check_beside(store: Store, secrets: tuple[str, ...] = ()) -> None:
    """Publish beside a compactor, and fail unless it adds anchors, keeps secrets and ends."""
    run = Run(store)
    publisher = run.open(anchor_every=EVERY, compact=True)
    run.publish_versions(10)
    until(lambda: publisher.compaction is not None and publisher.compaction.newest_anchor == 8)
    assert publisher.compaction is not None
    assert (publisher.compaction.num_anchors, publisher.compaction.failure) == (2, None)
    compactor = publisher._compactor
    assert compactor is not None and compactor._process is not None
    pid = compactor._process.pid
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
