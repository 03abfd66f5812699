"""An HTTP server on 127.0.0.1 for all that tests stand in for: requests and answers as values."""

import contextlib
import http.client
import json
import re
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO, Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

_IN_MEMORY_BYTES = 1 << 20
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request whose body has arrived, on disk if it is large."""

    method: str
    target: str
    """As sent: a path, with its query; a whole URL where this server is a proxy."""
    headers: http.client.HTTPMessage
    """By names in any case."""
    body: IO[bytes]
    size: int
    """Bytes of the body."""

    @property
    def path(self) -> str:
        """With `%2F` where a client quoted a slash."""
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    def json(self) -> Any:
        return json.loads(self.body.read() or b"{}")

    def range(self) -> tuple[int, int | None] | None:
        """First and last byte asked for, the last one inclusive or None for the end."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        return (int(match[1]), int(match[2]) if match[2] else None) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer; `size` is given where the body comes in pieces."""

    status: int = 200
    body: bytes | Iterable[bytes] = b""
    size: int | None = None
    endless: bool = False
    """A body of unknown size, which ends with the connection."""
    headers: Mapping[str, str] = field(default_factory=dict)


def json_answer(value: Any, status: int = 200, **headers: str) -> Answer:
    """An answer with a JSON body; `_` in the names of headers stands for `-`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(
        status=status, body=json.dumps(value).encode(), headers={"Content-Type": "application/json", **named}
    )


def answer_range(
    request: Request, size: int, load: Callable[[int, int], Iterable[bytes]], headers: Mapping[str, str]
) -> Answer | None:
    """Answer with what is asked for of a content of so many bytes; None where it has none of that."""
    wanted = request.range()
    if request.method == "HEAD" or wanted is None:
        return Answer(body=() if request.method == "HEAD" else load(0, size), size=size, headers=headers)
    first, last = wanted
    if first >= size:
        return None
    end = size if last is None else min(last + 1, size)
    more = {"Content-Range": f"bytes {first}-{end - 1}/{size}"}
    return Answer(status=206, body=load(first, end), size=end - first, headers={**headers, **more})


def passed_on(request: Request, endpoint: str, body: bytes | None = None) -> Answer:
    """What another server answers, which also gets the request; with another body, if there is one."""
    server, asked = urlsplit(endpoint), urlsplit(request.target)
    there = http.client.HTTPConnection(server.hostname or "", server.port, timeout=60)
    with contextlib.closing(there):
        target = urlunsplit(("", "", *asked[2:]))
        there.request(request.method, target, request.body.read() if body is None else body, request.headers)
        found = there.getresponse()
        data = found.read()
    of_connection = {"transfer-encoding", "connection", "content-length", "date", "server"}
    headers = {name: value for name, value in found.getheaders() if name.lower() not in of_connection}
    size = int(found.getheader("Content-Length") or 0) if request.method == "HEAD" else None
    return Answer(status=found.status, body=data, size=size, headers=headers)


class HttpServer:
    """Serves in threads; `answer` is asked for every request, and None hangs up instead.

    With HTTP/1.0 each connection ends with its answer.
    """

    def __init__(
        self,
        answer: Callable[[Request], Answer | None],
        *,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        protocol: str = "HTTP/1.1",
    ) -> None:
        connections = self._connections = set[socket.socket]()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = protocol
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                connections.add(self.connection)

            def finish(self) -> None:
                connections.discard(self.connection)
                with contextlib.suppress(OSError):
                    super().finish()

            def serve(self) -> None:
                with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES) as body:
                    try:
                        size = _receive(self, body)
                        request = Request(
                            method=self.command,
                            target=self.path,
                            headers=self.headers,  # type: ignore[arg-type]
                            body=body,
                            size=size,
                        )
                        found = answer(request)
                        if found is None:
                            self.close_connection = True
                            self.connection.shutdown(socket.SHUT_RDWR)
                        else:
                            _send(self, found)
                    except OSError:
                        # The client is gone.
                        self.close_connection = True

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_OPTIONS = serve  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Say nothing."""

            def handle(self) -> None:
                # A client that hangs up between two requests is no news.
                with contextlib.suppress(OSError):
                    super().handle()

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", port), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no request any more, also where a connection is open."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def serving(answer: Callable[[Request], Answer | None], **options: Any) -> Iterator[str]:
    """Serve until the block ends; yield the URL."""
    with contextlib.closing(HttpServer(answer, **options)) as server:
        yield server.url


def _receive(handler: BaseHTTPRequestHandler, body: IO[bytes]) -> int:
    """Take a request's body, and return its size."""
    if handler.headers.get("Transfer-Encoding", "").lower() == "chunked":
        while length := int(handler.rfile.readline().split(b";")[0], 16):
            body.write(handler.rfile.read(length))
            handler.rfile.readline()
        handler.rfile.readline()
    else:
        missing = int(handler.headers.get("Content-Length") or 0)
        while missing:
            part = handler.rfile.read(min(missing, _COPY_BYTES))
            if not part:
                raise ConnectionResetError("the client hung up")
            body.write(part)
            missing -= len(part)
    size = body.tell()
    body.seek(0)
    return size


def _send(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
    handler.send_response(answer.status)
    for name, value in answer.headers.items():
        handler.send_header(name, value)
    if answer.endless:
        handler.close_connection = True
        handler.send_header("Connection", "close")
    elif answer.status != 204:
        # Only a HEAD tells a size without the bytes.
        known = len(answer.body) if answer.size is None and isinstance(answer.body, bytes) else answer.size
        handler.send_header("Content-Length", str(known))
    handler.end_headers()
    if handler.command == "HEAD":
        return
    try:
        for part in (answer.body,) if isinstance(answer.body, bytes) else answer.body:
            handler.wfile.write(part)
    except Exception:
        # What was promised cannot be sent any more: the client is to see that it is cut off.
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)
        raise
