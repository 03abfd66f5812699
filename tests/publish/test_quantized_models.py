"""Models that a library has quantized, as for QLoRA: servers get the weights that they compute with."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patchstore import Publisher, as_saved, replay
from patchstore.errors import UsageError
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits
from tests.support.small_models import assert_refused, causal, computed, published
from tests.support.weights import State, assert_same_bits, loaded

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")

QUANTIZED: dict[str, dict[str, Any]] = {
    "nf4, twice": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
    "fp4 stored as bf16": {
        "load_in_4bit": True,
        "bnb_4bit_quant_storage": torch.bfloat16,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
    "int8": {"load_in_8bit": True},
}
TOKENS = torch.arange(2, 42).reshape(1, 40)


def unquantized() -> Any:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1, "tie_word_embeddings": False}
    return causal("Qwen2", **sizes, **more)


def load(folder: Path, kind: str, model: Any = None, *, save: bool = True) -> Any:
    """Load a model as QLoRA does."""
    if save:
        (unquantized() if model is None else model).save_pretrained(folder)
    config = transformers.BitsAndBytesConfig(**QUANTIZED[kind])
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config, device_map="cpu"
    )


def lora(**options: Any) -> Any:
    given = {"r": 4, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**(given | options))


def adapted(model: Any, config: Any, **options: Any) -> Any:
    model = peft.get_peft_model(model, config, **options)
    # Adapters begin as zeros.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def dequantized(model: Any) -> Any:
    """Return a copy of a model without adapters that transformers has dequantized."""
    # Products of int8 are scaled in float32.
    dtype = torch.float32 if getattr(model, "is_loaded_in_8bit", False) else torch.bfloat16
    return copy.deepcopy(model).dequantize(dtype)


def merged(plain: Any, model: Any, config: Any, **options: Any) -> State:
    """Return what PEFT merges of a dequantized model with the adapters of a quantized one."""
    plain = peft.get_peft_model(plain, config, **options)
    peft.set_peft_model_state_dict(plain, peft.get_peft_model_state_dict(model))
    return dict(plain.merge_and_unload().state_dict())


def logits(model: Any, *, trains: bool = False) -> torch.Tensor:
    """Return what a model answers; there is no dropout."""
    # In evaluation on a CPU bitsandbytes packs codes anew, and PEFT's DoRA reads them as they were.
    with torch.no_grad():
        found: torch.Tensor = model.train(trains)(TOKENS).logits.float()
    return found


def assert_answers_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless answers differ by no more than what rounding in each layer explains."""
    assert float((found - expected).norm() / expected.norm()) < 0.05


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the checkpoint is that is loaded quantized. Its own config is that of the weights published."""
    return tmp_path / "base"


@pytest.mark.parametrize("options", [None, {}, {"use_dora": True}], ids=["no adapters", "lora", "dora"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantized_model_is_published_dequantized_and_its_adapters_are_merged_into_what_it_computes_with(
    kind: str, options: dict[str, Any] | None, folder: Path, tmp_path: Path
) -> None:
    base = load(folder, kind)
    plain = dequantized(base)
    model = base if options is None else adapted(base, lora(**options))
    before = {name: bits(each).clone() for name, each in model.state_dict().items()}
    with Publisher(tmp_path / "store", model, files=folder) as publisher:
        publisher.publish_patch(0)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], bits(each)) for name, each in after.items())
    replay(tmp_path / "store", out=tmp_path / "out")
    expected = plain.state_dict() if options is None else merged(plain, model, lora(**options))
    assert_same_bits(loaded(tmp_path / "out"), {name: each.bfloat16() for name, each in expected.items()})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert_answers_alike(logits(again), logits(model, trains=True))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_training_with_the_callback_publishes_what_the_model_computes_with(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    from patchstore.integrations.transformers import PublishCallback

    model = peft.get_peft_model(load(folder, kind), lora())
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in torch.randint(0, 96, (8, 8))]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, learning_rate=0.05, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    publish = PublishCallback(tmp_path / "store")
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[publish]).train()
    found = []
    for version in (0, 2):
        replay(tmp_path / "store", version, out=tmp_path / f"out{version}")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"out{version}")
        assert not hasattr(again.config, "quantization_config")
        found.append(logits(again))
    assert_answers_alike(found[1], logits(model, trains=True))
    with pytest.raises(AssertionError):
        # The steps changed the answers by more.
        assert_answers_alike(found[0], found[1])


@pytest.mark.parametrize("kind", QUANTIZED)
def test_after_a_forward_pass_what_is_published_is_what_layers_compute(
    store: MemoryStore, kind: str, folder: Path
) -> None:
    # The first pass moves scales of int8 into the layer; in evaluation some CPUs pack codes of 4 bits anew.
    model = load(folder, kind)
    logits(model)
    found = published(store, model, dtype=torch.float32)
    for name, layer in model.named_modules():
        if isinstance(layer, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            with torch.no_grad():
                one = torch.eye(layer.in_features, dtype=torch.bfloat16)
                weight = (layer(one) - (0 if layer.bias is None else layer.bias)).T.float()
            assert torch.allclose(found[f"{name}.weight"], weight, rtol=2**-6, atol=2**-10), name


@pytest.mark.parametrize("kind", QUANTIZED)
def test_without_a_dtype_dequantized_weights_have_that_of_the_layer(
    store: MemoryStore, kind: str, folder: Path
) -> None:
    model = load(folder, kind)
    assert_same_bits(published(store, model, dtype=None), dict(dequantized(model).state_dict()))


@pytest.mark.parametrize("name", ["VeraConfig", "OFTConfig", "BOFTConfig", "MissConfig"])
@pytest.mark.parametrize("kind", ["nf4, twice", "int8"])
def test_adapters_of_kinds_that_have_one_class_for_all_layers_are_merged(
    store: MemoryStore, folder: Path, kind: str, name: str
) -> None:
    sizes = {"VeraConfig": {"r": 4}, "MissConfig": {"r": 4}, "OFTConfig": {"oft_block_size": 8, "r": 0}}
    given = sizes.get(name, {"boft_block_size": 8})
    config = getattr(peft, name)(target_modules=["q_proj"], task_type="CAUSAL_LM", **given)
    model, weight = load(folder, kind), "model.layers.0.self_attn.q_proj.weight"
    plain = dequantized(model)
    before = plain.state_dict()[weight].float().clone()
    model = adapted(model, config)
    expected = merged(plain, model, config)[weight].float()
    found = published(store, model)[weight].float()
    # A dequantized model of 8 bits is in float32, and its adapters with it.
    assert torch.allclose(found, expected, rtol=0.02, atol=0.002)
    assert not torch.allclose(found, before, rtol=0.02, atol=0.002)


def test_disabled_adapters_of_a_quantized_model_are_not_merged(store: MemoryStore, folder: Path) -> None:
    base = load(folder, "nf4, twice")
    expected = dequantized(base).state_dict()
    model = adapted(base, lora())
    with model.disable_adapter():
        assert_same_bits(published(store, model), dict(expected))


def test_other_adapters_and_saved_modules_of_a_quantized_model_are_merged(
    store: MemoryStore, folder: Path
) -> None:
    base = load(folder, "nf4, twice")
    plain = dequantized(base)
    config = lora(target_modules=["embed_tokens", "o_proj"], modules_to_save=["lm_head"])
    model = adapted(base, config)
    assert_same_bits(published(store, model), merged(plain, model, config))


def test_a_quantized_model_is_published_under_the_names_of_its_checkpoint(
    store: MemoryStore, folder: Path
) -> None:
    model = load(folder, "nf4, twice")
    expected = dict(dequantized(model).state_dict())
    assert_same_bits(published(store, as_saved(model)), expected)


def test_quantized_embeddings_and_layers_of_the_library_itself_are_decoded(store: MemoryStore) -> None:
    rows, whole = nn.Embedding(64, 128), nn.Linear(128, 64)
    model = nn.Sequential(bnb.nn.Embedding4bit(64, 128), bnb.nn.Linear8bitLt(128, 64, has_fp16_weights=False))
    with torch.no_grad():
        model[0].weight.data.copy_(rows.weight)
        model[1].weight.data.copy_(whole.weight)
    model.to("cpu")
    found = published(store, model, dtype=torch.float32)
    assert found.keys() == {"0.weight", "1.weight", "1.bias"}
    for name, expected in (("0.weight", rows.weight), ("1.weight", whole.weight)):
        assert float((found[name] - expected).norm() / expected.norm()) < 0.15


def test_one_quantized_layer_at_a_time_is_decoded(folder: Path) -> None:
    model = load(folder, "nf4, twice")
    num, most = computed(model)
    assert num == 14
    assert most <= 2


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_mapping_of_codes_and_scales_is_refused(store: MemoryStore, kind: str, folder: Path) -> None:
    model = load(folder, kind)
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(UsageError, match=r"the quantized weights 'model\..*dequantized tensors by name"):
            Publisher(store, model.state_dict(), dtype=dtype)
    assert_refused(store, dict(model.named_parameters()), r"of codes.*pass the module itself")


def test_layers_that_store_weights_transposed_are_refused(store: MemoryStore, folder: Path) -> None:
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=64, n_positions=16)
    model = load(folder, "nf4, twice", transformers.GPT2LMHeadModel(config))
    assert_refused(store, model, r"c_attn' is a quantized Conv1D.*transposed")


class Coded(nn.Linear):
    """A layer of a library that is not known here."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight = nn.Parameter(torch.zeros(8, 8).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("table", torch.ones(4))


def test_codes_that_nothing_can_decode_are_refused_or_published_as_they_are(store: MemoryStore) -> None:
    model = nn.ModuleDict({"up": Coded(), "norm": nn.LayerNorm(8)})
    assert_refused(store, model, r"'up.weight' has codes of torch.float8_e4m3fn.*dtype=None")
    assert_same_bits(published(store, model, dtype=None), dict(model.state_dict()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_adapters_are_not_merged_into_codes(store: MemoryStore, dtype: torch.dtype | None) -> None:
    model = peft.get_peft_model(nn.ModuleDict({"up": Coded(), "down": nn.Linear(8, 8)}), peft.LoraConfig(
        target_modules=["up"], r=2
    ))  # fmt: skip
    assert_refused(store, model, r"up.*has codes of torch.float8_e4m3fn", dtype=dtype)


@pytest.mark.parametrize(
    "names", [("absmax", "quant_map"), ("SCB",), ("zero", "step"), ("bias",)], ids=lambda names: names[0]
)
def test_numbers_beside_codes_are_not_rounded_whatever_they_are_called(
    store: MemoryStore, names: tuple[str, ...]
) -> None:
    given = {"a.weight": torch.zeros(64, 1, dtype=torch.uint8), "norm.weight": torch.ones(8)}
    given |= {f"a.{name}" if len(names) == 1 else f"a.weight.{name}": torch.rand(16) for name in names}
    assert_refused(store, given, r"the quantized weights 'a.weight', and would be rounded", UsageError)
    assert_same_bits(published(store, given, dtype=None), given)


class Gated(nn.Linear):
    """A layer with others in it."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("bounds", torch.rand(2))


def in_int8(model: nn.Module) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: isinstance(module, nn.Linear))
    return model


def test_what_is_beside_a_quantized_weight_and_below_its_module_is_published(store: MemoryStore) -> None:
    pytest.importorskip("torchao")
    model = in_int8(nn.ModuleDict({"gated": Gated(), "rest": nn.LayerNorm(8)}))
    expected = dict(model.state_dict())
    expected["gated.weight"] = expected["gated.weight"].dequantize()
    assert_same_bits(published(store, model, dtype=None), expected)


def test_a_model_that_torchao_has_quantized_is_published_dequantized(store: MemoryStore) -> None:
    pytest.importorskip("torchao")
    model = unquantized()
    in_int8(model.model)
    expected = {
        name: each.dequantize() if name.endswith("proj.weight") else each
        for name, each in model.state_dict().items()
    }
    assert_same_bits(published(store, model), expected)
