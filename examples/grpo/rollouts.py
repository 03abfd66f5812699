"""Answers of the servers: one thread a server asks for them, and the trainer takes them from a queue."""

import queue
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import httpx

from examples.grpo import task
from examples.grpo.policy import Group
from examples.serving import MODEL
from patchstore.errors import PatchstoreError
from patchstore.follow.adapter_server import AdapterServer
from patchstore.follow.vllm_server import VllmServer

ANSWERS = 8
"""Answers to each prompt: the group of GRPO."""
_AT_ONCE = 8
"""Prompts that a server answers at the same time."""
_TIMEOUT_S = 120.0
_RETRY_S = 0.25


class Rollouts:
    """A queue of groups that two or more servers fill. Leaving the `with` block ends the threads."""

    def __init__(
        self, servers: Sequence[str], max_waiting: int, seed: int, adapter: str | None = None
    ) -> None:
        """Begin to ask.

        Args:
            servers: URLs of vLLM servers. One that does not answer is asked again until it does.
            max_waiting: groups that may wait in the queue; this bounds how old they become.
            adapter: the name of the adapter that is asked for, each time a version of it; None for the
                servers' own weights.
        """
        self._adapter = adapter
        self._groups: queue.Queue[Group] = queue.Queue(max_waiting)
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._ask, args=(url, random.Random(f"{seed} {at}")), daemon=True)
            for at, url in enumerate(servers)
        ]
        for thread in self._threads:
            thread.start()

    def take(self, timeout_s: float) -> Group | None:
        """Return the oldest group, or None if none came in time.

        Raises:
            RuntimeError: a thread ended with an error that asking again does not cure.
        """
        if self._failure is not None:
            raise RuntimeError(f"no more answers: {self._failure}") from self._failure
        try:
            return self._groups.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def __enter__(self) -> "Rollouts":
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, url: str, draw: random.Random) -> None:
        try:
            with ThreadPoolExecutor(_AT_ONCE) as asking, httpx.Client(timeout=_TIMEOUT_S) as client:
                while not self._ended.is_set():
                    prompts = [task.draw_prompt(draw) for _ in range(_AT_ONCE)]
                    groups: list[Group] = []
                    with suppress(httpx.TransportError, PatchstoreError):
                        version = served_version(url, self._adapter)
                        if version is not None:
                            one = partial(ask, client, url, version, adapter=self._adapter)
                            groups = list(asking.map(one, prompts))
                    for group in groups:
                        self._put(group)
                    if not groups:
                        self._ended.wait(_RETRY_S)
        # Whatever it is, `take` raises it where the run can end.
        except Exception as exc:  # noqa: BLE001
            self._failure = exc

    def _put(self, group: Group) -> None:
        while not self._ended.is_set():
            try:
                self._groups.put(group, timeout=_RETRY_S)
            except queue.Full:
                continue
            return


def served_version(url: str, adapter: str | None = None) -> int | None:
    """Return the version that a server serves; None before `follow` has brought it to one.

    A server that was restarted has its checkpoint's weights until then, and is asked for nothing.
    """
    with VllmServer(url) if adapter is None else AdapterServer(url, adapter) as server:
        return server.status().serving


def ask(
    client: httpx.Client,
    url: str,
    version: int,
    prompt: Sequence[int],
    *,
    greedy: bool = False,
    adapter: str | None = None,
) -> Group:
    """Ask a server for answers to one prompt: `ANSWERS` samples, or one greedy answer.

    Args:
        version: what the server served just before: no token of the answers is older. Of an adapter, exactly
            this version is asked for.

    Raises:
        httpx.TransportError: the server does not answer, or ended while it did.
        httpx.HTTPStatusError: it refuses the request.
    """
    model = MODEL if adapter is None else f"{adapter}@{version}"
    answer = client.post(
        f"{url}/v1/completions",
        json={
            "model": model,
            "prompt": list(prompt),
            "n": 1 if greedy else ANSWERS,
            "temperature": 0.0 if greedy else 1.0,
            "max_tokens": task.MAX_ANSWER,
            "logprobs": 0,
            "return_token_ids": True,
        },
    )
    if answer.is_server_error:
        raise httpx.RemoteProtocolError(f"{url} answers {answer.status_code}: {answer.text[:200]}")
    said = answer.raise_for_status().json()
    if said["model"] != model:
        raise RuntimeError(f"{url} was asked for {model}, and {said['model']} answered")
    choices = said["choices"]
    return Group(
        server=url,
        prompt=prompt,
        answers=[choice["token_ids"] for choice in choices],
        log_probs=[choice["logprobs"]["token_logprobs"] for choice in choices],
        version=version,
    )
