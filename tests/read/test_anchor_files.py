"""Files of an anchor are downloaded several at a time, and all or none of it is used."""

import gc
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from patchstore.bucket import history
from patchstore.bucket.records import Manifest
from patchstore.errors import CorruptObject, HostError, StoreUnavailable
from patchstore.read import deltas, download
from patchstore.read.anchors import FILES_AT_ONCE, open_anchor
from patchstore.read.deltas import open_deltas
from patchstore.read.download import OwnMemory
from patchstore.read.host_cache import HostCache
from patchstore.stores.base import Store
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.support import host
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.copies import before
from tests.support.weights import Run, assert_same_bits, served


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


def opened(run: Run, store: Store, folder: Path) -> dict:
    manifest, header = history.read_manifest(run.store, 0), history.run_header(run.store)
    cache = HostCache(folder, max_bytes=0)
    with open_anchor(store, manifest, header.schema.by_name(), cache) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def test_several_are_read_at_the_same_time(sharded: Run, tmp_path: Path) -> None:
    num = min(FILES_AT_ONCE, num_files(sharded))
    meeting = threading.Barrier(num)
    # Raises unless so many are under way at once.
    together = before(sharded.store, "get", "*.safetensors", lambda: meeting.wait(30), times=num)
    assert_same_bits(opened(sharded, together, tmp_path / "cache"), served(sharded.model))


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


# Deltas of a store on this host are read into memory: checked like any other, and in no file.


class Room:
    """Host memory that is counted."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, num_bytes: int) -> torch.Tensor:
        self.sizes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)


@pytest.fixture
def room() -> Room:
    return Room()


Published = tuple[FolderStore, tuple[Manifest, ...]]


@pytest.fixture
def published(tmp_path: Path) -> Published:
    """A folder, and two deltas."""
    run = Run(FolderStore(tmp_path / "bucket"))
    run.open(encoding="gap")
    run.publish_versions(3)
    run.close()
    return FolderStore(tmp_path / "bucket"), tuple(history.read_manifest(run.store, each) for each in (1, 2))


def patches(
    store: FolderStore | MemoryStore,
    manifests: tuple[Manifest, ...],
    cache: HostCache,
    room: Callable[[int], torch.Tensor] | None,
) -> dict[str, tuple[list[int], list[float]]]:
    header = history.run_header(store)
    specs = header.schema.by_name()
    with open_deltas(store, manifests, header.schema, None, cache, None, room) as found:
        merged = {name: found.merged(specs[name], None) for name in found.names}
        return {
            name: (patch.indices.tolist(), patch.values.view(torch.uint8).tolist())
            for name, patch in merged.items()
        }


def test_they_are_the_same_and_in_no_file(published: Published, room: Room, tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "cache")
    found = patches(*published, cache, room)
    assert list((tmp_path / "cache").iterdir()) == []
    # At once for both, with a byte more for each, so that a longer object is noticed.
    (size,) = room.sizes
    assert 0 < size - sum(each.delta.num_bytes for each in published[1] if each.delta) <= 2 * 64
    assert found == patches(*published, cache, None)
    assert found
    assert len(list((tmp_path / "cache").iterdir())) > 0


def test_where_the_store_is_elsewhere_or_they_are_large_they_are_kept_in_files(
    published: Published, room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, manifests = published
    cache, elsewhere = HostCache(tmp_path / "cache"), MemoryStore()
    for key in store.list():
        elsewhere.put(key, store.get(key))
    assert patches(elsewhere, manifests, cache, room) == patches(store, manifests, cache, None)
    assert room.sizes == []
    size = OwnMemory.size_of(payload for each in manifests if each.delta for payload in each.delta.payloads)
    monkeypatch.setattr(deltas, "OWN_BYTES", size - 1)
    patches(store, manifests, cache, room)
    assert room.sizes == []
    monkeypatch.setattr(deltas, "OWN_BYTES", size)
    patches(store, manifests, cache, room)
    assert len(room.sizes) == 1


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-1], "should have"),
        (lambda data: data + b"x", "should have"),
        (lambda data: data + bytes(10_000), "should have"),
        (lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:], "should have digest"),
        (lambda data: b"", "should have"),
        (None, "is missing"),
    ],
    ids=["shorter", "longer", "much longer", "flipped", "empty", "missing"],
)
def test_damage_is_noticed(
    published: Published, room: Room, tmp_path: Path, damage: Callable[[bytes], bytes] | None, said: str
) -> None:
    store, manifests = published
    assert manifests[1].delta is not None
    key = manifests[1].delta.payloads[0].key
    if damage is None:
        store.delete(key)
    else:
        store.put(key, damage(store.get(key)))
    with pytest.raises(CorruptObject, match=said):
        patches(store, manifests, HostCache(tmp_path / "cache"), room)


def test_memory_that_is_short_is_told(published: Published, tmp_path: Path) -> None:
    def all_of_it(num_bytes: int) -> torch.Tensor:
        return torch.empty(1 << 55, dtype=torch.uint8)

    with pytest.raises(HostError, match=r"holding [\d,]+ bytes of deltas in memory.*free some"):
        patches(*published, HostCache(tmp_path / "cache"), all_of_it)


def test_memory_is_free_as_soon_as_nothing_of_it_is_used(published: Published, tmp_path: Path) -> None:
    made: list[weakref.ref[np.ndarray]] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        memory = np.empty(num_bytes, dtype=np.uint8)
        made.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    store, manifests = published
    header = history.run_header(store)
    specs = header.schema.by_name()
    with open_deltas(
        store, manifests, header.schema, None, HostCache(tmp_path / "cache"), None, allocate
    ) as found:
        merged = [found.merged(specs[name], None) for name in sorted(found.names)]
        # As a server does, which keeps the context until what is staged is dropped.
        del found
        gc.collect()
        assert all(patch.indices.numel() for patch in merged)
        del merged
        gc.collect()
        assert made
        assert [each() for each in made] == [None]


# Space for a download: reserved on a disk, and only looked for in memory.

SHM = Path("/dev/shm")


def test_a_file_on_a_disk_has_its_space_from_the_start(tmp_path: Path) -> None:
    with (tmp_path / "file").open("xb") as file:
        if host.file_system_number(file.fileno()) == host.TMPFS:
            pytest.skip("temporary files are in memory here")
        download.reserve(file.fileno(), 1 << 20)
        assert Path(file.name).stat().st_size == 1 << 20
    with (tmp_path / "other").open("xb") as file, pytest.raises(OSError, match=r"No space left|too large"):
        download.reserve(file.fileno(), 1 << 60)


@pytest.mark.skipif(not SHM.is_dir(), reason="needs a file system in memory")
def test_a_file_in_memory_takes_none_before_it_is_written() -> None:
    with tempfile.NamedTemporaryFile(dir=SHM) as file:
        if host.file_system_number(file.fileno()) != host.TMPFS:
            pytest.skip("/dev/shm is no tmpfs here")
        download.reserve(file.fileno(), 1 << 20)
        assert Path(file.name).stat().st_blocks == 0
        with pytest.raises(OSError, match="No space left"):
            download.reserve(file.fileno(), 1 << 60)
