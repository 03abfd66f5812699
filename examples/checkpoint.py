"""A model with fp32 masters, as servers hold it: in bf16."""

import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast


def served_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return copies of the weights in bf16, on the CPU; a tied output layer is left out."""
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return {name: tensor.to("cpu", torch.bfloat16, copy=True) for name, tensor in weights.items()}


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a bf16 checkpoint folder, such as any server starts from."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
