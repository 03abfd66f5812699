"""What a publisher takes as arguments, and what it refuses."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from patchstore import Publisher, Replica, replay, verify
from patchstore.bucket import history
from patchstore.errors import ResumeMismatch, SchemaMismatch, UsageError, VersionNotFound
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import FaultyStore
from tests.support.weights import Run, assert_same_bits, newest, served

WRONG: dict[str, tuple[Any, ...]] = {
    "resume": ("anchr", None, "3", 1.0, -1),
    "dtype": (torch.int8, "int8", "brainfloat", "nn", 16),
    "files": ("/nonexistent", 3, ["config.json"], __file__),
    "max_pending": (0, 1.5, None),
    "anchor_every": (True, "64", -1, "Auto"),
    "compact": (1, "yes"),
    "max_shard_bytes": (5e9, torch.tensor(True)),
    "encoding": (None, 3, "zip", ["gap"]),
    "snapshot": ("typo", None, ["device"], Path("/nonexistent")),
}


@pytest.mark.parametrize(("name", "value"), [(name, each) for name, all_ in WRONG.items() for each in all_])
def test_wrong_arguments_are_refused_before_the_store_is_asked(
    store: MemoryStore, name: str, value: Any
) -> None:
    watched = FaultyStore(store)
    with pytest.raises(UsageError, match=name):
        Publisher(watched, {"w": torch.zeros(3)}, **{name: value})
    assert watched.calls == []


@pytest.mark.parametrize("value", [2, np.int64(2), np.uint8(2), torch.tensor(2)])
def test_all_integers_do_as_arguments(store: MemoryStore, value: Any) -> None:
    with Publisher(store, {"w": torch.zeros(3)}, anchor_every=value, max_pending=value) as publisher:
        kinds = [publisher.publish_patch(step).result().kind for step in range(3)]
    assert kinds == ["anchor", "delta", "anchor"]


@pytest.mark.parametrize(
    "step",
    [
        *(1.0, True, None, "7", b"7", [1]),
        *(2**63, -(2**63) - 1, 2**53, -(2**53)),
        *(np.float64(1), np.bool_(True)),
        *(torch.tensor(1.0), torch.tensor(True), torch.tensor([1, 2]), torch.tensor(1, device="meta")),
    ],
    ids=repr,
)
def test_a_step_that_is_no_integer_is_refused_before_anything_is_compared(run: Run, step: Any) -> None:
    run.publish(3)
    run.train()
    before = list(run.store.list())
    with pytest.raises(UsageError, match="step"):
        run.publisher.publish_patch(step)
    assert list(run.store.list()) == before
    assert run.publish(4).kind == "delta"
    assert_same_bits(newest(run.store), served(run.model))


@pytest.mark.parametrize("step", [7, np.int32(7), np.uint64(7), torch.tensor(7)], ids=repr)
def test_a_step_may_be_of_any_integer_type(run: Run, step: Any) -> None:
    manifest = run.publish(step)
    assert type(manifest.step) is int
    assert history.read_manifest(run.store, 0) == manifest and manifest.step == 7
    assert verify(run.store).step == 7


def test_a_step_may_be_negative(run: Run) -> None:
    run.publish(-1)
    assert verify(run.store).step == -1


@pytest.mark.parametrize("dtype", ["float16", "torch.float16", "half", torch.float16])
def test_a_dtype_may_be_given_by_its_name(store: MemoryStore, dtype: Any) -> None:
    model = {"w": torch.randn(9)}
    with Publisher(store, model, dtype=dtype) as publisher:
        publisher.publish_patch(0).result()
    assert_same_bits(newest(store), served(model, torch.float16))


def test_a_store_may_be_given_by_its_path_or_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(FolderStore, "close", lambda self: closed.append(self.url))
    model = {"w": torch.randn(9)}
    for place in (tmp_path / "a", str(tmp_path / "b"), f"file://{tmp_path}/c"):
        path = str(place).removeprefix("file://")
        with Publisher(place, model) as publisher:
            publisher.publish_patch(0).result()
            assert closed == []
        assert closed == [path]
        assert verify(place).version == 0
        replay(place, out=tmp_path / f"out-{Path(path).name}")
        assert closed == [path] * 3
        tensors: dict[str, torch.Tensor] = {}
        follower = Replica(place, tensors)
        follower.update()
        assert closed == [path] * 3
        follower.close()
        assert closed == [path] * 4
        assert_same_bits(tensors, served(model))
        closed.clear()


def test_a_store_that_a_publisher_opened_is_closed_where_opening_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    monkeypatch.setattr(FolderStore, "close", lambda self: closed.append(self.url))
    threads = set(threading.enumerate())
    with pytest.raises(ResumeMismatch):
        Publisher(tmp_path, {"w": torch.zeros(3)}, resume=True)
    with pytest.raises(VersionNotFound):
        Replica(tmp_path, {})
    assert closed == [str(tmp_path)] * 2
    assert not set(threading.enumerate()) - threads


def test_a_store_that_the_caller_opened_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(FolderStore, "close", lambda self: closed.append(self.url))
    store = FolderStore(tmp_path)
    with Publisher(store, {"w": torch.zeros(3)}) as publisher:
        publisher.publish_patch(0)
    verify(store)
    Replica(store, {}).close()
    assert closed == []


@pytest.mark.parametrize(
    "wrong", [None, 3, {"w": torch.zeros(3)}, torch.nn.Linear(2, 2), b"/tmp/x"], ids=type
)
def test_what_is_no_store_is_refused(tmp_path: Path, wrong: Any) -> None:
    for use in (
        lambda: Publisher(wrong, {"w": torch.zeros(3)}),
        lambda: Replica(wrong, {}),
        lambda: verify(wrong),
        lambda: replay(wrong, out=tmp_path / "out"),
    ):
        with pytest.raises(UsageError, match=r"URL.*open_store"):
            use()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "it is empty"),
        ("a\nb", "control character"),
        ("__metadata__", "safetensors keeps"),
        ("\x7f", None),
        ("\ud800", None),
    ],
)
def test_a_name_that_no_reader_takes_is_refused_before_a_run_is_created(
    store: MemoryStore, name: str, says: str | None
) -> None:
    with pytest.raises(SchemaMismatch, match=says):
        Publisher(store, {"w": torch.zeros(3), name: torch.zeros(3)})
    tied = torch.zeros(3)
    with pytest.raises(SchemaMismatch):
        Publisher(store, {"w": tied, name: tied})
    assert list(store.list()) == []
