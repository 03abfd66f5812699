"""A run and a server have one form, or the store is not opened."""

from types import SimpleNamespace

import pytest
import torch
from tiny_fp8 import config, quantised

from patchstore.errors import SchemaMismatch
from patchstore.format.records import Schema, TensorSpec
from patchstore.tensors.bits import spec_of
from vllm_plugin.pairing import check_pair, of_checkpoint, of_run

pytestmark = pytest.mark.vllm


def schema(form: str, *more: TensorSpec) -> Schema:
    weights = {"norm.weight": torch.ones(3).bfloat16(), "q_proj.weight": torch.ones(256, 128).bfloat16()}
    tensors = weights if form == "plain" else quantised(weights, form)
    return Schema(tensors=(*(spec_of(name, each) for name, each in tensors.items()), *more), tied={})


def fp8(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="F8_E4M3", shape=shape)


def scale(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="F32", shape=shape)


@pytest.mark.parametrize("form", ["plain", "fp8-block", "fp8-channel"])
def test_a_runs_tensors_tell_its_form(form):
    assert of_run(schema(form)) == form


def test_codes_without_scales_or_with_two_kinds_of_scales_have_no_form_that_is_known():
    assert of_run(schema("plain", fp8("w", 8, 8))) is None
    assert of_run(schema("plain", fp8("a.weight", 8, 8), scale("a.weight_scale", 1))) is None
    assert of_run(schema("fp8-block", fp8("a.weight", 8, 8), scale("a.weight_scale", 8, 1))) is None


CHANNEL_4 = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}}


@pytest.mark.parametrize(
    ("known", "form"),
    [
        (None, "plain"),
        (config("fp8-block"), "fp8-block"),
        (config("fp8-channel"), "fp8-channel"),
        (SimpleNamespace(**config("fp8-block")), "fp8-block"),
        ({"quant_method": "fp8", "weight_block_size": None}, None),
        ({"quant_method": "awq"}, None),
        (CHANNEL_4, None),
        ({"quant_method": "compressed-tensors"}, None),
        ({}, None),
    ],
)
def test_a_checkpoints_config_tells_its_form(known, form):
    assert of_checkpoint(known) == form


FORMS = ("plain", "fp8-block", "fp8-channel")
DIFFERENT = [(run, served) for run in FORMS for served in FORMS if run != served]


@pytest.mark.parametrize(("run", "served"), DIFFERENT)
def test_another_form_is_refused_with_both_and_what_to_do(run, served):
    with pytest.raises(SchemaMismatch) as refused:
        check_pair(schema(run), served, is_calculated=False)
    message = str(refused.value)
    for form in {run, served}:
        assert (f"({form})" in message) == (form != "plain")
    assert "not quantised" in message or "plain" not in {run, served}
    assert ('quantization="fp8-' in message) == (run == "plain")
    assert ("patchstore replay" in message) == (run != "plain")


@pytest.mark.parametrize("form", FORMS)
def test_its_own_form_is_served_and_an_unknown_one_is_left_to_the_loader(form):
    check_pair(schema(form), form, is_calculated=False)
    check_pair(schema(form), None, is_calculated=False)
    check_pair(schema("plain", fp8("w", 8, 8)), form, is_calculated=False)


def test_a_server_that_quantises_by_itself_takes_only_runs_that_are_not_quantised():
    check_pair(schema("plain"), "plain", is_calculated=True)
    with pytest.raises(SchemaMismatch, match="quantises what it loads"):
        check_pair(schema("fp8-block"), "plain", is_calculated=True)
