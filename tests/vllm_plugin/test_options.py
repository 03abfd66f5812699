"""Servers with options that an update could disturb, or be disturbed by, while requests are answered."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import httpx
import pytest
import tiny_adapter
from server_process import MODEL_NAME, RUNNING, ServerProcess
from trainer import Trainer

from patchstore import PatchstoreError, replay
from patchstore.errors import UsageError
from patchstore.serve.verify import verify_server
from patchstore.serve.vllm_server import VllmServer
from patchstore.testing import tiny_qwen
from patchstore.testing.tiny_qwen import served

# A server may take minutes to start on a busy machine.
pytestmark = [pytest.mark.vllm, pytest.mark.exhaustive, pytest.mark.timeout(1200)]

ADAPTER = "adapter"
PROMPT = [1 + (7 * i) % (tiny_qwen.VOCABULARY - 1) for i in range(100)]
REPEATING = [5, 6, 7, 8] * 10


def served_by(name: str, *arguments: str) -> pytest.MarkDecorator:
    """Run a test with one server of these arguments, which all such tests of this module share."""
    return pytest.mark.parametrize("process", [arguments], indirect=True, ids=[name], scope="module")


with_adapters = served_by(
    "lora", "--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={{adapter}}"
)
# These two are about different things: how tokens are drafted, and who is next.
speculating_one_at_a_time = served_by(
    "ngram-one-sequence",
    *("--max-num-seqs", "1", "--speculative-config"),
    json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}).replace("{", "{{"),
)
as_usual = served_by("plain")


@pytest.fixture(scope="module")
def process(request, model: Path, tmp_path_factory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    adapter = tiny_adapter.save(folder / "adapter")
    arguments = [each.replace("{adapter}", str(adapter)).replace("{{", "{") for each in request.param]
    process = ServerProcess(folder / "vllm.log", *arguments)
    RUNNING.append(process)
    try:
        process.start(model)
        yield process
    finally:
        process.stop()
        RUNNING.remove(process)


def question(prompt: list[int], max_tokens: int, model: str = MODEL_NAME) -> dict:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def ask(
    server: VllmServer, prompt: list[int] = PROMPT, max_tokens: int = 16, model: str = MODEL_NAME
) -> dict:
    body = question(prompt, max_tokens, model)
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status().json()


def answer(server: VllmServer, *args, **kwargs) -> list[int]:
    return ask(server, *args, **kwargs)["choices"][0]["token_ids"]


def stream(url: str, body: dict, begun: Event) -> list[int]:
    """Return an answer's tokens; says when the first one is there."""
    tokens: list[int] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=120) as response:
        for line in response.raise_for_status().iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                tokens += choice["token_ids"] or []
                begun.set()
    return tokens


def live(server: VllmServer) -> dict[str, str]:
    """Fingerprint of what versions change, by the names that a model without adapters has."""
    (fingerprint,) = server.fingerprint()
    bare = {name.replace(".base_layer.", "."): digest for name, digest in fingerprint.items()}
    return {name: digest for name, digest in bare.items() if name.endswith(".weight")}


@dataclass
class Load:
    """Requests that follow one another without a pause."""

    lengths: list[int] = field(default_factory=list)
    """Tokens of each answer."""
    begun: Event = field(default_factory=Event)
    ended: Event = field(default_factory=Event)

    def run(self, url: str, body: dict) -> None:
        while not self.ended.is_set():
            self.lengths.append(len(stream(url, body, self.begun)))


@contextmanager
def loaded(server: VllmServer, *bodies: dict) -> Iterator[list[Load]]:
    """Ask all the time inside of the block; a request that fails raises after it."""
    loads = [Load() for _ in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        asked = [pool.submit(load.run, server.url, body) for load, body in zip(loads, bodies, strict=True)]
        try:
            for load in loads:
                assert load.begun.wait(120)
            yield loads
        finally:
            for load in loads:
                load.ended.set()
        for each in asked:
            each.result()


@pytest.fixture
def fresh(process: ServerProcess, trainer: Trainer, model: Path, tmp_path: Path) -> Callable[[int], None]:
    """Start the server anew, from a version that was replayed."""

    def start(version: int) -> None:
        out = tmp_path / "replayed"
        replay(trainer.store, version, out=out)
        for path in model.glob("*.json"):
            if not (out / path.name).exists():
                (out / path.name).write_bytes(path.read_bytes())
        process.stop()
        process.start(out)

    return start


@with_adapters
def test_an_adapter_that_is_in_use_is_applied_to_each_version(server, trainer, fresh):
    first = answer(server), answer(server, model=ADAPTER)
    assert first[0] != first[1]
    with loaded(server, question(PROMPT[:8], 30), question(PROMPT[:8], 30, ADAPTER)) as loads:
        for version in (1, 2, 3):
            trainer.step()
            server.apply(version)
            assert live(server) == served(trainer.history[version])
    assert all(set(load.lengths) == {30} for load in loads)
    assert verify_server(trainer.store, server, 3).num_verified == len(trainer.tensors)
    updated = answer(server), answer(server, model=ADAPTER)
    assert not set(map(tuple, first)) & set(map(tuple, updated))
    before = server.fingerprint()

    fresh(3)

    assert (answer(server), answer(server, model=ADAPTER)) == updated
    assert server.fingerprint() == before


@speculating_one_at_a_time
def test_requests_that_wait_for_their_turn_are_answered_by_the_version_that_came_meanwhile(server, trainer):
    trainer.step(density=0.5)
    body = question(PROMPT[:8], 200)
    # If all were answered before the update came, that showed nothing.
    for _ in range(10):
        server.apply(0)
        begun = Event()
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(stream, server.url, body, begun)]
            assert begun.wait(120)
            waiting = [Event() for _ in range(3)]
            asked += [pool.submit(stream, server.url, body, each) for each in waiting]
            server.apply(1)
            is_late = any(not each.is_set() for each in waiting)
            answers = [each.result() for each in asked]
        if is_late:
            break

    assert is_late
    assert {len(each) for each in answers} == {200}
    assert answer(server, PROMPT[:8], 200) in answers[1:]
    assert server.status().serving == 1
    assert live(server) == served(trainer.history[1])


def num_drafted(server: VllmServer) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=60).raise_for_status().text
    lines = [line for line in text.splitlines() if line.startswith("vllm:spec_decode_num_draft_tokens_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@speculating_one_at_a_time
def test_a_server_that_guesses_tokens_from_the_prompt_follows(server, trainer, fresh):
    first = answer(server, REPEATING, 60)
    with loaded(server, question(REPEATING, 30)) as (load,):
        for version in (1, 2):
            trainer.step()
            server.apply(version)
            assert live(server) == served(trainer.history[version])
    assert set(load.lengths) == {30}
    assert num_drafted(server) > 0
    updated = answer(server, REPEATING, 60)
    assert updated != first

    fresh(2)

    assert answer(server, REPEATING, 60) == updated


@as_usual
@pytest.mark.parametrize("pause_mode", ["keep", "none"])
def test_no_request_fails_while_version_after_version_is_written(server, trainer, pause_mode):
    bodies = [question(PROMPT[:length], 30 + length) for length in (4, 8, 16)]
    with VllmServer(server.url, pause_mode=pause_mode) as driver, loaded(server, *bodies) as loads:
        for version in range(1, 6):
            trainer.step(density=0.1)
            driver.apply(version)
            assert live(server) == served(trainer.history[version])
            assert verify_server(trainer.store, driver, version).num_verified == len(trainer.tensors)
    for load, body in zip(loads, bodies, strict=True):
        assert set(load.lengths) == {body["max_tokens"]}


@as_usual
@pytest.mark.parametrize("level", [1, 2])
def test_a_server_that_sleeps_refuses_updates_and_is_honest_when_it_wakes(server, trainer, level):
    # The CPU build of vLLM takes the calls and frees no memory, so what level 2 loses is written over here.
    trainer.step()
    server.start_weight_update()
    server.update_weights(1)
    before = live(server)
    server._http.post("/sleep", {}, level=str(level))
    for call in (
        lambda: server.finish_weight_update("1"),
        lambda: server.apply(1),
        lambda: server.init_weight_transfer(trainer.url),
    ):
        with pytest.raises(UsageError, match="the server sleeps; wake it up"):
            call()
    status = server.status()
    assert (status.serving, status.half_applied, status.ranks[0]["asleep"]) == (
        0 if level == 1 else None,
        False,
        True,
    )
    assert live(server) == before
    if level == 2:
        server._http.post("/collective_rpc", {"method": "delta_lose_weights"})
    server._http.post("/wake_up", {}, tags="kv_cache")
    with pytest.raises(UsageError, match="the server sleeps"):
        server.apply(1)
    server._http.post("/wake_up", {}, tags="weights")

    if level == 2:
        for _ in range(2):
            assert server.status().serving is None
            with pytest.raises(PatchstoreError, match="no version"):
                verify_server(trainer.store, server)
            # Opening again finds out what is served, and this is nothing.
            server.init_weight_transfer(trainer.url)
    server.resume()
    assert not server.status().ranks[0]["asleep"]
    server.apply(1)
    assert live(server) == served(trainer.history[1])
    assert verify_server(trainer.store, server, 1).num_verified == len(trainer.tensors)


@as_usual
def test_a_prompt_that_was_cached_is_answered_as_by_a_fresh_start(server, trainer, fresh):
    trainer.step()
    old = answer(server)
    assert ask(server)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    server.apply(1)
    updated = [answer(server), answer(server, PROMPT[:70])]

    fresh(1)

    assert [answer(server), answer(server, PROMPT[:70])] == updated
    assert updated[0] != old
