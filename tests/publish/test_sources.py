"""What a trainer may hand to a publisher, what of it is published, and what is refused."""

import warnings

import pytest
import torch
from small_models import layers, published, quantised_layers
from torch.nn.utils import prune

from patchstore import Publisher, Replica
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.stores.memory import MemoryStore
from tests.support.weights import State, assert_same_bits, served


def averaged() -> torch.nn.Module:
    return torch.optim.swa_utils.AveragedModel(layers())


def pruned() -> torch.nn.Module:
    model = layers()
    prune.l1_unstructured(model[1], "weight", amount=0.3)
    return model


class Peft(torch.nn.Module):
    """Names as PEFT's wrapper gives them: `base_model.model.0.base_layer.weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = torch.nn.ModuleDict({"model": layers()})


ZERO_3 = layers()
for _parameter in ZERO_3.parameters():
    _parameter.ds_id, _parameter.ds_tensor, _parameter.ds_numel = 1, _parameter.data, 256
    _parameter.data = torch.empty(0)

PARTLY = layers()
for _parameter in PARTLY[1].parameters():
    _parameter.ds_id, _parameter.ds_numel = 1, 256
    _parameter.data = torch.empty(0)


class Extra(torch.nn.Linear):
    """Keeps a state beside its weights, as layers of TransformerEngine do."""

    def __init__(self, state: object) -> None:
        super().__init__(3, 3)
        self.state = state

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


W = torch.ones(3, 3)


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ({}, "rank 0"),
        (torch.nn.Sequential(), "no tensors"),
        ({"module.a": W, "module.b": W}, "pass the wrapped model"),
        (averaged, r"AveragedModel.*pass its \.module"),
        (Peft, "merge_and_unload"),
        ({"base_model.w": W, "prompt_encoder.default.embedding.weight": W}, "merge_and_unload"),
        (pruned, r"prune\.remove"),
        ({"w": W, "weight_fake_quant.scale": W}, "quantisation-aware"),
        ({"0.base_layer.weight": W, "0.lora_A.default.weight": W}, "merge_and_unload"),
        (lambda: ZERO_3, "GatheredParameters"),
        (lambda: PARTLY, "'1.weight'.*GatheredParameters"),
        (lambda: dict(ZERO_3.named_parameters()), "GatheredParameters"),
        ({"a": torch.empty(0), "b": torch.empty(0, 4)}, "none of the 2 tensors"),
        ({"w": W.to("meta")}, "meta device"),
        (lambda: layers().to("meta"), "meta device"),
        ({"w": W.to_sparse()}, "sparse_coo.*to_dense"),
        (lambda: {"w": W.to_sparse_csr()}, "sparse_csr.*to_dense"),
        (lambda: {"w": torch.quantize_per_tensor(W, 0.1, 0, torch.qint8)}, "quantised.*dequantize"),
        ({"w": torch.complex(W, W)}, "complex64"),
        ({"w": [1.0, 2.0]}, "'w' is not a tensor but list"),
        ({"w": None}, "NoneType"),
        ({"w": 3.0}, "float"),
        ({"layer._extra_state": b""}, "leave it out"),
        ({"w": W, "layer._extra_state": torch.zeros(4, dtype=torch.uint8)}, "leave it out"),
        ({0: W}, "must be strings.*0"),
        ({None: W}, "must be strings"),
        ({"": W}, "it is empty"),
        ({"a\nb": W}, "control character"),
        ({"__metadata__": W}, "safetensors keeps"),
        ({"model": {"w": W}, "optimizer": {}}, r"perhaps source\['model'\]"),
        (quantised_layers, "quantised this module"),
        (lambda: torch.nn.LazyLinear(3), "run a batch"),
    ],
)
def test_what_is_no_models_weights_is_refused_with_what_to_pass(
    store: MemoryStore, source: object, advice: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = source() if callable(source) and not isinstance(source, torch.nn.Module) else source
    with pytest.raises(SchemaMismatch, match=f"(?s){advice}"):
        Publisher(store, value)  # type: ignore[arg-type]
    assert list(store.list()) == []


@pytest.mark.parametrize("state", [torch.zeros(4, dtype=torch.uint8), b"", {"scale": 1.0}])
def test_what_a_module_keeps_beside_its_weights_is_left_out(store: MemoryStore, state: object) -> None:
    model = torch.nn.ModuleDict({"up": Extra(state), "norm": torch.nn.LayerNorm(3)})
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
        with torch.no_grad():
            model["up"].weight[0, 0] = 7.0
        publisher.publish_patch(1).result()
    found: State = {}
    Replica(store, found).update()
    weights = dict(model.named_parameters())
    assert_same_bits(found, served(weights))


@pytest.mark.parametrize(
    "source",
    [
        lambda model: model.parameters(),
        lambda model: model.named_parameters(),
        lambda model: list(model.state_dict().items()),
        type,
        lambda model: torch.optim.SGD(model.parameters()),
        lambda model: model[0].weight,
        lambda model: None,
        lambda model: "model",
    ],
)
def test_what_is_neither_a_model_nor_a_mapping_is_refused(store: MemoryStore, source) -> None:
    with pytest.raises(UsageError, match=r"a model or a mapping.*dict\(model\.named_parameters"):
        Publisher(store, source(layers()))
    assert list(store.list()) == []


def test_a_source_that_becomes_unusable_is_refused_until_it_is_back(store: MemoryStore) -> None:
    weights = {"w": torch.ones(8), "v": torch.ones(8)}
    good = dict(weights)
    with Publisher(store, weights) as publisher:
        publisher.publish_patch(0).result()
        for bad in (torch.ones(8).to_sparse(), torch.ones(8, device="meta"), [1.0] * 8, torch.empty(0)):
            weights["w"] = bad  # type: ignore[assignment]
            with pytest.raises(SchemaMismatch):
                publisher.publish_patch(1)
        weights.clear()
        with pytest.raises(SchemaMismatch):
            publisher.publish_patch(1)
        weights.update(good)
        weights["w"][3] = 2.0
        delta = publisher.publish_patch(1).result().delta
    assert delta is not None and delta.num_changed == 1


def test_a_tensor_without_elements_beside_others_is_published(store: MemoryStore) -> None:
    found = published(store, {"unused": torch.empty(0, 4), "w": torch.ones(2)})
    assert found["unused"].shape == (0, 4)


def test_a_view_with_opposite_signs_is_published_as_it_reads(store: MemoryStore) -> None:
    numbers = torch.complex(torch.randn(6), torch.randn(6))
    opposite = numbers.conj().imag
    assert opposite.is_neg()
    assert_same_bits(published(store, {"w": opposite}), served({"w": -numbers.imag}))
