"""Tensors that modules make from weights are made again, and stay where they were."""

import pytest
import torch

from patchstore.errors import LoadFailed
from patchstore.tensors import bits
from vllm_plugin.derived import Derived

pytestmark = pytest.mark.vllm


class Attention(torch.nn.Module):
    """Makes two matrices from the weight below it: one a parameter, one a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(4, 6, bias=False)
        self.num_calls = 0
        self.transposes = False
        self.fails = False

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.num_calls += 1
        weight = self.projection.weight.detach()
        self.plain = (weight[:3].T if self.transposes else weight[:3]).to(dtype, copy=True)
        if self.fails:
            raise RuntimeError("made to fail")
        self.made = torch.nn.Parameter((weight[3:] * 2).to(dtype), requires_grad=False)
        self.scale = torch.ones(2)


class Views(Attention):
    """Needs no memory of its own: what it makes are views of the weight."""

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.num_calls += 1
        self.plain = self.projection.weight.data[:3]
        self.made = torch.nn.Parameter(self.projection.weight.data[3:].T, requires_grad=False)


class Model(torch.nn.Module):
    def __init__(self, kind: type[Attention] = Attention) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([kind(), torch.nn.Linear(4, 4), kind()])
        for each in self.attentions:
            refresh(each)

    @property
    def attentions(self) -> list[Attention]:
        return [self.layers[0], self.layers[2]]


def refresh(module: torch.nn.Module) -> None:
    module.process_weights_after_loading(torch.bfloat16)


def tensors(model: Model) -> list[torch.Tensor]:
    return [tensor for each in model.attentions for tensor in (each.plain, each.made)]


@pytest.fixture
def model() -> Model:
    return Model()


def change(model: Model) -> None:
    with torch.no_grad():
        for each in model.attentions:
            each.projection.weight.mul_(3)


def test_they_are_known_by_name_and_vectors_are_none_of_them(model):
    names = {f"layers.{layer}.{name}" for layer in (0, 2) for name in ("plain", "made")}
    assert Derived([model], refresh).names == names
    # Of several models, and of a module that is a model itself.
    assert Derived([model, model.attentions[0]], refresh).names == names | {"plain", "made"}


@pytest.mark.parametrize("kind", [Attention, Views])
def test_they_follow_their_weights_without_moving(kind):
    model = Model(kind)
    derived = Derived([model], refresh)
    objects, places = tensors(model), [each.data_ptr() for each in tensors(model)]
    change(model)
    expected = Model(kind)
    expected.load_state_dict(model.state_dict(), strict=False)
    for each in expected.attentions:
        refresh(each)

    derived.refresh()

    for now, before, place, goal in zip(tensors(model), objects, places, tensors(expected), strict=True):
        assert now.data_ptr() == place
        assert torch.equal(bits(before), bits(goal))
        assert torch.equal(bits(now), bits(goal))


def test_modules_that_made_nothing_are_left_alone():
    bare = Attention()
    assert Derived([bare], refresh).names == frozenset()
    Derived([bare], refresh).refresh()
    assert bare.num_calls == 0


def test_another_shape_is_refused_and_nothing_has_moved(model):
    derived = Derived([model], refresh)
    objects = tensors(model)
    change(model)
    model.attentions[1].transposes = True
    with pytest.raises(LoadFailed, match=r"Attention\.plain was \(3, 4\) .* and is \(4, 3\)"):
        derived.refresh()
    assert all(now is then for now, then in zip(tensors(model), objects, strict=True))

    model.attentions[1].transposes = False
    derived.refresh()
    assert all(now is then for now, then in zip(tensors(model), objects, strict=True))
    assert torch.equal(objects[2], model.attentions[1].projection.weight[:3].bfloat16())


def test_a_failure_halfway_moves_nothing(model):
    derived = Derived([model], refresh)
    objects = tensors(model)
    model.attentions[0].fails = True
    with pytest.raises(RuntimeError, match="made to fail"):
        derived.refresh()
    assert all(now is then for now, then in zip(tensors(model), objects, strict=True))


class Cached(torch.nn.Module):
    """Makes nothing from weights, but has what vLLM gives it once it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.kv_cache = torch.zeros(2, 3, 4)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.num_calls += 1


def test_a_layer_that_only_has_its_cache_is_left_alone():
    layer = Cached()
    derived = Derived([torch.nn.Sequential(layer)], refresh)
    derived.refresh()
    assert (derived.names, layer.num_calls) == (frozenset(), 0)
