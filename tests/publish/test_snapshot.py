"""The copy of the weights that the next version is compared with."""

import errno
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from patchstore import Publisher, Replica
from patchstore.encodings import CHOICES
from patchstore.errors import UsageError
from patchstore.publish import snapshot
from patchstore.stores.memory import MemoryStore
from patchstore.tensors import diff
from tests.support.weights import Run, assert_same_bits, newest, served


def test_the_snapshot_does_not_move_while_an_anchor_is_uploaded_from_it() -> None:
    gate, uploading = threading.Event(), threading.Event()

    class Waiting(MemoryStore):
        def upload(self, key, chunks):  # type: ignore[no-untyped-def]
            uploading.set()
            gate.wait(30)
            super().upload(key, chunks)

    store, model = Waiting(), {"w": torch.zeros(1000)}
    publisher = Publisher(store, model, max_pending=5)
    first = publisher.publish_patch(0)
    uploading.wait(30)
    model["w"].fill_(1.0)
    # Compared at once; its changes are applied to the snapshot when the anchor is stored.
    second = publisher.publish_patch(1)
    model["w"].fill_(2.0)
    third = threading.Thread(target=publisher.publish_patch, args=(2,))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    gate.set()
    third.join(30)
    publisher.close()
    version_1: dict[str, torch.Tensor] = {}
    Replica(store, version_1).update(second.result().version)
    assert_same_bits(version_1, {"w": torch.ones(1000, dtype=torch.bfloat16)})
    version_0: dict[str, torch.Tensor] = {}
    Replica(store, version_0).update(first.result().version)
    assert_same_bits(version_0, {"w": torch.zeros(1000, dtype=torch.bfloat16)})
    assert_same_bits(newest(store), served(model))


@pytest.mark.parametrize("place", ["device", "host", "file"])
@pytest.mark.parametrize("encoding", CHOICES)
def test_every_snapshot_publishes_the_same(
    store: MemoryStore, tmp_path: Path, place: str, encoding: str
) -> None:
    run = Run(store)
    run.open(snapshot=tmp_path if place == "file" else place, encoding=encoding)
    kinds = [manifest.kind for manifest in run.publish_versions(6)]
    assert kinds == ["anchor", "delta", "delta", "delta", "anchor", "delta"]
    assert_same_bits(newest(store), run.history[5])
    run.close()


def test_a_snapshot_in_a_file_leaves_no_file_behind(store: MemoryStore, tmp_path: Path) -> None:
    with Publisher(store, {"w": torch.zeros(1000)}, snapshot=tmp_path):
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["disk", "/tmp", Path("/nonexistent"), None])
def test_a_place_that_no_snapshot_can_have_is_refused(store: MemoryStore, place: object) -> None:
    with pytest.raises(UsageError, match="snapshot"):
        Publisher(store, {"w": torch.zeros(3)}, snapshot=place)  # type: ignore[arg-type]
    assert list(store.list()) == []


def test_a_snapshot_that_does_not_fit_is_refused_before_anything_is_written(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UsageError, match=r"snapshot=.* 2,000 bytes"):
        Publisher(store, {"w": torch.zeros(1000)}, snapshot=tmp_path)
    assert list(store.list()) == list(tmp_path.iterdir()) == []


def test_kernels_are_not_needed_and_not_used_where_they_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.device("cuda", 0), torch.device("cuda", 1)
    assert snapshot.kernels_for({torch.device("cpu")}) is None
    assert snapshot.kernels_for({one, torch.device("cpu")}) is None
    assert snapshot.kernels_for({one, other}) is None
    assert snapshot.kernels_for(set()) is None
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "patchstore.kernels.compare", raising=False)
    monkeypatch.delattr("patchstore.kernels.compare", raising=False)
    assert snapshot.kernels_for({one}) is None


def test_what_was_published_whole_was_not_compared(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.open(anchor_every=100)

    def compared(*args: object) -> None:
        raise AssertionError("compared")

    with monkeypatch.context() as patched:
        patched.setattr(diff, "changed", compared)
        assert run.publish().delta is None
    assert_same_bits(newest(run.store), served(run.model))
