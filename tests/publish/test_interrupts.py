"""A publisher that is interrupted loses no change, and goes on."""

from itertools import count
from typing import Any

import pytest
import torch

from patchstore import Publisher, verify
from patchstore.errors import SchemaMismatch
from patchstore.stores.memory import MemoryStore
from patchstore.tensors import columns
from tests.support.interrupts import Interrupter
from tests.support.weights import Run, assert_same_bits, newest, served


def test_a_comparison_that_fails_makes_the_next_version_whole(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish()
    run.train()
    changed = columns.changed

    calls = count()

    def out_of_memory(*args: Any) -> columns.Group:
        if next(calls):
            raise RuntimeError("out of memory")
        return changed(*args)

    with monkeypatch.context() as patched:
        patched.setattr(columns, "changed", out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            run.publish()
    assert run.publish().kind == "delta"
    assert_same_bits(newest(run.store), served(run.model))


@pytest.mark.parametrize("encoding", ["gap", "context"])
@pytest.mark.parametrize("anchor_every", [1, 3])
@pytest.mark.parametrize("stride", [61, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_an_interrupt_at_any_point_loses_nothing_and_stops_nothing(
    encoding: str, anchor_every: int, stride: int
) -> None:
    model, point, step, interrupts = {"w": torch.zeros(64), "v": torch.zeros(8)}, 1, 0, 0
    store = MemoryStore()
    publisher = Publisher(store, model, encoding=encoding, anchor_every=anchor_every, max_pending=1)
    publisher.publish_patch(0).result()
    while True:
        step += 1
        model["w"][step % 64] = step
        if not Interrupter(point).during(publisher.publish_patch, step):
            break
        interrupts += 1
        point += stride
        for _ in range(2):
            model["v"][step % 8] += 1
            manifest = publisher.publish_patch(step).result(timeout_s=30)
        if step % 25 == 0:
            assert_same_bits(newest(store), served(model))
            assert manifest.anchor is None or anchor_every == 1 or manifest.delta is not None
    publisher.close()
    assert interrupts * stride > 600
    assert_same_bits(newest(store), served(model))
    for version in range(0, manifest.version + 1, 10):
        verify(store, version)


def test_an_interrupt_admits_no_tensors_that_were_not_checked() -> None:
    model, interrupts = {"a": torch.ones(3, 4), "b": torch.ones(2)}, 0
    with Publisher(MemoryStore(), model) as publisher:
        publisher.publish_patch(0).result()
        model["a"] = torch.ones(4, 3)
        while True:
            at = Interrupter(1 + 2 * interrupts, within="sources/weights.py")
            try:
                assert at.during(publisher.publish_patch, 1)
            except SchemaMismatch:
                break
            interrupts += 1
            with pytest.raises(SchemaMismatch, match=r"'a' was .*, but is"):
                publisher.publish_patch(1)
        assert interrupts > 20


class Decoded(dict[str, torch.Tensor]):
    """Reads its tensors without gradients, as publishers read quantized models and adapters."""

    def items(self) -> Any:
        with torch.no_grad():
            return super().items()


def test_an_interrupt_in_no_grad_leaves_gradients_on(store: MemoryStore) -> None:
    model = Decoded(w=torch.zeros(64), v=torch.zeros(8))
    openings, publishings = count(1), count(1)
    while Interrupter(next(openings), within="grad_mode.py").during(Publisher, MemoryStore(), model):
        pass
    with Publisher(store, model) as publisher:
        while Interrupter(step := next(publishings), within="grad_mode.py").during(
            publisher.publish_patch, step
        ):
            model["w"][step] = step
    assert next(openings) > 12
    assert next(publishings) > 15
    assert_same_bits(newest(store), served(model))


def test_an_interrupt_while_a_result_is_awaited_stops_nothing(store: MemoryStore) -> None:
    model = {"w": torch.zeros(64)}
    with Publisher(store, model, anchor_every=1) as publisher:
        for point in range(1, 200):
            model["w"][0] = point
            publication = publisher.publish_patch(point)
            Interrupter(point).during(publication.result)
            assert publication.result(timeout_s=30).step == point


@pytest.mark.parametrize("stride", [31, pytest.param(11, marks=pytest.mark.exhaustive)])
def test_an_interrupt_while_a_publisher_is_closed_leaves_it_to_be_closed_again(
    store: MemoryStore, stride: int
) -> None:
    model, point = {"w": torch.zeros(64)}, 1
    while True:
        publisher = Publisher(store, model, resume="auto")
        model["w"][0] = point
        publisher.publish_patch(point)
        if not Interrupter(point).during(publisher.close):
            break
        point += stride
        publisher.close()
        assert_same_bits(newest(store), served(model))
    assert point > 100
