"""Tiny models of many architectures, with random weights, as folders that vLLM loads.

Each is built by transformers and saved under the names that its checkpoints have on the Hub. Every tensor is
random, norms, biases and router corrections too, so that one that is swapped or dropped shows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

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
        # Quantised while it is loaded; vLLM has no kernel to answer with on the CPU.
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
    auto: str = "AutoModelForCausalLM"
    """The class of transformers that builds it."""
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


_NOT_COMPATIBLE = {"transformers": "its implementation in transformers is not compatible with vLLM"}
_NO_ATTENTION = {"transformers": "a layer without attention cannot be handled"}
_NO_TOP_K = {"transformers": "it looks for the number of experts of a token under another name"}
_NO_PIPELINE = {"pp2": "pipeline parallelism is not supported for this model"}

_ATTENTION = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_DEEPSEEK = {
    **_ATTENTION,
    "num_key_value_heads": 4,
    # Of the part with positions. The only sizes that vLLM's latent attention for CPUs has are 512 and 64.
    "head_dim": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}

_VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}
_IMAGE = 240
"""The token that stands for an image."""
_WITH_IMAGES = {"skip_tokenizer_init": False}
_TEXT_ONLY = _WITH_IMAGES | {"limit_mm_per_prompt": {"image": 0}}


def _config(kind: str, **changes: Any) -> Callable[[], PretrainedConfig]:
    common = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    return lambda: getattr(transformers, kind)(**common | changes)


def _paligemma() -> PretrainedConfig:
    return transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**_VISION, vision_use_head=False),
        text_config=_config("GemmaConfig", **_ATTENTION, tie_word_embeddings=True)(),
        image_token_index=_IMAGE,
        vocab_size=VOCABULARY,
        hidden_size=_ATTENTION["hidden_size"],
        projection_dim=_ATTENTION["hidden_size"],
    )


def _paligemma_processor() -> ProcessorMixin:
    size = {"height": _VISION["image_size"], "width": _VISION["image_size"]}
    images = transformers.SiglipImageProcessorPil(size=size)
    images.image_seq_length = (_VISION["image_size"] // _VISION["patch_size"]) ** 2
    return transformers.PaliGemmaProcessor(images, _tokenizer())


def _aria() -> PretrainedConfig:
    vision = _VISION | {"image_size": 980, "patch_size": 98}
    return transformers.AriaConfig(
        vision_config=transformers.Idefics3VisionConfig(**vision),
        vision_feature_layer=-1,
        text_config=_config(
            "AriaTextConfig", **_ATTENTION, moe_num_experts=8, moe_topk=2, moe_num_shared_experts=1
        )(),
        projector_patch_to_query_dict={25: 4, 100: 4},
        image_token_index=_IMAGE,
        tie_word_embeddings=False,
    )


def _aria_processor() -> ProcessorMixin:
    return transformers.AriaProcessor(
        transformers.AriaImageProcessorPil(max_image_size=980), _tokenizer(), size_conversion={490: 4, 980: 4}
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    """A word for each number, but for the two tokens that a prompt with an image needs."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    del words[f"w{_IMAGE}"], words[f"w{_IMAGE + 1}"]
    words |= {"<image>": _IMAGE, "\n": _IMAGE + 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
        unk_token="w0",
        bos_token="w0",
        eos_token="w0",
        pad_token="w0",
        extra_special_tokens={"image_token": "<image>"},
    )


def _alternating(*kinds: str) -> dict[str, Any]:
    return {"layer_types": list(kinds), "num_hidden_layers": len(kinds)}


_SLIDING = _alternating("sliding_attention", "full_attention")

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        each.name: each
        for each in (
            Architecture(name="qwen2", config=_config("Qwen2Config", **_ATTENTION)),
            Architecture(name="qwen3", config=_config("Qwen3Config", **_ATTENTION)),
            Architecture(
                name="qwen3-tied", config=_config("Qwen3Config", **_ATTENTION, tie_word_embeddings=True)
            ),
            Architecture(name="llama", config=_config("LlamaConfig", **_ATTENTION)),
            Architecture(
                name="llama-bias-mqa",
                config=_config(
                    "LlamaConfig",
                    **_ATTENTION | {"num_key_value_heads": 1},
                    attention_bias=True,
                    mlp_bias=True,
                ),
            ),
            Architecture(name="mistral", config=_config("MistralConfig", **_ATTENTION, sliding_window=None)),
            Architecture(name="phi3", config=_config("Phi3Config", **_ATTENTION)),
            Architecture(
                name="gemma2",
                config=_config(
                    "Gemma2Config", **_ATTENTION | _SLIDING, sliding_window=32, tie_word_embeddings=True
                ),
            ),
            Architecture(
                name="gemma3",
                config=_config(
                    "Gemma3TextConfig", **_ATTENTION | _SLIDING, sliding_window=32, tie_word_embeddings=True
                ),
            ),
            Architecture(
                name="gpt2",
                config=_config(
                    "GPT2Config", n_embd=128, n_layer=2, n_head=4, n_positions=256, tie_word_embeddings=True
                ),
                not_offered={
                    "transformers": "its loader skips c_attn.bias, whose name ends like that of a buffer"
                },
            ),
            Architecture(
                name="falcon",
                config=_config(
                    "FalconConfig",
                    hidden_size=128,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_kv_heads=2,
                    new_decoder_architecture=True,
                    tie_word_embeddings=True,
                ),
                not_offered=_NOT_COMPATIBLE,
            ),
            Architecture(
                name="bloom",
                config=_config("BloomConfig", hidden_size=128, n_layer=2, n_head=4, tie_word_embeddings=True),
                not_offered=_NOT_COMPATIBLE,
            ),
            Architecture(name="olmo2", config=_config("Olmo2Config", **_ATTENTION)),
            Architecture(
                name="mixtral",
                config=_config(
                    "MixtralConfig",
                    **_ATTENTION,
                    num_local_experts=8,
                    num_experts_per_tok=2,
                    sliding_window=None,
                ),
                experts=True,
            ),
            Architecture(
                name="qwen2-moe",
                config=_config(
                    "Qwen2MoeConfig", **_ATTENTION, **_EXPERTS, shared_expert_intermediate_size=128
                ),
                experts=True,
            ),
            Architecture(
                name="qwen3-moe", config=_config("Qwen3MoeConfig", **_ATTENTION, **_EXPERTS), experts=True
            ),
            Architecture(
                name="deepseek-v2",
                config=_config(
                    "DeepseekV2Config", **_DEEPSEEK, q_lora_rank=None, topk_method="group_limited_greedy"
                ),
                experts=True,
            ),
            Architecture(
                name="deepseek-v3",
                config=_config(
                    "DeepseekV3Config",
                    **_DEEPSEEK,
                    q_lora_rank=64,
                    num_nextn_predict_layers=0,
                    topk_method="noaux_tc",
                    scoring_func="sigmoid",
                ),
                experts=True,
            ),
            Architecture(
                name="glm4-moe",
                config=_config(
                    "Glm4MoeConfig",
                    **_ATTENTION | {"num_hidden_layers": 4},
                    n_routed_experts=8,
                    num_experts_per_tok=2,
                    n_shared_experts=1,
                    moe_intermediate_size=64,
                    first_k_dense_replace=1,
                    use_qk_norm=True,
                    num_nextn_predict_layers=0,
                ),
                experts=True,
            ),
            Architecture(
                name="gpt-oss",
                config=_config(
                    "GptOssConfig",
                    **_ATTENTION | _SLIDING | {"intermediate_size": 64},
                    num_local_experts=8,
                    num_experts_per_tok=2,
                    sliding_window=32,
                ),
                experts=True,
            ),
            Architecture(
                # On the CPU vLLM's attention keeps its sinks in float32 from the first forward pass on.
                name="gpt-oss-float16",
                config=_config(
                    "GptOssConfig",
                    **_ATTENTION | _SLIDING | {"intermediate_size": 64},
                    num_local_experts=8,
                    num_experts_per_tok=2,
                    sliding_window=32,
                ),
                engine={"dtype": "float16"},
                experts=True,
            ),
            Architecture(
                name="llama4",
                config=_config(
                    "Llama4TextConfig",
                    **_ATTENTION,
                    intermediate_size_mlp=128,
                    num_local_experts=8,
                    num_experts_per_tok=1,
                    interleave_moe_layer_step=2,
                    attention_chunk_size=128,
                ),
                experts=True,
                not_offered={
                    "transformers": "its loader fails at the fused experts: their size does not match"
                },
            ),
            Architecture(
                name="qwen3-next",
                config=_config(
                    "Qwen3NextConfig",
                    **_ATTENTION | _alternating(*["linear_attention", "full_attention"] * 2),
                    **_EXPERTS,
                    shared_expert_intermediate_size=64,
                    linear_num_key_heads=2,
                    linear_num_value_heads=4,
                    linear_key_head_dim=64,
                    linear_value_head_dim=64,
                ),
                experts=True,
                not_offered=_NO_ATTENTION,
            ),
            Architecture(
                name="mamba2",
                config=_config(
                    "Mamba2Config",
                    hidden_size=64,
                    num_hidden_layers=2,
                    expand=2,
                    head_dim=32,
                    num_heads=4,
                    n_groups=2,
                    state_size=32,
                ),
                not_offered=_NO_ATTENTION | _NO_PIPELINE,
            ),
            Architecture(
                name="paligemma-text-only",
                config=_paligemma,
                auto="AutoModelForImageTextToText",
                processor=_paligemma_processor,
                engine=_TEXT_ONLY,
            ),
            Architecture(
                name="aria",
                config=_aria,
                auto="AutoModelForImageTextToText",
                processor=_aria_processor,
                engine=_WITH_IMAGES,
                experts=True,
                not_offered=_NO_PIPELINE | _NO_TOP_K,
            ),
            Architecture(
                name="aria-text-only",
                config=_aria,
                auto="AutoModelForImageTextToText",
                processor=_aria_processor,
                engine=_TEXT_ONLY,
                experts=True,
                not_offered=_NO_PIPELINE | _NO_TOP_K,
            ),
        )
    }
)


def build(architecture: Architecture) -> PreTrainedModel:
    """Return the same random model each time: bf16, but for tensors that transformers keeps in float32."""
    config = architecture.config()
    config.dtype = torch.bfloat16
    model = getattr(transformers, architecture.auto).from_config(config).to(torch.bfloat16)
    for module in model.modules():
        if isinstance(bias := getattr(module, "e_score_correction_bias", None), torch.Tensor):
            # As on the Hub, where it is the one tensor in float32.
            bias.data = bias.float()
    random = torch.Generator().manual_seed(7)
    kept = {name for name, _ in model.named_parameters()} | set(model.state_dict())
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in kept and tensor.is_floating_point():
                tensor.copy_(_random(name, tensor.shape, random))
    return model


def _random(name: str, shape: torch.Size, random: torch.Generator) -> torch.Tensor:
    """Random values of a size at which every input still changes the answer, and none overflows."""
    noise = torch.randn(shape, generator=random)
    if name.endswith("A_log"):
        return torch.rand(shape, generator=random) * 2
    if "embed" in name or "wte" in name:
        return noise
    if len(shape) < 2:
        # Norms, biases, router corrections, sinks.
        return ("norm" in name and name.endswith("weight")) + 0.2 * noise
    return noise * (1.5 / shape[-1] ** 0.5)


def save(architecture: Architecture, folder: Path) -> Path:
    """Write a checkpoint folder that vLLM serves, without a tokenizer if it can."""
    build(architecture).save_pretrained(folder)
    if architecture.processor is not None:
        architecture.processor().save_pretrained(folder)
    return folder
