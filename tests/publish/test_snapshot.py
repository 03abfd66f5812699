"""The copy of the weights that the next version is compared with."""

import sys
import threading

import pytest
import torch

from patchstore import Publisher, Replica
from patchstore.errors import UsageError
from patchstore.publish import snapshot
from patchstore.stores.memory import MemoryStore
from patchstore.tensors import columns
from tests.support.copies import before
from tests.support.small_models import assert_refused
from tests.support.weights import Run, State, assert_same_bits, newest, served


def test_the_snapshot_does_not_move_while_an_anchor_is_uploaded_from_it(store: MemoryStore) -> None:
    gate, uploading = threading.Event(), threading.Event()
    waiting = before(store, "upload", "*", lambda: uploading.set() or gate.wait(30))
    model = {"w": torch.zeros(1000)}
    publisher = Publisher(waiting, model, max_pending=5)
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
    for number, publication in enumerate((first, second)):
        tensors: State = {}
        Replica(store, tensors).update(publication.result().version)
        assert_same_bits(tensors, {"w": torch.full((1000,), float(number)).bfloat16()})
    assert_same_bits(newest(store), served(model))


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_snapshot_that_does_not_fit_is_refused_before_anything_is_written(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, place: snapshot.Place
) -> None:
    weights = {"w": torch.zeros(1000)}
    empty = torch.empty

    def full(shape: object, *args: object, **options: object) -> torch.Tensor:
        if shape in (1000, (1000,)) and options.get("device") != "meta":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(shape, *args, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", full)
    assert_refused(store, weights, f'snapshot="{place}" needs 2,000 bytes', UsageError, snapshot=place)


def test_kernels_are_not_needed_and_not_used_where_they_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.device("cuda", 0), torch.device("cuda", 1)
    assert not snapshot.have_kernels({torch.device("cpu")})
    assert not snapshot.have_kernels({one, torch.device("cpu")})
    assert not snapshot.have_kernels({one, other})
    assert not snapshot.have_kernels(set())
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "patchstore.kernels.compare", raising=False)
    monkeypatch.delattr("patchstore.kernels.compare", raising=False)
    assert not snapshot.have_kernels({one})


def test_what_was_published_whole_was_not_compared(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.open(anchor_every=100)

    def compared(*args: object) -> None:
        raise AssertionError("compared")

    with monkeypatch.context() as patched:
        patched.setattr(columns, "changed", compared)
        assert run.publish().delta is None
    assert_same_bits(newest(run.store), served(run.model))
