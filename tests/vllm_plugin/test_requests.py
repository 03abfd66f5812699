"""Requests that say which versions they accept, and answers that say which they are of."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
from asking import PROMPT, question
from server_process import MODEL_NAME, connection

from patchstore.follow.settings import PrefixCache
from patchstore.follow.vllm_server import VllmServer

HAS_TOKEN_ROUTE = find_spec("vllm.entrypoints.scale_out") is not None
"""Whether this vLLM takes and gives tokens at a route of its own, if it is started for that."""
SERVER_ARGUMENTS = (
    "--enable-server-load-tracking",
    *("--chat-template", "{% for message in messages %}{{ message.content }}{% endfor %}"),
    *(["--enable-scale-out"] if HAS_TOKEN_ROUTE else []),
)
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
TOKENS = "/inference/v1/generate"
ALL_ROUTES = (*ROUTES, *([TOKENS] if HAS_TOKEN_ROUTE else []))


def body(route: str, num_tokens: int = 8, *, stream: bool = False, **options: Any) -> dict[str, Any]:
    """A request for so many tokens."""
    match route:
        case "/v1/responses":
            asked: dict[str, Any] = {"model": MODEL_NAME, "input": "a", "max_output_tokens": num_tokens}
        case "/inference/v1/generate":
            asked = {"model": MODEL_NAME, "token_ids": PROMPT[:8]}
            asked["sampling_params"] = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        case "/v1/chat/completions":
            asked = question(messages=[{"role": "user", "content": "a"}], max_tokens=num_tokens)
        case _:
            asked = question(PROMPT[:8], max_tokens=num_tokens)
    return asked | {"stream": stream} | options


def post(server, asked: dict[str, Any], wanted: str | None = None, route: str = ROUTES[0]) -> httpx.Response:
    headers = {} if wanted is None else {"X-Patchstore-Version": wanted}
    return httpx.post(f"{server.url}{route}", json=asked, headers=headers, timeout=120)


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def load(server) -> int:
    """How many requests are not answered yet."""
    return httpx.get(f"{server.url}/load").json()["server_load"]


class Caught:
    """An answer that is being streamed while the server is paused."""

    def __init__(self, server, response: httpx.Response) -> None:
        self._server, self.response = server, response
        self._lines = response.raise_for_status().iter_lines()
        self._begun = next(self._lines)
        connection(server).post("/pause", {}, mode="keep", clear_cache="false")
        self.is_over = not load(server)

    def rest(self) -> list[dict[str, Any]]:
        """Let the server go on, and return all events."""
        self._server.resume()
        return events("\n".join([self._begun, *self._lines]))


@contextmanager
def caught(server, wanted: str) -> Iterator[Caught]:
    """Pause a server in the middle of a streamed answer."""
    url, asked = f"{server.url}{ROUTES[0]}", body(ROUTES[0], 240, stream=True)
    headers = {"X-Patchstore-Version": wanted}
    for _ in range(20):
        with httpx.stream("POST", url, json=asked, headers=headers, timeout=120) as response:
            answer = Caught(server, response)
            try:
                if not answer.is_over:
                    yield answer
                    return
            finally:
                server.resume()
            answer.rest()
    pytest.fail("the answer was always over before the pause")


@pytest.mark.parametrize("route", ALL_ROUTES)
def test_an_answer_says_which_version_it_is_of(server, trainer, route):
    trainer.step(density=0.5)
    server.apply(1)
    whole = post(server, body(route), ">=1", route).raise_for_status()
    assert whole.headers["X-Patchstore-Begin"] == whole.headers["X-Patchstore-End"] == "1"
    assert whole.json()["patchstore"] == {"begin": 1, "end": 1, "mixed": False}
    streamed = post(server, body(route, stream=True), "=1", route).raise_for_status()
    assert streamed.headers["X-Patchstore-Begin"] == "1"
    assert events(streamed.text)[-1]["patchstore"] == {"begin": 1, "end": 1, "mixed": False}
    assert "patchstore" not in events(streamed.text)[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ALL_ROUTES)
def test_a_request_for_another_version_is_refused_with_what_is_served(server, trainer, route, stream):
    for wanted in ("=1", ">=1, hold"):
        answer = post(server, body(route, stream=stream), wanted, route)
        assert (answer.status_code, answer.headers["Retry-After"]) == (409, "1")
        assert answer.json()["patchstore"] == {"serving": 0}
        assert answer.json()["error"]["message"].endswith("and the server serves version 0")
        assert "X-Patchstore-Begin" not in answer.headers


def test_extra_arguments_say_the_same_as_the_header(server, trainer):
    for route in ROUTES:
        asked = body(route, vllm_xargs={"patchstore_version": ">=1"})
        assert post(server, asked, route=route).status_code == 409
        assert post(server, asked, ">=1", route).status_code == 409
        refused = post(server, asked, ">=0", route)
        assert (refused.status_code, "in its body" in refused.text) == (400, True)


@pytest.mark.skipif(not HAS_TOKEN_ROUTE, reason="this vLLM has no such route")
def test_a_request_in_tokens_has_extra_arguments_elsewhere(server, trainer):
    asked = body(TOKENS)
    asked["sampling_params"]["extra_args"] = {"patchstore_version": "=1"}
    assert post(server, asked, route=TOKENS).status_code == 409
    asked["sampling_params"]["extra_args"] = {"patchstore_version": "=0"}
    assert post(server, asked, route=TOKENS).json()["patchstore"]["end"] == 0


@pytest.mark.parametrize(
    "wrong", ["", "12", "=-1", "= 1.5", ">1", "=1, =1", "=1, >=1", "hold, hold", "=" + "9" * 19]
)
def test_what_is_no_version_is_refused(server, trainer, wrong):
    answer = post(server, body(ROUTES[0]), wrong)
    assert (answer.status_code, "the wanted version is =12" in answer.text) == (400, True)
    asked = body(ROUTES[0], vllm_xargs={"patchstore_version": wrong})
    assert post(server, asked).status_code == 400
    assert post(server, body(ROUTES[0], vllm_xargs={"patchstore_version": 1})).status_code == 400


def test_what_vllm_answers_itself_is_left_as_it_is(server, trainer):
    wrong = post(server, body(ROUTES[0]) | {"model": "none"}, "=0")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (404, "NotFoundError")
    models = httpx.get(f"{server.url}/v1/models", headers={"X-Patchstore-Version": "=9"})
    assert (models.status_code, "patchstore" in models.json()) == (200, False)


def test_several_choices_and_steps_of_a_beam_search_are_of_the_wanted_version(server, trainer):
    for options in (
        {"n": 3, "temperature": 1},
        {"n": 2, "use_beam_search": True},
        {"prompt": [[5, 6], [7, 8]]},
    ):
        answer = post(server, body(ROUTES[0]) | options, "=0").raise_for_status()
        assert answer.json()["patchstore"] == {"begin": 0, "end": 0, "mixed": False}
        assert post(server, body(ROUTES[0]) | options, "=1").status_code == 409


@pytest.mark.parametrize("prefix_cache", [PrefixCache.RESET, PrefixCache.VERSION])
def test_an_answer_that_goes_on_with_new_weights_says_both_versions(server, trainer, prefix_cache):
    trainer.step(density=0.5)
    driver = VllmServer(server.url, prefix_cache=prefix_cache)
    with driver, caught(server, ">=0") as answer:
        driver.apply(1)
        parts = answer.rest()
    assert answer.response.headers["X-Patchstore-Begin"] == "0"
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    assert parts[-1]["patchstore"] == {"begin": 0, "end": 1, "mixed": True}


@pytest.mark.parametrize("wanted", ["=0", "hold", ">=0, hold"])
def test_an_update_ends_an_answer_that_was_to_be_of_one_version(server, trainer, wanted):
    trainer.step(density=0.5)
    with caught(server, wanted) as answer:
        server.apply(1)
        parts = answer.rest()
    assert parts[-1]["error"]["code"] == 409
    assert parts[-1]["patchstore"] == {"serving": 1}
    assert not any(part["choices"][0]["finish_reason"] for part in parts[:-1])
    # Nothing of it is left in the engine.
    assert post(server, body(ROUTES[0]), "=1").json()["patchstore"]["begin"] == 1


def test_a_version_that_a_request_accepts_until_the_server_goes_back_ends_its_answer(server, trainer):
    trainer.step()
    server.apply(1)
    with caught(server, ">=1") as answer:
        server.apply(0)
        assert answer.rest()[-1]["error"]["code"] == 409


def test_what_waits_during_an_update_is_answered_by_the_new_version_or_refused(server, trainer):
    trainer.step()
    connection(server).post("/pause", {}, mode="keep", clear_cache="false")
    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(post, server, body(ROUTES[0], stream=True), each) for each in ("=0", "hold", ">=0")
        ]
        while httpx.get(f"{server.url}/load").json()["server_load"] < len(asked):
            pass
        server.apply(1)
        server.resume()
        exactly, hold, least = [each.result() for each in asked]
    assert exactly.status_code == 409
    for answer in (hold, least):
        assert answer.headers["X-Patchstore-Begin"] == "1"
        assert events(answer.text)[-1]["patchstore"] == {"begin": 1, "end": 1, "mixed": False}


def test_without_a_version_only_what_asks_for_none_is_answered(server, trainer):
    connection(server).post("/collective_rpc", {"method": "reload_weights"})
    assert server.status().serving is None
    refused = post(server, body(ROUTES[0]), ">=0")
    assert (refused.status_code, refused.json()["patchstore"]) == (409, {"serving": None})
    answer = post(server, body(ROUTES[0])).raise_for_status()
    assert "patchstore" not in answer.json() and "X-Patchstore-Begin" not in answer.headers


def test_versions_are_not_promised_where_caches_keep_what_older_ones_computed(server, trainer):
    trainer.step()
    with VllmServer(server.url, prefix_cache=PrefixCache.KEEP) as driver:
        driver.apply(1)
    refused = post(server, body(ROUTES[0]), ">=1")
    assert (refused.status_code, "--prefix-cache keep" in refused.text) == (400, True)
    assert post(server, body(ROUTES[0])).json()["patchstore"]["begin"] == 1
    server.apply(0)
    assert post(server, body(ROUTES[0]), "=0").is_success
