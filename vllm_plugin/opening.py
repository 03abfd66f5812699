"""Open a store while generation goes on, if the request may have this server open it.

The network, the disk and the compiler of kernels may keep a worker waiting. What needs them runs on a thread;
only tracing the model and proving the map, or single weights, run on the worker's own thread, between two
batches.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias, TypeVar

import torch
from huggingface_hub import snapshot_download
from vllm.config import VllmConfig

from patchstore.codec.checkpoint import weight_files
from patchstore.errors import CorruptObject, SchemaMismatch, UsageError
from patchstore.read.host_cache import MAX_BYTES, HostCache
from patchstore.read.run import Run
from patchstore.signing.required import RequiredKeys
from patchstore.stores import Store, open_store
from vllm_plugin.live.identify import Contents
from vllm_plugin.live.rank_weights import RankWeights
from vllm_plugin.live.update import Updater, use_device
from vllm_plugin.live.weights import LiveWeights
from vllm_plugin.map.mapping import RankSlices, SliceSums, share
from vllm_plugin.map.provenance import Trace
from vllm_plugin.permission import KEYS, check_scratch, check_store, default_scratch, unquoted
from vllm_plugin.ranks import Failure, RanksFailed

T = TypeVar("T")

Together: TypeAlias = Callable[[Callable[[], Any]], list[Any]]
"""Runs a step in every rank and returns all results; raises `RanksFailed` in all if it failed in any."""


class Opening:
    """One store that is being opened, in one rank. All ranks call the same methods in the same order.

    `advance` until it returns True; then either `failures` says why the store cannot be opened, or take the
    `updater`, and have it adopt the `contents`. Nothing that is served changes before that.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        together: Together,
        prepare: Callable[[], LiveWeights],
        folder: Path | None,
        required: RequiredKeys | None = None,
        likely: int | None = None,
    ) -> None:
        """Begin with nothing. `prepare` checks the request, and that the server can be updated, and returns
        its weights; they were loaded from the checkpoint in `folder`, if that is still known, or are `likely`
        a version, of which the weights themselves are the proof.
        """
        self.given = given
        self.failures: list[Failure] = []
        """Of all ranks, once `advance` returned True."""
        self.updater: Updater | None = None
        self.live: LiveWeights | None = None
        self._together = together
        self._prepare = prepare
        self._folder = folder
        self._required, self._likely = required, likely
        self._traced: Trace
        self.contents: Contents | None = None
        """Of the version that is served, if that may be used; see `Updater.adopt`."""
        self._steps = self._run()
        self._waits: Future[Any] | None = None
        self._is_done = False
        self._reading = Lock()
        """Held while the live weights are read on the thread."""
        self._thread: ThreadPoolExecutor | None = None

    def advance(self, all_done: Callable[[bool], bool] | None = None) -> bool:
        """Run the steps that are due on this thread, and begin those that run beside it; True once none is
        left.

        `all_done` tells whether something is true of all ranks; None waits for what runs on the thread.
        """
        result: list[Any] | None = None
        while not self._is_done:
            try:
                if self._waits is not None:
                    if all_done is not None and not all_done(self._waits.done()):
                        return False
                    waits, self._waits = self._waits, None
                    result = self._together(waits.result)
                step = self._steps.send(result)
            except StopIteration:
                self._is_done = True
            except RanksFailed as failed:
                self.failures, self._is_done = failed.failures, True
            else:
                self._waits = self._on_thread(step)
        if self._thread is not None:
            self._thread.shutdown(wait=False)
        return True

    def close(self) -> None:
        """Give up, and let go of the store when what still runs on the thread has ended."""
        self._steps.close()
        self._is_done = True
        if self._waits is None:
            self._let_go()
        else:
            self._waits.add_done_callback(lambda _: self._let_go())

    def leave(self) -> None:
        """`close`, and return once nothing reads the live weights on the thread; waits for no network."""
        self.close()
        with self._reading:
            pass

    def _let_go(self) -> None:
        if self.updater is not None:
            self.updater.close()

    def _run(self) -> Generator[Callable[[], Any], list[Any] | None, None]:
        """Yield each step that may have to wait, and be sent its results in all ranks."""
        required = self._together(self._begin)
        self._together(lambda: _check_same_keys(required))
        yield self._open
        shares = self._together(self._share)
        slice_sums = yield lambda: self._survey(shares)
        assert slice_sums is not None
        found = yield lambda: self._weights.find(slice_sums, self._likely)
        assert found is not None
        version = found[0]
        are_read = yield lambda: self._read(version)
        assert are_read is not None
        if not all(are_read):
            # One host may have in its cache what was deleted from the store.
            self.contents = None

    def _begin(self) -> list[str] | None:
        """Check what was given; return the names of the keys that this rank requires."""
        self.live = self._prepare()
        check_store(self.given["store"], self.given.get("storage_options", {}))
        if self._required is not None and self.given.get("partial"):
            raise UsageError(
                "this server requires signatures, which cover whole payloads: leave out partial, which reads "
                "parts of them"
            )
        return None if self._required is None else self._required.names

    def _open(self) -> None:
        assert self.live is not None
        store, cache = reached(self.given)
        try:
            with unquoted(self.given["store"]):
                self.updater = Updater(
                    store,
                    self.live,
                    cache,
                    is_partial=self.given.get("partial", False),
                    required=self._required,
                )
            check_whole(self.updater.run)
        except BaseException:
            store.close()
            raise

    def _share(self) -> RankSlices:
        self._traced = self._weights.trace()
        return share(self._traced)

    def _survey(self, shares: Sequence[RankSlices]) -> SliceSums:
        """Use the map that comes of all ranks' shares, and digest what is served."""
        weights = self._weights
        with self._reading, torch.no_grad():
            if self._is_done:
                raise UsageError("the store was being opened when the weights' memory was given away")
            weights.follow(self._traced, shares)
            if self._folder is not None:
                weights.check_arrangement(self._folder)
            return weights.slice_sums()

    def _read(self, version: int | None) -> bool:
        self.contents = self._weights.read(version)
        return self.contents is not None

    @property
    def _weights(self) -> RankWeights:
        assert self.updater is not None
        return self.updater.weights

    def _on_thread(self, step: Callable[[], T]) -> Future[T]:
        if self._thread is None:
            assert self.live is not None
            self._thread = ThreadPoolExecutor(
                1, "patchstore-open", initializer=use_device, initargs=(self.live.device,)
            )
        return self._thread.submit(step)


def scratch_folder(given: Mapping[str, Any]) -> Path:
    """Return the folder of this host for downloads, as `init_info` has it, or its default."""
    folder = given.get("scratch")
    scratch = Path(folder) if folder else default_scratch()
    check_scratch(scratch)
    return scratch


def reached(given: Mapping[str, Any]) -> tuple[Store, HostCache]:
    """Open the store of an `init_info`, and this host's cache."""
    cache = HostCache(scratch_folder(given), max_bytes=given.get("cache_bytes", MAX_BYTES))
    return open_store(given["store"], **given.get("storage_options", {})), cache


def check_whole(run: Run) -> None:
    """Refuse a run of adapters."""
    if run.header.adapter is not None:
        raise SchemaMismatch(
            f"{run.store.url} is a run of {run.header.adapter}, and these are whole weights: start vllm "
            "serve with --enable-lora, and patchstore follow with --adapter NAME"
        )


def checkpoint_folder(config: VllmConfig) -> Path | None:
    """Return the folder of this host that vLLM has just loaded the weights from; None if there is none.

    Of a model of the Hub it is the snapshot of one commit. Later its branch may name another one.
    """
    if config.load_config.load_format not in {"auto", "hf", "safetensors"}:
        return None
    model = config.model_config.model
    if (folder := Path(model)).is_dir():
        return folder
    try:
        # Nothing is asked of the network.
        folder = Path(
            snapshot_download(
                model,
                revision=config.model_config.revision,
                cache_dir=config.load_config.download_dir,
                local_files_only=True,
            )
        )
        is_complete = all(each.is_file() for each in weight_files(folder))
    except (OSError, ValueError, CorruptObject):
        return None
    return folder if is_complete else None


def _check_same_keys(required: Sequence[list[str] | None]) -> None:
    """Refuse to serve from ranks of which some would take what others refuse."""
    if any(each != required[0] for each in required):
        raise UsageError(
            f"the ranks of this server require different keys: {required}. Set {KEYS} to the same keys "
            "everywhere, and give all hosts the same files"
        )
