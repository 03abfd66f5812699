"""Make the shortcuts of a segment in one pass over its anchor and its deltas.

The anchor's tensors are streamed. Each delta is written into a tensor on its way, and where a rollup ends,
the tensor is compared with what it was where the rollup began. Memory holds some tensors, once for each
rollup under way; a folder for temporary files holds the deltas, the rollups of a file's tensors and one file
of the new anchor.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from patchstore.compact.segments import Segment
from patchstore.encodings import Encoding
from patchstore.errors import PatchstoreError
from patchstore.format import history, layout, planning, shortcuts
from patchstore.format.records import (
    REQUEST_BYTES,
    Anchor,
    Delta,
    Manifest,
    Payload,
    StoreHeader,
    TensorSpec,
)
from patchstore.format.shortcuts import Ends
from patchstore.format.state_sums import Sums
from patchstore.payloads import anchor_file, delta_file, tensor_file
from patchstore.payloads.delta import Change, DeltaEncoder
from patchstore.publish.committer import new_write_id
from patchstore.publish.uploads import Uploads
from patchstore.read import download
from patchstore.read.anchors import stream_anchor
from patchstore.read.deltas import Deltas, open_deltas
from patchstore.read.unfinished import write_file
from patchstore.stores.base import PART_BYTES, Store
from patchstore.tensors import diff, state_digest
from patchstore.tensors.bits import TensorPatch, batches, bits

logger = logging.getLogger(__name__)

WORTH = 0.8
"""A rollup is kept if reading it costs at most this share of what its deltas cost."""
_GROUP_BYTES = 512 << 20
"""Weights whose changes are encoded together, into one object of a rollup."""

_Named = tuple[TensorSpec, torch.Tensor]


@dataclass(slots=True, kw_only=True)
class _Rollup:
    """A rollup under way: from and to a place in `[first, *path]` of a segment."""

    begin: int
    end: int
    write_id: str
    encoder: DeltaEncoder
    encoding: str = ""
    num_changed: int = 0
    files: list[Path] = field(default_factory=list)
    """What was encoded, an object each."""
    num_bytes: int = 0
    payloads: list[Payload] = field(default_factory=list)
    """The same, once it is uploaded."""


class Builder:
    """One pass over a segment."""

    def __init__(
        self,
        store: Store,
        header: StoreHeader,
        segment: Segment,
        found: Set[Ends],
        encoding: Encoding,
        scratch: Path,
    ) -> None:
        """Prepare; nothing is read or written yet.

        Args:
            found: shortcuts that are not to be made again.
            scratch: a folder for temporary files.
        """
        self._store, self._header, self._segment = store, header, segment
        self._encoding, self._scratch = encoding, scratch
        self._uploads = Uploads(store)
        self._versions = [segment.first, *segment.path]
        self._rollups = [
            _Rollup(begin=begin, end=end, write_id=new_write_id(), encoder=self._new_encoder())
            for (begin, end), ends in zip(segment.blocks(), segment.rollups(), strict=True)
            if ends not in found
        ]
        self._anchor_id = new_write_id()
        ends = {each.end for each in self._rollups} | {len(segment.path)}
        self._sums: dict[int, dict[str, Sums]] = {end: {} for end in ends}
        """Digest sums of the versions at which something ends, by place."""

    @property
    def rollups(self) -> set[Ends]:
        """Return which rollups this pass makes, or finds to save too little."""
        return {
            Ends(self._versions[each.end].version, self._versions[each.begin].version)
            for each in self._rollups
        }

    @property
    def has_work(self) -> bool:
        return bool(self._rollups) or self._segment.needs_anchor

    def build(self) -> list[Ends]:
        """Make what the segment lacks; return what was added.

        What another process added meanwhile is left, and this pass's objects in its place are deleted.

        Raises:
            CorruptObject, StateMismatch: the bucket's bytes are wrong; no record was created.
            StoreUnavailable, PublishFailed: the store does not answer. Uploaded objects without a record may
                be left; calling again is safe.
            HostError: there is no space for temporary files.
        """
        anchor = self._pass()
        for place, sums in self._sums.items():
            state_digest.check_state(self._store, self._header.schema, sums, self._versions[place])
        added = [self._add_rollup(each) for each in self._rollups if self._is_worth(each)]
        if anchor is not None:
            added.append(self._add(self._versions[-1], None, anchor))
        return [each for each in added if each is not None]

    def _pass(self) -> Anchor | None:
        schema = self._header.schema.by_name()
        last = self._segment.last
        metadata = anchor_file.anchor_metadata(last.version, last.step, self._header.run_id)
        prefix = layout.anchor_prefix(last.version, self._anchor_id)
        payloads: list[Payload] = []
        with ExitStack() as opened:
            folder = Path(
                opened.enter_context(TemporaryDirectory(prefix="patchstore-compact-", dir=self._scratch))
            )
            steps = [
                opened.enter_context(open_deltas(self._store, (each,), schema, folder))
                for each in self._segment.path
            ]
            for name, specs, tensors in stream_anchor(self._store, self._segment.first, schema):
                stepped = self._stepped(specs, tensors, steps, folder)
                if not self._segment.needs_anchor:
                    for _ in stepped:
                        pass
                    continue
                path = folder / name
                write_file(path, tensor_file.write(specs, stepped, metadata))
                payloads.append(self._uploads.upload(prefix + name, partial(_chunks, path)))
                path.unlink()
            for rollup in self._rollups:
                self._flush(rollup, folder)
                if self._is_worth(rollup):
                    self._upload(rollup)
        if not self._segment.needs_anchor:
            return None
        return Anchor(payloads=tuple(payloads), files=tuple(self._copied(prefix)))

    def _stepped(
        self,
        specs: Sequence[TensorSpec],
        tensors: Iterable[torch.Tensor],
        steps: Sequence[Deltas],
        folder: Path,
    ) -> Iterator[torch.Tensor]:
        """Bring tensors to the end of the segment, and feed the rollups on the way."""
        num_bytes = 0
        for batch in batches(specs, iter(tensors)):
            before: dict[int, list[torch.Tensor]] = {}
            self._at(0, batch, before)
            for place, deltas in enumerate(steps, 1):
                deltas.apply(batch)
                self._at(place, batch, before)
            num_bytes += sum(spec.num_bytes for spec, _ in batch)
            if num_bytes >= _GROUP_BYTES:
                num_bytes = 0
                for rollup in self._rollups:
                    self._flush(rollup, folder)
            yield from (tensor for _, tensor in batch)

    def _at(
        self,
        place: int,
        batch: Sequence[_Named],
        before: dict[int, list[torch.Tensor]],
    ) -> None:
        """Digest, compare and remember a batch of tensors that has come to one version."""
        if place in self._sums:
            self._sums[place] |= state_digest.of_named({spec.name: tensor for spec, tensor in batch})
        for rollup in self._rollups:
            if rollup.end == place:
                rollup.encoder.add_all(_changes(batch, before[rollup.begin]))
        if any(each.begin == place for each in self._rollups):
            before[place] = [tensor.clone() for _, tensor in batch]
        for begin in [begin for begin in before if self._last_end(begin) <= place]:
            del before[begin]

    def _last_end(self, begin: int) -> int:
        return max((each.end for each in self._rollups if each.begin == begin), default=0)

    def _flush(self, rollup: _Rollup, folder: Path) -> None:
        """Write what was encoded of a rollup so far to a temporary file."""
        delta = rollup.encoder.delta()
        rollup.encoder = self._new_encoder()
        rollup.encoding = rollup.encoding or delta.encoding
        if not delta.num_changed:
            return
        rollup.num_changed += delta.num_changed
        version, parent = self._versions[rollup.end], self._versions[rollup.begin]
        metadata = delta_file.delta_metadata(
            *(version.version, parent.version, version.step, self._header.run_id),
            *(delta.encoding, delta.listed, delta.firsts),
        )
        path = folder / f"{rollup.write_id}-{len(rollup.files)}"
        write_file(path, delta.file(metadata)())
        rollup.files.append(path)
        rollup.num_bytes += path.stat().st_size

    def _is_worth(self, rollup: _Rollup) -> bool:
        cost = rollup.num_bytes + (1 + len(rollup.files)) * REQUEST_BYTES
        replaced = self._versions[rollup.begin + 1 : rollup.end + 1]
        return cost <= WORTH * sum(planning.delta_cost(each) for each in replaced)

    def _upload(self, rollup: _Rollup) -> None:
        version = self._versions[rollup.end].version
        for part, path in enumerate(rollup.files, 1):
            key = layout.rollup_key(version, rollup.write_id, part)
            rollup.payloads.append(self._uploads.upload(key, partial(_chunks, path)))

    def _add_rollup(self, rollup: _Rollup) -> Ends | None:
        version, parent = self._versions[rollup.end], self._versions[rollup.begin]
        digest = history.stored_digest(self._store, parent.version)
        delta = Delta(
            encoding=rollup.encoding, num_changed=rollup.num_changed, payloads=tuple(rollup.payloads)
        )
        return self._add(version, (parent.version, digest), delta)

    def _add(self, version: Manifest, parent: tuple[int, str] | None, part: Anchor | Delta) -> Ends | None:
        """Create a record; None where there is another one already."""
        stored = history.stored(self._store, version.version)
        if shortcuts.create(self._store, stored, parent=parent, part=part):
            return Ends(version.version, None if parent is None else parent[0])
        for each in (*part.payloads, *getattr(part, "files", ())):
            try:
                self._store.delete(each.key)
            except PatchstoreError as exc:
                logger.warning("%s stays behind, though no record names it: %s", each.key, exc)
        return None

    def _copied(self, prefix: str) -> Iterator[Payload]:
        """Store the files beside the weights once more, beside the new anchor."""
        first = self._segment.first.anchor
        assert first is not None
        for each in first.files:
            data = b"".join(download.chunks(self._store, each))
            yield self._uploads.upload(prefix + each.key.rpartition("/")[2], partial(iter, (data,)))

    def _new_encoder(self) -> DeltaEncoder:
        return DeltaEncoder(self._header.schema.tensors, self._encoding)


def _changes(batch: Sequence[_Named], before: Sequence[torch.Tensor]) -> Iterator[Change]:
    specs: Mapping[str, TensorSpec] = {spec.name: spec for spec, _ in batch}
    pairs = ((spec.name, new, old) for (spec, new), old in zip(batch, before, strict=True))
    for (name, new, old), indices in diff.changed_each(pairs):
        values = bits(new)[indices].view(new.dtype)
        yield specs[name], TensorPatch(name=name, indices=indices, values=values), old


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        yield from iter(partial(file.read, PART_BYTES), b"")
