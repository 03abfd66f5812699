"""An HTTP proxy that passes requests on, but does not answer all that match as the server did."""

import http.client
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

Answer = tuple[int, bytes] | tuple[int, bytes, list[tuple[str, str]]]
"""A status, a body, and perhaps headers."""


class Request(NamedTuple):
    method: str
    path: str
    """With its query."""
    headers: Mapping[str, str]
    """By names in lower case."""


@contextmanager
def losing_the_answer(endpoint_url: str, method: str, ending: str) -> Iterator[str]:
    """Yield the proxy's URL; the answer to the first `method` on a path that ends so is lost.

    An `ending` with a `?` is one of the path and the names of the query in order.
    """
    lost: list[Request] = []

    def is_lost(request: Request) -> bool:
        if lost or not _matches(request, method, ending):
            return False
        lost.append(request)
        return True

    with passing_on(endpoint_url, is_lost=is_lost) as url:
        yield url
    assert lost


@contextmanager
def answering(
    endpoint_url: str, method: str = "", ending: str = "", answers: Iterable[Answer] = ()
) -> Iterator[tuple[str, list[Request]]]:
    """Yield the proxy's URL, and the requests so far.

    The first requests that match get these answers instead of the server's.
    """
    left, asked, lock = iter(answers), list[Request](), threading.Lock()

    def instead(request: Request) -> Answer | None:
        with lock:
            asked.append(request)
            return next(left, None) if _matches(request, method, ending) else None

    with passing_on(endpoint_url, instead=instead) as url:
        yield url, asked


def error(status: int, code: str) -> Answer:
    """What S3 says when it refuses."""
    return status, f"<Error><Code>{code}</Code><Message>made up</Message></Error>".encode()


def _matches(request: Request, method: str, ending: str) -> bool:
    path, _, query = request.path.partition("?")
    names = "&".join(sorted(each.partition("=")[0] for each in query.split("&")))
    return request.method == method and (f"{path}?{names}" if "?" in ending else path).endswith(ending)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away.

        A traceback that this thread prints while pytest prepares one makes that fail in Python 3.11.
        """
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def passing_on(
    endpoint_url: str,
    *,
    is_lost: Callable[[Request], bool] = lambda request: False,
    instead: Callable[[Request], Answer | None] = lambda request: None,
) -> Iterator[str]:
    """Yield the proxy's URL; `instead` is asked before the server is, and `is_lost` after it answered."""
    target = urlsplit(endpoint_url)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = Request(
                self.command, self.path, {name.lower(): value for name, value in self.headers.items()}
            )
            answer = instead(request)
            if answer is not None:
                self.reply(*answer)
                return
            # The server may be gone, where a request was held until the end.
            with closing(http.client.HTTPConnection(target.hostname or "", target.port or 80)) as server:
                server.request(self.command, self.path, body, dict(self.headers))
                received = server.getresponse()
                data = received.read()
            if is_lost(request):
                self.close_connection = True
                return
            length = received.getheader("Content-Length") if self.command == "HEAD" else None
            self.reply(received.status, data, received.getheaders(), length)

        def reply(
            self,
            status: int,
            body: bytes,
            headers: list[tuple[str, str]] | None = None,
            length: str | None = None,
        ) -> None:
            self.send_response(status)
            for name, value in headers or []:
                if name.lower() not in {"transfer-encoding", "connection", "content-length"}:
                    self.send_header(name, value)
            self.send_header("Content-Length", length or str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing."""

    proxy = _Server(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}"
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
