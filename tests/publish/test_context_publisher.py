"""Versions in encoding `context`: coded against the parent, exact for everything that can be stored."""

import json
from collections import Counter
from threading import Thread
from types import ModuleType
from typing import Any

import pytest
import torch

from patchstore import Publisher, Replica
from patchstore.bucket.records import PACKED
from patchstore.codec import CHOICES
from patchstore.codec import delta as delta_module
from patchstore.codec import encoding as encoding_named
from patchstore.codec.tensor_file import open_buffer
from patchstore.errors import PublishFailed, StateMismatch, UnsupportedFormat
from patchstore.publish.snapshot import PlainSnapshot
from patchstore.read import deltas
from patchstore.stores.memory import MemoryStore
from patchstore.tensors import elements
from patchstore.tensors.bits import TORCH_DTYPES, bits
from tests.support.weights import Run, State, assert_same_bits, newest, random_bits, served

DENSITIES = (0.0, 0.0003, 0.01, 0.2, 0.9, 1.0)


@pytest.mark.parametrize("encoding", ["context", "auto"])
def test_every_dtype_shape_and_density_arrives(store: MemoryStore, encoding: str) -> None:
    shapes = [(), (1,), (16,), (7,), (48, 64), (33, 50), (3, 32, 48), (0, 4)]
    model = {
        f"{name}.{'x'.join(map(str, shape))}": random_bits(dtype, shape)
        for name, dtype in TORCH_DTYPES.items()
        for shape in shapes
        if shape or name not in PACKED
    }
    held: State = {}
    with Publisher(store, model, dtype=None, encoding=encoding, anchor_every=100) as publisher:
        publisher.publish_patch(0).result()
        follower = Replica(store, held)
        follower.update()
        for step, density in enumerate(DENSITIES):
            for tensor in model.values():
                chosen = torch.rand(tensor.shape) < density
                new = bits(random_bits(tensor.dtype, tuple(tensor.shape), 1 + step))
                bits(tensor)[chosen.view(-1)] = new[chosen.view(-1)]
            manifest = publisher.publish_patch(step).result()
            # Integers of which most change take more as changes than whole.
            assert manifest.delta is not None or (encoding == "auto" and density >= 0.9)
            follower.update()
            assert_same_bits(held, model)
    assert_same_bits(newest(store), model)


def test_what_cannot_be_coded_alone_is_published_as_gaps(store: MemoryStore) -> None:
    model = {"counts": torch.arange(100_000)}
    with Publisher(store, model, encoding="auto") as publisher:
        publisher.publish_patch(0).result()
        model["counts"][[0, 99_999]] += 1
        delta = publisher.publish_patch(1).result().delta
    assert delta is not None
    assert delta.encoding == "gap"
    assert_same_bits(newest(store), model)


def test_a_run_goes_on_in_another_encoding(run: Run) -> None:
    tensors: State = {}
    for encoding in CHOICES:
        run.open(encoding=encoding, resume=bool(run.history), anchor_every=100)
        run.train()
        run.publish()
        run.close()
        Replica(run.store, tensors).update()
        assert_same_bits(tensors, run.history[max(run.history)])


def test_a_follower_whose_tensors_were_written_to_starts_from_an_anchor(run: Run) -> None:
    run.open(encoding="context", anchor_every=100)
    run.publish_versions(3)
    tensors: State = {}
    follower = Replica(run.store, tensors)
    follower.update(1)
    bits(tensors["embed.weight"])[5, ...] ^= 1 << 9
    with pytest.raises(StateMismatch, match="something else wrote"):
        follower.stage(2)
    assert follower.held == 1
    follower.update(2)
    assert_same_bits(tensors, run.history[2])


def test_a_publisher_whose_snapshot_was_written_to_publishes_an_anchor(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[PlainSnapshot] = []

    class Known(PlainSnapshot):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr("patchstore.publish.snapshot.PlainSnapshot", Known)
    publisher = run.open(encoding="context", anchor_every=100)
    run.publish_versions(2)
    (snapshot,) = made
    bits(snapshot.tensors["embed.weight"])[7] ^= 1
    with pytest.raises(PublishFailed, match="snapshot no longer has the weights of the version before"):
        publisher.publish_patch(2).result()
    manifest = run.publish()
    assert manifest.kind == "anchor"
    assert_same_bits(newest(run.store), served(run.model))


def test_what_cannot_be_coded_for_lack_of_memory_is_followed_by_an_anchor(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: object) -> None:
        raise MemoryError("made to fail")

    publisher = run.open(encoding="context", anchor_every=3)
    run.publish()
    with monkeypatch.context() as patched:
        patched.setattr(delta_module, "encode_all", failing)
        run.train()
        with pytest.raises(PublishFailed, match="could not be encoded"):
            publisher.publish_patch(1).result()
        run.train()
        assert (run.publish().kind, run.publish().num_bytes) == ("anchor", 0)
        run.train()
        with pytest.raises(PublishFailed):
            publisher.publish_patch(2).result()
    run.train()
    assert run.publish().kind == "anchor"
    run.train()
    assert run.publish().kind == "delta"
    assert_same_bits(newest(run.store), served(run.model))
    assert len({key.rpartition("/")[0] for key in run.store.list("anchors/")}) == 3


def test_an_anchor_whose_delta_cannot_be_coded_has_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object) -> None:
        raise MemoryError("made to fail")

    run.open(encoding="context", anchor_every=2)
    run.publish_versions(2)
    monkeypatch.setattr(delta_module, "encode_all", failing)
    manifest = run.publish()
    assert manifest.anchor is not None
    assert manifest.delta is None
    assert_same_bits(newest(run.store), served(run.model))


def test_a_publication_starts_no_thread(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    run.open(encoding="context", anchor_every=100)
    run.publish_versions(2)
    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", failing)
        assert run.publish().kind == "delta"
    assert_same_bits(newest(run.store), served(run.model))


def test_what_has_few_tiles_or_no_exponents_is_stored_as_gaps_beside_what_is_coded(
    store: MemoryStore,
) -> None:
    model = {"few": torch.randn(251, 257), "many": torch.randn(256, 256), "counts": torch.arange(40)}
    with Publisher(store, model, encoding="context") as publisher:
        publisher.publish_patch(0).result()
        model["few"].mul_(1.5)
        model["many"].mul_(1.5)
        model["counts"][:3] += 1
        delta = publisher.publish_patch(1).result().delta
    assert delta is not None and delta.encoding == "context"
    header, tensors = open_buffer("", bytearray(store.get(delta.payloads[0].key)))
    assert tensors.keys() == {"counts.idx", "counts.val", "few.idx", "few.val", "table", "tiles"}
    assert json.loads(header.metadata["tensors"]).keys() == {"counts", "few"}
    assert_same_bits(newest(store), served(model))


@pytest.mark.parametrize("encoding", ["context", "gap"])
def test_the_work_of_many_small_tensors_is_done_in_few_calls(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    calls: Counter[str] = Counter()

    def count(module: ModuleType, name: str) -> None:
        real = getattr(module, name)

        def counted(*args: object) -> object:
            calls[name] += 1
            return real(*args)

        monkeypatch.setattr(module, name, counted)

    model = {
        f"{number:03d}": torch.randn(4, 5, dtype=(torch.bfloat16, torch.float16)[number % 2])
        for number in range(400)
    }
    with Publisher(store, model, dtype=None, encoding=encoding) as publisher:
        publisher.publish_patch(0).result()
        held: State = {}
        follower = Replica(store, held)
        follower.update()
        for tensor in model.values():
            bits(tensor)[::7] += 1
        for module, name in ((delta_module, "encode_all"), (deltas, "decode_all"), (elements, "sum_each")):
            count(module, name)
        publisher.publish_patch(1).result()
        follower.update()
    assert_same_bits(held, model)
    # A few for each dtype; by themselves, 400 tensors would take 400 and more.
    assert max(calls.values()) <= 20
    assert calls["sum_each"] > 0
    assert (calls["encode_all"] > 0) == (calls["decode_all"] > 0) == (encoding == "context")


def test_no_manifest_may_say_auto() -> None:
    with pytest.raises(UnsupportedFormat):
        encoding_named("auto")
