"""A tiny Whisper with random weights, and what an engine of it answers before and after updates, as one file.

Run as a program, as `tiny_draft` is. Not a server: what vLLM's takes sound in with is not among the tests'
dependencies, and an engine takes samples as they are.
"""

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from engines import Engine, open_run, update
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from training import NEWEST, publish
from vllm import LLM, SamplingParams

from patchstore.read.replay import replay
from patchstore.stores import open_store

_VOCABULARY = 250
_START = 240
_RATE = 16000
_NUM_TOKENS = 8
_NUM_KEPT = 3
"""Tokens of an answer that were there before the update."""


def save(folder: Path) -> Path:
    """Write a checkpoint that hears one second at a time."""
    config = transformers.WhisperConfig(
        vocab_size=_VOCABULARY,
        num_mel_bins=80,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=50,
        max_target_positions=128,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        decoder_start_token_id=_START,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(7)
    model = transformers.WhisperForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "encoder.embed_positions" not in name:
            # Wide enough to tell sounds apart, or every answer is the same.
            torch.nn.init.normal_(parameter, std=0.3)
    model.to(torch.bfloat16).save_pretrained(folder)
    names = [f"w{i}" for i in range(_VOCABULARY)]
    names[_START] = "<|startoftranscript|>"
    words = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
    words.add_special_tokens([AddedToken(names[_START], normalized=False, special=True)])
    tokenizer = transformers.WhisperTokenizerFast(
        tokenizer_object=words, unk_token="w0", bos_token="w0", eos_token="w0", pad_token="w0"
    )
    transformers.WhisperProcessor(
        transformers.WhisperFeatureExtractor(chunk_length=1), tokenizer
    ).save_pretrained(folder)
    return folder


def _sampling() -> SamplingParams:
    # New ones for each call: vLLM changes those that `generate` gets.
    return SamplingParams(
        temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True, detokenize=False, logprobs=1
    )


def _prompt(seed: int, *tokens: int) -> dict[str, Any]:
    """A prompt about a sound, and the first tokens of its answer."""
    sound = np.random.default_rng(seed).standard_normal(_RATE).astype(np.float32)
    return {
        "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (sound, _RATE)}},
        "decoder_prompt": {"prompt_token_ids": [_START, 5, 6, *tokens]},
    }


def answers(llm: LLM, *prompts: dict[str, Any]) -> list[Any]:
    """Tokens of answers, and how likely they were; without prompts, about some sounds, one of them twice."""
    asked = prompts or [_prompt(seed) for seed in (0, 1, 0)]
    outputs = llm.generate(list(asked), _sampling(), use_tqdm=False)
    return [[list(each.outputs[0].token_ids), each.outputs[0].cumulative_logprob] for each in outputs]


def running(llm: LLM, version: int) -> list[int]:
    """Update while an answer is written, after some tokens, and return the answer."""
    engine = llm.llm_engine
    engine.add_request("running", _prompt(0), _sampling())
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        before = len(tokens)
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
        if before < _NUM_KEPT <= len(tokens):
            assert len(tokens) == _NUM_KEPT
            update(llm, version)
    return tokens


def main(folder: Path) -> None:
    checkpoint, store = save(folder / "checkpoint"), folder / "store"
    publish(checkpoint, store, density=0.1)

    def follow(llm: LLM) -> dict[str, Any]:
        found = {"start": answers(llm)}
        open_run(llm, store)
        for version in (1, 0):
            update(llm, version)
            found[str(version)] = answers(llm)
        return found | {"running": running(llm, NEWEST), str(NEWEST): answers(llm)}

    def engine(name: str, model: Path) -> Engine:
        arguments = {"skip_tokenizer_init": False}
        return Engine(model=model, arguments=arguments, log=folder / f"{name}.log")

    followed = engine("followed", checkpoint).run(follow)
    found = {"followed": followed, "fresh": {"0": followed.pop("start")}, "num_kept": _NUM_KEPT}
    continued = _prompt(0, *followed["running"][:_NUM_KEPT])

    def start(llm: LLM) -> list[Any]:
        return [*answers(llm), *answers(llm, continued)]

    for version in (1, NEWEST):
        with closing(open_store(store)) as bucket:
            replay(bucket, version, out=folder / str(version))
        *answered, found["continued"] = engine(f"fresh-{version}", folder / str(version)).run(start)
        found["fresh"][str(version)] = answered
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
