"""GRPOTrainer of TRL with a tiny model. Importing TRL takes seconds and warns, so tests import this late."""

import queue
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from training import QUICK, Remember, build, prepare, served

from patchstore.follow.vllm_server import VllmServer
from tests.support import tiny_qwen

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from patchstore.integrations.trl import AsyncSync, ServerSync

__all__ = ["AsyncSync", "Dataset", "ServerSync"]


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Return another reward for each answer: a group of equal rewards has no gradient, so changes nothing."""
    return [float(number) for number in range(len(completion_ids))]


def config_of(out: Path, url: str, **options: Any) -> GRPOConfig:
    given: dict[str, Any] = {
        **QUICK,
        "output_dir": str(out),
        "bf16": False,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "beta": 0.0,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
    }
    return GRPOConfig(**(given | options))


def prompts() -> Dataset:
    return Dataset.from_dict({"prompt": [f"w{number}" for number in range(1, 17)]})


def model_of(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def trainer_of(base: Path, out: Path, url: str, *callbacks: Any, **options: Any) -> GRPOTrainer:
    peft_config = options.pop("peft_config", None)
    return GRPOTrainer(
        model=model_of(base),
        reward_funcs=reward,
        args=config_of(out, url, **options),
        train_dataset=prompts(),
        callbacks=list(callbacks),
        peft_config=peft_config,
    )


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    *lengths: int,
    softmax_scale: float | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """What flash attention computes, of which TRL fetches a kernel: sequences one behind the other."""
    groups = query.shape[1] // key.shape[1]
    found = []
    for number in range(len(starts_q) - 1):
        of_query = slice(int(starts_q[number]), int(starts_q[number + 1]))
        of_key = slice(int(starts_k[number]), int(starts_k[number + 1]))
        q, k, v = (each.transpose(0, 1) for each in (query[of_query], key[of_key], value[of_key]))
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        each = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale)
        found.append(each.transpose(0, 1))
    return torch.cat(found)


class Rollouts:
    """Samples without a server."""

    def __init__(self, num_samples: int) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self._num_samples, self._generator = num_samples, np.random.default_rng(0)
        self.version = 0
        self.at: list[Any] = []
        """What `look` returned when each version was said to be live."""
        self.look: Any = lambda: None

    def stop(self) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        self.version = model_version
        self.at.append(self.look())

    def start(self) -> None:
        """Put all samples into the queue: loaders fetch ahead, and a step that lacks some would wait."""
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        for number in range(self._num_samples):
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=self._generator.integers(1, 200, 8),
                    completion_mask=np.array([0, 0, 1, 1, 1, 1, 1, 1]),
                    old_log_probs=np.full(8, -5.0, dtype=np.float32),
                    advantage=1.0 if number % 2 else -1.0,
                    model_version=self.version,
                    group_id=number,
                    metrics={},
                    enqueued_at=time.time(),
                )
            )


class AnyRollouts(Rollouts):
    """In the place of TRL's worker, for code that gives none of its own."""

    def __init__(self, **given: Any) -> None:
        super().__init__(40)
        self._loop_kwargs: dict[str, Any] = {}


def async_config_of(out: Path, url: str, **options: Any) -> Any:
    """Prepare TRL's asynchronous trainer for a CPU, and return its settings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, packing
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: 1e12
    given: dict[str, Any] = {
        **QUICK,
        "output_dir": str(out),
        "bf16": False,
        "max_steps": 3,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "token_budget": -1,
        "max_staleness": 100,
        "vllm_server_base_url": url,
        "dtype": "float32",
    }
    return AsyncGRPOConfig(**(given | options))


def async_trainer_of(base: Path, out: Path, url: str, sync: Any, *callbacks: Any, **options: Any) -> Any:
    """Return TRL's asynchronous trainer with a stub of its kernel, which a CPU lacks, and by default of its
    rollouts. TRL's own are made with `has_rollouts=True`; then samples of an earlier version are dropped.
    """
    peft_config, has_rollouts = options.pop("peft_config", None), options.pop("has_rollouts", False)
    if has_rollouts:
        options |= {"num_generations": 2, "max_inflight_tasks": 4, "queue_maxsize": 4}
        options |= {"max_completion_length": 6, "max_staleness": 0}
    arguments = async_config_of(out, url, **options)
    from trl.chat_template_utils import qwen3_chat_template
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = qwen3_chat_template
    return AsyncGRPOTrainer(
        model=str(base),
        reward_funcs=reward,
        args=arguments,
        train_dataset=prompts().map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]}),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        peft_config=peft_config,
        rollout_worker=None if has_rollouts else Rollouts(4 * (arguments.max_steps + 3)),
        weight_transfer=sync,
    )


def taken_by(trainer: Any) -> list[tuple[Any, int]]:
    """Return a list that gets each sample that is taken from a trainer's rollouts, and TRL's version then."""
    found: list[tuple[Any, int]] = []
    rollouts = trainer.rollout_queue
    original = rollouts.get

    def get(*args: Any, **kwargs: Any) -> Any:
        sample = original(*args, **kwargs)
        found.append((sample, trainer.model_version))
        return sample

    rollouts.get = get
    return found


def train_on_rank(rank: int, kind: str, bucket: str, base: str, url: str) -> tuple[Any, list[Any], list[Any]]:
    """Train with others; return the weights of each step, and what the server had while rank 0 took it."""
    prepare(rank)
    seen, found = Watch(url if rank == 0 else None), Path(bucket).with_name(f"out-{rank}")
    trainer = GRPOTrainer(
        model=build(rank, kind, base),
        reward_funcs=reward,
        args=config_of(found, url, max_steps=2),
        train_dataset=prompts(),
        processing_class=AutoTokenizer.from_pretrained(base),
        callbacks=[ServerSync(bucket, rank_timeout_s=60), seen],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return seen.states, list(zip(seen.serving, seen.is_equal, strict=True)), trainer.state.log_history


class Watch(Remember):
    """Also which version the server has while the trainer takes a step, and the digests of its weights."""

    def __init__(self, url: str | None) -> None:
        super().__init__()
        self.server = None if url is None else VllmServer(url)
        self.serving: list[int | None] = []
        self.is_equal: list[bool] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        # The rollouts of this step were generated just before.
        expected = tiny_qwen.served(served(model))
        if self.server is not None:
            self.serving.append(self.server.status().serving)
            (found,) = self.server.fingerprint()
            self.is_equal.append(expected.items() <= found.items())
