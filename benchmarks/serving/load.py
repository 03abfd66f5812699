"""A steady load of streamed answers, and when each of their tokens arrived.

The load is a process of its own, because a thread would wait for the trainer's threads and stamp tokens
late. Its clock, `time.monotonic`, is the same in all processes of a host.
"""

import asyncio
import json
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import httpx

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One streamed answer, in full length."""

    client: int
    times: Sequence[float]
    """`time.monotonic` at each chunk's arrival."""
    counts: Sequence[int]
    """Tokens in each chunk."""


class Load:
    """Clients that each stream one answer after the other, in a process that ends with the `with` block."""

    def __init__(self, url: str, questions: Sequence[Mapping[str, Any]]) -> None:
        """Start.

        Args:
            questions: bodies for `/v1/completions` with `max_tokens`, one per client.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_generate, args=(theirs, url, questions), daemon=True)
        self._process.start()
        theirs.close()

    def wait_until_steady(self) -> None:
        """Return when every client has received tokens."""
        self._receive("steady")

    def check(self) -> None:
        """Raise RuntimeError if the load has failed."""
        if self._pipe.poll():
            self._receive("")

    def stop(self) -> list[Request]:
        """Have each client finish its answer, and return all answers."""
        self._pipe.send(None)
        found: list[Request] = self._receive("done")
        self._process.join()
        return found

    def _receive(self, expected: str) -> Any:
        if not self._pipe.poll(_PATIENCE_S):
            raise RuntimeError(f"the load is not {expected} after {_PATIENCE_S:.0f} s")
        try:
            what, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the load's process died") from None
        if what != expected:
            raise RuntimeError(f"the load {what}: {value}")
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _generate(pipe: "Connection[Any, Any]", url: str, questions: Sequence[Mapping[str, Any]]) -> None:
    """Run the clients; the main function of the process."""
    try:
        pipe.send(("done", asyncio.run(_all(pipe, url, questions))))
    except BaseException as exc:  # noqa: BLE001  # The parent raises it.
        causes = exc.exceptions if isinstance(exc, BaseExceptionGroup) else [exc]
        pipe.send(("failed", "; ".join(f"{type(each).__name__}: {each}" for each in causes)))


async def _all(
    pipe: "Connection[Any, Any]", url: str, questions: Sequence[Mapping[str, Any]]
) -> list[Request]:
    stopped = asyncio.Event()
    begun = [asyncio.Event() for _ in questions]
    answers: list[Request] = []

    async def ask(client: int) -> None:
        while not stopped.is_set():
            answers.append(await _stream(http, client, questions[client], begun[client]))

    async def obey() -> None:
        for each in begun:
            await each.wait()
        pipe.send(("steady", None))
        while not pipe.poll():
            await asyncio.sleep(0.02)
        stopped.set()

    no_limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S, limits=no_limits) as http,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(obey())
        for client in range(len(questions)):
            tasks.create_task(ask(client))
    return answers


async def _stream(
    http: httpx.AsyncClient, client: int, question: Mapping[str, Any], begun: asyncio.Event
) -> Request:
    """Stream one answer.

    Raises:
        RuntimeError: the server refused it, or ended it early.
    """
    times: list[float] = []
    counts: list[int] = []
    ended = None
    body = {**question, "stream": True, "return_token_ids": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if not response.is_success:
            raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.monotonic()
            message = json.loads(line.removeprefix("data: "))
            if "choices" not in message:
                raise RuntimeError(f"the server ended the answer with an error: {line:.500}")
            (choice,) = message["choices"]
            if tokens := choice["token_ids"]:
                times.append(now)
                counts.append(len(tokens))
                begun.set()
            ended = choice["finish_reason"] or ended
    if (sum(counts), ended) != (question["max_tokens"], "length"):
        raise RuntimeError(
            f"an answer has {sum(counts)} of {question['max_tokens']} tokens, ended by {ended}"
        )
    return Request(client=client, times=times, counts=counts)
