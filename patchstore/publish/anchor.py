"""Write an anchor: the files of a whole model, also of one that no rank has whole. There is no gather.

A rank stores what it has of tensors that other ranks write, as *pieces*. Each writer then streams its files
of the anchor: for one tensor after the other it reads the pieces from the store. So a rank holds one tensor
at a time, and what ranks send goes through the store alone. The pieces are deleted when the anchor is stored.
A process that publishes alone has all tensors, and so no pieces; it writes several files at once.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import Any, NamedTuple

import torch

from patchstore.bucket.records import Anchor, Part, Payload, StoreHeader, TensorSpec
from patchstore.bucket.state_sums import Sums, SumsArray, differing
from patchstore.codec import tensor_file
from patchstore.codec.part_table import PartSums, PartTable
from patchstore.errors import CorruptObject, PatchstoreError, PublishFailed
from patchstore.publish.base_checkpoint import BaseCheckpoint
from patchstore.publish.ownership import Plan, Share, told_sums, total_sums
from patchstore.publish.ranks import AnyChannel, Message
from patchstore.publish.snapshot import Snapshot
from patchstore.publish.uploads import upload
from patchstore.stores import layout
from patchstore.stores.base import Chunk, Store
from patchstore.tensors.bits import from_bytes
from patchstore.tensors.parts import of_whole

FILES_AT_ONCE = 4
"""Of a process that publishes alone. A file in memory takes 2 GB/s from one thread, which is less than a
digest and a bus can do."""


class Source(NamedTuple):
    """Where one part of a tensor is."""

    part: Part
    key: str
    """Of the object that has it; "" where the writer has it itself."""
    offset: int
    """Bytes from the object's beginning."""


class Gathered(NamedTuple):
    """Where a rank finds what it writes."""

    sources: Mapping[str, Sequence[Source]]
    """By tensor, where its parts are; tensors that are read from the base checkpoint have none."""
    sums: Future[PartSums]
    """Of all of the rank's parts; they are digested beside the upload."""


class AnchorWriter:
    """One rank's part in writing anchors."""

    def __init__(
        self,
        channel: AnyChannel,
        store: Store,
        header: StoreHeader,
        share: Share,
        table: PartTable,
        plan: Plan | None,
        base: BaseCheckpoint,
    ) -> None:
        """`plan` is of all ranks, on the leader alone."""
        self._channel, self._store, self._header = channel, store, header
        self._share, self._table, self._plan, self._base = share, table, plan, base
        specs = header.schema.by_name()
        self._files = [(name, [specs[each] for each in names]) for name, names in share.files]

    @contextmanager
    def gathered(self, version: int, write_id: str, snapshot: Snapshot) -> Iterator[Gathered]:
        """Make sure that each rank finds the tensors that it writes, until this is left."""
        place, sent = self._channel.index, list[Part]()
        key = layout.piece_key(version, write_id, place)

        def store() -> Message:
            nonlocal sent
            sent = [
                part
                for part in self._share.parts
                if self._share.writers[part.spec.name] != place
                and part.spec.name not in in_base
                and part.num_elements
            ]
            return {"key": key, "offsets": self._store_pieces(key, sent, snapshot) if sent else {}}

        def say_where(reports: list[Message]) -> list[Message]:
            return self._sources(reports, in_base)

        beside = ThreadPoolExecutor(1, thread_name_prefix="patchstore-digest")
        try:
            sums = beside.submit(snapshot.sums, self._table)
            # Later anchors are of weights that were trained.
            in_base = self._in_base(sums, snapshot) if version == 0 else set()
            told = self._channel.round("store what others write of an anchor", store, say_where)
            specs = self._header.schema.by_name()
            sources: dict[str, list[Source]] = {
                name: [
                    Source(Part(specs[name], tuple(start), tuple(size)), key, offset)
                    for start, size, key, offset in its
                ]
                for name, its in told["sources"].items()
            }
            for part in self._share.parts:
                if self._share.writers[part.spec.name] == place and part.spec.name not in in_base:
                    sources.setdefault(part.spec.name, []).append(Source(part, "", 0))
            yield Gathered(sources, sums)
        finally:
            beside.shutdown()
            if sent:
                # A publisher need not have the right to delete; readers never look at pieces.
                with suppress(PatchstoreError):
                    self._store.delete(key)

    def _in_base(self, sums: Future[PartSums], snapshot: Snapshot) -> set[str]:
        """Name tensors that are in the base checkpoint as they are published, so that no rank sends them.

        `sums` are of this rank's parts.
        """
        parts = self._share.parts
        whole = {part.spec.name for part in parts if part.is_whole}
        asked = [
            spec.name
            for _, specs in self._files
            for spec in specs
            if spec.name not in whole and self._base.has(spec)
        ]
        there = self._channel.round("look into the base checkpoint", lambda: {"equal": asked}, _united)
        named = set(there["equal"])
        if not named:
            return set()
        writers = {} if self._plan is None else self._plan.writers

        def conclude(reports: list[Message]) -> list[Message]:
            each: list[Message] = [{"totals": {}} for _ in reports]
            totals = total_sums(self._header.schema, (report["sums"] for report in reports))
            for name in named:
                total = Sums(*totals[self._header.schema.places[name]].tolist())
                each[writers[name]]["totals"][name] = total.hex()
            return each

        told = self._channel.round(
            "digest what they have",
            lambda: {"sums": told_sums(self._table, sums.result())},
            conclude,
        )

        def compare() -> Message:
            equal = []
            for _, specs in self._files:
                for spec in specs:
                    tensor = self._base.read(spec) if spec.name in told["totals"] else None
                    if tensor is not None and snapshot.digest(tensor).hex() == told["totals"][spec.name]:
                        equal.append(spec.name)
            return {"equal": equal}

        return set(self._channel.round("compare with the base checkpoint", compare, _united)["equal"])

    def _store_pieces(self, key: str, parts: Sequence[Part], snapshot: Snapshot) -> dict[str, int]:
        """Upload what this rank has of tensors that others write.

        Returns by key of the part at which byte of the object it begins.
        """
        named = {f"piece-{number:05d}": part for number, part in enumerate(parts)}
        specs = tensor_file.aligned(
            TensorSpec(name=name, dtype=part.spec.dtype, shape=part.size) for name, part in named.items()
        )
        metadata = {"format": "patchstore", "kind": "pieces"}

        def tensors() -> Iterator[torch.Tensor]:
            return (snapshot.read(named[spec.name]) for spec in specs)

        upload(self._store, key, lambda: tensor_file.write(specs, tensors(), metadata))
        starts = accumulate(
            (spec.num_bytes for spec in specs), initial=len(tensor_file.header_bytes(specs, metadata))
        )
        return {named[spec.name].key: start for spec, start in zip(specs, starts, strict=False)}

    def _sources(self, pieces: Sequence[Message], in_base: Collection[str]) -> list[Message]:
        """Say to each rank where others' parts are of the tensors that it writes, on the leader."""
        assert self._plan is not None
        writers = self._plan.writers
        found: list[dict[str, list[Any]]] = [defaultdict(list) for _ in pieces]
        for place, parts in enumerate(self._plan.owned):
            for part in parts:
                writer = writers[part.spec.name]
                if writer == place or part.spec.name in in_base:
                    continue
                key, at = "", 0
                if part.num_elements:
                    key, at = pieces[place]["key"], pieces[place]["offsets"][part.key]
                found[writer][part.spec.name].append((part.start, part.size, key, at))
        return [{"sources": each} for each in found]

    def write(
        self, version: int, write_id: str, step: int, gathered: Gathered, snapshot: Snapshot
    ) -> tuple[Message, SumsArray]:
        """Write this rank's files of an anchor; the snapshot must not change before this returns.

        Returns what the leader must know of them, and the digest sums of all parts of this rank, [P, 2].
        """
        metadata = tensor_file.anchor_metadata(version, step, self._header.run_id)
        prefix = layout.anchor_prefix(version, write_id)
        reader = _Reader(self._store, self._base, gathered.sources, snapshot)

        def chunks(specs: Sequence[TensorSpec]) -> Iterator[Chunk]:
            return tensor_file.write(specs, map(reader.read, specs), metadata)

        jobs = [
            partial(upload, self._store, prefix + name, partial(chunks, specs)) for name, specs in self._files
        ]
        payloads = _all_of(jobs, FILES_AT_ONCE if self._channel.is_alone else 1)
        own = gathered.sums.result()
        report = {
            "files": [asdict(payload) for payload in payloads],
            "written": {name: each.hex() for name, each in reader.sums.items()},
            "sums": told_sums(self._table, own),
        }
        return report, own.in_order

    def joined(
        self, version: int, write_id: str, files: Mapping[str, bytes], reports: Sequence[Message]
    ) -> tuple[Anchor, SumsArray]:
        """Return the anchor that ranks wrote with `files` beside it, and the digest sums of its tensors."""
        assert self._plan is not None
        schema = self._header.schema
        totals = total_sums(schema, (report["sums"] for report in reports))
        for report in reports:
            written = {name: Sums.from_hex(digits) for name, digits in report["written"].items()}
            for name in differing(schema, written, totals):
                raise PublishFailed(
                    f"{name!r} in the anchor is not what the ranks have of it; the next publication will "
                    "be an anchor"
                )
        payloads = [Payload(**each) for report in reports for each in report["files"]]
        beside = dict(files)
        if len(self._plan.files) > 1:
            weight_map = {spec.name: name for name, specs in self._plan.files for spec in specs}
            beside["model.safetensors.index.json"] = tensor_file.index_json(self._header.schema, weight_map)
        prefix = layout.anchor_prefix(version, write_id)
        stored = [
            upload(self._store, prefix + name, partial(iter, (data,)))
            for name, data in sorted(beside.items())
        ]
        ordered = tuple(sorted(payloads, key=lambda each: each.key))
        return Anchor(payloads=ordered, files=tuple(stored)), totals


class _Reader:
    """Reads the tensors of an anchor, each whole; for several threads."""

    def __init__(
        self,
        store: Store,
        base: BaseCheckpoint,
        sources: Mapping[str, Sequence[Source]],
        snapshot: Snapshot,
    ) -> None:
        self._store, self._base, self._sources, self._snapshot = store, base, sources, snapshot
        self._reading = Lock()
        self.sums: dict[str, Sums] = {}
        """Of the tensors that were put together, or read from the base checkpoint, by name."""

    def read(self, spec: TensorSpec) -> torch.Tensor:
        if spec.name not in self._sources:
            found = self._base.read(spec)
            if found is None:
                raise PublishFailed(f"{spec.name!r} is no longer in the folder of files=")
            return self._digested(spec, found)
        filled = [source for source in self._sources[spec.name] if source.part.num_elements]
        if len(filled) == 1 and filled[0].part.is_whole and not filled[0].key:
            return self._own(filled[0].part)
        whole = from_bytes(spec, bytearray(spec.num_bytes))
        for part, key, offset in filled:
            of_whole(part, whole).copy_(self._piece(part, key, offset) if key else self._own(part))
        return self._digested(spec, whole)

    def _own(self, part: Part) -> torch.Tensor:
        with self._reading:
            return self._snapshot.read(part)

    def _digested(self, spec: TensorSpec, tensor: torch.Tensor) -> torch.Tensor:
        with self._reading:
            self.sums[spec.name] = self._snapshot.digest(tensor)
        return tensor

    def _piece(self, part: Part, key: str, offset: int) -> torch.Tensor:
        sent = TensorSpec(name=part.spec.name, dtype=part.spec.dtype, shape=part.size)
        data = bytearray()
        for chunk in self._store.read(key, start=offset, end=offset + sent.num_bytes):
            data += chunk
        if len(data) != sent.num_bytes:
            raise CorruptObject(f"{key} ends {sent.num_bytes - len(data):,} bytes early")
        return tensor_file.tensor_of(key, sent, data)


def _all_of(jobs: Sequence[Callable[[], Payload]], at_once: int) -> list[Payload]:
    """Return the results of uploads, after a failure without beginning another one."""
    at_once = min(at_once, len(jobs))
    if at_once <= 1:
        return [job() for job in jobs]
    with ThreadPoolExecutor(at_once, thread_name_prefix="patchstore-shard") as pool:
        running = [pool.submit(job) for job in jobs]
        try:
            return [each.result() for each in running]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _united(reports: Sequence[Message]) -> Message:
    """Return the names that any rank told."""
    return {"equal": sorted({name for report in reports for name in report["equal"]})}
