"""Tiny models whose sizes are multiples of 128, for runs and servers in FP8."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from trainer import Trainer
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from patchstore.quantization import FORMS
from tests.support import tiny_qwen

SIZES = {
    "vocab_size": tiny_qwen.VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""Each rank of two has whole blocks of every matrix."""


LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""Latent attention, whose parts of one projection vLLM keeps beside it, as numbers. GPUs take only the real
`kv_lora_rank` and `qk_rope_head_dim`."""


def build(kind: str = "dense") -> PreTrainedModel:
    """Return the same random bf16 model each time: `dense`, `experts`, `latent` with both, or `gpt-oss`."""
    torch.manual_seed(7)
    few = {"moe_intermediate_size": 256, "num_experts_per_tok": 2}
    model: PreTrainedModel
    if kind == "latent":
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES | few | LATENT, intermediate_size=512))
    elif kind == "gpt-oss":
        model = GptOssForCausalLM(
            GptOssConfig(**SIZES, intermediate_size=256, num_local_experts=4, num_experts_per_tok=2)
        )
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                # Nought in a new model, and not in one that was trained.
                parameter.data.normal_(0, SIZES["initializer_range"])
    elif kind == "experts":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **few, num_experts=4))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, intermediate_size=512))
    return model.to(torch.bfloat16)


def save(folder: Path, kind: str = "dense") -> Path:
    """Write the bf16 checkpoint."""
    return tiny_qwen.save(build(kind), folder)


@contextmanager
def published(folder: Path, base: Path, form: str | None) -> Iterator[Trainer]:
    """A trainer of the bf16 checkpoint, which has published version 0 in a form: None for bf16."""
    # From the file, which has experts one by one.
    tensors = load_file(base / "model.safetensors")
    trainer = Trainer(folder, tensors, quantization=form, files=base)
    try:
        trainer.publish()
        yield trainer
    finally:
        trainer.close()


def change(tensors: Mapping[str, torch.Tensor], *, seed: int, share: float = 0.02) -> None:
    """Change some numbers by a tenth."""
    random = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        chosen = torch.rand(tensor.shape, generator=random) < share
        tensor[chosen] = (tensor[chosen].float() * 1.1).to(tensor.dtype)


def step(trainer: Trainer, *, share: float = 0.02) -> None:
    """Change a share of the numbers by a tenth, and with them some codes and scales."""
    change(trainer.tensors, seed=len(trainer.history), share=share)
    trainer.publish()


def quantized(tensors: Mapping[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """Quantize the matrices of linear layers, and leave the others."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        found[name] = tensor
        if name.endswith("_proj.weight"):
            found[name], found[FORMS[form].scale_name(name)] = FORMS[form].quantize(tensor)
    return found


def config(form: str) -> dict[str, object]:
    """The `quantization_config` of a checkpoint."""
    found: dict[str, object] = json.loads(json.dumps(FORMS[form].config(["lm_head"])))
    return found
