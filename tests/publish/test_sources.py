"""What a trainer may hand to a publisher, what of it is published, and what is refused."""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.utils import prune
from torch.utils._pytree import tree_map

from patchstore import Publisher, Replica, verify
from patchstore.errors import PatchstoreError, SchemaMismatch, UsageError
from patchstore.format import history
from patchstore.publish.sources import Weights
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from tests.support.weights import State, assert_same_bits, served


def published(store: Store, source: object, **options: object) -> State:
    """Publish once; return what a reader of the store gets, without the names of tied tensors."""
    with Publisher(store, source, **options) as publisher:  # type: ignore[arg-type]
        publisher.publish_patch(0).result()
    verify(store)
    tensors: State = {}
    Replica(store, tensors).update()
    return tensors


def tied(store: Store) -> dict[str, str]:
    header = history.read_header(store)
    assert header is not None
    return dict(header.schema.tied)


def layers(num: int = 3) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(num)))


def quantised_layers() -> torch.nn.Module:
    return torch.ao.quantization.quantize_dynamic(layers(), {torch.nn.Linear})  # type: ignore[no-any-return]


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
        plain = tree_map(lambda each: each.inner if isinstance(each, cls) else each, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        return cls(out) if func is torch.ops.aten.detach.default and len(cls.parts) == 1 else out


class Quantised(Wrapper):
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
    tensors: State = {}
    Replica(store, tensors).update()
    assert_same_bits(tensors, served({f"{i}.weight": model[i].weight.inner for i in range(3)}))


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
        Quantised(torch.ones(4, 4, dtype=torch.int8), torch.ones(4)),
        Wrapper(torch.ones(4, 4, dtype=torch.float16)),
        Wrapper(Quantised(torch.ones(4, 4, dtype=torch.int8), torch.ones(4))),
    ],
    ids=["two parts", "another dtype", "inside of a wrapper"],
)
def test_a_tensor_that_is_made_of_others_is_refused_by_name_and_class(
    store: MemoryStore, tensor: torch.Tensor
) -> None:
    with pytest.raises(SchemaMismatch, match=r"'layer\.weight' is a test_sources.(Quantised|Wrapper)"):
        Publisher(store, {"layer.weight": tensor})
    assert list(store.list()) == []


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


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(str(tmp_path / "group"), 1),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def torchao() -> ModuleType:
    """The real library, which warns a lot while it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchao", exc_type=ImportError)


def in_float8(model: torch.nn.Module) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        return convert_to_float8_training(model, config=config)


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


def test_torchao_weights_in_int8_are_refused_and_can_be_passed_dequantised(
    store: MemoryStore, torchao: ModuleType
) -> None:
    model = in_int8(layers(), mixed=False)
    with pytest.raises(SchemaMismatch, match=r"'0.weight' is a torchao.*Int8QuantizedTraining.*dequantize"):
        Publisher(store, model)
    assert list(store.list()) == []
    plain = {name: tensor.dequantize() for name, tensor in model.state_dict().items()}
    assert_same_bits(published(store, plain), served(plain))


def test_sharded_float8_parameters_are_refused_and_gathered_ones_published(
    store: MemoryStore, torchao: ModuleType, group: None
) -> None:
    from torch.distributed.fsdp import fully_shard

    model = layers()
    expected = served(copy.deepcopy(model).state_dict())
    model = in_float8(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(SchemaMismatch, match=r"get_model_state_dict.*full_state_dict=True"):
        Publisher(store, model)
    assert_same_bits(published(store, gathered(model)), expected)


def gathered(model: torch.nn.Module) -> State:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_model_state_dict(model, options=options))


def test_sharded_parameters_are_refused_and_gathered_ones_published(store: MemoryStore, group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = layers()
    expected = served(copy.deepcopy(model).state_dict())
    fully_shard(model)
    for source in (model, dict(model.named_parameters())):
        with pytest.raises(SchemaMismatch, match=r"DTensor.*get_model_state_dict.*full_state_dict=True"):
            Publisher(store, source)
    assert list(store.list()) == []
    assert_same_bits(published(store, gathered(model)), expected)


def test_a_model_in_fsdp1_is_refused(store: MemoryStore, group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"))
        flat = dict(model.named_parameters())
    for source in (model, torch.nn.Sequential(model), flat):
        with pytest.raises(SchemaMismatch, match=r"FSDP.*get_model_state_dict"):
            Publisher(store, source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.summon_full_params(model):
            whole = dict(layers_of(model).named_parameters())
            assert published(store, whole).keys() == {"0.weight", "1.weight", "2.weight"}


def layers_of(model: torch.nn.Module) -> torch.nn.Module:
    return model.module  # type: ignore[return-value]


def test_a_parameter_whose_memory_was_released_is_refused(store: MemoryStore) -> None:
    model = layers()
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
        model[1].weight.untyped_storage().resize_(0)
        with pytest.raises(SchemaMismatch, match=r"'1.weight' has no memory"):
            publisher.publish_patch(1)


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    """Wrap as torch.compile does; nothing is run, so nothing is compiled."""
    return torch.compile(model, backend="eager")


NAMES = {"0.weight", "1.weight", "2.weight"}


def test_prefixes_of_torch_compile_are_taken_off(store: MemoryStore) -> None:
    model = layers()
    assert {name.split(".")[0] for name in compiled(model).state_dict()} == {"_orig_mod"}
    assert published(store, compiled(model)).keys() == NAMES


def test_prefixes_in_the_middle_of_a_name_are_taken_off(store: MemoryStore) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = layers()
    model[0] = compiled(model[0])
    model[1] = checkpoint_wrapper(model[1])
    assert published(store, model).keys() == NAMES
    tensor = torch.ones(3)
    given = {
        "a._checkpoint_wrapped_module.w": tensor,
        "_fsdp_wrapped_module.b._orig_mod.w": tensor + 1,
        "my_orig_mod.w": tensor + 2,
    }
    assert published(MemoryStore(), given).keys() == {"a.w", "b.w", "my_orig_mod.w"}


def test_prefixes_of_data_parallel_models_are_taken_off(group: None) -> None:
    parallel = torch.nn.parallel.DistributedDataParallel
    sources = {
        "ddp": parallel(layers()),
        "dp": torch.nn.DataParallel(layers()),
        "compiled ddp": compiled(parallel(layers())),
        "ddp of compiled": parallel(compiled(layers())),
    }
    for source in sources.values():
        assert published(MemoryStore(), source).keys() == NAMES
    parts = torch.nn.ModuleDict({"policy": parallel(layers()), "critic": layers()})
    assert published(MemoryStore(), parts).keys() == {
        f"{part}.{name}" for part, name in itertools.product(("policy", "critic"), NAMES)
    }


def test_a_module_that_is_called_module_keeps_its_name(store: MemoryStore) -> None:
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2), "other": torch.nn.Linear(2, 2)})
    assert "module.weight" in published(store, model)


def test_two_names_that_become_one_are_refused(store: MemoryStore) -> None:
    with pytest.raises(SchemaMismatch, match="two tensors would be published as 'w'"):
        Publisher(store, {"w": torch.zeros(3), "_orig_mod.w": torch.ones(3)})


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


@pytest.mark.parametrize(
    "source",
    [
        lambda model: model.parameters(),
        lambda model: model.named_parameters(),
        lambda model: list(model.state_dict().items()),
        lambda model: model.state_dict,
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


def test_views_of_one_memory_are_tied_only_where_they_are_the_same_view(store: MemoryStore) -> None:
    memory = torch.randn(16)
    source = {
        "whole": memory,
        "again": memory.view(16),
        "square": memory.view(4, 4),
        "turned": memory.view(4, 4).t(),
        "front": memory[:4],
        "back": memory[12:],
        "as bits": memory.view(torch.int32),
    }
    found = published(store, source)
    assert tied(store) == {"whole": "again"}
    assert_same_bits(found, served({name: tensor for name, tensor in source.items() if name != "whole"}))


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (("lm_head.weight", "model.embed_tokens.weight"), "model.embed_tokens.weight"),
        (("lm_head.weight", "transformer.wte.weight"), "transformer.wte.weight"),
        (("proj_out.weight", "model.decoder.embed_tokens.weight"), "model.decoder.embed_tokens.weight"),
        (
            ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
            "bert.embeddings.word_embeddings.weight",
        ),
        (("cls.predictions.decoder.bias", "cls.predictions.bias"), "cls.predictions.bias"),
        (
            (
                "lm_head.weight",
                "encoder.embed_tokens.weight",
                "decoder.embed_tokens.weight",
                "shared.weight",
            ),
            "shared.weight",
        ),
        (("b", "a", "c"), "a"),
    ],
)
def test_the_name_that_a_tied_tensor_is_stored_under_does_not_depend_on_order(
    names: tuple[str, ...], kept: str
) -> None:
    tensor = torch.ones(3)
    for order in itertools.permutations(names):
        tensors, ties = Weights(dict.fromkeys(order, tensor)).read()
        assert list(tensors) == [kept]
        assert ties == dict.fromkeys(set(names) - {kept}, kept)


@pytest.mark.exhaustive
def test_hugging_face_models_store_the_name_that_their_checkpoints_keep(
    store: MemoryStore, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors import safe_open

    config = transformers.Qwen3Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=32, tie_word_embeddings=True, head_dim=8,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert published(store, model).keys() == set(file.keys())


def test_a_run_goes_on_with_its_tensors_in_another_order(store: MemoryStore) -> None:
    memory = torch.randn(8)
    source = {"z.weight": memory, "b.weight": memory, "other": torch.ones(2)}
    expected = published(store, source)
    turned = dict(reversed(source.items()))
    with Publisher(store, turned, resume=True) as publisher:
        turned["other"] += 1
        assert publisher.publish_patch(1).result().kind == "delta"
        reordered = dict(sorted(turned.items()))
        turned.clear()
        turned.update(reordered)
        assert publisher.publish_patch(2).result().kind == "delta"
    tensors: State = {}
    Replica(store, tensors).update()
    assert tensors.keys() == expected.keys() == {"b.weight", "other"}


def test_a_run_keeps_the_names_of_tied_tensors_that_it_began_with(store: MemoryStore) -> None:
    memory = torch.randn(8)
    published(store, {"z": memory})
    with pytest.raises(PatchstoreError, match="tied"):
        Publisher(store, {"z": memory, "a": memory}, resume=True)
    assert Weights({"z": memory, "a": memory}, {"z"}).read()[1] == {"a": "z"}
