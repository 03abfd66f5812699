"""Shapes of models: every tensor's shape under the name that it has in the checkpoint on the Hub.

Nothing is downloaded. Benchmarks fill the tensors with random numbers; vLLM starts from the config alone.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from patchstore.bucket.records import TensorSpec
from patchstore.quantization import FORMS, Quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder of the Qwen family."""

    name: str
    architecture: str
    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Of each expert in a model of experts."""
    vocabulary: int = 151_936
    tied: bool = False
    """Whether the output layer is the embedding."""
    experts: int = 0
    """0: a dense model."""

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalised (Qwen3) instead of biased (Qwen2)."""
        return self.model_type != "qwen2"

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return shapes by name, in the order of the model."""
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for i in range(self.layers):
            found |= {f"model.layers.{i}.{name}": shape for name, shape in self._layer().items()}
        found["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocabulary, self.hidden)
        return found

    def _layer(self) -> dict[str, tuple[int, ...]]:
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
            "self_attn.o_proj.weight": (self.hidden, wide),
        }
        for part, width in (("q", wide), ("k", narrow), ("v", narrow)):
            found[f"self_attn.{part}_proj.weight"] = (width, self.hidden)
            if not self.has_qk_norm:
                found[f"self_attn.{part}_proj.bias"] = (width,)
        if self.has_qk_norm:
            found |= {f"self_attn.{part}_norm.weight": (self.head_dim,) for part in "qk"}
        mlps = [f"mlp.experts.{i}" for i in range(self.experts)] or ["mlp"]
        if self.experts:
            found["mlp.gate.weight"] = (self.experts, self.hidden)
        for mlp in mlps:
            found[f"{mlp}.gate_proj.weight"] = (self.intermediate, self.hidden)
            found[f"{mlp}.up_proj.weight"] = (self.intermediate, self.hidden)
            found[f"{mlp}.down_proj.weight"] = (self.hidden, self.intermediate)
        return found

    def quantized(self, form: str) -> list[str]:
        """Return the names of the weights that a run in FP8 rounds."""
        quantization = Quantization(FORMS[form])
        return [
            name
            for name, size in self.tensors().items()
            if quantization.quantizes(TensorSpec(name=name, dtype="BF16", shape=size))
        ]

    def save_config(self, folder: Path, form: str | None = None) -> Path:
        """Write a folder that vLLM starts from with `load_format="dummy"`; returns it.

        Args:
            form: of FP8; None for bf16.
        """
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        if form is not None:
            rounded = set(self.quantized(form))
            matrices = [name for name, size in self.tensors().items() if len(size) == 2]
            kept = [name.removesuffix(".weight") for name in matrices if name not in rounded]
            config["quantization_config"] = FORMS[form].config(kept)
        if self.experts:
            config |= {
                "num_experts": self.experts,
                "num_experts_per_tok": min(8, self.experts),
                "moe_intermediate_size": self.intermediate,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return folder


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        each.name: each
        for each in (
            Shape(
                name="tiny",
                architecture="Qwen3ForCausalLM",
                model_type="qwen3",
                hidden=64,
                layers=2,
                heads=4,
                kv_heads=2,
                head_dim=32,
                intermediate=128,
                vocabulary=256,
            ),
            Shape(
                name="qwen2.5-0.5b",
                architecture="Qwen2ForCausalLM",
                model_type="qwen2",
                hidden=896,
                layers=24,
                heads=14,
                kv_heads=2,
                head_dim=64,
                intermediate=4864,
                tied=True,
            ),
            Shape(
                name="qwen3-0.6b",
                architecture="Qwen3ForCausalLM",
                model_type="qwen3",
                hidden=1024,
                layers=28,
                heads=16,
                kv_heads=8,
                head_dim=128,
                intermediate=3072,
                tied=True,
            ),
            Shape(
                name="qwen3-8b",
                architecture="Qwen3ForCausalLM",
                model_type="qwen3",
                hidden=4096,
                layers=36,
                heads=32,
                kv_heads=8,
                head_dim=128,
                intermediate=12_288,
            ),
            Shape(
                name="qwen3-30b-a3b",
                architecture="Qwen3MoeForCausalLM",
                model_type="qwen3_moe",
                hidden=2048,
                layers=48,
                heads=32,
                kv_heads=4,
                head_dim=128,
                intermediate=768,
                experts=128,
            ),
        )
    }
)
