"""A two-layer Qwen3 with random weights, from which a server starts in seconds. Needs transformers."""

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from patchstore.bucket.digests import digest
from patchstore.tensors.bits import raw_bytes

VOCABULARY = 256


def build(*, tied: bool = False) -> Qwen3ForCausalLM:
    """Return the same random bf16 model each time."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        # Random weights must still tell their inputs apart, or every answer is the same token.
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(7)
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


def save(model: Qwen3ForCausalLM, folder: Path) -> Path:
    """Write a checkpoint folder that vLLM serves."""
    model.save_pretrained(folder)
    names = [f"w{i}" for i in range(VOCABULARY)]
    words = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token=names[0], eos_token=names[0])
    tokenizer.save_pretrained(folder)
    return folder


def served(tensors: Mapping[str, torch.Tensor], layers: int = 2) -> dict[str, str]:
    """Return the fingerprint that a server of this model has for these tensors, on one rank.

    It states how vLLM fuses them, without asking vLLM. Buffers are not part of it.
    """
    live = dict(tensors)
    for layer in range(layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        live[f"{attention}.qkv_proj.weight"] = torch.cat(
            [live.pop(f"{attention}.{part}_proj.weight") for part in "qkv"]
        )
        live[f"{mlp}.gate_up_proj.weight"] = torch.cat(
            [live.pop(f"{mlp}.{part}_proj.weight") for part in ("gate", "up")]
        )
    return {name: digest(raw_bytes(tensor)) for name, tensor in live.items()}
