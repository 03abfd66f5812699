"""A local Hub: a server with buckets, their contents, and the S3 gateway to them.

Its own API for buckets is as far there as `huggingface_hub` uses it, and the services for contents as far as
downloads and hf-xet do. `gateway` answers requests of S3 clients.
"""

import json
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import unquote, urlencode

import hf_xet

from tests.support.http_server import Answer, HttpServer, Request, answer_range, json_answer
from tests.support.hub import gateway
from tests.support.hub.buckets import Bucket
from tests.support.hub.content import ContentStore

TOKEN, READ_TOKEN = "hf_test", "hf_reader"
GATEWAY_KEY, GATEWAY_SECRET = gateway.KEY, gateway.SECRET
_OWN_TOKEN = "own"
_BUFFER_BYTES = 64 << 20
_OWN = "/own"
"""Where the Hub itself is a client of its contents: without faults, tokens and log."""
COPY_BYTES = 4 << 20


class Refused(Exception):
    """Ends a handler with an answer."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer


Handler = Callable[["Hub", Request, re.Match[str]], Answer]


_ROUTES: list[tuple[str, re.Pattern[str], Handler]] = []


def _route(method: str, pattern: str) -> Callable[[Handler], Handler]:
    """Have the decorated handler answer requests whose whole path matches a regular expression."""

    def keep(handler: Handler) -> Handler:
        _ROUTES.append((method, re.compile(pattern), handler))
        return handler

    return keep


class Hub:
    """A server that runs from the beginning until `close`.

    The hooks below may be set at any time; `method` and `path` are those of the request, without query.
    """

    def __init__(self, *, port: int = 0, folder: str | None = None) -> None:
        self.fault: Callable[[str, str], tuple[int, bytes] | None] | None = None
        """Status and body to answer with instead of doing anything, or None to go on."""
        self.lose: Callable[[str, str], bool] | None = None
        """Whether to hang up instead of answering, when all is done."""
        self.refuse: Callable[[dict[str, Any]], str | None] | None = None
        """What is wrong with an operation of a batch, so that it fails beside others that do not."""
        self.requests: list[str] = []
        """Method and path of each so far."""
        self.roles = {TOKEN: "write", READ_TOKEN: "read"}
        """`read` or `write` by token."""
        self.token_s = 3600
        """For how long a token for contents is good, in seconds."""
        self.page_size = 1000
        """Entries of a page of a listing."""
        self.buckets: dict[str, Bucket] = {}
        # A request that stalls may still store what it received while the folder is removed.
        self._temporary = (
            None if folder else tempfile.TemporaryDirectory(prefix="hub-", ignore_cleanup_errors=True)
        )
        place = Path(folder or self._temporary.name)  # type: ignore[union-attr]
        place.mkdir(parents=True, exist_ok=True)
        self.contents = ContentStore(place)
        self._lock = threading.Lock()
        config = {
            "reconstruction.download_buffer_size": _BUFFER_BYTES,
            "reconstruction.download_buffer_perfile_size": _BUFFER_BYTES,
            "reconstruction.download_buffer_limit": _BUFFER_BYTES,
            "reconstruction.min_prefetch_buffer": _BUFFER_BYTES,
            "reconstruction.min_reconstruction_fetch_size": _BUFFER_BYTES,
        }
        self._xet = hf_xet.XetSession(hf_xet.XetConfig().with_config(config))
        self._http = HttpServer(self._answer, port=port)
        self.url = self._http.url

    def options(self, owner: str) -> dict[str, Any]:
        """Options with which `open_store` reaches an owner's buckets, with create-only puts."""
        return {
            "endpoint": self.url,
            "token": TOKEN,
            "gateway_url": f"{self.url}/s3/{owner}",
            "gateway_key": GATEWAY_KEY,
            "gateway_secret": GATEWAY_SECRET,
        }

    def create_bucket(self, name: str) -> Bucket:
        """Create `OWNER/NAME` unless it is there."""
        with self._lock:
            return self.buckets.setdefault(name, Bucket(self.contents))

    def corrupt(self, bucket: str, path: str, offset: int = 0) -> None:
        """Turn a bit of what is stored for a path, at or near an offset."""
        entry = self.buckets[bucket].get(path)
        assert entry is not None
        self.contents.corrupt(entry.content, offset)

    def close(self) -> None:
        """Close all connections, and forget everything."""
        for bucket in self.buckets.values():
            bucket.hang_up()
        self._http.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, request: Request) -> Answer | None:
        own = request.path.startswith(f"{_OWN}/")
        # hf-xet sends its telemetry when it likes.
        if not own and request.path != "/v1/telemetry":
            self.requests.append(f"{request.method} {request.path}")
            if self.fault and (fault := self.fault(request.method, request.path)):
                status, body = fault
                return Answer(status=status, body=body, headers={"Content-Type": "application/json"})
        answer = self._routed(request)
        if not own and self.lose and self.lose(request.method, request.path):
            return None
        return answer

    def _routed(self, request: Request) -> Answer:
        if request.path.startswith("/s3/"):
            return gateway.answer(self, request)
        path = request.path.removeprefix(_OWN)
        for method, pattern, handler in _ROUTES:
            if method == request.method and (match := pattern.fullmatch(path)):
                try:
                    return handler(self, request, match)
                except Refused as exc:
                    return exc.answer
                except ValueError as exc:
                    return json_answer({"error": str(exc)}, 400)
        return not_found("NoSuchRoute")

    def store_content(self, body: IO[bytes]) -> str:
        """Keep a body as hf-xet would send it, and return its hash."""
        with self._xet.new_upload_commit(**self._own()) as commit:
            stream = commit.start_upload_stream(sha256=hf_xet.SKIP_SHA256)
            while part := body.read(COPY_BYTES):
                stream.write(part)
            found: str = stream.finish().xet_info.hash
        return found

    def load_content(self, content: str, start: int, end: int) -> Iterator[bytes]:
        """Yield bytes `start` to `end` of what a hash stands for."""
        if start < end:
            group = self._xet.new_download_stream_group(**self._own())
            size = self.contents.file_size(content)
            yield from group.download_stream(hf_xet.XetFileInfo(content, size), start=start, end=end)

    def _own(self) -> dict[str, Any]:
        return {
            "endpoint": f"{self.url}{_OWN}",
            "token": _OWN_TOKEN,
            "token_expiry_unix_secs": int(time.time()) + 3600,
        }

    def bucket(self, request: Request, name: str, right: str) -> Bucket:
        """Return a bucket that the request's token may read, or `write`."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        role = self.roles.get(token)
        if role is None:
            why = "Invalid credentials in Authorization header"
            raise Refused(json_answer({"error": why}, 401, X_Error_Message=why))
        if name not in self.buckets:
            raise Refused(not_found("RepoNotFound"))
        if right == "write" and role != "write":
            raise Refused(json_answer({"error": "Forbidden"}, 403, X_Error_Message="Forbidden"))
        return self.buckets[name]

    def check_transfer(self, request: Request, right: str) -> None:
        """Refuse a request for contents without a token that is still good."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if request.path.startswith(_OWN):
            is_good = token == _OWN_TOKEN
        else:
            role, _, expiry = token.partition("-")
            is_good = role in {right, "write"} and int(expiry or 0) > time.time()
        if not is_good:
            raise Refused(json_answer({}, 401))


def not_found(code: str) -> Answer:
    """Answer as the Hub does where something is missing."""
    return json_answer({"error": code}, 404, X_Error_Code=code, X_Error_Message=code)


# Buckets.

_BUCKET = "/api/buckets/([^/]+/[^/]+)"


@_route("GET", f"{_BUCKET}/xet-(read|write)-token")
def _token(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    hub.bucket(request, match[1], match[2])
    expiry = int(time.time()) + hub.token_s
    token = f"{match[2]}-{expiry}"
    return json_answer(
        {"casUrl": hub.url, "accessToken": token, "exp": expiry},
        X_Xet_Cas_Url=hub.url,
        X_Xet_Access_Token=token,
        X_Xet_Token_Expiration=str(expiry),
    )


@_route("POST", f"{_BUCKET}/batch")
def _batch(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    bucket = hub.bucket(request, match[1], "write")
    operations = [json.loads(line) for line in request.body if line.strip()]
    failed = []
    for operation in operations:
        path = operation["path"]
        wrong = hub.refuse(operation) if hub.refuse else None
        if wrong is None and operation["type"] == "deleteFile":
            bucket.delete(path)
        elif wrong is None and not hub.contents.has_file(operation["xetHash"]):
            wrong = "no such content"
        elif wrong is None:
            bucket.put(path, operation["xetHash"], operation["mtime"] / 1000)
        if wrong is not None:
            failed.append({"path": path, "error": wrong})
    num_done = len(operations) - len(failed)
    found = {
        "success": not failed,
        "processed": len(operations),
        "succeeded": num_done,
        "failed": failed,
    }
    return json_answer(found, 422 if failed and not num_done else 200)


@_route("POST", f"{_BUCKET}/paths-info")
def _paths_info(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    bucket = hub.bucket(request, match[1], "read")
    found = ((path, bucket.get(path)) for path in request.json()["paths"])
    return json_answer([entry.described(path) for path, entry in found if entry])


@_route("GET", f"{_BUCKET}/tree(?:/(.*))?")
def _tree(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    bucket = hub.bucket(request, match[1], "read")
    folder = unquote(match[2] or "").rstrip("/")
    below = f"{folder}/" if folder else ""
    assert request.query["recursive"] == "true"
    found = [entry.described(path) for path, entry in bucket.items() if path.startswith(below)]
    begin = int(request.query.get("cursor", 0))
    page, end = found[begin : begin + hub.page_size], begin + hub.page_size
    if end >= len(found):
        return json_answer(page)
    following = urlencode({**request.query, "cursor": end})
    return json_answer(page, Link=f'<{hub.url}{request.path}?{following}>; rel="next"')


@_route("GET", f"{_BUCKET}/events")
def _events(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    bucket = hub.bucket(request, match[1], "read")

    def feed() -> Iterator[bytes]:
        yield b": comments are no events\n\n"
        for change in bucket.changes():
            if change is None:
                yield b"event: ready\ndata: {}\n\n"
            else:
                yield f"event: changes\ndata: {json.dumps(change)}\n\n".encode()

    return Answer(body=feed(), endless=True, headers={"Content-Type": "text/event-stream"})


@_route("GET", "/buckets/([^/]+/[^/]+)/resolve/(.+)")
@_route("HEAD", "/buckets/([^/]+/[^/]+)/resolve/(.+)")
def _resolve(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    """Redirect a client that wants the bytes to where they are, as the real Hub does."""
    bucket = hub.bucket(request, match[1], "read")
    entry = bucket.get(unquote(match[2]))
    if entry is None:
        return not_found("EntryNotFound")
    tokens = f"{hub.url}/api/buckets/{match[1]}/xet-read-token"
    return Answer(
        status=302 if request.method == "GET" else 200,
        size=0 if request.method == "GET" else entry.size,
        headers={
            "Location": f"{hub.url}/content/{entry.content}",
            "X-Xet-Hash": entry.content,
            "X-Linked-Size": str(entry.size),
            "X-Linked-Etag": f'"{entry.content}"',
            "Link": f'<{tokens}>; rel="xet-auth"',
        },
    )


# Contents.


@_route("GET", "/content/([0-9a-f]{64})")
def _content(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    size = hub.contents.file_size(match[1])
    found = answer_range(request, size, partial(hub.load_content, match[1]), {})
    return found or Answer(status=416, headers={"Content-Range": f"bytes */{size}"})


@_route("POST", "/v1/xorbs/default/([0-9a-f]{64})")
def _put_xorb(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    hub.check_transfer(request, "write")
    return json_answer({"was_inserted": hub.contents.add_xorb(match[1], request.body, request.size)})


@_route("POST", "/v1/xorb-grants/default/([0-9a-f]{64})")
def _grant(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    # 200: it is here already. 404: grants are not offered, so send it.
    return json_answer({}, 200 if hub.contents.has_xorb(match[1]) else 404)


@_route("POST", "/v1/shards")
def _put_shard(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    hub.check_transfer(request, "write")
    hub.contents.add_shard(request.body.read())
    return json_answer({"result": 1})


@_route("POST", "/v1/telemetry")
def _telemetry(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    return json_answer({})


@_route("GET", "/v1/reconstructions/([0-9a-f]{64})")
def _reconstruction(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    hub.check_transfer(request, "read")
    if not hub.contents.has_file(match[1]):
        return json_answer({}, 404)
    base_url = f"{hub.url}{_OWN if request.path.startswith(_OWN) else ''}"
    found = hub.contents.reconstruction(match[1], *(request.range() or (0, None)), base_url)
    return json_answer({}, 416) if found is None else json_answer(found)


@_route("GET", "/xorb-data/([0-9a-f]{64})")
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
