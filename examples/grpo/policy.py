"""The policy in training: fp32 masters, AdamW, one GRPO step a batch. It knows nothing of patchstore."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.grpo import task
from examples.precision import autocast

CLIP = 0.2
"""Clips the ratio of the policies' probabilities to [1 - CLIP, 1 + CLIP] (Schulman et al., 2017)."""
WARM_UP_RATE = 1e-3
_WARM_UP_EXAMPLES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model, and how it learns."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    warm_up_steps: int
    rate: float
    adapter_rate: float
    """AdamW's learning rate in GRPO. As in real runs, it changes the bf16 form of few weights a step."""


SHAPES = {
    "small": Shape(
        hidden=256,
        intermediate=768,
        layers=3,
        heads=4,
        kv_heads=2,
        vocabulary=task.VOCABULARY,
        warm_up_steps=300,
        rate=6e-6,
        adapter_rate=2e-4,
    ),
    # The sizes of Qwen2.5-0.5B.
    "0.5b": Shape(
        hidden=896,
        intermediate=4864,
        layers=24,
        heads=14,
        kv_heads=2,
        vocabulary=151_936,
        warm_up_steps=300,
        rate=1e-6,
        adapter_rate=5e-5,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The answers that one server gave to one prompt. GRPO compares them with each other."""

    server: str
    prompt: Sequence[int]
    answers: Sequence[Sequence[int]]
    """Tokens of each answer, 1 to `MAX_ANSWER`."""
    log_probs: Sequence[Sequence[float]]
    """Of each token, under the weights that sampled it."""
    version: int
    """The version that the server served when it was asked: no token is older."""

    @property
    def rewards(self) -> list[float]:
        return [task.reward(self.prompt, answer) for answer in self.answers]


class Policy:
    """A model in training."""

    def __init__(self, shape: Shape, device: str, seed: int = 0) -> None:
        """Start from random weights."""
        torch.manual_seed(seed)
        self._draw = random.Random(seed)
        self._shape = shape
        self._device = device
        self.model: Any = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=shape.vocabulary,
                hidden_size=shape.hidden,
                intermediate_size=shape.intermediate,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads,
                head_dim=64,
                max_position_embeddings=512,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=task.END,
            )
        ).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=WARM_UP_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )

    @property
    def num_parameters(self) -> int:
        return sum(each.numel() for each in self.model.parameters())

    def warm_up(self) -> Iterator[float]:
        """Learn from examples that are mostly not sorted; yield the loss of each step."""
        steps = self._shape.warm_up_steps
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, WARM_UP_RATE, total_steps=steps, pct_start=0.1
        )
        for _ in range(steps):
            tokens, labels = task.warm_up_batch(self._draw, _WARM_UP_EXAMPLES)
            with autocast(self._device):
                loss = self.model(input_ids=tokens.to(self._device), labels=labels.to(self._device)).loss
            self._descend(loss)
            schedule.step()
            yield loss.item()
        for group in self.optimizer.param_groups:
            group["lr"] = self._shape.rate

    def adapt(self, base: str) -> None:
        """Train a LoRA adapter from here on, over the weights in bf16, which servers load from `base`."""
        import peft

        with torch.no_grad():
            for each in self.model.parameters():
                each.copy_(each.to(torch.bfloat16))
        config = peft.LoraConfig(
            base_model_name_or_path=base,
            r=16,
            lora_alpha=32,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        self.model = peft.get_peft_model(self.model, config)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained, lr=self._shape.adapter_rate, betas=(0.9, 0.95), fused=True
        )

    def step(self, groups: Sequence[Group]) -> None:
        """Take one optimiser step from groups of answers, which older weights may have sampled.

        Equation 3 of the GRPO paper without its KL term, averaged over tokens: an answer's advantage is its
        reward less its group's mean, divided by its group's standard deviation.
        """
        tokens, sampled, mask = pad(groups)
        rewards = torch.tensor([group.rewards for group in groups])
        spread = rewards.std(dim=1, keepdim=True, correction=0)
        advantage = ((rewards - rewards.mean(dim=1, keepdim=True)) / (spread + 1e-4)).view(-1, 1)
        tokens, sampled, mask, advantage = (
            part.to(self._device) for part in (tokens, sampled, mask, advantage)
        )
        with autocast(self._device):
            # The logits of one token predict the next: those of the last token are not asked for.
            logits = self.model(input_ids=tokens, logits_to_keep=task.MAX_ANSWER + 1).logits[:, :-1]
        answers = tokens[:, -task.MAX_ANSWER :, None]
        log_probs = logits.float().log_softmax(dim=-1).gather(2, answers).squeeze(2)
        ratio = (log_probs - sampled).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        self._descend(-(gain * mask).sum() / mask.sum())

    def _descend(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def pad(groups: Sequence[Group]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return all answers of all groups, one a row.

    Returns:
        tokens: int64 [num_answers, prompt + MAX_ANSWER]; the ends of shorter answers are padded.
        sampled: fp32 [num_answers, MAX_ANSWER], the log-probabilities under the weights that sampled.
        mask: fp32 [num_answers, MAX_ANSWER], 1 for a token of an answer and 0 for padding.
    """
    rows = [
        (group.prompt, answer, log_probs)
        for group in groups
        for answer, log_probs in zip(group.answers, group.log_probs, strict=True)
    ]
    missing = [task.MAX_ANSWER - len(answer) for _, answer, _ in rows]
    tokens = [
        [*prompt, *answer, *[task.END] * short]
        for (prompt, answer, _), short in zip(rows, missing, strict=True)
    ]
    sampled = [[*log_probs, *[0.0] * short] for (*_, log_probs), short in zip(rows, missing, strict=True)]
    mask = [[1.0] * (task.MAX_ANSWER - short) + [0.0] * short for short in missing]
    return torch.tensor(tokens), torch.tensor(sampled), torch.tensor(mask)
