"""A two-layer Qwen3 with random weights: small enough to start a server from in seconds."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

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
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w0").save_pretrained(folder)
    return folder
