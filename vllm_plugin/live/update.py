"""The updates of one rank of a server: the state machine of all updates, with staging ahead on a thread.

The engine calls the same steps in all ranks, and gathers between them what the ranks found. Each step ends
without waiting for another rank.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock

import torch

from patchstore.apply.update import Update
from patchstore.bucket import history
from patchstore.errors import UsageError, VersionNotFound
from patchstore.read.host_cache import HostCache
from patchstore.read.run import LEFT, Run
from patchstore.signing.required import RequiredKeys
from patchstore.stores.base import Store
from patchstore.support import host
from vllm_plugin.live.identify import Contents
from vllm_plugin.live.rank_weights import RankWeights, Staged
from vllm_plugin.live.weights import LiveWeights

logger = logging.getLogger(__name__)


class Updater(Update[Staged]):
    """Moves the live weights between versions; `weights` says what they are, and which version of a run.

    Before the first update all ranks follow a map, and `adopt` the version that they serve already, if any.
    """

    def __init__(
        self,
        store: Store,
        live: LiveWeights,
        cache: HostCache,
        *,
        is_partial: bool = False,
        required: RequiredKeys | None = None,
    ) -> None:
        """Open a run. `is_partial`: only what this rank needs of coded deltas is read."""
        header = history.read_header(store)
        if header is None:
            raise VersionNotFound(
                f"this server finds no run at {store.url}: is that the place, on its machine too, where the "
                "trainer publishes?"
            )
        self.background = ThreadPoolExecutor(
            1, thread_name_prefix="patchstore-prefetch", initializer=use_device, initargs=(live.device,)
        )
        run = Run(store, header, required, then=LEFT.format("open the store again"))
        self.weights = RankWeights(run, live, cache, self.background, is_partial=is_partial)
        super().__init__(run, self.weights)
        self._ahead: tuple[int, Future[Staged]] | None = None
        """A version that is being staged, or was, before `stage` was called for it."""
        self._turn = 0
        """Grows when what is staged on the thread becomes useless."""
        self._reading = Lock()
        """Held while live weights are read to stage a version, on whichever thread."""

    def adopt(self, contents: Contents | None) -> bool:
        """Take it that a version is served, and return whether it is; if not, no version is held."""
        self.held = None
        is_served = self.weights.adopt(contents)
        if is_served and contents is not None:
            self.held, self.half_applied = contents.manifest, False
        return is_served

    # Staging.

    def prefetch(self, version: int) -> bool:
        """Begin to stage a version on a thread, or see how that stands; returns at once.

        True if nothing is under way any more, so that `stage` will not be the one to fetch. `stage` also says
        what went wrong.
        """
        if self.staged is not None:
            if self.staged.manifest.version == version:
                return True
            # The driver that staged it did not come back to finish.
            self.drop()
        if self._ahead is not None and (self._ahead[0] == version or not self._ahead[1].done()):
            return self._ahead[1].done()
        self.abandon()
        self._ahead = version, self.background.submit(self._fetched, version, self._turn)
        return False

    def on_fetched(self, version: int, call: Callable[[], None]) -> bool:
        """Have something called once when `prefetch` of a version has ended; False if none was begun."""
        if self._ahead is None or self._ahead[0] != version:
            return False
        self._ahead[1].add_done_callback(lambda _: call())
        return True

    def abandon(self) -> None:
        """Drop what `prefetch` began. Nothing reads the live weights on a thread from here on.

        Does not wait for the network: a download under way ends on its own, and its result is dropped.
        """
        with self._reading:
            self._turn += 1
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not ahead[1].cancel():
            ahead[1].add_done_callback(self._release_result)

    def stage(self, version: int) -> None:
        """Fetch a version and translate it, unless `prefetch` did. What was staged before is dropped."""
        if self.staged is not None and (version, self.version) == (
            self.staged.manifest.version,
            self.staged.plan.held,
        ):
            return
        self.drop()
        found, ahead = None, self._ahead
        if ahead is not None and ahead[0] == version:
            try:
                found = ahead[1].result()
            except BaseException:
                # After an interrupt the prefetch still ends, and no other code would release its result.
                self.abandon()
                raise
            self._ahead = None
            if found.plan.held != self.version:
                self.weights.release(found)
                found = None
        self.abandon()
        self.put(found or self._fetched(version, self._turn))

    @host.asked("staging an update")
    def _fetched(self, version: int, turn: int) -> Staged:
        try:
            return self.prepare(version, partial(self._read_lock, version, turn))
        except VersionNotFound as exc:
            # The caller may have seen the version in another store.
            there = f"{self.run.store.url} is the store that this server has open"
            raise VersionNotFound(f"{exc}; {there}") from exc

    @contextmanager
    def _read_lock(self, version: int, turn: int) -> Iterator[None]:
        with self._reading:
            if turn != self._turn:
                raise UsageError(
                    f"version {version} was still being fetched when the weights or the store were "
                    "replaced; stage it again"
                )
            yield

    def _release_result(self, future: Future[Staged]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.weights.release(future.result())

    def close(self) -> None:
        """Close the store, on a thread, when what is being fetched has ended. `held` stays as it is."""
        self.abandon()
        self.drop()
        with suppress(RuntimeError):  # Closed already.
            self.background.submit(self.run.store.close)
        self.background.shutdown(wait=False)


def use_device(device: torch.device) -> None:
    """A new thread begins on the first device, whatever its process uses."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
