"""A local Hub: a server with buckets, their contents, and the S3 gateway to them.

`bucket_api` and `content_api` answer requests; `gateway` answers those of S3 clients.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import hf_xet

from patchstore.testing.hub import bucket_api, content_api
from patchstore.testing.hub.buckets import Bucket
from patchstore.testing.hub.content import ContentStore
from patchstore.testing.hub.content_api import COPY_BYTES, OWN
from patchstore.testing.hub.gateway import Gateway
from patchstore.testing.hub.routes import not_found
from patchstore.testing.hub.serving import Answer, HttpServer, Request, json_answer

TOKEN, READ_TOKEN = "hf_test", "hf_reader"
GATEWAY_KEY, GATEWAY_SECRET = "HFAKTEST", "gateway-secret"
_OWN_TOKEN = "own"  # nosec B105 # of a server of tests
_BUFFER_BYTES = 64 << 20


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
        self._gateway = Gateway(self.buckets, {GATEWAY_KEY: "write"}, self._store_content, self.load_content)
        config = {
            "reconstruction.download_buffer_size": _BUFFER_BYTES,
            "reconstruction.download_buffer_perfile_size": _BUFFER_BYTES,
            "reconstruction.download_buffer_limit": _BUFFER_BYTES,
            "reconstruction.min_prefetch_buffer": _BUFFER_BYTES,
            "reconstruction.min_reconstruction_fetch_size": _BUFFER_BYTES,
        }
        self._xet = hf_xet.XetSession(hf_xet.XetConfig().with_config(config))
        self._http = HttpServer(port, self._answer)
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
        own = request.path.startswith(f"{OWN}/")
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
            return self._gateway.answer(request)
        path = request.path.removeprefix(OWN)
        for routes in (bucket_api.ROUTES, content_api.ROUTES):
            if (answer := routes.answer(self, request, path)) is not None:
                return answer
        return not_found("NoSuchRoute")

    def _store_content(self, body: IO[bytes]) -> str:
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
            "endpoint": f"{self.url}{OWN}",
            "token": _OWN_TOKEN,
            "token_expiry_unix_secs": int(time.time()) + 3600,
        }

    def bucket(self, request: Request, name: str, right: str) -> Bucket | Answer:
        """Return a bucket that the request's token may read, or `write`, or why not."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        role = self.roles.get(token)
        if role is None:
            return json_answer(
                {"error": "Invalid credentials in Authorization header"},
                401,
                X_Error_Message="Invalid credentials in Authorization header",
            )
        if name not in self.buckets:
            return not_found("RepoNotFound")
        if right == "write" and role != "write":
            return json_answer({"error": "Forbidden"}, 403, X_Error_Message="Forbidden")
        return self.buckets[name]

    def may_transfer(self, request: Request, right: str) -> bool:
        """Whether a request for contents has a token that is still good."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if request.path.startswith(OWN):
            return token == _OWN_TOKEN
        role, _, expiry = token.partition("-")
        return role in {right, "write"} and int(expiry or 0) > time.time()
