"""What a tiny model is, how vLLM spreads it over ranks, and the sizes that many of the models share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import transformers
from transformers import PretrainedConfig, ProcessorMixin

VOCABULARY = 250
"""Not a multiple of 64, so that vLLM pads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A way to spread a model over ranks."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    """Engine arguments."""
    generates: bool = True
    """Whether vLLM's CPU build can answer, and not only load."""


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "tp1": Layout(),
        "tp2": Layout(engine={"tensor_parallel_size": 2}),
        # The kernel for experts on the CPU crashes at the first token: it ignores which experts a rank has.
        "ep2": Layout(engine={"tensor_parallel_size": 2, "enable_expert_parallel": True}, generates=False),
        # The second stage has no buffers for what the first one sends, unless vLLM compiles the model.
        "pp2": Layout(engine={"pipeline_parallel_size": 2}, generates=False),
        "transformers": Layout(engine={"model_impl": "transformers"}),
        # Quantized while it is loaded; vLLM has no kernel to answer with on the CPU.
        "int8": Layout(engine={"quantization": "int8_per_channel_weight_only"}, generates=False),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A tiny model, and how vLLM serves it."""

    name: str
    config: Callable[[], PretrainedConfig]
    experts: bool = False
    """Whether it has experts, so that the layout `ep2` differs from `tp2`."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Engine arguments beside those of the layout."""
    generates: bool = True
    """Whether vLLM's CPU build can answer, and not only load."""
    only_from_checkpoint: bool = False
    """Whether dummy weights are refused: the loader makes a parameter that the model does not have before."""
    auto: str = "AutoModelForCausalLM"
    """The class of transformers that builds it."""
    called: str | None = None
    """The name of its class in checkpoints on the Hub, where transformers has another."""
    processor: Callable[[], ProcessorMixin] | None = None
    """Of prompts and images, without which vLLM does not start a model that has its vision tower."""
    not_offered: Mapping[str, str] = field(default_factory=dict)
    """Layouts that vLLM's CPU build cannot serve, with its reason; our plugin has no part in it."""

    def refusal(self, layout: str) -> str | None:
        """Return why vLLM does not serve this model in a layout, or None if it does."""
        if layout == "ep2" and not self.experts:
            return "it has no experts"
        if layout == "int8" and self.experts:
            return "it has no kernel for int8 experts on the CPU"
        return self.not_offered.get(layout)


NOT_COMPATIBLE = {"transformers": "its implementation in transformers is not compatible with vLLM"}
NO_ATTENTION = {"transformers": "a layer without attention cannot be handled"}
NO_TOP_K = {"transformers": "it looks for the number of experts of a token under another name"}
NO_PIPELINE = {"pp2": "pipeline parallelism is not supported for this model"}

ATTENTION = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def config(kind: str, **changes: Any) -> Callable[[], PretrainedConfig]:
    """Return what makes a config of transformers."""
    common = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    return lambda: getattr(transformers, kind)(**common | changes)


def text_model(name: str, kind: str, *sizes: Mapping[str, Any], **more: Any) -> Architecture:
    """Return an architecture; what is no field of it is of its config, as are `sizes`."""
    own = {each.name: more.pop(each.name) for each in fields(Architecture) if each.name in more}
    changes: dict[str, Any] = {}
    for each in (*sizes, more):
        changes |= each
    return Architecture(name=name, config=config(kind, **changes), **own)


def layers(*kinds: str) -> dict[str, Any]:
    """Return what a config says of its layers."""
    return {"layer_types": list(kinds), "num_hidden_layers": len(kinds)}


SLIDING = layers("sliding_attention", "full_attention") | {"sliding_window": 32}
