"""Whom a listener answers, and that clients which send nothing keep no other client out."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from patchstore.follow.http_api import Answer, Listener

NUM_IDLE = 300
MOST_OPEN = 64


class Listening:
    """A listener that notes what it was asked, and its address."""

    def __init__(self, host: str) -> None:
        self.asked: list[tuple[str, str]] = []
        self.blocked = threading.Event()
        """Until it is set, `/slow` is not answered."""
        self.num_slow = threading.Semaphore(0)
        """Released for each `/slow` that is being answered."""
        self.listener = Listener((host, 0), self._answer)
        self.host, self.port = "127.0.0.1", int(self.listener.url.rpartition(":")[2])
        if ":" in host:
            self.host = host

    def _answer(self, method: str, path: str, query: str, accept: str, body: bytes) -> Answer:
        self.asked.append((method, path))
        if path == "/slow":
            self.num_slow.release()
            self.blocked.wait()
        return 200, b"{}", "application/json"

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=60)

    def say(self, request: str) -> tuple[int, Any]:
        """Send what stands here, and return the answer."""
        with self.connect() as connection:
            connection.sendall(request.replace("\n", "\r\n").encode())
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            return answer.status, json.loads(answer.read())

    def get(self, path: str, host: str | None = None) -> int:
        named = "" if host is None else f"Host: {host}\n"
        return self.say(f"GET {path} HTTP/1.1\n{named}\n")[0]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def here(opened: ExitStack) -> Listening:
    listening = Listening("127.0.0.1")
    opened.enter_context(listening.listener)
    opened.callback(listening.blocked.set)
    return listening


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:9464",
        "localhost.",
        "127.0.0.1",
        "127.0.0.1:9464",
        "127.8.9.1",
        "[::1]:80",
        "[::1]",
    ],
)
def test_a_loopback_listener_answers_to_loopback_names(here, host):
    assert here.get("/healthz", host) == 200


def test_a_loopback_listener_answers_a_client_that_names_no_host(here):
    assert here.say("GET /healthz HTTP/1.0\n\n")[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "rebound.example",
        "rebound.example:9464",
        "127.0.0.1.rebound.example",
        "localhost.rebound.example",
        "10.0.0.1",
        "[::2]:80",
        "",
        "127.0.0.1:80:80",
        "127.0.0.1@rebound.example",
        "127.0.0.1\nHost: rebound.example",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_page_whose_name_leads_here_is_refused(here, host, method):
    status, said = here.say(f"{method} /metrics HTTP/1.1\nHost: {host}\n\n")
    assert (status, said["error"]["kind"]) == (403, "usage")
    assert "call it by 127.0.0.1" in said["error"]["message"]
    assert not here.asked


def test_a_listener_that_others_reach_does_not_know_its_names(opened):
    everywhere = Listening("0.0.0.0")
    opened.enter_context(everywhere.listener)
    assert everywhere.get("/healthz", "follow.my-namespace.svc:9464") == 200


def test_idle_connections_keep_nobody_out_and_their_threads_are_few(opened, here):
    before = threading.active_count()
    for _ in range(NUM_IDLE):
        opened.enter_context(here.connect())
    assert here.get("/livez") == 200
    assert threading.active_count() <= before + MOST_OPEN


def test_of_the_connections_that_wait_the_oldest_makes_room(opened, here):
    idle = [opened.enter_context(here.connect()) for _ in range(MOST_OPEN + 1)]
    assert here.get("/livez") == 200
    assert idle[0].recv(1) == idle[1].recv(1) == b""
    idle[-1].sendall(b"GET /livez HTTP/1.1\r\n\r\n")
    assert idle[-1].recv(8) == b"HTTP/1.0"


def test_a_request_that_is_being_answered_makes_no_room(opened, here):
    slow = opened.enter_context(here.connect())
    slow.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
    here.num_slow.acquire()
    for _ in range(NUM_IDLE):
        opened.enter_context(here.connect())
    assert here.get("/livez") == 200
    here.blocked.set()
    assert slow.recv(8) == b"HTTP/1.0"


def test_a_client_that_sends_its_request_by_and_by_is_ended_and_nothing_is_done(here):
    with here.connect() as slow:
        slow.sendall(b"POST /unpin HTTP/1.1\r\n")
        ended = threading.Event()

        def trickle() -> None:
            while not ended.wait(0.2):
                try:
                    slow.sendall(b"X: 1\r\n")
                except OSError:
                    return

        sending = threading.Thread(target=trickle)
        sending.start()
        try:
            assert slow.recv(1) == b""
        except ConnectionResetError:
            pass
        finally:
            ended.set()
            sending.join()
    assert here.get("/livez") == 200
    assert here.asked == [("GET", "/livez")]


def test_a_client_that_goes_away_leaves_no_traceback(opened, here, capfd):
    for part in (b"GET /livez", b"POST /pin HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b""):
        with here.connect() as connection:
            connection.sendall(part)
            # The connection is reset.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    for _ in range(MOST_OPEN + 3):
        opened.enter_context(here.connect())
    assert here.get("/livez") == 200
    assert "Traceback" not in capfd.readouterr().err


def test_the_end_of_a_listener_ends_connections_that_wait():
    listening = Listening("127.0.0.1")
    with listening.listener:
        idle = listening.connect()
        assert listening.get("/livez") == 200
    with idle:
        assert idle.recv(1) == b""
