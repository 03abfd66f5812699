"""Which tensors are quantized, and what the config of a checkpoint says of it."""

import json
import re
from typing import Any

import pytest

from patchstore.bucket.records import Schema, TensorSpec
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.quantization import FORMS, Quantization, check_config, quantization_of

QWEN = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def spec(name: str, *shape: int, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def files(config: dict[str, Any] | None) -> dict[str, bytes]:
    found = {"model_type": "qwen3"} | ({} if config is None else {"quantization_config": config})
    return {"config.json": json.dumps(found).encode()}


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (spec("model.layers.0.self_attn.q_proj.weight", 256, 256), True),
        (spec("model.layers.0.mlp.gate_proj.weight", 256, 256), True),
        (spec("model.layers.0.mlp.experts.3.down_proj.weight", 256, 256), True),
        (spec("model.layers.0.mlp.shared_expert.up_proj.weight", 256, 256), True),
        (spec("transformer.h.0.attn.c_attn.weight", 256, 256), True),
        (spec("model.layers.0.mlp.gate.weight", 8, 256), False),
        (spec("model.layers.0.mlp.shared_expert_gate.weight", 1, 256), False),
        (spec("model.layers.0.block_sparse_moe.router.weight", 8, 256), False),
        (spec("model.embed_tokens.weight", 256, 256), False),
        (spec("transformer.wte.weight", 256, 256), False),
        (spec("lm_head.weight", 256, 256), False),
        (spec("model.layers.0.input_layernorm.weight", 256), False),
        (spec("model.layers.0.self_attn.q_norm.weight", 2, 128), False),
        (spec("model.layers.0.self_attn.q_proj.bias", 256, 256), False),
        (spec("model.layers.0.mixer.conv1d.weight", 256, 1, 4), False),
        (spec("model.layers.0.self_attn.q_proj.weight", 256, 256, dtype="F8_E4M3"), False),
        (spec("model.layers.0.self_attn.q_proj.weight", 0, 256), False),
    ],
)
def test_the_usual_rule_means_linear_layers(tensor: TensorSpec, expected: bool) -> None:
    assert Quantization(FORMS["fp8-block"]).quantizes(tensor) is expected


def test_experts_in_one_tensor_are_refused_with_the_source_that_splits_them() -> None:
    with pytest.raises(SchemaMismatch, match="pass the model itself"):
        Quantization(FORMS["fp8-block"]).quantizes(spec("model.layers.0.mlp.experts.gate_up_proj", 4, 8, 8))


@pytest.mark.parametrize("pattern", ["model.layers.1", "o_proj", "re:.*o_proj$", "model.layers.1.mlp.o_proj"])
@pytest.mark.parametrize("form", FORMS)
def test_a_base_checkpoint_says_what_stays_as_it_is(form: str, pattern: str) -> None:
    config = FORMS[form].config([pattern])

    found = quantization_of(form, files(config), [])

    assert not found.quantizes(spec("model.layers.1.mlp.o_proj.weight", 256, 256))
    assert found.quantizes(spec("model.layers.10.mlp.up_proj.weight", 256, 256))


def test_the_tensors_of_a_base_checkpoint_say_which_are_quantized() -> None:
    base = [
        spec("a.weight", 256, 200, dtype="F8_E4M3"),
        spec("a.weight_scale_inv", 2, 2, dtype="F32"),
        spec("b.weight", 256, 256),
    ]

    found = quantization_of("fp8-block", files(QWEN), base)

    assert found.quantizes(spec("a.weight", 256, 200))
    assert not found.quantizes(spec("b.weight", 256, 256))


@pytest.mark.parametrize(
    ("config", "base", "message"),
    [
        (QWEN, [spec("a.weight", 256, 256)], "no weight in that folder is in FP8"),
        (QWEN, [spec("a.weight", 256, 256, dtype="F8_E4M3")], "'a.weight' in that folder are missing"),
        (
            QWEN,
            [
                spec("a.weight", 256, 256, dtype="F8_E4M3"),
                spec("a.weight_scale_inv", 256, 1, dtype="F32"),
            ],
            r"of shape \(256, 1\)",
        ),
        (None, [spec("a.weight", 256, 256, dtype="F8_E4M3")], "has no quantization_config"),
        (QWEN | {"weight_block_size": [64, 64]}, [], "does not fit"),
        (QWEN | {"scale_fmt": "ue8m0"}, [], "does not fit"),
        ({"quant_method": "awq"}, [], "says quant_method 'awq'"),
        (FORMS["fp8-channel"].config([]), [], "does not fit"),
        (QWEN | {"modules_to_not_convert": "lm_head"}, [], "no list of names"),
        ([], [], "does not fit"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": "x"}}, [], "does not fit"),
    ],
)
def test_a_base_checkpoint_in_another_form_is_refused(config: Any, base: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        quantization_of("fp8-block", files(config), base)


@pytest.mark.parametrize("name", ["fp8", "", 8, True])
def test_an_unknown_form_is_refused_with_those_that_there_are(name: object) -> None:
    with pytest.raises(UsageError, match="fp8-block, fp8-channel"):
        quantization_of(name, {}, [])


@pytest.mark.parametrize("form", FORMS)
def test_the_config_of_an_anchor_is_that_of_a_checkpoint_in_this_form(form: str) -> None:
    quantization = Quantization(FORMS[form])
    scales = FORMS[form].scale_name("model.layers.0.mlp.up_proj.weight")
    stored = [
        spec("model.layers.0.mlp.up_proj.weight", 256, 256, dtype="F8_E4M3"),
        spec(scales, 2, 2, dtype="F32"),
        spec("model.layers.0.mlp.gate.weight", 8, 256),
        spec("model.norm.weight", 256),
        spec("lm_head.weight", 256, 256),
    ]

    schema = Schema(tensors=tuple(stored))
    config = json.loads(quantization.complete(files(None), schema)["config.json"])["quantization_config"]

    kept = ["lm_head", "model.layers.0.mlp.gate"]
    assert config == FORMS[form].config(kept)
    again = quantization_of(form, {"config.json": json.dumps({"quantization_config": config}).encode()}, [])
    assert again.form == FORMS[form]
    assert list(again.patterns) == kept
    assert quantization.complete({}, schema) == {}


CHANNEL = FORMS["fp8-channel"].config([])
(GROUP,) = CHANNEL["config_groups"].values()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"config_groups": {"g": GROUP | {"input_activations": None}}}, "input_activations None"),
        (
            {
                "config_groups": {
                    "g": GROUP | {"input_activations": GROUP["weights"] | {"strategy": "tensor"}}
                }
            },
            "'strategy': 'tensor'",
        ),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"transform_config": {"R1": {}}}, "transform_config"),
        ({"config_groups": {"g": GROUP | {"targets": ["re:.*proj"]}}}, "re:.*proj"),
    ],
)
def test_a_base_whose_config_says_more_than_the_form_is_refused(change: dict[str, Any], says: str) -> None:
    quantization_of("fp8-channel", files(CHANNEL), [])
    quantization_of("fp8-channel", files(CHANNEL | {"kv_cache_scheme": None, "transform_config": {}}), [])
    with pytest.raises(UsageError, match=re.escape(says)):
        quantization_of("fp8-channel", files(CHANNEL | change), [])


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.block_sparse_moe.router.layer.weight",
        "model.layers.0.mlp.gate.wg.weight",
        "transformer.blocks.0.ffn.router.layer.weight",
        "output.weight",
        "v_head.summary.weight",
        "shared.weight",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    ],
)
def test_routers_and_heads_of_other_names_stay_as_they_are(name: str) -> None:
    assert not Quantization(FORMS["fp8-channel"]).quantizes(spec(name, 64, 64))


def test_experts_in_one_weight_are_refused() -> None:
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    with pytest.raises(SchemaMismatch, match="holds the experts of a layer in one tensor"):
        Quantization(FORMS["fp8-channel"]).quantizes(spec(name, 4, 64, 64))


def test_a_tensor_that_the_base_does_not_have_is_refused_unless_it_stays_as_it_is() -> None:
    base = [spec("a.weight", 256, 200, dtype="F8_E4M3"), spec("a.weight_scale_inv", 2, 2, dtype="F32")]
    found = quantization_of("fp8-block", files(QWEN), base)
    assert not found.quantizes(spec("lm_head.weight", 256, 256))
    with pytest.raises(SchemaMismatch, match=r"in files= has no tensor 'c.weight'"):
        found.quantizes(spec("c.weight", 256, 256))


def test_a_base_of_which_a_file_is_missing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"but 2.safetensors is missing; complete the folder"):
        quantization_of("fp8-block", files(QWEN), [], "2.safetensors is missing")
    assert quantization_of("fp8-block", files(None), [], "2.safetensors is missing").names is None


BLOCKS = [spec("a.weight", 256, 200, dtype="F8_E4M3"), spec("a.weight_scale_inv", 2, 2, dtype="F32")]
ROWS = [spec("a.weight", 256, 200, dtype="F8_E4M3"), spec("a.weight_scale", 256, 1, dtype="F32")]


@pytest.mark.parametrize(
    ("config", "stored", "says"),
    [
        (QWEN, BLOCKS, None),
        (CHANNEL, ROWS, None),
        (CHANNEL | {"config_groups": {"g": GROUP | {"input_activations": None}}}, ROWS, None),
        ({"quant_method": "modelopt"}, ROWS, None),
        (None, BLOCKS, "has no quantization_config"),
        ([], BLOCKS, "has no quantization_config"),
        ({"quant_method": "fp8", "weight_block_size": ["a", 0]}, BLOCKS, "weight_block_size"),
        (CHANNEL, BLOCKS, r"'a.weight_scale_inv' of shape \(2, 2\), but"),
        (QWEN | {"weight_block_size": [64, 64]}, BLOCKS, "weight_block_size"),
        (QWEN | {"weight_block_size": None}, BLOCKS, "of shape"),
        (QWEN, ROWS, r"of shape \(256, 1\)"),
        ({"quant_method": "awq"}, ROWS, "awq"),
        (
            QWEN,
            [spec("a.weight", 8, 8), spec("ids", 4, dtype="BOOL"), spec("no", 0)],
            "none of the published",
        ),
        ({"quant_method": "gptq"}, [spec("a.qweight", 8, 8, dtype="I32")], None),
        (None, [spec("a.weight", 8, 8)], None),
    ],
)
def test_weights_that_are_quantized_already_are_compared_with_the_config(
    config: Any, stored: list[TensorSpec], says: str | None
) -> None:
    schema = Schema(tensors=tuple(stored))
    if says is None:
        check_config(files(config), schema)
    else:
        with pytest.raises(UsageError, match=says):
            check_config(files(config), schema)
    check_config({}, schema)


def test_the_former_name_of_the_entry_is_read_and_replaced() -> None:
    old = {"config.json": json.dumps({"compression_config": CHANNEL}).encode()}
    found = quantization_of("fp8-channel", old, ROWS)
    assert found.names == {"a.weight"}
    config = json.loads(found.complete(old, Schema(tensors=tuple(ROWS)))["config.json"])
    assert config == {"quantization_config": FORMS["fp8-channel"].config(["lm_head"])}
    with pytest.raises(UsageError, match="does not fit"):
        quantization_of("fp8-block", old, ROWS)
