"""Files of an anchor are downloaded several at a time, and all or none of it is used."""

import threading
from pathlib import Path

import pytest

from patchstore.errors import CorruptObject, StoreUnavailable
from patchstore.format import history
from patchstore.read.anchors import FILES_AT_ONCE, open_anchor
from patchstore.read.host_cache import HostCache
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.weights import Run, assert_same_bits, served


class Together(FaultyStore):
    """The first reads of files wait until so many are under way at once."""

    def __init__(self, inner: MemoryStore, num: int) -> None:
        super().__init__(inner)
        self.meeting = threading.Barrier(num)
        self.turns = threading.Semaphore(num)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if key.endswith(".safetensors") and self.turns.acquire(blocking=False):
            self.meeting.wait(30)
        return super().get(key, start, end)


@pytest.fixture
def sharded(run: Run) -> Run:
    """An anchor of several files."""
    run.open(max_shard_bytes=2_000)
    run.publish(0)
    assert num_files(run) > 3
    return run


def num_files(run: Run) -> int:
    anchor = history.read_manifest(run.store, 0).anchor
    assert anchor is not None
    return len(anchor.payloads)


def opened(run: Run, store: MemoryStore, folder: Path) -> dict:
    manifest, header = history.read_manifest(run.store, 0), history.read_header(run.store)
    assert header is not None
    cache = HostCache(folder, max_bytes=0)
    with open_anchor(store, manifest, header.schema.by_name(), cache) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def test_several_are_read_at_the_same_time(sharded: Run, tmp_path: Path) -> None:
    together = Together(sharded.store, min(FILES_AT_ONCE, num_files(sharded)))
    assert_same_bits(opened(sharded, together, tmp_path / "cache"), served(sharded.model))
    assert not together.turns.acquire(blocking=False)


@pytest.mark.parametrize(
    ("effect", "error"),
    [("flip", CorruptObject), ("stale", CorruptObject), ("fail-before", StoreUnavailable)],
)
@pytest.mark.parametrize("number", range(3))
def test_one_wrong_file_fails_all_and_leaves_nothing(
    sharded: Run, tmp_path: Path, effect: str, error: type[Exception], number: int
) -> None:
    anchor = history.read_manifest(sharded.store, 0).anchor
    assert anchor is not None
    fault = Fault(verb="get", key=anchor.payloads[number].key, effect=effect, times=None)
    with pytest.raises(error):
        opened(sharded, FaultyStore(sharded.store, fault), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert_same_bits(opened(sharded, sharded.store, tmp_path / "cache"), served(sharded.model))
