"""Open a run for a publisher: agree on who owns what, then create the run, or find the version to build on.

A process that publishes alone is a group of one. Nothing is ever deleted or overwritten to make a resumption
fit.
"""

import logging
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from patchstore.bucket import history, kept, lineage, notes
from patchstore.bucket.digests import digest, verified
from patchstore.bucket.lineage import Since
from patchstore.bucket.records import Adapter, Manifest, Part, Schema, StoreHeader, TensorSpec
from patchstore.bucket.state_sums import SumsArray, state_total
from patchstore.codec.delta import NO_SUMS
from patchstore.codec.part_table import PartTable
from patchstore.errors import (
    DataError,
    NotFound,
    PatchstoreError,
    ResumeMismatch,
    RunExists,
    SchemaMismatch,
    Unsigned,
    UsageError,
    VersionNotFound,
    VersionRetired,
    WrongSignature,
)
from patchstore.publish import ownership
from patchstore.publish.base_checkpoint import BaseCheckpoint
from patchstore.publish.commit import Committer, Log, as_heard, as_told, now
from patchstore.publish.options import Resume, largest_delta
from patchstore.publish.ownership import Plan, Share, told_sums, total_sums
from patchstore.publish.ranks import AnyChannel, Channel, Message
from patchstore.publish.snapshot import Snapshot
from patchstore.publish.sources.adapter import differing, parsed
from patchstore.publish.sources.dtypes import Asked, Held, Known, Served
from patchstore.publish.sources.weights import ServedSource
from patchstore.signing import RequiredKeys, Signer
from patchstore.signing.required import checks
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.stores.probe import check_create_only
from patchstore.support import collector
from patchstore.support.threads import Worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What must be equal on all ranks that publish together."""

    dtype: str
    encoding: str
    anchor_every: int | str
    resume: Resume
    max_shard_bytes: int
    rank_timeout_s: float
    max_pending: int
    compact: bool
    signer: str | None
    """The signer's name."""
    quantization: str | None
    """Form and rule, as `Quantization.described` writes them."""
    adapter: str | None
    """Which adapter of the source; None for whole weights."""

    def told(self) -> dict[str, Any]:
        """As ranks tell it to each other, by the names of the publisher's arguments."""
        return asdict(self) | {"resume": str(self.resume)}


class Agreed(NamedTuple):
    """What ranks agreed on before anything is created."""

    share: Share
    table: PartTable
    """Of what it owns."""
    needs_sums: bool
    """Whether to digest what this rank owns: the weights decide on the version to build on."""
    plan: Plan | None
    """On the leader alone, as the next three."""
    schema: Schema | None
    files: Mapping[str, bytes]
    """That go into anchors."""
    adapter: Adapter | None
    """What the run says of its adapter; None of whole weights."""


class Run(NamedTuple):
    """A run that is open."""

    header: StoreHeader
    committer: Committer
    is_stored: bool
    """Whether the version to build on has the publisher's weights."""
    since_anchor: Since
    """What leads from the newest anchor to the version to build on."""
    claimed: Manifest | None
    """The version by which the run was resumed; None in a new run."""


def agree(
    channel: AnyChannel,
    store: Store,
    begun: StoreHeader | None,
    source: ServedSource,
    failure: Exception | None,
    *,
    asked: Asked,
    check_schema: Callable[[Schema], tuple[Mapping[str, bytes], Adapter | None]],
    base: BaseCheckpoint,
    settings: Settings,
) -> Agreed:
    """Agree on dtypes, and on who owns what. Nothing is written but what shows that ranks have one store.

    The source has been read, or `failure` says what went wrong on this rank, for all ranks to hear.
    `check_schema` raises if the schema cannot be published, and returns the files that go into anchors, and
    what the run says of its adapter.
    """
    plan: Plan | None = None
    schema: Schema | None = None
    files: Mapping[str, bytes] = {}
    adapter: Adapter | None = None

    known = _known(channel, source, failure, base)

    def say() -> Message:
        source.serve(Served(asked, known, source.given), joined=channel.is_alone)
        # No other process reads what a process tells that publishes alone.
        listed = [
            (part.spec.name, part.spec.dtype, part.spec.shape, part.start, part.size)
            for part in (() if channel.is_alone else source.parts)
        ]
        return {"parts": listed, "tied": dict(source.tied), "settings": settings.told()}

    @collector.paused()
    def conclude(reports: list[Message]) -> list[Message]:
        nonlocal plan, schema, files, adapter
        _check_equal(channel, [report["settings"] for report in reports])
        all_tied = _united(channel, [report["tied"] for report in reports])
        offers = [[_part(*each) for each in report["parts"]] for report in reports]
        if channel.is_alone:
            offers = [[*source.parts]]
        # A rank whose parts of two tied tensors are empty does not see that they are tied.
        given = [
            [(number, part) for number, part in enumerate(its) if part.spec.name not in all_tied]
            for its in offers
        ]
        chosen = ownership.own([[part for _, part in its] for its in given])
        owned = [[its[number][1] for number in numbers] for its, numbers in zip(given, chosen, strict=True)]
        specs = {part.spec.name: part.spec for its in owned for part in its}
        schema = Schema(tensors=tuple(specs[name] for name in sorted(specs)), tied=all_tied)
        if missing := sorted(set(all_tied.values()) - specs.keys()):
            raise SchemaMismatch(f"{missing[0]!r} is tied to another name, but no rank has it")
        files, adapter = check_schema(schema)
        single = None if adapter is None else layout.ADAPTER_WEIGHTS
        plan = ownership.plan(schema, owned, settings.max_shard_bytes, single)
        return [
            {
                **plan.told(place, [its[number][0] for number in numbers]),
                "places": [schema.places[its[number][1].spec.name] for number in numbers],
                "needs_sums": begun is not None and settings.resume.needs_weights,
            }
            for place, (its, numbers) in enumerate(zip(given, chosen, strict=True))
        ]

    told = channel.round("open a publisher", say, conclude)
    if isinstance(channel, Channel):
        _share_secret(channel, store)
    parts = source.parts
    # Those of one tensor beside each other, and tensors in the schema's order.
    owned = sorted(
        ((parts[number], place) for number, place in zip(told["own"], told["places"], strict=True)),
        key=lambda each: each[0].key,
    )
    share = Share(tuple(part for part, _ in owned), told["writers"], told["files"])
    table = PartTable(share.parts, [place for _, place in owned])
    return Agreed(share, table, told["needs_sums"], plan, schema, files, adapter)


def _known(
    channel: AnyChannel, source: ServedSource, failure: Exception | None, base: BaseCheckpoint
) -> Known:
    """Return what decides dtypes: of the base checkpoint, which the leader reads, and of all ranks."""

    def say() -> Message:
        if failure is not None:
            raise failure
        return {"held": channel.packed(source.held())}

    def conclude(reports: list[Message]) -> Message:
        known = Known.of(base, [Held(*channel.unpacked(each["held"])) for each in reports])
        return {"known": channel.packed(asdict(known))}

    return Known(**channel.unpacked(channel.round("say what they have", say, conclude)["known"]))


def _part(name: str, dtype: str, *sides: Sequence[int]) -> Part:
    """Return a part that a rank told of: its tensor's shape, where it begins, and its own shape."""
    shape, start, size = map(tuple, sides)
    return Part(TensorSpec(name=name, dtype=dtype, shape=shape), start, size)


def _check_equal(channel: AnyChannel, each: Sequence[Mapping[str, Any]]) -> None:
    for rank, settings in zip(channel.ranks, each, strict=True):
        for name, value in settings.items():
            if value != each[0].get(name):
                raise UsageError(
                    f"ranks must open a publisher with the same arguments, but {name} is "
                    f"{each[0].get(name)!r} on {channel.name(channel.ranks[0])} and {value!r} on "
                    f"{channel.name(rank)}"
                )


def _united(channel: AnyChannel, each: Sequence[Mapping[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for rank, tied in zip(channel.ranks, each, strict=True):
        for alias, name in tied.items():
            if found.setdefault(alias, name) != name or name in found or alias in found.values():
                raise SchemaMismatch(
                    f"ranks differ in tied tensors: on {channel.name(rank)}, {alias!r} is {name!r}; on "
                    f"others ties are {found}"
                )
    return found


def _share_secret(channel: Channel, store: Store) -> None:
    """Have ranks trust each other through the store, which shows too that it is one store.

    The secret is not told through the channel: a process that writes there could name one that it knows.
    """
    key, secret = f"{layout.PROBES}ranks-{channel.session}", b""

    def write() -> Message:
        if channel.leads:
            store.put(key, secrets.token_hex().encode())
        return {}

    def read() -> Message:
        nonlocal secret
        try:
            secret = store.get(key)
        except NotFound as exc:
            raise UsageError(
                f"{store.url} is another place on {channel.name(channel.rank)} than on "
                f"{channel.name(channel.ranks[0])}, which stored {key} there; give a URL or a path that "
                "all ranks share"
            ) from exc
        return {}

    try:
        channel.round("store a secret", write, lambda _: {})
        channel.round("look for each other in the store", read, lambda _: {})
    finally:
        if channel.leads:
            # A few bytes left behind are no harm, and a publisher need not have the right to delete.
            with suppress(PatchstoreError):
                store.delete(key)
    channel.trust(secret)


def open_run(
    channel: AnyChannel,
    store: Store,
    begun: StoreHeader | None,
    agreed: Agreed,
    *,
    prepare: Callable[[], Snapshot],
    workers: Sequence[Worker],
    base: BaseCheckpoint,
    settings: Settings,
    signer: Signer | None,
) -> Run:
    """Create or continue the run; `begun` is its header, if there is a run.

    `prepare` makes this rank ready, before anything is written, and returns what it owns. Then it has
    `workers`.
    """
    sums = NO_SUMS
    log: Log | None = None

    def ready() -> Message:
        nonlocal sums
        snapshot = prepare()
        if agreed.needs_sums:
            sums = snapshot.sums(agreed.table)
        return {"sums": told_sums(agreed.table, sums)}

    def conclude(reports: list[Message]) -> Message:
        nonlocal log
        assert agreed.schema is not None
        check_create_only(store)
        totals = total_sums(agreed.schema, (report["sums"] for report in reports))
        found = find(store, begun, agreed.schema, totals, settings.resume, signer, agreed.adapter)
        if found.sums is not None and agreed.adapter is not None:
            found = _with_config(store, found, agreed.files[layout.ADAPTER_CONFIG])
        log = Log(
            store,
            found.header,
            head=found.head,
            parent=found.parent,
            parent_digest=found.parent_digest,
            sums=found.sums,
            header_digest=found.header_digest,
            beside=(workers[0], workers[1]),
            signer=signer,
        )
        since_anchor = Since()
        claim: Manifest | None = None
        if found.parent is not None:
            claim = log.claim(is_signed=found.is_signed)
            if found.lease is not None:
                # Its version is the newest now, so nothing that leads to it is deleted.
                notes.release(store, found.lease)
            if found.sums is not None:
                since_anchor = lineage.since_anchor(store, claim.version)
        return {
            "run_id": found.header.run_id,
            "is_stored": found.sums is not None,
            "since_anchor": asdict(since_anchor),
            "claimed": claim and as_told(claim),
        }

    told = channel.round("open a run", ready, conclude)
    header = history.read_header(store) if log is None else log.header
    if header is None or header.run_id != told["run_id"]:
        raise UsageError(f"{store.url} does not hold the run that the other ranks opened")
    committer = Committer(
        channel,
        store,
        header,
        agreed.share,
        agreed.table,
        plan=agreed.plan,
        sums=sums.in_order if told["is_stored"] else None,
        log=log,
        base=base,
        files=agreed.files,
        largest_delta=largest_delta(
            settings.encoding,
            header.schema.num_bytes + sum(map(len, agreed.files.values())),
            of_adapter=header.adapter is not None,
        ),
    )
    claimed = told["claimed"] and as_heard(told["claimed"])
    return Run(header, committer, told["is_stored"], Since(**told["since_anchor"]), claimed)


class Found(NamedTuple):
    """A run, and what to build on."""

    header: StoreHeader
    head: Manifest | None = None
    parent: Manifest | None = None
    """The version to build on; None, as the head, in a run without versions."""
    parent_digest: str | None = None
    """Of that version's manifest, as it was read."""
    sums: SumsArray | None = None
    """Its digest sums; None where the publisher has other weights, or may have."""
    is_signed: bool = True
    """Without a signer, or if the publisher's has signed the version to build on."""
    lease: str | None = None
    """The record that keeps the version to build on until the next one exists; the newest needs none."""
    header_digest: str | None = None
    """Of the header as it is stored, where this publisher has created the run."""


def find(
    store: Store,
    header: StoreHeader | None,
    schema: Schema,
    sums: SumsArray,
    resume: Resume,
    signer: Signer | None = None,
    adapter: Adapter | None = None,
) -> Found:
    """Create a run, or find the version that these weights are, if they decide on it."""
    if header is None:
        if not resume.may_begin:
            raise ResumeMismatch(f"{store.url} holds no run to resume; open it without resume")
        header = StoreHeader(run_id=uuid.uuid4().hex, created_at=now(), schema=schema, adapter=adapter)
        return Found(header, header_digest=history.create_header(store, header))
    if resume.how == "new":
        raise RunExists(
            f"{store.url} already holds run {header.run_id}, created {header.created_at}; "
            'use another prefix, or resume=True or "auto" to go on with that run'
        )
    _check_kind(store, header.adapter, adapter)
    _check_same_tensors(schema, header.schema)
    head = history.head(store)
    # A version number that was used must not be used again for other weights.
    history.check_newest(store, head)
    if head is None:
        return Found(header)
    # A signature covers what a version builds on, so a publisher with a signer builds only on versions that
    # it has signed. Others may be forged, also with the digest of the publisher's own weights: that digest is
    # a sum, and somebody who tries can find other weights with the same one.
    keys = None if signer is None else RequiredKeys([signer.public_key])
    versions = _Versions(store, header, head, checks(keys, store, header))
    if resume.how == "anchor":
        return versions.behind_head()
    total = state_total(header.schema, sums)
    if resume.version is not None:
        return versions.named(resume.version, total, sums)
    found = versions.newest_with(total, sums)
    if found is not None:
        return found
    which = "and is kept" if signer is None else f"and is kept, and was signed by {signer.public_key.name}"
    if resume.how == "auto":
        logger.warning(
            "no version in %s has these weights (state digest %s) %s, so the next publication will be the "
            "whole model, behind version %d",
            store.url,
            total,
            which,
            head.version,
        )
        return versions.behind_head()
    advice = "" if signer is None else "sign the one that has them with `patchstore sign`, if it is yours, "
    raise ResumeMismatch(
        f"none of the {head.version + 1} versions in {store.url} has these weights {which}; their state "
        f"digest is {total}; {advice}"
        'load one of them first, or use resume="anchor" to publish these weights whole'
    )


def _with_config(store: Store, found: Found, config: bytes) -> Found:
    """Return what an adapter builds on: a version with another config has the same tensors, and not the same
    meaning. A delta would keep that config, so the next publication is a full one.
    """
    assert found.parent is not None
    try:
        anchor = lineage.read(store, found.parent.version).plan().anchor
        assert anchor is not None and anchor.anchor is not None
        (file,) = (each for each in anchor.anchor.files if each.key.endswith(f"/{layout.ADAPTER_CONFIG}"))
        theirs = parsed(b"".join(verified(store.read(file.key, end=file.size + 1), file)))
        changes = differing(parsed(config), theirs)
    except (DataError, NotFound) as exc:
        changes = str(exc)
    if not changes:
        return found
    logger.warning(
        "version %d in %s has these tensors, and the config of the adapter is another one (%s), so the next "
        "publication will be a full one",
        *(found.parent.version, store.url, changes),
    )
    return found._replace(sums=None)


def _check_same_tensors(ours: Schema, theirs: Schema) -> None:
    """Raises SchemaMismatch where a run has other tensors."""
    here, there = ours.by_name(), theirs.by_name()
    for name in sorted(here.keys() | there.keys()):
        if (our := here.get(name)) != (their := there.get(name)):
            raise SchemaMismatch(
                f"tensor {name!r} is {'missing' if our is None else our.kind} here, and the run has "
                f"{'none of that name' if their is None else their.kind}; a run keeps its names, shapes "
                "and dtypes, and so its dtype=, files= and quantization=, which decide them: give those that "
                "it was begun with, or another store; dtype={name: dtype} says it of single tensors"
            )
    if ours.tied != theirs.tied:
        raise SchemaMismatch(f"tensors are tied as {ours.tied}, but the run has {theirs.tied}")


def _check_kind(store: Store, theirs: Adapter | None, ours: Adapter | None) -> None:
    """Raises SchemaMismatch where a run is of another kind, or its adapters of another base."""
    if theirs is not None and ours is not None:
        is_other = theirs.base.differs(ours.base) or theirs.base_may_change != ours.base_may_change
    else:
        is_other = theirs is not ours
    if is_other:
        found, given = (each or "whole weights" for each in (theirs, ours))
        raise SchemaMismatch(
            f"{store.url} is a run of {found}, and this is one of {given}: give what the run was begun with, "
            "or another store"
        )


class _Versions:
    """The versions of a run, as candidates to build on."""

    def __init__(
        self, store: Store, header: StoreHeader, head: Manifest, check: history.Check | None
    ) -> None:
        self._store, self._header, self._head, self._check = store, header, head, check

    def behind_head(self) -> Found:
        """Build on the newest version, with other weights than it has."""
        found, data, refused = self._read(self._head.version)
        return Found(self._header, self._head, found, digest(data), None, refused is None)

    def named(self, version: int, total: str, sums: SumsArray) -> Found:
        """Build on a version, which must have these weights."""
        found, data, refused = self._read(version)
        kept.check(self._store, version)
        if found.state.total != total:
            raise ResumeMismatch(
                f"version {version} has state digest {found.state.total}, these weights {total}; "
                'load that version first, or use resume="anchor" to publish these weights whole'
            )
        if refused is not None:
            raise ResumeMismatch(
                f"version {version} has these weights, but it may be forged: {refused}. Sign it with "
                '`patchstore sign` if it is yours, or use resume="anchor" to publish these weights whole'
            )
        return Found(self._header, self._head, found, digest(data), sums, lease=self._held(version))

    def newest_with(self, total: str, sums: SumsArray) -> Found | None:
        """Build on the newest version with this state digest; the search ends at a manifest that was lost.

        One that the signer has not signed does not count, and none that is retired.
        """
        with (
            closing(history.read_back(self._store, self._head.version)) as versions,
            suppress(VersionNotFound),
        ):
            for each in versions:
                if each.state.total != total:
                    continue
                found, data, refused = self._read(each.version)
                if refused is None and found.state.total == total:
                    try:
                        lease = self._held(found.version)
                    except VersionRetired as exc:
                        logger.info("%s", exc)
                        return None
                    return Found(self._header, self._head, found, digest(data), sums, lease=lease)
                logger.warning("version %d is not built on: %s", each.version, refused)
        return None

    def _held(self, version: int) -> str | None:
        """Make sure that a version can be built on, however long this process sleeps before it does that.

        Its payloads are kept by a lease from now on, whose key is returned; the newest needs none. Only then
        this looks whether they may have been deleted before, so a version that is retired after the look
        loses nothing. One that is retired already is refused: at most a tag keeps it, which may move at any
        time. The newest version is never retired; another publisher that made it an older one has the next
        slot, too.
        """
        if version == self._head.version:
            return None
        lease = notes.reserve(self._store, self._header.run_id, version, self._head.version + 1)
        record = notes.retirements(self._store, self._header.run_id).find(version)
        if record is None:
            return lease
        notes.release(self._store, lease)
        kept.check(self._store, version)
        raise VersionRetired(
            f"version {version} of {self._store.url} is retired since {record.created_at}, and only a tag "
            "keeps it: it can be read and not built on. Build on another version, or use "
            'resume="anchor" to publish these weights whole'
        )

    def _read(self, version: int) -> tuple[Manifest, bytes, Exception | None]:
        """Return a version, its manifest's bytes, and why the signer does not vouch for it, if so.

        It is read once: what is built on is what was checked, whatever the store answers later.
        """
        found, data = history.read_stored(self._store, version)
        if self._check is not None:
            try:
                self._check(found, data)
            except (Unsigned, WrongSignature) as exc:
                return found, data, exc
        return found, data, None
