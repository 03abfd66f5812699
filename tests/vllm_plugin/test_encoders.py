"""After each update answers about an image are those of a fresh start, whatever vLLM keeps of its encoder."""

import itertools
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asking
import httpx
import pytest
import tiny_vision
from safetensors.torch import load_file
from server_process import ServerProcess
from trainer import Trainer

from patchstore.follow.settings import PauseMode, PrefixCache
from patchstore.follow.vllm_server import VllmServer
from patchstore.read.replay import replay

pytestmark = pytest.mark.exhaustive

ARGUMENTS = {
    # Nothing but the encoder's cache could be stale.
    "idefics3": ["--no-enable-prefix-caching"],
    "blip2": [],
}
# Long prompts are computed in several steps, and answers are long enough to be met by an update.
LENGTHS = ("--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--max-model-len", "512")
WORDS = " ".join(f"w{1 + 7 * i % 200}" for i in range(100))


def question(text: str, seed: int, **options: Any) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": tiny_vision.image_url(seed)}}
    messages = [{"role": "user", "content": [{"type": "text", "text": text}, image]}]
    return {"messages": messages, "max_tokens": 8, "logprobs": True, "top_logprobs": 3} | options


def told(server: VllmServer, text: str = WORDS, seed: int = 0, **options: Any) -> tuple[list[int], Any]:
    """Tokens and their log-probabilities, of an answer about an image."""
    return asking.ask(server.url, **question(text, seed, **options))[:2]


def ask_all(server: VllmServer) -> list[tuple[list[int], Any]]:
    """Two texts about each of two images, so that each image is met again in another prompt."""
    return [told(server, text, seed) for text in (WORDS, "w9") for seed in (0, 1)]


def forget(server: VllmServer, *, encoder: bool) -> None:
    """Have vLLM forget prefixes, and what its encoder computed or not."""
    asking.forget(server.url)
    if encoder:
        assert asking.post(server.url, "/reset_encoder_cache").is_success


@pytest.fixture(scope="module", params=tiny_vision.NAMES)
def model_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(model_name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.save(model_name, tmp_path_factory.mktemp("models") / model_name)


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """A run with versions 0, of the model, and 1, in which all its tensors differ."""
    folder = tmp_path_factory.mktemp("stores") / "store"
    trainer = Trainer(folder, load_file(model / "model.safetensors"), files=model)
    trainer.publish()
    trainer.step(density=0.1)
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def fresh(
    model_name: str, trained: Trainer, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[list[int], Any]]:
    """What a server answers that starts with version 1."""
    folder = tmp_path_factory.mktemp("fresh")
    replay(trained.url, 1, out=folder / "replayed")
    process = ServerProcess(folder / "vllm.log", *ARGUMENTS[model_name], *LENGTHS)
    with process.serving(folder / "replayed"), VllmServer(process.url, timeout_s=120) as client:
        return ask_all(client)


@pytest.fixture(scope="module")
def process(
    model: Path, model_name: str, fresh: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    # After `fresh`, so that one server runs at a time.
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    with ServerProcess(log, *ARGUMENTS[model_name], *LENGTHS).serving(model) as process:
        yield process


@pytest.fixture(scope="module")
def right(process: ServerProcess, fresh: list[tuple[list[int], Any]]) -> dict[int, Any]:
    """What a fresh start of each version answers."""
    with VllmServer(process.url, timeout_s=120) as client:
        # Before the first update.
        answers = {0: ask_all(client), 1: fresh}
    for each in answers.values():
        assert all(one != other for one, other in itertools.combinations(each, 2))
    assert all(old != new for old, new in zip(answers[0], answers[1], strict=True))
    return answers


@pytest.fixture
def server(process: ServerProcess, trained: Trainer, right: dict[int, Any]) -> Iterator[VllmServer]:
    """A server of version 0 that has met all images."""
    with VllmServer(process.url, timeout_s=120) as client:
        client.init_weight_transfer(trained.url)
        client.apply(0)
        forget(client, encoder=True)
        assert ask_all(client) == right[0]
        assert ask_all(client) == right[0]
        yield client


def test_the_encoders_cache_answers_for_older_weights_so_that_these_tests_can_fail(server, right):
    with VllmServer(server.url, timeout_s=120, prefix_cache=PrefixCache.KEEP) as keeps:
        keeps.apply(1)
    forget(server, encoder=False)
    assert all(stale != new for stale, new in zip(ask_all(server), right[1], strict=True))
    forget(server, encoder=True)
    assert ask_all(server) == right[1]


@pytest.mark.parametrize("pause_mode", [*PauseMode])
def test_no_encoders_cache_answers_for_older_weights(server, right, pause_mode):
    with VllmServer(server.url, timeout_s=120, pause_mode=pause_mode) as driver:
        for version in (1, 0, 1):
            driver.apply(version)
            assert ask_all(server) == right[version]


def test_an_answer_that_is_being_written_goes_on_to_its_end(server, right):
    # Its prefix with the image is found in the cache, if there is one; after the update it is not.
    plain = {"stream": True, "logprobs": False, "top_logprobs": None}
    asked = asking.question(**question(WORDS, 0, max_tokens=380, **plain))
    url, before = f"{server.url}/v1/chat/completions", num_preemptions(server)
    for _ in range(20):
        with httpx.stream("POST", url, json=asked, timeout=120) as response:
            lines = response.raise_for_status().iter_lines()
            found = tokens_of(lines, 1)
            # So that it is not at its end when the weights are written, unless it already is.
            asking.post(server.url, "/pause", mode="keep", clear_cache="false")
            server.apply(1)
            asking.post(server.url, "/resume")
            found += tokens_of(lines)
        assert len(found) == 380
        assert ask_all(server) == right[1]
        if num_preemptions(server) > before:
            return
        server.apply(0)
        assert ask_all(server) == right[0]
    pytest.fail("each answer was at its end before the update")


@pytest.mark.parametrize("pause_mode", [PauseMode.KEEP, PauseMode.NONE])
def test_updates_among_many_requests_break_none_of_them(server, right, pause_mode):
    over = threading.Event()
    seeds = itertools.count(2)

    def keep_asking(num_tokens: int) -> int:
        num = 0
        while not over.is_set():
            # Images that were met before, and new ones; the text is computed in two steps or more.
            seed = num % 2 or next(seeds)
            assert len(told(server, WORDS, seed, max_tokens=num_tokens)[0]) == num_tokens
            num += 1
        return num

    with (
        ThreadPoolExecutor(4) as clients,
        VllmServer(server.url, timeout_s=120, pause_mode=pause_mode) as driver,
    ):
        asking = [clients.submit(keep_asking, num_tokens) for num_tokens in (1, 2, 8, 32)]
        try:
            for version in [1, 0] * 5 + [1]:
                driver.apply(version)
                told(server)
        finally:
            over.set()
        assert all(each.result() for each in asking)
    assert ask_all(server) == right[1]


def num_preemptions(server: VllmServer) -> float:
    """How many requests started over, of those that have gone on since."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    (value,) = re.findall(r"^vllm:num_preemptions(?:_total)?{[^}]*} (\S+)$", text, re.MULTILINE)
    return float(value)


def tokens_of(lines: Iterator[str], least: int = 1 << 30) -> list[int]:
    """Read a stream until there are so many tokens, or to its end."""
    found: list[int] = []
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                found += choice.get("token_ids") or []
        if len(found) >= least:
            break
    return found
