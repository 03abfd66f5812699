"""A real Trainer with a tiny model, and what its weights were at each step."""

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from patchstore import replay
from patchstore.bucket import history
from patchstore.integrations.transformers import PublishCallback
from patchstore.stores.folder import FolderStore
from tests.support import tiny_qwen
from tests.support.weights import State, assert_same_bits, loaded

TOKENS = [
    {"input_ids": row.tolist(), "labels": row.tolist()}
    for row in torch.randint(0, tiny_qwen.VOCABULARY, (64, 8), generator=torch.Generator().manual_seed(0))
]


def served(model: Any) -> State:
    """Return copies of a model's tensors as they are to be served: whole, merged, in bf16."""
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    found = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = whole.detach().to(torch.bfloat16, copy=True)
    if model.config.tie_word_embeddings:
        found.pop("lm_head.weight")
    return found


class Remember(TrainerCallback):  # type: ignore[misc]
    """Keeps the weights of each step."""

    def __init__(self) -> None:
        self.states: dict[int, State] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.states[state.global_step] = served(model)

    on_step_end = on_train_begin


class On(TrainerCallback):  # type: ignore[misc]
    """Does something at one event."""

    def __init__(self, event: str, do: Callable[..., Any]) -> None:
        setattr(self, event, lambda args, state, control, **more: do(state=state, control=control, **more))


QUICK: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}
"""Arguments of any trainer of transformers or TRL."""


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), **{**QUICK, "max_steps": 4, **options})


def trainer_of(model: Any, folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    given = arguments(folder, **options)
    return Trainer(model, given, train_dataset=TOKENS, eval_dataset=TOKENS[:4], callbacks=list(callbacks))


def trained(
    folder: Path, *callbacks: Any, model: Any = None, publish: Mapping[str, Any] | None = None, **options: Any
) -> Trainer:
    """Train, and publish to `bucket` in the folder; return the trainer."""
    callback = PublishCallback(folder / "bucket", **(publish or {}))
    trainer = trainer_of(model or tiny_qwen.build(), folder, callback, *callbacks, **options)
    trainer.train()
    return trainer


def versions(bucket: Path | str) -> list[tuple[int, str]]:
    """Return step and kind of each version, in order."""
    store = FolderStore(Path(bucket))
    head = history.head(store)
    assert head is not None
    manifests = [history.read_manifest(store, version) for version in range(head.version + 1)]
    return [(manifest.step, manifest.kind) for manifest in manifests]


def assert_replayed(bucket: Path | str, folder: Path, states: Mapping[int, State]) -> None:
    """Fail unless every version has the bits that the trainer had at its step."""
    for version, (step, _) in enumerate(versions(bucket)):
        out = folder / f"replay-{version}"
        replay(str(bucket), version, out=out)
        assert_same_bits(loaded(out), states[step])


def prepare(rank: int) -> None:
    """Tell accelerate which rank this is, as torchrun would."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "ACCELERATE_TORCH_DEVICE": "cpu",
    }


def build(rank: int, kind: str, folder: str) -> Any:
    if kind == "fsdp2":
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(fsdp_size=dist.get_world_size())
        return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32)
    model = tiny_qwen.build(tied=kind == "tied").float()
    if kind == "lora":
        import peft

        config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, config)
    return model
