"""Sources that yield tensors one after the other."""

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchstore import Publisher
from patchstore.errors import PublishFailed, SchemaMismatch, UsageError
from patchstore.publish.snapshot import Place
from patchstore.stores.memory import MemoryStore
from tests.support.small_models import assert_refused, layers, published
from tests.support.weights import assert_same_bits, newest, served


class Trainer:
    """Weights that a stream yields copies of."""

    def __init__(self, num: int = 6) -> None:
        torch.manual_seed(0)
        self.weights: dict[str, Any] = {f"layer.{i}": torch.randn(300 + i) for i in range(num)}
        self.weights["ids"] = torch.arange(7)
        self.passes = 0
        self.most_alive = 0

    def step(self) -> None:
        for tensor in self.weights.values():
            tensor[::3] += 1

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        alive: list[Any] = []
        # In another order each time.
        names = list(self.weights) if self.passes % 2 else list(reversed(self.weights))
        for name in names:
            # None is what a test puts there.
            copy = self.weights[name] if self.weights[name] is None else self.weights[name].clone()
            alive.append(weakref.ref(copy) if copy is not None else lambda: None)
            self.most_alive = max(self.most_alive, sum(ref() is not None for ref in alive))
            yield name, copy
            del copy


@pytest.mark.parametrize("place", ["device", "host"])
def test_each_version_is_what_the_stream_yielded(store: MemoryStore, place: Place) -> None:
    trainer = Trainer()
    with Publisher(store, trainer, snapshot=place, anchor_every=3) as publisher:
        assert trainer.passes == 2
        for step in range(5):
            manifest = publisher.publish_patch(step).result()
            assert trainer.passes == 3 + step
            assert_same_bits(newest(store), served(trainer.weights))
            assert manifest.kind == ("anchor" if step % 3 == 0 else "delta")
            trainer.step()


def test_one_tensor_is_held_at_a_time(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from patchstore.publish import snapshot

    # Small tensors are compared together, and these stand for large ones.
    monkeypatch.setattr(snapshot, "TOGETHER", 1)
    trainer = Trainer(num=20)
    with Publisher(store, trainer) as publisher:
        for step in range(3):
            publisher.publish_patch(step).result()
            trainer.step()
    gc.collect()
    assert trainer.most_alive <= 3


def test_a_run_goes_on_from_what_a_stream_yields(store: MemoryStore) -> None:
    trainer = Trainer()
    with Publisher(store, trainer) as publisher:
        publisher.publish_patch(0).result()
    trainer.passes = 0
    with Publisher(store, trainer, resume=True) as publisher:
        assert trainer.passes == 2
        trainer.weights["layer.3"][5] = 2.5
        delta = publisher.publish_patch(1).result().delta
    assert delta is not None and delta.num_changed == 1


def test_a_stream_that_yields_something_else_publishes_nothing(store: MemoryStore) -> None:
    trainer = Trainer()
    good = dict(trainer.weights)
    with Publisher(store, trainer) as publisher:
        publisher.publish_patch(0).result()
        for change, says in (
            ({"layer.1": torch.ones(4)}, r"'layer.1' had the shape \[301\] .*but is \[4\] now"),
            ({"layer.1": torch.arange(301)}, "'layer.1' was .*BF16.* but is .*I64"),
            ({"new": torch.ones(4)}, "'new' was not there"),
            ({"layer.1": None}, "not a tensor but NoneType"),
        ):
            trainer.weights |= change
            with pytest.raises(SchemaMismatch, match=says):
                publisher.publish_patch(1)
            trainer.weights = dict(good)
        del trainer.weights["layer.1"]
        with pytest.raises(SchemaMismatch, match=r"'layer\.1' is gone"):
            publisher.publish_patch(1)
        trainer.weights = dict(good)
        trainer.weights["layer.1"] = good["layer.1"] + 1
        assert publisher.publish_patch(1).result().kind == "delta"
    assert_same_bits(newest(store), served(trainer.weights))


def test_a_stream_that_fails_publishes_nothing(store: MemoryStore) -> None:
    trainer, broken = Trainer(), [False]

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(trainer()):
            if broken[0] and number == 3:
                raise RuntimeError("a rank is gone")
            yield item

    with Publisher(store, source) as publisher:
        publisher.publish_patch(0).result()
        trainer.step()
        broken[0] = True
        with pytest.raises(RuntimeError, match="a rank is gone"):
            publisher.publish_patch(1)
        broken[0] = False
        assert publisher.publish_patch(1).result().kind == "delta"
    assert_same_bits(newest(store), served(trainer.weights))


def test_a_whole_model_after_a_failure_is_one_pass(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    with Publisher(store, trainer) as publisher:
        publisher.publish_patch(0).result()
        trainer.step()
        with monkeypatch.context() as patched:
            patched.setattr(store, "upload", lambda *args: (_ for _ in ()).throw(OSError("full")))
            publication = publisher.publish_patch(1)
            with pytest.raises(PublishFailed):
                publication.result()
        before = trainer.passes
        assert publisher.publish_patch(2).result().kind == "anchor"
        assert trainer.passes == before + 1
    assert_same_bits(newest(store), served(trainer.weights))


def test_a_function_may_return_a_mapping_or_a_list(store: MemoryStore) -> None:
    model = layers()
    assert_same_bits(published(store, model.state_dict), served(dict(model.state_dict())))
    found = published(MemoryStore(), lambda: list(model.named_parameters()))
    assert_same_bits(found, served(dict(model.state_dict())))


def test_a_function_that_returns_a_mapping_is_called_once_for_each_publication(store: MemoryStore) -> None:
    calls = []

    def gathered() -> dict[str, torch.Tensor]:
        calls.append(1)
        return {"w": torch.full((3,), float(len(calls)))}

    with Publisher(store, gathered) as publisher:
        assert len(calls) == 1
        publisher.publish_patch(0).result()
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("returned", "error", "says"),
    [
        (None, UsageError, "must return names and tensors, but returned NoneType"),
        (torch.ones(3), UsageError, "returned torch.Tensor"),
        ("weights", UsageError, "returned str"),
        ([torch.ones(3)], SchemaMismatch, "no pair of a name and a tensor"),
        ([("w", W := torch.ones(3)), ("w", W)], SchemaMismatch, "yields 'w' twice"),
        ([("base_model.model.w", W)], SchemaMismatch, "merge_and_unload"),
        ([], SchemaMismatch, "no tensors"),
    ],
)
def test_what_is_no_stream_is_refused(
    store: MemoryStore, returned: Any, error: type[Exception], says: str
) -> None:
    assert_refused(store, lambda: returned, says, error)


class WeightSource:
    """As vLLM's sources are."""

    def __init__(self, model: torch.nn.Module, rows: int | None = None) -> None:
        self._model, self._rows = model, rows

    def metadata(self) -> list[Any]:
        return [
            SimpleNamespace(name=name, shape=tuple(each.shape))
            for name, each in self._model.named_parameters()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, each in self._model.named_parameters():
            yield name, each[: self._rows]


def test_a_weight_source_of_vllm_is_a_stream(store: MemoryStore) -> None:
    model = layers()
    found = published(store, WeightSource(model))
    assert_same_bits(found, served(dict(model.named_parameters())))


def test_a_weight_source_of_shards_is_refused(store: MemoryStore) -> None:
    assert_refused(store, WeightSource(layers(), rows=2), "for a shard, metadata must say which")


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_the_module_source_of_vllm(store: MemoryStore) -> None:
    base = pytest.importorskip("vllm.distributed.weight_transfer.base")
    model = layers()
    assert_same_bits(published(store, base.ModuleSource(model)), served(dict(model.named_parameters())))
