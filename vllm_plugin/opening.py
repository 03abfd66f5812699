"""Open a store while generation goes on, if the request may have this server open it.

The sender of a request chooses the store, and the operator sets the limits. A request must not send this
server's own credentials to a place that the request names, nor read or make folders anywhere on its machine.

The network, the disk and the compiler of kernels may keep a worker waiting. What needs them runs on a thread;
only tracing the model and proving single weights run on the worker's own thread, between two batches.
"""

import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote

import torch
from huggingface_hub import snapshot_download
from vllm.config import VllmConfig

from patchstore.codec.checkpoint import weight_files
from patchstore.errors import CorruptObject, DataError, SchemaMismatch, UsageError
from patchstore.read.host_cache import MAX_BYTES, HostCache
from patchstore.signing.required import RequiredKeys
from patchstore.stores import open_store
from vllm_plugin.live.identify import Contents
from vllm_plugin.live.rank_weights import RankWeights
from vllm_plugin.live.update import Updater, use_device
from vllm_plugin.live.weights import LiveWeights
from vllm_plugin.map.mapping import RankSlices, SliceSums, share
from vllm_plugin.map.provenance import Trace
from vllm_plugin.ranks import Failure, RanksFailed

STORES = "PATCHSTORE_ALLOWED_STORES"
"""Environment variable: URLs and folders, with commas between. Only what is there or below may be opened."""
ENDPOINTS = "PATCHSTORE_ALLOWED_ENDPOINTS"
"""Environment variable: further URLs that this server's own credentials may be sent to."""
SCRATCH = "PATCHSTORE_ALLOWED_SCRATCH"
"""Environment variable: folders below which a request may have temporary files."""
KEYS = "PATCHSTORE_REQUIRED_KEYS"
"""Environment variable: PEM files with public keys. Only versions that one of them has signed are applied."""

_OWN_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "HF_ENDPOINT")
"""Environment variables that say where this server's credentials belong."""
_KNOWN = frozenset({"s3", "s3a", "hf", "memory", "file", ""})
"""Protocols of which the options are understood here."""
_PLACES = frozenset({"endpoint", "endpoint_url", "gateway_url", "proxies", "proxy"})
"""Options, at any depth, that say where requests are sent."""


def check_store(url: str, options: Mapping[str, Any]) -> None:
    allowed = _listed(STORES)
    protocol, separator, _ = url.partition("://")
    protocol = protocol.lower() if separator else ""
    if allowed and not any(_is_below(url, each) for each in allowed):
        raise UsageError(f"this server may open only what was allowed when it was started, with {STORES}")
    if not allowed and protocol not in _KNOWN:
        raise UsageError(
            f"this server opens {protocol}:// stores only if they were allowed when it was started: set "
            f"{STORES} to the URL"
        )
    own = {each.rstrip("/") for name in _OWN_ENDPOINTS if (each := os.environ.get(name))}
    may_have = own | {each.rstrip("/") for each in _listed(ENDPOINTS)}
    for place in _places(options):
        if place.rstrip("/") not in may_have and not _has_credentials(protocol, options):
            raise UsageError(
                "an endpoint was given without credentials, and this server does not send its own there: "
                f"give them with it, or set {ENDPOINTS} to the endpoint where the server is started"
            )


def required_keys() -> RequiredKeys | None:
    """Read the keys that this server requires, when it starts; None if the operator named none.

    No request can change them. If the variable names no key, or a file that is none, the server must not
    start: it would serve versions that no one signed.
    """
    if os.environ.get(KEYS) is None:
        return None
    paths = _listed(KEYS)
    if not paths:
        raise UsageError(f"{KEYS} is set but names no key: name PEM files with public keys, or unset it")
    try:
        return RequiredKeys.of(paths)
    except UsageError as exc:
        raise UsageError(f"{KEYS}: {exc}") from exc


def check_scratch(folder: Path) -> None:
    """Refuse a folder for temporary files that is neither below the system's own nor allowed."""
    roots = [tempfile.gettempdir(), "/dev/shm", *_listed(SCRATCH)]  # noqa: S108 # nosec B108 # a folder of this user
    if not any(_is_below(os.fspath(folder), each) for each in roots):
        raise UsageError(
            f"scratch must be below {tempfile.gettempdir()} or /dev/shm, or in a folder that was allowed "
            f"when this server was started, with {SCRATCH}"
        )


@contextmanager
def unquoted(url: str) -> Iterator[None]:
    """Keep what is in a folder's files out of errors, unless the folder was allowed."""
    try:
        yield
    except DataError as exc:
        if "://" in _path(url) or _listed(STORES):
            raise
        raise type(exc)(
            f"{url} has no run that can be read; `patchstore doctor {url}` on that machine says what is wrong"
        ) from None


def _listed(name: str) -> list[str]:
    return [each.strip() for each in os.environ.get(name, "").split(",") if each.strip()]


def _is_below(url: str, root: str) -> bool:
    url, root = (_path(each) for each in (url, root))
    if "://" in url or "://" in root:
        base = root.rstrip("/")
        parts = url.partition("://")[2].split("/")
        return (url == base or url.startswith(f"{base}/")) and not {".", ".."} & {*parts}
    one, other = (Path(each).expanduser().resolve() for each in (url, root))
    return one == other or other in one.parents


def _path(url: str) -> str:
    """The path of a file's URL, with what is escaped in it; all else as it is."""
    return unquote(url.removeprefix("file://")) if url.startswith("file://") else url


def _places(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if name in _PLACES and value is not None:
            yield from (str(each) for each in value.values()) if isinstance(value, Mapping) else [str(value)]
        elif isinstance(value, Mapping):
            yield from _places(value)


def _has_credentials(protocol: str, options: Mapping[str, Any]) -> bool:
    """Whether a store takes its credentials, or their absence, from the options alone."""
    if protocol == "hf":
        return isinstance(options.get("token"), str) and bool(options["token"])
    return options.get("anon") is True or (bool(options.get("key")) and bool(options.get("secret")))


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
    ) -> None:
        """Begin with nothing. `prepare` checks the request, and that the server can be updated, and returns
        its weights; they were loaded from the checkpoint in `folder`, if that is still known.
        """
        self.given = given
        self.failures: list[Failure] = []
        """Of all ranks, once `advance` returned True."""
        self.updater: Updater | None = None
        self.live: LiveWeights | None = None
        self._together = together
        self._prepare = prepare
        self._folder = folder
        self._required = required
        self._traced: Trace
        self.contents: Contents | None = None
        """Of the version that is served, if that may be used; see `Updater.adopt`."""
        self._steps = self._run()
        self._waits: Future[Any] | None = None
        self._is_done = False
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
        found = yield lambda: self._weights.find(slice_sums)
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
        url, folder = self.given["store"], self.given.get("scratch")
        scratch = Path(folder or Path(gettempdir()) / f"patchstore-{os.geteuid()}")
        check_scratch(scratch)
        cache = HostCache(scratch, max_bytes=self.given.get("cache_bytes", MAX_BYTES))
        store = open_store(url, **self.given.get("storage_options", {}))
        try:
            with unquoted(url):
                self.updater = Updater(
                    store,
                    self.live,
                    cache,
                    is_partial=self.given.get("partial", False),
                    required=self._required,
                )
            adapter = self.updater.run.header.adapter
            if adapter is not None:
                raise SchemaMismatch(
                    f"{url} is a run of {adapter}, and these are whole weights: start vllm serve with "
                    "--enable-lora, and patchstore follow with --adapter NAME"
                )
        except BaseException:
            store.close()
            raise

    def _share(self) -> RankSlices:
        self._traced = self._weights.trace()
        return share(self._traced)

    def _survey(self, shares: Sequence[RankSlices]) -> SliceSums:
        """Use the map that comes of all ranks' shares, and digest what is served."""
        weights = self._weights
        with torch.no_grad():
            weights.follow(self._traced, shares)
            if self._folder is not None:
                weights.use_checkpoint(self._folder)
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
