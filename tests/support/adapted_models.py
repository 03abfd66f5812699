"""A small model, and adapters of PEFT on it of each kind."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 7, 10)), nn.Parameter(torch.randn(3, 10, 7))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        each = torch.einsum("eoi,bti->ebto", self.up, hidden)
        return torch.einsum("eio,ebto->bti", self.down, each) * 1e-3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 23), nn.Linear(23, 10, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(torch.relu(self.up(hidden)))
        return found


class Net(nn.Module):
    """Sides that no number of ranks divides."""

    _tied_weights_keys = ("lm_head.weight",)

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = {"model_type": "custom", "tie_word_embeddings": tied}
        self.embed_tokens = nn.Embedding(31, 10)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.conv = nn.Conv1d(10, 10, 3, padding=1)
        self.experts = Experts()
        self.lm_head = nn.Linear(10, 31, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = hidden + self.conv(hidden.transpose(1, 2)).transpose(1, 2) + self.experts(hidden)
        found: torch.Tensor = self.lm_head(hidden) * self.scale
        return found


def lora(*modules: str, **options: Any) -> Any:
    return peft.LoraConfig(target_modules=list(modules), r=4, **options)


def _tied(**options: Any) -> Any:
    return lora("up", ensure_weight_tying=True, **options)


KINDS: dict[str, Callable[[], list[Any]]] = {
    "linear": lambda: [lora("up", "down")],
    "rank-stabilised, with bias": lambda: [lora("up", use_rslora=True, lora_bias=True)],
    "embedding": lambda: [lora("embed_tokens", "down")],
    "convolution": lambda: [lora("conv")],
    "dora": lambda: [lora("up", "down", use_dora=True)],
    "dora, convolution": lambda: [lora("conv", use_dora=True)],
    "modules to save": lambda: [lora("up", modules_to_save=["lm_head"])],
    "several": lambda: [lora("up"), lora("up", "down", lora_alpha=3)],
    "tokens": lambda: [lora("up", trainable_token_indices={"embed_tokens": [3, 5]})],
    "nothing else": lambda: [lora("up", "down", "embed_tokens", "lm_head")],
    "ia3": lambda: [peft.IA3Config(target_modules=["up", "down"], feedforward_modules=["down"])],
    "loha": lambda: [peft.LoHaConfig(target_modules=["up"], r=2)],
    "parameters": lambda: [
        peft.LoraConfig(target_modules=[], target_parameters=["experts.up", "experts.down"], r=2)
    ],
    "tied, tokens": lambda: [lora("up", trainable_token_indices={"embed_tokens": [3, 5, 30]})],
    "tied, head to save": lambda: [lora("up", modules_to_save=["lm_head"])],
    "tied, both to save": lambda: [_tied(modules_to_save=["embed_tokens", "lm_head"])],
    "tied, head alone": lambda: [lora("lm_head", "up")],
}


def adapted(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, *others = KINDS[kind]()
        model = peft.get_peft_model(Net(tied=kind.startswith("tied")).to(dtype), first)
        for number, config in enumerate(others):
            model.add_adapter(f"other{number}", config)
        if others:
            model.base_model.set_adapter(["default", *(f"other{number}" for number in range(len(others)))])
    # Adapters begin as zeros.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "base_layer" not in name and "original_module" not in name and parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
