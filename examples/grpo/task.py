"""The task, whose reward is checkable: write six digits in ascending order."""

import random
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NUM_DIGITS = 6
MAX_ANSWER = NUM_DIGITS + 1
"""Tokens of the longest answer: the digits, and the end of text."""

END_OF_TEXT = "<|endoftext|>"
_WORDS = (END_OF_TEXT, *"0123456789", "sort", "=")
END, _ZERO, _SORT, _EQUALS = (_WORDS.index(word) for word in (END_OF_TEXT, "0", "sort", "="))

VOCABULARY = 64
"""Tokens of the model; vLLM pads an embedding to a multiple of 64 rows, so this one stays as it is."""

KNOWN_SHARE = 0.3
"""Share of examples that are sorted when the model warms up; the others repeat the digits as they are."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a word, in the form that vLLM loads."""
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(_WORDS)}, unk_token=END_OF_TEXT))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END_OF_TEXT)


def draw_prompt(draw: random.Random) -> list[int]:
    """Return the tokens of `sort 7 3 9 1 5 2 =`, with digits drawn anew."""
    return [_SORT, *(_ZERO + draw.randrange(10) for _ in range(NUM_DIGITS)), _EQUALS]


def right_answer(prompt: Sequence[int]) -> list[int]:
    """Return the digits of a prompt in ascending order, and the end of text."""
    return [*sorted(prompt[1:-1]), END]


def reward(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return the share, 0 to 1, of the answer's tokens that are right; one that is missing is not."""
    expected = right_answer(prompt)
    return sum(want == got for want, got in zip(expected, answer, strict=False)) / len(expected)


def warm_up_batch(draw: random.Random, num_examples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts with answers, and the labels of the answers: int64 [num_examples, num_tokens] each.

    Few of the answers are sorted, so that the model knows how to sort and mostly does not.
    """
    rows = []
    for _ in range(num_examples):
        prompt = draw_prompt(draw)
        answer = right_answer(prompt) if draw.random() < KNOWN_SHARE else [*prompt[1:-1], END]
        rows.append([*prompt, *answer])
    tokens = torch.tensor(rows)
    labels = tokens.clone()
    # transformers leaves out labels of -100: prompts are given, not learnt.
    labels[:, : NUM_DIGITS + 2] = -100
    return tokens, labels
