"""Versions of adapters as folders of a host."""

import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from patchstore import Publisher, replay
from patchstore.bucket import digests, history, manifest_json
from patchstore.errors import (
    CorruptObject,
    HostError,
    PatchstoreError,
    StateMismatch,
    StoreUnavailable,
    VersionNotFound,
    VersionRetired,
)
from patchstore.ops.compact.service import Compactor
from patchstore.ops.retention import Retention, retire
from patchstore.read import download
from patchstore.read.run import Run
from patchstore.stores import layout
from patchstore.stores.base import PART_BYTES
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.format import bad_payloads
from tests.format.golden_buckets import GOLDEN, PatientStore, spoiled
from tests.support.weights import Run as Trained
from tests.support.weights import assert_same_bits, loaded
from vllm_plugin.adapter_folders import AdapterFolders


@pytest.fixture
def trained(store: MemoryStore, tmp_path: Path) -> Iterator[Trained]:
    """A run of twelve versions, an anchor every fourth, whose anchors have a config."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "made up"}')
    run = Trained(store)
    run.open(files=base)
    run.publish_versions(12)
    yield run
    run.close()


@pytest.fixture
def run(trained: Trained) -> Run:
    return Run.open(trained.store)


@pytest.fixture
def folders(tmp_path: Path) -> AdapterFolders:
    return AdapterFolders(tmp_path / "host", keep=2)


def assert_is(folder: Path, trained: Trained, version: int) -> None:
    """Fail unless a folder is what a replay of the version is, and cannot be written to."""
    assert_same_bits(loaded(folder), trained.history[version])
    out = folder.parents[3] / f"replayed-{version}-{folder.stat().st_mtime_ns}"
    replay(trained.store, version, out=out)
    for path in out.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
    assert {path.name for path in folder.iterdir()} == {path.name for path in out.iterdir()}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o444}


def names(tmp_path: Path) -> list[str]:
    """All that lies in the host's folder, but for locks."""
    return sorted(path.name for path in tmp_path.glob("host/adapters/*/*") if path.suffix != ".lock")


def test_a_version_is_a_folder_that_its_manifest_names(folders, run, trained, tmp_path) -> None:
    lent = folders.lend(run, 5)
    assert_is(lent.path, trained, 5)
    data = history.read_stored(trained.store, 5)[1]
    digits = digests.digest(data).removeprefix("blake3:")[:16]
    assert lent.path == tmp_path / "host" / "adapters" / run.header.run_id / f"00000005-{digits}"


def test_a_later_version_is_made_from_the_folder_of_an_earlier_one(folders, run, trained) -> None:
    folders.lend(run, 1)
    (payload,) = history.read_manifest(run.store, 0).anchor.payloads
    anchor = run.store.get(payload.key)
    # From here on only deltas lead on.
    run.store.delete(payload.key)
    lent = {version: folders.lend(run, version) for version in (3, 2)}
    run.store.put(payload.key, anchor)
    for version, each in lent.items():
        assert_is(each.path, trained, version)


def test_an_older_version_than_all_that_are_there_comes_from_its_anchor(folders, run, trained) -> None:
    folders.lend(run, 7)
    assert_is(folders.lend(run, 5).path, trained, 5)


def test_a_version_whose_anchor_was_added_later_is_that_anchor(folders, run, trained) -> None:
    list(Compactor(trained.store, anchor_every=2).compact())
    assert not run.plan(6).deltas
    assert_is(folders.lend(run, 6).path, trained, 6)


@pytest.mark.parametrize("bucket", ["v1-raw", "v1-sharded", "v1-adapter"])
def test_a_version_that_is_stored_in_full_has_its_own_files(folders, bucket) -> None:
    store = FolderStore(GOLDEN / bucket)
    anchor = history.read_manifest(store, 0).anchor
    folder = folders.lend(Run.open(store), 0).path
    stored = {each.key.rpartition("/")[2]: store.get(each.key) for each in (*anchor.payloads, *anchor.files)}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == stored


@pytest.mark.parametrize(
    "case",
    [case for case in bad_payloads.CASES if case.version == 0],
    ids=lambda case: case.name.encode("unicode_escape").decode(),
)
def test_a_bad_file_of_a_version_in_full_is_refused_and_nothing_is_left(folders, tmp_path, case) -> None:
    with pytest.raises(PatchstoreError) as caught:
        folders.lend(Run.open(PatientStore(spoiled(case))), 0)
    assert caught.value.kind in case.kinds
    assert names(tmp_path) == []


def test_a_version_whose_tensors_are_not_those_of_its_digest_is_refused(folders, run, tmp_path) -> None:
    manifest = history.read_manifest(run.store, 0)
    (payload,) = manifest.anchor.payloads
    data = bytearray(run.store.get(payload.key))
    data[-1] ^= 1
    run.store.put(payload.key, bytes(data))
    anchor = replace(manifest.anchor, payloads=(replace(payload, digest=digests.digest(data)),))
    run.store.put(layout.manifest_key(0), manifest_json.to_json(replace(manifest, anchor=anchor)))
    with pytest.raises(StateMismatch, match="1 tensors differ"):
        folders.lend(run, 0)
    assert names(tmp_path) == []


def test_a_disk_that_is_full_while_a_version_is_written_is_said_so(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(download, "reserve", lambda *_: None)
    store, folders = MemoryStore(), AdapterFolders(tmp_path / "host")
    with Publisher(store, {"a": torch.randn(PART_BYTES)}) as publisher:
        publisher.publish_patch(0)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PART_BYTES, limit[1]))
    try:
        with pytest.raises(HostError, match=r"holding .* bytes of anchors/.*File too large"):
            folders.lend(Run.open(store), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert names(tmp_path) == []


def test_many_ask_at_once_and_one_makes_it(run, trained, tmp_path) -> None:
    counting = FaultyStore(trained.store)
    counted = Run.open(counting)

    def lend(_: int) -> Path:
        return AdapterFolders(tmp_path / "host").lend(counted, 5).path

    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lend, range(4)))
    assert len(paths) == 1
    (payload,) = history.read_manifest(trained.store, 5).delta.payloads
    assert [key for verb, key in counting.calls if verb == "get"].count(payload.key) == 1
    assert_is(paths.pop(), trained, 5)


def test_a_version_that_is_retired_is_not_lent_also_where_its_folder_is_there(folders, run, trained) -> None:
    folders.lend(run, 5).close()
    held = folders.lend(run, 6)
    retire(trained.store, Retention(keep_last=1), dry_run=False)
    for version in (5, 6, 7):
        with pytest.raises(VersionRetired):
            folders.lend(run, version)
    assert held.path.is_dir()


def test_what_is_lent_stays_and_of_the_rest_the_last_used_ones(folders, run, trained, tmp_path) -> None:
    held = folders.lend(run, 0)
    for version in (1, 2, 3, 4):
        folders.lend(run, version).close()
    folders.lend(run, 2).close()
    lent = folders.lend(run, 5)
    assert [name[:8] for name in names(tmp_path)] == ["00000000", "00000002", "00000004", "00000005"]
    held.close()
    lent.close()
    folders.lend(run, 6).close()
    assert [name[:8] for name in names(tmp_path)] == ["00000004", "00000005", "00000006"]


def damage(folder: Path, suffix: str, data: bytes) -> None:
    (path,) = folder.glob(f"*{suffix}")
    path.chmod(0o600)
    path.write_bytes(data)


def flipped(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    data = path.read_bytes()
    damage(folder, path.name, data[:-1] + bytes([data[-1] ^ 1]))


def holed(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    damage(folder, path.name, bytes(path.stat().st_size))


WRONG = {
    "a bit": flipped,
    # What a power cut may leave.
    "zeros": holed,
    "no weights": lambda folder: damage(folder, ".safetensors", b""),
    "no config": lambda folder: damage(folder, "config.json", b""),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_folder_that_no_one_held_is_verified_and_made_again_where_it_is_wrong(
    folders, run, trained, change
) -> None:
    lent = folders.lend(run, 5)
    lent.close()
    change(lent.path)
    assert folders.lend(run, 5).path == lent.path
    assert_is(lent.path, trained, 5)


def test_a_version_is_made_from_an_older_folder_where_the_nearest_is_wrong(
    folders, run, trained, tmp_path
) -> None:
    folders.lend(run, 1)
    nearest = folders.lend(run, 2)
    (payload,) = history.read_manifest(run.store, 0).anchor.payloads
    anchor = run.store.get(payload.key)
    run.store.delete(payload.key)
    nearest.close()
    flipped(nearest.path)
    lent = folders.lend(run, 3)
    run.store.put(payload.key, anchor)
    assert_is(lent.path, trained, 3)
    assert [name[:8] for name in names(tmp_path)] == ["00000001", "00000003"]


def test_earlier_folders_are_not_read_for_a_version_that_is_stored_in_full(tmp_path) -> None:
    store, folders = MemoryStore(), AdapterFolders(tmp_path / "host")
    tensors = {name: torch.randn(500) for name in "ab"}
    with Publisher(store, tensors, dtype=None, anchor_every=1) as publisher:
        publisher.publish_patch(0).result()
        run = Run.open(store)
        earlier = folders.lend(run, 0)
        earlier.close()
        flipped(earlier.path)
        for tensor in tensors.values():
            tensor.normal_()
        publisher.publish_patch(1).result()
    assert_same_bits(loaded(folders.lend(run, 1).path), tensors)
    # Whoever reads it finds that it is wrong, and removes it.
    assert earlier.path.is_dir()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(verb="get", effect="fail-before", key="anchors/*", times=None), StoreUnavailable),
        (Fault(verb="get", effect="flip", key="anchors/*", times=None), CorruptObject),
    ],
)
def test_a_failure_leaves_nothing_and_the_next_one_succeeds(
    trained, folders, run, tmp_path, fault, error
) -> None:
    with pytest.raises(error):
        folders.lend(Run.open(FaultyStore(trained.store, fault, sleep=lambda _: None)), 5)
    assert names(tmp_path) == []
    assert_is(folders.lend(run, 5).path, trained, 5)


def test_a_version_that_is_not_there_is_said_so(folders, run, tmp_path) -> None:
    with pytest.raises(VersionNotFound):
        folders.lend(run, 99)
    assert names(tmp_path) == []


def test_another_thread_does_not_wait_for_a_version_that_is_made(trained, folders, run) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()

    def wait(_: float) -> None:
        has_begun.set()
        may_go_on.wait(30)

    slow = FaultyStore(trained.store, Fault(verb="get", effect="delay", key="anchors/*"), sleep=wait)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(folders.lend, Run.open(slow), 1)
        assert has_begun.wait(30)
        assert_is(folders.lend(run, 6).path, trained, 6)
        may_go_on.set()
        assert_is(first.result().path, trained, 1)
