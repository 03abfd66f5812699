"""The updates of one rank of a server: the state machine of all updates, with staging ahead on a thread.

The engine calls the same steps in all ranks, and gathers between them what the ranks told. Each step ends
without waiting for another rank.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from typing import Any

import torch

from patchstore.apply.update import Reading, Update
from patchstore.errors import (
    StateMismatch,
    Unsigned,
    UsageError,
    VersionNotFound,
    VersionRetired,
    WrongSignature,
)
from patchstore.format import history
from patchstore.format.records import Schema
from patchstore.read.host_cache import HostCache
from patchstore.signing.required import RequiredKeys, checks
from patchstore.stores.base import Store
from patchstore.support import host
from vllm_plugin.identify import Contents, find_version, nearly_the_head, read_contents, sums_array
from vllm_plugin.mapping import RankSlices, SliceSums, StagedSums, WeightMap
from vllm_plugin.rank_weights import RankWeights
from vllm_plugin.staged_update import Staged
from vllm_plugin.trace import Trace
from vllm_plugin.weights import LiveWeights

logger = logging.getLogger(__name__)


class Updater(Update[Staged]):
    """Moves the live weights between versions.

    Before the first update, all ranks `trace`, `follow` what they found, and `adopt` the version that they
    serve already, if any.
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
        """Open a run.

        Args:
            is_partial: whether to read only what this rank needs of coded deltas.
            required: keys, one of which must have signed each version that is used.

        Raises:
            VersionNotFound: the store holds no run.
        """
        header = history.read_header(store)
        if header is None:
            raise VersionNotFound(
                f"this server finds no run at {store.url}: is that the place, on its machine too, where the "
                "trainer publishes?"
            )
        self._background = ThreadPoolExecutor(
            1, thread_name_prefix="patchstore-prefetch", initializer=use_device, initargs=(live.device,)
        )
        self.weights = RankWeights(
            store,
            header.schema,
            live,
            cache,
            self._background,
            is_partial=is_partial,
            check=checks(required, store, header),
        )
        super().__init__(store, header, self.weights, reopen="open the store again", required=required)
        self._live = live
        self._cache = cache
        self._ahead: tuple[int, Future[Staged]] | None = None
        """A version that is being staged, or was, before `stage` was called for it."""
        self._turn = 0
        """Grows when what is staged on the thread becomes useless."""
        self._reading = Lock()
        """Held while live weights are read to stage a version, on whichever thread."""

    @property
    def schema(self) -> Schema:
        return self.header.schema

    @property
    def map(self) -> WeightMap:
        return self._live.map

    @property
    def replaces_all(self) -> bool:
        """Whether what is staged starts from an anchor, so that only the weights as written can verify it."""
        return self.staged is not None and self.staged.plan.anchor is not None

    # Opening: the map, and the version that is served already.

    def trace(self) -> Trace:
        """Trace the models' loaders. Raises as `LiveWeights.trace`."""
        return self._live.trace(self.schema)

    def follow(self, traced: Trace, shares: Sequence[RankSlices]) -> None:
        """Use the map that comes of all ranks' shares."""
        self._live.follow(WeightMap(self.schema, traced, shares))

    def slice_sums(self) -> SliceSums:
        """Digest all that this rank serves of the run."""
        return self._live.slice_sums(sorted(self.map.regions))

    def check_map(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Compare some elements of the live weights with the checkpoint that vLLM loaded them from.

        Raises:
            UsageError: weights are not where the loader puts them: they were rearranged since.
        """
        if wrong := self._live.misplaced(loaded):
            raise UsageError(
                f"{len(wrong)} tensors are not where vLLM's loader put them, such as {wrong[0]!r}. Either "
                "they were rearranged after loading and cannot be updated in place: choose backends "
                "(--moe-backend, --attention-backend) that serve bf16 weights as they are loaded. Or the "
                "checkpoint's files are others than when the server started: start it again"
            )

    def find(self, slice_sums: Sequence[SliceSums]) -> int | None:
        """Return the version that all ranks together serve, or None."""
        try:
            sums = self.map.total(slice_sums)
        except StateMismatch as exc:
            logger.warning("these weights are no version of the run: %s", exc)
            return None
        # What is served for a name that has no tensor of its own is known too.
        sums |= {name: sums[other] for name, other in self._live.dropped.items() if other in sums}
        found = find_version(self.store, self.schema, sums, self._cache)
        if found is None and (told := nearly_the_head(self.store, self.schema, sums, self._cache)):
            logger.warning(told)
        return found

    def read(self, version: int | None) -> Contents | None:
        """Read what `adopt` needs of a version.

        None if the version is, if no required key has signed it, or if it is retired and payloads are gone.

        Raises:
            SchemaMismatch: the version has two tensors where this server has one.
        """
        if version is None:
            return None
        wanted = self.map.computed | self.map.partial | self._live.cut
        try:
            contents = read_contents(self.store, self.schema, version, wanted, self._cache, self.check_signed)
        except (Unsigned, WrongSignature, VersionRetired) as exc:
            logger.warning("these are the weights of version %d, which is not used: %s", version, exc)
            return None
        self.weights.check_dropped(contents.manifest, sums_array(self.schema, contents.recorded))
        return contents

    def adopt(self, contents: Contents | None) -> bool:
        """Take it that a version is served. Raises as `RankWeights.adopt`.

        Returns:
            Whether it is; if not, the live weights are as before, and no version is held.
        """
        self.held = None
        is_served = self.weights.adopt(contents)
        if is_served and contents is not None:
            self.held, self.half_applied = contents.manifest, False
        return is_served

    # Staging.

    def prefetch(self, version: int) -> bool:
        """Begin to stage a version on a thread, or see how that stands; returns at once.

        What goes wrong is not said here, but by `stage`.

        Returns:
            Whether nothing is under way any more, so that `stage` will not be the one to fetch.
        """
        if self.staged is not None:
            if self.staged.manifest.version == version:
                return True
            # The driver that staged it did not come back to finish.
            self.drop()
        if self._ahead is not None and (self._ahead[0] == version or not self._ahead[1].done()):
            return self._ahead[1].done()
        self.abandon()
        self._ahead = version, self._background.submit(self._prepare, version, self._turn)
        return False

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
        """Fetch a version and translate it, unless `prefetch` did. What was staged before is dropped.

        Raises:
            As `Update.plan` and `RankWeights.stage`.
        """
        if self.staged is not None and (version, self.version) == (
            self.staged.manifest.version,
            self.staged.plan.held,
        ):
            return
        self.drop()
        found, ahead = None, self._ahead
        if ahead is not None and ahead[0] == version:
            self._ahead = None
            found = ahead[1].result()
            if found.plan.held != self.version:
                self.weights.release(found)
                found = None
        self.abandon()
        self.put(found or self._prepare(version, self._turn))

    @host.asked("staging an update")
    def _prepare(self, version: int, turn: int) -> Staged:
        try:
            return self.prepare(version, Reading(partial(self._read_lock, version, turn)))
        except VersionNotFound as exc:
            # The caller may have seen the version in another store.
            raise VersionNotFound(f"{exc}; {self.store.url} is the store that this server has open") from exc

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

    def changes(self) -> StagedSums:
        """Digest the elements that are staged, as they are on this rank and as they would be."""
        assert self.staged is not None
        return self.weights.changes(self.staged)

    # What is served.

    def check_served(self, slice_sums: Sequence[SliceSums]) -> None:
        """Check that all ranks together still serve the held version. Raises as `RankWeights`."""
        assert self.version is not None
        self.weights.check_served(slice_sums, self.version)

    def verify_written(self, slice_sums: Sequence[SliceSums]) -> None:
        """Check that all ranks together serve what `apply` wrote. Raises as `RankWeights`."""
        assert self.staged is not None
        began = time.monotonic()
        self.weights.verify_written(self.staged, slice_sums)
        self.timings["verify"] = time.monotonic() - began

    def sums(self, first: int, num_elements: int) -> dict[str, Any]:
        """Digest a part of what this rank serves; see `DeltaWorkerExtension.delta_sums`."""
        mapped, found, spent, at = self.map, {}, 0, first
        while at < len(self.schema.tensors) and spent < num_elements:
            spent += sum(
                region.num_elements for _, region in mapped.regions.get(self.schema.tensors[at].name, ())
            )
            at += 1
        names = [spec.name for spec in self.schema.tensors[first:at]]
        for name, slices in self._live.slice_sums(names).items():
            if name in mapped.proved:
                found[name] = [
                    [[view.offset, *view.shape, *view.strides], sums.hex()] for view, sums in slices
                ]
        return {
            "serving": self.version,
            "num_applied": self.num_applied,
            "next": at if at < len(self.schema.tensors) else None,
            "sums": found,
            "computed": sorted(mapped.computed),
            "unverified": sorted(mapped.partial | mapped.absent),
        }

    def close(self) -> None:
        """Close the store, on a thread, when what is being fetched has ended. `held` stays as it is."""
        self.abandon()
        self.drop()
        with suppress(RuntimeError):  # Closed already.
            self._background.submit(self.store.close)
        self._background.shutdown(wait=False)


def use_device(device: torch.device) -> None:
    """A new thread begins on the first device, whatever its process uses."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
