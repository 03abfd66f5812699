"""Small mixtures of experts of transformers, of which `save_pretrained` converts tensors, or does not."""

from pathlib import Path
from typing import Any

import torch

from tests.support.small_models import SIZES

_TOP = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
_GROUPED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}

KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": _LOCAL,
    "DeepseekV3": _TOP | _LATENT | _GROUPED,
    "GptOss": _LOCAL,
    "Jamba": _EXPERTS
    | {
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "Qwen3Next": _TOP
    | {
        "num_experts": 4,
        "shared_expert_intermediate_size": 12,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "GraniteMoe": _LOCAL,
    "Llama4": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 24},
    "Qwen2Moe": _TOP | {"num_experts": 4, "shared_expert_intermediate_size": 12},
    "DeepseekV2": _TOP | _LATENT | _GROUPED,
    "Olmoe": _EXPERTS,
    "Glm4Moe": _TOP | _GROUPED,
    "Glm4MoeLite": _TOP | _LATENT | _GROUPED,
    "Phimoe": _LOCAL,
    "GraniteMoeShared": _LOCAL | {"shared_intermediate_size": 12},
    "GraniteMoeHybrid": _LOCAL
    | {
        "shared_intermediate_size": 12,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 4,
    },
    "Ernie4_5_Moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 12,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
    },
    "MiniMax": _LOCAL,
    "MiniMaxM2": _LOCAL,
    "Dots1": _TOP | _GROUPED,
    "HunYuanMoEV1": {"num_experts": 4, "moe_topk": 2},
    "Lfm2Moe": _TOP | {"num_experts": 4, "layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "ExaoneMoe": _TOP | {"num_experts": 4, "num_shared_experts": 1},
}


def build(kind: str) -> Any:
    """Return a model with random weights, bf16."""
    import transformers

    name = "Llama4Text" if kind == "Llama4" else kind
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | KINDS[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            # Some begin as ones or zeros, which are alike wherever they are.
            parameter.copy_(torch.randn_like(parameter))
    return model


def trained(kind: str) -> Any:
    """Return a model as a trainer has it: all in float32, with biases of routers as large as real ones."""
    model = build(kind).float()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "e_score" in name:
                tensor.copy_(34.5 + 0.14 * torch.randn(tensor.shape))
            elif tensor.is_floating_point():
                tensor.mul_(0.02)
    return model


def checkpoint(model: Any, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save a model as it is on the Hub, mostly in bfloat16; return the folder, and its tensors."""
    from safetensors.torch import load_file

    model.save_pretrained(folder / "float32")
    loaded = type(model).from_pretrained(folder / "float32", dtype=torch.bfloat16)
    loaded.save_pretrained(folder / "base")
    return folder / "base", load_file(folder / "base" / "model.safetensors")
