"""Servers on 127.0.0.1 that answer as no store should: never, in part, too slowly, or like a web server."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

Behaviour = Callable[["Connection"], None]

S3_HEADERS = 'ETag: "0123456789abcdef0123456789abcdef"\r\nLast-Modified: Sat, 21 Nov 2026 00:00:00 GMT\r\n'


class Connection(NamedTuple):
    socket: socket.socket
    ended: threading.Event
    """The test is over."""

    def request(self) -> bytes:
        """Read what a request begins with, up to the empty line."""
        head = b""
        while b"\r\n\r\n" not in head:
            part = self.socket.recv(65_536)
            if not part:
                raise ConnectionResetError
            head += part
        return head


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """Yield the URL of a server that does this with each of its connections, on a thread of its own."""
    ended, threads, connections = threading.Event(), list[threading.Thread](), list[socket.socket]()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            behaviour(Connection(connection, ended))

    def accept() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listening.accept()
                connections.append(connection)
                threads.append(threading.Thread(target=serve, args=(connection,), daemon=True))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        listening.settimeout(0.05)
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            ended.set()
            accepting.join()
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


def silent(connection: Connection) -> None:
    """Take the request, or as much of it as fits, and never answer."""
    connection.ended.wait()


def stalls_in_the_body(connection: Connection) -> None:
    """Answer with headers and the beginning of a body, and stop."""
    connection.request()
    head = f"HTTP/1.1 200 OK\r\n{S3_HEADERS}Content-Length: 1000\r\nContent-Type: application/xml\r\n\r\n"
    connection.socket.sendall(head.encode() + b"<?xml")
    connection.ended.wait()


def drips(connection: Connection) -> None:
    """Answer with a byte every 50 ms, and so many that no test sees the last one."""
    connection.request()
    head = f"HTTP/1.1 200 OK\r\n{S3_HEADERS}Content-Length: 100000\r\nContent-Type: application/xml\r\n\r\n"
    connection.socket.sendall(head.encode())
    while not connection.ended.wait(0.05):
        connection.socket.sendall(b" ")


def resets(connection: Connection) -> None:
    """Take the beginning of a request, and reset the connection."""
    connection.request()
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


def saying(status: str, body: bytes, kind: str = "application/xml", headers: str = "") -> Behaviour:
    """Give one answer to everything, and close the connection."""

    def say(connection: Connection) -> None:
        is_head = connection.request().startswith(b"HEAD")
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        connection.socket.sendall(
            f"{head}{headers}Connection: close\r\n\r\n".encode() + (b"" if is_head else body)
        )
        # What was not read of a request would reset the connection, and the answer be lost.
        connection.socket.shutdown(socket.SHUT_WR)
        while connection.socket.recv(65_536):
            pass

    return say


unavailable_for_ever = saying(
    "503 Service Unavailable", b"<Error><Code>SlowDown</Code><Message>slow down</Message></Error>"
)
PAGE = b"<!DOCTYPE html><html><head><title>Welcome</title></head><body>It works!</body></html>"
a_web_server = saying("200 OK", PAGE, "text/html; charset=utf-8")
a_web_server_without_the_page = saying("404 Not Found", PAGE, "text/html; charset=utf-8")
