"""Versions of adapters on servers of two ranks, and of models with experts, beside fresh starts from replays."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_adapter
import torch
from asking import Answer, ask
from server_process import ForkingServer, ServerProcess

from patchstore import Publisher, replay
from patchstore.follow.adapter_server import AdapterServer

LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--max-cpu-loras", "4")
NUM_VERSIONS = 3


def publish(store: Path, tensors: Mapping[str, torch.Tensor], config: Path) -> None:
    """Publish versions in which a fifth of all elements changed."""
    random = torch.Generator().manual_seed(7)
    with Publisher(store, tensors, adapter="default", files=config, dtype=None) as publisher:
        for step in range(NUM_VERSIONS):
            publisher.publish_patch(step).result()
            for tensor in tensors.values():
                moved = torch.rand(tensor.shape, generator=random) < 0.2
                tensor[moved] = tensor[moved] * -1.5


def answer(process: ServerProcess, model: str) -> Answer:
    return ask(process.url, model=model, logprobs=3)


def assert_as_fresh(model: Path, store: Path, folder: Path, *arguments: str, **environment: Any) -> None:
    """Serve each version; all answers must be those of a server that was started with replays."""
    environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    found = {}
    with (
        ForkingServer(folder / "vllm.log", *arguments, environment=environment).serving(model) as process,
        AdapterServer(process.url, "policy", store) as server,
    ):
        for version in range(NUM_VERSIONS):
            server.apply(version)
            assert server.verify(server._source) == version
            found[version] = answer(process, "policy")
    modules = []
    for version in range(NUM_VERSIONS):
        replay(store, version, out=folder / str(version))
        modules.append(f"version-{version}={folder / str(version)}")
    fresh = ForkingServer(folder / "fresh.log", *arguments, "--lora-modules", *modules, environment=environment)
    with fresh.serving(model) as process:
        expected = {version: answer(process, f"version-{version}") for version in range(NUM_VERSIONS)}
    for version, each in expected.items():
        assert (found[version].tokens, found[version].logprobs) == (each.tokens, each.logprobs)
    assert len({tuple(each.tokens) for each in expected.values()}) == NUM_VERSIONS


def test_two_ranks_serve_each_version_as_a_fresh_start(model: Path, tmp_path: Path) -> None:
    publish(tmp_path / "run", tiny_adapter.tensors(), tiny_adapter.config(tmp_path / "config"))
    assert_as_fresh(model, tmp_path / "run", tmp_path, *LORA, "--tensor-parallel-size", "2")
