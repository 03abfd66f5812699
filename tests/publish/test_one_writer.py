"""A run has one publisher. It stops where its bucket was emptied, taken over or changed."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from patchstore import Publisher
from patchstore.errors import RunExists, RunLost, VersionConflict
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import FaultyStore
from tests.support.weights import Run, assert_same_bits, newest, served

RANKS = [
    ({"RANK": "3"}, "rank 3"),
    ({"LOCAL_RANK": "1"}, "rank 1"),
    ({"RANK": "3", "WORLD_SIZE": "4"}, "rank 3 of 4"),
    ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    ({"RANK": "0", "LOCAL_RANK": "0"}, None),
    ({"RANK": "x"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("environment", "said"), RANKS)
def test_a_second_rank_is_told_to_leave_publishing_to_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str | None
) -> None:
    run.publish()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunExists) as caught:
        Publisher(run.store, run.model)
    if said is None:
        assert "rank" not in str(caught.value)
    else:
        assert f"{said}, and this Publisher publishes alone: open it only where" in str(caught.value)


def test_the_rank_of_an_initialised_group_comes_before_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    with pytest.raises(RunExists, match="rank 5 of 8"):
        Publisher(run.store, run.model)
    # The others may have been first.
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with pytest.raises(RunExists, match="rank 0 of 8: if the others open a Publisher too, let only this one"):
        Publisher(run.store, run.model)


def test_of_two_publishers_on_one_run_exactly_one_goes_on(run: Run) -> None:
    run.publish()
    first = run.publisher
    second = Publisher(run.store, run.model, resume=True)
    run.train()
    with pytest.raises(VersionConflict):
        first.publish_patch(1).result()
    with pytest.raises(VersionConflict):
        first.publish_patch(2)
    run.close()
    manifest = second.publish_patch(1).result()
    second.close()
    assert (manifest.version, manifest.writer.epoch) == (2, 2)
    assert_same_bits(newest(run.store), served(run.model))


def test_two_publishers_that_create_a_run_at_once_leave_one(store: MemoryStore) -> None:
    barrier = threading.Barrier(4)

    def create(_: int) -> Publisher | None:
        barrier.wait()
        try:
            return Publisher(store, {"w": torch.zeros(4)})
        except RunExists:
            return None

    with ThreadPoolExecutor(4) as threads:
        (opened,) = filter(None, threads.map(create, range(4)))
    opened.close()


@pytest.fixture(params=["folder", "memory"])
def lasting(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store that can be emptied behind a publisher's back; what is missing is not looked for as long."""
    return FolderStore(tmp_path / "bucket") if request.param == "folder" else MemoryStore()


def empty(store: Store) -> None:
    if isinstance(store, FolderStore):
        shutil.rmtree(store.url)
    else:
        for key in [*store.list()]:
            store.delete(key)


def contents(store: Store) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list()}


def assert_stopped(publisher: Publisher) -> None:
    """Fail unless this publication, and every later call, says that the run is lost."""
    with pytest.raises(RunLost):
        publisher.publish_patch(7).result()
    for _ in range(2):
        with pytest.raises(RunLost):
            publisher.publish_patch(8)


@pytest.mark.parametrize("num_versions", [0, 1, 2, 3])
def test_a_bucket_that_disappears_stops_its_publisher_and_stays_empty(
    lasting: Store, num_versions: int
) -> None:
    run = Run(lasting)
    run.open(anchor_every=3)
    run.publish_versions(num_versions)
    empty(lasting)
    run.train()
    assert_stopped(run.publisher)
    run.close()
    assert contents(lasting) == {}
    if isinstance(lasting, FolderStore):
        # At most the folder that every upload begins in, and nothing in it.
        assert {path.name for path in Path(lasting.url).rglob("*")} <= {".tmp"}


@pytest.mark.parametrize("num_versions", [0, 1, 2])
def test_a_bucket_that_another_run_took_over_stops_its_first_publisher_and_is_left_alone(
    lasting: Store, num_versions: int
) -> None:
    run, other = Run(lasting), Run(lasting)
    run.open()
    run.publish_versions(num_versions)
    empty(lasting)
    other.open()
    other.publish_versions(3 if num_versions else 0)
    before = contents(lasting)
    assert_stopped(run.publisher)
    run.close()
    assert contents(lasting) == before
    other.publish()
    assert_same_bits(newest(lasting), served(other.model))
    other.close()


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_header_that_another_release_wrote_anew_is_still_that_of_the_run(
    run: Run, is_resumed: bool
) -> None:
    run.open()
    if is_resumed:
        run.close()
    # Readers ignore fields that they do not know.
    data = run.store.get(layout.HEADER)
    run.store.put(layout.HEADER, data.replace(b"{", b'{"of_a_later_release":1,', 1))
    if is_resumed:
        run.open(resume="auto")
    assert run.publish().version == 0
    assert_same_bits(newest(run.store), served(run.model))


def test_a_header_that_was_damaged_stops_the_publisher_before_its_first_version(run: Run) -> None:
    run.open()
    run.store.put(layout.HEADER, run.store.get(layout.HEADER)[:-9])
    assert_stopped(run.publisher)


def test_a_manifest_that_was_exchanged_stops_the_publisher_that_builds_on_it(run: Run) -> None:
    run.publish_versions(2)
    key = layout.manifest_key(1)
    run.store.put(key, run.store.get(key).replace(b'"step": 1', b'"step": 5'))
    assert_stopped(run.publisher)


def test_an_anchor_is_not_uploaded_to_where_its_run_is_no_more(run: Run) -> None:
    watched = FaultyStore(run.store)
    with suppress(RunLost), Publisher(watched, run.model, anchor_every=1) as publisher:
        publisher.publish_patch(0).result()
        empty(run.store)
        watched.calls.clear()
        publisher.publish_patch(1).result()
    assert not [call for call in watched.calls if call[0] == "upload"]
