"""Inference mode, gradients and default devices or dtypes change nothing that is published."""

from pathlib import Path

import pytest
import torch

from patchstore import Publisher, Replica, replay, verify
from patchstore.codec import CHOICES, ENCODINGS
from patchstore.ops.compact.service import Compactor
from patchstore.stores.memory import MemoryStore
from tests.support.weights import Run, assert_same_bits, newest, served


def test_publishing_in_inference_mode_or_without_gradients_changes_nothing(store: MemoryStore) -> None:
    model = torch.nn.Linear(8, 8)
    modes = [torch.inference_mode, torch.enable_grad, torch.no_grad, torch.inference_mode, torch.enable_grad]
    for encoding in CHOICES:
        for opened_in in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            store = MemoryStore()
            with opened_in():
                publisher = Publisher(store, model, encoding=encoding, anchor_every=3)
            tensors: dict[str, torch.Tensor] = {}
            with opened_in():
                follower = Replica(store, tensors)
            for step, mode in enumerate(modes):
                with torch.no_grad():
                    model.weight[step] += 1
                with mode():
                    publisher.publish_patch(step).result()
                with modes[-1 - step]():
                    follower.update()
                assert_same_bits(tensors, served(model.state_dict()))
            publisher.close()


def test_weights_that_were_made_in_inference_mode_are_published_and_followed(store: MemoryStore) -> None:
    with torch.inference_mode():
        model = {"w": torch.randn(64)}
        tensors = {"w": torch.zeros(64, dtype=torch.bfloat16)}
    publisher, follower = Publisher(store, model), Replica(store, tensors)
    for step in range(3):
        publisher.publish_patch(step).result()
        follower.update()
        assert_same_bits(tensors, served(model))
        with torch.inference_mode():
            model["w"][step] = step + 0.5
    publisher.close()


@pytest.mark.parametrize("encoding", CHOICES)
@pytest.mark.parametrize("place", ["device", "host"])
def test_another_default_device_or_dtype_changes_nothing(
    store: MemoryStore, tmp_path: Path, encoding: str, place: str
) -> None:
    run = Run(store)
    tensors: dict[str, torch.Tensor] = {}
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            run.open(encoding=encoding, snapshot=place)
            follower = Replica(store, tensors)
        for step in range(4):
            with torch.device("meta"):
                run.publish(step)
                run.model["scale"].mul_(1.5)
                run.model["layers.0.norm.weight"][step] = 2.5
                run.publish(step)
                follower.update()
            assert_same_bits(tensors, served(run.model))
            run.train()
        with torch.device("meta"):
            assert_same_bits(newest(store), run.history[max(run.history)])
            verify(store)
            verify(store, 3)
            replay(store, out=tmp_path / "out")
    finally:
        torch.set_default_dtype(before)
        run.close()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_another_default_device_changes_nothing_that_is_encoded_anew(
    store: MemoryStore, tmp_path: Path, encoding: str
) -> None:
    # On the caller's thread, where a publisher encodes on one of its own.
    run = Run(store)
    run.open(anchor_every=100)
    run.publish_versions(5)
    run.close()
    with torch.device("meta"):
        (done,) = Compactor(store, encoding=encoding, anchor_every=4, scratch=tmp_path).compact()
    assert done.added
    verify(store, 4)
    assert_same_bits(newest(store), run.history[4])
