"""What only a GPU can show: captured graphs, sleep, and experts spread over two devices."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_fp8
import torch
from asking import PROMPT, ask
from server_process import ServerProcess, call
from trainer import replayed

from patchstore import PatchstoreError
from patchstore.errors import StaleCaches
from patchstore.follow.verify import verify_server
from patchstore.follow.vllm_server import VllmServer
from tests.support import tiny_qwen

sys.path.append(str(Path(__file__).parents[1] / "conformance"))

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def answer(server: VllmServer) -> list[int]:
    return ask(server.url, PROMPT[:40], max_tokens=32).tokens


class Serving:
    """A server, its client, and a way to start it anew."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        eager: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.process = ServerProcess(folder / "vllm.log", *arguments, eager=eager, environment=environment)
        self.client = VllmServer(self.process.url, timeout_s=240)

    def fresh(self, model: Path) -> VllmServer:
        self.process.stop()
        self.process.start(model)
        return self.client


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    made: list[Serving] = []

    def begin(model: Path, *arguments: str, **options: Any) -> Serving:
        made.append(Serving(tmp_path, *arguments, **options))
        made[-1].fresh(model)
        return made[-1]

    yield begin
    for each in made:
        each.client.close()
        each.process.stop()


def test_captured_graphs_answer_with_the_new_weights(start, new_trainer, model, tmp_path):
    trainer = new_trainer(anchor_every=2)
    for _ in range(4):
        trainer.step(density=0.3)
    serving = start(model, eager=False)
    server = serving.client
    server.init_weight_transfer(trainer.url)
    addresses = call(server, "delta_addresses")
    answers = {}
    for version in (0, 1, 3, 0, 2, 3):
        server.apply(version)
        found = answer(server)
        assert answers.setdefault(version, found) == found
    assert len({tuple(each) for each in answers.values()}) == 4
    assert call(server, "delta_addresses") == addresses
    before = server.fingerprint()
    assert verify_server(trainer.store, server).num_verified == len(trainer.tensors)

    server = serving.fresh(replayed(trainer.store, 3, tmp_path / "replayed", model))

    assert server.fingerprint() == before
    assert answer(server) == answers[3]


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True"])
def test_memory_of_another_process_is_told_from_every_kind_of_own(allocator):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "cuda_owners.py")],
        env=os.environ | ({"PYTORCH_CUDA_ALLOC_CONF": allocator} if allocator else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    borrowed = {name for name in found if name.startswith("borrowed")}
    assert all(
        "'weight' is in memory that this process's CUDA allocator did not" in found[n] for n in borrowed
    )
    assert {name: found[name] for name in found.keys() - borrowed} == dict.fromkeys(
        ("plain", "small", "pool", "pinned", "mapped")
    ), done.stderr


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_that_slept_serves_whole_versions_again(start, new_trainer, model, level):
    trainer = new_trainer()
    trainer.publish()
    server = start(model, "--enable-sleep-mode").client
    server.init_weight_transfer(trainer.url)
    server.apply(0)
    trainer.step(density=0.3)
    httpx.post(f"{server.url}/sleep", params={"level": level}, timeout=60).raise_for_status()
    assert server.status().ranks[0]["asleep"]
    with pytest.raises(Exception, match="sleeps"):
        server.apply(1)
    httpx.post(f"{server.url}/wake_up", timeout=60).raise_for_status()

    # Level 2 keeps no weights, and the server must not claim to.
    assert server.status().serving == (0 if level == 1 else None)
    server.apply(1)

    assert verify_server(trainer.store, server).manifest.version == 1


@pytest.mark.parametrize("eager", [True, False])
def test_a_quantized_server_equals_a_fresh_start(start, new_trainer, model, tmp_path, eager):
    trainer = new_trainer(anchor_every=2)
    for _ in range(4):
        trainer.step(density=0.3)
    serving = start(model, "--quantization", "fp8", eager=eager, environment={"PATCHSTORE_REQUANTIZE": "1"})
    server = serving.client
    server.init_weight_transfer(trainer.url)
    addresses = call(server, "delta_addresses")
    for version in (0, 1, 3):
        server.apply(version)
    before, words = server.fingerprint(), answer(server)
    assert call(server, "delta_addresses") == addresses
    assert server.status().ranks[0]["map"]["num_computed"] == len(trainer.tensors)
    # Half an update is undone, quantized weights too.
    trainer.step(density=0.3)
    call(server, "delta_fail_loads")
    with pytest.raises(PatchstoreError, match="made to fail"):
        server.apply(4)
    assert (server.fingerprint(), answer(server)) == (before, words)

    server = serving.fresh(replayed(trainer.store, 3, tmp_path / "replayed", model))

    assert server.fingerprint() == before
    assert answer(server) == words


TRITON = {"VLLM_USE_DEEP_GEMM": "0"}
DEEP_GEMM = {"VLLM_USE_DEEP_GEMM_E8M0": "0", "VLLM_DEEP_GEMM_WARMUP": "skip"}
"""Scales as they are published; arranged in columns."""


@pytest.mark.parametrize("kind", ["dense", "experts", "latent"])
@pytest.mark.parametrize(
    ("form", "environment"),
    [("fp8-block", TRITON), ("fp8-block", DEEP_GEMM), ("fp8-channel", {})],
    ids=["blocks", "deep-gemm", "rows"],
)
def test_an_fp8_checkpoint_is_written_in_place_and_equals_a_fresh_start(
    start, tmp_path, form, environment, kind
):
    is_deep_gemm = environment == DEEP_GEMM
    arguments = ["--max-num-seqs", "8"]
    if kind != "dense" and not is_deep_gemm:
        arguments += ["--moe-backend", "triton"]
    # DeepGEMM compiles kernels for each size, and each captured graph is one.
    assert_written_in_place(
        start, tmp_path, form, kind, *arguments, eager=is_deep_gemm, environment=environment
    )


TWO_GPUS = ("--tensor-parallel-size", "2")
EXPERTS = (*TWO_GPUS, "--enable-expert-parallel")


@pytest.mark.parametrize("form", ["fp8-block", "fp8-channel"])
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("dense", TWO_GPUS),
        ("experts", (*TWO_GPUS, "--moe-backend", "triton")),
        ("experts", (*EXPERTS, "--moe-backend", "triton")),
    ],
    ids=["dense", "experts", "expert-parallel"],
)
def test_an_fp8_checkpoint_over_two_devices_equals_a_fresh_start(start, tmp_path, form, kind, arguments):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments = ("--max-num-seqs", "8", *arguments)
    assert_written_in_place(start, tmp_path, form, kind, *arguments, environment=TRITON)


def assert_written_in_place(start, tmp_path, form, kind, *arguments, **options):
    """Serve each version of a run in FP8 with one server; then start that anew from the third."""
    base = tiny_fp8.save(tmp_path / "base", kind)
    with tiny_fp8.published(tmp_path / "store", base, form) as trainer:
        for _ in range(4):
            tiny_fp8.step(trainer, share=0.1)
        first, third = (replayed(trainer.store, version, tmp_path / str(version), base) for version in (0, 3))
        serving = start(first, *arguments, **options)
        server = serving.client
        server.init_weight_transfer(trainer.url)
        assert server.status().serving == 0
        addresses, answers = call(server, "delta_addresses"), {}
        for version in (0, 1, 3, 0, 3):
            server.apply(version)
            found = answer(server)
            assert answers.setdefault(version, found) == found
        assert len({tuple(each) for each in answers.values()}) > 1
        assert call(server, "delta_addresses") == addresses
        assert server.status().ranks[0]["map"]["num_computed"] == 0
        before = server.fingerprint()
        call(server, "delta_fail_writes", 1)
        with pytest.raises(PatchstoreError, match="made to fail"):
            server.apply(4)
        assert (server.fingerprint(), answer(server)) == (before, answers[3])

        server = serving.fresh(third)

        assert server.fingerprint() == before
        assert answer(server) == answers[3]


def test_scales_that_vllm_rounds_for_deep_gemm_are_refused_at_start(start, tmp_path):
    base = tiny_fp8.save(tmp_path / "base")
    with tiny_fp8.published(tmp_path / "store", base, "fp8-block") as trainer:
        first = replayed(trainer.store, 0, tmp_path / "0", base)
    with pytest.raises(Exception, match="VLLM_USE_DEEP_GEMM_E8M0=0"):
        start(first, environment={"VLLM_USE_DEEP_GEMM_E8M0": "1", "VLLM_DEEP_GEMM_WARMUP": "skip"})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("qwen3-moe", EXPERTS),
        ("gpt-oss", EXPERTS),
        ("llama4", EXPERTS),
        ("deepseek-v3", EXPERTS),
        ("qwen3-next", TWO_GPUS),
        ("mamba2", TWO_GPUS),
    ],
)
def test_a_model_over_two_devices_equals_a_fresh_start(start, new_trainer, tmp_path, name, arguments):
    zoo = pytest.importorskip("zoo")
    from safetensors.torch import load_file

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    architecture = zoo.ARCHITECTURES[name]
    model = zoo.save(architecture, tmp_path / "model")
    trainer = new_trainer(load_file(model / "model.safetensors"), anchor_every=2, dtype=None)
    for _ in range(4):
        trainer.step()
    serving = start(
        model, *arguments, "--skip-tokenizer-init", "--load-format", "dummy", *GPU_ARGUMENTS.get(name, ())
    )
    server = serving.client
    server.init_weight_transfer(trainer.url)
    for version in range(4):
        server.apply(version)
    before, proof = server.fingerprint(), verify_server(trainer.store, server)
    assert proof.manifest.version == 3

    serving.process.arguments = tuple(
        a for a in serving.process.arguments if a not in ("--load-format", "dummy")
    )
    server = serving.fresh(replayed(trainer.store, 3, tmp_path / "replayed", model))

    after = server.fingerprint()
    assert [rank.keys() for rank in after] == [rank.keys() for rank in before]
    for rank, fresh in zip(before, after, strict=True):
        assert {n for n in rank if rank[n] != fresh[n]} == set()


# Other backends rearrange experts, and the engine says so at the start.
GPU_ARGUMENTS = dict.fromkeys(("qwen3-moe", "llama4", "deepseek-v3"), ("--moe-backend", "triton"))


LONG = [1 + (7 * i) % (tiny_qwen.VOCABULARY - 1) for i in range(200)]


@pytest.mark.parametrize("connector", ["OffloadingConnector", "SimpleCPUOffloadConnector"])
def test_connectors_of_vllm_forget_what_older_weights_computed(start, new_trainer, model, connector):
    trainer = new_trainer()
    for _ in range(2):
        trainer.step(density=0.3)
    config = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28},
    }
    server = start(model, "--kv-transfer-config", json.dumps(config)).client
    server.init_weight_transfer(trainer.url)

    def forget() -> None:
        """Have vLLM look for prefixes where the connector keeps them."""
        httpx.post(f"{server.url}/reset_prefix_cache", timeout=60).raise_for_status()

    def bring(driver: VllmServer, version: int) -> None:
        """Apply a version, again while blocks are on their way to the connector, as `follow` does."""
        for _ in range(200):
            try:
                driver.apply(version)
            except StaleCaches as exc:
                assert "was not applied" in str(exc)  # noqa: PT017
                time.sleep(0.05)
            else:
                return
        pytest.fail("the connector never let go of its blocks")

    right = {}
    for version in (1, 0):
        bring(server, version)
        right[version] = ask(server.url, LONG).tokens
    assert right[0] != right[1]
    for pause_mode in ("none", "keep", "abort", "none"):
        with VllmServer(server.url, timeout_s=240, pause_mode=pause_mode) as driver:
            for version in (1, 0):
                # A step is under way that stores what the older weights compute.
                running = threading.Thread(target=partial(ask, server.url, LONG[:64], max_tokens=150))
                running.start()
                bring(driver, version)
                if pause_mode != "abort":
                    running.join()
                forget()
                assert ask(server.url, LONG).tokens == right[version]
                running.join()
    with VllmServer(server.url, timeout_s=240, prefix_cache="keep") as driver:
        bring(driver, 1)
    forget()
    # So that this test can fail.
    assert ask(server.url, LONG).tokens != right[1]
