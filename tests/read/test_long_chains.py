"""Readers of long chains have few files open, and a host that is short of something is named as that."""

import multiprocessing
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchstore import Publisher, Replica, replay, verify
from patchstore.bucket import history
from patchstore.bucket.records import Manifest, TensorSpec
from patchstore.codec.context import Tiles, Tiling
from patchstore.errors import CorruptObject, HostError, PatchstoreError
from patchstore.read.anchors import open_anchor
from patchstore.read.deltas import open_deltas
from patchstore.read.host_cache import HostCache
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits
from tests.support.model_bits import Bits, bits_of
from tests.support.weights import State, loaded

NUM_DELTAS = 610
MAX_FILES = 64
WORKERS = multiprocessing.get_context("forkserver")
WORKERS.set_forkserver_preload([__name__])


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Chain:
    """A bucket with an anchor and a delta for each version after it, and the weights at both ends."""

    def __init__(self, folder: Path, encoding: str) -> None:
        self.folder, self.encoding = folder, encoding
        store = MemoryStore()
        model = {"a": torch.randn(16, 24), "b": torch.randn(30)}
        with Publisher(store, model, encoding=encoding, anchor_every=10**6) as publisher:
            for step in range(NUM_DELTAS + 1):
                publisher.publish_patch(step)
                self.last = bits_of(model)
                model["a"][step % 16, step % 5 :: 7] *= -1.5 if step % 40 < 20 else 0.7
                model["b"][step % 30] += 1
        # Without the waiting for a disk of 1,200 puts to a folder.
        for key in store.list():
            path = folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.get(key))


@pytest.fixture(scope="module", params=["raw", "gap", "context"])
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    torch.manual_seed(0)
    return Chain(tmp_path_factory.mktemp("chain"), request.param)


def in_a_process(task: Callable[..., Any], *args: Any, limit: tuple[int, int] | None = None) -> Any:
    """What a task returns in a process with a limit, by default of open files, or raises there."""
    receiver, sender = WORKERS.Pipe(duplex=False)
    limit = limit or (resource.RLIMIT_NOFILE, MAX_FILES)
    process = WORKERS.Process(target=_limited, args=(sender, limit, task, *args))
    process.start()
    sender.close()
    found = receiver.recv()
    process.join()
    if isinstance(found, BaseException):
        raise found
    return found


def _limited(sender: Any, limit: tuple[int, int], task: Callable[..., Any], *args: Any) -> None:
    resource.setrlimit(limit[0], (limit[1], resource.getrlimit(limit[0])[1]))
    try:
        found = task(*args)
    except Exception as exc:  # noqa: BLE001 - the test's process raises it
        found = exc
    sender.send(found)


def _followed(bucket: Path, cache: Path | None) -> tuple[Bits, int, int]:
    """Follow from the first version to the last; return its bits, and descriptors before and after."""
    store = FolderStore(bucket)
    follower = Replica(store, {}, cache=None if cache is None else HostCache(cache))
    follower.update(0)
    before = num_open()
    follower.update()
    assert follower.held == NUM_DELTAS
    return bits_of(dict(follower.tensors), None), before, num_open()


@pytest.mark.sample(1)
@pytest.mark.parametrize("has_cache", [False, True])
def test_a_follower_catches_up_over_more_deltas_than_it_may_have_files_open(
    chain: Chain, tmp_path: Path, has_cache: bool
) -> None:
    found, before, after = in_a_process(_followed, chain.folder, tmp_path / "cache" if has_cache else None)
    assert found == chain.last
    assert before == after


@pytest.mark.exhaustive
def test_replaying_and_verifying_a_long_chain_have_few_files_open(chain: Chain, tmp_path: Path) -> None:
    in_a_process(_rebuilt, chain.folder, tmp_path)
    assert bits_of(loaded(tmp_path / "out"), None) == chain.last


def _rebuilt(bucket: Path, tmp_path: Path) -> None:
    store = FolderStore(bucket)
    verify(store)
    replay(store, out=tmp_path / "out")


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_partial", [False, True])
def test_a_server_stages_a_long_chain_with_few_files_open(
    chain: Chain, tmp_path: Path, is_partial: bool
) -> None:
    assert in_a_process(_staged, chain.folder, tmp_path / "cache", is_partial) == chain.last


def _every_tile(spec: TensorSpec, tiling: Tiling) -> Tiles:
    return None


def _staged(bucket: Path, cache: Path, is_partial: bool) -> Bits:
    """What `vllm_plugin.live.update` does: map the anchor, and keep all of it in use with all deltas."""
    store = FolderStore(bucket)
    header = history.run_header(store)
    schema = header.schema.by_name()
    manifests = [history.read_manifest(store, version) for version in range(NUM_DELTAS + 1)]
    kept = HostCache(cache)
    needs = _every_tile if is_partial else None
    with (
        open_anchor(store, manifests[0], schema, kept) as tensors,
        open_deltas(store, tuple(manifests[1:]), header.schema, None, kept, needs) as deltas,
    ):
        assert num_open() < MAX_FILES // 2
        for name in deltas.names:
            patch = deltas.merged(schema[name], tensors[name])
            bits(tensors[name])[patch.indices] = bits(patch.values)
        return bits_of(dict(tensors), None)


@pytest.mark.exhaustive
def test_two_followers_of_a_host_share_a_long_chain(chain: Chain, tmp_path: Path) -> None:
    """What one has in use, however much, the other finds, and does not remove."""
    store, cache = FolderStore(chain.folder), tmp_path / "cache"
    header = history.run_header(store)
    manifests = tuple(history.read_manifest(store, version) for version in range(1, NUM_DELTAS + 1))
    with open_deltas(store, manifests, header.schema, None, HostCache(cache, max_bytes=0)):
        num_files = sum(len(path.name) == 64 for path in cache.iterdir())
        assert num_files == len({each.digest for m in manifests if m.delta for each in m.delta.payloads})
        assert in_a_process(_followed, chain.folder, cache)[0] == chain.last
        HostCache(cache, max_bytes=0)
        assert sum(len(path.name) == 64 for path in cache.iterdir()) == num_files
    assert list(cache.iterdir()) == []


# What a host is short of.


@pytest.mark.sample(1)
@pytest.mark.parametrize("has_cache", [False, True])
def test_too_few_descriptors_are_said_to_be_that_and_not_a_store_that_fails(
    chain: Chain, tmp_path: Path, has_cache: bool
) -> None:
    with pytest.raises(HostError, match="ulimit -n"):
        in_a_process(_starved, chain.folder, tmp_path / "cache" if has_cache else None)


def _starved(bucket: Path, cache: Path | None) -> None:
    follower = Replica(FolderStore(bucket), {}, cache=None if cache is None else HostCache(cache))
    follower.update(0)
    before = bits_of(dict(follower.tensors), None)
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    try:
        follower.update()
    except PatchstoreError:
        assert (follower.held, bits_of(dict(follower.tensors), None)) == (0, before)
        raise
    finally:
        for each in taken:
            os.close(each)


def _large(bucket: Path) -> tuple[FolderStore, Manifest]:
    """A run whose second version changes every element: a delta of 6 MB."""
    store = FolderStore(bucket)
    model = {"a": torch.randn(1000, 1000)}
    with Publisher(store, model, encoding="raw") as publisher:
        publisher.publish_patch(0)
        model["a"] *= -1
        return store, publisher.publish_patch(1).result()


def _updated(bucket: Path, scratch: Path, has_cache: bool) -> None:
    scratch.mkdir(mode=0o700, exist_ok=True)
    cache = HostCache(scratch, max_bytes=0) if has_cache else None
    store = FolderStore(bucket)
    model: State = {}
    # The anchor does not pass through the folder.
    Replica(store, model).update(0)
    Replica(store, model, held=0, scratch=scratch, cache=cache).update(1)


def _replayed(bucket: Path, folder: Path) -> None:
    replay(FolderStore(bucket), 0, out=folder / "out")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("task", "args"), [(_updated, (False,)), (_updated, (True,)), (_replayed, ())])
def test_a_file_that_may_not_grow_so_far_is_named_with_the_folder_it_is_in_and_leaves_nothing(
    tmp_path: Path, task: Callable[..., None], args: tuple[bool, ...]
) -> None:
    _large(tmp_path / "bucket")
    folder, limit = tmp_path / "scratch", (resource.RLIMIT_FSIZE, 1_000_000)
    with pytest.raises(HostError, match=f"{tmp_path}.*File too large.*ulimit -f"):
        in_a_process(task, tmp_path / "bucket", folder, *args, limit=limit)
    assert list(folder.glob("*")) == []
    in_a_process(task, tmp_path / "bucket", folder, *args)


@pytest.mark.exhaustive
def test_too_little_memory_is_said_to_be_that(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "bucket")
    with Publisher(store, {"a": torch.zeros(30_000_000, dtype=torch.bfloat16)}) as publisher:
        publisher.publish_patch(0).result()
    for task in (_updated_by_threads, _mapped_from_cache, _rebuilt_by_threads):
        with pytest.raises(HostError, match="ulimit -v"):
            in_a_process(task, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bucket", "cache"]


def _limit_memory() -> None:
    """Leave less than the tensor of 60 MB takes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (30 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _updated_by_threads(folder: Path) -> None:
    follower = Replica(FolderStore(folder / "bucket"), {})
    _limit_memory()
    follower.update()


def _rebuilt_by_threads(folder: Path) -> None:
    _limit_memory()
    replay(FolderStore(folder / "bucket"), out=folder / "out")


def _mapped_from_cache(folder: Path) -> None:
    store, cache = FolderStore(folder / "bucket"), HostCache(folder / "cache")
    header, manifest = history.run_header(store), history.read_manifest(store, 0)
    for is_limited in (False, True):
        if is_limited:
            _limit_memory()
        with open_anchor(store, manifest, header.schema.by_name(), cache) as tensors:
            del tensors


def test_a_manifest_that_lies_about_a_size_is_corrupt_and_no_shortage_of_this_host(
    chain: Chain, tmp_path: Path
) -> None:
    store = FolderStore(chain.folder)
    header, manifest = history.run_header(store), history.read_manifest(store, 1)
    assert manifest.delta is not None
    (wanted,) = manifest.delta.payloads
    for size in (1 << 45, 1 << 62, (1 << 63) + 1):
        delta = replace(manifest.delta, payloads=(replace(wanted, size=size),))
        for needs in (None, _every_tile):
            with (
                pytest.raises(CorruptObject),
                open_deltas(
                    store, (replace(manifest, delta=delta),), header.schema.by_name(), tmp_path, None, needs
                ),
            ):
                pass
    assert np.all([path.stat().st_size == 0 for path in tmp_path.iterdir()])
