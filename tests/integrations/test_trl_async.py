"""TRL's trainers, with a server that answers as vLLM does: AsyncGRPOTrainer's own loop drives the sync."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training import On, Remember, assert_replayed, versions

from patchstore import replay
from patchstore.errors import ServerUnavailable, UsageError
from patchstore.stores.folder import FolderStore
from tests.support import adapter_stub, tiny_qwen
from tests.support.adapter_stub import AdapterStub
from tests.support.http_server import Answer, Request, json_answer
from tests.support.vllm_stub import StubServer, serving
from tests.support.weights import assert_same_bits

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

pytest.importorskip("vllm.version", reason="TRL imports vLLM in the trainer")


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with serving(StubServer()) as found:
        yield found


def same(stub: StubServer, sync: Any) -> On:
    """Have the server find the run that the trainer has opened."""
    return On("on_train_begin", lambda **_: setattr(stub, "run_id", sync.run_id))


def test_every_sync_is_a_version_and_the_first_is_served_before_rollouts(
    grpo: Any, base: Path, stub: StubServer, tmp_path: Path
) -> None:
    sync, seen = grpo.AsyncSync(tmp_path / "bucket", via="apply"), Remember()
    trainer = grpo.async_trainer_of(base, tmp_path, stub.url, sync, sync, same(stub, sync), seen)
    trainer.rollout_worker.look = lambda: stub.held
    trainer.train()
    assert [step for step, _ in versions(tmp_path / "bucket")] == [0, 1, 2, 3]
    assert_replayed(tmp_path / "bucket", tmp_path, seen.states)
    # What TRL counts as live is what the server has.
    assert trainer.rollout_worker.at == [0, 1, 2, 3]
    assert trainer.model_version == 4


def test_what_a_callback_changes_behind_the_sync_is_served_before_rollouts(
    grpo: Any, base: Path, stub: StubServer, tmp_path: Path
) -> None:
    sync, seen = grpo.AsyncSync(tmp_path / "bucket", via="apply"), Remember()
    double = On("on_train_begin", lambda model, **_: model.lm_head.weight.data.mul_(2))
    callbacks = (sync, same(stub, sync), double, seen)
    trainer = grpo.async_trainer_of(base, tmp_path, stub.url, sync, *callbacks, max_steps=1)
    trainer.rollout_worker.look = lambda: stub.held
    trainer.train()
    assert [step for step, _ in versions(tmp_path / "bucket")] == [0, 0, 1]
    assert trainer.rollout_worker.at == [1, 2]
    replay(str(tmp_path / "bucket"), 1, out=tmp_path / "first")
    found = load_file(tmp_path / "first" / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], seen.states[0]["lm_head.weight"])


def test_weights_that_changed_within_a_step_are_served_to_the_next_generation(
    grpo: Any, base: Path, stub: StubServer, tmp_path: Path
) -> None:
    sync = grpo.ServerSync(tmp_path / "bucket")
    options = {"vllm_importance_sampling_correction": False}
    trainer = grpo.trainer_of(base, tmp_path, stub.url, sync, **options)
    generation = trainer.vllm_generation
    sync.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    stub.run_id = sync.run_id
    served = []
    for factor in (1, 2, 1):
        with torch.no_grad():
            trainer.model.lm_head.weight.mul_(factor)
        generation.sync_weights()
        served.append(stub.held)
    assert served == [0, 1, 1]
    sync.on_train_end(trainer.args, trainer.state, trainer.control)
    assert [step for step, _ in versions(tmp_path / "bucket")] == [0, 0]


def test_training_does_not_wait_for_a_follow_but_for_the_first_version(
    grpo: Any, base: Path, stub: StubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = grpo.AsyncSync(tmp_path / "bucket")
    trainer = grpo.async_trainer_of(base, tmp_path, stub.url, sync, sync, weight_sync_steps=2, max_steps=5)
    brought: list[int] = []
    module = "patchstore.integrations.trl.wait_until"
    monkeypatch.setattr(module, lambda version, **_: brought.append(version))
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
        base, tmp_path, stub.url, sync, sync, same(stub, sync), seen, peft_config=config
    )
    before = {name: each.clone() for name, each in trainer.model.named_parameters() if not each.requires_grad}
    trainer.train()
    assert_replayed(tmp_path / "bucket", tmp_path, seen.states)
    for name, each in trainer.model.named_parameters():
        assert name not in before or torch.equal(each, before[name])


class Completing(AdapterStub):
    """Also answers TRL's requests for completions, and remembers which model each was for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FolderStore(folder))
        self.asked: list[tuple[str, bool]] = []
        """The model, and whether it was held."""

    def answer(self, request: Request) -> Answer | None:
        if request.path != "/v1/completions":
            return super().answer(request)
        name = request.json()["model"]
        self.asked.append((name, name in self.held))
        # The last but one says who answered.
        tokens = [5 + len(self.asked) % 7, 6, 20 + int(name.rpartition("@")[2]), 0]
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": [-5.0] * 4}}
        return json_answer({"choices": [choice]})


@pytest.fixture
def adapters(tmp_path: Path) -> Iterator[Completing]:
    with adapter_stub.serving(Completing(tmp_path / "bucket")) as found:
        assert isinstance(found, Completing)
        yield found


def lora() -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)


def test_each_sync_is_a_version_of_the_adapter_which_the_server_has_when_it_counts(
    grpo: Any, base: Path, adapters: Completing, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    sync = grpo.AsyncSync(tmp_path / "bucket", via="apply", adapter="default")
    trainer = grpo.async_trainer_of(base, tmp_path, adapters.url, sync, sync, peft_config=lora())
    worker = trainer.rollout_worker
    states: list[Any] = []

    def look() -> int | None:
        state = peft.get_peft_model_state_dict(trainer.model, save_embedding_layers=False)
        states.append({name: each.clone() for name, each in state.items()})
        return adapters.serving()

    worker.look = look
    trainer.train()
    assert worker.at == [0, 1, 2, 3]
    assert (worker.version, trainer.model_version) == (3, 3)
    for version, expected in enumerate(states):
        replay(str(tmp_path / "bucket"), version, out=tmp_path / f"replay-{version}")
        assert_same_bits(load_file(tmp_path / f"replay-{version}" / "adapter_model.safetensors"), expected)


@pytest.mark.exhaustive  # TRL's process for rollouts imports TRL again.
def test_rollouts_of_trl_ask_for_the_version_that_the_trainer_published_last(
    grpo: Any, base: Path, adapters: Completing, tmp_path: Path
) -> None:
    sync = grpo.AsyncSync(tmp_path / "bucket", via="apply", adapter="default", serve_as="actor")
    trainer = grpo.async_trainer_of(
        base, tmp_path, adapters.url, sync, sync, peft_config=lora(), has_rollouts=True
    )
    taken = grpo.taken_by(trainer)
    trainer.train()
    assert {name.partition("@")[0] for name, _ in adapters.asked} == {"actor"}
    assert all(is_held for _, is_held in adapters.asked)
    # TRL says of a group which version was live when it began.
    assert all(each.model_version <= each.input_ids[-2] - 20 <= live for each, live in taken)
    # A batch is taken while the one before it is trained with.
    assert {0, 1} <= {live for each, live in taken if each.model_version == live}


def test_a_server_that_loads_no_adapters_is_refused_with_how_to_start_it(
    grpo: Any, base: Path, adapters: Completing, tmp_path: Path
) -> None:
    adapters.may_update = False
    sync = grpo.AsyncSync(tmp_path / "bucket", via="apply", adapter="default")
    trainer = grpo.async_trainer_of(base, tmp_path, adapters.url, sync, sync, peft_config=lora())
    with pytest.raises(ServerUnavailable, match="start vllm serve with --enable-lora"):
        trainer.train()
    assert trainer.rollout_worker.at == []


def test_a_server_of_adapters_that_is_not_given_one_is_told_apart(
    grpo: Any, base: Path, adapters: Completing, tmp_path: Path
) -> None:
    sync = grpo.AsyncSync(tmp_path / "bucket")
    trainer = grpo.async_trainer_of(base, tmp_path, adapters.url, sync, sync, peft_config=lora())
    with pytest.raises(ServerUnavailable, match='give AsyncSync adapter="default"'):
        trainer.train()


def test_without_the_callback_it_is_refused(grpo: Any, base: Path, stub: StubServer, tmp_path: Path) -> None:
    trainer = grpo.async_trainer_of(base, tmp_path, stub.url, grpo.AsyncSync(tmp_path / "bucket"))
    with pytest.raises(UsageError, match="callbacks="):
        trainer.train()


def test_other_trainers_are_refused(grpo: Any, tmp_path: Path) -> None:
    from training import trainer_of

    with pytest.raises(UsageError, match="ServerSync"):
        trainer_of(tiny_qwen.build(), tmp_path, grpo.AsyncSync(tmp_path / "bucket"))
