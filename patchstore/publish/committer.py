"""Turn a publication into a committed version: upload, verify, then create the manifest.

Order is the protocol. Payloads go first, under names that no other attempt uses; the manifest last,
by one create-only put. A crash in between leaves payloads that no version names.
"""

import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Literal, NamedTuple

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
from patchstore.format import hashing, history, layout, manifest_json
from patchstore.format.records import Anchor, Delta, Manifest, Payload, StateDigest, StoreHeader, Writer
from patchstore.format.state_sums import Sums, pack_sums, state_total
from patchstore.payloads import delta_file
from patchstore.payloads.delta import EncodedDelta
from patchstore.publish.anchor_upload import ReadOnly, upload_anchor
from patchstore.publish.signatures import store_signature
from patchstore.publish.uploads import Uploads
from patchstore.signing.signers import Signer
from patchstore.stores.base import Store
from patchstore.support.worker import Task, Worker

logger = logging.getLogger(__name__)

_OF_NOTHING = "gap"
"""The encoding of an empty delta: any release reads it."""


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
    """The store does not show what should be there; perhaps not yet, or not at the moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a publication is going to be, if it is committed."""

    version: int
    parent: int | None
    write_id: str


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
    has_version: bool = True
    """Whether this publisher has committed a version, which can stand for one in which nothing changed."""

    def is_needed(self, delta: EncodedDelta | None) -> bool:
        """Whether there is anything to store."""
        may_be_nothing = self.if_changed and self.has_version and not self.is_anchor
        return not may_be_nothing or delta is None or delta.num_changed > 0


class Begun(NamedTuple):
    """A publication that can be stored."""

    attempt: Attempt
    step: int
    is_anchor: bool
    """Whether the whole model is stored: because that was asked for, or because the delta would be larger."""
    delta: EncodedDelta | None
    """What leads from the parent; None where it is not known, or not stored."""


def check_parents(delta: EncodedDelta, before: Mapping[str, Sums], version: int) -> None:
    """Raises PublishFailed where a delta was encoded against other tensors than those with these sums."""
    if wrong := [name for name, sums in delta.parent_sums.items() if before[name] != sums]:
        raise PublishFailed(
            f"the snapshot is no longer version {version}: {len(wrong)} tensors differ, such as "
            f"{wrong[0]!r}; the next publication will be an anchor"
        )


def store_delta(
    uploads: Uploads,
    header: StoreHeader,
    attempt: Attempt,
    step: int,
    delta: EncodedDelta,
    *,
    place: int = 0,
    num_places: int = 1,
) -> Delta:
    """Upload a delta, or the part of one that a rank has.

    Args:
        place: of the rank in its group.
    """
    assert attempt.parent is not None
    payloads: tuple[Payload, ...] = ()
    if delta.num_changed:
        metadata = delta_file.delta_metadata(
            *(attempt.version, attempt.parent, step, header.run_id),
            *(delta.encoding, delta.listed, delta.firsts),
        )
        key = layout.delta_key(attempt.version, attempt.write_id, place + 1, num_places)
        payloads = (uploads.upload(key, delta.file(metadata)),)
    return Delta(encoding=delta.encoding, num_changed=delta.num_changed, payloads=payloads)


class Committer:
    """The single writer's place in a run's log. Not for use from several threads at once."""

    def __init__(
        self,
        store: Store,
        header: StoreHeader,
        *,
        head: Manifest | None,
        parent: Manifest | None,
        parent_digest: str | None,
        sums: Mapping[str, Sums] | None,
        files: Mapping[str, bytes],
        max_shard_bytes: int,
        largest_delta: int | None = None,
        beside: tuple[Worker, Worker],
        signer: Signer | None = None,
    ) -> None:
        """Take a place behind `head`; the next version builds on `parent`.

        Nothing is written yet. Where `head` exists, call `claim` before anything else.

        Args:
            parent_digest: of the parent's manifest as it was read; None without a parent.
            sums: the parent's digest sums; None where they are not known, and the first publication is an
                anchor without a delta.
            largest_delta: bytes; an anchor takes the place of a larger one. None for no limit.
            beside: threads for what is asked and stored while a delta is uploaded. They exist before the
                first publication, which must not fail because the system starts no more.
            signer: signs each version.
        """
        self.store = store
        self.header = header
        self._uploads = Uploads(store)
        self.parent = parent
        self.files = files
        self._max_shard_bytes, self._largest_delta = max_shard_bytes, largest_delta
        self._beside = beside
        self._signer = signer
        self._next = 0 if head is None else head.version + 1
        self._epoch = 1 if head is None else head.writer.epoch + 1
        self._id = writer_id()
        self._uncertain: list[tuple[Manifest, Mapping[str, Sums] | None]] = []
        """Attempts at the next version that got no answer, and its sums; any of them may yet take place."""
        self._sums = sums
        self._parent_digest = parent_digest

    def claim(self, *, is_signed: bool = True) -> Manifest:
        """Commit an empty delta on the parent, with a higher epoch: that fences all older publishers.

        If the parent may be forged it is not signed, as it has the parent's weights; an anchor must follow.

        Raises:
            VersionConflict: another publisher was faster; nothing was written.
        """
        assert self.parent is not None
        delta = Delta(encoding=_OF_NOTHING, num_changed=0, payloads=())
        new = self._manifest(self.parent.step, self.parent.state, delta, None, new_write_id())
        return self._commit(new, self._sums, is_signed=is_signed)

    def foreseen(self, wanted: Wanted, delta: EncodedDelta | None) -> Kind:
        """Say how a publication is going to be stored; any thread may ask.

        Args:
            delta: to the parent; there is one, or an anchor is wanted.
        """
        if not wanted.is_needed(delta):
            return "nothing"
        is_too_large = delta is not None and self.is_too_large(delta.num_bytes)
        return "anchor" if wanted.is_anchor or wanted.is_due or is_too_large else "delta"

    def begin(self, wanted: Wanted, delta: EncodedDelta | None) -> Begun | None:
        """Say how the next publication is stored, None for not at all. Nothing is written.

        Before an anchor this finds out whether a commit that got no answer took place. If it did, its version
        is the parent from now on.

        Args:
            delta: as `foreseen`.

        Raises:
            RunLost: an anchor is to be uploaded, but the store no longer holds the parent.
        """
        kind = self.foreseen(wanted, delta)
        if kind == "nothing":
            return None
        if delta is not None and self.is_too_large(delta.num_bytes):
            delta = None
        is_anchor = kind == "anchor"
        return Begun(self.attempt(is_anchor=is_anchor), wanted.step, is_anchor, delta)

    def is_too_large(self, num_bytes: int) -> bool:
        """Whether an anchor takes the place of a delta with so many bytes."""
        return self._largest_delta is not None and num_bytes > self._largest_delta

    def attempt(self, *, is_anchor: bool) -> Attempt:
        """Return what the next version is going to be; what is committed then carries this write id.

        Raises:
            RunLost: as `begin`.
        """
        if is_anchor:
            self._settle()
            # Here too, or a whole model would be uploaded to where the run is no more.
            self._check_run()
        parent = None if self.parent is None else self.parent.version
        return Attempt(version=self._next, parent=parent, write_id=new_write_id())

    def abandon(self, error: Exception) -> None:
        """Nothing of a publication is stored, and no other process waits for it."""

    def commit_delta(self, begun: Begun) -> Manifest:
        """Publish a delta to the parent.

        Raises:
            VersionConflict: fenced for good.
            RunLost: the store no longer holds the parent.
            PublishFailed: the store did not take it; the parent is what it was.
        """
        attempt, step, _, delta = begun
        assert delta is not None
        after = self._after(delta)
        return self.finish(
            step, after, attempt, lambda: store_delta(self._uploads, self.header, attempt, step, delta), None
        )

    def commit_anchor(self, begun: Begun, snapshot: ReadOnly) -> Manifest:
        """Publish the whole model, and a delta to the parent where there is one.

        Args:
            snapshot: must not change before this returns.

        Raises:
            As `commit_delta`.
        """
        attempt, step, _, delta = begun
        after: dict[str, Sums] | None = None
        if delta is not None and self.parent is not None:
            try:
                after = self._after(delta)
            except PublishFailed as exc:
                logger.warning("version %d will be an anchor without a delta: %s", self._next, exc)
        anchor, sums = upload_anchor(
            *(attempt.version, step, attempt.write_id, self.header, snapshot, self.files),
            max_shard_bytes=self._max_shard_bytes,
            upload=self._uploads.upload,
        )
        if delta is None or after is None:
            return self.finish(step, sums, attempt, lambda: None, anchor)
        wrong = [name for name in sums if after[name] != sums[name]]
        assert not wrong, f"the changes do not add up to the model: {wrong[:3]}"
        found = delta

        def store() -> Delta:
            return store_delta(self._uploads, self.header, attempt, step, found)

        return self.finish(step, after, attempt, store, anchor)

    def _after(self, delta: EncodedDelta) -> dict[str, Sums]:
        """Return the digest sums of all tensors after a delta.

        Raises:
            PublishFailed: the delta was encoded against other tensors than the parent's.
        """
        before = self._sums
        assert self.parent is not None and before is not None
        check_parents(delta, before, self.parent.version)
        return self.grown(delta.sum_growth)

    def grown(self, growth: Mapping[str, Sums]) -> dict[str, Sums]:
        """Return the digest sums of all tensors after those of some have grown."""
        before = self._sums
        assert before is not None
        return {**before, **{name: before[name].plus(sums) for name, sums in growth.items()}}

    def finish(
        self,
        step: int,
        sums: Mapping[str, Sums],
        attempt: Attempt,
        store_delta: Callable[[], Delta | None],
        anchor: Anchor | None,
    ) -> Manifest:
        """Upload what a version has beside its anchor, and commit it.

        The run is looked for, and the sums are uploaded, while the delta is: a publication waits for each
        round trip to the store.
        """
        checked = Task(self._check_run)
        stored = Task(partial(self._upload_state, sums, attempt.write_id, is_anchor=anchor is not None))
        first, second = self._beside
        first.hand_over(checked)
        second.hand_over(stored)
        try:
            delta = store_delta()
        finally:
            checked.wait()
            stored.wait()
        new = self._manifest(step, stored.result(), delta, anchor, attempt.write_id)
        try:
            checked.result()
        except RunLost:
            self._withdraw(new)
            raise
        return self._commit(new, sums)

    def _upload_state(self, sums: Mapping[str, Sums], write_id: str, *, is_anchor: bool) -> StateDigest:
        """Store the digest sums, or name the parent's again if they are the same and there is no anchor."""
        total = state_total(self.header.schema, sums)
        if self.parent is not None and self.parent.state.total == total and not is_anchor:
            return self.parent.state
        data = pack_sums(self.header.schema, sums)
        stored = self._uploads.upload(layout.sums_key(self._next, write_id), partial(iter, (data,)))
        return StateDigest(total=total, sums=stored)

    def _check_run(self) -> None:
        """Make sure that the store still holds what the next version builds on.

        A run that is deleted after this, and before the commit, is noticed at the next version.

        Raises:
            RunLost: it does not. What is missing is looked for again and again, as this ends the publisher.
        """
        key = layout.HEADER if self.parent is None else layout.manifest_key(self.parent.version)

        def look() -> bytes:
            try:
                return self.store.get(key)
            except NotFound as exc:
                raise _Missing(f"{self.store.url} has no {key} any more") from exc

        try:
            data = self._uploads.retried(f"looking for {key}", look)
        except PublishFailed as exc:
            if isinstance(exc.__cause__, _Missing):
                raise self._lost(f"it has no {key} any more") from exc
            raise
        if not self._is_ours(data):
            raise self._lost(f"its {key} is another")

    def _is_ours(self, data: bytes) -> bool:
        if self.parent is not None:
            return hashing.digest(data) == self._parent_digest
        try:
            return manifest_json.header_from_json(data).run_id == self.header.run_id
        except DataError:
            return False

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
        self,
        step: int,
        state: StateDigest,
        delta: Delta | None,
        anchor: Anchor | None,
        write_id: str,
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

    def _commit(self, new: Manifest, sums: Mapping[str, Sums] | None, *, is_signed: bool = True) -> Manifest:
        if self._signer is not None and is_signed:
            # First: a reader that requires signatures must never find a version without one.
            store_signature(self._uploads, self.store, self._signer, self.header, new)
        try:
            self._uploads.retried(f"commit of version {new.version}", lambda: history.commit(self.store, new))
        except PublishFailed:
            self._uncertain.append((new, sums))
            raise
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

    def _adopt(self, new: Manifest, sums: Mapping[str, Sums] | None) -> None:
        self.parent, self._next, self._uncertain = new, new.version + 1, []
        self._parent_digest = hashing.digest(manifest_json.to_json(new))
        self._sums = sums
