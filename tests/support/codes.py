"""Weights in newer forms than FP8, MXFP8, MXFP4 and NVFP4, as the reference quantizers write them."""

from collections.abc import Mapping
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

FORMATS = {"mxfp8": "mxfp8-quantized", "mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized"}
"""As compressed-tensors names them."""
GPT_OSS = "gpt-oss"
"""The form of its checkpoints: MXFP4 for experts, codes and scales of all of a layer in one tensor each."""


def quantized(tensors: Mapping[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """Quantize the matrices of linear layers, or of gpt-oss's experts, and leave the others."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if form == GPT_OSS and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            rows = tensor.transpose(1, 2)
            coded = _coded(rows.flatten(0, 1), "mxfp4")
            found[f"{name}_blocks"] = coded["weight_packed"].view(*rows.shape[:2], -1, 16)
            found[f"{name}_scales"] = coded["weight_scale"].view(*rows.shape[:2], -1)
        elif form != GPT_OSS and name.endswith("_proj.weight"):
            module = name.removesuffix("weight")
            found |= {module + each: data for each, data in _coded(tensor, form).items()}
        else:
            found[name] = tensor
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _scheme(form: str) -> Any:
    return preset_name_to_scheme(form.upper(), ["Linear"])


def _coded(weights: torch.Tensor, form: str) -> dict[str, torch.Tensor]:
    arguments = _scheme(form).weights
    state, given = {"weight": weights.float()}, dict[str, torch.Tensor]()
    if form == "nvfp4":
        given["global_scale"] = generate_gparam(*state["weight"].aminmax())
        state |= {"weight_global_scale": given["global_scale"], "input_global_scale": torch.ones(1)}
    groups = state["weight"].unflatten(-1, (-1, arguments.group_size))
    state["weight_scale"], _ = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments, **given)
    compressor: Any = BaseCompressor.get_value_from_registry(FORMATS[form])
    found: dict[str, torch.Tensor] = compressor.compress(state, _scheme(form))
    return found


def config(form: str) -> dict[str, object]:
    """Return the `quantization_config` of a checkpoint."""
    if form == GPT_OSS:
        return {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[form],
        "config_groups": {"group_0": _scheme(form).model_dump(mode="json")},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
