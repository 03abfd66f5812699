"""The services for contents: downloads, and hf-xet's protocol, as far as their clients use them."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from patchstore.testing.hub.routes import Routes
from patchstore.testing.hub.serving import Answer, Request, json_answer

if TYPE_CHECKING:
    from patchstore.testing.hub.server import Hub

OWN = "/own"
"""Where the Hub itself is a client of its contents: without faults, tokens and log."""
COPY_BYTES = 4 << 20
ROUTES = Routes()


@ROUTES.add("GET", "/content/([0-9a-f]{64})")
def _content(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    size = hub.contents.file_size(match[1])
    wanted = request.range()
    if wanted is None:
        return Answer(body=hub.load_content(match[1], 0, size), size=size)
    first, last = wanted
    if first >= size:
        return Answer(status=416, headers={"Content-Range": f"bytes */{size}"})
    end = size if last is None else min(last + 1, size)
    return Answer(
        status=206,
        body=hub.load_content(match[1], first, end),
        size=end - first,
        headers={"Content-Range": f"bytes {first}-{end - 1}/{size}"},
    )


@ROUTES.add("POST", "/v1/xorbs/default/([0-9a-f]{64})")
def _put_xorb(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    if not hub.may_transfer(request, "write"):
        return json_answer({}, 401)
    return json_answer({"was_inserted": hub.contents.add_xorb(match[1], request.body, request.size)})


@ROUTES.add("POST", "/v1/xorb-grants/default/([0-9a-f]{64})")
def _grant(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    # 200: it is here already. 404: grants are not offered, so send it.
    return json_answer({}, 200 if hub.contents.has_xorb(match[1]) else 404)


@ROUTES.add("POST", "/v1/shards")
def _put_shard(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    if not hub.may_transfer(request, "write"):
        return json_answer({}, 401)
    hub.contents.add_shard(request.body.read())
    return json_answer({"result": 1})


@ROUTES.add("POST", "/v1/telemetry")
def _telemetry(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    return json_answer({})


@ROUTES.add("GET", "/v1/reconstructions/([0-9a-f]{64})")
def _reconstruction(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    if not hub.may_transfer(request, "read"):
        return json_answer({}, 401)
    if not hub.contents.has_file(match[1]):
        return json_answer({}, 404)
    base_url = f"{hub.url}{OWN if request.path.startswith(OWN) else ''}"
    found = hub.contents.reconstruction(match[1], *(request.range() or (0, None)), base_url)
    return json_answer({}, 416) if found is None else json_answer(found)


@ROUTES.add("GET", "/xorb-data/([0-9a-f]{64})")
def _xorb(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    first, last = request.range() or (0, None)
    path = hub.contents.xorb_path(match[1])
    end = path.stat().st_size if last is None else last + 1

    def parts() -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(first)
            for begin in range(first, end, COPY_BYTES):
                yield file.read(min(end - begin, COPY_BYTES))

    return Answer(status=206, body=parts(), size=end - first)
