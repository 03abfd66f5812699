"""The calls that a vLLM server with the `delta` backend answers over HTTP, each by itself.

The routes are vLLM's own. It serves them with `VLLM_SERVER_DEV_MODE=1`. `vllm_server` makes these calls in
the order of an update.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Event
from types import TracebackType
from typing import Any, Self

from patchstore.errors import EnginesDiffer, ServerUnavailable
from patchstore.format.records import Manifest
from patchstore.serve.settings import DEFAULTS, PauseMode, PrefixCache
from patchstore.serve.vllm_configuration import Configuration, parsed
from patchstore.serve.vllm_http import Connection
from patchstore.serve.vllm_protocol import (
    SAME_IN_ENGINES,
    NoSuchRoute,
    ServerStatus,
    Switch,
    fold,
    one_line,
    only,
    version_of,
)

logger = logging.getLogger(__name__)


class VllmCalls:
    """The calls of one server. They block; use from one thread.

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
        stop: Event | None = None,
    ) -> None:
        """Connect lazily.

        Args:
            timeout_s: for one call; must be longer than fetching an anchor takes.
            stop: while this is set, no call waits for what takes long.
        """
        self._pause_mode, self._prefix_cache = PauseMode(pause_mode), PrefixCache(prefix_cache)
        self._stop = stop or Event()
        self._http = Connection(url, timeout_s=timeout_s)
        self.url = self._http.url
        self._has_backend = False
        """Ranks answered when they were last asked for their status."""
        self._num_engines: int | None = None
        self._num_failures = 0
        """Failed calls when the engines were counted."""
        self._has_pause = True
        """Until the server said otherwise: patchstore's plugin in its engine core pauses it."""

    def configuration(self) -> Configuration | None:
        """Ask how the server was started; None where it does not say so in a form that is known here.

        Its ranks hear nothing of this. The first answer can take seconds, as vLLM looks at its machine.
        """
        return parsed(self._http.request("GET", "/server_info", params={"config_format": "json"}))

    def check_backend(self) -> None:
        """Refuse a server whose ranks cannot answer, without asking them.

        Of several ranks that fail vLLM hears the first, and takes what the others say for answers to later
        calls, until it is restarted. A server that does not tell how it was started is let pass.

        Raises:
            ServerUnavailable: it was started without what is named.
        """
        config = self.configuration()
        if config is not None and config.missing:
            if any(option.kind == "dev-mode-off" for option in config.missing):
                self._check_vllm()
            raise ServerUnavailable(
                "; ".join(f"{self.url} {option.found}: {option.advice}" for option in config.missing)
            )

    def _check_vllm(self) -> None:
        """Tell a server that is not vLLM from one whose routes are switched off.

        Raises:
            ServerUnavailable: it does not say which vLLM it is.
        """
        answer = self._http.request("GET", "/version")
        if version_of(answer) is None:
            raise ServerUnavailable(
                f"GET {self.url}/version answered HTTP {answer.status_code}: {one_line(answer.text)!r:.80}, "
                "unlike vLLM; give vLLM's own address, such as http://127.0.0.1:8000"
            )

    def status(self, *, desired: Manifest | None = None) -> ServerStatus:
        """Ask every rank what it serves, and all data-parallel engines whether that is true of them too.

        The first time, and whenever it failed before, the server is asked first how it was started; see
        `check_backend`. With `PrefixCache.VERSION` it is refused unless it can do that.

        Args:
            desired: a version that the server should serve next. If the server has a store of that run open,
                and no update is under way there, each rank begins to fetch the version in the same call.
        """
        is_new = not self._has_backend
        if is_new:
            self.check_backend()
            self._has_pause = True
        # What fails may come back as another server, at the same address.
        self._has_backend = False
        if desired is None:
            ranks = self._http.every_rank("delta_status")
        else:
            ranks = self._http.every_rank("delta_prefetch", desired.version, desired.run_id)
        if is_new and self._prefix_cache is PrefixCache.VERSION:
            self._http.every_rank("delta_prefixes")
        self._has_backend = True
        if not all(rank["initialised"] for rank in ranks):
            # As after a restart that no call noticed.
            self._num_engines = None
        num_engines = self._count_engines(ranks)
        differ = is_other_run = False
        if num_engines > 1:
            differ = not self._engines_agree(
                "delta_status", (), [only(rank, SAME_IN_ENGINES) for rank in ranks]
            )
        if differ:
            run = [only(rank, ("initialised", "run_id")) for rank in ranks]
            is_other_run = not self._engines_agree("delta_status", (), run)
        found = fold(ranks, num_engines=num_engines, engines_differ=differ, is_other_run=is_other_run)
        is_done = desired is not None and num_engines == 1 and all(rank["is_done"] for rank in ranks)
        return replace(found, prefetched=desired.version) if desired is not None and is_done else found

    def fingerprint(self) -> list[dict[str, str]]:
        """Return each rank's digests of its live parameters and buffers; reads all of them."""
        return self._http.every_rank("delta_fingerprint")

    def _count_engines(self, ranks: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of data-parallel engines. It is asked once, and again after a failed call."""
        if self._num_engines is None or self._num_failures != self._http.num_failures:
            # An engine does not know of its siblings; the front does.
            answer = self._http.call("GET", "/get_world_size", params={"include_dp": "true"})
            self._num_engines = int(answer["world_size"]) // len(ranks)
            self._num_failures = self._http.num_failures
        return self._num_engines

    def _engines_agree(self, method: str, args: Sequence[Any], expected: Sequence[Mapping[str, Any]]) -> bool:
        """Whether every engine answers so, rank by rank; see `DeltaWorkerExtension.delta_expect`."""
        try:
            self._http.collective("delta_expect", method, list(args), list(expected))
        except EnginesDiffer as exc:
            logger.info("%s", exc)
            return False
        return True

    def sums(self, first: int, num_elements: int) -> list[dict[str, Any]]:
        """Have each rank digest a part of its live weights; see `DeltaWorkerExtension.delta_sums`."""
        return self._http.every_rank("delta_sums", first, num_elements)

    def engines_have(self, sums: Sequence[Mapping[str, Any]], first: int, num_elements: int) -> bool:
        """Whether every data-parallel engine has these `sums` of the same part of its weights."""
        # How often each was updated is its own affair.
        keys = ("serving", "next", "sums", "computed", "unverified")
        return self._engines_agree("delta_sums", (first, num_elements), [only(rank, keys) for rank in sums])

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
        info: dict[str, Any] = {"store": store}
        if storage_options:
            info["storage_options"] = dict(storage_options)
        if scratch is not None:
            info["scratch"] = scratch
        if cache_bytes is not None:
            info["cache_bytes"] = cache_bytes
        if not self._poll("delta_open", info, doing=f"opening {store}"):
            return False
        self._http.post("/init_weight_transfer_engine", {"init_info": info})
        return True

    def prefetch(self, version: int) -> None:
        """Have every rank fetch and verify a version while generation goes on; returns when they are done, or
        when we are to stop: what was begun goes on without us.

        What went wrong there, if anything did, is for `update_weights` to say.

        Raises:
            ServerUnavailable: not done within the time for one call.
        """
        self._poll("delta_prefetch", version, doing=f"fetching version {version}")

    def _poll(self, method: str, argument: Any, *, doing: str) -> bool:
        """Call a method of all ranks until each says that it is done, or we are to stop; return which."""
        began, timeout_s = time.monotonic(), self._http.timeout_s
        while not self._stop.is_set():
            if self._is_done(method, argument):
                return True
            spent_s = time.monotonic() - began
            if spent_s > timeout_s:
                raise ServerUnavailable(f"{self.url} is still {doing} after {timeout_s} s")
            # Each question waits for the engine's current step, so what takes long is asked about seldom, and
            # no end is noticed later than a tenth of the time.
            self._stop.wait(min(max(spent_s / 10, 0.005), 0.5))
        return False

    def _is_done(self, method: str, argument: Any) -> bool:
        ranks = self._http.every_rank(method, argument)
        if not all(rank["is_done"] for rank in ranks):
            return False
        done = [{"is_done": True}] * len(ranks)
        return self._count_engines(ranks) == 1 or self._engines_agree(method, (argument,), done)

    def start_weight_update(self) -> None:
        """Begin an update; one that is open begins anew."""
        self._http.post("/start_weight_update", {})

    def update_weights(
        self, version: int, switch: Switch | None = None, *, allow_rollback: bool = False
    ) -> None:
        """Have every rank fetch and verify a version, unless `prefetch` did; what is served stays as it is.

        Generation waits meanwhile, as it does during every call of this kind.
        If this raises, the update is closed and nothing changed.

        Args:
            switch: the mark that the server is to keep from here on; None to leave it as it is.
            allow_rollback: a server that requires signatures may go to an older version than it served.
        """
        info: dict[str, Any] = {"version": version} | ({} if switch is None else {"switch": switch})
        if allow_rollback:
            info["allow_rollback"] = True
        if self._prefix_cache is PrefixCache.VERSION:
            # vLLM's engine core takes it, and renews prefixes in the call that writes the weights.
            info["new_prefixes"] = True
        self._http.post("/update_weights", {"update_info": info})

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

    def is_paused(self) -> bool:
        """Whether generation is paused, by this client or another."""
        return bool(self._http.call("GET", "/is_paused")["is_paused"])

    def pause(self) -> None:
        """Stop all generation until `resume`. Requests under way go on then, unless the pause mode has them
        waited for, or aborted, now.
        """
        # What is half applied waits as it is, also where versions are applied without a pause.
        mode = PauseMode.KEEP if self._pause_mode is PauseMode.NONE else self._pause_mode
        clears = self._prefix_cache is PrefixCache.RESET
        # Of several data-parallel engines the first one's answer is heard, and another may lack the plugin.
        if mode is PauseMode.KEEP and self._has_pause and self._num_engines == 1:
            # As below, without the 20 ms that vLLM waits after it.
            if (declined := self._http.declined("delta_pause", clears)) is None:
                return
            self._has_pause = False
            logger.info("%s is paused by /pause, which takes 20 ms longer: %s", self.url, declined)
        # vLLM 0.26 to 0.33 forget prefixes, those of running requests too, and images, which older weights
        # encoded. They do so in every mode, although the help of 0.32 says that `keep` ignores this.
        self._http.post("/pause", {}, mode=mode.value, clear_cache="true" if clears else "false")

    def resume(self) -> None:
        """Let generation go on."""
        self._http.post("/resume", {})

    def renew_prefixes(self) -> None:
        """Let later requests reuse no keys and values that were computed so far; running ones keep theirs."""
        self._http.every_rank("delta_prefixes", True)

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of all prefixes; requests under way compute theirs again."""
        # Without preempting them vLLM refuses, and later requests would reuse what older weights computed.
        answer = self._http.post("/reset_prefix_cache", {}, reset_running_requests="true")
        if not answer["success"]:
            raise ServerUnavailable(f"{self.url} did not reset its prefix cache: blocks are in use")

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
