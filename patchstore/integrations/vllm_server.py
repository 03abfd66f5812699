"""A vLLM server that runs the `delta` backend, as seen through HTTP.

The routes are vLLM's own; it serves them with `VLLM_SERVER_DEV_MODE=1`. An update is three calls, in which
vLLM generates nothing; what takes long, fetching and proving a version, is done on a thread before them.
"""

import logging
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from threading import Event
from types import TracebackType
from typing import Any, Literal, Self

import httpx

from patchstore import errors
from patchstore.errors import DeviceMemoryShort, PatchstoreError, ServerUnavailable, UsageError
from patchstore.integrations.vllm_configuration import Configuration, parsed

logger = logging.getLogger(__name__)

_REASON = re.compile(r"\[([a-z]+(?:-[a-z]+)*)\] (.*)", re.DOTALL)
_VLLM_SUFFIX = "', please check the stack trace"
_ERRORS = {
    error.kind: error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, PatchstoreError) and error is not PatchstoreError
}

Switch = Literal["resume", "stay-paused"]
"""What ends a switch of versions: generation goes on, or stays as it is, paused or not."""

Commit = Literal["keep", "wait", "abort", "in-place"]
"""How a version is written: while generation is paused, and what is under way is kept for afterwards, waited
for or aborted; or in place, between two tokens of it."""

PrefixCache = Literal["reset", "keep"]
"""What becomes of keys and values that older weights computed."""

_CONNECT_S = 10.0
_SAME = ("initialised", "run_id", "held", "state_digest", "torn", "switch", "update_open")
"""What all engines of a server must say alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """What all ranks of a server say about themselves, folded into one."""

    initialised: bool
    """Every rank has a store open."""
    num_engines: int
    """Data-parallel engines of the server. One answered; the others said whether they agree."""
    engines_differ: bool
    """Some engine serves something else, or is elsewhere in an update, than the one that answered. Then
    `held` is None, and `initialised` False if they are not of one run."""
    run_id: str | None
    store: str | None
    """URL of the store that it follows."""
    held: int | None
    """The version that every rank of every engine serves; None where one serves none, or they differ."""
    state_digest: str | None
    """Of the held version."""
    update_open: bool
    """An update was started and neither finished nor failed."""
    switch: Switch | None
    """A switch of versions was begun and not ended, and what ends it; see `VllmServer.apply`."""
    torn: bool
    """Some rank serves parts of two versions."""
    last_error: str | None
    """`[kind] message` of the last call, where it failed."""
    ranks: tuple[Mapping[str, Any], ...]
    """Each rank's own status, as `DeltaWorkerExtension.delta_status` returns it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switched:
    """How long the two halves of a switch took, in seconds."""

    stage_s: float
    """Fetching and proving; generation went on, but for its last part."""
    commit_s: float
    """From the pause, if any, until generation went on with the new weights."""


class VllmServer:
    """A client of one server. Calls block; use from one thread.

    Any method raises `ServerUnavailable` where the server cannot be reached, or refuses for a
    reason that is not ours; and otherwise the error whose kind the server names.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 600.0,
        commit: Commit = "keep",
        prefix_cache: PrefixCache = "reset",
        stop: Event | None = None,
    ) -> None:
        """Connect lazily.

        Args:
            timeout_s: for one call; must be longer than fetching an anchor takes.
            commit: how `apply` writes a version. In place, an answer may be of both versions, and so may be
                the keys and values that it came from.
            prefix_cache: `keep` lets later requests reuse what older weights computed.
            stop: while this is set, `apply` begins no switch. One that has begun is ended.
        """
        self._commit, self._prefix_cache = commit, prefix_cache
        self._stop = stop or Event()
        self.url = check_url(url)
        self._timeout_s = timeout_s
        # vLLM closes a connection after it answered with an error and does not say so; a call on a kept one
        # would then fail although the server is well.
        fresh = httpx.Limits(max_keepalive_connections=0)
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S))
        self._http = httpx.Client(base_url=self.url, timeout=timeout, limits=fresh, verify=_trusted())
        self.switching: Switch | None = None
        """The switch that this client has begun and not ended. May be read from other threads."""
        self.abandoned = Event()
        """Set by whoever is about to end that switch from elsewhere: `apply` then writes nothing any more."""
        self._has_backend = False
        """Ranks answered when they were last asked for their status."""

    def configuration(self) -> Configuration | None:
        """Ask how the server was started; None where it does not say so in a form that is known here.

        Its ranks hear nothing of this. The first time vLLM looks at its machine before it answers, which can
        take seconds.
        """
        response = self._request("GET", "/server_info", params={"config_format": "json"})
        return parsed(response)

    def check_backend(self) -> None:
        """Refuse a server whose ranks cannot answer, without asking them.

        Of several ranks that fail vLLM hears the first, and takes what the others say for answers to later
        calls, until it is restarted. A server that does not tell how it was started is let pass.

        Raises:
            ServerUnavailable: it was started without what is named.
        """
        config = self.configuration()
        if config is not None and config.lacks:
            if any(lack.kind == "dev-mode-off" for lack in config.lacks):
                self._check_vllm()
            raise ServerUnavailable(
                "; ".join(f"{self.url} {lack.found}: {lack.advice}" for lack in config.lacks)
            )

    def _check_vllm(self) -> None:
        """Tell a server that is not vLLM from one whose routes are switched off.

        Raises:
            ServerUnavailable: it does not say which vLLM it is.
        """
        answer = self._request("GET", "/version")
        if version_of(answer) is None:
            raise ServerUnavailable(
                f"GET {self.url}/version answered HTTP {answer.status_code}: {_line(answer.text)!r:.80}, "
                "unlike vLLM; give vLLM's own address, such as http://127.0.0.1:8000"
            )

    def status(self) -> ServerStatus:
        """Ask every rank what it serves, and all data-parallel engines whether that is true of them too.

        The first time, and whenever it failed before, the server is asked first how it was started; see
        `check_backend`.
        """
        if not self._has_backend:
            self.check_backend()
        # What fails may come back as another server, at the same address.
        self._has_backend = False
        ranks = self._every_rank("delta_status")
        self._has_backend = True
        num_engines = self._num_engines(ranks)
        differ = is_other_run = False
        if num_engines > 1:
            differ = not self._engines_agree("delta_status", (), [_part(rank, _SAME) for rank in ranks])
        if differ:
            run = [_part(rank, ("initialised", "run_id")) for rank in ranks]
            is_other_run = not self._engines_agree("delta_status", (), run)

        def agreed(key: str) -> Any:
            first = ranks[0][key]
            return first if all(rank[key] == first for rank in ranks) else None

        failed = [rank["last_error"] for rank in ranks if rank["last_error"]]
        return ServerStatus(
            initialised=all(rank["initialised"] for rank in ranks) and not is_other_run,
            num_engines=num_engines,
            engines_differ=differ,
            run_id=None if is_other_run else agreed("run_id"),
            store=agreed("store"),
            held=None if differ else agreed("held"),
            state_digest=None if differ else agreed("state_digest"),
            update_open=any(rank["update_open"] for rank in ranks),
            switch=agreed("switch"),
            torn=any(rank["torn"] for rank in ranks),
            last_error=f"[{failed[0]['kind']}] {failed[0]['message']}" if failed else None,
            ranks=tuple(ranks),
        )

    def fingerprint(self) -> list[dict[str, str]]:
        """Return each rank's digests of its live parameters and buffers; reads all of them."""
        return self._every_rank("delta_fingerprint")

    def _num_engines(self, ranks: Sequence[Mapping[str, Any]]) -> int:
        # An engine does not know of its siblings; the front does.
        answer = self._call("GET", "/get_world_size", params={"include_dp": "true"})
        return int(answer["world_size"]) // len(ranks)

    def _engines_agree(self, method: str, args: Sequence[Any], expected: Sequence[Mapping[str, Any]]) -> bool:
        """Whether every engine answers so, rank by rank; see `DeltaWorkerExtension.delta_expect`."""
        try:
            self._collective("delta_expect", method, list(args), list(expected))
        except _EnginesDiffer as exc:
            logger.info("%s", exc)
            return False
        return True

    def sums(self, first: int, num_elements: int) -> list[dict[str, Any]]:
        """Have each rank digest a part of its live weights; see `DeltaWorkerExtension.delta_sums`."""
        return self._every_rank("delta_sums", first, num_elements)

    def engines_have(self, sums: Sequence[Mapping[str, Any]], first: int, num_elements: int) -> bool:
        """Whether every data-parallel engine has these `sums` of the same part of its weights."""
        # How often each was updated is its own affair.
        keys = ("held", "next", "sums", "computed", "unproved")
        return self._engines_agree("delta_sums", (first, num_elements), [_part(rank, keys) for rank in sums])

    def init_weight_transfer(
        self,
        store: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        scratch: str | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        """Have the server open a store, and find out which of its versions it serves already.

        Args:
            scratch: folder on the server's local disk, of its user alone, in which the ranks of a host share
                what they fetch; None for one in the system's folder for temporary files.
            cache_bytes: how much stays there unused, for other servers of the host; None for 4 GiB.
        """
        info: dict[str, Any] = {"store": store}
        if storage_options:
            info["storage_options"] = dict(storage_options)
        if scratch is not None:
            info["scratch"] = scratch
        if cache_bytes is not None:
            info["cache_bytes"] = cache_bytes
        self._post("/init_weight_transfer_engine", {"init_info": info})

    def prefetch(self, version: int) -> None:
        """Have every rank fetch and prove a version while generation goes on; returns when they are done, or
        when we are to stop: what was begun goes on without us.

        What went wrong there, if anything did, is for `update_weights` to say.

        Raises:
            ServerUnavailable: not done within the time for one call.
        """
        began = time.monotonic()
        while not (self._stop.is_set() or self._is_prefetched(version)):
            spent_s = time.monotonic() - began
            if spent_s > self._timeout_s:
                raise ServerUnavailable(
                    f"{self.url} is still fetching version {version} after {self._timeout_s} s"
                )
            # Each question waits for the engine's current step, so long downloads are asked about seldom, and
            # none is noticed later than a tenth of its time.
            self._stop.wait(min(max(spent_s / 10, 0.005), 0.5))

    def _is_prefetched(self, version: int) -> bool:
        ranks = self._every_rank("delta_prefetch", version)
        if not all(rank["is_done"] for rank in ranks):
            return False
        done = [{"is_done": True}] * len(ranks)
        return self._num_engines(ranks) == 1 or self._engines_agree("delta_prefetch", (version,), done)

    def start_weight_update(self) -> None:
        """Begin an update; one that is open begins anew."""
        self._post("/start_weight_update", {})

    def update_weights(self, version: int) -> None:
        """Have every rank fetch and prove a version, unless `prefetch` did; what is served stays as it is.

        Generation waits meanwhile, as it does during every call of this kind.
        If this raises, the update is closed and nothing changed.
        """
        self._post("/update_weights", {"update_info": {"version": version}})

    def finish_weight_update(self, weight_version: str) -> None:
        """Have every rank serve what it fetched, and label answers with `weight_version` from here on.

        If this raises, the update is closed and the server serves what it did, or says that it is torn.
        """
        self._post("/finish_weight_update", {"weight_version": weight_version})

    def weight_version(self) -> str | None:
        """The label of answers, or None where vLLM is too old to have one."""
        try:
            answer = self._call("GET", "/weight_info")
        except _NoSuchRoute:
            return None
        return str(answer["weight_version"])

    def set_weight_version(self, weight_version: str) -> None:
        """Label answers from here on, without touching weights; does nothing where vLLM has no labels."""
        try:
            self._post("/update_weight_version", {"new_version": weight_version})
        except _NoSuchRoute:
            return

    def is_paused(self) -> bool:
        """Whether generation is paused, by anybody."""
        return bool(self._call("GET", "/is_paused")["is_paused"])

    def pause(self) -> None:
        """Hold all generation until `resume`. Requests under way go on then, unless they are to be waited
        for, or aborted, now.
        """
        # What is torn waits as it is, also where versions are written in place.
        mode = "keep" if self._commit == "in-place" else self._commit
        # Beside prefixes vLLM forgets images here, which older weights encoded.
        clear_cache = "true" if self._prefix_cache == "reset" else "false"
        self._post("/pause", {}, mode=mode, clear_cache=clear_cache)

    def resume(self) -> None:
        """Let generation go on."""
        self._post("/resume", {})

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of all prefixes; requests under way compute theirs again."""
        # Without preempting them vLLM refuses, and later requests would reuse what older weights computed.
        answer = self._post("/reset_prefix_cache", {}, reset_running_requests="true")
        if not answer["success"]:
            raise ServerUnavailable(f"{self.url} did not reset its prefix cache: blocks are in use")

    def apply(self, version: int) -> Switched | None:
        """Bring the server to a version, whole.

        Generation goes on while the version is fetched and proved, and is paused, if at all, only while the
        weights are written and the prefix cache is reset; a server that somebody else paused stays paused.
        The server is told first, so that a process killed on the way leaves a mark, and the next `apply` or
        `end_switch` ends what it began. Where the way is too far for the GPU's memory, the server is brought
        to versions in between first, each whole.

        Returns:
            How long it took; None if it was stopped before it switched, or abandoned before it wrote.

        Raises:
            Any error of the calls it makes. The server serves the version it did, or its status says
            that it is torn, that its engines differ, or that a switch is to be ended, and generation stays
            paused until then.
        """
        status = self.status()
        begun = status.switch
        if begun is not None and not (status.torn or status.engines_differ):
            self.end_switch(begun)
            begun = None
        began = time.monotonic()
        self.prefetch(version)
        if self._stop.is_set():
            return None
        self.start_weight_update()
        try:
            self.update_weights(version)
        except DeviceMemoryShort:
            if status.held is None or version - status.held < 2:
                raise
            # Half of the way has half of the changes, and is a whole version too.
            between = (status.held + version) // 2
            logger.warning(
                "%s: version %d is too far for the GPU's memory; to %d first", self.url, version, between
            )
            return None if self.apply(between) is None else self.apply(version)
        staged = time.monotonic()
        switch = begun
        if switch is None:
            is_left = self._commit == "in-place" or self.is_paused()
            switch = "stay-paused" if is_left else "resume"
        if self._stop.is_set():
            return None
        self._mark(switch)
        try:
            if switch == "resume":
                self.pause()
            if self.abandoned.is_set():
                # The pause may have come after the end of the switch.
                self._settle(switch)
                return None
            self.finish_weight_update(str(version))
        except PatchstoreError:
            with suppress(PatchstoreError):
                self._settle(switch)
            raise
        self.end_switch(switch)
        return Switched(stage_s=staged - began, commit_s=time.monotonic() - staged)

    def _settle(self, switch: Switch) -> None:
        """End a switch that came to nothing, unless that would let parts of two versions answer."""
        status = self.status()
        if not (status.torn or status.engines_differ):
            self.end_switch(switch)
        elif not self.is_paused():
            # It was to be written in place. It waits until an anchor, or the next version, mends it.
            self._mark("resume")
            self.pause()

    def end_switch(self, switch: Switch) -> None:
        """End a switch of versions, whoever began it: reset the prefix cache and let generation go on.

        Repeating it is harmless.
        """
        if self._prefix_cache == "reset":
            self.reset_prefix_cache()
        if switch == "resume":
            self.resume()
        self._mark(None)

    def _mark(self, switch: Switch | None) -> None:
        self.switching = switch or self.switching
        self._collective("delta_switch", switch)
        self.switching = switch

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _every_rank(self, method: str, *args: int) -> list[dict[str, Any]]:
        results = self._collective(method, *args)
        if not results or not all(isinstance(result, dict) for result in results):
            raise ServerUnavailable(f"{self.url} answered {method} with {results!r:.200}; restart the server")
        return results

    def _collective(self, method: str, *args: Any) -> list[Any]:
        results = list(self._post("/collective_rpc", {"method": method, "args": list(args)})["results"])
        for result in results:
            # Ranks must not raise, so one without the backend answers this; see `DeltaWorkerExtension`.
            if isinstance(result, dict) and result.keys() == {"error"}:
                raise ServerUnavailable(f"{self.url} answered {method}: {result['error']}")
        return results

    def _post(self, path: str, body: Mapping[str, Any], **query: str) -> dict[str, Any]:
        return self._call("POST", path, json=body, params=query)

    def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        response = self._request(method, path, **request)
        if not response.is_success:
            raise _refusal(f"{method} {self.url}{path}", response)
        if not response.content:
            return {}
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ServerUnavailable(
                f"{method} {self.url}{path} answered {response.text!r:.100}, unlike vLLM; check the URL"
            )
        return answer

    def _request(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **request)
        except httpx.TransportError as exc:
            raise ServerUnavailable(f"{method} {self.url}{path}: {type(exc).__name__}: {exc}") from exc


@cache
def _trusted() -> ssl.SSLContext:
    """The machine's certificates; reading them takes longer than a call, so all clients share them."""
    return httpx.create_ssl_context()


def check_url(url: str) -> str:
    """Return a server's URL as it is used here, without a slash at its end.

    Raises:
        UsageError: it is none.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is not the URL of a server: it begins with http:// or https://")
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as exc:
        raise UsageError(f"{url!r} is not the URL of a server: {exc}") from exc
    if not parts.host:
        raise UsageError(f"{url!r} is not the URL of a server: it names no host")
    if parts.userinfo:
        # Not the URL itself: it would be shown in logs and metrics too.
        raise UsageError(f"a server at {parts.host} is named with a user or password; leave them out")
    if parts.query or parts.fragment:
        raise UsageError(f"{url!r} is not the URL of a server: leave out what follows ? or #")
    bare = url.rstrip("/")
    if parts.path.rstrip("/") == "/v1":
        raise UsageError(f"{url!r} is vLLM's OpenAI API; name the server, {bare.removesuffix('/v1')}")
    return bare


def version_of(answer: httpx.Response) -> str | None:
    """Return what vLLM says at `/version`; None where something else answered."""
    try:
        version = answer.json()["version"]
    except (ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, str) else None


class _NoSuchRoute(ServerUnavailable):
    """vLLM does not serve this path."""


class _EnginesDiffer(ServerUnavailable):
    """Some data-parallel engine does not answer as the first one did."""

    kind = "engines-differ"


def _part(rank: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: rank[key] for key in keys}


def _refusal(call: str, response: httpx.Response) -> PatchstoreError:
    """Turn an error answer into the error that the server meant."""
    try:
        text = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = _line(response.text)
    if found := _REASON.search(text):
        kind, message = found[1], found[2].partition(_VLLM_SUFFIX)[0]
        if kind == _EnginesDiffer.kind:
            return _EnginesDiffer(f"{call}: {message}")
        if kind in _ERRORS:
            return _ERRORS[kind](f"{call}: {message}")
        return ServerUnavailable(f"{call}: [{kind}] {message}")
    if response.status_code == httpx.codes.NOT_FOUND:
        return _NoSuchRoute(f"{call}: no such route; is the server vLLM with VLLM_SERVER_DEV_MODE=1?")
    return ServerUnavailable(f"{call}: HTTP {response.status_code}: {text:.300}")


def _line(text: str) -> str:
    """A page of several lines, as one."""
    return " ".join(text.split())
