"""What a trainer may hand to a publisher, what of it is published, and what is refused."""

import copy
import warnings
from types import ModuleType

import pytest
import torch
from torch.nn.utils import prune

from patchstore import Publisher
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.stores.memory import MemoryStore
from tests.support.small_models import (
    assert_refused,
    gathered,
    in_float8,
    layers,
    layers_of,
    published,
    quantized_layers,
)
from tests.support.weights import assert_same_bits, newest, served


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
        ({"w": W, "weight_fake_quant.scale": W}, "quantization-aware"),
        ({"0.base_layer.weight": W, "0.lora_A.default.weight": W}, "merge_and_unload"),
        (lambda: ZERO_3, "GatheredParameters"),
        (lambda: PARTLY, "'1.weight'.*GatheredParameters"),
        (lambda: dict(ZERO_3.named_parameters()), "GatheredParameters"),
        ({"a": torch.empty(0), "b": torch.empty(0, 4)}, "none of the 2 tensors"),
        ({"w": W.to("meta")}, "meta device"),
        (lambda: layers().to("meta"), "meta device"),
        ({"w": W.to_sparse()}, "sparse_coo.*to_dense"),
        (lambda: {"w": W.to_sparse_csr()}, "sparse_csr.*to_dense"),
        (lambda: {"w": torch.quantize_per_tensor(W, 0.1, 0, torch.qint8)}, "quantized.*dequantize"),
        ({"w": torch.complex(W, W)}, "complex64"),
        ({"w": [1.0, 2.0]}, "'w' is not a tensor but list"),
        ({"w": None}, "NoneType"),
        ({"w": 3.0}, "float"),
        ({"layer._extra_state": b""}, "leave it out"),
        ({"w": W, "layer._extra_state": torch.zeros(4, dtype=torch.uint8)}, "leave it out"),
        ({0: W}, "must be strings.*0"),
        ({None: W}, "must be strings"),
        ({"model": {"w": W}, "optimizer": {}}, r"perhaps source\['model'\]"),
        (quantized_layers, "quantized this module"),
        (lambda: torch.nn.LazyLinear(3), "run a batch"),
    ],
)
def test_what_is_no_models_weights_is_refused_with_what_to_pass(
    store: MemoryStore, source: object, advice: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = source() if callable(source) and not isinstance(source, torch.nn.Module) else source
    assert_refused(store, value, f"(?s){advice}")


@pytest.mark.parametrize("state", [torch.zeros(4, dtype=torch.uint8), b"", {"scale": 1.0}])
def test_what_a_module_keeps_beside_its_weights_is_left_out(store: MemoryStore, state: object) -> None:
    model = torch.nn.ModuleDict({"up": Extra(state), "norm": torch.nn.LayerNorm(3)})
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
        with torch.no_grad():
            model["up"].weight[0, 0] = 7.0
        publisher.publish_patch(1).result()
    found = newest(store)
    weights = dict(model.named_parameters())
    assert_same_bits(found, served(weights))


def test_a_module_of_torchscript_is_published_as_the_one_that_it_was_made_of(store: MemoryStore) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(layers())
    with Publisher(store, scripted) as publisher:
        publisher.publish_patch(0).result()
        with torch.no_grad():
            next(scripted.parameters())[0] = 7.0
        publisher.publish_patch(1).result()
    assert_same_bits(newest(store), served(dict(scripted.named_parameters())))


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
    assert_refused(
        store, source(layers()), r"a model or a mapping.*dict\(model\.named_parameters", UsageError
    )


def test_a_function_that_returns_one_iterator_again_and_again_is_refused(store: MemoryStore) -> None:
    once = layers().named_parameters()
    assert_refused(store, lambda: once, r"a new iterator in each call, such as lambda: model\.named_param")


def test_a_tensor_without_elements_beside_others_is_published(store: MemoryStore) -> None:
    found = published(store, {"unused": torch.empty(0, 4), "w": torch.ones(2)})
    assert found["unused"].shape == (0, 4)


def test_a_view_with_opposite_signs_is_published_as_it_reads(store: MemoryStore) -> None:
    numbers = torch.complex(torch.randn(6), torch.randn(6))
    opposite = numbers.conj().imag
    assert opposite.is_neg()
    assert_same_bits(published(store, {"w": opposite}), served({"w": -numbers.imag}))


def test_a_tensor_that_reaches_beyond_its_memory_is_refused(store: MemoryStore) -> None:
    tensors = {"w": torch.ones(4, 6)[:, 2:]}
    with Publisher(store, tensors) as publisher:
        publisher.publish_patch(0).result()
        tensors["w"].untyped_storage().resize_(64)
        with pytest.raises(SchemaMismatch, match="'w' has only 64 bytes of its memory at present"):
            publisher.publish_patch(1)


def test_sharded_parameters_that_are_cast_to_float8_are_published_in_bf16(
    torchao: ModuleType, group: None
) -> None:
    from torch.distributed.fsdp import fully_shard

    model = layers()
    expected = served(copy.deepcopy(model).state_dict())
    model = in_float8(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for source in (model, gathered(model)):
        assert_same_bits(published(MemoryStore(), source), expected)


def test_parameters_sharded_over_one_rank_are_published_as_they_are(group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = layers()
    expected = served(copy.deepcopy(model).state_dict())
    fully_shard(model)
    for source in (model, dict(model.named_parameters()), gathered(model)):
        assert_same_bits(published(MemoryStore(), source), expected)


def test_a_model_in_fsdp1_is_refused(store: MemoryStore, group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"))
        flat = dict(model.named_parameters())
    for source in (model, torch.nn.Sequential(model), flat):
        assert_refused(store, source, r"FSDP.*get_model_state_dict")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.summon_full_params(model):
            whole = dict(layers_of(model).named_parameters())
            assert published(store, whole).keys() == {"0.weight", "1.weight", "2.weight"}


def test_a_parameter_whose_memory_was_released_is_refused(store: MemoryStore) -> None:
    model = layers()
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
        model[1].weight.untyped_storage().resize_(0)
        with pytest.raises(SchemaMismatch, match=r"'1.weight' has no memory"):
            publisher.publish_patch(1)
