"""The routes of a vLLM server with the `delta` backend, without the model."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


class StubServer:
    """Keeps the order that vLLM enforces, records calls, and fails where it is told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        """Paths of the calls that change something, and the methods of collective ones, in order."""
        self.failures: dict[str, list[str]] = {}
        """Per path: messages of the HTTP 500 answers to its next calls."""
        self.down = False
        """Connections are closed without an answer."""
        self.run_id = "run"
        """What the server finds when it opens any store."""
        self.found: int | None = None
        """The version that it finds it has when it opens a store."""
        self.num_ranks = 1
        self.num_engines = 1
        self.opened: dict[str, Any] = {}
        """What the server was told to open."""
        self.url = ""
        self.page: bytes | None = None
        """What any route answers instead, as a server does that is not vLLM."""
        self.tears = False
        """The next `finish_weight_update` fails and leaves parts of two versions."""
        self.restart()

    def restart(self) -> None:
        """Forget all that a process forgets."""
        self.initialised = self.update_open = self.paused = self.torn = False
        self.staged: int | None = None
        self.prefetches = Counter[int]()
        """Version -> how often it was asked for; the third time it is there."""
        self.held: int | None = None
        self.switch: str | None = None
        self.weight_version = "default"
        self.stale_prefixes = False
        self.held_by_rank: dict[int, int] = {}

    def status(self, rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "initialised": self.initialised,
            "store": self.opened.get("store"),
            "run_id": self.run_id if self.initialised else None,
            "held": self.held_by_rank.get(rank, self.held),
            "state_digest": None,
            "update_open": self.update_open,
            "switch": self.switch,
            "torn": self.torn,
            "last_error": None,
            "timings": {"fetch": 0.5},
        }

    def answer(  # noqa: C901, PLR0911, PLR0912  (one case a route is the clearest list of them)
        self, path: str, query: dict[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """Do what the route does; a `ValueError` becomes HTTP 500."""
        match path:
            case "/health":
                return {}
            case "/get_world_size":
                engines = self.num_engines if query["include_dp"] == "true" else 1
                return {"world_size": self.num_ranks * engines}
            case "/weight_info":
                return {"weight_version": self.weight_version}
            case "/is_paused":
                return {"is_paused": self.paused}
            case "/collective_rpc" if body["method"] == "delta_status":
                return {"results": [self.status(rank) for rank in range(self.num_ranks)]}
        self.calls.append(body["method"] if path == "/collective_rpc" else path)
        if self.failures.get(path):
            self.update_open = False
            raise ValueError(self.failures[path].pop(0))
        match path:
            case "/collective_rpc" if body["method"] == "delta_switch":
                (self.switch,) = body["args"]
                return {"results": [None]}
            case "/collective_rpc" if body["method"] == "delta_prefetch":
                self.prefetches.update(body["args"])
                is_done = self.prefetches[body["args"][0]] >= 3
                return {"results": [{"is_done": is_done}] * self.num_ranks}
            case "/init_weight_transfer_engine":
                self.opened = body["init_info"]
                self.initialised, self.held = True, self.found
            case "/start_weight_update":
                self.update_open = True
            case "/update_weights":
                if not self.update_open:
                    raise ValueError("start_weight_update must be called before update_weights.")
                self.staged = body["update_info"]["version"]
            case "/finish_weight_update" if self.tears:
                self.tears, self.torn, self.update_open = False, True, False
                raise ValueError("[torn] parts of two versions")
            case "/finish_weight_update":
                self.held, self.staged, self.update_open, self.torn = self.staged, None, False, False
                self.weight_version, self.stale_prefixes = body["weight_version"], True
            case "/update_weight_version":
                self.weight_version = body["new_version"]
            case "/pause":
                assert query == {"mode": "keep"}
                self.paused = True
            case "/resume":
                self.paused = False
            case "/reset_prefix_cache":
                assert query == {"reset_running_requests": "true"}
                self.stale_prefixes = False
                return {"success": True}
            case _:
                raise KeyError(path)
        return {"message": "done"}


@contextmanager
def serving(stub: StubServer) -> Iterator[StubServer]:
    """Serve a stub on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            url = urlsplit(self.path)
            if stub.down:
                self.close_connection = True
                return
            try:
                status, answer = (
                    200,
                    stub.answer(url.path, dict(parse_qsl(url.query)), json.loads(data or b"{}")),
                )
            except KeyError:
                status, answer = 404, {"detail": "Not Found"}
            except ValueError as exc:
                # As vLLM words what a worker raised.
                message = (
                    f"Worker failed with error '{exc}', please check the stack trace above for the root cause"
                )
                status, answer = (
                    500,
                    {"error": {"message": message, "type": "InternalServerError", "code": 500}},
                )
            body = stub.page or json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _handle  # noqa: N815  (the names that http.server calls)

        def log_message(self, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{http.server_port}"
    try:
        yield stub
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
