"""When the garbage collector may run during a publication."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from patchstore import Publisher
from patchstore.publish import snapshot
from patchstore.stores.memory import MemoryStore
from tests.support.interpreted import DEVICE, kernels


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bool]]:
    """With kernels: whether it may, by the step of a publication that looked last."""
    device, found = kernels("patchstore.publish.snapshot_gpu"), dict[str, bool]()
    monkeypatch.setattr(snapshot, "have_kernels", lambda devices: True)
    look(monkeypatch, device.compare, "compare", found)
    look(monkeypatch, device.Coder, "delta", found)
    assert gc.isenabled()
    yield found
    gc.enable()


def look(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, found: dict[str, bool]) -> None:
    work = getattr(owner, name)

    def looking(*args: Any, **more: Any) -> Any:
        found[name] = gc.isenabled()
        return work(*args, **more)

    monkeypatch.setattr(owner, name, looking)


def publish(source: Any, tensor: torch.Tensor) -> None:
    with Publisher(MemoryStore(), source, encoding="context") as publisher:
        publisher.publish_patch(0).result()
        tensor[3] += 1
        publisher.publish_patch(1).result()


@pytest.fixture
def tensor() -> torch.Tensor:
    return torch.randn(16, 20, device=DEVICE)


def test_it_waits_while_kernels_compare_and_encode(enabled: dict[str, bool], tensor: torch.Tensor) -> None:
    publish({"weight": tensor}, tensor)
    assert enabled == {"compare": False, "delta": False}
    assert gc.isenabled()


def test_it_may_run_while_a_caller_yields_tensors(enabled: dict[str, bool], tensor: torch.Tensor) -> None:
    publish(lambda: iter([("weight", tensor)]), tensor)
    assert enabled == {"compare": True, "delta": False}
    assert gc.isenabled()


def test_it_stays_off_where_the_trainer_turned_it_off(enabled: dict[str, bool], tensor: torch.Tensor) -> None:
    gc.disable()
    publish({"weight": tensor}, tensor)
    assert enabled == {"compare": False, "delta": False}
    assert not gc.isenabled()


def test_it_may_run_on_a_cpu_where_both_can_take_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, bool] = {}
    for step in ("compare", "encode"):
        look(monkeypatch, snapshot.PlainSnapshot, step, found)
    tensor = torch.randn(16, 20)
    publish({"weight": tensor}, tensor)
    assert found == {"compare": True, "encode": True}


def test_copies_take_a_part_of_the_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = kernels("patchstore.publish.snapshot_gpu")

    class Properties:
        total_memory = 24 << 30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    few = device.copied_bytes(torch.device("cuda:0"))
    assert device.ROOMS * few <= Properties.total_memory / 20 < device.ROOMS * few * 1.01
    Properties.total_memory = 1 << 40
    assert device.copied_bytes(torch.device("cuda:0")) == 1 << 30
