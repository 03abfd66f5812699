"""Open a run for a publisher: of one process that has all tensors, or of a rank among several."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.format import lineage
from patchstore.format.anchoring import Since
from patchstore.format.records import Manifest, Part, Schema, StoreHeader
from patchstore.format.state_sums import Sums
from patchstore.payloads.delta import EncodedDelta
from patchstore.publish.anchor_upload import ReadOnly
from patchstore.publish.base_checkpoint import BaseCheckpoint
from patchstore.publish.committer import Begun, Committer, Kind, Wanted
from patchstore.publish.encode import largest_delta
from patchstore.publish.options import Resume
from patchstore.publish.resume import open_run
from patchstore.publish.sources.dtypes import Held, Known
from patchstore.signing.signers import Signer
from patchstore.stores.base import Store
from patchstore.stores.probe import check_create_only
from patchstore.support.worker import Worker
from patchstore.tensors import parts as part_sums
from patchstore.tensors import state_digest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from patchstore.publish.group.maxima import Maxima


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What must be equal on all ranks that publish together."""

    dtype: str
    encoding: str
    anchor_every: int | str
    resume: Resume
    max_shard_bytes: int
    rank_timeout_s: float
    max_pending: int = 2
    compact: bool = False
    signer: str | None = None
    """The signer's name."""
    quantization: str | None = None
    """Form and rule, as `Quantization.described` writes them."""

    def told(self) -> dict[str, Any]:
        """As ranks tell it to each other, by the names of the publisher's arguments."""
        return asdict(self) | {"resume": str(self.resume)}


Look = Callable[[], Held]
"""Returns what this process has, before its dtypes are decided."""
Describe = Callable[[Known], tuple[tuple[Part, ...], Mapping[str, str]]]
"""Given what decides dtypes, returns what this process has, ascending by key, and further names of tensors ->
those they are under."""
CheckSchema = Callable[[Schema], dict[str, bytes]]
"""Raises if a schema cannot be published; returns the files that go into anchors."""


class Commits(Protocol):
    """What a pipeline hands publications to: `Committer`, or `GroupCommitter` on each of several ranks."""

    def foreseen(self, wanted: Wanted, delta: EncodedDelta | None) -> Kind | None:
        """Say how a publication is going to be stored; None where other processes decide it with this one."""

    def begin(self, wanted: Wanted, delta: EncodedDelta | None) -> Begun | None: ...

    def commit_delta(self, begun: Begun) -> Manifest: ...

    def commit_anchor(self, begun: Begun, snapshot: ReadOnly) -> Manifest: ...

    def abandon(self, error: Exception) -> None:
        """Take note that this process cannot make its next publication.

        Raises:
            PublishFailed: other ranks were told; this error, or that of another rank.
        """


class Run(NamedTuple):
    """A run that is open."""

    header: StoreHeader
    committer: Commits
    is_stored: bool
    """Whether the version to build on has the publisher's weights."""
    since_anchor: Since
    """What leads from the newest anchor to the version to build on."""
    is_leader: bool = True
    """Whether this process commits."""


class Alone:
    """Opens a run for one process."""

    maxima = None

    def __init__(
        self,
        store: Store,
        settings: Settings,
        look: Look,
        describe: Describe,
        check_schema: CheckSchema,
        base: BaseCheckpoint,
        signer: Signer | None = None,
    ) -> None:
        """Look at what there is; nothing is written.

        Args:
            describe: returns whole tensors.
        """
        self._store, self._settings, self._signer = store, settings, signer
        held = look()
        self.parts, tied = describe(Known.of(base, [held]))
        """What this process publishes."""
        for part in self.parts:
            if not part.is_whole:
                raise SchemaMismatch(
                    f"this process has only a part of {part.spec.name!r}: {part.size} of {part.spec.shape}; "
                    "pass group= with the ranks that have the rest"
                )
        self._schema = Schema(tensors=tuple(part.spec for part in self.parts), tied=tied)
        self._files = check_schema(self._schema)

    def open(
        self, prepare: Callable[[], None], served: Mapping[str, torch.Tensor], workers: Sequence[Worker]
    ) -> Run:
        """Create or continue the run.

        Args:
            prepare: makes the publisher ready, before anything is written.
            served: what is published, by key.
            workers: threads, once `prepare` has returned.
        """
        prepare()
        check_create_only(self._store)

        def sums_now() -> dict[str, Sums]:
            return state_digest.of_tensors(self._schema, served.items())

        return _opened(
            *(self._store, self._schema, sums_now, self._settings, self._files, workers, self._signer)
        )

    def leave(self) -> None:
        """Do nothing: no other process waits for this one."""


class Together:
    """Opens a run on one of several ranks."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        look: Look,
        describe: Describe,
        check_schema: CheckSchema,
        ranks: Sequence[int],
        base: BaseCheckpoint,
        signer: Signer | None = None,
    ) -> None:
        """Meet the other ranks, and agree on who publishes what; nothing is written but a probe.

        Raises:
            As `Publisher`.
        """
        from patchstore.publish.group import opening
        from patchstore.publish.group.channel import Channel

        self._store, self._settings, self._base = store, settings, base
        self._signer = signer
        self._channel = Channel(ranks, settings.rank_timeout_s)
        self._channel.meet()
        self._files: dict[str, bytes] = {}

        def check(schema: Schema) -> None:
            self._files = check_schema(schema)

        try:
            known = opening.share_dtypes(self._channel, look, base)
            self._agreed = opening.agree(self._channel, store, lambda: describe(known), settings, check)
        except BaseException:
            self._channel.leave()
            raise
        self.parts = self._agreed.share.parts
        self.maxima: Maxima | None = None
        """What ranks share to round weights, if they do."""
        if settings.quantization is not None:
            from patchstore.publish.group import maxima

            self.maxima = maxima.Maxima(ranks, settings.rank_timeout_s, self._agreed.secret)

    def open(
        self, prepare: Callable[[], None], served: Mapping[str, torch.Tensor], workers: Sequence[Worker]
    ) -> Run:
        """See `Alone.open`."""
        from patchstore.publish.group import opening
        from patchstore.publish.group.committer import GroupCommitter

        sums: dict[str, Sums] = {}

        def ready() -> dict[str, Sums]:
            prepare()
            if self._agreed.needs_sums:
                sums.update({part.key: part_sums.digest(part, served[part.key]) for part in self.parts})
            return sums

        def create(schema: Schema, totals: dict[str, Sums]) -> tuple[Committer, bool, Since]:
            run = _opened(
                self._store, schema, lambda: totals, self._settings, self._files, workers, self._signer
            )
            assert isinstance(run.committer, Committer)
            return run.committer, run.is_stored, run.since_anchor

        found = opening.open_run(self._channel, self._store, self._agreed, ready, create)
        committer = GroupCommitter(
            *(self._channel, self._store, found.header, self._agreed.share, self._agreed.plan),
            sums if found.is_stored else None,
            found.committer,
            self._base,
        )
        is_leader = found.committer is not None
        return Run(found.header, committer, found.is_stored, found.since_anchor, is_leader)

    def leave(self) -> None:
        """Tell the other ranks that this one publishes no more."""
        self._channel.leave()
        if self.maxima is not None:
            self.maxima.leave()


def _opened(
    store: Store,
    schema: Schema,
    sums_now: Callable[[], dict[str, Sums]],
    settings: Settings,
    files: Mapping[str, bytes],
    workers: Sequence[Worker],
    signer: Signer | None,
) -> Run:
    """Create or continue a run as the one process that commits."""
    found = open_run(store, schema, sums_now, settings.resume, signer)
    committer = Committer(
        store,
        found.header,
        head=found.head,
        parent=found.parent,
        parent_digest=found.parent_digest,
        sums=found.sums,
        files=files,
        max_shard_bytes=settings.max_shard_bytes,
        largest_delta=largest_delta(settings.encoding, schema, files),
        beside=(workers[0], workers[1]),
        signer=signer,
    )
    since_anchor = Since()
    if found.parent is not None:
        claim = committer.claim(is_signed=found.is_signed)
        if found.sums is not None:
            since_anchor = lineage.since_anchor(store, claim.version)
    return Run(found.header, committer, found.sums is not None, since_anchor)


def ranks_that_publish(group: "ProcessGroup | None", sharded: set[int]) -> list[int] | None:
    """Return the global ranks that publish together, ascending; None where one process does so alone.

    Args:
        group: as `Publisher` takes it.
        sharded: the ranks among which tensors of the source are sharded.

    Raises:
        UsageError: the group is no process group of this process, or lacks ranks that have parts of tensors.
    """
    if group is None:
        return sorted(sharded) or None
    distributed: Any = torch.distributed
    if not isinstance(group, distributed.ProcessGroup):
        raise UsageError(
            f"group must be a process group of torch.distributed in which this rank is, not {group!r}"
        )
    ranks = sorted(distributed.get_process_group_ranks(group))
    if missing := sharded - set(ranks):
        raise UsageError(
            f"tensors are sharded over ranks {sorted(sharded)}, but group= has {ranks}: without "
            f"{sorted(missing)} there is no whole tensor; pass a group with all of them"
        )
    return ranks if len(ranks) > 1 else None
