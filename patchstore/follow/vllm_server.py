"""A vLLM server that runs the `delta` backend: the calls that it answers, and how it is brought to a version.

The routes are vLLM's own. `vllm serve` has them with `VLLM_SERVER_DEV_MODE=1`; an app of one's own includes
vLLM's routers. An update is three calls, in which vLLM generates nothing. What takes long, fetching and
verifying a version, is done on a thread before them.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Event
from typing import Any, Self, get_args

import httpx

from patchstore.bucket.records import Manifest
from patchstore.errors import DeviceMemoryShort, OtherServer, PatchstoreError, ServerUnavailable
from patchstore.follow.server import UpdateTimings
from patchstore.follow.settings import DEFAULTS, PauseMode, PrefixCache
from patchstore.follow.vllm_protocol import (
    ADDRESS,
    ROUTES,
    SAME_IN_ENGINES,
    Connection,
    Driver,
    Missing,
    NoSuchRoute,
    ServerStatus,
    Switch,
    fold,
    include,
    listed,
    missing_options,
    only,
    unlike_vllm,
    version_of,
)
from patchstore.stores.base import Store
from patchstore.support.arguments import version_number
from patchstore.support.tracing import span

logger = logging.getLogger(__name__)

_WAIT_S = 0.5
"""So long the server waits before it says that it has not fetched a version yet."""
_GOODBYE_S = 2.0
_RESCUE_S = 5.0
"""Limit for one call to a server whose step did not end in time."""


class VllmServer:
    """A client of one server, which applies versions to it. Calls block; use from one thread.

    Any method raises `ServerUnavailable` where the server cannot be reached, or refuses for a
    reason that is not ours; and otherwise the error whose kind the server names.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = DEFAULTS.timeout_s,
        pause_mode: PauseMode = DEFAULTS.pause_mode,
        prefix_cache: PrefixCache = DEFAULTS.prefix_cache,
        driver: Driver | None = None,
        stop: Event | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Connect lazily.

        Args:
            timeout_s: for one call; must be longer than fetching an anchor takes.
            driver: tells the server, with each question, what is to be served; see `Driver`.
            stop: while this is set, `apply` begins no switch. One that has begun is ended.
            headers: are sent with each request, for a gateway in front of the server, and never shown. A
                token in the environment variable `PATCHSTORE_SERVER_TOKEN` is sent too, as `Authorization:
                Bearer ...`, unless they have `Authorization`.

        Raises:
            UsageError: no URL of a server; or a header, the token, or what the environment says of
                certificates or a proxy, cannot be used.
        """
        self._pause_mode, self._prefix_cache = PauseMode(pause_mode), PrefixCache(prefix_cache)
        self._stop = stop or Event()
        self.headers = headers
        self._http = Connection(url, timeout_s=timeout_s, headers=headers, driver=driver)
        self.url = self._http.url
        self._has_backend = False
        """Ranks answered when they were last asked for their status."""
        self.switching: Switch | None = None
        """The switch that this client has begun and not ended. May be read from other threads."""
        self.abandoned = Event()
        """Set by a thread that is about to end that switch: `apply` then writes nothing any more."""

    @property
    def wants(self) -> str | None:
        """What the server is told that is to be served; None without a driver, or while that is unknown."""
        driver = self._http.driver
        return None if driver is None else driver.wants()

    # Single calls.

    def missing(self) -> tuple[Missing, ...] | None:
        """Ask what the server lacks: how it was started, or where it does not say that, which routes it has.

        An app of one's own over `AsyncLLM` may have the routes of an update alone. No route is called to find
        that out: each is asked for OPTIONS, which vLLM's routes refuse with HTTP 405. Ranks hear nothing of
        this. The first answer can take seconds, as vLLM looks at its machine.

        Returns:
            None if it says how it was started, but not in a form that is known here.
        """
        answer = self._http.request("GET", "/server_info", params={"config_format": "json"})
        if answer.status_code != httpx.codes.NOT_FOUND:
            return missing_options(answer)
        # Not GET: an app that has files at / answers it with 404 for a route that it has for POST.
        absent = [
            route
            for route in ROUTES
            if self._http.request("OPTIONS", route.split()[1]).status_code == httpx.codes.NOT_FOUND
        ]
        if not absent:
            return ()
        if len(absent) < len(ROUTES):
            found = f"does not serve {listed(absent)}"
            return (Missing(kind="routes-missing", found=found, advice=include(absent)),)
        version = self._http.request("GET", "/version")
        routes = f"the routes that update weights ({listed(absent)})"
        start = f"start vllm serve with VLLM_SERVER_DEV_MODE=1 in its environment; {include(absent)}"
        if version_of(version) is not None:
            return (Missing(kind="dev-mode-off", found=f"serves none of {routes}", advice=start),)
        if version.status_code == httpx.codes.NOT_FOUND:
            found = f"is unlike vLLM, as it serves neither /version nor any of {routes}"
            return (Missing(kind="not-vllm", found=found, advice=f"{ADDRESS}; if this is it, {start}"),)
        return (unlike_vllm(version, self._http.hide),)

    def check_backend(self) -> None:
        """Refuse a server that lacks routes, or whose ranks cannot answer, without asking them.

        Of several ranks that fail vLLM hears the first, and takes what the others say for answers to later
        calls, until it is restarted. A server that does not tell how it was started is let pass if it has
        the routes.

        Raises:
            ServerUnavailable: it lacks what is named.
        """
        if missing := self.missing():
            raise ServerUnavailable("; ".join(f"{self.url} {each.found}: {each.advice}" for each in missing))

    def status(self, *, desired: Manifest | None = None) -> ServerStatus:
        """Ask every rank what it serves, and all data-parallel engines whether that is true of them too.

        The first time, and whenever it failed before, the server is asked first how it was started (see
        `check_backend`), and which engine answers.

        Raises:
            OtherServer: several servers answer at this address; nothing was changed in any.

        Args:
            desired: a version that the server should serve next. If the server has a store of that run open,
                and no update is under way there, each rank begins to fetch the version in the same call.
        """
        is_new = not self._has_backend
        try:
            return self._status(desired)
        except OtherServer:
            if is_new:
                raise
        # It may have been restarted since the last call.
        return self._status(desired)

    def _status(self, desired: Manifest | None) -> ServerStatus:
        if not self._has_backend:
            self.check_backend()
            self._http.identify()
        # What fails may come back as another server, at the same address.
        self._has_backend = False
        if desired is None:
            ranks = self._http.ranks("delta_status")
        else:
            ranks = self._http.ranks("delta_prefetch", desired.version, desired.run_id)
        if any(rank["engine"] != self._http.engine for rank in ranks):
            raise self._http.several()
        self._has_backend = True
        # One that opened no store may have been restarted, which no call noticed.
        is_new = not all(rank["initialised"] for rank in ranks)
        num_engines = self._http.count_engines(ranks, again=is_new)
        differ = num_engines > 1 and not self._others_report(ranks, SAME_IN_ENGINES)
        is_done = desired is not None and num_engines == 1 and all(rank["is_done"] for rank in ranks)
        return fold(
            ranks,
            num_engines=num_engines,
            engines_differ=differ,
            is_other_run=differ and not self._others_report(ranks, ("initialised", "run_id")),
            prefetched=desired.version if desired is not None and is_done else None,
        )

    def _others_report(self, ranks: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> bool:
        """Whether all data-parallel engines have in their status what these ranks have."""
        return self._http.engines_agree("delta_status", (), [only(rank, keys) for rank in ranks])

    def fingerprint(self) -> list[dict[str, str]]:
        """Return each rank's digests of its live parameters and buffers; reads all of them."""
        return self._http.every_rank("delta_fingerprint")

    def sums(self, first: int, num_elements: int) -> list[dict[str, Any]]:
        """Have each rank digest a part of its live weights; see `DeltaWorkerExtension.delta_sums`."""
        return self._http.ranks("delta_sums", first, num_elements)

    def engines_have(self, sums: Sequence[Mapping[str, Any]], first: int, num_elements: int) -> bool:
        """Whether every data-parallel engine has these `sums` of the same part of its weights."""
        # How often each was updated is its own affair.
        keys = ("serving", "next", "sums", "computed", "unverified")
        expected = [only(rank, keys) for rank in sums]
        return self._http.engines_agree("delta_sums", (first, num_elements), expected)

    def init_weight_transfer(
        self,
        store: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        scratch: str | None = None,
        cache_bytes: int | None = None,
    ) -> bool:
        """Have the server open a store, and find out which of its versions it serves already.

        Generation goes on while the server waits for the store, and waits itself only while the model is
        traced and single weights are compared.

        Args:
            scratch: folder on the server's local disk, of its user alone, in which the ranks of a host share
                what they fetch; None for one in the system's folder for temporary files.
            cache_bytes: how much stays there unused, for other servers of the host; None for 4 GiB.

        Returns:
            Whether the store is open; False if we were to stop before it was.
        """
        # It may have been restarted, which is no reason to refuse: nothing is open there then.
        self._http.identify()
        info: dict[str, Any] = {"store": store}
        if storage_options:
            info["storage_options"] = dict(storage_options)
        if scratch is not None:
            info["scratch"] = scratch
        if cache_bytes is not None:
            info["cache_bytes"] = cache_bytes
        info |= {"prefix_cache": self._prefix_cache.value, **self._http.meant()}
        if not self._poll("delta_open", info, doing=f"opening {store}"):
            return False
        self._http.post("/init_weight_transfer_engine", {"init_info": info})
        return True

    def prefetch(self, version: int) -> None:
        """Have every rank fetch and verify a version while generation goes on; returns when they are done, or
        when we are to stop: what was begun goes on without us.

        What went wrong there, if anything did, is for `update_weights` to say.

        Raises:
            UsageError: `version` is no version's number; the server was not asked.
            ServerUnavailable: not done within the time for one call.
        """
        version = version_number(version)
        self._poll("delta_prefetch", version, doing=f"fetching version {version}", can_wait=True)

    def _poll(self, method: str, argument: Any, *, doing: str, can_wait: bool = False) -> bool:
        """Call a method of all ranks until each says that it is done, or we are to stop; return which.

        `can_wait`: the engine core can answer the call when that is so.
        """
        began, timeout_s = time.monotonic(), self._http.timeout_s
        while not self._stop.is_set():
            asked = time.monotonic()
            waits = {"wait_s": min(_WAIT_S, timeout_s / 2)} if can_wait and self._http.meant() else {}
            if self._is_done(method, argument, **waits):
                return True
            now = time.monotonic()
            spent_s = now - began
            if spent_s > timeout_s:
                raise ServerUnavailable(f"{self.url} is still {doing} after {timeout_s} s")
            # Where the server does not wait, each question waits for the engine's current step. So what takes
            # long is asked about seldom, and no end is noticed later than a tenth of the time.
            if now - asked < waits.get("wait_s", math.inf):
                self._stop.wait(min(max(spent_s / 10, 0.005), 0.5))
        return False

    def _is_done(self, method: str, argument: Any, **waits: float) -> bool:
        ranks = self._http.ranks(method, argument, **waits)
        if not all(rank["is_done"] for rank in ranks):
            return False
        done = [{"is_done": True}] * len(ranks)
        return self._http.count_engines(ranks) == 1 or self._http.engines_agree(method, (argument,), done)

    def start_weight_update(self) -> None:
        """Begin an update; one that is open begins anew."""
        self._http.post("/start_weight_update", {})

    def update_weights(
        self, version: int, switch: Switch | None = None, *, allow_rollback: bool = False
    ) -> None:
        """Have every rank fetch and verify a version, unless `prefetch` did; what is served stays as it is.

        Generation waits meanwhile, as it does during every call of this kind.
        If this raises, the update is closed and nothing changed. What is no version's number the server is
        not asked for; then an update that is open stays so.

        Args:
            switch: the mark that the server is to keep from here on; None to leave it as it is.
            allow_rollback: a server that requires signatures may go to an older version than it served.
        """
        info = self._update_info(version, switch, allow_rollback=allow_rollback)
        self._http.post("/update_weights", {"update_info": info | self._http.meant()})

    def _update_info(self, version: int, switch: Switch | None, *, allow_rollback: bool) -> dict[str, Any]:
        # vLLM's engine core takes the first, and empties caches in the call that writes the weights.
        info: dict[str, Any] = {
            "prefix_cache": self._prefix_cache.value,
            "version": version_number(version),
        }
        if switch is not None:
            info["switch"] = switch
        if allow_rollback:
            info["allow_rollback"] = True
        return info

    def _prove(self, version: int, begun: Switch | None, *, allow_rollback: bool) -> Switch:
        """Begin an update, and have every rank verify its version; return the mark that the server keeps:
        the one that was `begun`, or what it must be for generation to be paused afterwards as it is now.

        As of `update_weights` if this raises.
        """
        switch = begun or ("stay-paused" if self._pause_mode is PauseMode.NONE else None)
        if self._http.meant():
            # Each call waits for the engine's current step, so the engine core does all of it in one.
            info = self._update_info(version, switch, allow_rollback=allow_rollback)
            marks = get_args(Switch) if switch is None else (switch,)
            answer = self._http.core("delta_prove", info, answers=[{"switch": mark} for mark in marks])
            proved: Switch = answer["switch"]
            return proved
        switch = switch or ("stay-paused" if self.is_paused() else "resume")
        self.start_weight_update()
        self.update_weights(version, switch, allow_rollback=allow_rollback)
        return switch

    def finish_weight_update(self, weight_version: str) -> None:
        """Have every rank serve what it fetched, and label answers with `weight_version` from here on.

        If this raises, the update is closed, and the server serves the version that it did, or its status
        says that a version is half applied.
        """
        self._http.post("/finish_weight_update", {"weight_version": weight_version})

    def weight_version(self) -> str | None:
        """The label of answers, or None where vLLM is too old to have one."""
        try:
            answer = self._http.call("GET", "/weight_info")
        except NoSuchRoute:
            return None
        return str(answer["weight_version"])

    def set_weight_version(self, weight_version: str) -> None:
        """Label answers from here on, without touching weights; does nothing where vLLM has no labels."""
        with suppress(NoSuchRoute):
            self._http.post("/update_weight_version", {"new_version": weight_version})

    def keep(self, status: ServerStatus) -> bool:
        """Label answers with the version that is served, if they have another label; returns whether."""
        label, version = self.weight_version(), str(status.serving)
        if label in {None, version}:
            return False
        self.set_weight_version(version)
        return True

    def verify(self, store: Store) -> int:
        """Compare the live weights with the version that is served; see `verify_server`."""
        # It imports this module.
        from patchstore.follow.verify import verify_server

        return verify_server(store, self).manifest.version

    def is_paused(self) -> bool:
        """Whether generation is paused, by this client or another."""
        return bool(self._http.call("GET", "/is_paused")["is_paused"])

    def pause(self) -> None:
        """Stop all generation until `resume`. Requests under way go on then, unless the pause mode has them
        waited for, or aborted, now.
        """
        # What is half applied waits as it is, also where versions are applied without a pause.
        mode = PauseMode.KEEP if self._pause_mode is PauseMode.NONE else self._pause_mode
        if mode is PauseMode.KEEP and self._http.meant():
            # As below, without the 20 ms that vLLM waits after it.
            self._http.core("delta_pause")
        else:
            # Caches are for the write, which comes with the pause or without.
            self._http.post("/pause", {}, mode=mode.value, clear_cache="false")

    def resume(self) -> None:
        """Let generation go on. A mark is removed where the engine core is asked; see `end_switch`.

        Raises:
            StaleCaches: the last update could not empty a cache of what older weights computed, and it still
                cannot be emptied; the server stays paused.
        """
        if self._http.meant():
            self._http.core("delta_resume")
        else:
            self._http.post("/resume", {})

    # An update.

    def apply(
        self, version: int, status: ServerStatus | None = None, *, allow_rollback: bool = False
    ) -> UpdateTimings | None:
        """Bring the server to a version, whole.

        Generation goes on while the version is fetched and verified, and is paused, if at all, only while the
        weights are written and caches are emptied; a server that another client paused stays paused.
        The server is told first, so that a process killed on the way leaves a mark, and the next `apply` or
        `end_switch` ends what it began. Where the way is too far for the GPU's memory, the server is brought
        to versions in between first, each whole.

        Args:
            status: what the server said just now; None to ask it.
            allow_rollback: a server that requires signatures may go to an older version than it served.

        Returns:
            How long it took; None if it was stopped before it switched, or abandoned before it wrote.

        Raises:
            UsageError: `version` is no version's number; the server was not asked.
            Any error of the calls it makes. The server serves the version it did, or its status says that a
            version is half applied, that its engines differ, or that a switch is to be ended, and generation
            stays paused until then.
        """
        version = version_number(version)
        status = status or self.status()
        begun = status.switch
        if begun is not None and status.may_answer:
            self.end_switch(begun)
            begun = None
        began = time.monotonic()
        if status.prefetched != version:
            with span("stage"):
                self.prefetch(version)
        if self._stop.is_set():
            return None
        # Whatever the server's mark is to be, nothing is paused yet.
        self.switching = begun or "stay-paused"
        try:
            with span("prove"):
                switch = self._prove(version, begun, allow_rollback=allow_rollback)
        except PatchstoreError as exc:
            self.switching = begun
            is_far = status.serving is not None and version - status.serving > 1
            if not isinstance(exc, DeviceMemoryShort) or not is_far:
                raise
            assert status.serving is not None
            # Half of the way has half of the changes, and is a whole version too.
            between = (status.serving + version) // 2
            logger.warning(
                "%s: version %d is too far for the GPU's memory; to %d first", self.url, version, between
            )
            if self.apply(between, allow_rollback=allow_rollback) is None:
                return None
            return self.apply(version, allow_rollback=allow_rollback)
        self.switching = switch
        staged = time.monotonic()
        if self._stop.is_set():
            self._mark(begun)
            return None
        if not self._switch(switch, version):
            return None
        return UpdateTimings(stage_s=staged - began, apply_s=time.monotonic() - staged)

    def _switch(self, switch: Switch, version: int) -> bool:
        """Serve what was staged; False if it was abandoned before it wrote."""
        try:
            if switch == "resume":
                with span("pause"):
                    self.pause()
            if self.abandoned.is_set():
                # The pause may have come after the end of the switch.
                self._settle(switch)
                return False
            with span("write"):
                self.finish_weight_update(str(version))
        except PatchstoreError:
            with suppress(PatchstoreError):
                self._settle(switch)
            raise
        with span("resume"):
            self.end_switch(switch)
        return True

    def _settle(self, switch: Switch) -> None:
        """End a switch that came to nothing, unless that would let parts of two versions answer."""
        if self.status().may_answer:
            self.end_switch(switch)
        elif not self.is_paused():
            # It was to be written without a pause. It waits until an anchor, or the next version, is applied.
            self._mark("resume")
            self.pause()

    def end_switch(self, switch: Switch) -> None:
        """End a switch that any client began, and let generation go on. Repeating it is harmless.

        Raises:
            StaleCaches: a cache of what older weights computed could not be emptied, and still cannot;
                nothing is generated, and the switch is not ended.
        """
        # The engine core removes the mark in the call that resumes.
        is_unmarked = switch == "resume" and bool(self._http.meant())
        if switch == "resume":
            self.resume()
        if is_unmarked:
            self.switching = None
        else:
            self._mark(None)

    def _mark(self, switch: Switch | None) -> None:
        self.switching = switch or self.switching
        self._http.collective("delta_switch", switch, **self._http.meant())
        self.switching = switch

    def release(self) -> bool:
        """Let generation go on, although an `apply` on another thread does not end. Call from any thread.

        That `apply` writes nothing any more.

        Returns:
            False if the server may be left paused.
        """
        # First, so that nothing is written after the server was resumed.
        self.abandoned.set()
        switch = self.switching
        if switch is None:
            return True
        with (
            suppress(PatchstoreError),
            VllmServer(self.url, timeout_s=_RESCUE_S, headers=self.headers) as other,
        ):
            # A half-applied server must not answer requests.
            if other.status().may_answer:
                other.end_switch(switch)
                return True
        return False

    def close(self) -> None:
        driver = self._http.driver
        if driver is not None and self._has_backend:
            # So that another driver need not wait until this one is forgotten.
            with suppress(PatchstoreError):
                self._http.collective("delta_status", timeout_s=_GOODBYE_S, **driver.goodbye())
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
