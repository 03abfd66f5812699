"""Rebuilding versions: exact, checked, in bounded memory, and visible only when whole."""

import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from patchstore import Publisher, layout, log, replay, verify
from patchstore.errors import CorruptObject, StateMismatch, UsageError, VersionNotFound
from patchstore.rebuild import Progress
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from tests.weights import Run, State, assert_same_bits, lie


def load(folder: Path) -> State:
    """Read a checkpoint folder with the safetensors library."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


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
    header = log.read_header(run.store)
    assert header is not None
    assert seen[-1] == (header.schema.num_bytes, header.schema.num_bytes)
    assert seen == sorted(seen)


def test_memory_follows_the_largest_tensor_and_not_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchstore.stores.base.PART_BYTES", 256 << 10)
    store = FolderStore(tmp_path / "bucket")
    tensor_bytes = 2 << 20
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
    # A tensor being put together, the one before it, and ten parts; the model is 40 tensors.
    assert peak < 3 * tensor_bytes + 10 * (256 << 10)
