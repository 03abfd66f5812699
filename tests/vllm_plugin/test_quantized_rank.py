"""Layers whose quantization method replaces what was loaded: a trace finds where that went, or refuses."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_fp8
import torch
from mapped import mapped, served
from trace_scene import random_bits, schema_of
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.utils import replace_parameter

from patchstore.bucket.records import Schema, TensorSpec
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.tensors.bits import bits, spec_of
from vllm_plugin import quantized
from vllm_plugin.live.weights import LiveWeights

with warnings.catch_warnings():
    # They import all of torch's compiler, and that some functions of other days.
    warnings.simplefilter("ignore", DeprecationWarning)
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

E4M3 = torch.float8_e4m3fn
ROWS, COLUMNS = 256, 256
"""Equal, so that no shape tells a matrix from its transposition."""


class Method(QuantizeMethodBase):
    """A quantization method of two parameters, as vLLM calls it; what it does after loading is given."""

    def __init__(self, after: Callable[[torch.nn.Module], object]) -> None:
        self.after = after
        self.kernel: object = "the first"

    def create_weights(self, layer: torch.nn.Module, *_: Any, **__: Any) -> None:
        for name, shape, dtype in (
            ("weight", (ROWS, COLUMNS), E4M3),
            ("weight_scale_inv", (2, 2), torch.float32),
        ):
            parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            layer.register_parameter(name, parameter)

    def apply(self, layer: torch.nn.Module, *_: Any, **__: Any) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.kernel = object()
        self.after(layer)


class Model(torch.nn.Module):
    """A layer that fuses the codes and scales of two halves of its rows, and a norm beside it."""

    def __init__(self, after: Callable[[torch.nn.Module], object]) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16), requires_grad=False)
        self.layer = torch.nn.Module()
        self.layer.quant_method = Method(after)
        self.layer.quant_method.create_weights(self.layer)
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor)
                continue
            part, _, kind = name.partition(".")
            target = getattr(self.layer, kind).data
            half = target.shape[0] // 2
            target.narrow(0, {"gate": 0, "up": half}[part], half).copy_(tensor)


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    found = {"norm": random_bits((8,), torch.bfloat16, seed)}
    for part in ("gate", "up"):
        codes = random_bits((ROWS // 2, COLUMNS), torch.uint8, seed := seed + 1).view(E4M3)
        found |= {
            f"{part}.weight": codes,
            f"{part}.weight_scale_inv": random_bits((1, 2), torch.float32, seed),
        }
    return found


def started(after: Callable[[torch.nn.Module], object], weights: Mapping[str, torch.Tensor]) -> Model:
    """A model that is loaded as vLLM does it when it starts."""
    model = Model(after)
    model.load_weights(iter(weights.items()))
    model.layer.quant_method.process_weights_after_loading(model.layer)
    return model


def load_traced(model: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    quantized.load(model, lambda: model.load_weights(weights))


def followed(model: Model, weights: Mapping[str, torch.Tensor]) -> LiveWeights:
    """The model's weights, mapped."""
    (live,) = mapped(schema_of(weights), served(model, load=load_traced, load_traced=load_traced))
    return live


def left_alone(layer: torch.nn.Module) -> None:
    """As with vLLM's Triton kernel: other parameters in the same memory."""
    replace_parameter(layer, "weight", layer.weight.data)
    replace_parameter(layer, "weight_scale_inv", layer.weight_scale_inv.data)


def transposed(layer: torch.nn.Module) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.t(), requires_grad=False)


def by_columns(layer: torch.nn.Module) -> None:
    """Scales in columns, each aligned, as DeepGEMM has them: a function of its own arranges them."""
    codes, scales = fp8_utils.deepgemm_post_process_fp8_weight_block(
        wq=layer.weight, ws=layer.weight_scale_inv, quant_block_shape=(128, 128), use_e8m0=False
    )
    replace_parameter(layer, "weight", codes)
    replace_parameter(layer, "weight_scale_inv", scales)


def arranged(sf: torch.Tensor, **_: object) -> torch.Tensor:
    """What DeepGEMM does on a GPU, which takes no tensor without elements."""
    assert not sf.is_meta
    groups, rows, columns = sf.shape
    aligned = torch.full((groups, columns, 4), float("nan"))
    aligned[:, :, :rows] = sf.transpose(1, 2)
    return aligned.transpose(1, 2)[:, :rows]


def copied(layer: torch.nn.Module) -> None:
    """The halves change places, and the result is transposed and copied."""
    swapped = torch.cat([layer.weight[ROWS // 2 :], layer.weight[: ROWS // 2]])
    replace_parameter(layer, "weight", swapped.t().contiguous())


def renamed(layer: torch.nn.Module) -> None:
    """Other names after loading than before."""
    layer.register_parameter(
        "scale", torch.nn.Parameter(layer.weight_scale_inv.data.t(), requires_grad=False)
    )
    del layer.weight_scale_inv


@pytest.mark.parametrize(
    "after", [left_alone, transposed, by_columns, copied], ids=lambda each: each.__name__
)
def test_codes_and_scales_are_written_where_they_are_served(after, monkeypatch):
    monkeypatch.setattr(fp8_utils, "transform_sf_into_required_layout", arranged)
    old, new = checkpoint(1), checkpoint(50)
    model, expected = started(after, old), started(after, new)
    kernel, addresses = (
        model.layer.quant_method.kernel,
        {n: p.data_ptr() for n, p in model.named_parameters()},
    )

    live = followed(model, old)

    assert live.misplaced(old) == []
    assert set(live.misplaced(new)) == new.keys()
    live.write(live.bring(live.pieces(new)))
    assert model.layer.quant_method.kernel is kernel
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == addresses
    for name, tensor in expected.named_parameters():
        assert torch.equal(bits(dict(model.named_parameters())[name]), bits(tensor)), name


def test_a_trace_neither_writes_nor_replaces(monkeypatch):
    monkeypatch.setattr(fp8_utils, "transform_sf_into_required_layout", arranged)
    model = started(by_columns, checkpoint(1))
    layer, attributes = model.layer, dict(vars(model.layer))
    held = {name: (each, bits(each).clone()) for name, each in model.named_parameters()}
    method = dict(vars(layer.quant_method))

    followed(model, checkpoint(1))

    assert dict(vars(layer)) == attributes
    assert dict(vars(layer.quant_method)) == method
    for name, (each, before) in held.items():
        assert dict(model.named_parameters())[name] is each
        assert torch.equal(bits(each), before)
    assert fp8_utils.transform_sf_into_required_layout is arranged


def halved(layer: torch.nn.Module) -> None:
    layer.weight_scale_inv.data.mul_(0.5)


def fused_maximum(layer: torch.nn.Module) -> None:
    replace_parameter(layer, "weight_scale_inv", layer.weight_scale_inv.max().expand(2, 2).contiguous())


def decides(layer: torch.nn.Module) -> None:
    if (layer.weight_scale_inv > 1).any():
        left_alone(layer)


def by_address(layer: torch.nn.Module) -> None:
    assert layer.weight.data_ptr()


def packed(layer: torch.nn.Module) -> None:
    replace_parameter(layer, "weight", layer.weight.view(torch.int32))


def narrower(layer: torch.nn.Module) -> None:
    replace_parameter(layer, "weight", layer.weight[:, :128])


def rounded(layer: torch.nn.Module) -> None:
    fp8_utils.deepgemm_post_process_fp8_weight_block(
        wq=layer.weight, ws=layer.weight_scale_inv, quant_block_shape=(128, 128), use_e8m0=True
    )


def keeps_a_number(layer: torch.nn.Module) -> None:
    layer.input_scale = layer.weight_scale_inv.flatten()[0].item()


REFUSED = {
    keeps_a_number: "keeps 'input_scale' of 'layer' as a number that it read from weights",
    halved: "calculates something else from",
    fused_maximum: "calculates something else from",
    decides: "decides by elements|looks at the elements",
    by_address: "hands weights to a kernel after loading",
    rounded: "VLLM_USE_DEEP_GEMM_E8M0=0",
    packed: "versions cannot be written|calculates something else",
    narrower: "calculates something else from|versions cannot be written",
}


@pytest.mark.parametrize("after", REFUSED, ids=lambda each: each.__name__)
def test_what_is_calculated_is_refused_and_the_model_left_alone(after):
    model = started(left_alone, checkpoint(1))
    model.layer.quant_method.after = after
    held = {name: (each, bits(each).clone()) for name, each in model.named_parameters()}

    with pytest.raises(UsageError, match=REFUSED[after]):
        followed(model, checkpoint(1))

    for name, (each, before) in held.items():
        assert dict(model.named_parameters())[name] is each
        assert torch.equal(bits(each), before)


KERNELS = {
    "rounds": {"fp8_linear": SimpleNamespace(use_deep_gemm_e8m0=True)},
    "rounds-large-batches": {
        "fp8_linear": SimpleNamespace(fallback=SimpleNamespace(use_deep_gemm_e8m0=True))
    },
}


@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_that_round_scales_are_refused_at_start(kind):
    model = started(left_alone, checkpoint(1))
    vars(model.layer.quant_method).update(KERNELS[kind])
    with pytest.raises(UsageError, match="VLLM_USE_DEEP_GEMM_E8M0=0"):
        quantized.check_kept([model])


@pytest.mark.parametrize("after", [left_alone, transposed, copied], ids=lambda each: each.__name__)
def test_layers_in_which_weights_are_only_moved_are_accepted_at_start(after):
    model = started(after, checkpoint(1))
    kept = {name: (each, bits(each).clone()) for name, each in model.named_parameters()}
    kernel = model.layer.quant_method.kernel
    quantized.check_kept([model])
    assert model.layer.quant_method.kernel is kernel
    for name, (each, before) in kept.items():
        assert dict(model.named_parameters())[name] is each
        assert torch.equal(bits(each), before)


def swizzled(layer: torch.nn.Module) -> None:
    """As vLLM's Triton kernels for MXFP4 keep weights: in no parameter."""
    layer.quant_method.kept = [layer.weight.data.t().contiguous()]
    del layer.weight


def test_a_layer_that_keeps_weights_in_no_parameter_is_refused_at_start():
    with pytest.raises(UsageError, match=r"'layer', which .* multiplies by, after loading, of weight, so"):
        quantized.check_kept([started(swizzled, checkpoint(1))])


@pytest.mark.parametrize("after", REFUSED, ids=lambda each: each.__name__)
def test_layers_in_which_weights_are_calculated_are_refused_at_start_by_name(after):
    model = started(left_alone, checkpoint(1))
    model.layer.quant_method.after = after
    with pytest.raises(UsageError, match=r"'layer', which .* multiplies by, .*after loading.* or serve bf16"):
        quantized.check_kept([model])


def test_a_layer_that_comes_out_in_another_shape_is_refused_by_name():
    model = started(left_alone, checkpoint(1))
    model.layer.quant_method.after = renamed
    with pytest.raises(UsageError, match=r"layer\.weight_scale_inv is \(2, 2\) .* would be gone"):
        followed(model, checkpoint(1))


def test_scales_of_a_cache_need_nothing_from_a_run():
    # vLLM 0.27 makes them parameters of layers in compressed-tensors.
    model, weights = started(left_alone, checkpoint(1)), checkpoint(1)
    model.attn = torch.nn.Module()
    model.attn.register_parameter("_k_scale", torch.nn.Parameter(torch.ones(()), requires_grad=False))
    assert followed(model, weights).misplaced(weights) == []


def test_a_tensor_that_the_run_has_as_numbers_and_the_server_as_codes_is_refused_by_name():
    model, weights = started(left_alone, checkpoint(1)), checkpoint(1)
    weights["up.weight"] = weights["up.weight"].to(torch.bfloat16)
    models = served(model, load=load_traced, load_traced=load_traced)
    with pytest.raises(SchemaMismatch, match=r"the run has 'up.weight' as BF16, and this server as .*float8"):
        models.trace(schema_of(weights))


# A run and a server have one form, or the store is not opened.


def schema(form: str, *more: TensorSpec) -> Schema:
    weights = {"norm.weight": torch.ones(3).bfloat16(), "q_proj.weight": torch.ones(256, 128).bfloat16()}
    tensors = weights if form == "plain" else tiny_fp8.quantized(weights, form)
    return Schema(tensors=(*(spec_of(name, each) for name, each in tensors.items()), *more), tied={})


def fp8(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="F8_E4M3", shape=shape)


def scale(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="F32", shape=shape)


@pytest.mark.parametrize("form", ["plain", "fp8-block", "fp8-channel"])
def test_a_runs_tensors_tell_its_form(form):
    assert quantized.of_run(schema(form)) == form


def test_codes_without_scales_or_with_two_kinds_of_scales_have_no_form_that_is_known():
    assert quantized.of_run(schema("plain", fp8("w", 8, 8))) is None
    assert quantized.of_run(schema("plain", fp8("a.weight", 8, 8), scale("a.weight_scale", 1))) is None
    assert quantized.of_run(schema("fp8-block", fp8("a.weight", 8, 8), scale("a.weight_scale", 8, 1))) is None


CHANNEL_4 = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}}


@pytest.mark.parametrize(
    ("known", "form"),
    [
        (None, "plain"),
        (tiny_fp8.config("fp8-block"), "fp8-block"),
        (tiny_fp8.config("fp8-channel"), "fp8-channel"),
        (SimpleNamespace(**tiny_fp8.config("fp8-block")), "fp8-block"),
        ({"quant_method": "fp8", "weight_block_size": None}, None),
        ({"quant_method": "awq"}, None),
        (CHANNEL_4, None),
        ({"quant_method": "compressed-tensors"}, None),
        ({}, None),
    ],
)
def test_a_checkpoints_config_tells_its_form(known, form):
    assert quantized.of_checkpoint(known) == form


FORMS = ("plain", "fp8-block", "fp8-channel")
DIFFERENT = [(run, served) for run in FORMS for served in FORMS if run != served]


@pytest.mark.parametrize(("run", "served"), DIFFERENT)
def test_another_form_is_refused_with_both_and_what_to_do(run, served):
    with pytest.raises(SchemaMismatch) as refused:
        quantized.check_pair(schema(run), served, is_calculated=False)
    message = str(refused.value)
    for form in {run, served}:
        assert (f"({form})" in message) == (form != "plain")
    assert "not quantized" in message or "plain" not in {run, served}
    assert ('quantization="fp8-' in message) == (run == "plain")
    assert ("patchstore replay" in message) == (run != "plain")


@pytest.mark.parametrize("form", FORMS)
def test_its_own_form_is_served_and_an_unknown_one_is_left_to_the_loader(form):
    quantized.check_pair(schema(form), form, is_calculated=False)
    quantized.check_pair(schema(form), None, is_calculated=False)
    quantized.check_pair(schema("plain", fp8("w", 8, 8)), form, is_calculated=False)


def test_a_server_that_quantizes_by_itself_takes_only_runs_that_are_not_quantized():
    quantized.check_pair(schema("plain"), "plain", is_calculated=True)
    with pytest.raises(SchemaMismatch, match="quantizes what it loads"):
        quantized.check_pair(schema("fp8-block"), "plain", is_calculated=True)
