"""With `--prefix-cache version` running requests keep keys and values, and later ones meet no older ones."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from server_process import MODEL_NAME

from patchstore.serve.settings import PauseMode, PrefixCache
from patchstore.serve.vllm_server import VllmServer
from patchstore.testing import tiny_qwen

# A server of its own, and answers of thousands of tokens: four minutes on a busy machine.
pytestmark = [pytest.mark.vllm, pytest.mark.exhaustive, pytest.mark.timeout(1200)]

BLOCK = 32
LONG = 2000
SERVER_ARGUMENTS = (
    *("--max-model-len", "2304"),
    *("--hf-overrides", '{"max_position_embeddings": 2304}'),
)
PROMPT = [1 + (7 * i) % (tiny_qwen.VOCABULARY - 1) for i in range(100)]


def ask(server: VllmServer, prompt: list[int] = PROMPT, **options: Any) -> dict[str, Any]:
    """Tokens and their log-probabilities, and how many tokens of the prompt were found in the cache."""
    question = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 3,
        **options,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=question, timeout=60).raise_for_status().json()
    (choice,) = answer["choices"]
    details = answer["usage"]["prompt_tokens_details"] or {}
    return {
        "answer": (choice["token_ids"], choice["logprobs"]),
        "num_cached": details.get("cached_tokens") or 0,
    }


def computed(server: VllmServer, prompt: list[int] = PROMPT) -> Any:
    """What the present weights answer, with nothing from the cache."""
    server.reset_prefix_cache()
    found = ask(server, prompt)
    assert found["num_cached"] == 0
    return found["answer"]


def figure(server: VllmServer, name: str) -> float:
    """One of vLLM's counters."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    (value,) = re.findall(rf"^vllm:{name}(?:_total)?{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    return float(value)


class Stream:
    """An answer that the server writes while a test does other things."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.num_cached: int | None = None
        """How many tokens of the prompt were found in the cache; None before the end."""
        self._lines = response.raise_for_status().iter_lines()

    def tokens(self, least: int = 1 << 30) -> list[int]:
        """Read on, until there are so many more tokens, or to the end."""
        found: list[int] = []
        for line in self._lines:
            if not line.startswith("data: {"):
                continue
            part = json.loads(line.removeprefix("data: "))
            if part["choices"]:
                found += part["choices"][0]["token_ids"] or []
            else:
                self.num_cached = (part["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            if len(found) >= least:
                break
        return found


@contextmanager
def streaming(server: VllmServer, prompt: list[int], max_tokens: int) -> Iterator[Stream]:
    question = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=question, timeout=120) as response:
        yield Stream(response)


@pytest.fixture
def of(process) -> Iterator[Callable[..., VllmServer]]:
    """Make drivers of the server, each with its own way."""
    made: list[VllmServer] = []

    def of(prefix_cache: PrefixCache, pause_mode: PauseMode = PauseMode.KEEP) -> VllmServer:
        made.append(VllmServer(process.url, timeout_s=120, prefix_cache=prefix_cache, pause_mode=pause_mode))
        return made[-1]

    yield of
    for each in made:
        each.close()


def test_without_the_option_nothing_changes_and_nothing_is_salted(server, trainer):
    # First in this module: no other driver came before.
    before = ask(server)
    assert ask(server) == before | {"num_cached": 96}
    assert server._http.every_rank("delta_prefixes") == [{"salt": None}]
    trainer.step(density=0.5)
    server.apply(1)
    assert ask(server)["num_cached"] == 0
    assert server._http.every_rank("delta_prefixes") == [{"salt": None}]


@pytest.mark.parametrize("pause_mode", [*PauseMode])
def test_a_later_request_is_answered_as_by_a_server_without_a_cache(server, trainer, of, pause_mode):
    trainer.step(density=0.5)
    driver = of(PrefixCache.VERSION, pause_mode)
    ask(server)
    assert ask(server)["num_cached"] == 96

    driver.apply(1)

    found = ask(server)
    assert found["num_cached"] == 0
    again = ask(server)
    assert again["num_cached"] == 96
    assert found["answer"] == again["answer"] == computed(server)


def test_the_mode_keep_answers_from_older_keys_and_values_so_that_these_tests_can_fail(server, trainer, of):
    trainer.step(density=0.5)
    ask(server)
    of(PrefixCache.KEEP).apply(1)
    stale = ask(server)
    assert stale["num_cached"] == 96
    assert stale["answer"] != computed(server)


def test_two_updates_in_a_row_and_a_way_back_meet_nothing_of_another_application(server, trainer, of):
    for _ in range(2):
        trainer.step(density=0.5)
    driver = of(PrefixCache.VERSION)
    answers, salts = [], set()
    # Back at version 0 its first blocks are still there. They are right, but may not be reused.
    for version in (1, 2, 0, 1, 1):
        driver.apply(version)
        found = ask(server)
        assert found["num_cached"] == 0
        assert ask(server) == found | {"num_cached": 96}
        answers.append(found["answer"])
        salts.add(driver._http.every_rank("delta_prefixes")[0]["salt"])
    assert len(salts) == 5
    assert answers[0] == answers[3] == answers[4] == computed(server)
    assert answers[0] != answers[1] != answers[2] != answers[0]


def test_requests_with_salts_of_their_own_stay_apart_from_others_and_from_older_weights(server, trainer, of):
    trainer.step(density=0.5)
    driver = of(PrefixCache.VERSION)
    ask(server, cache_salt="mine")
    assert ask(server, cache_salt="mine")["num_cached"] == 96
    assert ask(server, cache_salt="yours")["num_cached"] == 0

    driver.apply(1)

    found = ask(server, cache_salt="mine")
    assert found["num_cached"] == 0
    assert ask(server, cache_salt="mine") == found | {"num_cached": 96}
    assert ask(server, cache_salt="yours")["num_cached"] == 0
    assert ask(server)["num_cached"] == 0
    assert found["answer"] == computed(server)


TRIES = range(1, 6)
"""Versions that are applied until an update ends while an answer is still written."""


@pytest.mark.parametrize("pause_mode", [PauseMode.KEEP, PauseMode.NONE])
def test_a_running_answer_goes_on_and_nothing_of_it_is_computed_again(server, trainer, of, pause_mode):
    driver = of(PrefixCache.VERSION, pause_mode)
    for version in TRIES:
        trainer.step(density=0.5)
        num_prompt, num_preempted = figure(server, "prompt_tokens"), figure(server, "num_preemptions")
        with streaming(server, PROMPT[:40], LONG) as answer:
            assert answer.tokens(1)
            driver.apply(version)
            is_running = figure(server, "num_requests_running") == 1
            answer.tokens()
        assert answer.num_cached is not None
        assert figure(server, "num_preemptions") == num_preempted
        assert figure(server, "prompt_tokens") == num_prompt + 40
        if is_running:
            return
    pytest.fail("each answer ended before the update did")


def test_a_reset_computes_running_answers_again_so_that_the_test_above_can_fail(server, trainer, of):
    driver = of(PrefixCache.RESET)
    for version in TRIES:
        trainer.step(density=0.5)
        num_preempted = figure(server, "num_preemptions")
        with streaming(server, PROMPT[:40], LONG) as answer:
            assert answer.tokens(1)
            driver.apply(version)
            answer.tokens()
        if figure(server, "num_preemptions") > num_preempted:
            return
    pytest.fail("no update preempted an answer, or each answer ended before it")


@pytest.mark.parametrize("num_prompt", [8, 40])
def test_blocks_that_a_running_request_fills_after_the_update_are_not_reused(server, trainer, of, num_prompt):
    # After 8 tokens the answer fills the first block: partly before the update, and partly after it.
    trainer.step(density=0.5)
    server.reset_prefix_cache()
    prompt, driver = PROMPT[:num_prompt], of(PrefixCache.VERSION)
    with streaming(server, prompt, 200) as answer:
        whole = prompt + answer.tokens(1)
        # So that it is still in its first blocks, however long the update takes.
        driver.pause()
        driver.apply(1)
        driver.resume()
        whole += answer.tokens()
    for end in (BLOCK + 8, 100, 200):
        assert ask(server, whole[:end])["answer"] == computed(server, whole[:end])


def test_a_request_that_waits_during_the_update_is_computed_with_the_new_weights(server, trainer, of):
    trainer.step(density=0.5)
    ask(server)
    driver = of(PrefixCache.VERSION)
    # It is received, and hashed, before the update, and its prefix is looked for after it.
    driver.pause()
    with streaming(server, PROMPT, 8) as answer:
        driver.apply(1)
        driver.resume()
        tokens = answer.tokens()
    assert answer.num_cached == 0
    assert tokens == computed(server)[0]


def test_an_update_that_fails_leaves_answers_as_they_were(server, trainer, of):
    trainer.step(density=0.5)
    expected = computed(server)
    driver = of(PrefixCache.VERSION)
    driver._http.post("/collective_rpc", {"method": "delta_fail_writes", "args": [1]})
    with pytest.raises(Exception, match="made to fail"):
        driver.apply(1)
    assert not driver.is_paused()
    assert ask(server)["answer"] == ask(server)["answer"] == expected


def test_a_switch_that_another_driver_left_renews_prefixes(server, trainer, of):
    trainer.step(density=0.5)
    keeps, driver = of(PrefixCache.KEEP), of(PrefixCache.VERSION)
    ask(server)
    keeps.apply(1)
    keeps._mark("resume")
    assert ask(server)["num_cached"] == 96

    driver.apply(1)
    found = ask(server)
    assert found["num_cached"] == 0
    assert found["answer"] == computed(server)
