"""What an API server sends of answers, where no real server here comes to it."""

import asyncio
import warnings
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

with warnings.catch_warnings():
    # What vLLM's servers import warns of itself.
    warnings.simplefilter("ignore")
    from vllm_plugin import answers


APP = SimpleNamespace(
    state=SimpleNamespace(
        engine_client=SimpleNamespace(
            vllm_config=SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="delta"))
        )
    )
)
END = b"data: [DONE]\n\n"


async def tokens(*_: Any, **__: Any) -> AsyncGenerator[Any, None]:
    """What a vLLM generates that does not label tokens."""
    for number in range(3):
        reason = "length" if number == 2 else None
        choice = SimpleNamespace(text=str(number), finish_reason=reason, stop_reason=None)
        yield SimpleNamespace(outputs=[choice], finished=reason is not None)


def streamed(
    wanted: str | None, *, background: bool = False, after: Callable[[bytes], object] = bytes
) -> bytes:
    """Ask for a stream, as vLLM makes one, and return what the client gets; call `after` with it
    after each token.
    """
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def check(_: Any) -> None:
        pass

    async def answer(_scope: Any, _receive: Any, send: Any) -> None:
        asked = SimpleNamespace(vllm_xargs=None, background=background)
        await answers.check_model(None, check, asked)
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for each in answers.generate(None, tokens, "a", SimpleNamespace(extra_args=None), "id"):
            event = f'data: {{"text":"{each.outputs[0].text}"}}\n\n'.encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            after(b"".join(sent))
        await send({"type": "http.response.body", "body": END, "more_body": False})

    headers = [] if wanted is None else [(b"x-patchstore-version", wanted.encode())]
    asyncio.run(answers.respond(APP, answer, {"type": "http", "headers": headers}, None, send))
    return b"".join(sent)


def test_a_stream_without_labels_is_sent_as_it_is_generated() -> None:
    parts: list[bytes] = []
    assert streamed(None, after=parts.append) == parts[-1] + END
    assert parts[-1].startswith(parts[1]) and parts[1].startswith(parts[0])
    assert [each.count(b"text") for each in parts] == [1, 2, 3]


def test_an_answer_in_the_background_is_asked_for_no_version() -> None:
    for wanted, background in ((None, True), ("=1", False)):
        assert streamed(wanted, background=background).endswith(END)
    with pytest.raises(HTTPException, match="in the background"):
        streamed("=1", background=True)
