"""A vLLM server that runs the `delta` backend, and how it is brought to a version.

An update is three calls, in which vLLM generates nothing. What takes long, fetching and verifying a version,
is done on a thread before them.
"""

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Event

from patchstore.errors import DeviceMemoryShort, PatchstoreError
from patchstore.serve.settings import DEFAULTS, PauseMode, PrefixCache
from patchstore.serve.vllm_calls import VllmCalls
from patchstore.serve.vllm_protocol import ServerStatus, Switch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimings:
    """How long the two halves of an update took, in seconds."""

    stage_s: float
    """Fetching and verifying; generation went on, but for its last part."""
    apply_s: float
    """From the pause, if any, until generation went on with the new weights."""


class VllmServer(VllmCalls):
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
        stop: Event | None = None,
    ) -> None:
        """Connect lazily.

        Args:
            timeout_s: for one call; must be longer than fetching an anchor takes.
            stop: while this is set, `apply` begins no switch. One that has begun is ended.
        """
        super().__init__(
            url, timeout_s=timeout_s, pause_mode=pause_mode, prefix_cache=prefix_cache, stop=stop
        )
        self.switching: Switch | None = None
        """The switch that this client has begun and not ended. May be read from other threads."""
        self.abandoned = Event()
        """Set by a thread that is about to end that switch: `apply` then writes nothing any more."""

    def apply(
        self, version: int, status: ServerStatus | None = None, *, allow_rollback: bool = False
    ) -> UpdateTimings | None:
        """Bring the server to a version, whole.

        Generation goes on while the version is fetched and verified, and is paused, if at all, only while the
        weights are written and the prefix cache is reset; a server that another client paused stays paused.
        The server is told first, so that a process killed on the way leaves a mark, and the next `apply` or
        `end_switch` ends what it began. Where the way is too far for the GPU's memory, the server is brought
        to versions in between first, each whole.

        Args:
            status: what the server said just now; None to ask it.
            allow_rollback: a server that requires signatures may go to an older version than it served.

        Returns:
            How long it took; None if it was stopped before it switched, or abandoned before it wrote.

        Raises:
            Any error of the calls it makes. The server serves the version it did, or its status says that a
            version is half applied, that its engines differ, or that a switch is to be ended, and generation
            stays paused until then.
        """
        status = status or self.status()
        begun = status.switch
        if begun is not None and status.may_answer:
            self.end_switch(begun)
            begun = None
        began = time.monotonic()
        if status.prefetched != version:
            self.prefetch(version)
        if self._stop.is_set():
            return None
        switch = begun
        if switch is None:
            is_left = self._pause_mode is PauseMode.NONE or self.is_paused()
            switch = "stay-paused" if is_left else "resume"
        self.start_weight_update()
        self.switching = switch
        try:
            self.update_weights(version, switch, allow_rollback=allow_rollback)
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
                self.pause()
            if self.abandoned.is_set():
                # The pause may have come after the end of the switch.
                self._settle(switch)
                return False
            self.finish_weight_update(str(version))
        except PatchstoreError:
            with suppress(PatchstoreError):
                self._settle(switch)
            raise
        # A pause of ours has reset the cache, and nothing was computed since; or the write renewed prefixes.
        is_reset = switch == "resume" or self._prefix_cache is PrefixCache.VERSION
        self.end_switch(switch, is_reset=is_reset)
        return True

    def _settle(self, switch: Switch) -> None:
        """End a switch that came to nothing, unless that would let parts of two versions answer."""
        if self.status().may_answer:
            self.end_switch(switch)
        elif not self.is_paused():
            # It was to be written without a pause. It waits until an anchor, or the next version, is applied.
            self._mark("resume")
            self.pause()

    def end_switch(self, switch: Switch, *, is_reset: bool = False) -> None:
        """End a switch that any client began: reset or renew prefixes, and let generation go on.

        Repeating it is harmless.

        Args:
            is_reset: the prefix cache was reset, with the server paused, and it was not resumed since; or
                prefixes were renewed.
        """
        if self._prefix_cache is PrefixCache.RESET and not is_reset:
            self.reset_prefix_cache()
        if self._prefix_cache is PrefixCache.VERSION and not is_reset:
            # Another client may have written without renewing them.
            self.renew_prefixes()
        if switch == "resume":
            self.resume()
        self._mark(None)

    def _mark(self, switch: Switch | None) -> None:
        self.switching = switch or self.switching
        self._http.collective("delta_switch", switch)
        self.switching = switch
