"""Find the segments of a run that lack shortcuts, and make these in one pass over the anchor and the deltas.

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

from patchstore.bucket import history, lineage, shortcuts
from patchstore.bucket.lineage import Every, Since, is_due
from patchstore.bucket.notes import Began, Clock
from patchstore.bucket.records import (
    REQUEST_BYTES,
    Anchor,
    Delta,
    Ends,
    Manifest,
    Payload,
    TensorSpec,
)
from patchstore.bucket.state_sums import Sums
from patchstore.codec import Encoding, tensor_file
from patchstore.codec.delta import DeltaEncoder
from patchstore.codec.part_table import PartTable
from patchstore.errors import PatchstoreError
from patchstore.publish.commit import new_write_id
from patchstore.publish.uploads import upload
from patchstore.read import download
from patchstore.read.anchors import stream_anchor
from patchstore.read.deltas import Deltas, open_deltas
from patchstore.read.download import write_file
from patchstore.read.rebuild import Progress
from patchstore.read.run import Run
from patchstore.stores import layout
from patchstore.tensors import columns, state_digest
from patchstore.tensors.bits import TOGETHER, batches
from patchstore.tensors.columns import Block

logger = logging.getLogger(__name__)

SHORTEST = 8
"""Deltas that the shortest rollup replaces. Shorter ones would save few requests, and take as many bytes."""
STRIDE = 16
"""Behind the last anchor, rollups are made for so many deltas at a time: a reader reads so many one by one
before it looks for shortcuts."""
WORTH = 0.8
"""A rollup is kept if reading it costs at most this share of what its deltas cost."""
_GROUP_BYTES = 512 << 20
"""Weights whose changes are encoded together, into one object of a rollup."""

_Named = tuple[TensorSpec, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """An anchor, and the deltas behind it up to where the next anchor is due or is."""

    first: Manifest
    """Has an anchor, perhaps among the shortcuts."""
    path: Sequence[Manifest]
    """The versions behind it, each the child of the one before."""
    needs_anchor: bool
    """The last version of the path is to get an anchor."""

    @property
    def last(self) -> Manifest:
        return self.path[-1]

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield which rollups the segment should have: each from and to a place in `[first, *path]`.

        Each has a power of two deltas, and begins at a multiple of that. Shorter ones come first.
        """
        length = SHORTEST
        while length <= len(self.path):
            yield from ((end - length, end) for end in range(length, len(self.path) + 1, length))
            length *= 2

    def rollups(self) -> Iterator[Ends]:
        """Yield the same as shortcuts are named."""
        versions = [self.first, *self.path]
        for begin, end in self.blocks():
            yield Ends(versions[end].version, versions[begin].version)


def segments(
    path: Iterable[Manifest], found: Set[Ends], every: Every, damaged: Set[Ends] = frozenset()
) -> Iterator[Segment]:
    """Cut a lineage where anchors are due, and yield each segment that lacks shortcuts, as far as keys tell.

    A segment whose last version has an anchor among the shortcuts lacks only what is damaged: that anchor is
    made last. The deltas behind the last anchor that is there or due make a segment too, `STRIDE` at a time.

    Args:
        path: a version with an anchor, perhaps among the shortcuts, and all its descendants that lead to the
            head, oldest first.
    """
    versions = iter(path)
    first = next(versions)
    size = _anchor_bytes(first)
    since: list[Manifest] = []
    spent = 0
    for each in versions:
        if each.delta is None:
            # The version after a publication that was not stored. No delta leads to it.
            first, since, spent, size = each, [], 0, _anchor_bytes(each)
            continue
        since.append(each)
        spent += each.delta.num_bytes
        has_anchor = each.anchor is not None or Ends(each.version, None) in found
        if has_anchor or is_due(every, Since(num_deltas=len(since), num_bytes=spent), size):
            segment = Segment(first=first, path=tuple(since), needs_anchor=not has_anchor)
            if Ends(each.version, None) not in found or not damaged.isdisjoint(segment.rollups()):
                yield segment
            first, since, spent = each, [], 0
    if num := len(since) - len(since) % STRIDE:
        yield Segment(first=first, path=tuple(since[:num]), needs_anchor=False)


def _anchor_bytes(manifest: Manifest) -> int:
    return 0 if manifest.anchor is None else manifest.anchor.num_bytes


@dataclass(slots=True, kw_only=True)
class _Rollup:
    """A rollup under way: from and to a place in `[first, *path]` of a segment."""

    ends: Ends
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

    @property
    def delta(self) -> Delta:
        return Delta(encoding=self.encoding, num_changed=self.num_changed, payloads=tuple(self.payloads))


class Builder:
    """One pass over a segment."""

    def __init__(
        self,
        run: Run,
        segment: Segment,
        found: Set[Ends],
        encoding: Encoding,
        scratch: Path,
        damaged: Mapping[Ends, bytes],
        clock: Clock,
        progress: Progress | None = None,
    ) -> None:
        """Prepare; nothing is read or written yet."""
        self.is_late = False
        """Whether something was made and not added, as it took more than a day: a collector may have deleted
        it. Another pass makes it anew."""
        self._damaged, self._clock = damaged, clock
        self._progress, self._num_done = progress, 0
        self._run, self._store, self._segment = run, run.store, segment
        self._encoding, self._scratch = encoding, scratch
        self._table = PartTable.of_whole(run.schema)
        self._versions = [segment.first, *segment.path]
        self._rollups = [
            _Rollup(ends=ends, begin=begin, end=end, write_id=new_write_id(), encoder=self._new_encoder())
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
        return {each.ends for each in self._rollups}

    @property
    def has_work(self) -> bool:
        return bool(self._rollups) or self._segment.needs_anchor

    def build(self) -> list[Ends]:
        """Make what the segment lacks; return what was added.

        What another process added meanwhile is left, and this pass's objects in its place are deleted.
        """
        anchor = self._pass()
        for place, sums in self._sums.items():
            state_digest.check_state(self._store, self._run.schema, sums, self._versions[place])
        made: list[tuple[Ends, Anchor | Delta]] = [
            (each.ends, each.delta) for each in self._rollups if self._is_worth(each)
        ]
        if anchor is not None:
            made.append((Ends(self._segment.last.version, None), anchor))
        added = [self._add(ends, part) for ends, part in made]
        return [each for each in added if each is not None]

    def _pass(self) -> Anchor | None:
        schema = self._run.schema
        last = self._segment.last
        metadata = tensor_file.anchor_metadata(last.version, last.step, self._run.header.run_id)
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
            # Nothing was stored before.
            self._began = Began(self._clock)
            for name, specs, tensors in stream_anchor(self._store, self._segment.first, schema.by_name()):
                stepped = self._stepped(specs, tensors, steps, folder)
                if not self._segment.needs_anchor:
                    for _ in stepped:
                        pass
                    continue
                path = folder / name
                write_file(path, tensor_file.write(specs, stepped, metadata))
                payloads.append(upload(self._store, prefix + name, partial(_chunks, path)))
                path.unlink()
            for rollup in self._rollups:
                self._flush(rollup, folder)
                if self._is_worth(rollup):
                    for part, path in enumerate(rollup.files, 1):
                        key = layout.rollup_key(rollup.ends.version, rollup.write_id, part)
                        rollup.payloads.append(upload(self._store, key, partial(_chunks, path)))
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
            size = sum(spec.num_bytes for spec, _ in batch)
            num_bytes, self._num_done = num_bytes + size, self._num_done + size
            if self._progress is not None:
                self._progress(self._num_done, self._run.schema.num_bytes)
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
                self._compare(rollup.encoder, batch, before[rollup.begin])
        if any(each.begin == place for each in self._rollups):
            before[place] = [tensor.clone() for _, tensor in batch]
        for begin in before.keys() - {each.begin for each in self._rollups if each.end > place}:
            del before[begin]

    def _compare(
        self, encoder: DeltaEncoder, batch: Sequence[_Named], before: Sequence[torch.Tensor]
    ) -> None:
        """Encode what differs between two states of a batch."""
        alike: dict[str, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        for (spec, new), old in zip(batch, before, strict=True):
            alike.setdefault(spec.dtype, []).append((self._run.schema.places[spec.name], new, old))
        for some in alike.values():
            some.sort(key=lambda each: each[0])
            # A large tensor alone, as it is not copied then.
            for first, end in columns.runs([new.numel() for _, new, _ in some], TOGETHER):
                numbers, news, olds = zip(*some[first:end], strict=True)
                held = Block.of(numbers, olds)
                encoder.add(held.changed(news, held.numbers), held)

    def _flush(self, rollup: _Rollup, folder: Path) -> None:
        """Write what was encoded of a rollup so far to a temporary file."""
        delta = rollup.encoder.delta()
        rollup.encoder = self._new_encoder()
        rollup.encoding = rollup.encoding or delta.encoding
        if not delta.num_changed:
            return
        rollup.num_changed += delta.num_changed
        step = self._versions[rollup.end].step
        file = delta.file(
            self._run.schema,
            version=rollup.ends.version,
            parent=rollup.ends.parent or 0,
            step=step,
            run_id=self._run.header.run_id,
        )
        path = folder / f"{rollup.write_id}-{len(rollup.files)}"
        write_file(path, file())
        rollup.files.append(path)
        rollup.num_bytes += path.stat().st_size

    def _is_worth(self, rollup: _Rollup) -> bool:
        cost = rollup.num_bytes + (1 + len(rollup.files)) * REQUEST_BYTES
        replaced = self._versions[rollup.begin + 1 : rollup.end + 1]
        return cost <= WORTH * sum(lineage.delta_cost(each) for each in replaced)

    def _add(self, ends: Ends, part: Anchor | Delta) -> Ends | None:
        """Create a record; None where there is another one already."""
        stored = history.stored(self._store, ends.version)
        digest = None if ends.parent is None else history.stored_digest(self._store, ends.parent)
        replaced = self._damaged.get(ends)
        try:
            if shortcuts.create(
                self._store, ends, stored, digest, part=part, began=self._began, replaced=replaced
            ):
                return ends
        except shortcuts.TooLate as exc:
            logger.warning("%s: %s", self._store.url, exc)
            self.is_late = True
            return None
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
            yield upload(self._store, prefix + each.key.rpartition("/")[2], partial(iter, (data,)))

    def _new_encoder(self) -> DeltaEncoder:
        return DeltaEncoder(self._run.schema, self._table, self._encoding)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        yield from download.parts_of(file)
