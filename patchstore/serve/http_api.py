"""The listener of `patchstore follow`: metrics, health, and pinning servers to a version.

| route | answer |
|---|---|
| `GET /metrics` | figures in Prometheus' format |
| `GET /healthz` | 200, or 503 if there are problems; a JSON object with the state, and `problems` |
| `GET /readyz` | 200 if all servers serve the desired version, or 503 with `reasons`: `health.readiness` |
| `GET /livez` | 200 while the process can answer at all |
| `POST /pin` `{"version": 12}` | servers go to version 12, older or newer, and stay there |
| `POST /pin` `{"version": 12, "allow_rollback": true}` | also to an older one, where keys are required |
| `POST /unpin` | servers follow the newest version again |

There is no authentication: listen where only operators can connect.
"""

import json
import logging
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs

from patchstore.errors import HostError, InternalError, NotFound, PatchstoreError, UsageError
from patchstore.format.tags import check_name
from patchstore.serve.desired import DesiredVersion
from patchstore.serve.fleet import Fleet
from patchstore.serve.health import describe, readiness
from patchstore.serve.metrics import Metrics

logger = logging.getLogger(__name__)

_MAX_BODY = 1 << 16
_TIMEOUT_S = 30.0
_MAX_DIGITS = 19
"""Of a version."""


class _Http6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


Answer = tuple[HTTPStatus, bytes, str]


class Listener:
    """An HTTP server on a separate thread."""

    def __init__(
        self, address: tuple[str, int], answer: Callable[[str, str, str, str, bytes], Answer]
    ) -> None:
        """Listen, and answer at once.

        Args:
            address: host and port; port 0 picks a free one.
            answer: called with method, path, query, the header Accept and the body; may raise, on any thread.

        Raises:
            UsageError: it cannot listen at this address.
        """
        try:
            kind = _Http6 if ":" in address[0] else ThreadingHTTPServer
            self._http = kind(address, _handler(answer))
        except OSError as exc:
            raise UsageError(f"cannot listen at {address[0]}:{address[1]}: {exc}") from exc
        self._http.daemon_threads = True
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

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Control(Listener):
    """The listener of a fleet."""

    def __init__(
        self,
        address: tuple[str, int],
        fleet: Fleet,
        desired: DesiredVersion,
        metrics: Metrics,
        *,
        unhealthy_after_s: float,
    ) -> None:
        """Listen, and answer at once.

        Args:
            address: as of `Listener`.
            unhealthy_after_s: see `health.describe`.

        Raises:
            UsageError: it cannot listen at this address.
        """
        self._fleet, self._desired, self._metrics = fleet, desired, metrics
        self._unhealthy_after_s = unhealthy_after_s
        super().__init__(address, self._answer)

    def _answer(self, method: str, path: str, query: str, accept: str, body: bytes) -> Answer:
        match method, path:
            case "GET", "/metrics":
                data, content_type = self._metrics.expose(accept)
                return HTTPStatus.OK, data, content_type
            case "GET", "/healthz":
                found = describe(self._fleet.status(), unhealthy_after_s=self._unhealthy_after_s)
                return _json(HTTPStatus.SERVICE_UNAVAILABLE if found["problems"] else HTTPStatus.OK, found)
            case "GET", "/readyz":
                gate = readiness(self._fleet.status(), **_gate(query))
                return _json(HTTPStatus.OK if gate["ready"] else HTTPStatus.SERVICE_UNAVAILABLE, gate)
            case "GET", "/livez":
                return _json(HTTPStatus.OK, {})
            case "POST", "/pin":
                wanted, is_allowed = _pin(body)
                version = self._desired.pin(wanted, allow_rollback=is_allowed)
                logger.info(
                    "servers are pinned to version %d", version, extra={"event": "pinned", "version": version}
                )
                self._fleet.wake()
                return _json(HTTPStatus.OK, {"pinned": version})
            case "POST", "/unpin":
                self._desired.unpin()
                logger.info("servers follow the newest version", extra={"event": "unpinned"})
                self._fleet.wake()
                return _json(HTTPStatus.OK, {"pinned": None})
        return _error(HTTPStatus.NOT_FOUND, NotFound.kind, f"there is no {method} {path}")


def _pin(body: bytes) -> tuple[int | str, bool]:
    """Read a version, and whether it may be older where signatures are required."""
    try:
        found = json.loads(body)
        version, is_allowed = found["version"], found.get("allow_rollback", False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise UsageError('the body must be a JSON object such as {"version": 12}') from exc
    if type(is_allowed) is not bool:
        raise UsageError(f"allow_rollback is true or false, not {is_allowed!r:.80}")
    if isinstance(version, str):
        return check_name(version), is_allowed
    if type(version) is not int or version < 0:
        raise UsageError(f"a version is a number from 0 on or a tag, not {version!r:.80}")
    return version, is_allowed


def _gate(query: str) -> dict[str, Any]:
    """Read the parameters of `/readyz`."""
    try:
        given = parse_qs(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as exc:
        raise UsageError(f"{query!r:.80} is no list of parameters: {exc}") from exc
    if given.keys() - {"server", "max_lag"} or any(len(values) > 1 for values in given.values()):
        raise UsageError(f"the parameters are server and max_lag, each at most once, not {query!r:.80}")
    found: dict[str, Any] = {name: values[0] for name, values in given.items()}
    if "max_lag" in found:
        text = found["max_lag"]
        if not (text.isascii() and text.isdigit() and len(text) < _MAX_DIGITS):
            raise UsageError(f"max_lag is a number of versions from 0 on, not {text!r:.80}")
        found["max_lag"] = int(text)
    return found


def _json(status: HTTPStatus, value: dict[str, Any]) -> Answer:
    return status, json.dumps(value).encode() + b"\n", "application/json"


def _error(status: HTTPStatus, kind: str, message: str) -> Answer:
    return _json(status, {"error": {"kind": kind, "message": message}})


def _handler(answer: Callable[[str, str, str, str, bytes], Answer]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT_S

        def _handle(self) -> None:
            status, body, content_type = self._answered()
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _answered(self) -> Answer:
            # Browsers send the origin of a script; scripts of other pages are refused.
            if self.command == "POST" and self.headers.get("Origin") is not None:
                return _error(HTTPStatus.FORBIDDEN, UsageError.kind, "this is not for browsers")
            try:
                num_bytes = int(self.headers.get("Content-Length") or 0)
                if not 0 <= num_bytes <= _MAX_BODY:
                    raise ValueError
                body = self.rfile.read(num_bytes)
            except ValueError:
                what = "Content-Length is no size, or too large"
                return _error(HTTPStatus.BAD_REQUEST, UsageError.kind, what)
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
