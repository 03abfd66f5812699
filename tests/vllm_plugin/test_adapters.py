"""Versions of adapters on one real server: pulled by requests, and pushed by a driver."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_adapter
import torch
from asking import PROMPT, Answer, ask, post
from server_process import ForkingServer, ServerProcess

from patchstore import Publisher, replay
from patchstore.bucket import kept
from patchstore.stores import open_store
from tests.support.weights import small_model

NUM_VERSIONS = 6
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--max-cpu-loras", "4")


def publish(store: Path, versions: int, **config: Any) -> None:
    """Publish a run of adapters; each step changes a fifth of all elements."""
    options = {key: config[key] for key in ("rank", "modules") if key in config}
    tensors = tiny_adapter.tensors(**options)
    random = torch.Generator().manual_seed(7)
    folder = tiny_adapter.config(store.with_name(f"{store.name}-config"), **config)
    with Publisher(store, tensors, adapter="default", files=folder, dtype=None) as publisher:
        for step in range(versions):
            publisher.publish_patch(step).result()
            for tensor in tensors.values():
                moved = torch.rand(tensor.shape, generator=random) < 0.2
                tensor[moved] = tensor[moved] * -1.5


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`policy` has six versions; the others cannot be served."""
    root = tmp_path_factory.mktemp("stores")
    publish(root / "policy", NUM_VERSIONS)
    kept.tag(open_store(root / "policy"), "best", 2)
    publish(root / "rank-16", 1, rank=16)
    publish(root / "pissa", 1, init_lora_weights="pissa")
    publish(root / "other-base", 1, base_model_name_or_path="somebody/else")
    with Publisher(root / "whole", small_model()) as publisher:
        publisher.publish_patch(0).result()
    return root


@pytest.fixture(scope="module")
def silent() -> Iterator[str]:
    """A service that takes connections, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture(scope="module")
def process(
    model: Path, stores: Path, silent: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "tmp").mkdir()
    names = {name: stores / name for name in ("rank-16", "pissa", "other-base", "whole", "none")}
    names |= {"policy": stores / "policy", "judge": f"{stores / 'policy'}@best", "lost": "s3://bucket/lost"}
    environment = {
        "PATCHSTORE_ADAPTERS": ", ".join(f"{name}={place}" for name, place in names.items()),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "TMPDIR": str(folder / "tmp"),
        "AWS_ENDPOINT_URL_S3": silent,
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
    }
    with ForkingServer(folder / "vllm.log", *LORA, environment=environment).serving(model) as process:
        yield process


@pytest.fixture(scope="module")
def fresh(
    model: Path, stores: Path, process: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> dict[int | None, Answer]:
    """What a server answers that was started with replays of the versions; None is the base model."""
    folder = tmp_path_factory.mktemp("fresh")
    modules = []
    for version in range(NUM_VERSIONS):
        replay(stores / "policy", version, out=folder / str(version))
        modules.append(f"version-{version}={folder / str(version)}")
    with ForkingServer(folder / "vllm.log", *LORA, "--lora-modules", *modules).serving(model) as other:
        answers = {version: answer(other.url, f"version-{version}") for version in range(NUM_VERSIONS)}
        return {None: answer(other.url, "tiny"), **answers}


def answer(url: str, model: str) -> Answer:
    return ask(url, model=model, logprobs=3)


def assert_same(found: Answer, expected: Answer) -> None:
    assert found.tokens == expected.tokens
    assert found.logprobs == expected.logprobs


def cards(url: str) -> dict[str, str]:
    found = httpx.get(f"{url}/v1/models", timeout=60).raise_for_status().json()["data"]
    return {card["id"]: card["root"] for card in found}


def load(url: str, name: str, place: object, *, inplace: bool = False) -> httpx.Response:
    body = {"lora_name": name, "lora_path": f"patchstore:{place}", "load_inplace": inplace}
    return post(url, "/v1/load_lora_adapter", body)


def unload(url: str, name: str) -> httpx.Response:
    return post(url, "/v1/unload_lora_adapter", {"lora_name": name})


def refused(url: str, model: str) -> tuple[int, str]:
    """The status and sentence of a request that is not answered."""
    found = post(url, "/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 1})
    return found.status_code, found.json()["error"]["message"]


def test_a_request_that_names_a_version_is_answered_as_by_a_fresh_server(process, fresh):
    for version in (1, 4, 0, 3, 1):
        assert_same(answer(process.url, f"policy@{version}"), fresh[version])
    assert len({tuple(each.tokens) for each in fresh.values()}) == NUM_VERSIONS + 1
