"""Weights that are read by way of a host cache: rebuilt, streamed or followed."""

from pathlib import Path
from typing import Any

import pytest
from cache_host import WORKERS, LoggedStore, results

from patchstore import Replica
from patchstore.bucket import history, lineage
from patchstore.errors import PatchstoreError
from patchstore.read.anchors import open_anchor
from patchstore.read.deltas import open_deltas
from patchstore.read.host_cache import HostCache
from patchstore.stores.base import Store
from patchstore.stores.folder import FolderStore
from patchstore.tensors import state_digest
from patchstore.tensors.bits import bits
from tests.format import bad_buckets, bucket_edits, surgery
from tests.support.weights import Run, State, assert_same_bits

GOLDEN = Path(__file__).parent.parent / "golden"


def rebuilt(store: Store, version: int, folder: Path) -> State:
    """A version's weights, by way of local files alone, proved by its state digest."""
    cache = HostCache(folder, max_bytes=0)
    header = history.run_header(store)
    schema = header.schema.by_name()
    route = lineage.read(store, version).plan()
    assert route.anchor is not None
    with (
        open_deltas(store, route.deltas, header.schema, None, cache) as deltas,
        open_anchor(store, route.anchor, schema, cache) as tensors,
    ):
        weights = {name: tensors[name] for name in schema}
        for name in deltas.names:
            patch = deltas.merged(schema[name], weights[name])
            bits(weights[name])[patch.indices] = bits(patch.values)
    state_digest.check_state(
        store, header.schema, {n: state_digest.of_tensor(t) for n, t in weights.items()}, route.target
    )
    return weights


def test_every_version_is_rebuilt_from_local_files(run: Run, tmp_path: Path) -> None:
    run.publish_versions(7)
    for version, expected in run.history.items():
        assert_same_bits(rebuilt(run.store, version, tmp_path), expected)
        assert list(tmp_path.iterdir()) == []


def test_writing_to_an_anchors_tensors_leaves_the_files_as_they_are(run: Run, tmp_path: Path) -> None:
    manifest = run.publish()
    header = history.run_header(run.store)
    schema = header.schema.by_name()
    cache = HostCache(tmp_path, max_bytes=0)
    with open_anchor(run.store, manifest, schema, cache) as mine:
        for tensor in mine.values():
            bits(tensor).zero_()
        run.store.delete(next(run.store.list("anchors/")))
        with open_anchor(run.store, manifest, schema, cache) as yours:
            assert_same_bits(dict(yours), run.history[0])
    # The files are gone, and their bytes are still mapped.
    assert list(tmp_path.iterdir()) == []
    assert_same_bits(dict(yours), run.history[0])
    assert not any(tensor.any() for tensor in mine.values())


@pytest.mark.parametrize(
    "case",
    # What store.json says is compared by the follower, before it fetches anything.
    [
        case
        for case in bad_buckets.CASES
        if not (case.beyond_followers or case.only_verified or "store.json" in case.name)
    ],
    ids=lambda case: case.name.encode("unicode_escape").decode(),
)
def test_a_bad_bucket_is_refused_from_local_files_too(tmp_path: Path, case: bucket_edits.Bad) -> None:
    objects = dict(surgery.load(GOLDEN / case.bucket))
    case.change(objects)
    with pytest.raises(PatchstoreError) as error:
        rebuilt(surgery.store_of(objects), case.version, tmp_path)
    assert error.value.kind in case.kinds
    assert list(tmp_path.iterdir()) == []


def _followed(store: Store, folder: Path, everybody: Any) -> list[int]:
    """Follow a store, version by version, at the same time as others; return the versions."""
    follower = Replica(store, {}, cache=HostCache(folder))
    found = []
    for version in range(4):
        everybody.wait()
        found.append(follower.update(version).version)
    return found


def test_followers_of_a_host_download_each_payload_once_also_one_that_comes_late(tmp_path: Path) -> None:
    bucket, reads, folder = (tmp_path / name for name in ("bucket", "reads", "cache"))
    run = Run(FolderStore(bucket))
    run.publish_versions(4)
    run.close()
    store = LoggedStore(bucket, reads)
    assert results(2, _followed, store, folder, WORKERS.Barrier(2)) == [[0, 1, 2, 3]] * 2
    assert results(1, _followed, store, folder, WORKERS.Barrier(1)) == [[0, 1, 2, 3]]
    keys = reads.read_text().splitlines()
    assert len(keys) == len(set(keys)) == 4


def test_a_follower_has_the_same_weights_by_way_of_a_cache(run: Run, tmp_path: Path) -> None:
    run.publish_versions(3)
    follower = Replica(run.store, {}, cache=HostCache(tmp_path))
    for version, expected in run.history.items():
        follower.update(version)
        assert_same_bits(dict(follower.tensors), expected)
    assert list(tmp_path.iterdir())
