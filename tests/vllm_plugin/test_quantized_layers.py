"""vLLM's own layers of newer forms: at start each is proved to keep what it loads, or refused by name."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor import parameter

from patchstore.errors import UsageError
from vllm_plugin import quantized

with warnings.catch_warnings():
    # They import all of torch's compiler, and that some functions of other days.
    warnings.simplefilter("ignore", DeprecationWarning)
    import block_kernel
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.model_executor.layers.quantization import mxfp4
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsLinearMethod,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w4a4_nvfp4 as nvfp4,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_mxfp8 as mxfp8,
    )
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading


@pytest.fixture(autouse=True)
def _one_rank_and_emulation(monkeypatch):
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    for module, name in (
        (mxfp8, "init_mxfp8_linear_kernel"),
        (nvfp4, "init_nvfp4_linear_kernel"),
        (mxfp4, "select_mxfp4_moe_backend"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    block_kernel.choose_emulation()


def constructed(method: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model before it is loaded, and its layer, which has the method."""
    model = torch.nn.Module()
    model.proj = torch.nn.Module()
    model.proj.quant_method = method
    return model, model.proj


def linear(scheme: Any) -> torch.nn.Module:
    """A model of one linear layer, loaded."""
    model, layer = constructed(CompressedTensorsLinearMethod(None))
    layer.scheme = scheme
    scheme.create_weights(
        layer,
        output_partition_sizes=[64, 64],
        input_size_per_partition=128,
        params_dtype=torch.bfloat16,
        weight_loader=print,
    )
    for each in layer.parameters():
        each.data.fill_(1)
    record_metadata_for_reloading(model)
    layer.quant_method.process_weights_after_loading(layer)
    return model


def experts(backend: Mxfp4MoeBackend) -> torch.nn.Module:
    """A model of one layer of gpt-oss's experts, as it is constructed."""
    method = mxfp4.GptOssMxfp4MoEMethod(SimpleNamespace(max_capture_size=1, w13_num_shards=2, has_bias=True))
    method.mxfp4_backend, method.moe_quant_config = backend, None
    model, layer = constructed(method)
    method.create_weights(layer, 4, 64, 64, torch.bfloat16)
    record_metadata_for_reloading(model)
    return model


def test_mxfp8_that_is_widened_each_time_is_accepted(monkeypatch):
    monkeypatch.setenv("VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD", "0")
    quantized.check_kept([linear(mxfp8.CompressedTensorsW8A8Mxfp8())])


def test_mxfp8_that_is_widened_once_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD", "1")
    with pytest.raises(
        UsageError, match=r"'proj', which EmulationMxfp8LinearKernel multiplies .*of weight, "
    ):
        quantized.check_kept([linear(mxfp8.CompressedTensorsW8A8Mxfp8())])


def test_nvfp4_whose_global_scales_are_calculated_is_refused():
    with pytest.raises(UsageError, match=r"'proj', which EmulationNvFp4LinearKernel multiplies .*serve bf16"):
        quantized.check_kept([linear(nvfp4.CompressedTensorsW4A4Fp4())])


def test_experts_of_gpt_oss_that_a_backend_keeps_as_they_are_are_accepted():
    model = experts(Mxfp4MoeBackend.EMULATION)
    before = dict(model.named_parameters())
    quantized.check_kept([model])
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is each for name, each in before.items())


@pytest.mark.parametrize("backend", [Mxfp4MoeBackend.CPU, Mxfp4MoeBackend.MARLIN], ids=lambda each: each.name)
def test_experts_of_gpt_oss_that_a_backend_packs_are_refused(backend):
    with pytest.raises(UsageError, match=r"'proj', which GptOssMxfp4MoEMethod multiplies by.* serve bf16"):
        quantized.check_kept([experts(backend)])
