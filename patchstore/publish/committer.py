"""Turn a publication into a committed version: upload, verify, then create the manifest.

Order is the protocol. Payloads go first, under names that no other attempt uses; the manifest last,
by one create-only put. A crash in between leaves payloads that no version names.
"""

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

import torch

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
from patchstore.format.records import (
    Anchor,
    Delta,
    Manifest,
    Payload,
    StateDigest,
    StoreHeader,
    Writer,
)
from patchstore.format.state_sums import Sums, pack_sums, state_total
from patchstore.payloads import delta_file
from patchstore.payloads.delta import EncodedDelta
from patchstore.publish.anchor_upload import upload_anchor
from patchstore.stores.base import Chunk, Store
from patchstore.support.worker import Task, Worker

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

ATTEMPTS = 5
"""Tries of a store request, each within the time of the store (`docs/stores.md`, "Time")."""
_OF_NOTHING = "gap"
"""The encoding of an empty delta: any release reads it."""
FIRST_PAUSE_S = 0.5  # doubles with each try: 7.5 s in all, longer than a load balancer takes to fail over


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


class Committer:
    """The single writer's place in a run's log. Not for use from several threads at once."""

    def __init__(
        self,
        store: Store,
        header: StoreHeader,
        *,
        head: Manifest | None,
        parent: Manifest | None,
        sums: Mapping[str, Sums] | None,
        files: Mapping[str, bytes],
        max_shard_bytes: int,
        beside: tuple[Worker, Worker],
    ) -> None:
        """Take a place behind `head`; the next version builds on `parent`.

        Nothing is written yet. Where `head` exists, call `claim` before anything else.

        Args:
            sums: the parent's digest sums; None where they are not known, and the first publication is an
                anchor without a delta.
            beside: threads for what is asked and stored while a delta is uploaded. They exist before the
                first publication, which must not fail because the system starts no more.
        """
        self.store = store
        self.header = header
        self.parent = parent
        self._files = files
        self._max_shard_bytes = max_shard_bytes
        self._beside = beside
        self._next = 0 if head is None else head.version + 1
        self._epoch = 1 if head is None else head.writer.epoch + 1
        self._id = writer_id()
        self._uncertain: list[tuple[Manifest, Mapping[str, Sums] | None]] = []
        """Attempts at the next version that got no answer, and its sums; any of them may yet take place."""
        self._sums = sums
        self._parent_digest: str | None = None
        if parent is not None:
            self._parent_digest = history.stored_digest(store, parent.version)

    def claim(self) -> Manifest:
        """Commit an empty delta on the parent, with a higher epoch: that fences all older publishers.

        Raises:
            VersionConflict: another publisher was faster; nothing was written.
        """
        assert self.parent is not None
        delta = Delta(encoding=_OF_NOTHING, num_changed=0, payloads=())
        new = self._manifest(self.parent.step, self.parent.state, delta, None, new_write_id())
        return self._commit(new, self._sums)

    def commit_delta(self, step: int, delta: EncodedDelta) -> Manifest:
        """Publish a delta to the parent.

        Raises:
            VersionConflict: fenced for good.
            RunLost: the store no longer holds the parent.
            PublishFailed: the store did not take it; the parent is what it was.
        """
        return self._finish(step, self._after(delta), delta, None, new_write_id())

    def commit_anchor(
        self, step: int, tensors: Callable[[str], tuple[torch.Tensor, Sums]], delta: EncodedDelta | None
    ) -> Manifest:
        """Publish the whole model, and a delta to the parent where there is one.

        Args:
            tensors: returns a tensor of the schema by name, in host memory, and its digest sums; must not
                change before this returns.

        Raises:
            As `commit_delta`.
        """
        self._settle()
        # Here too, or a whole model would be uploaded to where the run is no more.
        self._check_run()
        write_id = new_write_id()
        after: dict[str, Sums] | None = None
        if delta is not None and self.parent is not None:
            try:
                after = self._after(delta)
            except PublishFailed as exc:
                logger.warning("version %d will be an anchor without a delta: %s", self._next, exc)
        anchor, sums = upload_anchor(
            *(self._next, step, write_id, self.header, tensors, self._files),
            max_shard_bytes=self._max_shard_bytes,
            upload=self._upload,
        )
        if delta is None or after is None:
            return self._finish(step, sums, None, anchor, write_id)
        wrong = [name for name in sums if after[name] != sums[name]]
        assert not wrong, f"the changes do not add up to the model: {wrong[:3]}"
        return self._finish(step, after, delta, anchor, write_id)

    def _after(self, delta: EncodedDelta) -> dict[str, Sums]:
        """Return the digest sums of all tensors after a delta.

        Raises:
            PublishFailed: the delta was encoded against other tensors than the parent's.
        """
        before = self._sums
        assert self.parent is not None and before is not None
        if wrong := [name for name, sums in delta.parent_sums.items() if before[name] != sums]:
            raise PublishFailed(
                f"the snapshot is no longer version {self.parent.version}: {len(wrong)} tensors differ, such "
                f"as {wrong[0]!r}; the next publication will be an anchor"
            )
        return {**before, **{name: before[name].plus(sums) for name, sums in delta.sum_growth.items()}}

    def _finish(
        self,
        step: int,
        sums: Mapping[str, Sums],
        encoded: EncodedDelta | None,
        anchor: Anchor | None,
        write_id: str,
    ) -> Manifest:
        """Upload what a version has beside its anchor, and commit it.

        The run is looked for, and the sums are uploaded, while the delta is: a publication waits for each
        round trip to the store.
        """
        checked = Task(self._check_run)
        stored = Task(partial(self._upload_state, sums, write_id, is_anchor=anchor is not None))
        first, second = self._beside
        first.hand_over(checked)
        second.hand_over(stored)
        try:
            delta = None if encoded is None else self._upload_delta(step, encoded, write_id)
        finally:
            checked.wait()
            stored.wait()
        new = self._manifest(step, stored.result(), delta, anchor, write_id)
        try:
            checked.result()
        except RunLost:
            self._withdraw(new)
            raise
        return self._commit(new, sums)

    def _upload_delta(self, step: int, delta: EncodedDelta, write_id: str) -> Delta:
        assert self.parent is not None
        payloads: tuple[Payload, ...] = ()
        if delta.num_changed:
            metadata = delta_file.delta_metadata(
                self._next,
                self.parent.version,
                step,
                self.header.run_id,
                delta.encoding,
                delta.listed,
            )
            key = layout.delta_key(self._next, write_id, 1, 1)
            payloads = (self._upload(key, delta.file(metadata)),)
        return Delta(encoding=delta.encoding, num_changed=delta.num_changed, payloads=payloads)

    def _upload_state(self, sums: Mapping[str, Sums], write_id: str, *, is_anchor: bool) -> StateDigest:
        """Store the digest sums, or name the parent's again if they are the same and there is no anchor."""
        total = state_total(self.header.schema, sums)
        if self.parent is not None and self.parent.state.total == total and not is_anchor:
            return self.parent.state
        data = pack_sums(self.header.schema, sums)
        stored = self._upload(layout.sums_key(self._next, write_id), partial(iter, (data,)))
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
            data = self._retried(f"looking for {key}", look)
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

    def _upload(self, key: str, chunks: Callable[[], Iterable[Chunk]]) -> Payload:
        """Store an object and make sure that all of it is there."""

        def attempt() -> Payload:
            hasher = hashing.Hasher()
            self.store.upload(key, hasher.through(chunks()))
            try:
                stored = self.store.size(key)
            except NotFound as exc:
                raise StoreUnavailable(f"{key} was sent, but is not stored") from exc
            if stored != hasher.num_bytes:
                raise StoreUnavailable(f"{key}: sent {hasher.num_bytes:,} bytes, but {stored:,} are stored")
            return Payload(key=key, size=hasher.num_bytes, digest=hasher.digest())

        return self._retried(f"upload of {key}", attempt)

    def _retried(self, what: str, attempt: Callable[[], _Result]) -> _Result:
        pause_s = FIRST_PAUSE_S
        for tries in range(1, ATTEMPTS + 1):
            try:
                return attempt()
            except StoreUnavailable as exc:
                if tries == ATTEMPTS:
                    raise PublishFailed(
                        f"{what} failed {tries} times; the store holds version "
                        f"{self.parent and self.parent.version} still, and the next publication "
                        f"will be an anchor: {exc}"
                    ) from exc
                logger.warning("%s failed, trying again in %.1f s: %s", what, pause_s, exc)
                time.sleep(pause_s)
                pause_s *= 2
        raise AssertionError("unreachable")

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

    def _commit(self, new: Manifest, sums: Mapping[str, Sums] | None) -> Manifest:
        try:
            self._retried(f"commit of version {new.version}", lambda: history.commit(self.store, new))
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
