"""Publish a training run's weights: each call makes one version of exactly what changed.

Changes are found by comparing bits with a snapshot of what was published last, never inferred from
the optimiser, so any number of steps may lie between two calls. The training loop waits for that
comparison; encoding, upload and commit run behind it on one thread.
"""

import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch

from patchstore import log
from patchstore import snapshot as snapshots
from patchstore.change import Change, Listed
from patchstore.committer import Committer
from patchstore.encodings import named
from patchstore.errors import (
    DataError,
    PublishFailed,
    SchemaMismatch,
    UsageError,
    VersionConflict,
)
from patchstore.layout import check_file_name
from patchstore.model import Manifest, Schema, TensorSpec
from patchstore.resume import open_run
from patchstore.stores.base import Store
from patchstore.stores.probe import prove_create_only
from patchstore.tensors import spec_of

logger = logging.getLogger(__name__)

Source = torch.nn.Module | Mapping[str, torch.Tensor]
"""A model, whose `state_dict` is published, or its tensors by checkpoint name."""

_FILE_ENDINGS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
"""Of config and tokenizer files, and of code that a config refers to."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of which a tensor is whole."""


class Publication:
    """One call of `publish_patch` on its way into the store."""

    def __init__(self, step: int, *, waited_s: float) -> None:
        self.step = step
        self.waited_s = waited_s
        """Seconds that the call took: for its turn, which comes when an anchor is stored, and to compare."""
        self.publish_s: float | None = None
        """Seconds from the call to the commit; None until then."""
        self.seen = False
        """Whether somebody asked for the result."""
        self._future: Future[Manifest] = Future()

    def done(self) -> bool:
        """Whether the result is in, good or bad."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> Manifest:
        """Wait for the commit and return the version's manifest.

        Raises:
            PublishFailed: not stored; the next publication will be an anchor.
            VersionConflict: another publisher has this run; this one must stop.
            RunLost: the store no longer holds this run; this publisher must stop.
            TimeoutError: not done within `timeout_s`.
        """
        error = self._future.exception(timeout_s)
        self.seen = True
        if error is not None:
            raise error
        return self._future.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What the background thread is to commit."""

    publication: Publication
    change: Change
    anchor: bool
    alone: bool
    """The change is not all that happened since the parent, so the anchor cannot have it as its delta."""
    began: float


class Publisher:
    """The one writer of a run. Use from one thread; close it, or use it as a context manager.

    One that is not closed keeps its thread and its snapshot until the process ends.

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
        store: Store,
        source: Source,
        *,
        dtype: torch.dtype | None = torch.bfloat16,
        encoding: str = "auto",
        anchor_every: int = 64,
        files: str | os.PathLike[str] | None = None,
        resume: bool | int | Literal["anchor"] = False,
        max_pending: int = 2,
        max_shard_bytes: int = 5_000_000_000,
        snapshot: snapshots.Place = "device",
    ) -> None:
        """Create a run, or claim an existing one with `resume`.

        Args:
            source: the model or its tensors. Names, shapes and tied tensors must stay what they are
                now; a mapping may hold other tensor objects under its names at each call.
            dtype: what floating-point tensors of 16 bits or more are served as, and therefore
                compared as; None to publish every tensor in its own dtype.
            encoding: how changes are stored. "raw": positions as they are, 6 bytes a change in bf16. "gap":
                distances between them, 4 bytes. "context": coded against the parent, which a reader must
                hold, near 0.9 bytes. "auto": "context" or "gap", whichever is smaller each time.
            anchor_every: publications from one anchor to the next; the versions in between store
                changes only.
            files: a checkpoint folder whose config and tokenizer files go into every anchor.
            resume: False for a new run. True to go on from the newest version with exactly these
                weights, a number to go on from that version, which must have them. "anchor" to go
                on behind the head with whatever weights these are, by publishing all of them.
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
            SchemaMismatch: a tensor cannot be stored, or the run was created with other tensors.
            UnsupportedStore: the store cannot create exclusively.
            StoreUnavailable: the store does not answer.
            UsageError: an argument makes no sense, or memory for the snapshot is short; nothing was written.
            VersionConflict: another publisher claimed the run at the same time.
        """
        if anchor_every < 1 or max_pending < 1 or max_shard_bytes < 1:
            raise UsageError("anchor_every, max_pending and max_shard_bytes must be at least 1")
        if not isinstance(resume, int) and resume != "anchor":
            raise UsageError(f'resume must be True, False, a version or "anchor", not {resume!r}')
        if dtype is not None and not dtype.is_floating_point:
            raise UsageError(f"dtype must be a floating-point dtype or None, not {dtype}")
        if encoding != "auto":
            named(encoding)
        self._source, self._dtype = source, dtype
        self._anchor_every = anchor_every
        checkpoint_files = {} if files is None else _checkpoint_files(Path(files))
        # A read first: where nobody answers it says so at once, while the probe tries again and again.
        log.read_header(store)
        current, self._tied = self._tensors()
        self._served = {name: (self._served_dtype(tensor), tensor.shape) for name, tensor in current.items()}
        schema = Schema(
            tensors=tuple(self._spec(name, current[name]) for name in sorted(current)), tied=self._tied
        )
        self._snapshot = snapshots.take(current, schema.tensors, encoding, snapshot)
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
            files=checkpoint_files,
            max_shard_bytes=max_shard_bytes,
        )
        self._since_anchor = 0
        """Publications since the last anchor."""
        if parent is not None:
            self._since_anchor = len(log.read_lineage(store, self._committer.claim().version)) - 1
        self._owes_anchor = parent is None or resume == "anchor"
        """Set by the thread when it failed to store a version: only a whole model can follow."""
        self._snapshot_ahead = False
        """Set while the snapshot has changes that were not handed to the thread."""
        self._conflict: VersionConflict | None = None
        self._pending: list[Publication] = []
        self._slots = threading.BoundedSemaphore(max_pending)
        self._snapshot_free = threading.Event()
        self._snapshot_free.set()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="patchstore-publisher", daemon=True)
        self._thread.start()

    def publish_patch(self, step: int) -> Publication:
        """Publish what changed since the last call as the next version.

        Returns when the weights have been compared, and may be changed again; the version exists
        when the returned publication's `result` says so.

        Raises:
            PublishFailed: an earlier publication was not stored, and nobody has been told yet. This
                call published nothing; the next one publishes the whole model.
            VersionConflict: another publisher has this run; nothing can be published any more.
            RunLost: the store no longer holds this run; nothing can be published any more.
            SchemaMismatch: names, shapes, dtypes or ties of the source have changed. This call published
                nothing; once they are back, the next one goes on.
            UsageError: the publisher is closed.
        """
        if self._closed:
            raise UsageError("this publisher is closed")
        if self._conflict is not None:
            raise self._conflict
        self._raise_untold()
        began = time.monotonic()
        current = self._current()
        self._slots.acquire()
        sent = taken = False
        try:
            # An anchor on its way reads the snapshot, which must not change under it.
            self._snapshot_free.wait()
            # Whatever breaks off from here on, Ctrl-C too, the snapshot may have what no version will have.
            lost, self._snapshot_ahead = self._snapshot_ahead, True
            # What the thread owes now it owes until this publication is its turn: no anchor is under way.
            alone = lost or self._owes_anchor
            change = self._compare(step, current, alone=alone)
            anchor = alone or self._owes_anchor or self._since_anchor + 1 >= self._anchor_every
            self._since_anchor = 0 if anchor else self._since_anchor + 1
            publication = Publication(step, waited_s=time.monotonic() - began)
            job = _Job(publication=publication, change=change, anchor=anchor, alone=alone, began=began)
            if anchor:
                taken = True
                self._snapshot_free.clear()
            self._pending.append(publication)
            # Said before it is done, with no call in between at which a signal could be handled.
            sent = True
            self._jobs.put(job)
            self._snapshot_ahead = False
        finally:
            if not sent:
                if taken:
                    # Only what this call took: an anchor that is being uploaded still reads the snapshot.
                    self._snapshot_free.set()
                self._slots.release()
        return publication

    def close(self) -> None:
        """Wait until everything published is committed or has failed, and end the background thread.

        Raises:
            PublishFailed, VersionConflict: a publication failed, and nobody has been told yet.
        """
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()
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

    def _raise_untold(self) -> None:
        self._pending = [publication for publication in self._pending if not publication.seen]
        errors = []
        for publication in [publication for publication in self._pending if publication.done()]:
            self._pending.remove(publication)
            publication.seen = True
            if (error := publication._future.exception()) is not None:
                errors.append(error)
        if errors:
            # The later ones failed because the first did.
            raise errors[0]

    def _tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the source's tensors, each once, and further names -> the first name."""
        source = self._source
        # Nearly always only one begins at an address, so that no more is asked of most tensors.
        first: dict[int, str] = {}
        more: dict[int, list[str]] = {}
        tensors: dict[str, torch.Tensor] = {}
        tied: dict[str, str] = {}
        for name, tensor in (source.state_dict() if isinstance(source, torch.nn.Module) else source).items():
            plain = type(tensor) in _PLAIN or (
                isinstance(tensor, torch.Tensor) and not hasattr(tensor, "full_tensor")
            )
            if not plain or tensor.is_meta:
                raise SchemaMismatch(
                    f"{name!r} is not a whole tensor in memory but {type(tensor).__name__}; "
                    "pass full tensors by name instead of the model"
                )
            if tensor.numel():
                address = tensor.data_ptr()
                there = first.setdefault(address, name)
                if there != name:
                    others = more.setdefault(address, [there])
                    if same := [other for other in others if _is_same(tensors[other], tensor)]:
                        tied[name] = same[0]
                        continue
                    others.append(name)
            tensors[name] = tensor
        return tensors, tied

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
        current, tied = self._tensors()
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

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            publication = job.publication
            try:
                manifest = self._commit(job)
            except BaseException as exc:  # noqa: BLE001 -- it belongs to whoever asks
                self._owes_anchor = True
                if isinstance(exc, VersionConflict):
                    self._conflict = exc
                # Its frames hold the change, which may be large, for as long as somebody keeps the error.
                traceback.clear_frames(exc.__traceback__)
                publication._future.set_exception(exc)
            else:
                publication._future.set_result(manifest)
            finally:
                if job.anchor:
                    self._snapshot_free.set()
                self._slots.release()
                del job, publication

    def _commit(self, job: _Job) -> Manifest:
        try:
            manifest = self._commit_or_fail(job)
        except (UsageError, DataError) as exc:
            # Such as a bucket that was deleted, or rights that were taken away, while the run goes on.
            raise PublishFailed(
                f"step {job.change.step} was not stored, and the next publication will be an anchor: {exc}"
            ) from exc
        job.publication.publish_s = time.monotonic() - job.began
        logger.info(
            "published version %d: step %d, %d changed, %.1f MiB, waited %.2f s, published in %.2f s",
            manifest.version,
            manifest.step,
            0 if manifest.delta is None else manifest.delta.num_changed,
            manifest.num_bytes / 2**20,
            job.publication.waited_s,
            job.publication.publish_s,
        )
        return manifest

    def _commit_or_fail(self, job: _Job) -> Manifest:
        if self._conflict is not None:
            raise self._conflict
        if job.anchor:
            # After a failure the parent lacks changes that the snapshot has: then there is no delta to it.
            change = None if self._owes_anchor or job.alone else job.change
            manifest = self._committer.commit_anchor(job.change.step, self._snapshot.read, change)
            self._owes_anchor = False
            return manifest
        if self._owes_anchor:
            raise PublishFailed(
                f"step {job.change.step} builds on a publication that was not stored; "
                "the next publication will be an anchor"
            )
        return self._committer.commit_delta(job.change)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that begin at the same address are one under two names."""
    return (
        one.device == other.device
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _checkpoint_files(folder: Path) -> dict[str, bytes]:
    """Read a checkpoint folder's files that are not weights."""
    if not folder.is_dir():
        raise UsageError(f"files={folder} is not a folder")
    return {
        check_file_name(path.name): path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name.endswith(_FILE_ENDINGS) and not path.name.endswith(".index.json")
    }
