"""What an API server sends of answers, where no real server here comes to it."""

import asyncio
import warnings
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

with warnings.catch_warnings():
    # What vLLM's servers import warns of itself.
    warnings.simplefilter("ignore")
    from vllm_plugin import answers
    from vllm_plugin.answers import Answer


def output(tokens: str, *, finished: bool = False) -> Any:
    """What a vLLM generates that does not label tokens."""
    choice = SimpleNamespace(text=tokens, finish_reason="length" if finished else None, stop_reason=None)
    return SimpleNamespace(outputs=[choice], finished=finished)


def test_a_stream_without_labels_is_sent_as_it_is_generated() -> None:
    sent: list[bytes] = []
    sent_at: list[int] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def generate() -> AsyncGenerator[Any, None]:
        for number in range(3):
            yield output(str(number), finished=number == 2)

    async def serve() -> None:
        answer = Answer()
        answer.is_checked = True
        sender = answers._Sender(answer, send)
        headers = [(b"content-type", b"text/event-stream")]
        await sender({"type": "http.response.start", "status": 200, "headers": headers})
        async for each in answer.read(generate()):
            event = f'data: {{"text":"{each.outputs[0].text}"}}\n\n'.encode()
            await sender({"type": "http.response.body", "body": event, "more_body": True})
            sent_at.append(len(sent))
        await sender({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    asyncio.run(serve())
    # The first one with the status before it.
    assert sent_at == [2, 3, 4]
    assert b"".join(sent) == b"".join(b'data: {"text":"%d"}\n\n' % each for each in range(3)) + (
        b"data: [DONE]\n\n"
    )


def test_an_answer_in_the_background_is_asked_for_no_version() -> None:
    checked: list[Any] = []

    async def check(request: Any) -> None:
        checked.append(request)

    async def ask(wanted: str | None, *, background: bool) -> Answer:
        answer = Answer()
        answers._ANSWER.set(answer)
        if wanted is not None:
            answer.ask(wanted)
        await answers._check_model(None, check, SimpleNamespace(background=background, vllm_xargs=None))
        return answer

    for wanted, background in ((None, True), ("=1", False)):
        assert asyncio.run(ask(wanted, background=background)).refusal is None
    assert len(checked) == 2
    with pytest.raises(HTTPException, match="in the background"):
        asyncio.run(ask("=1", background=True))
    assert len(checked) == 2
