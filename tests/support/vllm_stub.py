"""The routes of a vLLM server with the `delta` backend, without the model."""

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support import http_server
from tests.support.http_server import Answer, Request, json_answer


@dataclass
class Engine:
    """What one data-parallel engine knows; all that a process forgets."""

    initialised: bool = False
    update_open: bool = False
    half_applied: bool = False
    staged: int | None = None
    prefetches: Counter[int] = field(default_factory=Counter)
    """Version -> how often it was asked for; the third time it is there, or when a call waits for it."""
    held: int | None = None
    newest: int = 0
    """Of the versions that it held."""
    switch: str | None = None
    caches: str = "reset"
    """What the update does to them."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
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
        """Per path, or method of a collective call: messages of the HTTP 500 answers to its next calls."""
        self.failing_engine: int | None = None
        """The only engine in which `failures` come to pass; None for all."""
        self.blocks: dict[str, threading.Event] = {}
        """Per path, or method of a collective call: calls wait until this is set."""
        self.entered: dict[str, threading.Event] = {}
        """Set when such a call waits."""
        self.on_call: Callable[[str], None] | None = None
        """Told of each path, or method of a collective call, before anything else."""
        self.down = False
        """Connections are closed without an answer."""
        self.run_id = "run"
        """What the server finds when it opens any store."""
        self.found: int | None = None
        """The version that it finds it has when it opens a store."""
        self.is_dev = True
        """It was started with `VLLM_SERVER_DEV_MODE=1`."""
        self.lacking: set[str] = set()
        """Paths that it does not serve, as an app of one's own may not."""
        self.config: dict[str, Any] = {
            "parallel_config": {"worker_extension_cls": "vllm_plugin.DeltaWorkerExtension"},
            "weight_transfer_config": {"backend": "delta"},
        }
        """How it was started, as far as clients ask."""
        self.required_keys: list[str] = []
        """The names of the keys that it was started to require."""
        self.num_ranks = 1
        self.has_plugin = True
        """The engine core does its part of updates."""
        self.uncovered: dict[str, str] = {}
        """What an update cannot do to caches, and why."""
        self.drivers: dict[str, str] = {}
        """Id of each driver that was heard of, and what it wants."""
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
        self.is_held = False
        """It is paused because of that."""
        self.is_stuck = False
        """Its caches cannot be emptied: a write fails when it is done, and generation stays paused."""
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
            "engine": engine.id,
            "keeps": self.uncovered.get("reset"),
        }

    def collective(self, method: str, args: list[Any], engine: Engine) -> list[Any]:
        """What the ranks of one engine answer, or the core for them."""
        if method in {"delta_engine", "delta_prove", "delta_pause", "delta_resume"}:
            return self.core(method, args, engine)
        match method:
            case "delta_status":
                return [self.status(rank, engine) for rank in range(self.num_ranks)]
            case "delta_sums":
                return [{**sums, "serving": engine.held} for sums in self.sums]
            case "delta_open":
                self.check_taken(args[0], engine)
                return [{"is_done": True}] * self.num_ranks
            case "delta_prefetch":
                version, *run_id = args
                if not run_id:
                    engine.prefetches[version] += 1
                is_done = engine.prefetches[version] >= 3
                ranks = self.collective("delta_status", [], engine)
                return [rank | {"is_done": is_done} for rank in ranks]
            case "delta_switch":
                if args == [None] and self.is_held:
                    self.resume()
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

    def core(self, method: str, args: list[Any], engine: Engine) -> list[Any]:
        """What an engine core answers for its ranks."""
        if not self.has_plugin:
            return [{"error": "the engine core did not load the plugin"}] * self.num_ranks
        if method == "delta_engine":
            return [{"engine": engine.id, "salt": None}]
        if method == "delta_prove":
            self.do("/start_weight_update", {}, engine)
            info = {"switch": "stay-paused" if self.paused else "resume"} | args[0]
            self.do("/update_weights", {"update_info": info}, engine)
            return [{"switch": engine.switch}]
        if method == "delta_resume":
            self.resume()
            engine.switch = None
        else:
            self.paused = True
        return [{}]

    def resume(self) -> None:
        """Let generation go on."""
        if self.is_held and self.is_stuck:
            raise ValueError("[stale-caches] a cache is not empty")
        self.stale_prefixes = self.stale_prefixes and not self.is_held
        self.paused = self.is_held = False

    @staticmethod
    def check_meant(given: dict[str, Any], engine: Engine) -> None:
        """Refuse what was meant for another engine."""
        if given.get("engine", engine.id) != engine.id:
            raise ValueError("[other-server] another server than before answers at this address")

    def check_taken(self, given: dict[str, Any], engine: Engine) -> None:
        """Refuse what was meant for another engine, or cannot be done to caches."""
        self.check_meant(given, engine)
        if (reason := self.uncovered.get(given.get("prefix_cache", "reset"))) is not None:
            raise ValueError(f"[usage] {reason}")

    def called(self, body: dict[str, Any], engine: Engine) -> list[Any]:
        """Answer a collective call as an engine core does."""
        named = body.get("kwargs", {})
        self.check_meant(named, engine)
        driver = named.get("driver")
        if driver is not None and driver["seconds"]:
            self.drivers[driver["id"]] = driver["wants"]
        elif driver is not None:
            self.drivers.pop(driver["id"], None)
        if "wait_s" in named:
            # The answer comes when it is there.
            engine.prefetches[body["args"][0]] += 2
        others = [{"id": each, "wants": wants} for each, wants in self.drivers.items()]
        found = self.collective(body["method"], body["args"], engine)
        return [
            each | {"drivers": [other for other in others if other["id"] != (driver or {}).get("id")]}
            if isinstance(each, dict) and "engine" in each
            else each
            for each in found
        ]

    def do(self, path: str, body: dict[str, Any], engine: Engine) -> None:
        """What a route does to one engine."""
        match path:
            case "/init_weight_transfer_engine":
                self.check_taken(body["init_info"], engine)
                engine.initialised, engine.held, engine.run_id = True, self.found, self.run_id
            case "/start_weight_update":
                engine.update_open = True
            case "/update_weights":
                if not engine.update_open:
                    raise ValueError("start_weight_update must be called before update_weights.")
                self.check_taken(body["update_info"], engine)
                version = body["update_info"]["version"]
                is_allowed = body["update_info"].get("allow_rollback", False)
                if self.required_keys and version < engine.newest and not is_allowed:
                    engine.update_open = False
                    raise ValueError(f"[rollback] version {engine.newest} was used before")
                engine.staged = version
                engine.caches = body["update_info"].get("prefix_cache", "reset")
                engine.switch = body["update_info"].get("switch", engine.switch)
            case "/finish_weight_update" if self.tears:
                engine.half_applied, engine.update_open, engine.held = True, False, None
                raise ValueError("[half-applied] parts of two versions")
            case "/finish_weight_update" if engine.staged is None:
                engine.update_open = False
                raise ValueError("[usage] no version is staged")
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

    def answer(  # noqa: C901, PLR0911, PLR0912  (one case a route is the clearest list of them)
        self, path: str, query: dict[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        """Do what the route does; a `ValueError` becomes HTTP 500."""
        method = body.get("method", "") if path == "/collective_rpc" else path
        if self.on_call is not None:
            self.on_call(method)
        if path in self.lacking:
            raise KeyError(path)
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
        is_look = method == "delta_prefetch" and len(body["args"]) > 1
        looks = {"delta_status", "delta_engine", "delta_expect", "delta_open", "delta_sums"}
        if not is_look and method not in looks:
            self.calls.append(method)
        if method in self.blocks:
            self.entered[method].set()
            self.blocks[method].wait()
        if path == "/collective_rpc":
            return {"results": self.each(method, lambda each: self.called(body, each))}
        try:
            self.each(path, lambda each: self.do(path, body, each))
        finally:
            self.tears = self.tears and path != "/finish_weight_update"
        match path:
            case "/start_weight_update" | "/update_weights":
                pass
            case "/init_weight_transfer_engine":
                self.opened = {
                    k: v for k, v in body["init_info"].items() if k not in {"prefix_cache", "engine"}
                }
                self.weight_version = self.weight_version if self.found is None else str(self.found)
            case "/finish_weight_update":
                self.weight_version = body["weight_version"]
                self.history.append(self.held)
                self.stale_prefixes = self.is_stuck or self.engines[0].caches == "keep"
                self.is_held = self.is_stuck
                if self.is_stuck:
                    self.paused = True
                    raise ValueError("[stale-caches] a cache is not empty")
            case "/update_weight_version":
                self.weight_version = body["new_version"]
            case "/pause":
                self.paused = True
                self.pauses.append(query)
            case "/resume":
                self.resume()
            case _:
                raise KeyError(path)
        return {"message": "done"}

    def options(self, path: str) -> int:
        """The status that a client gets that asks for OPTIONS of a route of an update, as FastAPI has it."""
        if self.on_call is not None:
            self.on_call(f"OPTIONS {path}")
        return 404 if path in self.lacking or not self.is_dev else 405

    def block(self, path: str) -> threading.Event:
        """Have calls of a route or method wait for what is returned; `entered[path]` is set when one does."""
        self.entered[path] = threading.Event()
        self.blocks[path] = threading.Event()
        return self.blocks[path]


@contextmanager
def serving(stub: StubServer) -> Iterator[StubServer]:
    """Serve a stub on a free port."""

    def answer(request: Request) -> Answer | None:
        if stub.down:
            return None
        try:
            if request.method == "OPTIONS":
                found = json_answer({}, stub.options(request.path))
            else:
                found = json_answer(stub.answer(request.path, request.query, request.json()))
        except KeyError:
            found = json_answer({"detail": "Not Found"}, 404)
        except ValueError as exc:
            # As vLLM words what a worker raised.
            said = f"Worker failed with error '{exc}', please check the stack trace above for the root cause"
            found = json_answer({"error": {"message": said, "type": "InternalServerError", "code": 500}}, 500)
        return found if stub.page is None else Answer(status=found.status, body=stub.page)

    with http_server.serving(answer, protocol="HTTP/1.0") as stub.url:
        yield stub
