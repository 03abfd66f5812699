"""The trainer's side: a model of 20 million parameters with fp32 masters and AdamW, on the CPU."""

from collections.abc import Iterator

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.precision import autocast

SEQUENCES, LENGTH = 8, 128
"""Shape of a batch."""
WARM_UP_RATE = 1e-3
# AdamW moves a weight by up to about the learning rate, and the bf16 neighbours of 0.02 are 1.2e-4
# away: as in RL, few steps change a weight's bf16 form (measured here: 2 to 4 % of the weights each).
PUBLISHED_RATE = 3e-6


class Trainer:
    """A model in training. Not one line of this knows about patchstore."""

    def __init__(self, tokens: torch.Tensor, vocabulary: int) -> None:
        """Start from random weights.

        Args:
            tokens: int64 [num_tokens], the text to learn.
            vocabulary: number of distinct tokens.
        """
        torch.manual_seed(0)
        self._tokens = tokens
        self.model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=vocabulary,
                hidden_size=768,
                intermediate_size=2304,
                num_hidden_layers=3,
                num_attention_heads=8,
                num_key_value_heads=2,
                head_dim=64,
                max_position_embeddings=512,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=0,
            )
        )
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=WARM_UP_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def warm_up(self, num_steps: int) -> Iterator[float]:
        """Learn enough to write something, and yield each step's loss."""
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer, WARM_UP_RATE, total_steps=num_steps, pct_start=0.15
        )
        for _ in range(num_steps):
            yield self.step()
            schedule.step()

    def specialise(self, tokens: torch.Tensor) -> None:
        """From here on learn this text, int64 [num_tokens], in small steps."""
        self._tokens = tokens
        self.use_rate(PUBLISHED_RATE)

    def use_rate(self, learning_rate: float) -> None:
        """Take steps of this learning rate from here on."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def step(self) -> float:
        """Take one optimiser step, and return its loss."""
        starts = torch.randint(len(self._tokens) - LENGTH, (SEQUENCES,))
        batch = torch.stack([self._tokens[start : start + LENGTH] for start in starts.tolist()])
        with autocast():
            loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())
