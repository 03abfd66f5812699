"""One commit for what all ranks stored; every rank has one of these, and the leader's commits."""

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from patchstore.errors import PatchstoreError, PublishFailed
from patchstore.format import layout, manifest_json
from patchstore.format.records import Anchor, Delta, Manifest, Part, Payload, StoreHeader
from patchstore.format.state_sums import Sums
from patchstore.payloads import anchor_file
from patchstore.payloads.delta import NO_CHANGES, EncodedDelta
from patchstore.publish.anchor_upload import ReadOnly
from patchstore.publish.base_checkpoint import BaseCheckpoint
from patchstore.publish.committer import (
    Attempt,
    Begun,
    Committer,
    Kind,
    Wanted,
    check_parents,
    store_delta,
)
from patchstore.publish.group import assembly
from patchstore.publish.group.assembly import Pieces, Source, Written
from patchstore.publish.group.channel import Channel, Message
from patchstore.publish.group.ownership import Plan, Share
from patchstore.publish.group.report import add, by_name
from patchstore.publish.uploads import Uploads
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)


class GroupCommitter:
    """Publishes a rank's part of each version. Not for use from several threads at once.

    Every rank makes the same calls in the same order. If one of them fails on any rank, it fails on all, and
    nothing is committed.
    """

    def __init__(
        self,
        channel: Channel,
        store: Store,
        header: StoreHeader,
        share: Share,
        plan: Plan | None,
        sums: Mapping[str, Sums] | None,
        committer: Committer | None,
        base: BaseCheckpoint,
    ) -> None:
        """Take a rank's place.

        Args:
            plan: of all ranks; on the leader alone, as the committer.
            sums: the digest sums of what this rank owns, by key, in the version to build on; None if they are
                not known.
            base: the checkpoint that the run starts from.
        """
        self._channel, self._store, self._header = channel, store, header
        self._share, self._parts, self._plan = share, share.parts, plan
        self._sums = None if sums is None else dict(sums)
        self._committer, self._base = committer, base
        self._uploads = Uploads(store)

    def foreseen(self, wanted: Wanted, delta: EncodedDelta | None) -> Kind | None:
        """See `Commits`."""
        return "anchor" if wanted.is_anchor else None

    def begin(self, wanted: Wanted, delta: EncodedDelta | None) -> Begun | None:
        """Agree on what is published next, and how: on whether it is an anchor, and on one encoding.

        Returns:
            None where no rank has anything to store.

        Raises:
            As `commit_delta`.
        """
        known = delta if self._sums is not None else None

        def say() -> Message:
            return {
                "step": wanted.step,
                "is_anchor": wanted.is_anchor,
                "is_due": wanted.is_due,
                "if_changed": wanted.if_changed,
                "num_bytes": None if known is None else known.num_bytes,
                "encoding": None if known is None or not known.num_changed else known.encoding,
                "is_needed": wanted.is_needed(known),
            }

        def conclude(reports: list[Message]) -> Message:
            assert self._committer is not None
            self._check_alike(wanted, reports)
            if not any(report["is_needed"] for report in reports):
                return {"is_needed": False}
            sizes = [report["num_bytes"] for report in reports]
            has_delta = None not in sizes and not self._committer.is_too_large(sum(sizes))
            # Where it is not due on a rank, the snapshot there may have later weights already.
            whole = wanted.is_anchor or not has_delta or all(report["is_due"] for report in reports)
            encodings = {report["encoding"] for report in reports} - {None}
            return {
                "attempt": asdict(self._committer.attempt(is_anchor=whole)),
                "is_anchor": whole,
                # A file in `context` may state all that it has as one in `gap` does.
                "encoding": min(encodings, default=NO_CHANGES.encoding) if has_delta else None,
            }

        self._channel.next_call()
        told = self._channel.round("begin a publication", say, conclude)
        if "is_needed" in told:
            return None
        agreed = None
        if told["encoding"] is not None:
            assert known is not None
            agreed = replace(known, encoding=told["encoding"])
        return Begun(Attempt(**told["attempt"]), wanted.step, told["is_anchor"], agreed)

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

    def commit_delta(self, begun: Begun) -> Manifest:
        """Publish this rank's part of a delta to the parent.

        Raises:
            RankFailed: another rank failed, or was not heard of in time.
            VersionConflict, RunLost, PublishFailed: as `Committer.commit_delta`, on all ranks.
        """
        attempt, step, _, delta = begun
        assert delta is not None

        stored: Message = {}

        def store() -> Message:
            nonlocal stored
            stored = self._stored(attempt, step, delta)
            return stored

        def conclude(reports: list[Message]) -> Message:
            assert self._committer is not None
            joined, growth = _joined(reports)
            sums = self._committer.grown(growth)
            return _told(self._committer.finish(step, sums, attempt, lambda: joined, None))

        manifest = _heard(self._channel.round("store a delta", store, conclude))
        _check_named(manifest, stored["payloads"])
        assert self._sums is not None
        for key, growth in delta.sum_growth.items():
            self._sums[key] = self._sums[key].plus(growth)
        return manifest

    def commit_anchor(self, begun: Begun, snapshot: ReadOnly) -> Manifest:
        """Publish the whole model, and this rank's part of a delta to the parent where all ranks have one.

        Args:
            snapshot: must not change before this returns.

        Raises:
            As `commit_delta`.
        """
        attempt, step, _, delta = begun
        pieces, written, stored = Pieces(), Written([], {}, {}), Message()
        # Later anchors are of weights that were trained.
        known, in_base = self._in_base(snapshot) if attempt.version == 0 else ({}, set())

        def store_pieces() -> Message:
            nonlocal pieces
            place = self._channel.index
            sent = [
                part
                for part in self._parts
                if self._share.writers[part.spec.name] != place and part.spec.name not in in_base
            ]
            pieces = assembly.store_pieces(self._uploads, attempt, place, sent, snapshot)
            return {"key": pieces.key, "offsets": dict(pieces.offsets)}

        def say_where(reports: list[Message]) -> list[Message]:
            return self._sources([Pieces(report["key"], report["offsets"]) for report in reports], in_base)

        try:
            where = self._channel.round("store what others write of an anchor", store_pieces, say_where)

            def write() -> Message:
                nonlocal written
                written = assembly.write_files(
                    *(self._store, self._uploads, self._header, attempt, step),
                    *(self._share.files, self._heard_sources(where)),
                    snapshot=snapshot,
                    base=self._base,
                )
                stored.update({} if delta is None else self._stored(attempt, step, delta))
                return {
                    "files": [asdict(payload) for payload in written.payloads],
                    "written": {name: each.hex() for name, each in written.sums.items()},
                    "sums": by_name(self._parts, {**known, **pieces.sums, **written.own}),
                    **stored,
                }

            def conclude(reports: list[Message]) -> Message:
                return _told(self._finish_anchor(attempt, step, reports, with_delta=delta is not None))

            manifest = _heard(self._channel.round("store an anchor", write, conclude))
            _check_named(manifest, [*map(asdict, written.payloads), *stored.get("payloads", ())])
        finally:
            if pieces.key:
                # A publisher need not have the right to delete; readers never look at pieces.
                with suppress(PatchstoreError):
                    self._store.delete(pieces.key)
        empty = {part.key: Sums() for part in self._parts if not part.num_elements}
        self._sums = {**empty, **known, **pieces.sums, **written.own}
        return manifest

    def _in_base(self, snapshot: ReadOnly) -> tuple[dict[str, Sums], set[str]]:
        """Find tensors that are in the base checkpoint as they are published, so that no rank sends them.

        Returns:
            The digest sums of this rank's parts of them, by key, and the names of these tensors.
        """
        names = [spec.name for _, file in self._share.files for spec in file.specs if self._base.has(spec)]
        there = self._channel.round("look into the base checkpoint", lambda: {"equal": names}, _united)
        named = set(there["equal"])
        if not named:
            return {}, set()
        sums = {part.key: snapshot.read(part)[1] for part in self._parts if part.spec.name in named}
        writers = {} if self._plan is None else self._plan.writers()

        def conclude(reports: list[Message]) -> list[Message]:
            totals: dict[str, Sums] = {}
            for report in reports:
                add(totals, report["sums"])
            each: list[Message] = [{"totals": {}} for _ in reports]
            for name, total in totals.items():
                each[writers[name]]["totals"][name] = total.hex()
            return each

        told = self._channel.round(
            "digest what they have", lambda: {"sums": by_name(self._parts, sums)}, conclude
        )

        def compare() -> Message:
            equal = []
            for _, file in self._share.files:
                for spec in file.specs:
                    tensor = self._base.read(spec) if spec.name in told["totals"] else None
                    if tensor is not None and snapshot.digest(tensor).hex() == told["totals"][spec.name]:
                        equal.append(spec.name)
            return {"equal": equal}

        equal = set(self._channel.round("compare with the base checkpoint", compare, _united)["equal"])
        kept = {part.key: sums[part.key] for part in self._parts if part.spec.name in equal}
        return kept, equal

    def _heard_sources(self, where: Message) -> dict[str, list[Source]]:
        """Return where the parts are of the tensors that this rank writes, as the leader said."""
        specs = self._header.schema.by_name()
        return {
            name: [
                Source(Part(specs[name], tuple(start), tuple(size)), key, offset)
                for start, size, key, offset in its
            ]
            for name, its in where["sources"].items()
        }

    def _finish_anchor(
        self,
        attempt: Attempt,
        step: int,
        reports: Sequence[Message],
        *,
        with_delta: bool,
    ) -> Manifest:
        """Commit an anchor that ranks stored, on the leader."""
        assert self._committer is not None
        totals = {spec.name: Sums() for spec in self._header.schema.tensors}
        for report in reports:
            add(totals, report["sums"])
        for report in reports:
            for name, digits in report["written"].items():
                if Sums.from_hex(digits) != totals[name]:
                    raise PublishFailed(
                        f"{name!r} in the anchor is not what the ranks have of it; the next publication will "
                        "be an anchor"
                    )
        payloads = [Payload(**each) for report in reports for each in report["files"]]
        prefix = layout.anchor_prefix(attempt.version, attempt.write_id)
        beside = dict(self._committer.files)
        assert self._plan is not None
        if len(self._plan.files) > 1:
            weight_map = {spec.name: name for name, file in self._plan.files for spec in file.specs}
            beside["model.safetensors.index.json"] = anchor_file.index_json(self._header.schema, weight_map)
        stored = [
            self._uploads.upload(prefix + name, partial(iter, (data,)))
            for name, data in sorted(beside.items())
        ]
        anchor = Anchor(payloads=tuple(sorted(payloads, key=lambda each: each.key)), files=tuple(stored))
        if not with_delta:
            return self._committer.finish(step, totals, attempt, lambda: None, anchor)
        delta, growth = _joined(reports)
        sums = self._committer.grown(growth)
        wrong = [name for name in sums if sums[name] != totals[name]]
        if wrong:
            raise PublishFailed(
                f"the changes do not add up to the model: {wrong[:3]}; the next publication will be an anchor"
            )
        return self._committer.finish(step, sums, attempt, lambda: delta, anchor)

    def abandon(self, error: Exception) -> None:
        """Tell the other ranks that this one cannot take part in the next publication.

        Raises:
            PublishFailed: always; this error, or that of another rank.
        """

        def fail() -> Message:
            raise error

        self._channel.next_call()
        self._channel.round("begin a publication", fail, lambda _: {})

    def _stored(self, attempt: Attempt, step: int, delta: EncodedDelta) -> Message:
        """Upload this rank's part of a delta, and say what it is."""
        assert attempt.parent is not None
        assert self._sums is not None
        check_parents(delta, self._sums, attempt.parent)
        stored = store_delta(
            *(self._uploads, self._header, attempt, step, delta),
            place=self._channel.index,
            num_places=len(self._channel.ranks),
        )
        return {
            "encoding": stored.encoding,
            "num_changed": stored.num_changed,
            "payloads": [asdict(payload) for payload in stored.payloads],
            "growth": by_name(self._parts, delta.sum_growth),
        }

    def _sources(self, pieces: Sequence[Pieces], in_base: Collection[str]) -> list[Message]:
        """Say to each rank where the parts are of the tensors that it writes, on the leader.

        Args:
            in_base: tensors that are read from the base checkpoint.
        """
        assert self._plan is not None
        writers = self._plan.writers()
        found: list[dict[str, list[Any]]] = [defaultdict(list) for _ in pieces]
        for place, parts in enumerate(self._plan.owned):
            for part in parts:
                if part.spec.name in in_base:
                    continue
                writer = writers[part.spec.name]
                key, at = "", 0
                if writer != place and part.num_elements:
                    key, at = pieces[place].key, pieces[place].offsets[part.key]
                found[writer][part.spec.name].append((part.start, part.size, key, at))
        return [{"sources": each} for each in found]


def _united(reports: Sequence[Message]) -> Message:
    """Return the names that any rank told."""
    return {"equal": sorted({name for report in reports for name in report["equal"]})}


def _joined(reports: Sequence[Message]) -> tuple[Delta, dict[str, Sums]]:
    """Return one delta of what all ranks stored, and by how much the digest sums of tensors grow."""
    growth: dict[str, Sums] = {}
    for report in reports:
        add(growth, report["growth"])
    delta = Delta(
        encoding=reports[0]["encoding"],
        num_changed=sum(report["num_changed"] for report in reports),
        payloads=tuple(Payload(**each) for report in reports for each in report["payloads"]),
    )
    return delta, growth


def _check_named(manifest: Manifest, stored: Sequence[Message]) -> None:
    """Raises PublishFailed unless a version names all that this rank stored for it."""
    parts = [part for part in (manifest.delta, manifest.anchor) if part is not None]
    named = {payload for part in parts for payload in part.payloads}
    if missing := [each["key"] for each in stored if Payload(**each) not in named]:
        raise PublishFailed(
            f"version {manifest.version} lacks {missing[0]}, which this rank stored for it; the next "
            "publication will be an anchor"
        )


def _told(manifest: Manifest) -> Message:
    return {"manifest": manifest_json.to_json(manifest).decode(), "version": manifest.version}


def _heard(answer: Message) -> Manifest:
    key = layout.manifest_key(answer["version"])
    return manifest_json.from_json(key, answer["manifest"].encode())
