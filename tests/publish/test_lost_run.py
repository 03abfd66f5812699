"""A run whose bucket was emptied, taken over or changed stops its publisher."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from patchstore import Publisher
from patchstore.errors import RunLost
from patchstore.format import layout
from patchstore.stores.base import Store
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import FaultyStore
from tests.support.weights import Run, assert_same_bits, newest, served


@pytest.fixture(params=["folder", "memory"])
def lasting(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store that can be emptied behind a publisher's back; what is missing is not looked for as long."""
    monkeypatch.setattr("patchstore.publish.uploads.FIRST_PAUSE_S", 0.001)
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


def test_a_manifest_that_was_exchanged_stops_the_publisher_that_builds_on_it(run: Run) -> None:
    run.publish_versions(2)
    key = layout.manifest_key(1)
    run.store.put(key, run.store.get(key).replace(b'"step": 1', b'"step": 5'))
    assert_stopped(run.publisher)


def test_an_anchor_is_not_uploaded_to_where_its_run_is_no_more(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchstore.publish.uploads.FIRST_PAUSE_S", 0.001)
    watched = FaultyStore(run.store)
    with suppress(RunLost), Publisher(watched, run.model, anchor_every=1) as publisher:
        publisher.publish_patch(0).result()
        empty(run.store)
        watched.calls.clear()
        publisher.publish_patch(1).result()
    assert not [call for call in watched.calls if call[0] == "upload"]
