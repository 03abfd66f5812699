"""A LoRA adapter of the tiny Qwen3, with random weights, as PEFT saves one."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support import tiny_qwen

_RANK = 4
_MODULES = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def tensors(rank: int = _RANK, modules: Sequence[str] = _MODULES) -> dict[str, torch.Tensor]:
    """Return the same adapter each time; large enough to change every answer."""
    weights = tiny_qwen.build().state_dict()
    shapes = {name.removesuffix(".weight"): tuple(weight.shape) for name, weight in weights.items()}
    return of_shapes(
        {name: shape for name, shape in shapes.items() if name.endswith(tuple(modules))}, rank=rank
    )


def of_shapes(
    shapes: Mapping[str, tuple[int, ...]], num: int = 1, rank: int = _RANK
) -> dict[str, torch.Tensor]:
    """Return matrices for modules of these shapes; `num` experts of a module lie beside each other."""
    random = torch.Generator().manual_seed(5)
    found = {}
    for name, (num_out, num_in) in shapes.items():
        down = torch.randn(num * rank, num_in, generator=random)
        up = torch.randn(num_out, num * rank, generator=random)
        module = f"base_model.model.{name}"
        found |= {f"{module}.lora_A.weight": 0.2 * down, f"{module}.lora_B.weight": 0.2 * up}
    return {name: each.bfloat16() for name, each in found.items()}


def config(folder: Path, rank: int = _RANK, modules: Sequence[str] = _MODULES, **others: Any) -> Path:
    """Write a folder with the config alone."""
    folder.mkdir(parents=True)
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    said |= {"target_modules": [*modules], "bias": "none", "base_model_name_or_path": "tiny"} | others
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def save(folder: Path) -> Path:
    save_file(tensors(), config(folder) / "adapter_model.safetensors")
    return folder
