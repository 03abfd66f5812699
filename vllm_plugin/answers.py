"""In vLLM's API server: which versions a request accepts, and which one its answer is of.

A request says what it accepts (`Wanted`) in the header `X-Patchstore-Version`, or in `patchstore_version` of
its extra arguments. The engine core decides (`admission`), because only there is it certain which version is
served. This module hands it what the header says, and answers HTTP 409 where it ended a request. A stream
begins when its first token is there: until then the status can still be 409. Afterwards its last event is an
error.

    | of an answer | begun with         | ended with, and whether several versions were used                |
    |--------------|--------------------|-------------------------------------------------------------------|
    | whole        | X-Patchstore-Begin | X-Patchstore-End, and `patchstore` in the JSON object             |
    | stream       | X-Patchstore-Begin | `patchstore` in the last event that has a JSON object             |

Nothing is said where the version is not known: no version is served, a client labels tokens with a text of
its own, or vLLM does not label them (0.26). What vLLM itself refuses, and what routes answer that generate
nothing, passes through as it is.
"""

import functools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException
from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestState

from patchstore.errors import UsageError
from patchstore.follow.wanted import Wanted
from vllm_plugin.admission import REFUSED, VERSION_KEY
from vllm_plugin.core import has_delta, is_wrapped, replace

_VERSION, _BEGIN, _END = b"x-patchstore-version", b"x-patchstore-begin", b"x-patchstore-end"
_STARTS = "_patchstore_starts"
_RETRY_S = b"1"
"""After so many seconds a client may ask again."""

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


def install() -> None:
    """Have this process's API server read what requests accept, and say what answers are of."""
    if is_wrapped(AsyncLLM.encode):
        return
    call = FastAPI.__call__

    # Not a middleware of the app: the app may have been made before vLLM loaded this.
    @functools.wraps(call)
    async def responding(app: FastAPI, scope: Any, receive: Any, send: Send) -> None:
        await respond(app, functools.partial(call, app), scope, receive, send)

    # mypy: a method is assigned.
    setattr(FastAPI, "__call__", responding)  # noqa: B010
    # Pooling has a check of its own.
    for kind in (BaseServing, PoolingBaseServing):
        replace(kind, "_check_model", check_model)
    replace(AsyncLLM, "generate", generate)
    replace(AsyncLLM, "encode", _encode)
    if hasattr(RequestState, "track_weight_version"):
        replace(RequestState, "_new_completion_output", _new_output)


class Answer:
    """What is known of the answer to one HTTP request."""

    def __init__(self) -> None:
        self.wanted: Wanted | None = None
        self.text: str | None = None
        """How the request says it."""
        self.is_checked = False
        """The request names a model, so tokens may be generated for it."""
        self._num_asked = 0
        """How often the engine was asked to generate; each may be for several choices."""
        self._num_ended = 0
        self._has_begun = False
        """The engine has generated something; not every vLLM labels it."""
        self._starts: dict[int, list[tuple[str, int]]] = {}
        """By its identity, a list of each choice, which vLLM extends: labels, and from which token on."""
        self.refusal: dict[str, Any] | None = None
        """Why there is no answer: `status`, `message`, and the version that is `serving`."""

    def ask(self, text: Any) -> None:
        """Note what the request accepts.

        Raises:
            HTTPException: it is no `Wanted`, or another one than before.
        """
        try:
            wanted = Wanted.parse(text)
            if self.wanted not in {None, wanted}:
                raise UsageError(
                    f"the request wants {self.text!r:.80} in its header, and {text!r:.80} in its body"
                )
        except UsageError as exc:
            raise self.refuse(400, str(exc)) from exc
        self.wanted, self.text = wanted, text

    def ask_in(self, arguments: Any) -> None:
        """Note what the extra arguments of a request say, if anything."""
        if isinstance(arguments, dict) and arguments.get(VERSION_KEY) is not None:
            self.ask(arguments[VERSION_KEY])

    def refuse(self, status: int, message: str, serving: int | None = None) -> HTTPException:
        """Note why there is no answer, and return what may be raised."""
        self.refusal = {"status": status, "message": message, "serving": serving}
        return HTTPException(status, message)

    def read(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Pass on what the engine generates, and take note of its labels."""
        self._num_asked += 1
        return self._read(outputs)

    async def _read(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        async with aclosing(outputs):
            async for output in outputs:
                self._has_begun = True
                for choice in output.outputs:
                    self._note(choice)
                self._num_ended += output.finished
                yield output

    def _note(self, choice: Any) -> None:
        if starts := getattr(choice, _STARTS, None):
            self._starts[id(starts)] = starts
        reason = choice.stop_reason
        if choice.finish_reason == "error" and isinstance(reason, str) and reason.startswith(REFUSED):
            self.refusal = json.loads(reason.removeprefix(REFUSED))
        elif self.wanted is not None and self.wanted.is_one and len(labels := self._labels()) > 1:
            # Choices, and steps of a beam search, are requests of their own to the engine core.
            what = f"the answer has parts of the versions {', '.join(sorted(labels))}"
            self.refuse(409, f"{what}, and the request accepts answers of one version only")
        if self.refusal is not None:
            # No client sees it, and vLLM does not log it as an error of its own.
            choice.finish_reason, choice.stop_reason = "abort", None

    def _labels(self) -> set[str]:
        return {label for starts in self._starts.values() for label, _ in starts}

    @property
    def is_awaited(self) -> bool:
        """Whether the first token, or a refusal, may be still to come."""
        return self.is_checked and not self._has_begun

    @property
    def is_generated(self) -> bool:
        """Whether the engine has ended all that it was asked for."""
        return 0 < self._num_asked == self._num_ended

    def versions(self) -> dict[str, Any] | None:
        """Return the versions of the first and the last token, and whether any two tokens differ in it.

        Of several choices it is the lowest of the first, and the highest of the last. None if it is unknown.
        """
        labels = self._labels()
        if not labels or not all(label.isdecimal() for label in labels):
            return None
        begin = min(int(starts[0][0]) for starts in self._starts.values())
        end = max(int(starts[-1][0]) for starts in self._starts.values())
        return {"begin": begin, "end": end, "mixed": len(labels) > 1}


_ANSWER: ContextVar[Answer | None] = ContextVar("patchstore_answer", default=None)


# What vLLM calls.


async def respond(
    app: FastAPI, call: Callable[..., Awaitable[None]], scope: Any, receive: Any, send: Send
) -> None:
    """Answer a request to an app."""
    engine = getattr(app.state, "engine_client", None)
    if scope["type"] == "lifespan" or engine is None or not has_delta(engine.vllm_config):
        return await call(scope, receive, send)
    answer = Answer()
    sender = _Sender(answer, send) if scope["type"] == "http" else None
    if texts := [value.decode("latin-1") for name, value in scope["headers"] if name == _VERSION]:
        if sender is None:
            # A WebSocket has an answer for each of its messages.
            return await send(
                {"type": "websocket.close", "code": 1008, "reason": "X-Patchstore-Version: not here"}
            )
        try:
            answer.ask(", ".join(texts))
        except HTTPException:
            return await sender.end()
    token = _ANSWER.set(answer if sender else None)
    try:
        await call(scope, receive, sender or send)
    finally:
        _ANSWER.reset(token)


async def check_model(_: Any, check: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
    """Read what the extra arguments of a request say: not all of what it asks of the engine has them."""
    if (answer := _ANSWER.get()) is not None:
        answer.is_checked = True
        answer.ask_in(getattr(request, "vllm_xargs", None))
        if answer.wanted is not None and getattr(request, "background", False):
            raise answer.refuse(400, "an answer that is made in the background can be asked for no version")
    return await check(request)


def generate(
    _: Any,
    call: Callable[..., AsyncGenerator[Any, None]],
    prompt: Any,
    sampling_params: Any,
    request_id: str,
    **options: Any,
) -> AsyncGenerator[Any, None]:
    """Tell the engine core what the request accepts."""
    answer = _ANSWER.get()
    if answer is not None:
        answer.ask_in(sampling_params.extra_args)
        if answer.text is not None:
            sampling_params.extra_args = {**(sampling_params.extra_args or {}), VERSION_KEY: answer.text}
    outputs = call(prompt, sampling_params, request_id, **options)
    return outputs if answer is None else answer.read(outputs)


def _encode(_: Any, encode: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Refuse what cannot be told: vLLM labels no embedding, score or class."""
    answer = _ANSWER.get()
    if answer is not None and answer.wanted is not None:
        raise answer.refuse(400, "only what generates text can be asked for a version")
    return encode(*args, **options)


def _new_output(state: Any, make: Callable[..., Any], *args: Any) -> Any:
    """Have what is generated bring its labels along."""
    choice = make(*args)
    setattr(choice, _STARTS, state.weight_version_starts)
    return choice


# What is sent.


class _Sender:
    """Sends an answer, and what is known of it."""

    def __init__(self, answer: Answer, send: Send) -> None:
        self._answer, self._send = answer, send
        self._start: Message | None = None
        """Status and headers, until the first part is sent."""
        self._held = b""
        """What comes before it can be said what the answer is of."""
        self._type = b""
        """The part of Content-Type before any semicolon."""
        self._is_success = False
        self._has_begun = False
        self._has_ended = False

    async def __call__(self, message: Message) -> None:
        if self._has_ended:
            # What vLLM says of an answer that was refused.
            return
        if message["type"] == "http.response.start":
            self._start = message
            self._is_success = message["status"] == HTTPStatus.OK
            self._type = _header(message, b"content-type").partition(b";")[0].strip()
        elif message["type"] != "http.response.body":
            await self._begin()
            await self._send(message)
        elif self._answer.refusal is not None:
            await self.end()
        else:
            await self._pass(message.get("body", b""), more=message.get("more_body", False))

    async def _pass(self, body: bytes, *, more: bool) -> None:
        is_json, is_stream = self._type == b"application/json", self._type == b"text/event-stream"
        answer = self._answer
        if self._start is not None:
            self._held += body
            if more and ((is_json and answer.is_checked) or (is_stream and answer.is_awaited)):
                return
            body, self._held = self._held, b""
        versions = answer.versions()
        if versions is not None and answer.is_generated and self._is_success:
            said = b',"patchstore":' + json.dumps(versions).encode()
            if is_json and self._start is not None and not more and body.endswith(b"}"):
                body = body[:-1] + said + b"}"
                self._set(b"content-length", str(len(body)).encode())
                self._set(_END, str(versions["end"]).encode())
            elif is_stream and body.endswith(b"}\n\n"):
                body = body[:-3] + said + b"}\n\n"
        if versions is not None and self._start is not None and self._is_success:
            self._set(_BEGIN, str(versions["begin"]).encode())
        await self._begin()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def _set(self, name: bytes, value: bytes) -> None:
        assert self._start is not None
        others = [each for each in self._start["headers"] if each[0].lower() != name]
        self._start["headers"] = [*others, (name, value)]

    async def _begin(self) -> None:
        if self._start is not None:
            start, self._start, self._has_begun = self._start, None, True
            await self._send(start)

    async def end(self) -> None:
        """Say why there is no answer, or no more of it."""
        refusal = self._answer.refusal
        assert refusal is not None
        status, self._has_ended = refusal["status"], True
        error = {"message": refusal["message"], "type": "VersionRefused", "code": status}
        said = json.dumps({"error": error, "patchstore": {"serving": refusal["serving"]}}).encode()
        if self._has_begun:
            # Only a stream has; its client reads the error where it reads tokens.
            said = b"data: " + said + b"\n\ndata: [DONE]\n\n"
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(said)).encode())]
            if status == HTTPStatus.CONFLICT:
                headers.append((b"retry-after", _RETRY_S))
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": said, "more_body": False})


def _header(message: Message, name: bytes) -> bytes:
    return next((value for key, value in message["headers"] if key.lower() == name), b"")
