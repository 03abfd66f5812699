"""Versions of adapters on a server of two ranks, beside a server that was started with replays of them."""

from contextlib import closing
from pathlib import Path

import pytest
import tiny_adapter
import torch
from asking import Answer, ask
from server_process import ForkingServer, ServerProcess

from patchstore import Publisher, open_store, replay
from patchstore.follow.adapter_server import AdapterServer

ARGUMENTS = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--tensor-parallel-size", "2")
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
VERSIONS = range(3)


def answer(process: ServerProcess, model: str) -> Answer:
    return ask(process.url, model=model, logprobs=3)


@pytest.mark.timeout(1800)
def test_two_ranks_serve_each_version_as_a_fresh_start(model: Path, tmp_path: Path) -> None:
    tensors, store = tiny_adapter.tensors(), tmp_path / "run"
    random = torch.Generator().manual_seed(7)
    config = tiny_adapter.config(tmp_path / "config")
    with Publisher(store, tensors, adapter="default", files=config) as publisher:
        for step in VERSIONS:
            publisher.publish_patch(step).result()
            replay(store, step, out=tmp_path / str(step))
            for tensor in tensors.values():
                moved = torch.rand(tensor.shape, generator=random) < 0.2
                tensor[moved] = tensor[moved] * -1.5

    found = []
    with (
        closing(open_store(store)) as bucket,
        ForkingServer(tmp_path / "vllm.log", *ARGUMENTS, environment=ENVIRONMENT).serving(model) as process,
        AdapterServer(process.url, "policy", bucket) as server,
    ):
        for version in VERSIONS:
            server.apply(version)
            # Slots of both ranks, with those that the version's folder gives.
            assert server.verify(bucket) == version
            found.append(answer(process, "policy"))
    folders = [f"version-{version}={tmp_path / str(version)}" for version in VERSIONS]
    fresh = ForkingServer(
        tmp_path / "fresh.log", *ARGUMENTS, "--lora-modules", *folders, environment=ENVIRONMENT
    )
    with fresh.serving(model) as process:
        expected = [answer(process, f"version-{version}") for version in VERSIONS]
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert len({tuple(each.tokens) for each in expected}) == len(VERSIONS)
