"""What a server answers."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any, NamedTuple

import httpx
from server_process import MODEL_NAME

from tests.support import tiny_qwen

PROMPT = [1 + (7 * i) % (tiny_qwen.VOCABULARY - 1) for i in range(100)]
"""Fills three blocks."""


class Answer(NamedTuple):
    tokens: list[int]
    """The likeliest ones."""
    logprobs: Any
    """None if they were not asked for."""
    num_cached: int
    """How many tokens of the prompt were found in the cache."""


def question(prompt: list[int] = PROMPT, **options: Any) -> dict[str, Any]:
    """Ask for a completion, or with `messages` for a chat's."""
    asked = {"model": MODEL_NAME, "max_tokens": 16, "temperature": 0}
    asked |= {"ignore_eos": True, "return_token_ids": True} | options
    return asked if "messages" in asked else asked | {"prompt": prompt}


def ask(url: str, prompt: list[int] = PROMPT, **options: Any) -> Answer:
    path = "/v1/chat/completions" if "messages" in options else "/v1/completions"
    answer = post(url, path, question(prompt, **options)).raise_for_status()
    (choice,) = answer.json()["choices"]
    return Answer(choice["token_ids"], choice["logprobs"], cached(answer.json()["usage"]))


def cached(usage: dict[str, Any]) -> int:
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class Stream:
    """An answer that the server writes while a test does other things."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.num_cached: int | None = None
        """As of `Answer`; None before the end."""
        self.ended: str | None = None
        """Why it ended."""
        self._lines = response.raise_for_status().iter_lines()

    def tokens(self, least: int = 1 << 30, begun: Event | None = None) -> list[int]:
        """Read on, until there are so many more tokens, or to the end; says when the first are there."""
        found: list[int] = []
        for line in self._lines:
            if not line.startswith("data: {"):
                continue
            part = json.loads(line.removeprefix("data: "))
            if part["choices"]:
                (choice,) = part["choices"]
                found += choice.get("token_ids") or []
                self.ended = choice["finish_reason"]
            else:
                self.num_cached = cached(part["usage"])
            if begun is not None:
                begun.set()
            if len(found) >= least:
                break
        return found


@contextmanager
def streaming(url: str, prompt: list[int] = PROMPT, **options: Any) -> Iterator[Stream]:
    asked = question(prompt, stream=True, stream_options={"include_usage": True}, **options)
    path = "/v1/chat/completions" if "messages" in options else "/v1/completions"
    with httpx.stream("POST", f"{url}{path}", json=asked, timeout=120) as response:
        yield Stream(response)


def post(url: str, path: str, body: dict | None = None, **query: str) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body or {}, params=query, timeout=120)


def figure(url: str, name: str) -> float:
    """One of vLLM's counters."""
    text = httpx.get(f"{url}/metrics", timeout=60).raise_for_status().text
    (value,) = re.findall(rf"^vllm:{name}(?:_total)?{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    return float(value)


def forget(url: str) -> None:
    """Have vLLM forget all prefixes."""
    assert post(url, "/reset_prefix_cache", reset_running_requests="true").json()["success"]
