"""The text to train on: the language topics that every Python carries, as `help("with")` prints them."""

import re
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 2048
END_OF_TEXT = "<|endoftext|>"

TOPIC = "assert"
"""What the published steps teach; warming up leaves it out."""

# Some 14,000 tokens: little enough for a minute of training to give something that reads like English.
_MAX_TOPIC_CHARACTERS = 4000


def read_topics() -> tuple[list[str], str]:
    """Return the shorter topics, and `TOPIC`; each on one line, without the lines that underline headings."""
    texts = {
        name: " ".join(re.sub(r"[*=~^-]{3,}", "", text).split())
        for name, text in topics.items()
        if len(text) < _MAX_TOPIC_CHARACTERS
    }
    topic = texts.pop(TOPIC)
    return list(texts.values()), topic


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE vocabulary from the texts, in the form that vLLM loads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> torch.Tensor:
    """Return all texts as one int64 [num_tokens]."""
    return torch.tensor([token for text in texts for token in tokenizer.encode(text)])
