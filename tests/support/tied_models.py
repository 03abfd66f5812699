"""Small models of transformers with tied weights, each built from its own default config."""

from collections.abc import Iterator
from typing import Any

import torch

NAMES = [
    # Of these, words in the names would store another one than is saved.
    *("GPTNeoXForCausalLM", "GPTNeoXJapaneseForCausalLM", "ProphetNetForConditionalGeneration"),
    *("ProphetNetForCausalLM", "LukeForMaskedLM", "DFineForObjectDetection", "PPDocLayoutV3Model"),
    *("BertLMHeadModel", "RobertaForCausalLM", "ElectraForCausalLM", "DebertaV2ForMaskedLM"),
    *("GPT2LMHeadModel", "GPTJForCausalLM", "CodeGenForCausalLM", "OPTForCausalLM", "BloomForCausalLM"),
    *("MptForCausalLM", "FalconForCausalLM", "BioGptForCausalLM", "XGLMForCausalLM", "PhiForCausalLM"),
    *("LlamaForCausalLM", "Gemma3ForCausalLM", "T5ForConditionalGeneration", "MarianMTModel"),
    *("BartForConditionalGeneration", "FSMTForConditionalGeneration", "WhisperForConditionalGeneration"),
]

_LARGEST = {
    **dict.fromkeys(("vocab_size", "max_position", "n_positions", "max_source", "max_target"), 128),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "embed_dim"), 32),
    **dict.fromkeys(("intermediate", "ffn_dim", "d_ff", "n_inner"), 48),
    **dict.fromkeys(("layers", "n_layer"), 2),
    **dict.fromkeys(("heads", "n_head"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim"), 8),
}
"""By what is in the name of a number of a config."""


def _shrink(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_diff_dict"):
            _shrink(value)
        elif name.endswith("_token_id") and isinstance(value, int):
            setattr(config, name, min(value, 5))
        elif type(value) is int and not name.startswith("_") and not name.endswith("_id"):
            most = next((most for word, most in _LARGEST.items() if word in name), value)
            setattr(config, name, min(value, most))
    config.tie_word_embeddings = True
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[: getattr(config, "num_hidden_layers", None)]


def build(name: str, *, most: float = 5e7) -> Any:
    """Return a model of this class with random weights, float32, unless it has more parameters than that."""
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class()
    _shrink(config)
    with torch.device("meta"):
        assert kind(config).num_parameters() <= most, name
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Some begin as ones or zeros, which are alike wherever they are.
            parameter.copy_(torch.randn_like(parameter) / 8)
    return model


def computed(model: Any) -> torch.Tensor | None:
    """Return what a model computes of a few tokens; None if it takes none."""
    tokens = torch.arange(2, 14).view(1, -1)
    given: dict[str, Any] = {model.main_input_name: tokens}
    if model.main_input_name == "input_features":
        config = model.config
        given = {"input_features": torch.ones(1, config.num_mel_bins, 2 * config.max_source_positions)}
    elif model.main_input_name != "input_ids":
        return None
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens
    with torch.no_grad():
        found = model(**given)
    first: torch.Tensor = found.logits if hasattr(found, "logits") else found[0]
    return first


def every() -> Iterator[Any]:
    """Yield models of all classes with a head for tokens whose default config can be made small."""
    from transformers.models.auto import modeling_auto as auto

    heads = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )
    for name in sorted({name for head in heads for name in head.values()}):
        try:
            model = build(name, most=2e7)
        except Exception:  # noqa: BLE001 -- a config of its own would be needed
            continue
        yield model
