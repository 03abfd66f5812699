"""A publisher that is interrupted loses no change, and goes on."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from patchstore import Publisher, verify
from patchstore.publish import pipeline
from patchstore.stores.memory import MemoryStore
from patchstore.tensors import diff
from tests.support.weights import Run, assert_same_bits, newest, served


def test_a_comparison_that_fails_makes_the_next_version_whole(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish()
    run.train()
    changed = diff.changed

    def out_of_memory(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        if new.dim() == 1:
            raise RuntimeError("out of memory")
        return changed(new, old)

    with monkeypatch.context() as patched:
        patched.setattr(diff, "changed", out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            run.publish()
    assert run.publish().kind == "delta"
    assert_same_bits(newest(run.store), served(run.model))


@pytest.mark.parametrize("where", ["Publication", "_Job", "_Stage"])
@pytest.mark.parametrize("anchor_every", [1, 100])
def test_an_interrupt_after_the_comparison_loses_no_change(
    run: Run, monkeypatch: pytest.MonkeyPatch, where: str, anchor_every: int
) -> None:
    run.open(anchor_every=anchor_every)
    run.publish()
    run.train()

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.publish()
    run.train()
    manifest = run.publish()
    assert (manifest.version, manifest.kind) == (1, "anchor" if anchor_every == 1 else "delta")
    assert manifest.delta is not None
    assert_same_bits(newest(run.store), served(run.model))
    run.train()
    assert run.publish().delta is not None
    assert_same_bits(newest(run.store), served(run.model))


class Interrupter:
    """Raises KeyboardInterrupt at the n-th point of a call at which Python might handle a signal."""

    FINELY = (
        "patchstore/publish/publisher.py",
        "patchstore/publish/pipeline.py",
        "patchstore/support/worker.py",
        "threading.py",
        "contextlib.py",
    )

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, frame: FrameType, event: str, argument: object) -> "Interrupter":
        frame.f_trace_opcodes = frame.f_code.co_filename.endswith(self.FINELY)
        # Not where a generator is left: that may be its destructor, out of which nothing is raised.
        if event in {"opcode", "line"}:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def during(self, call: Callable[..., object], *arguments: object) -> bool:
        """Make a call; return whether it was interrupted."""
        sys.settrace(self)
        try:
            call(*arguments)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


@pytest.mark.exhaustive
@pytest.mark.parametrize("encoding", ["gap", "context"])
@pytest.mark.parametrize("anchor_every", [1, 3])
def test_an_interrupt_at_any_point_loses_nothing_and_stops_nothing(encoding: str, anchor_every: int) -> None:
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
        point += 3
        for _ in range(2):
            model["v"][step % 8] += 1
            manifest = publisher.publish_patch(step).result(timeout_s=30)
        if step % 25 == 0:
            assert_same_bits(newest(store), served(model))
            assert manifest.anchor is None or anchor_every == 1 or manifest.delta is not None
    publisher.close()
    assert interrupts > 200
    assert_same_bits(newest(store), served(model))
    for version in range(0, manifest.version + 1, 10):
        verify(store, version)


def test_an_interrupt_while_a_result_is_awaited_stops_nothing(store: MemoryStore) -> None:
    model = {"w": torch.zeros(64)}
    with Publisher(store, model, anchor_every=1) as publisher:
        for point in range(1, 200):
            model["w"][0] = point
            publication = publisher.publish_patch(point)
            Interrupter(point).during(publication.result)
            assert publication.result(timeout_s=30).step == point


def test_an_interrupt_while_a_publisher_is_closed_leaves_it_to_be_closed_again(store: MemoryStore) -> None:
    model, point = {"w": torch.zeros(64)}, 1
    while True:
        publisher = Publisher(store, model, resume="auto")
        model["w"][0] = point
        publisher.publish_patch(point)
        if not Interrupter(point).during(publisher.close):
            break
        point += 11
        publisher.close()
        assert_same_bits(newest(store), served(model))
    assert point > 100
