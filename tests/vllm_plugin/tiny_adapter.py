"""A LoRA adapter of the tiny Qwen3, with random weights, as PEFT saves one."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support import tiny_qwen

_RANK = 4
_MODULES = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save(folder: Path) -> Path:
    """Write the same adapter each time; large enough to change every answer."""
    random = torch.Generator().manual_seed(5)
    tensors = {}
    for name, weight in tiny_qwen.build().state_dict().items():
        if name.rpartition(".")[0].endswith(_MODULES):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            down = torch.randn(_RANK, weight.shape[1], generator=random)
            up = torch.randn(weight.shape[0], _RANK, generator=random)
            tensors |= {f"{module}.lora_A.weight": 0.2 * down, f"{module}.lora_B.weight": 0.2 * up}
    folder.mkdir(parents=True)
    save_file({name: each.bfloat16() for name, each in tensors.items()}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": _RANK, "lora_alpha": 2 * _RANK}
    config |= {"target_modules": [*_MODULES], "bias": "none", "base_model_name_or_path": "tiny"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
