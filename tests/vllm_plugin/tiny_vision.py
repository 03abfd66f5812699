"""Tiny models with random weights that take images, of two architectures that need no torchvision."""

import base64
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PretrainedConfig, PreTrainedTokenizerFast, ProcessorMixin

VOCABULARY = 250
SIDE = 32
"""Of an image, in pixels."""
_PATCH = 8
_NUM_PATCHES = (SIDE // _PATCH) ** 2
_IMAGE = 240
"""The token that stands for a part of an image."""
_SPECIAL = ("<image>", "\n", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": SIDE,
    "patch_size": _PATCH,
}
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def _idefics3() -> tuple[PretrainedConfig, ProcessorMixin]:
    config = transformers.Idefics3Config(
        vision_config=transformers.Idefics3VisionConfig(**_VISION),
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_id=_IMAGE,
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    edge = {"longest_edge": SIDE}
    images = transformers.Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    return config, transformers.Idefics3Processor(images, _tokenizer(), image_seq_len=_NUM_PATCHES // 4)


def _blip2() -> tuple[PretrainedConfig, ProcessorMixin]:
    qformer = transformers.Blip2QFormerConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        encoder_hidden_size=_VISION["hidden_size"],
    )
    text = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        word_embed_proj_dim=64,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    config = transformers.Blip2Config(
        vision_config=transformers.Blip2VisionConfig(**_VISION),
        qformer_config=qformer,
        text_config=text,
        num_query_tokens=_NUM_PATCHES,
        image_token_index=_IMAGE,
    )
    images = transformers.BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return config, transformers.Blip2Processor(images, _tokenizer(), num_query_tokens=_NUM_PATCHES)


_MODELS: dict[str, Callable[[], tuple[PretrainedConfig, ProcessorMixin]]] = {
    "idefics3": _idefics3,
    "blip2": _blip2,
}
NAMES = (*_MODELS,)


def save(name: str, folder: Path) -> Path:
    """Write a checkpoint folder that vLLM serves, with the same random bf16 weights each time."""
    config, processor = _MODELS[name]()
    torch.manual_seed(7)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        # Wide enough to tell images and words apart, or every answer is the same token.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.to(torch.bfloat16).save_pretrained(folder)
    # The image's place is vLLM's business, so the text is all there is to write.
    processor.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    processor.save_pretrained(folder)
    return folder


def image_url(seed: int) -> str:
    """Return an image of noise as a data URL; each seed has its own."""
    noise = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _tokenizer() -> PreTrainedTokenizerFast:
    """A word for each number, but for the tokens that a prompt with an image needs."""
    names = [f"w{i}" for i in range(VOCABULARY)]
    names[_IMAGE : _IMAGE + len(_SPECIAL)] = _SPECIAL
    words = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    words.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="w0",
        bos_token="w0",
        eos_token="w0",
        pad_token="w0",
        extra_special_tokens={"image_token": "<image>"},
    )
