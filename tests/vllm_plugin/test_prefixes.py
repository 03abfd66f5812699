"""With `--prefix-cache version` running requests keep keys and values, and later ones meet no older ones."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asking import PROMPT, Answer, ask, figure, forget, post, streaming

from patchstore.follow.settings import PauseMode, PrefixCache
from patchstore.follow.vllm_server import VllmServer

pytestmark = pytest.mark.exhaustive

BLOCK = 32
LONG = 2000
SERVER_ARGUMENTS = (
    *("--max-model-len", "2304"),
    *("--hf-overrides", '{"max_position_embeddings": 2304}'),
)


def computed(server: VllmServer, prompt: list[int] = PROMPT) -> Answer:
    """What the present weights answer, with nothing from the cache."""
    forget(server.url)
    found = told(server, prompt)
    assert found.num_cached == 0
    return found


def told(server: VllmServer, prompt: list[int] = PROMPT, **options: Any) -> Answer:
    return ask(server.url, prompt, max_tokens=8, logprobs=3, **options)


def is_same(*answers: Answer) -> bool:
    """Whether they say the same, wherever it comes from."""
    return len({str(each[:2]) for each in answers}) == 1


def salt(server: VllmServer) -> str | None:
    """The salt of requests that come now."""
    asked = {"method": "delta_engine", "args": []}
    (engine,) = post(server.url, "/collective_rpc", asked).json()["results"]
    return engine["salt"]


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
    before = told(server)
    again = told(server)
    assert again.num_cached == 96
    assert is_same(before, again)
    assert salt(server) is None
    trainer.step(density=0.5)
    server.apply(1)
    assert told(server).num_cached == 0
    assert salt(server) is None


@pytest.mark.parametrize("pause_mode", [*PauseMode])
def test_a_later_request_is_answered_as_by_a_server_without_a_cache(server, trainer, of, pause_mode):
    trainer.step(density=0.5)
    driver = of(PrefixCache.VERSION, pause_mode)
    told(server)
    assert told(server).num_cached == 96

    driver.apply(1)

    found = told(server)
    assert found.num_cached == 0
    again = told(server)
    assert again.num_cached == 96
    assert is_same(found, again, computed(server))


def test_the_mode_keep_answers_from_older_keys_and_values_so_that_these_tests_can_fail(server, trainer, of):
    trainer.step(density=0.5)
    told(server)
    of(PrefixCache.KEEP).apply(1)
    stale = told(server)
    assert stale.num_cached == 96
    assert not is_same(stale, computed(server))


def test_two_updates_in_a_row_and_a_way_back_meet_nothing_of_another_application(server, trainer, of):
    for _ in range(2):
        trainer.step(density=0.5)
    driver = of(PrefixCache.VERSION)
    answers, salts = [], set()
    # Back at version 0 its first blocks are still there. They are right, but may not be reused.
    for version in (1, 2, 0, 1, 1):
        driver.apply(version)
        found = told(server)
        assert found.num_cached == 0
        again = told(server)
        assert again.num_cached == 96
        assert is_same(found, again)
        answers.append(found)
        salts.add(salt(server))
    assert len(salts) == 5
    assert is_same(answers[0], answers[3], answers[4], computed(server))
    assert answers[0] != answers[1] != answers[2] != answers[0]


TRIES = range(1, 6)
"""Versions that are applied until an update ends while an answer is still written."""


@pytest.mark.parametrize("pause_mode", [PauseMode.KEEP, PauseMode.NONE])
def test_a_running_answer_goes_on_and_nothing_of_it_is_computed_again(server, trainer, of, pause_mode):
    driver = of(PrefixCache.VERSION, pause_mode)
    for version in TRIES:
        trainer.step(density=0.5)
        num_prompt, num_preempted = figure(server.url, "prompt_tokens"), figure(server.url, "num_preemptions")
        with streaming(server.url, PROMPT[:40], max_tokens=LONG) as answer:
            assert answer.tokens(1)
            driver.apply(version)
            is_running = figure(server.url, "num_requests_running") == 1
            answer.tokens()
        assert answer.num_cached is not None
        assert figure(server.url, "num_preemptions") == num_preempted
        assert figure(server.url, "prompt_tokens") == num_prompt + 40
        if is_running:
            return
    pytest.fail("each answer ended before the update did")


def test_a_reset_computes_running_answers_again_so_that_the_test_above_can_fail(server, trainer, of):
    driver = of(PrefixCache.RESET)
    for version in TRIES:
        trainer.step(density=0.5)
        num_preempted = figure(server.url, "num_preemptions")
        with streaming(server.url, PROMPT[:40], max_tokens=LONG) as answer:
            assert answer.tokens(1)
            driver.apply(version)
            answer.tokens()
        if figure(server.url, "num_preemptions") > num_preempted:
            return
    pytest.fail("no update preempted an answer, or each answer ended before it")


@pytest.mark.parametrize("num_prompt", [8, 40])
def test_blocks_that_a_running_request_fills_after_the_update_are_not_reused(server, trainer, of, num_prompt):
    # After 8 tokens the answer fills the first block: partly before the update, and partly after it.
    trainer.step(density=0.5)
    forget(server.url)
    prompt, driver = PROMPT[:num_prompt], of(PrefixCache.VERSION)
    with streaming(server.url, prompt, max_tokens=200) as answer:
        whole = prompt + answer.tokens(1)
        # So that it is still in its first blocks, however long the update takes.
        driver.pause()
        driver.apply(1)
        driver.resume()
        whole += answer.tokens()
    for end in (BLOCK + 8, 100, 200):
        assert is_same(told(server, whole[:end]), computed(server, whole[:end]))
