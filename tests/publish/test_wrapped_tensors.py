"""Tensors that are made of others, or of a collective: published whole, or refused."""

import copy
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from patchstore import Publisher
from patchstore.stores.memory import MemoryStore
from tests.support.small_models import assert_refused, in_float8, layers, published, tied
from tests.support.weights import assert_same_bits, newest, served


def inner(given: object) -> object:
    """What a wrapper is made of, also in a list; all else as it is."""
    if isinstance(given, (list, tuple)):
        return type(given)(map(inner, given))
    return given.inner if isinstance(given, Wrapper) else given


class Wrapper(torch.Tensor):
    """Has no memory of its own, and all others' address: 0. Like torchao's, it is made of other tensors."""

    parts: tuple[str, ...] = ("inner",)

    @staticmethod
    def __new__(cls, inner: torch.Tensor, *more: torch.Tensor) -> "Wrapper":
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=torch.float32, device=inner.device
        )

    def __init__(self, inner: torch.Tensor, *more: torch.Tensor) -> None:
        for name, part in zip(self.parts, (inner, *more), strict=True):
            setattr(self, name, part)

    def __tensor_flatten__(self):  # type: ignore[no-untyped-def]
        return list(self.parts), None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):  # type: ignore[no-untyped-def]
        return cls(*parts.values())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*map(inner, args), **{name: inner(each) for name, each in (kwargs or {}).items()})
        return cls(out) if func is torch.ops.aten.detach.default and len(cls.parts) == 1 else out


class Quantized(Wrapper):
    """Its elements are products, in none of its two parts."""

    parts = ("inner", "scale")


def test_wrapped_tensors_of_one_shape_stay_different_tensors(store: MemoryStore) -> None:
    plain = {f"layers.{i}.weight": torch.randn(4, 4) for i in range(3)}
    wrapped = {name: Wrapper(tensor) for name, tensor in plain.items()}
    assert len({tensor.data_ptr() for tensor in wrapped.values()}) == 1
    assert_same_bits(published(store, wrapped), served(plain))
    assert tied(store) == {}


def test_changes_inside_of_wrapped_tensors_are_found(store: MemoryStore) -> None:
    model = layers()
    for layer in model:
        layer.weight = torch.nn.Parameter(Wrapper(torch.randn(16, 16)), requires_grad=False)
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
        model[1].weight.inner[2, 3] = 7.0
        delta = publisher.publish_patch(1).result().delta
    assert delta is not None and delta.num_changed == 1
    assert_same_bits(newest(store), served({f"{i}.weight": model[i].weight.inner for i in range(3)}))


def test_a_wrapped_tensor_under_two_names_is_tied(store: MemoryStore) -> None:
    inner = torch.randn(4, 4)
    assert published(store, {"b": Wrapper(inner), "a": Wrapper(inner)}).keys() == {"a"}
    assert tied(store) == {"b": "a"}


def test_a_wrapper_inside_of_a_wrapper_is_unwrapped(store: MemoryStore) -> None:
    inner = torch.randn(4, 4)
    assert_same_bits(published(store, {"w": Wrapper(Wrapper(inner))}), served({"w": inner}))


@pytest.mark.parametrize(
    "tensor",
    [
        Quantized(torch.ones(4, 4, dtype=torch.int8), torch.ones(4)),
        Wrapper(torch.ones(4, 4, dtype=torch.float16)),
        Wrapper(Quantized(torch.ones(4, 4, dtype=torch.int8), torch.ones(4))),
    ],
    ids=["two parts", "another dtype", "inside of a wrapper"],
)
def test_a_tensor_that_is_made_of_others_is_refused_by_name_and_class(
    store: MemoryStore, tensor: torch.Tensor
) -> None:
    assert_refused(
        store, {"layer.weight": tensor}, r"'layer\.weight' is a test_wrapped_tensors.(Quantized|Wrapper)"
    )


def test_a_subclass_with_memory_of_its_own_is_published(store: MemoryStore) -> None:
    class Named(torch.nn.Parameter):
        pass

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return super().__torch_function__(func, types, args, kwargs or {})

    plain = {"a": torch.randn(3), "b": torch.randn(3)}
    source = {"a": Named(plain["a"]), "b": plain["b"].as_subclass(Loud)}
    assert_same_bits(published(store, source), served(plain))


def test_the_result_of_a_collective_is_waited_for(store: MemoryStore, group: None) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    plain = {name: torch.randn(8) for name in ("a", "b", "c")}
    reduced = {
        name: all_reduce(tensor, "sum", torch.distributed.group.WORLD) for name, tensor in plain.items()
    }
    assert all(type(tensor) is AsyncCollectiveTensor for tensor in reduced.values())
    assert_same_bits(published(store, reduced), served(plain))


def test_a_collective_that_is_under_way_is_waited_for_and_not_read_before(store: MemoryStore) -> None:
    memory = torch.zeros(8)

    class Arriving(Wrapper):
        def trigger_wait(self) -> torch.Tensor:
            memory.fill_(3.0)
            return memory

    assert_same_bits(published(store, {"w": Arriving(memory)}), served({"w": torch.full((8,), 3.0)}))


def in_int8(model: torch.nn.Module, *, mixed: bool) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.prototype import quantized_training
        from torchao.quantization import quantize_

        name = "int8_mixed_precision_training" if mixed else "int8_weight_only_quantized_training"
        quantize_(model, getattr(quantized_training, name)())
        return model


@pytest.mark.parametrize("convert", [in_float8, lambda model: in_int8(model, mixed=True)])
def test_torchao_models_that_train_whole_weights_publish_them(
    store: MemoryStore, torchao: ModuleType, convert: Callable[[torch.nn.Module], torch.nn.Module]
) -> None:
    model = layers()
    expected = served(copy.deepcopy(model).state_dict())
    assert_same_bits(published(store, convert(model)), expected)


def test_torchao_weights_in_int8_are_published_dequantized_and_refused_in_a_mapping(
    store: MemoryStore, torchao: ModuleType
) -> None:
    model = in_int8(layers(), mixed=False)
    assert_refused(store, model.state_dict(), r"'0.weight' is a torchao.*Int8QuantizedTraining.*dequantize")
    plain = {name: tensor.dequantize() for name, tensor in model.state_dict().items()}
    assert_same_bits(published(store, model), served(plain))
    assert_same_bits(published(MemoryStore(), plain), served(plain))
