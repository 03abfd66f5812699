"""What a vLLM server with the `delta` backend must serve, how it is called, and what its answers mean."""

import logging
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from patchstore.errors import EnginesDiffer, OtherServer, PatchstoreError, ServerUnavailable
from patchstore.follow.http_client import Http, check_url, error_of, json_object, one_line

logger = logging.getLogger(__name__)

_REASON = re.compile(r"\[([a-z]+(?:-[a-z]+)*)\] (.*)", re.DOTALL)
_VLLM_SUFFIX = "', please check the stack trace"
_NUM_LOOKS = 8
"""So often a server that is new here is asked which one it is."""

Switch = Literal["resume", "stay-paused"]
"""How an update ends: generation is resumed, or stays as it is, paused or not."""

SAME_IN_ENGINES = (
    "initialised",
    "run_id",
    "serving",
    "state_digest",
    "half_applied",
    "switch",
    "update_open",
)
"""Keys of `delta_status` that must have one value in all engines of a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """The statuses of all ranks of a server, combined into one."""

    initialised: bool
    """Every rank has a store open."""
    num_engines: int
    """Data-parallel engines of the server. One answered; the others reported whether they agree."""
    engines_differ: bool
    """Some engine serves another version, or is at another point of an update, than the one that answered.
    Then `serving` is None, and `initialised` is False if they follow different runs."""
    run_id: str | None
    store: str | None
    """URL of the store that it follows."""
    serving: int | None
    """The version that every rank of every engine serves; None where one serves none, or they differ."""
    state_digest: str | None
    """Of that version."""
    update_open: bool
    """An update was started and neither finished nor failed."""
    switch: Switch | None
    """An update was begun and not ended, and how it must end; see `VllmServer.apply`."""
    half_applied: bool
    """Some rank serves parts of two versions."""
    last_error: str | None
    """`[kind] message` of the last call, where it failed."""
    required_keys: tuple[str, ...] = ()
    """Names of the public keys of which every rank requires a signature; empty if some rank requires none."""
    drivers: tuple[Mapping[str, str], ...] = ()
    """Others that keep the server at a version: `id`, and `wants`, which differs where the versions do."""
    prefetched: int | None = None
    """The requested version that every rank has fetched and verified, or has failed to."""
    ranks: tuple[Mapping[str, Any], ...]
    """Each rank's own status, as `DeltaWorkerExtension.delta_status` returns it."""

    @property
    def may_answer(self) -> bool:
        """Whether generation may continue: no rank serves parts of two versions, and all engines agree."""
        return not (self.half_applied or self.engines_differ)


def fold(
    ranks: Sequence[Mapping[str, Any]],
    *,
    num_engines: int,
    engines_differ: bool,
    is_other_run: bool,
    prefetched: int | None,
) -> ServerStatus:
    """Combine the statuses of one engine's ranks. Other engines reported something else where
    `engines_differ`, or follow another run.
    """

    def agreed(key: str) -> Any:
        first = ranks[0].get(key)
        return first if all(rank.get(key) == first for rank in ranks) else None

    failed = [rank["last_error"] for rank in ranks if rank["last_error"]]
    return ServerStatus(
        initialised=all(rank["initialised"] for rank in ranks) and not is_other_run,
        num_engines=num_engines,
        engines_differ=engines_differ,
        run_id=None if is_other_run else agreed("run_id"),
        store=agreed("store"),
        serving=None if engines_differ else agreed("serving"),
        state_digest=None if engines_differ else agreed("state_digest"),
        update_open=any(rank["update_open"] for rank in ranks),
        switch=agreed("switch"),
        half_applied=any(rank["half_applied"] for rank in ranks),
        required_keys=tuple(agreed("required_keys") or ()),
        drivers=tuple(ranks[0].get("drivers", ())),
        last_error=f"[{failed[0]['kind']}] {failed[0]['message']}" if failed else None,
        prefetched=prefetched,
        ranks=tuple(ranks),
    )


def only(rank: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return a few fields of a rank's status."""
    return {key: rank[key] for key in keys}


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """A process that keeps servers at a version. It tells each server what it wants, with every question, and
    hears who else does; see `ServerStatus.drivers`.
    """

    wants: Callable[[], str | None]
    """Returns a text, the same for all drivers that want the same of a server; None while that is unknown."""
    seconds: float
    """The server forgets the driver that long after its last question."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def told(self) -> dict[str, Any]:
        """What the server hears, as arguments of a call; none while there is nothing to want."""
        wants = self.wants()
        return {} if wants is None else self._says(wants, self.seconds)

    def goodbye(self) -> dict[str, Any]:
        """What has the server forget the driver."""
        return self._says("", 0)

    def _says(self, wants: str, seconds: float) -> dict[str, Any]:
        return {"driver": {"id": self.id, "wants": wants, "seconds": seconds}}


class Connection:
    """A connection to one server, which knows which engine it means. Calls block; use from one thread.

    Any call raises `ServerUnavailable` where the server cannot be reached, or refuses for a reason that is
    not ours; and otherwise the error whose kind the server names.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        driver: Driver | None = None,
    ) -> None:
        """Connect lazily. Raises UsageError: no URL of a server, or as of `http_client.Http`."""
        self.url = check_url(url)
        self.timeout_s = timeout_s
        self.driver = driver
        # vLLM closes a connection after it answered with an error and does not say so; a call on a kept one
        # would then fail although the server is well.
        self._http = Http(self.url, timeout_s=timeout_s, headers=headers, keep_alive=False)
        self._num_failures = 0
        """Calls without an answer, or with an error other than a missing route. After one of them another
        process may be at the same address."""
        self.engine: str | None = None
        """The engine that answers here; None before the first answer. Of several data-parallel engines it is
        the first one's."""
        self._gone: set[str] = set()
        """Engines that answered here before it. One that is back means that several servers answer."""
        self._num_engines: int | None = None
        self._counted_at = 0
        """`_num_failures` when the engines were counted."""

    def close(self) -> None:
        self._http.close()

    def hide(self, text: str) -> str:
        """Take out of a text what is sent to the server and must not be shown."""
        return self._http.hide(text)

    # Any call.

    def request(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Return the answer, whatever its status is."""
        try:
            response = self._http.request(method, path, **request)
        except ServerUnavailable:
            self._num_failures += 1
            raise
        if not (response.is_success or response.status_code == httpx.codes.NOT_FOUND):
            self._num_failures += 1
        return response

    def call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        """Return the JSON object of a successful answer."""
        response = self.request(method, path, **request)
        if not response.is_success:
            raise refusal(f"{method} {self.url}{path}", response)
        if not response.content:
            return {}
        if (answer := json_object(response)) is None:
            raise ServerUnavailable(
                f"{method} {self.url}{path} answered {response.text!r:.100}, unlike vLLM; check the URL"
            )
        return answer

    def post(self, path: str, body: Mapping[str, Any], **query: str) -> dict[str, Any]:
        return self.call("POST", path, json=body, params=query)

    # Calls of methods of ranks.

    def collective(self, method: str, *args: Any, timeout_s: float | None = None, **named: Any) -> list[Any]:
        """Call a method of all ranks, and return the answers of one engine's ranks.

        A rank that refused counts as an answer of the server.
        """
        body = {"method": method, "args": list(args)} | ({"kwargs": named} if named else {})
        limit = {} if timeout_s is None else {"timeout": timeout_s}
        results = list(self.call("POST", "/collective_rpc", json=body, **limit)["results"])
        for result in results:
            # Ranks must not raise, so one that did not do what was asked answers with this instead.
            if isinstance(result, dict) and result.keys() == {"error"}:
                raise _named(f"{self.url} answered {method}", str(result["error"]))
        return results

    def core(self, method: str, *args: Any, answers: Sequence[Any] = ({},)) -> Any:
        """Call a method that does something in an engine core, which gives one of these answers."""
        results = self.collective(method, *args, **self.meant())
        if len(results) != 1 or results[0] not in answers:
            raise self._unlike(method, results)
        return results[0]

    def every_rank(self, method: str, *args: Any, **named: Any) -> list[dict[str, Any]]:
        """Call a method of all ranks that answer with an object."""
        results = self.collective(method, *args, **named)
        if not results or not all(isinstance(result, dict) for result in results):
            raise self._unlike(method, results)
        return results

    def ranks(self, method: str, *args: Any, **named: Any) -> list[dict[str, Any]]:
        """As `every_rank`, of the engine that is known here. The ranks hear what this driver wants."""
        told = {} if self.driver is None else self.driver.told()
        return self.every_rank(method, *args, **named, **self.meant(), **told)

    def _unlike(self, method: str, results: Sequence[Any]) -> ServerUnavailable:
        return ServerUnavailable(f"{self.url} answered {method} with {results!r:.200}; restart the server")

    # Which engines answer.

    def meant(self) -> dict[str, Any]:
        """What has the server refuse a call that was not meant for it."""
        # With several data-parallel engines a call reaches all, and each has another id.
        return {"engine": self.engine} if self._num_engines == 1 and self.engine is not None else {}

    def identify(self) -> None:
        """Learn which engine answers here. If more than one does, the calls of one update would reach several
        servers: OtherServer.
        """
        found = self._ask_engine()
        if found == self.engine:
            return
        # A load balancer may send several calls in a row to the same server, but hardly all of these.
        if found in self._gone or any(self._ask_engine() != found for _ in range(_NUM_LOOKS - 1)):
            raise self.several()
        if self.engine is not None:
            self._gone.add(self.engine)
        self.engine = found
        self._num_engines = None

    def _ask_engine(self) -> str:
        (answer, *_) = self.every_rank("delta_engine")
        return str(answer["engine"])

    def several(self) -> OtherServer:
        return OtherServer(
            f"several servers answer at {self.url}, as behind a load balancer, and one update would change "
            "part of each: name every server by an address of its own. Nothing was changed"
        )

    def count_engines(self, ranks: Sequence[Mapping[str, Any]], *, again: bool = False) -> int:
        """Return the number of data-parallel engines, by the answers of one engine's ranks. It is asked once,
        and again after a failed call.
        """
        if again or self._num_engines is None or self._counted_at != self._num_failures:
            # As of a server that was restarted: its number must be known before it is meant.
            self._num_engines = None
            # An engine does not know of its siblings; the front does.
            answer = self.call("GET", "/get_world_size", params={"include_dp": "true"})
            self._num_engines = int(answer["world_size"]) // len(ranks)
            self._counted_at = self._num_failures
        return self._num_engines

    def engines_agree(self, method: str, args: Sequence[Any], expected: Sequence[Mapping[str, Any]]) -> bool:
        """Whether every engine answers so, rank by rank; see `DeltaWorkerExtension.delta_expect`."""
        try:
            self.collective("delta_expect", method, list(args), list(expected), **self.meant())
        except EnginesDiffer as exc:
            logger.info("%s", exc)
            return False
        return True


# Errors.


class NoSuchRoute(ServerUnavailable):
    """vLLM does not serve this path, or was started without what it needs."""


def refusal(call: str, response: httpx.Response) -> PatchstoreError:
    """Turn an error answer into the error that the server meant."""
    try:
        text = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = one_line(response.text)
    if _REASON.search(text) is not None:
        return _named(call, text)
    # An app that has files at / answers 405 for what it has no route for.
    if response.status_code in {httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED}:
        return NoSuchRoute(
            f"{call}: HTTP {response.status_code}, no such route; vllm serve has it with "
            "VLLM_SERVER_DEV_MODE=1, and an app of your own if it includes vLLM's router"
        )
    return ServerUnavailable(f"{call}: HTTP {response.status_code}: {text:.300}")


def _named(call: str, text: str) -> PatchstoreError:
    """Return the error that a text names as `[kind] message`."""
    found = _REASON.search(text)
    if found is None:
        return ServerUnavailable(f"{call}: {text}")
    kind, message = found[1], found[2].partition(_VLLM_SUFFIX)[0]
    return error_of(kind, f"{call}: {message}") or ServerUnavailable(f"{call}: [{kind}] {message}")


# What a server must serve, and how it must be started.

EXTENSION = "vllm_plugin.DeltaWorkerExtension"
BACKEND = '{"backend": "delta"}'
FUSED_EXPERTS = re.compile(r"\.experts\.(base_layer\.)?lora_[AB]\.")
"""Names that PEFT gives where all experts of a layer are one parameter, with their ranks side by side."""
_EXTENSION = f"--worker-extension-cls {EXTENSION}"
_BACKEND = f"--weight-transfer-config '{BACKEND}'"
ADDRESS = "give vLLM's own address, such as http://127.0.0.1:8000, not a proxy's"

_ROUTERS: Mapping[str, tuple[str, ...]] = {
    "vllm.entrypoints.serve.dev.rpc.api_router": ("POST /collective_rpc",),
    "vllm.entrypoints.rl.online.api_router (in older releases vllm.entrypoints.serve.dev.rlhf.api_router)": (
        "POST /init_weight_transfer_engine",
        "POST /start_weight_update",
        "POST /update_weights",
        "POST /finish_weight_update",
        "POST /pause",
        "POST /resume",
        "GET /is_paused",
        "GET /get_world_size",
    ),
}
"""vLLM's module with a `router` -> its routes without which no update is possible."""

ROUTES = tuple(route for routes in _ROUTERS.values() for route in routes)
"""Method and path of each of them. `vllm serve` has all of them with `VLLM_SERVER_DEV_MODE=1`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What a server lacks, so that it cannot be updated, or its ranks cannot answer."""

    kind: Literal["not-vllm", "dev-mode-off", "routes-missing", "no-extension", "no-delta-backend"]
    found: str
    """What is wrong with the server, such as `was started without ...`."""
    advice: str


def version_of(answer: httpx.Response) -> str | None:
    """Return the version that vLLM reports at `/version`; None if something else answered."""
    version = (json_object(answer) or {}).get("version")
    return version if isinstance(version, str) else None


def unlike_vllm(answer: httpx.Response, hide: Callable[[str], str]) -> Missing:
    """Word that what a server answers at `/version` is not vLLM's. `hide` takes out secrets."""
    page = one_line(hide(answer.text))
    found = f"answers /version with HTTP {answer.status_code}: {page!r:.80}, unlike vLLM"
    return Missing(kind="not-vllm", found=found, advice=ADDRESS)


def listed(routes: Iterable[str]) -> str:
    """The routes in words, each method once."""
    paths: dict[str, list[str]] = {}
    for route in routes:
        method, path = route.split()
        paths.setdefault(method, []).append(path)
    return "; ".join(f"{method} {', '.join(each)}" for method, each in paths.items())


def include(absent: Iterable[str]) -> str:
    """Advise on an app of one's own which of vLLM's routers have the routes that it lacks."""
    lacking = {*absent}
    routers = " and ".join(router for router, routes in _ROUTERS.items() if lacking & {*routes})
    return f"in an app of your own, include the router of {routers}"


def missing_options(response: httpx.Response) -> tuple[Missing, ...] | None:
    """Read the answer of `GET /server_info?config_format=json`; None if its form is not known here."""
    try:
        config = response.json()["vllm_config"]
        extension = config["parallel_config"]["worker_extension_cls"]
        backend = (config["weight_transfer_config"] or {}).get("backend")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    missing = []
    if not extension:
        advice = f"add {_EXTENSION} to vllm serve, and {_BACKEND}"
        found = "was started without the worker extension"
        missing.append(Missing(kind="no-extension", found=found, advice=advice))
    if backend != "delta":
        found = f"was started with {backend or 'no'} weight transfer backend"
        missing.append(Missing(kind="no-delta-backend", found=found, advice=f"add {_BACKEND} to vllm serve"))
    return tuple(missing)
