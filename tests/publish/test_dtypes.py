"""Each tensor is published in the dtype in which servers have it, whatever the trainer keeps it in."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from patchstore import Publisher, Replica
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.stores.memory import MemoryStore
from tests.support.saved_models import checkpoint, trained
from tests.support.small_models import assert_refused, published
from tests.support.weights import State, assert_same_bits

transformers = pytest.importorskip("transformers", minversion="5.19")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.filterwarnings("ignore")

BIASES = ("DeepseekV3", "Glm4Moe", "ExaoneMoe", "Ernie4_5_Moe")
"""Kinds of which transformers keeps biases of routers in float32."""


@pytest.mark.parametrize("kind", BIASES)
def test_a_trainer_in_float32_publishes_what_its_model_keeps_in_float32(
    store: MemoryStore, tmp_path: Path, kind: str
) -> None:
    model = trained(kind)
    _, expected = checkpoint(model, tmp_path)
    kept = {name for name, tensor in expected.items() if tensor.dtype == torch.float32}
    assert any("e_score_correction_bias" in name for name in kept)
    assert_same_bits(published(store, model), expected)


def test_a_small_step_of_a_bias_in_float32_is_published(store: MemoryStore) -> None:
    model = trained("DeepseekV3")
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    tensors: State = {}
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
        bias[1] += 0.001
        manifest = publisher.publish_patch(1).result()
    assert manifest.delta is not None
    assert manifest.delta.num_changed == 1
    Replica(store, tensors).update()
    assert torch.equal(tensors["model.layers.1.mlp.gate.e_score_correction_bias"], bias)


@pytest.mark.parametrize("kind", ["DeepseekV3", "MiniMaxM2", "Qwen3Next"])
def test_the_base_checkpoint_says_the_dtype_of_each_tensor(
    store: MemoryStore, tmp_path: Path, kind: str
) -> None:
    model = trained(kind)
    base, saved = checkpoint(model, tmp_path)
    # Of these, transformers says so of none; checkpoints have them in float32, and so has vLLM.
    wide = ("A_log", "dt_bias", "e_score_correction_bias", "mlp.gate.weight")
    masters = published(MemoryStore(), model, dtype=None)
    expected = {
        name: tensor if name.endswith(wide) else tensor.to(torch.bfloat16) for name, tensor in masters.items()
    }
    assert len({tensor.dtype for tensor in expected.values()}) == 2
    assert expected.keys() == saved.keys()
    safetensors.save_file(expected, base / "model.safetensors")
    assert_same_bits(published(store, model, files=base), expected)
    assert_same_bits(published(MemoryStore(), masters, files=base), expected)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_what_can_be_read_of_a_checkpoint_says_dtypes_also_without_the_prefix_of_the_model(
    store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, prefix: str
) -> None:
    saved = {"proj.weight": torch.randn(64, 64).bfloat16(), "gate.bias": 34.5 + 0.14 * torch.randn(64)}
    safetensors.save_file(saved, tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "model-00002-of-00002.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    (tmp_path / "config.json").write_text("{}")
    expected = {f"{prefix}{name}": tensor for name, tensor in saved.items()}
    masters = {name: tensor.float() for name, tensor in expected.items()}
    with caplog.at_level(logging.WARNING, "patchstore"):
        assert_same_bits(published(store, masters, files=tmp_path), expected)
    assert "model-00002-of-00002.safetensors cannot be read" in caplog.text


def test_adapters_are_merged_in_the_dtype_in_which_the_tensor_is_served(store: MemoryStore) -> None:
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    model = adapted(trained("DeepseekV3").bfloat16())
    with torch.no_grad():
        for own, tensor in model.named_parameters():
            if "lora_B" in own:
                tensor.normal_(std=1e-3)
    pattern = published(store, model, dtype={"*.kv_a_proj_with_mqa.*": "float32"})
    assert pattern["lm_head.weight"].dtype == torch.bfloat16
    exact = published(MemoryStore(), model, dtype="float32")
    assert_same_bits({name: pattern[name]}, {name: exact[name]})
    assert not torch.equal(pattern[name], pattern[name].bfloat16().float())


class Stiff(transformers.PreTrainedModel):  # type: ignore[misc, name-defined]
    """A model as code beside a checkpoint may define it: it cannot be made without memory."""

    config_class = transformers.GPT2Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rates = torch.ones(3).numpy().tolist()
        self.proj = torch.nn.Linear(8, 8)
        self.A_log = torch.nn.Parameter(torch.zeros(8, dtype=torch.float32))
        self.post_init()


def test_a_model_that_cannot_be_made_anew_is_named_in_the_log(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "patchstore"):
        published(store, Stiff(transformers.GPT2Config()))
    assert "Stiff cannot be made anew" in caplog.text
    caplog.clear()
    published(MemoryStore(), Stiff(transformers.GPT2Config()), dtype={"A_log": "float32"})


def test_a_base_checkpoint_in_float32_is_served_in_bfloat16_but_for_what_the_model_keeps(
    store: MemoryStore, tmp_path: Path
) -> None:
    model = trained("DeepseekV3")
    model.save_pretrained(tmp_path)
    found = published(store, model, files=tmp_path)
    dtypes = {name: tensor.dtype for name, tensor in found.items()}
    assert dtypes["model.layers.1.mlp.gate.weight"] == torch.bfloat16
    # The folder has all in float32, so it says nothing of this one, and the model does.
    assert dtypes["model.layers.1.mlp.gate.e_score_correction_bias"] == torch.float32


def test_a_model_that_was_loaded_in_bfloat16_is_published_as_it_is_saved(
    store: MemoryStore, tmp_path: Path
) -> None:
    model = trained("Glm4Moe")
    base, _ = checkpoint(model, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    # As a user may wish it, for the sake of stable logits.
    loaded.lm_head.float()
    with torch.no_grad():
        loaded.lm_head.weight += 1e-5
    loaded.save_pretrained(tmp_path / "saved")
    expected = safetensors.load_file(tmp_path / "saved" / "model.safetensors")
    assert expected["lm_head.weight"].dtype == torch.float32
    assert_same_bits(published(store, loaded), expected)


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["kv_a_proj_with_mqa"]))


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (torch.compile, ""),
        (torch.nn.parallel.DistributedDataParallel, ""),
        (adapted, ""),
        (lambda model: torch.nn.ModuleDict({"policy": model, "value": torch.nn.Linear(16, 1)}), "policy."),
    ],
)
def test_wrappers_do_not_hide_what_a_model_keeps_in_float32(
    store: MemoryStore, group: None, wrap: Any, prefix: str
) -> None:
    model = trained("DeepseekV3")
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias.clone()
    found = published(store, wrap(model))
    name = f"{prefix}model.layers.1.mlp.gate.e_score_correction_bias"
    assert_same_bits({name: found[name]}, {name: bias})
    assert found[f"{prefix}model.embed_tokens.weight"].dtype == torch.bfloat16


def test_patterns_go_before_all_else_that_says_a_dtype(store: MemoryStore, tmp_path: Path) -> None:
    model = trained("DeepseekV3")
    dtype = {"*.e_score_correction_bias": "bf16", "*.experts.*": None, "lm_head.weight": torch.float16}
    found = published(store, model, dtype=dtype)
    assert found["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.bfloat16
    assert found["model.layers.1.mlp.experts.3.down_proj.weight"].dtype == torch.float32
    assert found["lm_head.weight"].dtype == torch.float16
    assert found["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ({"lm_haed.*": "float32"}, "the pattern 'lm_haed.\\*', which matches none of the .* names"),
        ({"a": "int8"}, "must be a floating-point dtype"),
        ({"a": "float8_e4m3fn"}, "too few bits for weights without scales"),
        ({1: "float32"}, "must map patterns"),
        ("float8_e4m3fn", "too few bits for weights without scales: .* quantization="),
        (torch.float8_e5m2, "too few bits"),
        ("bfloat17", "must be a floating-point dtype"),
    ],
)
def test_a_dtype_in_which_weights_cannot_be_served_is_refused(
    store: MemoryStore, dtype: Any, message: str
) -> None:
    assert_refused(
        store, {"a": torch.full((4,), 1000.0), "b": torch.zeros(4)}, message, UsageError, dtype=dtype
    )


def test_a_source_mostly_in_bfloat16_keeps_what_it_has_in_float32(store: MemoryStore) -> None:
    given = {
        "proj": torch.randn(64, 64).bfloat16(),
        "router.bias": 34.5 + 0.14 * torch.randn(64),
        "steps": torch.arange(3),
    }
    assert_same_bits(published(store, given), given)
    assert_same_bits(published(MemoryStore(), lambda: iter(given.items())), given)


def test_the_log_says_once_which_tensors_are_served_in_which_dtype(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    model = trained("DeepseekV3")
    with caplog.at_level(logging.INFO, "patchstore"), Publisher(store, model) as publisher:
        for step in range(2):
            publisher.publish_patch(step).result()
    said = [record.getMessage() for record in caplog.records if "serving" in record.getMessage()]
    assert len(said) == 1
    name = r"model.layers.*.mlp.gate.e_score_correction_bias"
    assert said[0].endswith(f"tensors as BF16; as F32: {name}; the model says so of {name}")


def test_in_fp8_a_bias_of_a_router_stays_in_float32(store: MemoryStore) -> None:
    model = trained("DeepseekV3")
    found = published(store, model, quantization="fp8-channel")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert_same_bits({"": found[name]}, {"": model.state_dict()[name]})
    assert found["model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn


def test_a_tensor_that_gets_another_dtype_is_refused_only_if_it_is_served_in_its_own(
    store: MemoryStore,
) -> None:
    given = {"a": torch.randn(4, 4), "b": torch.randn(4, 4)}
    with Publisher(store, given, dtype={"b": None}) as publisher:
        publisher.publish_patch(0).result()
        given["a"] = given["a"].bfloat16()
        publisher.publish_patch(1).result()
        given["b"] = given["b"].bfloat16()
        with pytest.raises(SchemaMismatch, match=r"'b' was F32 \[4, 4\], but is BF16 \[4, 4\] now"):
            publisher.publish_patch(2)


def test_a_run_goes_on_with_the_dtypes_that_it_has(store: MemoryStore) -> None:
    model = trained("DeepseekV3")
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
    with Publisher(store, model, resume=True) as publisher:
        assert publisher.publish_patch(1).result().delta.num_changed == 0  # type: ignore[union-attr]
    assert_refused(store, dict(model.state_dict()), "a run keeps its names, shapes and dtypes", resume=True)


class Around(transformers.PreTrainedModel):  # type: ignore[misc, name-defined]
    """A model around another one, whose constructor takes that, and which registers nothing of it."""

    config_class = transformers.GPT2Config

    def __init__(self, config: Any, backbone: torch.nn.Module) -> None:
        super().__init__(config)
        self.backbone, self.value = backbone, torch.nn.Linear(16, 1)


def test_models_inside_of_one_that_cannot_be_made_anew_say_what_they_keep(store: MemoryStore) -> None:
    inner = trained("Glm4Moe")
    found = published(store, Around(transformers.GPT2Config(), inner))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert_same_bits({name: found[f"backbone.{name}"]}, {name: inner.state_dict()[name]})
    assert found["value.weight"].dtype == torch.bfloat16
