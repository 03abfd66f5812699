"""When the garbage collector may run during a publication."""

import gc

import pytest
import torch

from patchstore import Publisher
from patchstore.publish.snapshot import PlainSnapshot
from patchstore.stores.memory import MemoryStore


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether it may, by the step of a publication that looked last."""
    found: dict[str, bool] = {}

    def look(step: str) -> None:
        work = getattr(PlainSnapshot, step)

        def looking(*args):
            found[step] = gc.isenabled()
            return work(*args)

        monkeypatch.setattr(PlainSnapshot, step, looking)

    look("compare")
    look("encode")
    return found


def published(source, tensor: torch.Tensor) -> None:
    with Publisher(MemoryStore(), source) as publisher:
        publisher.publish_patch(0).result()
        tensor[3] += 1
        publisher.publish_patch(1).result()


def test_it_waits_while_tensors_are_compared_and_encoded(enabled: dict[str, bool]):
    tensor = torch.randn(64, 64)
    published({"weight": tensor}, tensor)
    assert enabled == {"compare": False, "encode": False}
    assert gc.isenabled()


def test_it_may_run_while_the_caller_yields_tensors(enabled: dict[str, bool]):
    tensor = torch.randn(64, 64)
    published(lambda: iter([("weight", tensor)]), tensor)
    assert enabled == {"compare": True, "encode": False}
    assert gc.isenabled()


def test_it_stays_off_where_the_trainer_turned_it_off(enabled: dict[str, bool]):
    tensor = torch.randn(64, 64)
    gc.disable()
    try:
        published({"weight": tensor}, tensor)
        assert not gc.isenabled()
    finally:
        gc.enable()
