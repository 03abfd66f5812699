"""Turn a publication into a committed version: encode, upload, verify, then create the manifest.

Order is the protocol. Payloads go first, under names that no other attempt uses; the manifest last,
by one create-only put. A crash in between leaves payloads that nothing names.
"""

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

import torch

from patchstore import checksum, digest, layout, log, manifest, payload
from patchstore.change import Change
from patchstore.errors import (
    DataError,
    NotFound,
    PatchstoreError,
    PublishFailed,
    StoreUnavailable,
    VersionConflict,
    VersionNotFound,
)
from patchstore.model import (
    Anchor,
    Delta,
    Manifest,
    Payload,
    Schema,
    StateDigest,
    StoreHeader,
    TensorSpec,
    Writer,
)
from patchstore.stores.base import Chunk, Store

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


class Committer:
    """The single writer's place in a run's log. Not for use from several threads at once."""

    def __init__(
        self,
        store: Store,
        header: StoreHeader,
        *,
        head: Manifest | None,
        parent: Manifest | None,
        files: Mapping[str, bytes],
        max_shard_bytes: int,
    ) -> None:
        """Take a place behind `head`; the next version builds on `parent`.

        Nothing is written yet. Where `head` exists, call `claim` before anything else.
        """
        self.store = store
        self.header = header
        self.parent = parent
        self._files = files
        self._max_shard_bytes = max_shard_bytes
        self._next = 0 if head is None else head.version + 1
        self._epoch = 1 if head is None else head.writer.epoch + 1
        self._id = writer_id()
        self._uncertain: list[Manifest] = []
        """Attempts at the next version that got no answer; any of them may yet take place."""
        self._sums: dict[str, digest.Sums] = {}
        self._parent_digest: str | None = None
        if parent is not None:
            self._sums = digest.sums_of(header.schema, parent.state)
            self._parent_digest = log.stored_digest(store, parent.version)

    def claim(self) -> Manifest:
        """Commit an empty delta on the parent, with a higher epoch: that fences all older publishers.

        Raises:
            VersionConflict: another publisher was faster; nothing was written.
        """
        assert self.parent is not None
        delta = Delta(encoding=_OF_NOTHING, num_changed=0, payloads=())
        return self._commit(self._manifest(self.parent.step, self.parent.state, delta, None))

    def commit_delta(self, change: Change) -> Manifest:
        """Publish changes against the parent.

        Raises:
            VersionConflict: fenced for good.
            PublishFailed: the store did not take it; the parent is what it was.
        """
        return self._commit(self._with_delta(change, self._after(change), None))

    def commit_anchor(
        self, step: int, tensors: Callable[[str], tuple[torch.Tensor, digest.Sums]], change: Change | None
    ) -> Manifest:
        """Publish the whole model; with `change`, also as a delta for those who hold the parent.

        Args:
            tensors: returns a tensor of the schema by name, in host memory, and its digest sums; must not
                change before this returns.

        Raises:
            As `commit_delta`.
        """
        self._settle()
        write_id = new_write_id()
        after: dict[str, digest.Sums] | None = None
        if change is not None and self.parent is not None:
            try:
                after = self._after(change)
            except PublishFailed as exc:
                logger.warning("version %d will be an anchor without a delta: %s", self._next, exc)
        anchor, sums = self._upload_anchor(step, write_id, tensors)
        if change is None or after is None:
            new = self._manifest(step, digest.of_state(self.header.schema, sums), None, anchor, write_id)
            return self._commit(new)
        wrong = [name for name in sums if after[name] != sums[name]]
        assert not wrong, f"the changes do not add up to the model: {wrong[:3]}"
        return self._commit(self._with_delta(change, after, anchor, write_id))

    def _after(self, change: Change) -> dict[str, digest.Sums]:
        """Return the digest sums of all tensors after a change.

        Raises:
            PublishFailed: the change was coded against other tensors than the parent's.
        """
        if wrong := [name for name, sums in change.parents().items() if self._sums[name] != sums]:
            assert self.parent is not None
            raise PublishFailed(
                f"the snapshot is no longer version {self.parent.version}: {len(wrong)} tensors differ, such "
                f"as {wrong[0]!r}; the next publication will be an anchor"
            )
        grown = change.sums()
        return self._sums | {name: self._sums[name].plus(sums) for name, sums in grown.items()}

    def _with_delta(
        self, change: Change, sums: dict[str, digest.Sums], anchor: Anchor | None, write_id: str | None = None
    ) -> Manifest:
        write_id = write_id or new_write_id()
        assert self.parent is not None
        payloads: tuple[Payload, ...] = ()
        if change.num_changed:
            metadata = payload.delta_metadata(
                self._next,
                self.parent.version,
                change.step,
                self.header.run_id,
                change.encoding,
                change.specs(),
            )
            key = layout.delta_key(self._next, write_id, 1, 1)
            payloads = (self._upload(key, change.file(metadata)),)
        delta = Delta(encoding=change.encoding, num_changed=change.num_changed, payloads=payloads)
        return self._manifest(change.step, digest.of_state(self.header.schema, sums), delta, anchor, write_id)

    def _upload_anchor(
        self, step: int, write_id: str, tensors: Callable[[str], tuple[torch.Tensor, digest.Sums]]
    ) -> tuple[Anchor, dict[str, digest.Sums]]:
        sums: dict[str, digest.Sums] = {}

        def digested(specs: Sequence[TensorSpec]) -> Iterator[torch.Tensor]:
            for spec in specs:
                tensor, sums[spec.name] = tensors(spec.name)
                yield tensor

        prefix = layout.anchor_prefix(self._next, write_id)
        metadata = payload.anchor_metadata(self._next, step, self.header.run_id)
        shards = split(self.header.schema, self._max_shard_bytes)

        def shard(specs: Sequence[TensorSpec]) -> Iterator[Chunk]:
            return payload.write(specs, digested(specs), metadata)

        payloads: list[Payload] = []
        weight_map: dict[str, str] = {}
        for number, specs in enumerate(shards, 1):
            name = layout.shard_name(number, len(shards))
            weight_map |= {spec.name: name for spec in specs}
            payloads.append(self._upload(prefix + name, partial(shard, specs)))
        files = dict(self._files)
        if len(shards) > 1:
            files["model.safetensors.index.json"] = payload.index_json(self.header.schema, weight_map)
        stored = [self._upload(prefix + name, partial(iter, (data,))) for name, data in sorted(files.items())]
        return Anchor(payloads=tuple(payloads), files=tuple(stored)), sums

    def _upload(self, key: str, chunks: Callable[[], Iterable[Chunk]]) -> Payload:
        """Store an object and make sure that all of it is there."""

        def attempt() -> Payload:
            hasher = checksum.Hasher()
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
        write_id: str | None = None,
    ) -> Manifest:
        return Manifest(
            version=self._next,
            parent=None if self.parent is None else self.parent.version,
            parent_digest=self._parent_digest,
            run_id=self.header.run_id,
            step=step,
            created_at=now(),
            writer=Writer(id=self._id, epoch=self._epoch, write_id=write_id or new_write_id()),
            state=state,
            delta=delta,
            anchor=anchor,
        )

    def _commit(self, new: Manifest) -> Manifest:
        try:
            self._retried(f"commit of version {new.version}", lambda: log.commit(self.store, new))
        except PublishFailed:
            self._uncertain.append(new)
            raise
        except VersionConflict as exc:
            if self._settle():
                raise PublishFailed(
                    f"an earlier commit of version {self._next - 1} took place after all, although its "
                    "answer was lost; the next publication will be an anchor on it"
                ) from exc
            raise
        self._adopt(new)
        try:
            log.write_hint(self.store, new.version)
        except PatchstoreError as exc:
            # The version exists; whatever is wrong with the hint must not unmake it.
            logger.info("head.json was not updated, which costs readers a listing: %s", exc)
        return new

    def _settle(self) -> bool:
        """Find out whether a commit that got no answer took place; if so its version is the parent now."""
        if not self._uncertain:
            return False
        try:
            found = log.read_manifest(self.store, self._next)
        except (StoreUnavailable, VersionNotFound, DataError):
            return False
        if found not in self._uncertain:
            return False
        self._adopt(found)
        return True

    def _adopt(self, new: Manifest) -> None:
        self.parent, self._next, self._uncertain = new, new.version + 1, []
        self._parent_digest = checksum.digest(manifest.to_json(new))
        self._sums = digest.sums_of(self.header.schema, new.state)


def split(schema: Schema, max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Group tensors into the shards of an anchor, in order; a larger tensor has a shard of its own."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in payload.aligned(schema.tensors):
        if shards[-1] and size + spec.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.num_bytes
    return shards
