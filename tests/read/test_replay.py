"""Rebuilding versions: exact, checked, in bounded memory, and visible only when whole."""

import errno
import json
import multiprocessing
import os
import signal
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from patchstore import Publisher, Replica, replay, verify
from patchstore.errors import CorruptObject, StateMismatch, UsageError, VersionNotFound
from patchstore.format import history, layout
from patchstore.read.replay import Progress
from patchstore.read.transcode import transcode
from patchstore.stores.base import Store
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.support import locks
from tests.support.weights import Run, State, assert_same_bits, lie

WORKERS = multiprocessing.get_context("forkserver")
WORKERS.set_forkserver_preload([__name__])


def load(folder: Path) -> State:
    """Read a checkpoint folder with the safetensors library."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("version", [-1, "2", 1.0, True, 2**70])
def test_what_is_no_version_is_refused_at_once(run: Run, tmp_path: Path, version: Any) -> None:
    run.publish_versions(2)
    calls = (
        lambda: replay(run.store, version, out=tmp_path / "out"),
        lambda: verify(run.store, version),
        lambda: Replica(run.store, {}).update(version),
        lambda: Replica(run.store, {}).stage(version),
        lambda: transcode(run.store, version, encoding="gap", out=tmp_path / "out"),
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
    with pytest.raises(UsageError, match="out must be a path"):
        transcode(run.store, 1, encoding="gap", out=out)
    assert list(tmp_path.iterdir()) == []


def test_a_tilde_in_out_is_the_users_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish_versions(1)
    monkeypatch.setenv("HOME", str(tmp_path))
    replay(run.store, out="~/out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_every_version_is_rebuilt_bit_for_bit(run: Run, tmp_path: Path) -> None:
    run.publish_versions(9)
    for version, expected in run.history.items():
        replay(run.store, version, out=tmp_path / str(version))
        assert_same_bits(load(tmp_path / str(version)), expected)


def test_the_head_is_rebuilt_by_default(run: Run, tmp_path: Path) -> None:
    run.publish_versions(3)
    assert replay(run.store, out=tmp_path / "out").version == 2


def test_a_sharded_anchor_replays_with_its_index_and_files(store: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "toy"}')
    model = {f"layers.{i}.weight": torch.randn(50, 10) for i in range(6)}
    with Publisher(store, model, files=tmp_path / "base", max_shard_bytes=2500) as publisher:
        publisher.publish_patch(0).result()
        model["layers.3.weight"][2] *= 2
        publisher.publish_patch(1).result()
    replay(store, out=tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "toy"}'
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 6 * 500 * 2
    for name, file in index["weight_map"].items():
        tensor = load_file(tmp_path / "out" / file)[name]
        assert torch.equal(tensor.view(torch.int16), model[name].to(torch.bfloat16).view(torch.int16))
    assert len(set(index["weight_map"].values())) == 3


def test_versions_left_behind_by_a_trainer_that_went_back_can_still_be_rebuilt(
    run: Run, tmp_path: Path
) -> None:
    run.publish_versions(3)
    run.close()
    run.model.update({n: t.float() for n, t in run.history[1].items() if t.is_floating_point()})
    run.model["head.weight"] = run.model["embed.weight"]
    run.open(resume=1)
    run.train()
    run.publish(9)
    for version in (2, 4):
        replay(run.store, version, out=tmp_path / str(version))
        assert_same_bits(load(tmp_path / str(version)), run.history[version])


def test_an_existing_output_is_left_alone(run: Run, tmp_path: Path) -> None:
    run.publish()
    with pytest.raises(UsageError):
        replay(run.store, out=tmp_path)


def test_an_unknown_version_is_named(run: Run, tmp_path: Path) -> None:
    run.publish()
    with pytest.raises(VersionNotFound):
        replay(run.store, 7, out=tmp_path / "out")
    with pytest.raises(VersionNotFound):
        replay(MemoryStore(), out=tmp_path / "out")


def damage(store: MemoryStore, key: str, at: int) -> None:
    data = bytearray(store.get(key))
    data[at] ^= 1
    store.put(key, bytes(data))


@pytest.mark.parametrize("at", [0, 9, -1])
@pytest.mark.parametrize("folder", ["anchors/", "deltas/"])
def test_one_flipped_bit_anywhere_in_a_payload_leaves_no_output(
    run: Run, tmp_path: Path, folder: str, at: int
) -> None:
    run.publish_versions(2)
    damage(run.store, next(run.store.list(folder)), at)  # type: ignore[arg-type]
    with pytest.raises(CorruptObject):
        replay(run.store, out=tmp_path / "out")
    with pytest.raises(CorruptObject):
        verify(run.store)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["anchors/", "deltas/"])
@pytest.mark.parametrize("how", ["missing", "shorter", "longer"])
def test_a_payload_of_another_size_leaves_no_output(run: Run, tmp_path: Path, folder: str, how: str) -> None:
    run.publish_versions(2)
    key = next(run.store.list(folder))
    data = run.store.get(key)
    run.store.delete(key)
    if how != "missing":
        run.store.put(key, data[:-1] if how == "shorter" else data + b"x")
    with pytest.raises(CorruptObject):
        replay(run.store, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_do_not_match_the_state_digest_leave_no_output(run: Run, tmp_path: Path) -> None:
    run.publish()
    lie(run.store, 0, "embed.weight")
    with pytest.raises(StateMismatch) as error:
        replay(run.store, out=tmp_path / "out")
    assert "embed.weight" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_was_exchanged_is_noticed(run: Run, tmp_path: Path) -> None:
    run.publish_versions(2)
    key = layout.manifest_key(0)
    run.store.put(key, run.store.get(key).replace(b'"step": 0', b'"step": 5'))
    with pytest.raises(CorruptObject):
        replay(run.store, 1, out=tmp_path / "out")


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
    header = history.read_header(run.store)
    assert header is not None
    assert seen[-1] == (header.schema.num_bytes, header.schema.num_bytes)
    assert seen == sorted(seen)


def test_memory_follows_the_largest_tensor_and_not_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchstore.stores.base.PART_BYTES", 256 << 10)
    tensor_bytes = 2 << 20
    monkeypatch.setattr("patchstore.read.replay._UNDER_WAY_BYTES", 2 * tensor_bytes)
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
    assert peak < 6 * tensor_bytes + 10 * (256 << 10)


# What killed processes leave.


class Stuck(FolderStore):
    """Says when an anchor is about to be read, and waits."""

    def __init__(self, bucket: Path, is_stuck: Any) -> None:
        super().__init__(bucket)
        self._bucket, self._is_stuck = bucket, is_stuck

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self._bucket, self._is_stuck)

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        if key.startswith("anchors/"):
            self._is_stuck.set()
            threading.Event().wait()
        yield from super().read(key, start=start, end=end)


def _replay(store: Store, out: Path) -> None:
    replay(store, 0, out=out)


def _replay_with_a_child(store: Stuck, out: Path, pids: Any) -> None:
    def fork() -> None:
        store._is_stuck.wait()
        child = os.fork()
        if child == 0:
            threading.Event().wait(60)
            os._exit(0)
        pids.put(child)

    threading.Thread(target=fork, daemon=True).start()
    replay(store, 0, out=out)


def stuck_replay(bucket: Path, out: Path) -> multiprocessing.process.BaseProcess:
    """A process that has begun to replay and does not go on."""
    is_stuck = WORKERS.Event()
    process = WORKERS.Process(target=_replay, args=(Stuck(bucket, is_stuck), out), daemon=True)
    process.start()
    assert is_stuck.wait(60)
    return process


def partials(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".partial")]


def test_what_a_killed_replay_left_is_removed_by_the_next_and_what_runs_is_not(tmp_path: Path) -> None:
    run = Run(FolderStore(tmp_path / "bucket"))
    run.publish()
    run.close()
    outs = tmp_path / "outs"
    victim = stuck_replay(tmp_path / "bucket", outs / "a")
    running = stuck_replay(tmp_path / "bucket", outs / "b")
    try:
        left, kept = sorted(partials(outs))
        replay(run.store, out=outs / "c")
        assert sorted(partials(outs)) == [left, kept]
        victim.kill()
        victim.join()
        # Others' files of like names.
        (outs / ".notes.partial").touch()
        (outs / ".a.12345678.partial").mkdir()
        replay(run.store, out=outs / "d")
        assert sorted(partials(outs)) == sorted([kept, ".notes.partial", ".a.12345678.partial"])
        for name in "cd":
            assert_same_bits(load(outs / name), run.history[0])
    finally:
        running.kill()
        running.join()


@pytest.mark.exhaustive
def test_what_a_killed_replay_left_is_removed_though_a_child_of_it_lives(tmp_path: Path) -> None:
    run = Run(FolderStore(tmp_path / "bucket"))
    run.publish()
    run.close()
    outs, pids = tmp_path / "outs", WORKERS.SimpleQueue()
    store = Stuck(tmp_path / "bucket", WORKERS.Event())
    victim = WORKERS.Process(target=_replay_with_a_child, args=(store, outs / "a", pids), daemon=True)
    victim.start()
    child = pids.get()
    try:
        victim.kill()
        victim.join()
        os.kill(child, 0)
        assert len(partials(outs)) == 1
        replay(run.store, out=outs / "b")
        assert partials(outs) == []
    finally:
        os.kill(child, signal.SIGKILL)


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
    assert_same_bits(load(tmp_path / "out"), run.history[0])


@pytest.mark.exhaustive
def test_what_a_killed_transcoding_left_is_removed_by_the_next(tmp_path: Path) -> None:
    run = Run(FolderStore(tmp_path / "bucket"))
    run.publish_versions(2)
    run.close()
    victim = WORKERS.Process(target=_transcode_and_die, args=(tmp_path / "bucket", tmp_path / "outs" / "a"))
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    assert len(partials(tmp_path / "outs")) == 1
    transcode(run.store, 1, encoding="raw", out=tmp_path / "outs" / "b")
    assert [path.name for path in (tmp_path / "outs").iterdir()] == ["b"]


def _transcode_and_die(bucket: Path, out: Path) -> None:
    def die(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.rename":
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(die)
    transcode(FolderStore(bucket), 1, encoding="raw", out=out)


def test_replays_beside_each_other_never_take_each_others_for_what_was_left(run: Run, tmp_path: Path) -> None:
    run.publish_versions(2)
    with ThreadPoolExecutor(6) as threads:
        outs = [tmp_path / str(number) for number in range(60)]
        done = [threads.submit(replay, run.store, number % 2, out=out) for number, out in enumerate(outs)]
        for each in done:
            each.result()
    for number, out in enumerate(outs):
        assert_same_bits(load(out), run.history[number % 2])
    assert partials(tmp_path) == []
