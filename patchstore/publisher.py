"""Publish a training run's weights: each call makes one version of exactly what changed.

Changes are found by comparing bits with a snapshot of what was published last, never inferred from
the optimiser, so any number of steps may lie between two calls. The training loop waits for that
comparison; encoding, upload and commit run behind it on one thread.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch

from patchstore import at_exit, checkpoint_files, log
from patchstore import snapshot as snapshots
from patchstore.arguments import whole_number
from patchstore.change import Change, Listed
from patchstore.committer import Committer
from patchstore.encodings import CHOICES
from patchstore.errors import (
    PatchstoreError,
    PublishFailed,
    RunExists,
    SchemaMismatch,
    UsageError,
    VersionConflict,
)
from patchstore.manifest import MAX_INTEGER
from patchstore.model import Manifest, Schema, TensorSpec
from patchstore.resume import open_run
from patchstore.sources import Source, Weights
from patchstore.stores import opened
from patchstore.stores.base import Store
from patchstore.stores.probe import prove_create_only
from patchstore.tensors import spec_of
from patchstore.worker import Task, Worker

__all__ = ["Publication", "Publisher", "Source"]

logger = logging.getLogger(__name__)

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""As configs of trainers spell them."""

_UNCHANGED_CALLS = 3
"""In a row, after which the log asks whether the source is the model that is trained."""


class Publication:
    """One call of `publish_patch` on its way into the store."""

    def __init__(self, step: int, *, waited_s: float) -> None:
        self.step = step
        self.waited_s = waited_s
        """Seconds that the call took: waiting for earlier publications, and comparing."""
        self.publish_s: float | None = None
        """Seconds from the call to the commit; None until then."""
        self.seen = False
        """Whether the caller was given the result."""
        self._task: Task[Manifest] | None = None

    def done(self) -> bool:
        """Whether the result is in, good or bad."""
        return self._task is not None and self._task.is_done

    def result(self, timeout_s: float | None = None) -> Manifest:
        """Wait for the commit and return the version's manifest.

        Raises:
            PublishFailed: not stored; the next publication will be an anchor.
            VersionConflict: another publisher has this run; this one must stop.
            RunLost: the store no longer holds this run; this publisher must stop.
            TimeoutError: not done within `timeout_s`.
        """
        assert self._task is not None
        if not self._task.wait(timeout_s):
            raise TimeoutError(
                f"step {self.step} was not committed within {timeout_s} s; it is still under way"
            )
        self.seen = True
        return self._task.result()


class _Commit(Task[Manifest]):
    """What the background thread is to commit."""

    def __init__(
        self,
        publisher: "Publisher",
        publication: Publication,
        change: Change,
        *,
        began: float,
        anchor: bool,
        alone: bool,
    ) -> None:
        """Make a task of it.

        Args:
            alone: the change is not all that happened since the parent, so the anchor cannot have it as
                its delta.
        """
        super().__init__(
            partial(publisher._commit, publication, change, began=began, anchor=anchor, alone=alone)
        )
        self.publication, self.anchor = publication, anchor
        publication._task = self


class Publisher:
    """The one writer of a run. Use from one thread; close it, or use it as a context manager.

    One that is not closed keeps its three threads and its snapshot until the interpreter ends, and is
    closed then.
    Where something cannot be stored at that point, stderr says what, and the process exits with status 1
    unless it ends by an uncaught exception, whose status stays.

    Memory: a snapshot of the served weights, where `snapshot` says; the changed elements of at most
    `max_pending` publications in host memory (pinned, where a GPU found them), plus a few parts of 8 MiB in
    transfer. On a GPU, also room for what a comparison finds: 18 bytes for each 8 that have a change in them,
    at first for one in 64 (3.5 % of the weights), and while that is encoded the payload; to code `context`
    22 bytes a change and 110 a tile of 65,536 elements or fewer. Until a change is coded the snapshot is not
    free either: the next call waits for that, and on the CPU it takes a second for 70 million elements.
    An anchor is uploaded from the snapshot itself, so the call after an anchor waits until it is stored.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        source: Source,
        *,
        dtype: torch.dtype | str | None = torch.bfloat16,
        encoding: str = "auto",
        anchor_every: int = 64,
        files: str | os.PathLike[str] | None = None,
        resume: bool | int | Literal["anchor", "auto"] = False,
        max_pending: int = 2,
        max_shard_bytes: int = 5_000_000_000,
        snapshot: snapshots.Place = "device",
    ) -> None:
        """Create a run, or claim an existing one with `resume`.

        Args:
            store: an open store, or the URL or path of one, which is opened and closed with the publisher.
            source: the model or its tensors. Names, shapes and tied tensors must stay what they are
                now; a mapping may hold other tensor objects under its names at each call. The prefixes of
                torch.compile, DistributedDataParallel and activation checkpointing are taken off names.
            dtype: what floating-point tensors of 16 bits or more are served as, and therefore
                compared as, such as torch.bfloat16 or "bfloat16"; None to publish every tensor in its own.
            encoding: how changes are stored. "raw": positions as they are, 6 bytes a change in bf16. "gap":
                distances between them, 4 bytes. "context": coded against the parent, which a reader must
                hold, near 0.9 bytes. "auto": "context" or "gap", whichever is smaller each time.
            anchor_every: publications from one anchor to the next; the versions in between store
                changes only.
            files: a checkpoint folder whose config and tokenizer files go into every anchor. Its config must
                fit the source: the same sizes, ties that are there, quantised only if the tensors are.
            resume: False for a new run. True to go on from the newest version with exactly these
                weights, a number to go on from that version, which must have them. "anchor" to go
                on behind the head with whatever weights these are, by publishing all of them. "auto" for
                a new run where there is none; else as True where a version has these weights, or as "anchor".
            max_pending: publications under way before `publish_patch` waits.
            max_shard_bytes: size of an anchor's files.
            snapshot: where the copy of the weights is that the next ones are compared with. "device": with
                the weights, compared at the speed of their memory. "host": in host memory, pinned where
                kernels compare, which address it over the bus; takes nothing of the device, and each
                comparison a little longer than the copy needs to cross the bus. The Path of a folder: in
                a file there that has no name and goes with the process; takes 512 MiB of host memory and
                what the page cache can spare; slowest.

        Raises:
            RunExists: the store has a run and `resume` is False.
            ResumeMismatch: no version has these weights, or the one named has others.
            SchemaMismatch: a tensor cannot be stored or has numbers that `dtype` cannot hold, or the run was
                created with other tensors.
            UnsupportedStore: the store cannot create exclusively.
            StoreUnavailable: the store does not answer.
            UsageError: an argument makes no sense, or memory for the snapshot is short, or the system starts
                no more threads; no run was created.
            VersionConflict: another publisher claimed the run at the same time.
        """
        self._dtype = _dtype(dtype)
        self._anchor_every = whole_number("anchor_every", anchor_every, least=1)
        self._max_pending = whole_number("max_pending", max_pending, least=1)
        max_shard_bytes = whole_number("max_shard_bytes", max_shard_bytes, least=1)
        going_on = _resume(resume)
        _check_encoding(encoding)
        snapshots.check_place(snapshot)
        found_files = checkpoint_files.read_folder(files)
        at_exit.check_still_running()
        self._process = os.getpid()
        self._failed: deque[Publication] = deque()
        """Publications that failed; those that the caller was told of may be among them."""
        self._snapshot_ahead = False
        """Set while the snapshot has changes that were not handed to the thread."""
        self._unchanged_calls = 0
        """Publications in a row in which no bit had changed."""
        self._conflict: VersionConflict | None = None
        self._closed = False
        self._closing = ExitStack()
        with self._closing:
            self._store = self._closing.enter_context(opened(store))
            with _out_of_inference(), _threads_start(), _on_one_rank():
                self._open(source, encoding, going_on, snapshot, found_files, max_shard_bytes)
            at_exit.expect(self)
            # Opened: from here on `close` ends what was begun.
            self._closing = self._closing.pop_all()

    def _open(
        self,
        source: Source,
        encoding: str,
        resume: bool | int | str,
        snapshot: snapshots.Place,
        files: dict[str, bytes],
        max_shard_bytes: int,
    ) -> None:
        store = self._store
        # A read first: where nobody answers it says so at once, while the probe tries again and again.
        begun = log.read_header(store)
        self._weights = Weights(source, () if begun is None else begun.schema.by_name())
        current, self._tied = self._weights.read()
        self._served = {name: (self._served_dtype(tensor), tensor.shape) for name, tensor in current.items()}
        schema = Schema(
            tensors=tuple(self._spec(name, current[name]) for name in sorted(current)), tied=self._tied
        )
        checkpoint_files.check_fits(files, source, schema)
        for name, tensor in current.items():
            _check_range(name, tensor, self._served[name][0])
        self._snapshot = snapshots.take(current, schema.tensors, encoding, snapshot)
        self._closing.callback(self._snapshot.close)
        # Before anything is written: without its threads a publisher could not go on.
        checks, uploads, self._worker = (
            self._started(name) for name in ("patchstore-check", "patchstore-state", "patchstore-publisher")
        )
        prove_create_only(store)
        header, head, parent, sums = open_run(
            store, schema, snapshots.Served(current, schema.tensors), resume
        )
        self.run_id = header.run_id
        self._specs = header.schema.by_name()
        self._committer = Committer(
            store,
            header,
            head=head,
            parent=parent,
            sums=sums,
            files=files,
            max_shard_bytes=max_shard_bytes,
            beside=(checks, uploads),
        )
        self._since_anchor = 0
        """Publications since the last anchor."""
        if parent is not None:
            claim = self._committer.claim()
            if sums is not None:
                self._since_anchor = len(log.read_lineage(store, claim.version)) - 1
        self._owes_anchor = sums is None
        """Set by the thread when it failed to store a version: only a whole model can follow."""

    def _started(self, name: str) -> Worker:
        """Start a thread that ends with the publisher."""
        worker = Worker(name)
        self._closing.callback(worker.stop)
        return worker

    def publish_patch(self, step: int) -> Publication:
        """Publish what changed since the last call as the next version.

        Returns when the weights have been compared, and may be changed again; the version exists
        when the returned publication's `result` says so.

        Args:
            step: the trainer's count, from -(2**53 - 1) to 2**53 - 1, which JSON keeps exactly.

        Raises:
            PublishFailed: an earlier publication was not stored, and the caller was not told yet. This
                call published nothing; the next one publishes the whole model.
            VersionConflict: another publisher has this run; nothing can be published any more.
            RunLost: the store no longer holds this run; nothing can be published any more.
            SchemaMismatch: names, shapes, dtypes or ties of the source have changed. This call published
                nothing; once they are back, the next one goes on.
            UsageError: the step is not an integer, the publisher is closed, or this is a fork of the process
                that opened it. This call published nothing.
        """
        step = whole_number("step", step, least=-MAX_INTEGER, most=MAX_INTEGER)
        if self._closed:
            raise UsageError("this publisher is closed")
        if os.getpid() != self._process:
            raise UsageError(
                f"this publisher belongs to process {self._process}, and this is {os.getpid()}, a fork of it "
                "without its thread; publish from the process that opened it"
            )
        if self._conflict is not None:
            raise self._conflict
        self._raise_untold()
        began = time.monotonic()
        with _out_of_inference():
            current = self._current()
            self._worker.wait_until_at_most(self._max_pending - 1)
            # An anchor on its way reads the snapshot, which must not change under it.
            for task in self._worker.under_way():
                if isinstance(task, _Commit) and task.anchor:
                    task.wait()
            # If anything below raises, an interrupt too, the snapshot may have changes that no version has.
            lost, self._snapshot_ahead = self._snapshot_ahead, True
            # `_owes_anchor` cannot be cleared before this is handed over: only an anchor clears it, and none
            # is under way.
            alone = lost or self._owes_anchor
            change = self._compare(step, current, alone=alone)
            anchor = alone or self._owes_anchor or self._since_anchor + 1 >= self._anchor_every
            self._since_anchor = 0 if anchor else self._since_anchor + 1
            publication = Publication(step, waited_s=time.monotonic() - began)
            self._worker.hand_over(
                _Commit(self, publication, change, began=began, anchor=anchor, alone=alone)
            )
            self._snapshot_ahead = False
        return publication

    def close(self) -> None:
        """Wait until everything published is committed or has failed, and end the background thread.

        In a fork of the process that opened the publisher this does nothing.

        Raises:
            PublishFailed, VersionConflict: a publication failed, and the caller was not told yet.
        """
        if os.getpid() != self._process:
            return
        self._closed = True
        self._worker.stop()
        self._closing.close()
        at_exit.forget(self)
        self._raise_untold()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except (PublishFailed, VersionConflict):
            if error is None:
                raise
            logger.exception("a publication failed too, while the trainer was failing")

    def _close_at_exit(self) -> str | None:
        """Close a publisher that the trainer left open; return what was lost, if anything was."""
        unstored = self._unstored()
        try:
            self.close()
        except Exception as exc:  # noqa: BLE001 -- the process says it, and exits with 1
            return self._loss(unstored, exc)
        return None

    def _lost(self, reason: object) -> str:
        """Return a message about what was handed over and is not stored, for `at_exit`."""
        return self._loss(self._unstored(), reason)

    def _unstored(self) -> list[Publication]:
        """Return the publications that are under way, or failed without the caller's knowledge."""
        under_way = [task.publication for task in self._worker.under_way() if isinstance(task, _Commit)]
        untold = [publication for publication in tuple(self._failed) if not publication.seen]
        return [*untold, *(publication for publication in under_way if publication not in untold)]

    def _loss(self, unstored: list[Publication], reason: object) -> str:
        lost = [each.step for each in unstored if each._task is None or each._task.is_lost()]
        return (
            f"the process ended without Publisher.close(), and of {self._store.url} "
            f"step{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} could not be stored: {reason}. "
            'Restart with resume="auto", which publishes whatever weights the trainer has then'
        )

    def _raise_untold(self) -> None:
        untold = [each for each in tuple(self._failed) if each.done() and not each.seen]
        while self._failed and self._failed[0].seen:
            self._failed.popleft()
        for publication in untold:
            publication.seen = True
        if untold:
            # The later ones failed because the first did.
            assert untold[0]._task is not None and untold[0]._task.error is not None
            raise untold[0]._task.error

    def _served_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        if self._dtype is not None and tensor.is_floating_point() and tensor.element_size() >= 2:
            return self._dtype
        return tensor.dtype

    def _spec(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        return spec_of(name, torch.empty(tensor.shape, dtype=self._served_dtype(tensor), device="meta"))

    def _is_served(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor of this name, dtype and shape is one of the run's."""
        dtype, shape = self._served.get(name, (None, None))
        return self._served_dtype(tensor) == dtype and tensor.shape == shape

    def _current(self) -> dict[str, torch.Tensor]:
        """Return the source's tensors, each once.

        Raises:
            SchemaMismatch: they are not those of the run; the snapshot is untouched.
        """
        current, tied = self._weights.read()
        if tied != self._tied:
            raise SchemaMismatch(f"tensors were tied as {self._tied}, but are tied as {tied} now")
        if len(current) != len(self._served) or not all(map(self._is_served, current, current.values())):
            for name in sorted(current.keys() | self._specs.keys()):
                found = self._spec(name, current[name]) if name in current else None
                if found != self._specs.get(name):
                    raise SchemaMismatch(f"tensor {name!r} was {self._specs.get(name)}, but is {found} now")
        return current

    def _compare(self, step: int, current: dict[str, torch.Tensor], *, alone: bool) -> Change:
        """Bring the snapshot up to the tensors; return what that changed, nothing if an anchor is `alone`."""
        if alone:
            self._snapshot.replace(current)
            return Listed(step=step, num_changed=0, encoding="gap")
        return self._snapshot.compare(step, current)

    def _commit(
        self, publication: Publication, change: Change, *, began: float, anchor: bool, alone: bool
    ) -> Manifest:
        """Commit a publication, on the background thread.

        Raises:
            As `Publication.result`.
        """
        try:
            manifest = self._commit_or_fail(change, anchor=anchor, alone=alone)
        except BaseException as exc:
            self._owes_anchor = True
            # Before the task is done, so that the next call on the trainer's thread finds it.
            self._failed.append(publication)
            if isinstance(exc, VersionConflict):
                self._conflict = exc
            if isinstance(exc, PublishFailed | VersionConflict | AssertionError):
                raise
            # Such as a bucket that was deleted, rights that were taken away, or memory that is short.
            raise PublishFailed(
                f"step {change.step} was not stored, and the next publication will be an anchor: "
                f"{exc if isinstance(exc, PatchstoreError) else f'{type(exc).__name__}: {exc}'}"
            ) from exc
        self._ask_whether_it_trains(manifest)
        publication.publish_s = time.monotonic() - began
        logger.info(
            "published version %d: step %d, %d changed, %.1f MiB, waited %.2f s, published in %.2f s",
            manifest.version,
            manifest.step,
            0 if manifest.delta is None else manifest.delta.num_changed,
            manifest.num_bytes / 2**20,
            publication.waited_s,
            publication.publish_s,
        )
        return manifest

    def _ask_whether_it_trains(self, manifest: Manifest) -> None:
        """Warn once where many publications found nothing to publish."""
        if manifest.delta is not None:
            self._unchanged_calls = 0 if manifest.delta.num_changed else self._unchanged_calls + 1
            if self._unchanged_calls == _UNCHANGED_CALLS:
                logger.warning(
                    "steps up to %d: no weight has changed in the last %d publications. Is the source a "
                    "copy of the model that is trained, such as a state dict from before it was moved, or "
                    "merged weights that were not merged again?",
                    manifest.step,
                    _UNCHANGED_CALLS,
                )

    def _commit_or_fail(self, change: Change, *, anchor: bool, alone: bool) -> Manifest:
        if self._conflict is not None:
            raise self._conflict
        if anchor:
            # After a failure the parent lacks changes that the snapshot has: then there is no delta to it.
            delta = None if self._owes_anchor or alone else change
            manifest = self._committer.commit_anchor(change.step, self._snapshot.read, delta)
            self._owes_anchor = False
            return manifest
        if self._owes_anchor:
            raise PublishFailed(
                f"step {change.step} builds on a publication that was not stored; "
                "the next publication will be an anchor"
            )
        return self._committer.commit_delta(change)


def _check_range(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises SchemaMismatch where a number would become infinite, or NaN, as it is converted to a dtype."""
    # bfloat16 has the range of float32.
    if tensor.dtype == dtype or torch.finfo(dtype).max > torch.finfo(torch.bfloat16).max / 2:
        return
    given = tensor.detach()
    lost = given.to(dtype).float().isfinite() != given.isfinite()
    if lost.any():
        raise SchemaMismatch(
            f"{name!r} has {int(lost.sum())} numbers beyond the range of {dtype}, such as "
            f"{float(given[lost][0])}; publish as torch.bfloat16, or dtype=None to publish in its own dtype"
        )


def _out_of_inference() -> AbstractContextManager[object]:
    """The snapshot outlives the caller's inference mode, so it must not be made of inference tensors."""
    # Not entered where it changes nothing: an interrupt while it is left would change the trainer's mode.
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def _threads_start() -> Iterator[None]:
    try:
        yield
    except RuntimeError as exc:
        if "can't start new thread" not in str(exc):
            raise
        raise UsageError(
            "this process cannot start the threads that a publisher needs; raise the limit of processes "
            f"(ulimit -u, or the container's pids limit): {exc}"
        ) from exc


@contextmanager
def _on_one_rank() -> Iterator[None]:
    """Say which rank should publish, where another has the run."""
    try:
        yield
    except (RunExists, VersionConflict) as exc:
        rank = _rank()
        if rank is None:
            raise
        if rank.startswith("rank 0 "):
            raise type(exc)(
                f"{exc}. This is {rank}: if the others open a Publisher too, let only this one do so"
            ) from exc
        raise type(exc)(
            f"this is {rank}, and a run is published from one rank: open the Publisher only where "
            f"torch.distributed.get_rank() == 0, and let the other ranks go on without one. {exc}"
        ) from exc


def _rank() -> str | None:
    """Return what this process is called among its ranks, as far as that is known without asking the others.

    Returns:
        Such as "rank 0 of 4"; None where there seems to be no other.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, num_ranks = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
    else:
        rank, num_ranks = (
            os.environ.get("RANK", os.environ.get("LOCAL_RANK", "")),
            os.environ.get("WORLD_SIZE", ""),
        )
    if not rank.isdecimal() or num_ranks == "1":
        return None
    if not num_ranks.isdecimal():
        return None if rank == "0" else f"rank {rank}"
    return f"rank {rank} of {num_ranks}"


def _dtype(value: Any) -> torch.dtype | None:
    if isinstance(value, str):
        name = value.removeprefix("torch.")
        found = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    else:
        found = value
    if found is None and value is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(
            'dtype must be a floating-point dtype such as torch.bfloat16 or "bfloat16", or None to publish '
            f"every tensor in its own, not {value!r}"
        )
    return found


def _resume(value: Any) -> bool | int | str:
    if isinstance(value, bool) or (isinstance(value, str) and value in {"anchor", "auto"}):
        return value
    if not hasattr(value, "__index__"):
        raise UsageError(f'resume must be True, False, a version, "anchor" or "auto", not {value!r}')
    return whole_number("resume", value, least=0)


def _check_encoding(value: Any) -> None:
    if value not in CHOICES:
        raise UsageError(f"encoding must be one of {', '.join(CHOICES)}, not {value!r}")
