"""Versions of adapters on one real server: pulled by requests, and pushed by a driver."""

import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_adapter
import torch
from asking import PROMPT, Answer, ask, post, question, streaming
from server_process import ForkingServer, ServerProcess, call

from patchstore import Publisher, replay
from patchstore.bucket import history, kept
from patchstore.errors import OtherRun, VersionNotFound
from patchstore.follow.adapter_server import AdapterServer
from patchstore.follow.vllm_server import VllmServer
from patchstore.stores import open_store
from tests.support.weights import small_model

NUM_VERSIONS = 6
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--max-cpu-loras", "4")


def publish(store: Path, versions: int, **config: Any) -> None:
    """Publish a run of adapters; each step changes a fifth of all elements."""
    options = {key: config[key] for key in ("rank", "modules") if key in config}
    old, new = config.pop("renamed", ("", ""))
    tensors = {name.replace(old, new): each for name, each in tiny_adapter.tensors(**options).items()}
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
    publish(root / "again", 1)
    kept.tag(open_store(root / "policy"), "best", 2)
    publish(root / "rank-16", 1, rank=16)
    publish(root / "odd", 1, modules=("q_proj", "o_proj"), renamed=("o_proj", "odd_proj"))
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
    names = {name: stores / name for name in ("rank-16", "other-base", "whole", "none")}
    names |= {"policy": stores / "policy", "newest": stores / "policy", "odd": stores / "odd"}
    names |= {"judge": f"{stores / 'policy'}@best", "lost": "s3://bucket/lost"}
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


def answered_by(url: str, model: str) -> str:
    """The adapter that answers a request."""
    return (
        post(url, "/v1/completions", question(model=model, max_tokens=1)).raise_for_status().json()["model"]
    )


def test_a_name_or_a_tag_means_a_version_and_the_answer_says_which(process, stores):
    store = open_store(stores / "policy")
    assert answered_by(process.url, "judge") == "judge@2"
    assert answered_by(process.url, "policy@best") == "policy@2"
    kept.tag(store, "best", 3)
    # What was configured holds; a request that names a tag means where it is now.
    assert answered_by(process.url, "judge") == "judge@2"
    assert answered_by(process.url, "policy@best") == "policy@3"
    assert answered_by(process.url, "newest") == "newest@5"

    found, run_id = cards(process.url), history.run_header(store).run_id
    assert re.fullmatch(rf".*/{run_id}/00000003-[0-9a-f]{{16}}", found["policy@3"])
    assert found["newest@5"] == found["newest"] != found["policy@3"]
    assert found["judge"] == found["judge@2"]


@pytest.mark.parametrize(
    ("asked", "status", "sentence"),
    [
        ("unknown@1", 404, "unknown@1"),
        ("policy@99", 404, r"\[version-not-found\] .*99"),
        ("policy@worst", 404, r"\[version-not-found\] .*'worst'"),
        ("policy@???", 400, r"\[usage\]"),
        ("none", 404, r"\[version-not-found\]"),
        ("rank-16", 400, r"\[load-failed\] .*LoRA rank 16 is greater than max_lora_rank 8"),
        ("odd", 400, r"\[load-failed\] odd@0 was not loaded: vLLM does not adapt odd_proj"),
        ("other-base", 400, r"\[schema-mismatch\] .*base somebody/else.* called tiny"),
        ("whole", 400, r"\[usage\] .*whole models"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(process, asked, status, sentence):
    before = cards(process.url)
    found, said = refused(process.url, asked)
    assert found == status, said
    assert re.search(sentence, said), said
    assert cards(process.url) == before
    assert answered_by(process.url, "policy@1") == "policy@1"


def test_a_store_that_does_not_answer_holds_up_nothing_else(process):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(refused, process.url, "lost@0")
        for _ in range(3):
            assert answered_by(process.url, "policy@1") == "policy@1"
        assert not waiting.done()
        status, said = waiting.result()
    assert (status, said[:19]) == (503, "[store-unavailable]")


def test_a_driver_loads_ahead_switches_and_unloads(process, stores, fresh):
    url, place = process.url, stores / "policy"
    # A name of no configuration is known from its first load on.
    assert load(url, "pushed", f"{place}@0").status_code == 200
    assert_same(answer(url, "pushed"), fresh[0])
    assert load(url, "pushed@1", f"{place}@1").status_code == 200
    assert load(url, "pushed@1", f"{place}@1").status_code == 200
    assert answered_by(url, "pushed") == "pushed@0"
    assert load(url, "pushed", f"{place}@1").status_code == 400
    assert load(url, "pushed", f"{place}@1", inplace=True).status_code == 200
    assert_same(answer(url, "pushed"), fresh[1])
    assert cards(url)["pushed"] == cards(url)["pushed@1"]

    assert unload(url, "pushed@1").status_code == 409
    assert unload(url, "pushed").status_code == 400
    assert unload(url, "pushed@0").status_code == 200
    assert unload(url, "pushed@0").status_code == 404
    assert "pushed@0" not in cards(url)
    # It may come back, forwards and backwards.
    assert load(url, "pushed", f"{place}@0", inplace=True).status_code == 200
    assert_same(answer(url, "pushed"), fresh[0])


def test_patchstore_follow_keeps_a_server_at_versions_of_a_run_and_then_of_another(process, stores, fresh):
    def follower(name: str, **options: Any) -> AdapterServer:
        return AdapterServer(process.url, "followed", str(stores / name), timeout_s=120, **options)

    with follower("policy", keep=2) as server:
        for version in (0, 1, 2, 1):
            assert server.apply(version) is not None
            assert server.status().serving == server.verify(open_store(stores / "policy")) == version
            assert_same(answer(process.url, "followed"), fresh[version])
        server.keep(server.status())
    assert {name for name in cards(process.url) if name.startswith("followed@")} == {
        "followed@1",
        "followed@2",
    }
    again = history.run_header(open_store(stores / "again")).run_id
    with follower("again") as server, pytest.raises(OtherRun):
        server.apply(0)
    with follower("again", run_id=again) as server:
        server.apply(0)
        assert (server.status().run_id, server.status().serving) == (again, 0)
        with pytest.raises(VersionNotFound):
            server.apply(5)
    assert answered_by(process.url, "followed") == "followed@0"


@pytest.mark.parametrize(
    ("name", "place", "status", "sentence"),
    [
        ("policy@2", "{policy}@1", 400, "cannot be version 1"),
        ("policy@1", "{whole}@1", 404, "version-not-found"),
        ("policy@0", "{whole}@0", 400, "whole models"),
        ("policy@best", "{policy}@1", 400, "NAME@VERSION"),
        ("tiny", "{policy}@1", 400, "another model"),
        ("other", "{policy}@99", 404, "99"),
        ("other@0", "ftp://host/run", 400, "PATCHSTORE_ALLOWED_STORES"),
    ],
)
def test_a_driver_that_errs_is_told_so_and_nothing_changes(process, stores, name, place, status, sentence):
    assert answered_by(process.url, "policy@1") == "policy@1"
    assert unload(process.url, "policy@0").status_code in {200, 404}
    before = cards(process.url)
    found = load(process.url, name, place.format(policy=stores / "policy", whole=stores / "whole"))
    assert found.status_code == status
    assert sentence in found.json()["error"]["message"]
    assert cards(process.url) == before


def test_running_answers_keep_their_version_and_no_prefix_is_stale(process, stores):
    url, place = process.url, stores / "policy"
    prompt = [3 + each % 200 for each in PROMPT[:64]]

    def asked(model: str) -> Answer:
        return ask(url, prompt, model=model, logprobs=3)

    long = {"model": "switched", "max_tokens": 180}
    assert load(url, "switched", f"{place}@4").status_code == 200
    assert asked("switched").num_cached == 0
    first = asked("switched")
    assert first.num_cached > 0
    for _ in range(20):
        with streaming(url, prompt, **long) as running, VllmServer(url, timeout_s=120) as server:
            begun = running.tokens(least=3)
            # So that it does not end before the switch, but it may have.
            call(server, "delta_pause")
            assert load(url, "switched", f"{place}@5", inplace=True).status_code == 200
            unloaded = unload(url, "switched@4").status_code
            call(server, "delta_resume")
            old = begun + running.tokens()
        if unloaded == 409:
            break
        assert load(url, "switched", f"{place}@4", inplace=True).status_code == 200
    assert unloaded == 409
    second = asked("switched")
    assert second.num_cached == 0
    assert second.tokens != first.tokens
    assert asked("switched@4").tokens == first.tokens
    assert old == ask(url, prompt, **(long | {"model": "switched@4"})).tokens
    assert old != ask(url, prompt, **long).tokens
    assert unload(url, "switched@4").status_code == 200


def test_the_slots_of_a_version_are_compared_with_its_folder(process, fresh):
    url = process.url
    assert_same(answer(url, "policy@4"), fresh[4])
    found = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
    card = {card["id"]: card for card in found}["policy@4"]
    with VllmServer(url, timeout_s=120) as server:
        held, root = card["lora_int_id"], card["root"]
        (same,) = call(server, "delta_adapter", held, root)
        assert same["is_held"] and same["num_bytes"] > 0 and same["differing"] == []
        call(server, "delta_spoil_adapter", held)
        for _ in range(2):
            (other,) = call(server, "delta_adapter", held, root)
            assert other["differing"] == ["model.layers.1.self_attn.qkv_proj"]
        assert call(server, "delta_adapter", 10_000, root)[0]["is_held"] is False
        assert "[" in call(server, "delta_adapter", held, "/none")[0]["error"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        ((), {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}, "--enable-lora"),
        (LORA, {}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ],
)
def test_a_server_that_could_not_load_them_does_not_start(
    model, stores, tmp_path, arguments, environment, sentence
):
    environment = environment | {"PATCHSTORE_ADAPTERS": f"policy={stores / 'policy'}"}
    process = ServerProcess(tmp_path / "vllm.log", *arguments, environment=environment)
    with pytest.raises(RuntimeError):
        process.start(model)
    assert sentence in process.log.read_text()
