"""Turn a publication into a committed version: upload, verify, then create the manifest.

Order is the protocol. Payloads go first, under names that no other attempt uses; the manifest last,
by one create-only put. A crash in between leaves payloads that no version names.

Every rank has a `Committer`, which stores the rank's part of a version. The one that leads also has the
`Log`, and commits. A process that publishes alone is a group of one.
"""

import logging
import os
import socket
import uuid
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from patchstore.bucket import digests, history, manifest_json
from patchstore.bucket.records import Anchor, Delta, Manifest, Payload, StateDigest, StoreHeader, Writer
from patchstore.bucket.state_sums import SumsArray, pack_sums, state_total
from patchstore.codec import Encoding
from patchstore.codec.context import Context
from patchstore.codec.delta import NO_CHANGES, NO_SUMS, EncodedDelta, least_bytes
from patchstore.codec.part_table import PartTable
from patchstore.errors import (
    DataError,
    NotFound,
    PatchstoreError,
    PublishFailed,
    RunLost,
    StoreUnavailable,
    VersionConflict,
    VersionNotFound,
)
from patchstore.publish.anchor import AnchorWriter
from patchstore.publish.base_checkpoint import BaseCheckpoint
from patchstore.publish.ownership import Plan, Share, told_sums, total_sums
from patchstore.publish.ranks import AnyChannel, Message
from patchstore.publish.snapshot import Snapshot
from patchstore.publish.uploads import retried, upload
from patchstore.signing import Signer, statement
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.support.threads import Task, Worker
from patchstore.support.tracing import Stages

logger = logging.getLogger(__name__)


def now() -> str:
    """UTC in ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def writer_id() -> str:
    """A name for one publisher that people can trace to a process."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


def new_write_id() -> str:
    """64 random bits: unique among the attempts at one version."""
    return uuid.uuid4().hex[:16]


class _Missing(StoreUnavailable):
    """The store does not show what should be there; perhaps not yet, or the answer was damaged."""


Kind = Literal["anchor", "delta", "nothing"]
"""How a publication is stored."""


class Wanted(NamedTuple):
    """How a publication is to be stored."""

    step: int
    is_anchor: bool = False
    """Whether the whole model is stored, whatever has changed."""
    is_due: bool = False
    """Whether it is stored if there is anything to store."""
    if_changed: bool = False
    """As `Publisher.publish_patch` takes it."""

    def is_needed(self, delta: EncodedDelta | None) -> bool:
        may_be_nothing = self.if_changed and not self.is_anchor
        return not may_be_nothing or delta is None or delta.num_changed > 0


class Attempt(NamedTuple):
    """What the next version is going to be, if it is committed."""

    version: int
    parent: int | None
    write_id: str


class Begun(NamedTuple):
    """A publication that can be stored."""

    attempt: Attempt
    step: int
    is_anchor: bool
    """Whether the whole model is stored: because that was asked for, or because the delta would be larger."""
    delta: EncodedDelta | None
    """What leads from the parent, of this rank's parts; None where it is not known, or not stored."""
    sums: SumsArray | None
    """The digest sums of all tensors after the delta, on the leader."""


Beside = tuple[Task[None], Task[StateDigest]]
"""What the leader does while ranks upload a delta, because each round trip to the store takes time: it looks
for the run, and stores the digest sums."""


class Log:
    """The single writer's place in a run's log. Not for use from several threads at once."""

    def __init__(
        self,
        store: Store,
        header: StoreHeader,
        *,
        head: Manifest | None,
        parent: Manifest | None,
        parent_digest: str | None,
        sums: SumsArray | None,
        header_digest: str | None,
        beside: tuple[Worker, Worker],
        signer: Signer | None = None,
    ) -> None:
        """Take a place behind `head`; the next version builds on `parent`, whose digest is of what was read.

        Nothing is written yet. Where `head` exists, call `claim` before anything else. Without the parent's
        `sums` the first publication is an anchor without a delta. `beside` are threads for what is asked and
        stored while a delta is uploaded. They exist before the first publication, which must not fail because
        the system starts no more.
        """
        self.store, self.header = store, header
        self.parent = parent
        self._parent_digest, self._sums = parent_digest, sums
        self._header_digest = header_digest
        """Of the run's header as it was stored when it was last found to be this run's."""
        self._beside, self._signer = beside, signer
        self._next = 0 if head is None else head.version + 1
        self._epoch = 1 if head is None else head.writer.epoch + 1
        self._id = writer_id()
        self._uncertain: list[tuple[Manifest, SumsArray | None]] = []
        """Attempts at the next version that got no answer, and its sums; any of them may yet take place."""

    def claim(self, *, is_signed: bool = True) -> Manifest:
        """Commit an empty delta on the parent, with a higher epoch: that fences all older publishers.

        If the parent may be forged it is not signed, as it has the parent's weights; an anchor must follow.
        """
        assert self.parent is not None
        delta = Delta(encoding=NO_CHANGES.encoding, num_changed=0, payloads=())
        new = self._manifest(self.parent.step, self.parent.state, delta, None, new_write_id())
        return self._commit(new, self._sums, is_signed=is_signed)

    def attempt(self, *, is_anchor: bool) -> Attempt:
        """Return what the next version is going to be; what is committed then carries this write id.

        Before an anchor this finds out whether a commit that got no answer took place. If it did, its version
        is the parent from now on.
        """
        if is_anchor:
            self._settle()
            # Here too, or a whole model would be uploaded to where the run is no more.
            self._check_run()
        parent = None if self.parent is None else self.parent.version
        return Attempt(self._next, parent, new_write_id())

    def grown(self, growth: SumsArray) -> SumsArray:
        """Return the digest sums of all tensors after they have grown."""
        assert self._sums is not None
        grown: SumsArray = self._sums + growth
        return grown

    def start(self, attempt: Attempt, sums: SumsArray, *, is_anchor: bool) -> Beside:
        """Begin to look for the run, and to upload a version's digest sums. The caller waits for both."""
        store = partial(self._upload_state, sums, attempt.write_id, is_anchor=is_anchor)
        checked, stored = Task(self._check_run), Task(store)
        first, second = self._beside
        first.hand_over(checked)
        second.hand_over(stored)
        return checked, stored

    def finish(
        self,
        begun: Begun,
        sums: SumsArray,
        beside: Beside,
        delta: Delta | None,
        anchor: Anchor | None,
    ) -> Manifest:
        """Commit a version of which everything is uploaded, or is by what was started beside.

        VersionConflict fences this writer for good, and RunLost ends it, too. After PublishFailed the parent
        is what it was.
        """
        checked, stored = beside
        stored.wait()
        checked.wait()
        new = self._manifest(begun.step, stored.result(), delta, anchor, begun.attempt.write_id)
        try:
            checked.result()
        except RunLost:
            self._withdraw(new)
            raise
        return self._commit(new, sums)

    def _upload_state(self, sums: SumsArray, write_id: str, *, is_anchor: bool) -> StateDigest:
        """Store the digest sums, or name the parent's again if they are the same and there is no anchor."""
        total = state_total(self.header.schema, sums)
        if self.parent is not None and self.parent.state.total == total and not is_anchor:
            return self.parent.state
        data = pack_sums(self.header.schema, sums)
        stored = upload(self.store, layout.sums_key(self._next, write_id), partial(iter, (data,)))
        return StateDigest(total=total, sums=stored)

    def _check_run(self) -> None:
        """Make sure that the store still holds what the next version builds on.

        What is missing or another is looked for again and again, as it ends the publisher with RunLost. A run
        that is deleted after this, and before the commit, is noticed at the next version.
        """
        key = layout.HEADER if self.parent is None else layout.manifest_key(self.parent.version)

        def look() -> None:
            try:
                data = self.store.get(key)
            except NotFound as exc:
                raise _Missing(f"it has no {key} any more") from exc
            if not self._is_ours(data):
                raise _Missing(f"its {key} is another, or was damaged")

        try:
            retried(f"looking for {key}", look)
        except PublishFailed as exc:
            if isinstance(exc.__cause__, _Missing):
                raise self._lost(str(exc.__cause__)) from exc
            raise

    def _is_ours(self, data: bytes) -> bool:
        found = digests.digest(data)
        if self.parent is not None:
            return found == self._parent_digest
        if found != self._header_digest:
            try:
                if manifest_json.header_from_json(data).run_id != self.header.run_id:
                    return False
            except DataError:
                return False
            self._header_digest = found
        return True

    def _lost(self, why: str) -> RunLost:
        return RunLost(
            f"{self.store.url} no longer holds run {self.header.run_id} as this publisher left it: {why}. "
            f"Version {self._next} was not committed, and this publisher cannot go on. Restore the bucket "
            "and open a publisher with resume=..., or open a new run under another prefix"
        )

    def _withdraw(self, new: Manifest) -> None:
        """Delete what was uploaded for a version that was not committed, as far as the store allows it.

        Otherwise parts of this run would stay where there is none any more, or another one.
        """
        stored = [] if self.parent is not None and new.state == self.parent.state else [new.state.sums]
        for part in (new.delta, new.anchor):
            stored += part.payloads if part is not None else ()
        stored += new.anchor.files if new.anchor is not None else ()
        for each in stored:
            try:
                self.store.delete(each.key)
            except PatchstoreError as exc:
                logger.warning("%s stays behind, though no version names it: %s", each.key, exc)

    def _manifest(
        self, step: int, state: StateDigest, delta: Delta | None, anchor: Anchor | None, write_id: str
    ) -> Manifest:
        return Manifest(
            version=self._next,
            parent=None if self.parent is None else self.parent.version,
            parent_digest=self._parent_digest,
            run_id=self.header.run_id,
            step=step,
            created_at=now(),
            writer=Writer(id=self._id, epoch=self._epoch, write_id=write_id),
            state=state,
            delta=delta,
            anchor=anchor,
        )

    def _commit(self, new: Manifest, sums: SumsArray | None, *, is_signed: bool = True) -> Manifest:
        if self._signer is not None and is_signed:
            # First: a reader that requires signatures must never find a version without one.
            self._sign(self._signer, new)
        earlier = [attempt for attempt, _ in self._uncertain]
        # Before it is made, so that it is known however the attempt ends.
        self._uncertain.append((new, sums))
        try:
            retried(f"commit of version {new.version}", lambda: history.commit(self.store, new, earlier))
        except VersionConflict as exc:
            if self._settle():
                raise PublishFailed(
                    f"an earlier commit of version {self._next - 1} took place after all, although its "
                    "answer was lost; the next publication will be an anchor on it"
                ) from exc
            raise
        self._adopt(new, sums)
        try:
            history.write_hint(self.store, new.version)
        except PatchstoreError as exc:
            # The version exists; whatever is wrong with the hint must not unmake it.
            logger.info("head.json was not updated, which costs readers a listing: %s", exc)
        return new

    def _sign(self, signer: Signer, new: Manifest) -> None:
        """Sign a version and store the signature, before its manifest is created.

        If another writer takes the version, no reader asks for this signature: its key has the digest of a
        manifest that was never stored.
        """
        try:
            key, bundle = statement.signed(signer, self.header, new.version, manifest_json.to_json(new))
        except Exception as exc:
            raise PublishFailed(
                f"version {new.version} could not be signed, and the next publication will be an anchor: "
                f"{exc}"
            ) from exc
        there = retried(f"storing {key}", lambda: history.create(self.store, key, bundle))
        if there != bundle:
            raise PublishFailed(
                f"{key} holds something else, which another program wrote, so version {new.version} was not "
                "committed; the next publication will be an anchor"
            )

    def _settle(self) -> bool:
        """Find out whether a commit that got no answer took place; if so its version is the parent now."""
        if not self._uncertain:
            return False
        try:
            found = history.read_manifest(self.store, self._next)
        except (StoreUnavailable, VersionNotFound, DataError):
            return False
        for attempt, sums in self._uncertain:
            if attempt == found:
                self._adopt(found, sums)
                return True
        return False

    def _adopt(self, new: Manifest, sums: SumsArray | None) -> None:
        self.parent, self._next, self._uncertain = new, new.version + 1, []
        self._parent_digest = digests.digest(manifest_json.to_json(new))
        self._sums = sums


def _joint(encodings: Set[str]) -> str:
    """Return the encoding of a delta whose ranks have these: a file in `context` may list all that it has."""
    if not encodings:
        return NO_CHANGES.encoding
    if Context().name in encodings:
        return Context().name
    (only,) = encodings
    return only


class Committer:
    """Publishes a rank's part of each version. Not for use from several threads at once.

    Every rank makes the same calls in the same order. If one of them fails on any rank, it fails on all, and
    nothing is committed.
    """

    def __init__(
        self,
        channel: AnyChannel,
        store: Store,
        header: StoreHeader,
        share: Share,
        table: PartTable,
        *,
        plan: Plan | None,
        sums: SumsArray | None,
        log: Log | None,
        base: BaseCheckpoint,
        files: Mapping[str, bytes],
        largest_delta: int | None,
    ) -> None:
        """Take a rank's place; `plan`, `log` and `files` are on the leader alone.

        `sums` are of what this rank owns, [P, 2] as in `table`, in the version to build on; None if they are
        not known. An anchor takes the place of a delta of more bytes than `largest_delta`.
        """
        self._channel, self._store, self._header = channel, store, header
        self._table, self._sums = table, None if sums is None else sums.copy()
        self._log, self._files, self._largest_delta = log, files, largest_delta
        self._anchors = AnchorWriter(channel, store, header, share, table, plan, base)

    @property
    def leads(self) -> bool:
        return self._log is not None

    def foreseen(self, wanted: Wanted, delta: EncodedDelta | None) -> Kind | None:
        """Say how a publication is going to be stored; None where ranks decide it when they begin it.

        Any thread may ask. There is a delta to the parent, or an anchor is wanted.
        """
        if wanted.is_anchor:
            return "anchor"
        if not self._channel.is_alone:
            return None if wanted.is_due or self._largest_delta is not None else "delta"
        if not wanted.is_needed(delta):
            return "nothing"
        assert delta is not None
        return "anchor" if wanted.is_due or self._is_too_large(delta.num_bytes) else "delta"

    def is_surely_anchor(self, num_changed: int, encoding: Encoding) -> bool:
        """Whether no delta of so many changes is small enough; ranks do not say it before they encode."""
        least = least_bytes(self._header.schema, num_changed, encoding)
        return self._channel.is_alone and self._is_too_large(least)

    def _is_too_large(self, num_bytes: int) -> bool:
        return self._largest_delta is not None and num_bytes > self._largest_delta

    def begin(self, wanted: Wanted, delta: EncodedDelta | None) -> Begun | None:
        """Agree on what is published next, and how: on whether it is an anchor, and on one encoding.

        None where no rank has anything to store.
        """
        known: EncodedDelta | None = None
        sums: SumsArray | None = None

        def say() -> Message:
            nonlocal known
            known = self._of_parent(wanted, delta)
            return {
                "step": wanted.step,
                "is_anchor": wanted.is_anchor,
                "is_due": wanted.is_due,
                "if_changed": wanted.if_changed,
                "is_needed": wanted.is_needed(known),
                "num_bytes": None if known is None else known.num_bytes,
                "encoding": None if known is None or not known.num_changed else known.encoding,
                "growth": told_sums(self._table, NO_SUMS if known is None else known.growth),
            }

        def conclude(reports: list[Message]) -> Message:
            nonlocal sums
            assert self._log is not None
            self._check_alike(wanted, reports)
            if not any(report["is_needed"] for report in reports):
                return {"is_needed": False}
            sizes = [report["num_bytes"] for report in reports]
            has_delta = None not in sizes and not self._is_too_large(sum(sizes))
            # Where it is not due on a rank, the snapshot there may have later weights already.
            whole = wanted.is_anchor or not has_delta or all(report["is_due"] for report in reports)
            attempt = self._log.attempt(is_anchor=whole)
            if has_delta:
                growth = total_sums(self._header.schema, (report["growth"] for report in reports))
                sums = self._log.grown(growth)
            encodings = {report["encoding"] for report in reports} - {None}
            return {
                "attempt": attempt,
                "is_anchor": whole,
                "encoding": _joint(encodings) if has_delta else None,
            }

        self._channel.next_call()
        told = self._channel.round("begin a publication", say, conclude)
        if "is_needed" in told:
            return None
        agreed = None
        if told["encoding"] is not None:
            assert known is not None
            agreed = replace(known, encoding=told["encoding"])
        return Begun(Attempt(*told["attempt"]), wanted.step, told["is_anchor"], agreed, sums)

    def _of_parent(self, wanted: Wanted, delta: EncodedDelta | None) -> EncodedDelta | None:
        """Return a delta to the newest version; None where it is not known, and an anchor is stored."""
        before = self._sums
        if delta is None or before is None:
            return None
        differ = (before[delta.parents.numbers] != delta.parents.sums).any(axis=1)
        if not differ.any():
            return delta
        wrong = [self._table.parts[number].key for number in delta.parents.numbers[differ].tolist()]
        failed = (
            f"the snapshot no longer has the weights of the version before: {len(wrong)} tensors differ, "
            f"such as {wrong[0]!r}"
        )
        if wanted.is_anchor:
            logger.warning("step %d will be an anchor without a delta: %s", wanted.step, failed)
            return None
        raise PublishFailed(f"{failed}; the next publication will be an anchor")

    def _check_alike(self, wanted: Wanted, reports: list[Message]) -> None:
        """Raise PublishFailed where a rank wants something else than the leader does."""
        step, own = wanted.step, self._channel.name(self._channel.rank)
        for rank, report in zip(self._channel.ranks, reports, strict=True):
            other = self._channel.name(rank)
            if report["step"] != step:
                raise PublishFailed(
                    f"{other} publishes step {report['step']}, and {own} step {step}: call publish_patch on "
                    "all ranks, with the same steps in the same order; the next publication will be an anchor"
                )
            if report["if_changed"] != wanted.if_changed:
                raise PublishFailed(
                    f"step {step} has if_changed={report['if_changed']} on {other}, and "
                    f"if_changed={wanted.if_changed} on {own}: call publish_patch with the same arguments on "
                    "all ranks; the next publication will be an anchor"
                )
            if report["is_anchor"] != wanted.is_anchor:
                raise PublishFailed(
                    f"step {step} is an anchor on {other if report['is_anchor'] else own} alone, which heard "
                    "earlier of a failure; the next publication will be an anchor"
                )

    def commit_delta(self, begun: Begun, stages: Stages) -> Manifest:
        """Publish this rank's part of a delta to the parent. What fails on one rank fails on all.

        The leader begins the stage `commit` once all ranks have uploaded.
        """
        sums, stored = begun.sums, Message()
        beside: Beside | None = None
        if self._log is not None:
            assert sums is not None
            beside = self._log.start(begun.attempt, sums, is_anchor=False)

        def store() -> Message:
            stored.update(self._stored(begun))
            return stored

        def conclude(reports: list[Message]) -> Message:
            assert self._log is not None and beside is not None and sums is not None
            stages.begin("commit")
            return as_told(self._log.finish(begun, sums, beside, _joined(reports), None))

        try:
            manifest = as_heard(self._channel.round("store a delta", store, conclude))
        finally:
            for task in beside or ():
                task.wait()
        _check_named(manifest, stored["payloads"])
        assert self._sums is not None and begun.delta is not None
        self._sums[begun.delta.growth.numbers] += begun.delta.growth.sums
        return manifest

    def commit_anchor(self, begun: Begun, snapshot: Snapshot, stages: Stages) -> Manifest:
        """Publish the whole model, and this rank's part of a delta to the parent where all ranks have one.

        The snapshot must not change before this returns. `stages` as of `commit_delta`.
        """
        place, stored = (begun.attempt.version, begun.attempt.write_id), Message()
        own: SumsArray | None = None

        def conclude(reports: list[Message]) -> Message:
            assert self._log is not None
            stages.begin("commit")
            anchor, sums = self._anchors.joined(*place, self._files, reports)
            after = begun.sums
            if after is not None and (differ := (after != sums).any(axis=1)).any():
                tensors = self._header.schema.tensors
                wrong = [tensors[place].name for place in np.flatnonzero(differ)]
                raise PublishFailed(
                    f"the changes do not add up to the model: {wrong[:3]}; the next publication will be an "
                    "anchor"
                )
            beside = self._log.start(begun.attempt, sums, is_anchor=True)
            delta = None if after is None else _joined(reports)
            return as_told(self._log.finish(begun, sums, beside, delta, anchor))

        with self._anchors.gathered(*place, snapshot) as gathered:

            def write() -> Message:
                nonlocal own
                report, own = self._anchors.write(*place, begun.step, gathered, snapshot)
                stored.update(report)
                stored.update({} if begun.delta is None else self._stored(begun))
                return stored

            manifest = as_heard(self._channel.round("store an anchor", write, conclude))
            _check_named(manifest, [*stored["files"], *stored.get("payloads", ())])
        self._sums = own
        return manifest

    def abandon(self, error: Exception) -> None:
        """Tell the other ranks that this one cannot take part in the next publication.

        Always raises: this error, or that of another rank.
        """

        def fail() -> Message:
            raise error

        self._channel.next_call()
        self._channel.round("begin a publication", fail, lambda _: {})

    def _stored(self, begun: Begun) -> Message:
        """Upload this rank's part of a delta, and say what it is."""
        attempt, delta = begun.attempt, begun.delta
        assert attempt.parent is not None and delta is not None
        payloads = []
        if delta.num_changed:
            file = delta.file(
                self._header.schema,
                version=attempt.version,
                parent=attempt.parent,
                step=begun.step,
                run_id=self._header.run_id,
            )
            place, num_places = self._channel.index + 1, len(self._channel.ranks)
            key = layout.delta_key(attempt.version, attempt.write_id, place, num_places)
            payloads = [asdict(upload(self._store, key, file))]
        return {"encoding": delta.encoding, "num_changed": delta.num_changed, "payloads": payloads}


def _joined(reports: Sequence[Message]) -> Delta:
    return Delta(
        encoding=reports[0]["encoding"],
        num_changed=sum(report["num_changed"] for report in reports),
        payloads=tuple(Payload(**each) for report in reports for each in report["payloads"]),
    )


def _check_named(manifest: Manifest, stored: Sequence[Message]) -> None:
    """Raises PublishFailed unless a version names all that this rank stored for it."""
    parts = [part for part in (manifest.delta, manifest.anchor) if part is not None]
    named = {payload for part in parts for payload in part.payloads}
    if missing := [each["key"] for each in stored if Payload(**each) not in named]:
        raise PublishFailed(
            f"version {manifest.version} lacks {missing[0]}, which this rank stored for it; the next "
            "publication will be an anchor"
        )


def as_told(manifest: Manifest) -> Message:
    return {"manifest": manifest_json.to_json(manifest).decode(), "version": manifest.version}


def as_heard(answer: Message) -> Manifest:
    key = layout.manifest_key(answer["version"])
    return manifest_json.from_json(key, answer["manifest"].encode())
