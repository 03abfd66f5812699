"""AsyncGRPOTrainer of TRL, with a server that answers as vLLM does: TRL's own loop drives the sync."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training import Remember, assert_replayed, versions
from transformers import TrainerCallback

from patchstore.errors import UsageError
from patchstore.testing import tiny_qwen
from patchstore.testing.vllm_stub import StubServer, serving

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

pytest.importorskip("vllm.version", reason="TRL imports vLLM in the trainer")


@pytest.fixture(scope="module")
def grpo() -> Any:
    """The module of that name."""
    return importlib.import_module("grpo")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen.save(tiny_qwen.build(), tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with serving(StubServer()) as found:
        yield found


class Same(TrainerCallback):  # type: ignore[misc]
    """Has the server find the run that the trainer has opened."""

    def __init__(self, stub: StubServer, sync: Any) -> None:
        self.stub, self.sync = stub, sync

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stub.run_id = self.sync.run_id


def test_every_sync_is_a_version_and_the_first_is_served_before_rollouts(
    grpo: Any, base: Path, stub: StubServer, tmp_path: Path
) -> None:
    sync, seen = grpo.AsyncSync(tmp_path / "bucket", via="apply"), Remember()
    trainer = grpo.async_trainer_of(base, tmp_path, stub.url, sync, sync, Same(stub, sync), seen)
    trainer.rollout_worker.look = lambda: stub.held
    trainer.train()
    assert [step for step, _ in versions(tmp_path / "bucket")] == [0, 1, 2, 3]
    assert_replayed(tmp_path / "bucket", tmp_path, seen.states)
    # What TRL counts as live is what the server has.
    assert trainer.rollout_worker.at == [0, 1, 2, 3]
    assert trainer.model_version == 4


def test_training_does_not_wait_for_a_follow_but_for_the_first_version(
    grpo: Any, base: Path, stub: StubServer, tmp_path: Path
) -> None:
    sync = grpo.AsyncSync(tmp_path / "bucket")
    trainer = grpo.async_trainer_of(base, tmp_path, stub.url, sync, sync, weight_sync_steps=2, max_steps=5)
    brought: list[int] = []
    sync._bring = lambda publication: brought.append(publication.result().version)
    trainer.train()
    assert brought == [0]
    assert [step for step, _ in versions(tmp_path / "bucket")] == [0, 2, 4, 5]


def test_adapters_are_not_merged_into_the_weights(
    grpo: Any, base: Path, stub: StubServer, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    sync, seen = grpo.AsyncSync(tmp_path / "bucket", via="apply"), Remember()
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    trainer = grpo.async_trainer_of(
        base, tmp_path, stub.url, sync, sync, Same(stub, sync), seen, peft_config=config
    )
    before = {name: each.clone() for name, each in trainer.model.named_parameters() if not each.requires_grad}
    trainer.train()
    assert_replayed(tmp_path / "bucket", tmp_path, seen.states)
    for name, each in trainer.model.named_parameters():
        assert name not in before or torch.equal(each, before[name])


def test_without_the_callback_it_is_refused(grpo: Any, base: Path, stub: StubServer, tmp_path: Path) -> None:
    trainer = grpo.async_trainer_of(base, tmp_path, stub.url, grpo.AsyncSync(tmp_path / "bucket"))
    with pytest.raises(UsageError, match="callbacks="):
        trainer.train()


def test_other_trainers_are_refused(grpo: Any, tmp_path: Path) -> None:
    from training import trainer_of

    with pytest.raises(UsageError, match="ServerSync"):
        trainer_of(tiny_qwen.build(), tmp_path, grpo.AsyncSync(tmp_path / "bucket"))
