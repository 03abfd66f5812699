"""Versions of adapters over two ranks, and of experts, beside a server that starts with replays of them."""

import json
from contextlib import closing
from pathlib import Path

import pytest
import tiny_adapter
import tiny_fp8
import torch
from asking import Answer, ask
from safetensors import safe_open
from server_process import ForkingServer, ServerProcess

from patchstore import Publisher, open_store, replay
from patchstore.follow.adapter_server import AdapterServer

ARGUMENTS = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
TWO_RANKS = ("--tensor-parallel-size", "2")
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
VERSIONS = range(3)

pytestmark = pytest.mark.timeout(1800)


def answer(process: ServerProcess, model: str) -> Answer:
    return ask(process.url, model=model, logprobs=3)


def of_experts(model: Path, is_fused: bool) -> dict[str, torch.Tensor]:
    """Return an adapter of the experts of a model: of each by itself, or of those of a layer at once."""
    with safe_open(model / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if ".experts." in name]  # noqa: SIM118
        each = {name.removesuffix(".weight"): tuple(file.get_slice(name).get_shape()) for name in names}
    if not is_fused:
        return tiny_adapter.of_shapes(each)
    layers = {name.partition(".experts.")[0] for name in each}
    fused = {}
    for layer in sorted(layers):
        out, into = each[f"{layer}.experts.0.gate_proj"]
        fused |= {f"{layer}.experts.base_layer": (2 * out, into), f"{layer}.experts": (into, out)}
    return tiny_adapter.of_shapes(fused, num=sum(n.startswith(layer) for n in each) // 3)


def test_two_ranks_serve_each_version_as_a_fresh_start(model: Path, tmp_path: Path) -> None:
    assert_as_a_fresh_start(model, tiny_adapter.tensors(), tmp_path, *TWO_RANKS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM adapts experts on a GPU only")
@pytest.mark.parametrize("is_fused", [False, True], ids=["each", "fused"])
@pytest.mark.parametrize(
    "arguments",
    [(), TWO_RANKS, (*TWO_RANKS, "--enable-expert-parallel")],
    ids=["one", "two", "expert-parallel"],
)
def test_experts_are_adapted_as_by_a_fresh_start(
    tmp_path: Path, arguments: tuple[str, ...], is_fused: bool
) -> None:
    if arguments and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = tiny_fp8.save(tmp_path / "base", "experts")
    if is_fused:
        arguments = (*arguments, "--enable-mixed-moe-lora-format")
    assert_as_a_fresh_start(model, of_experts(model, is_fused), tmp_path, *arguments, is_fused=is_fused)


def assert_as_a_fresh_start(
    model: Path, tensors: dict[str, torch.Tensor], tmp_path: Path, *arguments: str, is_fused: bool = False
) -> None:
    """Serve each version of a run with one server, and then all of them with one that starts with them."""
    store, arguments = tmp_path / "run", (*ARGUMENTS, *arguments)
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
        ForkingServer(tmp_path / "vllm.log", *arguments, environment=ENVIRONMENT).serving(model) as process,
        AdapterServer(process.url, "policy", bucket) as server,
    ):
        for version in VERSIONS:
            server.apply(version)
            # Slots of both ranks, with those that the version's folder gives.
            assert server.verify(bucket) == version
            found.append(answer(process, "policy"))
    folders = [
        {"name": f"version-{version}", "path": str(tmp_path / str(version)), "is_3d_lora_weight": is_fused}
        for version in VERSIONS
    ]
    fresh = ForkingServer(
        tmp_path / "fresh.log",
        *arguments,
        *("--lora-modules", *map(json.dumps, folders)),
        environment=ENVIRONMENT,
    )
    with fresh.serving(model) as process:
        expected = [answer(process, f"version-{version}") for version in VERSIONS]
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert len({tuple(each.tokens) for each in expected}) == len(VERSIONS)
