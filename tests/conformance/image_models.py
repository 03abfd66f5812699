"""Models that also take images."""

import transformers
from architecture import ATTENTION, NO_PIPELINE, NO_TOP_K, VOCABULARY, Architecture, config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PretrainedConfig, PreTrainedTokenizerFast, ProcessorMixin

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


def _paligemma() -> PretrainedConfig:
    return transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**_VISION, vision_use_head=False),
        text_config=config("GemmaConfig", **ATTENTION, tie_word_embeddings=True)(),
        image_token_index=_IMAGE,
        vocab_size=VOCABULARY,
        hidden_size=ATTENTION["hidden_size"],
        projection_dim=ATTENTION["hidden_size"],
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
        text_config=config(
            "AriaTextConfig", **ATTENTION, moe_num_experts=8, moe_topk=2, moe_num_shared_experts=1
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


IMAGE_MODELS = (
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
        not_offered=NO_PIPELINE | NO_TOP_K,
    ),
    Architecture(
        name="aria-text-only",
        config=_aria,
        auto="AutoModelForImageTextToText",
        processor=_aria_processor,
        engine=_TEXT_ONLY,
        experts=True,
        not_offered=NO_PIPELINE | NO_TOP_K,
    ),
)
