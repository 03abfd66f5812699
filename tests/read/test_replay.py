"""Rebuilding versions: exact, checked, in bounded memory, and visible only when whole."""

import errno
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_host import WORKERS, StuckStore, parent, stuck

from patchstore import Publisher, Replica, replay, verify
from patchstore.bucket import history
from patchstore.errors import UsageError
from patchstore.read.replay import Progress
from patchstore.stores.folder import FolderStore
from patchstore.support import locks
from patchstore.tensors.elements import NUMPY_CHUNK
from tests.support.weights import Run, assert_same_bits, loaded


@pytest.mark.parametrize(
    "version",
    [
        -1,
        pytest.param(-(10**5000), id="huge below 0"),
        2**70,
        pytest.param(10**5000, id="huge"),
        True,
        np.bool_(True),
        1.0,
        "2",
        [0],
    ],
)
def test_what_is_no_version_is_refused_at_once(run: Run, tmp_path: Path, version: Any) -> None:
    run.publish_versions(2)
    calls = (
        lambda: replay(run.store, version, out=tmp_path / "out"),
        lambda: verify(run.store, version),
        lambda: Replica(run.store, {}).update(version),
        lambda: Replica(run.store, {}).stage(version),
    )
    for call in calls:
        with pytest.raises(UsageError):
            call()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["s3://bucket/out", "file:///tmp/x", "s3:/bucket", "", 3, None, b"out"])
def test_what_is_no_path_is_refused_and_nothing_is_made(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: Any
) -> None:
    run.publish_versions(2)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="out must be a path"):
        replay(run.store, out=out)
    assert list(tmp_path.iterdir()) == []


def test_a_tilde_in_out_is_the_users_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish_versions(1)
    monkeypatch.setenv("HOME", str(tmp_path))
    replay(run.store, out="~/out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_head_is_rebuilt_by_default(run: Run, tmp_path: Path) -> None:
    run.publish_versions(3)
    assert replay(run.store, out=tmp_path / "out").version == 2


def test_an_existing_output_is_left_alone(run: Run, tmp_path: Path) -> None:
    run.publish()
    with pytest.raises(UsageError):
        replay(run.store, out=tmp_path)


def test_a_failure_while_writing_leaves_no_output(run: Run, tmp_path: Path) -> None:
    run.publish()

    def stop(done: int, total: int) -> None:
        raise OSError(28, "No space left on device")

    progress: Progress = stop
    with pytest.raises(OSError, match="No space"):
        replay(run.store, out=tmp_path / "out", progress=progress)
    assert list(tmp_path.iterdir()) == []


def test_progress_reaches_the_size_of_the_checkpoint(run: Run) -> None:
    run.publish()
    seen: list[tuple[int, int]] = []
    verify(run.store, progress=lambda done, total: seen.append((done, total)))
    header = history.run_header(run.store)
    assert seen[-1] == (header.schema.num_bytes, header.schema.num_bytes)
    assert seen == sorted(seen)


def test_memory_follows_the_largest_tensor_and_not_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchstore.stores.base.PART_BYTES", 256 << 10)
    tensor_bytes = 2 << 20
    monkeypatch.setattr("patchstore.read.rebuild.UNDER_WAY_BYTES", 2 * tensor_bytes)
    store = FolderStore(tmp_path / "bucket")
    model = {f"w{i:02d}": torch.randn(tensor_bytes // 2) for i in range(40)}
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
    del model
    # What Python allocates: parts in transfer, and the tensors' buffers, which torch borrows.
    tracemalloc.start()
    try:
        verify(store)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A tensor being put together, two under way, two that were taken, and ten parts; the model is 40 tensors.
    # Those under way are digested, each beside three arrays of 64 bits.
    assert peak < 6 * tensor_bytes + 10 * (256 << 10) + 2 * 3 * 8 * NUMPY_CHUNK


# What killed processes leave.


def _replay(store: StuckStore, out: Path) -> None:
    replay(store, 0, out=out)


def partials(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".partial")]


def test_what_a_killed_replay_left_is_removed_though_a_child_of_it_lives_and_what_runs_is_not(
    tmp_path: Path,
) -> None:
    run = Run(FolderStore(tmp_path / "bucket"))
    run.publish()
    run.close()
    outs = tmp_path / "outs"
    stores = [StuckStore(tmp_path / "bucket", tmp_path / "reads", WORKERS.Event()) for _ in range(2)]
    with (
        parent(stuck, _replay, stores[0], outs / "a") as (victim, child),
        parent(stuck, _replay, stores[1], outs / "b"),
    ):
        left, kept = sorted(partials(outs))
        replay(run.store, out=outs / "c")
        assert sorted(partials(outs)) == [left, kept]
        victim.kill()
        victim.join()
        os.kill(child, 0)
        # Others' files of like names.
        (outs / ".notes.partial").touch()
        (outs / ".a.12345678.partial").mkdir()
        replay(run.store, out=outs / "d")
        assert sorted(partials(outs)) == sorted([kept, ".notes.partial", ".a.12345678.partial"])
    for name in "cd":
        assert_same_bits(loaded(outs / name), run.history[0])


def test_a_folder_taken_for_what_was_left_is_made_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish_versions(1)
    mkdir = os.mkdir
    holders: list[locks.Handle] = []

    def race(path: Path, mode: int = 0o777) -> None:
        # Another process takes the folder for a killed process's, and removes it when it is made once more.
        if Path(path).name.endswith(".partial") and Path(path).exists():
            Path(path).rmdir()
            holders[0].close()
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        mkdir(path, mode)
        if Path(path).name.endswith(".partial") and not holders:
            holders.append(locks.Handle(Path(path)))
            holders[0].lock(wait=False)

    monkeypatch.setattr(os, "mkdir", race)
    replay(run.store, 0, out=tmp_path / "out")
    assert not holders[0].is_open
    assert_same_bits(loaded(tmp_path / "out"), run.history[0])


def test_replays_beside_each_other_never_take_each_others_for_what_was_left(run: Run, tmp_path: Path) -> None:
    run.publish_versions(2)
    with ThreadPoolExecutor(6) as threads:
        outs = [tmp_path / str(number) for number in range(60)]
        done = [threads.submit(replay, run.store, number % 2, out=out) for number, out in enumerate(outs)]
        for each in done:
            each.result()
    for number, out in enumerate(outs):
        assert_same_bits(loaded(out), run.history[number % 2])
    assert partials(tmp_path) == []
