"""The stages of a publication, and the threads that they run on.

    source   `ServedSource.current`  the trainer's tensors, as they are served   the trainer's thread
    compare  `Snapshot.compare`      with what was published last                the trainer's thread
    encode   `Snapshot.encode`       against the snapshot, which then follows    the encoder
    store    `Committer`             payloads, under names of this attempt       the uploader
    commit   `Log.finish`            by creating the version's manifest          the uploader

Each thread does them in the order of the calls. So the snapshot is the parent of what is being encoded.

Every publication has a number. The snapshot has the weights of one of them, and so has the newest version in
the store. As long as both are known, a delta leads from one to the next. After any failure one of them is not
known, and the next publication stores the whole model.
"""

import logging
import os
from collections import deque
from functools import partial
from threading import Event

from patchstore.bucket.lineage import Every, Since, is_due
from patchstore.bucket.records import Manifest, Schema
from patchstore.codec import Encoding
from patchstore.codec.delta import NO_CHANGES, EncodedDelta
from patchstore.codec.part_table import PartTable
from patchstore.errors import PatchstoreError, PublishFailed, VersionConflict
from patchstore.publish.commit import Committer, Kind, Wanted
from patchstore.publish.options import check_process
from patchstore.publish.report import Report
from patchstore.publish.snapshot import Ahead, Snapshot, Tensors
from patchstore.support.threads import Task, Worker
from patchstore.support.tracing import Stages
from patchstore.tensors.columns import Changes

logger = logging.getLogger(__name__)

_TOO_MANY = "step %d is an anchor: its changes would take more bytes than the model"
_UNCHANGED_CALLS = 3
"""In a row, after which the log asks whether the source is the model that is trained."""


class Publication:
    """One call of `publish_patch` on its way into the store."""

    def __init__(self, step: int, stages: Stages) -> None:
        self.step = step
        self.stages = stages
        """When `publish_patch` was called, and when each stage of the publication began and ended."""
        self.waited_s = stages.so_far_s()
        """Seconds that `publish_patch` blocked: waiting for earlier publications, then comparing."""
        self.publish_s: float | None = None
        """Seconds from the call to the commit; None until then."""
        self.reported = False
        """Whether the caller got the result, or its error."""
        self.is_unchanged = False
        """Whether no bit had changed, so that nothing was committed; known once it is done."""
        self._task: Task[Manifest] | None = None
        self._process = os.getpid()

    def __repr__(self) -> str:
        if not self.done():
            return f"<Publication of step {self.step}: under way>"
        assert self._task is not None
        if self._task.error is not None:
            return f"<Publication of step {self.step}: failed: {self._task.error}>"
        found = self._task.result()
        unchanged = ", which nothing had changed" * self.is_unchanged
        return f"<Publication of step {self.step}: version {found.version}{unchanged}>"

    def done(self) -> bool:
        """Whether the publication is committed or has failed."""
        return self._task is not None and self._task.is_done

    def result(self, timeout_s: float | None = None) -> Manifest:
        """Wait for the commit and return the version's manifest.

        Where nothing was committed because nothing had changed, it is that of the version before.

        Raises:
            PublishFailed: not stored, or the commit had no answer; the next publication finds out, and will
                be an anchor.
            VersionConflict: another publisher has this run; this one must stop.
            RunLost: the store no longer holds this run; this publisher must stop.
            TimeoutError: not done within `timeout_s`.
            UsageError: it is not done, and will never be here: this is a fork of the process that published.
        """
        assert self._task is not None
        if not self._task.is_done:
            check_process("publication", self._process)
        if not self._task.wait(timeout_s):
            raise TimeoutError(
                f"step {self.step} was not committed within {timeout_s} s; it is still under way"
            )
        self.reported = True
        return self._task.result()


class _Job:
    """A publication between the stages."""

    def __init__(
        self,
        publication: Publication,
        number: int,
        *,
        changes: Changes | None,
        wanted: Wanted,
    ) -> None:
        self.publication, self.number = publication, number
        self.changes = changes
        """None if the whole model is published; the snapshot has it already then."""
        self.wanted = wanted
        self.is_anchor = wanted.is_anchor
        """Whether the snapshot is stored; may become true until `settled`."""
        self.settled = Event()
        """Set once it is known whether it is an anchor, or that it is not stored."""
        self.parent: int | None = None
        """The publication that the delta leads from."""
        self.delta: EncodedDelta | None = None
        self.error: BaseException | None = None
        """Why it could not be encoded."""


class _Stage(Task[Manifest]):
    """A job in the queue of one stage."""

    def __init__(self, job: _Job, run: "partial[Manifest] | partial[None]") -> None:
        super().__init__(run)  # type: ignore[arg-type]
        self.job = job


def _after(since: Since, kind: Kind | None, num_bytes: int = 0) -> Since:
    """Return what leads from the newest anchor to a version, after what is stored as `kind`."""
    if kind == "anchor":
        return Since()
    if kind == "nothing":
        return since
    return Since(num_deltas=since.num_deltas + 1, num_bytes=since.num_bytes + num_bytes)


class _Anchors:
    """Says when an anchor is due: the same on all ranks, whichever knows first how a publication ended."""

    def __init__(self, every: Every, anchor_bytes: int, since: Since, max_pending: int) -> None:
        self._every, self._anchor_bytes, self._max_pending = every, anchor_bytes, max_pending
        self._known = 0
        """The newest publication of which all ranks know how it was stored, as it is no longer under way."""
        self._since_known = since
        """What leads from the newest anchor to the version of that publication."""
        self._since = since
        """The same of the newest version."""
        self._since_each: dict[int, Since] = {}
        """The same of each publication after `_known` that was stored, by number."""
        self.foreseen: dict[int, Kind | None] = {}
        """How publications after it are going to be stored, by number; None where that is not settled."""

    def is_due(self, number: int) -> bool:
        """Whether a publication is to be an anchor, if it is one of changes.

        A rank may know of more publications how they were stored, and does not use that. What is not settled
        counts as a delta.
        """
        while self._known < number - self._max_pending:
            self._known += 1
            self.foreseen.pop(self._known, None)
            self._since_known = self._since_each.pop(self._known, self._since_known)
        since = self._since_known
        for under_way in range(self._known + 1, number):
            since = _after(since, self.foreseen.get(under_way))
        return self._is_due_after(since)

    def is_due_now(self) -> bool:
        return self._is_due_after(self._since)

    def stored(self, number: int, manifest: Manifest | None) -> None:
        """Take note of a publication's version; None where nothing had changed."""
        if manifest is None:
            since = self._since
        elif manifest.anchor is not None or manifest.delta is None:
            since = Since()
        else:
            since = _after(self._since, "delta", manifest.delta.num_bytes)
        self._since = self._since_each[number] = since

    def _is_due_after(self, since: Since) -> bool:
        """Whether an anchor is due in the place of the delta that follows."""
        return is_due(self._every, _after(since, "delta"), self._anchor_bytes)


class Pipeline:
    """The queue of publications, their snapshot, and the threads. Calls come from one thread."""

    def __init__(
        self,
        schema: Schema,
        table: PartTable,
        snapshot: Snapshot,
        encoding: Encoding,
        committer: Committer,
        threads: tuple[Worker, Worker],
        *,
        is_stored: bool,
        anchor_every: Every,
        since_anchor: Since,
        max_pending: int,
        claimed: Manifest | None,
        report: Report | None,
    ) -> None:
        """Take over threads that do nothing yet: one encodes, one uploads and commits.

        `is_stored`: whether the version to build on has the snapshot's weights. `since_anchor`: what leads
        from the newest anchor to it. `claimed`: the version by which the run was resumed. `report` is
        for the process that commits.
        """
        self._schema, self._table = schema, table
        self._snapshot, self._encoding, self._committer = snapshot, encoding, committer
        self._encoder, self._uploader = threads
        self._ahead = Ahead(schema, table, encoding, self._encoder)
        self._report = report
        self._is_warm = False
        self._max_pending, self._last = max_pending, 0
        """How many publications there were; the number of the newest."""
        self._anchors = _Anchors(anchor_every, schema.num_bytes, since_anchor, max_pending)
        self._in_snapshot: int | None = 0
        """The publication whose weights the snapshot has; None if it has parts of two."""
        self._in_store: int | None = 0 if is_stored else None
        """The publication whose weights the newest version has; None if it is none of this publisher's."""
        self.newest = claimed
        """Of the newest version that this publisher committed."""
        self._unchanged_calls = 0
        """Publications in a row in which no bit had changed."""
        self.failed: deque[Publication] = deque()
        """Publications that failed; some of them may have been reported already."""
        self.conflict: VersionConflict | None = None
        """Why nothing can be published any more."""

    def publish(
        self, step: int, current: Tensors, stages: Stages, *, if_changed: bool = False
    ) -> Publication:
        """Compare, and hand the rest to the threads. If this raises, nothing is published.

        The tensors may change once this returns. `stages` began with the call.
        """
        stages.begin("wait")
        self._wait_until_at_most(self._max_pending - 1)
        self._encoder.wait_until_at_most(0)
        stages.begin("compare")
        changes = self._snapshot.compare(current, self._ahead) if self._can_follow() else None
        number = self._last + 1
        if changes is None:
            # An anchor that is being uploaded reads the snapshot.
            self._uploader.wait_until_at_most(0)
            self._in_snapshot = None
            self._snapshot.replace(current)
            self._in_snapshot = number
        stages.end()
        is_due = self._anchors.is_due(number)
        wanted = Wanted(
            step,
            is_anchor=changes is None or (is_due and not if_changed),
            is_due=is_due and if_changed,
            if_changed=if_changed,
        )
        publication = Publication(step, stages)
        self._queue(_Job(publication, number, changes=changes, wanted=wanted))
        return publication

    def abandon(self, step: int, error: Exception) -> None:
        """Queue a publication that this process could not make, so that other ranks hear why.

        The caller raises the error.
        """
        publication = Publication(step, Stages())
        publication.reported = True
        job = _Job(publication, self._last + 1, changes=None, wanted=Wanted(step))
        job.error = error
        self._queue(job)

    def _queue(self, job: _Job) -> None:
        job.publication._task = _Stage(job, partial(self._commit, job))
        self._last = job.number
        self._encoder.hand_over(_Stage(job, partial(self._encode, job)))

    def _can_follow(self) -> bool:
        """Whether a delta to the snapshot leads from the newest version, if nothing under way fails."""
        # First, since an anchor that ends meanwhile sets `_in_store`.
        anchors = any(isinstance(task, _Stage) and task.job.is_anchor for task in self._uploader.under_way())
        return self._in_snapshot is not None and (anchors or self._in_store is not None)

    def under_way(self) -> list[Publication]:
        """Return the publications that are neither committed nor failed, oldest first."""
        found: list[Publication] = []
        for worker in (self._uploader, self._encoder):
            for task in worker.under_way():
                # Of a comparison that was interrupted, the encoder may still have tasks.
                if not isinstance(task, _Stage):
                    continue
                if not task.job.publication.done() and task.job.publication not in found:
                    found.append(task.job.publication)
        return found

    def _wait_until_at_most(self, count: int) -> None:
        while len(found := self.under_way()) > count:
            assert found[0]._task is not None
            found[0]._task.wait()

    def stop(self) -> None:
        """Wait until everything is committed or has failed, and end both threads."""
        self._encoder.stop()
        self._uploader.stop()

    def _encode(self, job: _Job) -> None:
        """Encode a publication and bring the snapshot up to it, on the first thread."""
        task, is_handed_over = job.publication._task, False
        assert task is not None
        try:
            if job.changes is not None:
                job.parent = self._in_snapshot
                job.publication.stages.begin("encode")
                job.delta = self._encoded(job, job.changes)
                job.publication.stages.end()
            if job.error is None:
                self._settle(job)
            if job.settled.is_set() and not job.is_anchor:
                # Only an anchor is read from the snapshot, so a delta need not wait for that.
                is_handed_over = True
                self._uploader.hand_over(task)
            if job.changes is not None:
                # An anchor that is being uploaded reads the snapshot.
                for other in self._uploader.under_way():
                    assert isinstance(other, _Stage)
                    other.job.settled.wait()
                    if other.job.is_anchor:
                        other.wait()
                self._in_snapshot = None
                self._snapshot.apply(job.changes)
                self._in_snapshot = job.number
        except BaseException as exc:  # noqa: BLE001 -- the publication's result raises it
            if is_handed_over:
                logger.warning(
                    "the publication after step %d will be an anchor, as the snapshot could not be updated: "
                    "%s: %s",
                    *(job.publication.step, type(exc).__name__, exc),
                )
            else:
                job.error = exc
        finally:
            # The changes may be in memory that the next comparison needs.
            job.changes = None
            if not is_handed_over:
                self._uploader.hand_over(task)
        if not self._is_warm:
            self._is_warm = True
            # While the first version, an anchor, is uploaded: it took ten seconds of the second one.
            self._warm_up()

    def _warm_up(self) -> None:
        try:
            self._snapshot.warm_up(self._table, self._encoding)
        except Exception as exc:  # noqa: BLE001 -- the first change that is encoded raises it
            logger.info("what encodes changes was not compiled ahead: %s", exc)

    def _encoded(self, job: _Job, changes: Changes) -> EncodedDelta | None:
        try:
            if changes.num_changed == 0:
                return NO_CHANGES
            if self._committer.is_surely_anchor(changes.num_changed, self._encoding):
                # As of adapters in float32, all of which changes: to encode takes longer than the upload.
                logger.info(_TOO_MANY, job.publication.step)
                job.wanted = job.wanted._replace(is_anchor=True)
                return None
            return self._snapshot.encode(self._schema, self._table, changes, self._encoding)
        except Exception as exc:
            if not job.is_anchor:
                raise
            logger.warning("step %d will be an anchor without a delta: %s", job.publication.step, exc)
            return None

    def _settle(self, job: _Job) -> None:
        """Say whether a publication is an anchor, unless ranks are to agree on it when they begin it."""
        kind = self._committer.foreseen(job.wanted, job.delta)
        self._anchors.foreseen[job.number] = kind
        if kind is not None:
            job.is_anchor = kind == "anchor"
            job.settled.set()

    def _commit(self, job: _Job) -> Manifest:
        """Upload and commit a publication, on the second thread; raises as `Publication.result`."""
        publication = job.publication
        try:
            manifest = self._commit_or_fail(job)
        except BaseException as exc:
            self._in_store = None
            # Before the task is done, so that the next call on the trainer's thread finds it.
            self.failed.append(publication)
            if isinstance(exc, VersionConflict):
                self.conflict = exc
            if isinstance(exc, PublishFailed | VersionConflict | AssertionError):
                raise
            # For example the bucket or the right to write is gone, or memory is short.
            raise PublishFailed(
                f"step {publication.step} was not stored, and the next publication will be an anchor: "
                f"{exc if isinstance(exc, PatchstoreError) else f'{type(exc).__name__}: {exc}'}"
            ) from exc
        finally:
            job.delta = None
            job.settled.set()
        self._in_store = job.number
        self._anchors.stored(job.number, manifest)
        publication.stages.end()
        publication.publish_s = publication.stages.so_far_s()
        if manifest is None:
            assert self.newest is not None
            publication.is_unchanged = True
            logger.info("step %d: no bit has changed since version %d", publication.step, self.newest.version)
            return self.newest
        self.newest = manifest
        if self._report is not None:
            self._report.committed(publication, manifest)
        self._ask_whether_it_trains(manifest)
        logger.info(
            "published version %d: step %d, %d changed (%s), %.1f MiB, waited %.2f s, published in %.2f s",
            manifest.version,
            manifest.step,
            0 if manifest.delta is None else manifest.delta.num_changed,
            manifest.kind if manifest.delta is None else manifest.delta.encoding,
            manifest.num_bytes / 2**20,
            publication.waited_s,
            publication.publish_s,
        )
        return manifest

    def _commit_or_fail(self, job: _Job) -> Manifest | None:
        step = job.publication.step
        if self.conflict is not None:
            raise self.conflict
        follows = job.parent is not None and job.parent == self._in_store
        if job.error is None and (job.is_anchor or follows):
            delta = job.delta if follows else None
            wanted, is_settled = job.wanted, job.settled.is_set()
            stages = job.publication.stages
            stages.begin("upload")
            # An anchor may have been stored since it was due.
            is_still_due = wanted.is_due and not is_settled and self._anchors.is_due_now()
            begun = self._committer.begin(
                wanted._replace(is_anchor=job.is_anchor, is_due=is_still_due), delta
            )
            if begun is None:
                return None
            if begun.is_anchor and begun.delta is None and not wanted.is_anchor:
                logger.info(_TOO_MANY, step)
            assert job.is_anchor == begun.is_anchor or not is_settled, "the snapshot may have changed"
            job.is_anchor = begun.is_anchor
            job.settled.set()
            if begun.is_anchor:
                return self._committer.commit_anchor(begun, self._snapshot, stages)
            return self._committer.commit_delta(begun, stages)
        failed = PublishFailed(
            f"step {step} could not be encoded, and the next publication will be an anchor: "
            f"{type(job.error).__name__}: {job.error}"
            if job.error is not None
            else f"step {step} builds on a publication that was not stored; the next publication will be an "
            "anchor"
        )
        failed.__cause__ = job.error
        self._committer.abandon(failed)
        raise failed

    def _ask_whether_it_trains(self, manifest: Manifest) -> None:
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
