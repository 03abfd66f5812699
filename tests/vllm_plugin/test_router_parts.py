"""The example's router beside servers that end early: no server keeps a request that is over."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from examples.router import Router

HEAD = b"HTTP/1.1 %d -\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n"


@asynccontextmanager
async def answering(*parts: bytes) -> AsyncIterator[str]:
    """A server that sends the same to everyone, and closes the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"".join(parts))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def routing(**versions: int) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router, to which a follow says which version each server serves."""
    servers = {url: {"up": True, "serving": version} for url, version in versions.items()}
    said = json.dumps({"servers": servers}).encode()
    async with answering(HEAD % (200, len(said)), said) as follow:
        router = Router(follow)
        app = Starlette(routes=[Route("/v1/{path:path}", router.answer)])
        transport = httpx.ASGITransport(app)
        async with router.running(app), httpx.AsyncClient(transport=transport, base_url="http://_") as client:
            yield client


async def got(client: httpx.AsyncClient) -> httpx.Response:
    """An answer of a server, once the router knows one."""
    while (answer := await client.get("/v1/models")).status_code == 503:
        await asyncio.sleep(0.01)
    return answer


def test_an_answer_that_ends_early_is_an_error_and_its_server_is_as_idle_as_before() -> None:
    async def run() -> None:
        async with (
            answering(HEAD % (200, 9), b"half") as first,
            answering(HEAD % (200, 5), b"whole") as second,
            routing(**{first: 1, second: 1}) as client,
        ):
            for _ in range(2):
                with pytest.raises(httpx.RemoteProtocolError):
                    await got(client)

    asyncio.run(run())


def test_the_next_server_is_asked_where_a_refusal_ends_early() -> None:
    async def run() -> None:
        async with (
            answering(HEAD % (409, 9), b"half") as newer,
            answering(HEAD % (200, 5), b"whole") as older,
            routing(**{newer: 2, older: 1}) as client,
        ):
            assert (await got(client)).text == "whole"

    asyncio.run(run())
