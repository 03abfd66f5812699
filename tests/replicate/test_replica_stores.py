"""Replicas between real stores: folders, an S3 server, a local Hub."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from replicas import assert_equal, give_up, go_back, replicate

from patchstore import Publisher, Replica, open_store
from patchstore.bucket import history, notes
from patchstore.errors import IsReplica, UnsupportedStore
from patchstore.ops.replicate.replicator import Replicator
from patchstore.stores import layout
from patchstore.stores.base import PART_BYTES, Store
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from tests.retention.kept_runs import new_run
from tests.support.hub import Hub
from tests.support.hub.clients import quick_clients
from tests.support.weights import Run, assert_same_bits, newest


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with quick_clients(tmp_path_factory.mktemp("hf")), Hub() as hub:
        hub.create_bucket("user/bucket")
        yield hub


@pytest.fixture
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Store]]:
    """Opens an empty store of a kind."""
    stores: list[Store] = []

    def open_(kind: str) -> Store:
        if kind == "folder":
            stores.append(FolderStore(tmp_path / uuid.uuid4().hex))
        elif kind.startswith("s3"):
            options: dict[str, Any] = request.getfixturevalue("s3_options")
            client = kind.partition("-")[2]
            stores.append(open_store(f"s3://bucket/replicas/{uuid.uuid4().hex}", **options, client=client))
        elif kind == "hub":
            hub: Hub = request.getfixturevalue("hub")
            url = f"hf://buckets/user/bucket/replicas/{uuid.uuid4().hex}"
            stores.append(open_store(url, **hub.options("user")))
        else:
            stores.append(MemoryStore(f"memory://{uuid.uuid4().hex}"))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


KINDS = [("folder", "s3-s3fs"), ("s3-obstore", "hub"), ("hub", "folder"), ("s3-s3fs", "s3-obstore")]


@pytest.mark.parametrize(("near", "far"), KINDS)
def test_versions_arrive_bit_for_bit_and_go_on(near: str, far: str, opened: Callable[[str], Store]) -> None:
    source, target = opened(near), opened(far)
    run = Run(source)
    run.publish_versions(3)
    replicator = Replicator(source, target)
    replicator.open()
    assert [done.manifest.version for done in replicator.versions()] == [0, 1, 2]
    run.publish_versions(3)
    run.close()
    # Another process, which knows nothing.
    later = Replicator(source, target)
    later.open()
    assert [done.manifest.version for done in later.versions()] == [3, 4, 5]
    assert_equal(source, target)
    for version, state in run.history.items():
        tensors: dict[str, torch.Tensor] = {}
        Replica(target, tensors).update(version)
        assert_same_bits(tensors, state)
    with pytest.raises(IsReplica):
        Publisher(target, run.model, resume="auto")
    notes.promote(target, "2026-01-31T12:00:00.000Z", dry_run=False)
    with Publisher(target, run.model, resume="auto"):
        assert history.head(target).writer.epoch == 2


@pytest.mark.sample(2)
@pytest.mark.parametrize(("near", "far"), KINDS)
def test_an_object_of_many_parts_arrives(near: str, far: str, opened: Callable[[str], Store]) -> None:
    source, target = opened(near), opened(far)
    weight = torch.randn(PART_BYTES + 123_457)  # in bf16 twice as many bytes
    with Publisher(source, {"w": weight}) as publisher:
        publisher.publish_patch(0).result()
    replicator = Replicator(source, target)
    replicator.open()
    (done,) = replicator.versions()
    assert done.num_bytes > 2 * PART_BYTES
    assert_equal(source, target)


def test_a_target_that_cannot_create_once_is_refused(hub: Hub, run: Run) -> None:
    run.publish()
    url = f"hf://buckets/user/bucket/replicas/{uuid.uuid4().hex}"
    with_one_writer = {"endpoint": hub.url, "token": "hf_test"}
    target = open_store(url, **with_one_writer)
    with pytest.raises(UnsupportedStore):
        Replicator(run.store, target).open()
    assert not [key for key in target.list() if not key.startswith(layout.PROBES)]
    target.close()
    promised = open_store(url, **with_one_writer, single_writer=True)
    replicate(run.store, promised)
    assert_equal(run.store, promised)
    promised.close()


@pytest.mark.parametrize(("near", "far"), [("s3-obstore", "s3-s3fs"), ("folder", "hub")])
def test_a_replica_with_its_own_retention_follows_a_trainer_that_went_back(near, far, opened):
    source, target = opened(near), opened(far)
    run = new_run(source, 6)
    replicate(source, target)
    give_up(target, 1)
    branch = go_back(run, 2, 2)
    replicate(source, target)
    assert_same_bits(newest(target), run.history[branch[-1]])
