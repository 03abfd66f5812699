"""The routes of a vLLM server with the `delta` backend, without the model."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


@dataclass
class Engine:
    """What one data-parallel engine knows; all that a process forgets."""

    initialised: bool = False
    update_open: bool = False
    half_applied: bool = False
    staged: int | None = None
    prefetches: Counter[int] = field(default_factory=Counter)
    """Version -> how often it was asked for; the third time it is there."""
    held: int | None = None
    newest: int = 0
    """Of the versions that it held."""
    switch: str | None = None
    is_salted: bool = False
    """The update gives later requests other prefixes."""
    run_id: str | None = None


def _of_all(name: str) -> Any:
    """A fact that is asked of the first engine, and set in all."""

    def get(stub: "StubServer") -> Any:
        return getattr(stub.engines[0], name)

    def put(stub: "StubServer", value: Any) -> None:
        for engine in stub.engines:
            setattr(engine, name, value)

    return property(get, put)


class StubServer:
    """Keeps the order that vLLM enforces, records calls, and fails where it is told to."""

    initialised, update_open, half_applied = (
        _of_all("initialised"),
        _of_all("update_open"),
        _of_all("half_applied"),
    )
    held, switch, staged = _of_all("held"), _of_all("switch"), _of_all("staged")

    def __init__(self, *, num_engines: int = 1) -> None:
        self.calls: list[str] = []
        """Paths of the calls that change something, and the methods of collective ones, in order."""
        self.failures: dict[str, list[str]] = {}
        """Per path: messages of the HTTP 500 answers to its next calls."""
        self.failing_engine: int | None = None
        """The only engine in which `failures` come to pass; None for all."""
        self.blocks: dict[str, threading.Event] = {}
        """Per path: calls wait until this is set."""
        self.entered: dict[str, threading.Event] = {}
        """Per path: set when a call waits."""
        self.on_call: Callable[[str], None] | None = None
        """Told of each path before anything else."""
        self.down = False
        """Connections are closed without an answer."""
        self.run_id = "run"
        """What the server finds when it opens any store."""
        self.found: int | None = None
        """The version that it finds it has when it opens a store."""
        self.is_dev = True
        """It was started with `VLLM_SERVER_DEV_MODE=1`."""
        self.config: dict[str, Any] = {
            "parallel_config": {"worker_extension_cls": "vllm_plugin.DeltaWorkerExtension"},
            "weight_transfer_config": {"backend": "delta"},
        }
        """How it was started, as far as clients ask."""
        self.required_keys: list[str] = []
        """The names of the keys that it was started to require."""
        self.num_ranks = 1
        self.has_plugin = True
        """The engine core answers the calls about prefixes."""
        self._num_engines = num_engines
        self.opened: dict[str, Any] = {}
        """What the server was told to open."""
        self.spelled: str | None = None
        """What it calls the store that it opened; None for what it was told."""
        self.url = ""
        self.page: bytes | None = None
        """What any route answers instead, as a server does that is not vLLM."""
        self.tears = False
        """The next `finish_weight_update` fails and leaves parts of two versions."""
        self.pauses: list[dict[str, str]] = []
        """The queries of calls to `/pause`."""
        self.history: list[int] = []
        """The versions that it came to hold, in order."""
        self.sums: list[dict[str, Any]] = []
        """What `delta_sums` answers."""
        self.restart()

    @property
    def num_engines(self) -> int:
        return self._num_engines

    @num_engines.setter
    def num_engines(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self.restart()

    def restart(self) -> None:
        """Forget all that a process forgets."""
        self.engines = [Engine() for _ in range(self.num_engines)]
        self.paused = False
        self.weight_version = "default"
        self.stale_prefixes = False
        """What it remembers of prefixes was computed with weights that it serves no more."""
        self.has_no_prefixes = False
        """It was paused and has forgotten all prefixes, and was not resumed since."""
        self.held_by_rank: dict[int, int] = {}

    def status(self, rank: int, engine: Engine) -> dict[str, Any]:
        return {
            "rank": rank,
            "initialised": engine.initialised,
            "required_keys": self.required_keys,
            "store": self.spelled or self.opened.get("store"),
            "run_id": engine.run_id if engine.initialised else None,
            "serving": self.held_by_rank.get(rank, engine.held),
            "state_digest": None,
            "update_open": engine.update_open,
            "switch": engine.switch,
            "half_applied": engine.half_applied,
            "last_error": None,
            "timings": {"fetch": 0.5},
        }

    def collective(self, method: str, args: list[Any], engine: Engine) -> list[Any]:
        """What the ranks of one engine answer, or the core for them."""
        if method in {"delta_prefixes", "delta_pause"}:
            return self.core(method, args)
        match method:
            case "delta_status":
                return [self.status(rank, engine) for rank in range(self.num_ranks)]
            case "delta_sums":
                return [{**sums, "serving": engine.held} for sums in self.sums]
            case "delta_open":
                return [{"is_done": True}] * self.num_ranks
            case "delta_prefetch":
                version, *run_id = args
                if not run_id:
                    engine.prefetches[version] += 1
                is_done = engine.prefetches[version] >= 3
                ranks = self.collective("delta_status", [], engine)
                return [rank | {"is_done": is_done} for rank in ranks]
            case "delta_switch":
                (engine.switch,) = args
                return [None] * self.num_ranks
            case "delta_expect":
                asked, asked_args, expected = args
                found = self.collective(asked, asked_args, engine)
                pairs = zip(found, expected, strict=True)
                if any(rank[key] != wanted[key] for rank, wanted in pairs for key in wanted):
                    raise ValueError("[engines-differ] in some of it")
                return [None] * self.num_ranks
        raise KeyError(method)

    def core(self, method: str, args: list[Any]) -> list[Any]:
        """What an engine core answers for its ranks."""
        if not self.has_plugin:
            return [{"error": "the engine core did not load the plugin"}] * self.num_ranks
        is_pause = method == "delta_pause"
        self.paused = self.paused or is_pause
        if any(args):
            self.stale_prefixes, self.has_no_prefixes = False, self.has_no_prefixes or is_pause
        return [{}]

    def do(self, path: str, body: dict[str, Any], engine: Engine) -> None:
        """What a route does to one engine."""
        match path:
            case "/init_weight_transfer_engine":
                engine.initialised, engine.held, engine.run_id = True, self.found, self.run_id
            case "/start_weight_update":
                engine.update_open = True
            case "/update_weights":
                if not engine.update_open:
                    raise ValueError("start_weight_update must be called before update_weights.")
                version = body["update_info"]["version"]
                is_allowed = body["update_info"].get("allow_rollback", False)
                if self.required_keys and version < engine.newest and not is_allowed:
                    engine.update_open = False
                    raise ValueError(f"[rollback] version {engine.newest} was used before")
                engine.staged = version
                engine.is_salted = body["update_info"].get("new_prefixes", False)
                engine.switch = body["update_info"].get("switch", engine.switch)
            case "/finish_weight_update" if self.tears:
                engine.half_applied, engine.update_open, engine.held = True, False, None
                raise ValueError("[half-applied] parts of two versions")
            case "/finish_weight_update":
                engine.held, engine.staged = engine.staged, None
                engine.newest = max(engine.newest, engine.held or 0)
                engine.update_open = engine.half_applied = False

    def each(self, path: str, act: Callable[[Engine], Any]) -> Any:
        """Act in every engine, as vLLM does: any one's error is the answer, else the first one's result."""
        message = self.failures[path].pop(0) if self.failures.get(path) else None
        results, errors = [], []
        for index, engine in enumerate(self.engines):
            if message is not None and self.failing_engine in (None, index):
                engine.update_open = False
                errors.append(message)
                continue
            try:
                results.append(act(engine))
            except ValueError as exc:
                errors.append(str(exc))
        if errors:
            raise ValueError(errors[0])
        return results[0]

    def answer(  # noqa: C901, PLR0911, PLR0912, PLR0915  (one case a route is the clearest list of them)
        self, path: str, query: dict[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """Do what the route does; a `ValueError` becomes HTTP 500."""
        if self.on_call is not None:
            self.on_call(path)
        match path:
            case "/health":
                return {}
            case "/version":
                return {"version": "0.32.0"}
            case "/v1/models":
                return {"data": [{"id": "stub"}]}
            case _ if not self.is_dev:
                raise KeyError(path)
            case "/server_info":
                as_json = query.get("config_format") == "json"
                return {"vllm_config": self.config if as_json else str(self.config)}
            case "/get_world_size":
                engines = self.num_engines if query["include_dp"] == "true" else 1
                return {"world_size": self.num_ranks * engines}
            case "/weight_info":
                return {"weight_version": self.weight_version}
            case "/is_paused":
                return {"is_paused": self.paused}
        method = body.get("method", "") if path == "/collective_rpc" else path
        is_look = method == "delta_prefetch" and len(body["args"]) > 1
        if not is_look and method not in {"delta_status", "delta_expect", "delta_open", "delta_sums"}:
            self.calls.append(method)
        if path in self.blocks:
            self.entered[path].set()
            self.blocks[path].wait()
        if path == "/collective_rpc":
            return {"results": self.each(path, lambda each: self.collective(method, body["args"], each))}
        try:
            self.each(path, lambda each: self.do(path, body, each))
        finally:
            self.tears = self.tears and path != "/finish_weight_update"
        match path:
            case "/start_weight_update" | "/update_weights":
                pass
            case "/init_weight_transfer_engine":
                self.opened = body["init_info"]
            case "/finish_weight_update":
                self.weight_version = body["weight_version"]
                self.stale_prefixes = not (self.has_no_prefixes or self.engines[0].is_salted)
                self.history.append(self.held)
            case "/update_weight_version":
                self.weight_version = body["new_version"]
            case "/pause":
                self.paused = True
                self.pauses.append(query)
                if query["clear_cache"] == "true":
                    self.stale_prefixes, self.has_no_prefixes = False, True
            case "/resume":
                self.paused = self.has_no_prefixes = False
            case "/reset_prefix_cache":
                assert query == {"reset_running_requests": "true"}
                self.stale_prefixes, self.has_no_prefixes = False, self.paused
                return {"success": True}
            case _:
                raise KeyError(path)
        return {"message": "done"}

    def block(self, path: str) -> threading.Event:
        """Have calls of a route wait for what is returned; `entered[path]` is set when one does."""
        self.entered[path] = threading.Event()
        self.blocks[path] = threading.Event()
        return self.blocks[path]


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or a test that is over."""


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

    http = _Server(("127.0.0.1", 0), Handler)
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
