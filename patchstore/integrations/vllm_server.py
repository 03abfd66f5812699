"""A vLLM server that runs the `delta` backend, as seen through HTTP.

The routes are vLLM's own; it serves them with `VLLM_SERVER_DEV_MODE=1`. An update is three calls, in which
vLLM generates nothing; what takes long, fetching and proving a version, is done on a thread before them.
"""

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import httpx

from patchstore import errors
from patchstore.errors import PatchstoreError, ServerUnavailable, UsageError

_REASON = re.compile(r"\[([a-z]+(?:-[a-z]+)*)\] (.*)", re.DOTALL)
_VLLM_SUFFIX = "', please check the stack trace"
_ERRORS = {
    error.kind: error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, PatchstoreError) and error is not PatchstoreError
}

Switch = Literal["resume", "stay-paused"]
"""What becomes of a paused server once it serves the new version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """What all ranks of a server say about themselves, folded into one."""

    initialised: bool
    """Every rank has a store open."""
    num_engines: int
    """Data-parallel engines of the server, of which one answered."""
    run_id: str | None
    store: str | None
    """URL of the store that it follows."""
    held: int | None
    """The version that every rank serves; None where one serves none, or they differ."""
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


class VllmServer:
    """A client of one server. Calls block; use from one thread.

    Any method raises `ServerUnavailable` where the server cannot be reached, or refuses for a
    reason that is not ours; and otherwise the error whose kind the server names.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        """Connect lazily.

        Args:
            timeout_s: for one call; must be longer than fetching an anchor takes.
        """
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"{url!r} is not the URL of a server: it begins with http:// or https://")
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        # vLLM closes a connection after it answered with an error and does not say so; a call on a kept one
        # would then fail although the server is well.
        fresh = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=self.url, timeout=timeout_s, limits=fresh)

    def status(self) -> ServerStatus:
        """Ask every rank what it serves. With data parallelism one engine answers, for itself alone."""
        ranks = self._every_rank("delta_status")

        def agreed(key: str) -> Any:
            first = ranks[0][key]
            return first if all(rank[key] == first for rank in ranks) else None

        failed = [rank["last_error"] for rank in ranks if rank["last_error"]]
        return ServerStatus(
            initialised=all(rank["initialised"] for rank in ranks),
            num_engines=self._world_size("true") // self._world_size("false"),
            run_id=agreed("run_id"),
            store=agreed("store"),
            held=agreed("held"),
            state_digest=agreed("state_digest"),
            update_open=any(rank["update_open"] for rank in ranks),
            switch=agreed("switch"),
            torn=any(rank["torn"] for rank in ranks),
            last_error=f"[{failed[0]['kind']}] {failed[0]['message']}" if failed else None,
            ranks=tuple(ranks),
        )

    def fingerprint(self) -> list[dict[str, str]]:
        """Return each rank's digests of its live parameters and buffers; reads all of them."""
        return self._every_rank("delta_fingerprint")

    def _world_size(self, include_dp: str) -> int:
        # An engine does not know of its siblings; the front does.
        return int(self._call("GET", "/get_world_size", params={"include_dp": include_dp})["world_size"])

    def sums(self, first: int, num_elements: int) -> list[dict[str, Any]]:
        """Have each rank digest a part of its live weights; see `DeltaWorkerExtension.delta_sums`."""
        return self._every_rank("delta_sums", first, num_elements)

    def init_weight_transfer(
        self, store: str, storage_options: Mapping[str, Any] | None = None, *, scratch: str | None = None
    ) -> None:
        """Have the server open a store, and find out which of its versions it serves already.

        Args:
            scratch: folder on the server's local disk, of its user alone, in which the ranks of a host share
                what they fetch; None for one in the system's folder for temporary files.
        """
        info: dict[str, Any] = {"store": store}
        if storage_options:
            info["storage_options"] = dict(storage_options)
        if scratch is not None:
            info["scratch"] = scratch
        self._post("/init_weight_transfer_engine", {"init_info": info})

    def prefetch(self, version: int) -> None:
        """Have every rank fetch and prove a version while generation goes on; returns when they are done.

        What went wrong there, if anything did, is for `update_weights` to say.

        Raises:
            ServerUnavailable: not done within the time for one call.
        """
        began = time.monotonic()
        while not all(rank["is_done"] for rank in self._every_rank("delta_prefetch", version)):
            spent_s = time.monotonic() - began
            if spent_s > self._timeout_s:
                raise ServerUnavailable(
                    f"{self.url} is still fetching version {version} after {self._timeout_s} s"
                )
            # Each question waits for the engine's current step, so long downloads are asked about seldom, and
            # none is noticed later than a tenth of its time.
            time.sleep(min(max(spent_s / 10, 0.005), 0.5))

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
        """Hold all generation where it is; requests stay and go on after `resume`."""
        self._post("/pause", {}, mode="keep")

    def resume(self) -> None:
        """Let generation go on."""
        self._post("/resume", {})

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of all prefixes; requests under way compute theirs again."""
        # Without preempting them vLLM refuses, and later requests would reuse what older weights computed.
        answer = self._post("/reset_prefix_cache", {}, reset_running_requests="true")
        if not answer["success"]:
            raise ServerUnavailable(f"{self.url} did not reset its prefix cache: blocks are in use")

    def apply(self, version: int) -> None:
        """Bring the server to a version, whole, and make it forget what older weights computed.

        Generation goes on while the version is fetched and proved, and is paused only while the weights are
        written and the prefix cache is reset; a server that somebody else paused stays paused. The server is
        told first, so that a process killed on the way leaves a mark, and the next `apply` or `end_switch`
        ends what it began.

        Raises:
            Any error of the calls it makes. The server serves the version it did, or its status says
            that it is torn, or that a switch is to be ended, and generation stays paused until then. Of
            several data-parallel engines some may have switched, so they stay paused until `apply` succeeds.
        """
        status = self.status()
        begun = status.switch
        if begun is not None and not status.torn and status.num_engines == 1:
            self.end_switch(begun)
            begun = None
        self.prefetch(version)
        self.start_weight_update()
        self.update_weights(version)
        switch: Switch = begun or ("stay-paused" if self.is_paused() else "resume")
        self._mark(switch)
        try:
            if switch == "resume":
                self.pause()
            self.finish_weight_update(str(version))
        except PatchstoreError:
            with suppress(PatchstoreError):
                # Parts of two versions must not answer: a torn server stays paused until an anchor mends it,
                # and so do several engines, of which some may have switched, until all of them have.
                if not ((after := self.status()).torn or after.num_engines > 1):
                    self.end_switch(switch)
            raise
        self.end_switch(switch)

    def end_switch(self, switch: Switch) -> None:
        """End a switch of versions, whoever began it: reset the prefix cache and let generation go on.

        Repeating it is harmless.
        """
        self.reset_prefix_cache()
        if switch == "resume":
            self.resume()
        self._mark(None)

    def _mark(self, switch: Switch | None) -> None:
        self._post("/collective_rpc", {"method": "delta_switch", "args": [switch]})

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _every_rank(self, method: str, *args: int) -> list[dict[str, Any]]:
        results = self._post("/collective_rpc", {"method": method, "args": list(args)})["results"]
        if not results or not all(isinstance(result, dict) for result in results):
            raise ServerUnavailable(f"{self.url} answered {method} with {results!r:.200}; restart the server")
        return list(results)

    def _post(self, path: str, body: Mapping[str, Any], **query: str) -> dict[str, Any]:
        return self._call("POST", path, json=body, params=query)

    def _call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, **request)
        except httpx.TransportError as exc:
            raise ServerUnavailable(f"{method} {self.url}{path}: {type(exc).__name__}: {exc}") from exc
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


class _NoSuchRoute(ServerUnavailable):
    """vLLM does not serve this path."""


def _refusal(call: str, response: httpx.Response) -> PatchstoreError:
    """Turn an error answer into the error that the server meant."""
    try:
        text = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = response.text
    if found := _REASON.search(text):
        kind, message = found[1], found[2].partition(_VLLM_SUFFIX)[0]
        if kind in _ERRORS:
            return _ERRORS[kind](f"{call}: {message}")
        return ServerUnavailable(f"{call}: [{kind}] {message}")
    if response.status_code == httpx.codes.NOT_FOUND:
        return _NoSuchRoute(f"{call}: no such route; is the server vLLM with VLLM_SERVER_DEV_MODE=1?")
    return ServerUnavailable(f"{call}: HTTP {response.status_code}: {text:.500}")
