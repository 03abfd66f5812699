"""Servers with options that an update could disturb, or be disturbed by, while requests are answered."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import pytest
import tiny_adapter
from asking import PROMPT, ask, figure, streaming
from server_process import ServerProcess, call, connection, live
from trainer import Trainer, replayed

from patchstore import PatchstoreError
from patchstore.errors import UsageError
from patchstore.follow.verify import verify_server
from patchstore.follow.vllm_server import VllmServer
from tests.support.tiny_qwen import served

pytestmark = pytest.mark.exhaustive

ADAPTER = "adapter"
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
    with ServerProcess(folder / "vllm.log", *arguments).serving(model) as process:
        yield process


def answer(server: VllmServer, prompt: list[int] = PROMPT, max_tokens: int = 16, **options) -> list[int]:
    return ask(server.url, prompt, max_tokens=max_tokens, **options).tokens


def stream(url: str, body: dict, begun: Event) -> list[int]:
    """Return an answer's tokens; says when the first one is there."""
    with streaming(url, **body) as written:
        return written.tokens(begun=begun)


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
        replayed(trainer.store, version, out, model)
        process.stop()
        process.start(out)

    return start


@with_adapters
def test_an_adapter_that_is_in_use_is_applied_to_each_version(server, trainer, fresh):
    first = answer(server), answer(server, model=ADAPTER)
    assert first[0] != first[1]
    body = {"prompt": PROMPT[:8], "max_tokens": 30}
    with loaded(server, body, body | {"model": ADAPTER}) as loads:
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
    body = {"prompt": PROMPT[:8], "max_tokens": 200}
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


@speculating_one_at_a_time
def test_a_server_that_guesses_tokens_from_the_prompt_follows(server, trainer, fresh):
    first = answer(server, REPEATING, 60)
    with loaded(server, {"prompt": REPEATING, "max_tokens": 30}) as (load,):
        for version in (1, 2):
            trainer.step()
            server.apply(version)
            assert live(server) == served(trainer.history[version])
    assert set(load.lengths) == {30}
    assert figure(server.url, "spec_decode_num_draft_tokens") > 0
    updated = answer(server, REPEATING, 60)
    assert updated != first

    fresh(2)

    assert answer(server, REPEATING, 60) == updated


@as_usual
@pytest.mark.parametrize("pause_mode", ["keep", "none"])
def test_no_request_fails_while_version_after_version_is_written(server, trainer, pause_mode):
    bodies = [{"prompt": PROMPT[:length], "max_tokens": 30 + length} for length in (4, 8, 16)]
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
    connection(server).post("/sleep", {}, level=str(level))
    for refused in (
        lambda: server.finish_weight_update("1"),
        lambda: server.apply(1),
        lambda: server.init_weight_transfer(trainer.url),
    ):
        with pytest.raises(UsageError, match="the server sleeps; wake it up"):
            refused()
    status = server.status()
    assert (status.serving, status.half_applied, status.ranks[0]["asleep"]) == (
        0 if level == 1 else None,
        False,
        True,
    )
    assert live(server) == before
    if level == 2:
        call(server, "delta_lose_weights")
    connection(server).post("/wake_up", {}, tags="kv_cache")
    with pytest.raises(UsageError, match="the server sleeps"):
        server.apply(1)
    connection(server).post("/wake_up", {}, tags="weights")

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
