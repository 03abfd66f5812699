"""A router for servers that follow one run: a request goes to the newest version that may answer it.

    python -m examples.router --follow http://127.0.0.1:9464 --listen 8080

`patchstore follow` says which server serves what. A server that is down, or refuses a request's version with
HTTP 409, is left out, and the next one is asked. If none may answer, the client gets the last refusal, with
`Retry-After`. It needs starlette and uvicorn, which vLLM brings.
"""

import argparse
import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

LOOK_S = 0.25
"""So often `follow` is asked. What it said last holds while it does not answer."""
NEXT = {409, 502, 503}
"""Statuses after which another server may answer."""
OF_A_HOP = {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "upgrade"}


class Relayed(StreamingResponse):
    """What a server answers, passed on as it comes. Whichever way that ends, the server's part is ended."""

    def __init__(self, answer: httpx.Response, headers: Mapping[str, str], ending: AsyncExitStack) -> None:
        super().__init__(answer.aiter_raw(), answer.status_code, headers)
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._ending:
            await super().__call__(scope, receive, send)


class Router:
    def __init__(self, follow: str) -> None:
        self._follow = follow
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=2), trust_env=False)
        self._serving: dict[str, int | None] = {}
        self._load = Counter[str]()
        """Requests under way at each server."""

    @asynccontextmanager
    async def running(self, _: Starlette) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._look())
        yield
        looking.cancel()
        await self._client.aclose()

    async def _look(self) -> None:
        while True:
            try:
                # Also where it answers 503, which says that some server has a problem.
                found = (await self._client.get(f"{self._follow}/healthz", timeout=5)).json()["servers"]
                self._serving = {url: each["serving"] if each["up"] else None for url, each in found.items()}
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as exc:
                print(f"{self._follow} does not say what servers serve: {exc!r}", flush=True)
            await asyncio.sleep(LOOK_S)

    def _newest_first(self) -> list[str]:
        """The servers that serve a version; of those with the same, the idlest first."""
        known = {url: version for url, version in self._serving.items() if version is not None}
        return sorted(known, key=lambda url: (-known[url], self._load[url]))

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = [each for each in request.headers.items() if each[0] not in OF_A_HOP]
        refused: Response | None = None
        for url in self._newest_first():
            asked = self._client.build_request(request.method, url + path, headers=headers, content=body)
            async with AsyncExitStack() as ending:
                self._load[url] += 1
                ending.callback(self._load.subtract, [url])
                try:
                    answer = await self._client.send(asked, stream=True)
                    ending.push_async_callback(answer.aclose)
                    kept = {key: value for key, value in answer.headers.items() if key not in OF_A_HOP}
                    if answer.status_code not in NEXT:
                        return Relayed(answer, kept, ending.pop_all())
                    said = b"".join([part async for part in answer.aiter_raw()])
                    refused = Response(said, answer.status_code, kept)
                except httpx.TransportError:
                    continue
        return refused or JSONResponse(
            {"error": {"message": "no server answers", "code": 503}}, 503, {"Retry-After": "1"}
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--follow", default="http://127.0.0.1:9464", help="where patchstore follow listens")
    parser.add_argument("--listen", type=int, default=8080, metavar="PORT", help="of 127.0.0.1")
    given = parser.parse_args()
    router = Router(given.follow.rstrip("/"))
    app = Starlette(
        routes=[Route("/v1/{path:path}", router.answer, methods=["GET", "POST"])], lifespan=router.running
    )
    uvicorn.run(app, host="127.0.0.1", port=given.listen, log_level="warning")


if __name__ == "__main__":
    main()
