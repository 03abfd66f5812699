"""The listener of `patchstore follow`: metrics, health, and pinning servers to a version.

| route | answer |
|---|---|
| `GET /metrics` | figures in Prometheus' format |
| `GET /healthz` | 200, or 503 if there are problems; a JSON object with the state, and `problems` |
| `GET /readyz` | 200 if all servers serve the desired version, or 503 with `reasons` |
| `GET /readyz?version=>=12` | the same for a version that is asked for (`Wanted`) |
| `GET /livez` | 200 while the process can answer at all |
| `POST /pin` `{"version": 12}` | servers go to version 12, older or newer, and stay there |
| `POST /pin` `{"version": 12, "allow_rollback": true}` | also to an older one, where keys are required |
| `POST /unpin` | servers follow the newest version again |
| `GET /` | a page about the run and its servers; `/report.json` is what is new on it |

There is no authentication: listen where only operators can connect. A listener on a loopback address answers
requests to loopback names alone, as a page in a browser could have its own name lead there. At most 64
connections are open, and none for long without a whole request.
"""

import gzip
import json
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs

from patchstore.bucket.records import Manifest
from patchstore.errors import HostError, InternalError, NotFound, PatchstoreError, UsageError
from patchstore.follow.desired import DesiredVersion
from patchstore.follow.fleet import Fleet, FleetStatus, ServerView
from patchstore.follow.metrics import Metrics
from patchstore.follow.wanted import Wanted
from patchstore.support.host import is_loopback

if TYPE_CHECKING:
    from patchstore.ops.report.page import Report

logger = logging.getLogger(__name__)

_MAX_BODY = 1 << 16
_LARGE = 1 << 18
"""Bytes of an answer that is compressed: a client has few seconds to take it."""
_MAX_OPEN = 64
"""Connections, each with a thread."""
_TIMEOUT_S = 5.0
"""How long a client may take to send its request, and to take the answer."""
_ROOM_S = 1.0
"""How long a new connection waits until another is closed."""
_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::\d*)?")
"""A name or an address, and a port."""
_MAX_DIGITS = 19
"""Of a version."""


_NUM_LOOKS = 10
"""So many polling intervals without an answer of the store are a problem, whatever `unhealthy_after_s` is."""


class _Http(ThreadingHTTPServer):
    """Keeps few connections open: of those that wait for their client the oldest is closed for a new one."""

    request_queue_size = 512

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[socket.socket, float] = {}
        """Connections whose request, or whose taking of the answer, is waited for, since when; in order."""
        self._num_open = 0
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            if self._num_open >= _MAX_OPEN and self._waiting:
                self._hang_up(next(iter(self._waiting)))
            if not self._changed.wait_for(lambda: self._num_open < _MAX_OPEN, _ROOM_S):
                # So many requests are being answered.
                self.shutdown_request(request)
                return
            self._num_open += 1
            self._waiting[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:
            # There is no thread.
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def _ended(self, request: socket.socket) -> None:
        with self._changed:
            self._waiting.pop(request, None)
            self._num_open -= 1
            self._changed.notify_all()

    @contextmanager
    def answering(self, request: socket.socket) -> Iterator[bool]:
        """Keep a connection while the answer to its request is made; False if it was closed before."""
        with self._changed:
            is_there = self._waiting.pop(request, None) is not None
        yield is_there
        with self._changed:
            if is_there:
                self._waiting[request] = time.monotonic()

    def service_actions(self) -> None:
        with self._changed:
            late = time.monotonic() - _TIMEOUT_S
            for request in [request for request, since in self._waiting.items() if since < late]:
                self._hang_up(request)

    def server_close(self) -> None:
        super().server_close()
        with self._changed:
            for request in list(self._waiting):
                self._hang_up(request)

    def _hang_up(self, request: socket.socket) -> None:
        """Have the thread of a connection end. It closes the connection."""
        del self._waiting[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Clients go away; what goes wrong with an answer is logged where it is made.
        logger.debug("a connection of %s ended: %r", client_address, sys.exception())


Answer = tuple[HTTPStatus, bytes, str]


class Listener:
    """An HTTP server on a separate thread."""

    def __init__(
        self, address: tuple[str, int], answer: Callable[[str, str, str, str, bytes], Answer]
    ) -> None:
        """Listen, and answer at once; port 0 picks a free one.

        `answer` is called with method, path, query, the header Accept and the body; may raise, on any thread.
        """
        try:
            self._http = _Http(address, _handler(answer, address[0]))
        except OSError as exc:
            raise UsageError(f"cannot listen at {address[0]}:{address[1]}: {exc}") from exc
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        self.url = f"http://{host}:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, name="follow-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Control(Listener):
    """The listener of a fleet."""

    def __init__(
        self,
        address: tuple[str, int],
        fleet: Fleet,
        desired: DesiredVersion,
        metrics: Metrics,
        report: "Report",
        *,
        unhealthy_after_s: float,
    ) -> None:
        self._fleet, self._desired, self._metrics, self._report = fleet, desired, metrics, report
        self._unhealthy_after_s = unhealthy_after_s
        super().__init__(address, self._answer)

    def _answer(self, method: str, path: str, query: str, accept: str, body: bytes) -> Answer:
        match method, path:
            case "GET", "/readyz":
                gate = readiness(self._fleet.status(), **_gate(query))
                return _json(HTTPStatus.OK if gate["ready"] else HTTPStatus.SERVICE_UNAVAILABLE, gate)
            case "POST", "/pin":
                wanted, is_allowed = _pin(body)
                version = self._desired.pin(wanted, allow_rollback=is_allowed)
                logger.info(
                    "servers are pinned to version %d", version, extra={"event": "pinned", "version": version}
                )
                self._fleet.wake()
                return _json(HTTPStatus.OK, {"pinned": version})
            case "GET", "/" | "/report.json":
                return self._report.answer(path, query)
            case "POST", "/unpin":
                self._desired.unpin()
                logger.info("servers follow the newest version", extra={"event": "unpinned"})
                self._fleet.wake()
                return _json(HTTPStatus.OK, {"pinned": None})
        return usual_answer(method, path, accept, self._metrics.expose, self._describe)

    def _describe(self) -> dict[str, Any]:
        return describe(self._fleet.status(), unhealthy_after_s=self._unhealthy_after_s)


def usual_answer(
    method: str,
    path: str,
    accept: str,
    expose: Callable[[str], tuple[bytes, str]],
    describe: Callable[[], dict[str, Any]],
) -> Answer:
    """Answer what is asked of every process that runs on: its figures, its health, and whether it lives."""
    match method, path:
        case "GET", "/metrics":
            return HTTPStatus.OK, *expose(accept)
        case "GET", "/healthz":
            found = describe()
            return _json(HTTPStatus.SERVICE_UNAVAILABLE if found["problems"] else HTTPStatus.OK, found)
        case "GET", "/livez":
            return _json(HTTPStatus.OK, {})
    return _error(HTTPStatus.NOT_FOUND, NotFound.kind, f"there is no {method} {path}")


def _pin(body: bytes) -> tuple[Any, bool]:
    """Read what is to be a version, and whether it may be older where signatures are required."""
    try:
        found = json.loads(body)
        version, is_allowed = found["version"], found.get("allow_rollback", False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise UsageError('the body must be a JSON object such as {"version": 12}') from exc
    if type(is_allowed) is not bool:
        raise UsageError(f"allow_rollback is true or false, not {is_allowed!r:.80}")
    return version, is_allowed


def _gate(query: str) -> dict[str, Any]:
    """Read the parameters of `/readyz`."""
    try:
        given = parse_qs(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as exc:
        raise UsageError(f"{query!r:.80} is no list of parameters: {exc}") from exc
    names = {"server", "max_lag", "version"}
    if given.keys() - names or any(len(values) > 1 for values in given.values()):
        raise UsageError(f"the parameters are server, max_lag, version, each at most once, not {query!r:.80}")
    if {"max_lag", "version"} <= given.keys():
        raise UsageError("max_lag is of the desired version: ask with version or with max_lag")
    found: dict[str, Any] = {name: values[0] for name, values in given.items()}
    if "max_lag" in found:
        text = found["max_lag"]
        if not (text.isascii() and text.isdigit() and len(text) < _MAX_DIGITS):
            raise UsageError(f"max_lag is a number of versions from 0 on, not {text!r:.80}")
        found["max_lag"] = int(text)
    if "version" in found:
        found["wanted"] = Wanted.parse(found.pop("version"))
    return found


def _refusal(command: str, headers: Message, hosts: Collection[str] | None) -> Answer | None:
    """Why a request is not answered, by its headers. It may call this host by loopback names and by `hosts`;
    by anything where that is None.
    """
    names = [] if hosts is None else [_host(each) for each in headers.get_all("Host", ())]
    if not all(is_loopback(name) or name in (hosts or ()) for name in names):
        # The name of a page may lead here, and a browser would let that page read the answer.
        what = "this listens for its own host alone: call it by 127.0.0.1 or localhost"
        return _error(HTTPStatus.FORBIDDEN, UsageError.kind, what)
    # Browsers send the origin of a script; scripts of other pages are refused.
    if command == "POST" and headers.get("Origin") is not None:
        return _error(HTTPStatus.FORBIDDEN, UsageError.kind, "this is not for browsers")
    size = headers.get("Content-Length") or "0"
    if not (size.isascii() and size.isdigit() and len(size) < _MAX_DIGITS and int(size) <= _MAX_BODY):
        what = "Content-Length is no size, or too large"
        return _error(HTTPStatus.BAD_REQUEST, UsageError.kind, what)
    return None


def _host(header: str) -> str:
    """The name in a header Host; none if it has another form."""
    found = _HOST.fullmatch(header.strip())
    return found[1] if found else ""


def _json(status: HTTPStatus, value: dict[str, Any]) -> Answer:
    return status, json.dumps(value).encode() + b"\n", "application/json"


def _error(status: HTTPStatus, kind: str, message: str) -> Answer:
    return _json(status, {"error": {"kind": kind, "message": message}})


def _handler(
    answer: Callable[[str, str, str, str, bytes], Answer], listens_at: str
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT_S
        server: _Http

        def _handle(self) -> None:
            here = str(self.server.server_address[0])
            hosts = {here, listens_at} if is_loopback(here) else None
            refusal = _refusal(self.command, self.headers, hosts)
            data = b"" if refusal else self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with self.server.answering(self.connection) as is_there:
                if not is_there:
                    # Nothing is done for a request that may have been cut off.
                    return
                status, body, content_type = refusal or self._answered(data)
                is_packed = len(body) > _LARGE and "gzip" in self.headers.get("Accept-Encoding", "")
                body = gzip.compress(body) if is_packed else body
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            if is_packed:
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _answered(self, body: bytes) -> Answer:
            path, _, query = self.path.partition("?")
            try:
                return answer(self.command, path, query, self.headers.get("Accept", ""), body)
            except NotFound as exc:
                return _error(HTTPStatus.NOT_FOUND, exc.kind, str(exc))
            except UsageError as exc:
                return _error(HTTPStatus.BAD_REQUEST, exc.kind, str(exc))
            except PatchstoreError as exc:
                return _error(HTTPStatus.SERVICE_UNAVAILABLE, exc.kind, str(exc))
            except OSError as exc:
                # The pin file could not be written.
                return _error(HTTPStatus.SERVICE_UNAVAILABLE, HostError.kind, str(exc))
            except Exception as exc:
                logger.exception("%s %s failed", self.command, path)
                message = f"{type(exc).__name__}: {exc}"
                return _error(HTTPStatus.INTERNAL_SERVER_ERROR, InternalError.kind, message)

        do_GET = do_POST = _handle  # noqa: N815  (the names that http.server calls)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


# What is answered.


def describe(fleet: FleetStatus, *, unhealthy_after_s: float) -> dict[str, Any]:
    """Return the state as JSON values; `problems` is empty if the fleet is healthy.

    A failure, or a late version, is a problem after `unhealthy_after_s`. A server that has not reached its
    version since this process began is a problem at once.
    """
    return {
        "problems": list(_problems(fleet, unhealthy_after_s)),
        "store": fleet.store,
        "run_id": None if fleet.head is None else fleet.head.run_id,
        "head": None if fleet.head is None else fleet.head.version,
        "pinned": None if fleet.pin is None else fleet.pin.version,
        "target": None if fleet.target is None else fleet.target.version,
        "servers": {view.url: _server(view) for view in fleet.servers},
    }


def _server(view: ServerView) -> dict[str, Any]:
    error = view.failure and view.failure.error
    return {
        "up": view.is_up,
        "serving": view.serving,
        "run_id": view.run_id,
        "num_engines": view.num_engines,
        "engines_differ": view.engines_differ,
        "half_applied": view.half_applied,
        "error": error and {"kind": error.kind, "message": str(error)},
    }


def _problems(fleet: FleetStatus, unhealthy_after_s: float) -> Iterator[dict[str, Any]]:
    now = time.monotonic()
    if not fleet.is_alive:
        yield {"problem": "stopped", "of": "store"}
    silent_s = None if fleet.looked is None else now - fleet.looked
    if silent_s is None or silent_s > max(unhealthy_after_s, _NUM_LOOKS * fleet.interval_s):
        yield {"problem": "silent", "of": "store", "seconds": silent_s}
    if fleet.failure is not None and now - fleet.failure.since > unhealthy_after_s:
        kind = fleet.failure.error.kind
        yield {"problem": "failing", "of": "store", "seconds": now - fleet.failure.since, "kind": kind}
    if fleet.is_head_old:
        yield {"problem": "old-head", "of": "store", "seconds": fleet.head_age_s}
    for view in fleet.servers:
        if not view.is_alive:
            yield {"problem": "stopped", "of": view.url}
        if view.failure is not None and now - view.failure.since > unhealthy_after_s:
            kind = view.failure.error.kind
            yield {"problem": "failing", "of": view.url, "seconds": now - view.failure.since, "kind": kind}
        late_s = None if view.current is None else now - view.current
        is_behind = fleet.target is not None and view.serving != fleet.target.version
        if is_behind and (late_s is None or late_s > unhealthy_after_s):
            yield {"problem": "behind", "of": view.url, "seconds": late_s}


def readiness(
    fleet: FleetStatus, *, server: str | None = None, max_lag: int = 0, wanted: Wanted | None = None
) -> dict[str, Any]:
    """Return as JSON values whether servers serve the desired version, as their last step found them.

    `reasons` has one sentence for each server, or for the store, that is not ready. While the store does not
    answer, the last desired version counts. A server may be `max_lag` versions behind. One that is ahead,
    because an older version is desired, is not ready. With `wanted`, a server is ready that serves a version
    which that allows, of the desired run, whatever is desired.
    """
    views = [view for view in fleet.servers if server is None or view.url == server.rstrip("/")]
    if server is not None and not views:
        raise NotFound(f"{server} is not followed here")
    reasons = list(_unready(fleet, views, max_lag, wanted))
    target = None if fleet.target is None else fleet.target.version
    return {"ready": not reasons, "target": target, "reasons": reasons}


def _unready(
    fleet: FleetStatus, views: list[ServerView], max_lag: int, wanted: Wanted | None
) -> Iterator[str]:
    if not fleet.is_alive:
        yield "the store is not polled any more; restart this process"
    if not views:
        yield "no server is followed"
    if fleet.is_head_old and fleet.head is not None:
        yield f"version {fleet.head.version}, the newest, is {fleet.head_age_s:.0f} s old, which is too old"
    if fleet.target is None:
        error = fleet.failure and fleet.failure.error
        yield f"the desired version is not known: {error or f'{fleet.store} has no version yet'}"
        return
    for view in views:
        if reason := _lack(view, fleet.target, max_lag, wanted):
            yield f"{view.url} {reason}"


def _lack(view: ServerView, target: Manifest, max_lag: int, wanted: Wanted | None) -> str | None:
    """What keeps a server from being ready."""
    if not view.is_alive:
        return "is not followed any more; restart this process"
    if not view.is_up:
        return f"does not answer{f': {view.failure.error}' if view.failure else ''}"
    if view.half_applied:
        return "has parts of two versions"
    if view.engines_differ:
        return "has data-parallel engines with different versions"
    if view.serving is None:
        return f"serves no version yet; version {target.version} is desired"
    if view.run_id != target.run_id:
        return f"serves version {view.serving} of run {view.run_id}; run {target.run_id} is desired"
    lag = target.version - view.serving
    if not (0 <= lag <= max_lag if wanted is None else wanted.allows(view.serving)):
        asked = f"version {target.version} is desired" if wanted is None else f"{wanted} is asked for"
        return f"serves version {view.serving}; {asked}"
    return None
