"""Publish a training run's weights: each call makes one version of exactly what changed.

Changes are found by comparing bits with a snapshot of what was published last, never inferred from
the optimiser, so any number of steps may lie between two calls. The training loop waits for that
comparison; `pipeline` does the rest on threads.
"""

import logging
import os
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self

import torch

from patchstore.errors import (
    PublishFailed,
    SchemaMismatch,
    UsageError,
    VersionConflict,
)
from patchstore.format import history
from patchstore.format.json_fields import MAX_INTEGER
from patchstore.format.records import Schema, TensorSpec
from patchstore.publish import checkpoint_files
from patchstore.publish import snapshot as snapshots
from patchstore.publish.committer import Committer
from patchstore.publish.encode import choose
from patchstore.publish.options import (
    check_encoding,
    check_range,
    dtype_of,
    on_one_rank,
    out_of_inference,
    resume_from,
    threads_start,
)
from patchstore.publish.pipeline import Pipeline, Publication
from patchstore.publish.resume import open_run
from patchstore.publish.sources import Source, Weights
from patchstore.stores import opened
from patchstore.stores.base import Store
from patchstore.stores.probe import check_create_only
from patchstore.support import at_exit
from patchstore.support.arguments import whole_number
from patchstore.support.worker import Worker
from patchstore.tensors.bits import spec_of

__all__ = ["Publication", "Publisher", "Source"]

logger = logging.getLogger(__name__)


class Publisher:
    """The one writer of a run. Use from one thread; close it, or use it as a context manager.

    A publisher that is not closed keeps its four threads and its snapshot until the interpreter ends. It is
    closed then. If something cannot be stored at that point, stderr says what, and the process exits with
    status 1; after an uncaught exception the status stays that of the exception.

    Memory: a snapshot of the served weights, where `snapshot` says; the payloads of at most `max_pending`
    publications in host memory (pinned, where a GPU encoded them); a few parts of 8 MiB in transfer. On a GPU
    also a buffer for the changes: 18 bytes per changed word of 8 bytes, at first for one word in 64 (3.5 % of
    the weights); and while they are encoded the payload, and for `context` 22 bytes per change and 110 per
    tile of at most 65,536 elements. The next call waits until the changes are encoded; on the CPU `context`
    takes a second for 70 million elements. An anchor is uploaded from the snapshot itself, so the second call
    after an anchor waits until it is stored.
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
            source: the model or its tensors. Names, shapes and tied tensors must stay the same; a mapping
                may have other tensor objects under its names at each call. The prefixes of torch.compile,
                DistributedDataParallel and activation checkpointing are removed from names.
            dtype: the dtype in which floating-point tensors of 16 bits or more are compared and served, such
                as torch.bfloat16 or "bfloat16"; None to publish every tensor in its own dtype.
            encoding: how changes are stored. "raw": positions, 6 bytes per change in bf16. "gap": distances
                between positions, 4 bytes. "context": encoded against the parent, whose tensors a reader
                needs, about 0.9 bytes. "auto": "context" where kernels encode it, "gap" on the CPU.
            anchor_every: publications from one anchor to the next; the versions in between store
                changes only.
            files: a checkpoint folder whose config and tokenizer files go into every anchor. Its config must
                fit the source: the same sizes, ties that are there, quantised only if the tensors are.
            resume: False for a new run. True to continue from the newest version that has exactly these
                weights; a number to continue from that version, which must have them. "anchor" to continue
                after the newest version with any weights, by publishing all of them. "auto" begins a run if
                there is none; otherwise it is True if a version has these weights, and "anchor" if not.
            max_pending: publications under way before `publish_patch` waits.
            max_shard_bytes: size of an anchor's files.
            snapshot: where to keep the last published weights for comparison. "device": beside the weights,
                compared at the speed of their memory. "host": in host memory, pinned where kernels compare;
                takes no memory of the device, and a comparison takes a little longer than copying the
                snapshot over the bus. The Path of a folder: in a file there that has no name and is gone with
                the process; takes 512 MiB of host memory and what the page cache can spare; slowest.

        Raises:
            RunExists: the store has a run and `resume` is False.
            ResumeMismatch: no version has these weights, or the one named has others.
            SchemaMismatch: a tensor cannot be stored, has numbers that `dtype` cannot hold, or the run was
                created with other tensors.
            UnsupportedStore: the store cannot create exclusively.
            StoreUnavailable: the store does not answer.
            UsageError: an argument is impossible, memory for the snapshot is short, or the system starts no
                more threads; no run was created.
            VersionConflict: another publisher claimed the run at the same time.
        """
        self._dtype = dtype_of(dtype)
        self._anchor_every = whole_number("anchor_every", anchor_every, least=1)
        self._max_pending = whole_number("max_pending", max_pending, least=1)
        max_shard_bytes = whole_number("max_shard_bytes", max_shard_bytes, least=1)
        going_on = resume_from(resume)
        check_encoding(encoding)
        snapshots.check_place(snapshot)
        found_files = checkpoint_files.read_folder(files)
        at_exit.check_still_running()
        self._process = os.getpid()
        self._closed = False
        self._closing = ExitStack()
        with self._closing:
            self._store = self._closing.enter_context(opened(store))
            with out_of_inference(), threads_start(), on_one_rank():
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
        # A read first: if the store does not answer, it fails at once, while the probe would try repeatedly.
        begun = history.read_header(store)
        self._weights = Weights(source, () if begun is None else begun.schema.by_name())
        current, self._tied = self._weights.read()
        self._served = {name: (self._served_dtype(tensor), tensor.shape) for name, tensor in current.items()}
        schema = Schema(
            tensors=tuple(self._spec(name, current[name]) for name in sorted(current)), tied=self._tied
        )
        checkpoint_files.check_fits(files, source, schema)
        for name, tensor in current.items():
            check_range(name, tensor, self._served[name][0])
        self._snapshot = snapshots.take(current, schema.tensors, snapshot)
        # Before anything is written: without its threads a publisher could not go on.
        checks, sums_uploads, uploads, encodes = (
            self._started(f"patchstore-{name}") for name in ("check", "state", "upload", "encode")
        )
        check_create_only(store)
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
            beside=(checks, sums_uploads),
        )
        since_anchor = 0
        if parent is not None:
            claim = self._committer.claim()
            if sums is not None:
                since_anchor = len(history.read_lineage(store, claim.version)) - 1
        self._pipeline = Pipeline(
            header.schema.tensors,
            self._snapshot,
            choose(encoding, self._snapshot),
            self._committer,
            (encodes, uploads),
            is_stored=sums is not None,
            anchor_every=self._anchor_every,
            since_anchor=since_anchor,
        )

    def _started(self, name: str) -> Worker:
        """Start a thread that ends with the publisher."""
        worker = Worker(name)
        self._closing.callback(worker.stop)
        return worker

    def publish_patch(self, step: int) -> Publication:
        """Publish what changed since the last call as the next version.

        Returns when the weights have been compared. They may be changed again then. The version exists when
        `result` of the returned publication returns.

        Args:
            step: the trainer's count, from -(2**53 - 1) to 2**53 - 1, because JSON keeps these exactly.

        Raises:
            PublishFailed: an earlier publication was not stored, and that was not raised yet. This call
                published nothing; the next one publishes the whole model.
            VersionConflict: another publisher has this run; this publisher can publish nothing any more.
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
        if self._pipeline.conflict is not None:
            raise self._pipeline.conflict
        self._raise_unreported()
        began = time.monotonic()
        with out_of_inference():
            return self._pipeline.publish(step, self._current(), began=began, max_pending=self._max_pending)

    def close(self) -> None:
        """Wait until everything published is committed or has failed, and end the threads.

        In a fork of the process that opened the publisher this does nothing.

        Raises:
            PublishFailed, VersionConflict: a publication failed, and that was not raised yet.
        """
        if os.getpid() != self._process:
            return
        self._closed = True
        self._pipeline.stop()
        self._closing.close()
        at_exit.forget(self)
        self._raise_unreported()

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
        """Close a publisher that the trainer left open; return a message if steps were lost."""
        unstored = self._unstored()
        try:
            self.close()
        except Exception as exc:  # noqa: BLE001 -- the process reports it, and exits with 1
            return self._loss(unstored, exc)
        return None

    def _lost(self, reason: object) -> str:
        """Return a message about the publications that are not stored, for `at_exit`."""
        return self._loss(self._unstored(), reason)

    def _unstored(self) -> list[Publication]:
        """Return the publications that are under way, or whose failure was not raised."""
        failed = [each for each in tuple(self._pipeline.failed) if not each.reported]
        return [*failed, *(each for each in self._pipeline.under_way() if each not in failed)]

    def _loss(self, unstored: list[Publication], reason: object) -> str:
        lost = [each.step for each in unstored if each._task is None or each._task.is_lost()]
        return (
            f"the process ended without Publisher.close(), and of {self._store.url} "
            f"step{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} could not be stored: {reason}. "
            'Restart with resume="auto", which publishes whatever weights the trainer has then'
        )

    def _raise_unreported(self) -> None:
        failed = self._pipeline.failed
        unreported = [each for each in tuple(failed) if each.done() and not each.reported]
        while failed and failed[0].reported:
            failed.popleft()
        for publication in unreported:
            publication.reported = True
        if unreported:
            # The later ones failed because the first did.
            assert unreported[0]._task is not None and unreported[0]._task.error is not None
            raise unreported[0]._task.error

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
