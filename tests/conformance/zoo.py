"""Tiny models of many architectures, with random weights, as folders that vLLM loads.

Each is built by transformers and saved under the names that its checkpoints have on the Hub. Every tensor is
random, norms, biases and router corrections too, so that one that is swapped or dropped shows.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
import transformers
from architecture import Architecture
from image_models import IMAGE_MODELS
from text_models import TEXT_MODELS
from transformers import PreTrainedModel

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {each.name: each for each in (*TEXT_MODELS, *IMAGE_MODELS)}
)


_IN_FLOAT32 = ("e_score_correction_bias", "A_log", "dt_bias")
"""Tensors that checkpoints on the Hub have in float32, among others in bfloat16."""


def build(architecture: Architecture) -> PreTrainedModel:
    """Return the same random model each time: bf16, but for tensors that transformers keeps in float32."""
    config = architecture.config()
    config.dtype = torch.bfloat16
    model = getattr(transformers, architecture.auto).from_config(config).to(torch.bfloat16)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(_IN_FLOAT32):
            tensor.data = tensor.float()
    random = torch.Generator().manual_seed(7)
    kept = {name for name, _ in model.named_parameters()} | set(model.state_dict())
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in kept and tensor.is_floating_point():
                tensor.copy_(_random(name, tensor.shape, random))
    return model


def _random(name: str, shape: torch.Size, random: torch.Generator) -> torch.Tensor:
    """Random values of a size at which every input still changes the answer, and none overflows."""
    noise = torch.randn(shape, generator=random)
    if name.endswith("A_log"):
        return torch.rand(shape, generator=random) * 2
    if name.endswith("e_score_correction_bias"):
        # Of large models they are far from zero, and near each other.
        return 34.5 + 0.14 * noise
    if "embed" in name or "wte" in name:
        return noise
    if len(shape) < 2:
        # Norms, biases, router corrections, sinks.
        return ("norm" in name and name.endswith("weight")) + 0.2 * noise
    return noise * (1.5 / shape[-1] ** 0.5)


def save(architecture: Architecture, folder: Path) -> Path:
    """Write a checkpoint folder that vLLM serves, without a tokenizer if it can."""
    build(architecture).save_pretrained(folder)
    if architecture.called is not None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [architecture.called]}))
    if architecture.processor is not None:
        architecture.processor().save_pretrained(folder)
    return folder
