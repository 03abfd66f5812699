"""The parts of the GRPO example, without vLLM; `make grpo` itself is run by hand and before a release."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.checkpoint import save
from examples.grpo import picture, policy, task
from examples.grpo.__main__ import describe
from examples.grpo.policy import SHAPES, Group, Policy

_TINY = replace(SHAPES["small"], hidden=64, intermediate=64, layers=1, heads=2, kv_heads=1, warm_up_steps=3)


def _group(prompt: list[int], answers: list[list[int]], version: int = 0, server: str = "a") -> Group:
    return Group(
        server=server,
        prompt=prompt,
        answers=answers,
        log_probs=[[-1.0] * len(answer) for answer in answers],
        version=version,
    )


def test_only_the_sorted_digits_and_the_end_earn_the_whole_reward() -> None:
    tokens = task.tokenizer()
    prompt = tokens.encode("sort 7 3 9 1 5 3 =")
    right = tokens.encode("1 3 3 5 7 9 <|endoftext|>")
    assert right == task.right_answer(prompt)
    assert task.reward(prompt, right) == 1
    assert task.reward(prompt, right[:-1]) == pytest.approx(6 / 7)
    assert task.reward(prompt, []) == 0
    assert task.reward(prompt, [*prompt[1:-1], task.END]) == pytest.approx(2 / 7)


def test_the_model_warms_up_on_answers_of_which_few_are_sorted() -> None:
    tokens, labels = task.warm_up_batch(random.Random(0), 500)
    assert tokens.shape == labels.shape == (500, 2 * task.NUM_DIGITS + 3)
    answers = tokens[:, -task.MAX_ANSWER :]
    assert torch.equal(labels[:, -task.MAX_ANSWER :], answers)
    assert bool((labels[:, : -task.MAX_ANSWER] == -100).all())
    right = sum(
        task.reward(prompt, answer) == 1
        for prompt, answer in zip(tokens[:, : -task.MAX_ANSWER].tolist(), answers.tolist(), strict=True)
    )
    assert 0.2 < right / 500 < 0.4


def test_a_step_makes_better_answers_likelier_and_leaves_padding_alone() -> None:
    model = Policy(_TINY, "cpu")
    assert len(list(model.warm_up())) == 3
    prompt = task.draw_prompt(random.Random(1))
    good, bad = task.right_answer(prompt), [task.END]
    before = [_log_prob(model, prompt, answer) for answer in (good, bad)]
    group = Group(
        server="a",
        prompt=prompt,
        answers=[good, bad],
        log_probs=[tokens.tolist() for tokens in before],
        version=0,
    )
    for _ in range(20):
        model.step([group])
    after = [_log_prob(model, prompt, answer) for answer in (good, bad)]
    assert after[0].sum() > before[0].sum()
    assert after[1].sum() < before[1].sum()


def test_equal_rewards_teach_nothing() -> None:
    model = Policy(_TINY, "cpu")
    prompt = task.draw_prompt(random.Random(1))
    answer = task.right_answer(prompt)
    _, sampled, mask = policy.pad([_group(prompt, [answer, answer[:2]])])
    assert sampled.tolist()[1] == [-1.0, -1.0] + [0.0] * 5
    assert mask.tolist() == [[1.0] * 7, [1.0] * 2 + [0.0] * 5]
    for group in model.optimizer.param_groups:
        group["weight_decay"] = 0.0
    before = [parameter.detach().clone() for parameter in model.model.parameters()]
    model.step([_group(prompt, [answer, answer])])
    assert all(map(torch.equal, before, model.model.parameters()))


def test_the_lag_counts_versions_since_the_answers_were_asked_for() -> None:
    prompt = task.draw_prompt(random.Random(1))
    answer = task.right_answer(prompt)
    row = describe(
        9, [_group(prompt, [answer, []], version=8), _group(prompt, [answer], version=5, server="b")], 1.5
    )
    assert (row.lag, row.max_lag) == (1.5, 3)
    assert row.answers_of == {"a": 2, "b": 1}
    assert row.reward == row.right == pytest.approx(2 / 3)


def test_the_checkpoint_is_opened_with_its_tokenizer(tmp_path: Path) -> None:
    save(Policy(_TINY, "cpu").model, task.tokenizer(), tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    assert (tmp_path / "tokenizer.json").is_file()


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    prompt = task.draw_prompt(random.Random(1))
    steps = [
        describe(number, [_group(prompt, [task.right_answer(prompt)], number - 1)], 1.0)
        for number in range(1, 40)
    ]
    picture.draw(steps, 13, 20, "title", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert picture.smooth([1.0, 3.0]) == [1.0, 2.0]


def _log_prob(model: Policy, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probability of each token of an answer, fp32 [num_tokens]."""
    with torch.no_grad():
        logits = model.model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).squeeze(1)
