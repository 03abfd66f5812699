"""Verify all versions of a run in one pass: each anchor is read once, and each delta is decoded once.

A *path* is an anchor and the versions that build on it, one after the other. It ends with the last of them,
or with the first that has an anchor of its own. Example: with anchors at 0 and 4, versions 0 to 6 are the
paths 0-1-2-3-4 and 4-5-6. Where a trainer went back, two paths have their beginning in common.

The tensors of a path's anchor are streamed, and each delta is written into a tensor while the digest sums of
every version on the path are counted, and those of the rollups that begin there. So the work grows with the
bytes in the bucket, and not with the square of the number of versions. Some paths are proved at a time.

A path may be of any length, so it is walked in *rounds*: some deltas are open at a time, and the weights that
they lead to are in a file until those that follow are open.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from itertools import accumulate, islice
from tempfile import TemporaryFile

import numpy as np
import torch

from patchstore.bucket import digests, history, manifest_json, shortcuts
from patchstore.bucket.records import Ends, Manifest, Payload, StoreHeader, TensorSpec
from patchstore.bucket.shortcuts import Shortcut
from patchstore.bucket.state_sums import SumsArray
from patchstore.errors import (
    CorruptObject,
    DataError,
    HostError,
    NotFound,
    PatchstoreError,
    StoreUnavailable,
)
from patchstore.read import download
from patchstore.read.anchors import stream_anchor
from patchstore.read.deltas import Deltas, open_deltas
from patchstore.read.rebuild import Progress, check_anchor
from patchstore.read.run import Run
from patchstore.signing.required import RequiredKeys
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.support import host
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TORCH_DTYPES, batches, bits

Batch = Sequence[tuple[TensorSpec, torch.Tensor]]

AT_ONCE = 4
"""Paths that are proved at the same time, each with its largest tensor in memory; then other shortcuts."""
DELTAS_AT_ONCE = 64
"""Deltas of a path that are open at the same time, each with its temporary files and what maps them."""

_HOW = ("anchor", "delta")
"""How the first version of a path is proved, and how the others are."""


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What is known of a version so far."""

    version: int
    manifest: Manifest | None = None
    """None if it cannot be read."""
    digest: str | None = None
    """Of the manifest's bytes; None if there are none."""
    error: PatchstoreError | None = None
    """What is wrong; None if everything is right."""
    is_known: bool = False
    """Whether it was not read again, as the caller knew its digest."""
    is_derived: bool = False
    """Whether the error is that of a version that this one builds on."""
    is_linked: bool = False
    """Whether the manifest is of this run and follows its parent, so that a path may go through it."""
    children: list[int] = field(default_factory=list)
    left: set[str] = field(default_factory=set)
    """Proofs that are not done, of `anchor` and `delta`."""

    @property
    def found(self) -> Manifest:
        """The manifest of a version that has one."""
        assert self.manifest is not None
        return self.manifest

    @property
    def is_fork(self) -> bool:
        """Whether its parent is another version than the one before it."""
        return self.manifest is not None and self.manifest.parent not in {None, self.version - 1}


@dataclass(slots=True, kw_only=True)
class _Rollup:
    """A rollup that is counted while a path is walked."""

    ends: Ends
    target: Manifest
    deltas: Deltas
    growth: SumsArray
    error: PatchstoreError | None = None


class _Weights:
    """The tensors of a version, in a file between two rounds."""

    def __init__(self, file: FileIO, specs: Sequence[TensorSpec]) -> None:
        self._file, self._specs = file, specs
        ends = accumulate(spec.num_bytes for spec in specs)
        self._places = {spec.name: end - spec.num_bytes for spec, end in zip(specs, ends, strict=True)}

    def write(self, batch: Batch) -> None:
        """Put tensors in the place of what they were."""
        with host.asked("keeping weights in a temporary file"):
            for spec, tensor in batch:
                self._move(self._file.write, spec, tensor)

    def batches(self) -> Iterator[Batch]:
        """Yield all tensors; each may be changed, and written before the next batch is taken."""
        return batches(self._specs, map(self._read, self._specs))

    def _read(self, spec: TensorSpec) -> torch.Tensor:
        tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
        with host.asked("reading weights from a temporary file"):
            self._move(self._file.readinto, spec, tensor)
        return tensor

    def _move(self, some: Callable[[memoryview], int], spec: TensorSpec, tensor: torch.Tensor) -> None:
        self._file.seek(self._places[spec.name])
        left = bits(tensor).view(torch.uint8).numpy().data
        while left:
            # The system moves at most 2 GiB in one call.
            left = left[some(left) :]


class WholeRun:
    """The versions of a run, and what is wrong with them. `verify` once."""

    def __init__(
        self,
        store: Store,
        header: StoreHeader,
        newest: int,
        *,
        required: RequiredKeys | None = None,
        known: Mapping[int, str] | None = None,
        is_collected: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            known: version -> digest of its manifest, of versions that were verified before. A path is left
                out if all its versions are known and have these digests still.
            is_collected: payloads may have been deleted, so anchors that were added to versions are proved
                too, and the versions behind them are proved from there. Not with required keys.
        """
        self._run, self._store, self._newest = Run(store, header, required), store, newest
        self._schema = header.schema
        self._known, self._progress = known or {}, progress
        self._over_added = is_collected and required is None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._num_done = self._num_all = 0
        self._slots: dict[int, Verdict] = {}
        """By version, ascending."""
        self._added: dict[int, Manifest] = {}
        """Versions that have an anchor among the shortcuts alone, with that anchor."""
        self._shortcuts: dict[Ends, Shortcut] = {}
        """Those that no path has come by yet."""
        self.num_shortcuts = 0
        self.wrong: dict[Ends, PatchstoreError] = {}
        """Shortcuts that are wrong, once the versions are verified."""

    def verify(self, note: Callable[[Mapping[int, str]], None] | None = None) -> Iterator[Verdict]:
        """Verify all versions and shortcuts, and then yield a verdict for each version, oldest first.

        Args:
            note: is called after each path with the versions that are verified so far, and the digests of
                their manifests; also before an error is raised.
        """
        self._read_manifests()
        self._read_shortcuts()
        paths = self._unknown_paths()
        rest = sum(payload.size for each in self._shortcuts.values() for payload in each.payloads)
        self._num_all = sum(self._cost(path) for path in paths) + rest
        self._prove_all(paths, note or (lambda _: None))
        self._read_rest({path[0].version for path in paths})
        for slot in self._slots.values():
            assert slot.error is not None or not slot.left, f"version {slot.version} was not proved"
            yield slot

    def _cost(self, path: Sequence[Manifest]) -> int:
        deltas = sum(each.delta.num_bytes for each in path[1:] if each.delta is not None)
        return self._run.schema.num_bytes + deltas

    # Which versions and shortcuts there are.

    def _read_manifests(self) -> None:
        """Read all manifests, some of them ahead, and check how each follows its parent."""
        before: tuple[Manifest, bytes] | None = None
        with ThreadPoolExecutor(history.READ_AHEAD, thread_name_prefix="patchstore-log") as pool:
            coming: deque[tuple[Verdict, Future[bytes | None]]] = deque()
            versions = self._versions()
            while True:
                for version in islice(versions, 4 * history.READ_AHEAD - len(coming)):
                    slot = self._slots[version] = Verdict(version=version)
                    coming.append((slot, pool.submit(self._read, slot)))
                if not coming:
                    return
                slot, read = coming.popleft()
                data = read.result()
                if slot.is_linked and (error := caught(partial(self._check_link, slot.found, before))):
                    slot.error, slot.is_linked = error, False
                before = None if slot.manifest is None or data is None else (slot.manifest, data)

    def _versions(self) -> Iterator[int]:
        """Yield the versions that are listed, and the slots before and between them that are empty.

        Of these at most as many as there are versions: the number of the newest one may be forged.
        """
        there = sorted({each for each in history.listed(self._store) if each < self._newest} | {self._newest})
        num_empty = len(there)
        at = 0
        for version in there:
            empty = range(at, min(version, at + num_empty))
            yield from empty
            yield version
            num_empty -= len(empty)
            at = version + 1

    def _read(self, slot: Verdict) -> bytes | None:
        """Read a manifest, and check its run and its signature."""
        data = None
        try:
            data = history.stored(self._store, slot.version)
            slot.digest = digests.digest(data)
            slot.manifest = found = manifest_json.from_json(layout.manifest_key(slot.version), data)
            self._run.check(found)
            # A path may lead through an unsigned version: the chain of digests covers it.
            slot.is_linked = True
            if self._run.check_signed is not None:
                self._run.check_signed(found, data)
        except PatchstoreError as exc:
            slot.error = blamed(exc)
        return data

    def _check_link(self, found: Manifest, before: tuple[Manifest, bytes] | None) -> None:
        if found.parent is None:
            return
        if before is not None and before[0].version == found.parent:
            history.check_parent(found, *before)
        else:
            history.read_parent(self._store, found)

    def _read_shortcuts(self) -> None:
        """Read the records of all shortcuts, and check whose they are."""

        def read(ends: Ends) -> tuple[Ends, Shortcut | PatchstoreError | None]:
            try:
                found = shortcuts.read(self._store, ends)
                self._check_shortcut(ends, found)
            except NotFound:
                # A collector deleted it.
                return ends, None
            except DataError as exc:
                return ends, exc
            return ends, found

        listed = [each for each in shortcuts.listed(self._store) if each.version in self._slots]
        for ends, found in history.read_many(read, listed):
            if isinstance(found, PatchstoreError):
                self.wrong[ends] = found
            elif found is not None:
                self._shortcuts[ends] = found
                if self._over_added and ends.parent is None and found.manifest.anchor is None:
                    self._added[ends.version] = found.way
        self.num_shortcuts = len(self._shortcuts) + len(self.wrong)

    def _check_shortcut(self, ends: Ends, found: Shortcut) -> None:
        slot = self._slots[ends.version]
        if slot.manifest is not None and found.manifest != slot.manifest:
            raise CorruptObject(f"its manifest is not that of version {ends.version}")
        parent = None if ends.parent is None else self._slots[ends.parent]
        if parent is not None and parent.digest not in {None, found.way.parent_digest}:
            raise CorruptObject(f"it names another version {ends.parent} than the store has")

    # Along which paths they are proved.

    def _has_anchor(self, slot: Verdict) -> bool:
        return slot.found.anchor is not None or slot.version in self._added

    def _unknown_paths(self) -> list[list[Manifest]]:
        """Return the paths to prove, and mark the versions of the others."""
        linked = [slot for slot in self._slots.values() if slot.is_linked]
        for slot in linked:
            if self._has_anchor(slot):
                slot.left.add("anchor")
            if slot.found.delta is not None and slot.found.parent is not None:
                slot.left.add("delta")
                self._slots[slot.found.parent].children.append(slot.version)
        paths = []
        for slot in linked:
            for way in self._ways(slot.version) if "anchor" in slot.left else ():
                path = [self._slots[each] for each in way]
                if all(self._known.get(each.version) == each.digest for each in path):
                    for at, each in enumerate(path):
                        each.is_known = True
                        each.left.discard(_HOW[at > 0])
                else:
                    first = self._added.get(path[0].version) or path[0].found
                    paths.append([first, *(each.found for each in path[1:])])
        return paths

    def _ways(self, anchor: int) -> Iterator[list[int]]:
        """Yield the ways from an anchor to each last version that is reached from it by deltas."""
        ways = [[anchor]]
        while ways:
            way = ways.pop()
            while len(way) == 1 or not self._has_anchor(self._slots[way[-1]]):
                # Not a copy of the way for each version: there may be a hundred thousand.
                if len(self._slots[way[-1]].children) != 1:
                    break
                way.append(self._slots[way[-1]].children[0])
            last = self._slots[way[-1]]
            # A version with an anchor ends the way; its own way begins with it.
            is_end = len(way) > 1 and self._has_anchor(last)
            if is_end or not last.children:
                yield way
            else:
                ways += [[*way, each] for each in last.children]

    # Proofs.

    def _prove_all(self, paths: Sequence[list[Manifest]], note: Callable[[Mapping[int, str]], None]) -> None:
        jobs = [partial(self._prove, path) for path in paths]
        reached = {(each.version, _HOW[at > 0]) for path in paths for at, each in enumerate(path)}
        jobs += [
            partial(self._check_alone, slot)
            for slot in self._slots.values()
            if slot.manifest is not None and any((slot.version, how) not in reached for how in slot.left)
        ]
        waiting, running = deque(jobs), set[Future[None]]()
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="patchstore-verify") as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < AT_ONCE:
                        running.add(pool.submit(waiting.popleft()))
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for each in done:
                        each.result()
                    note(self._verified())
            finally:
                self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                note(self._verified())

    def _verified(self) -> dict[int, str]:
        """Return the versions that are verified so far, and the digests of their manifests."""
        with self._lock:
            return {
                slot.version: slot.digest
                for slot in self._slots.values()
                if slot.digest is not None and slot.error is None and not slot.left
            }

    @host.asked("verifying all versions", kinds=host.SHORT_OF_MEMORY)
    def _prove(self, path: Sequence[Manifest]) -> None:
        """Prove the versions of a path; what is wrong is written down, and not raised."""
        with ExitStack() as files:
            try:
                assert path[0].anchor is not None
                for wanted in path[0].anchor.files:
                    download.check(self._store, wanted)
                weights, source = self._kept(files, path), self._streamed(path[0])
                # The first version of a round is known from the one before, unless it is the anchor.
                while self._prove_some(path, source, weights) and weights is not None:
                    path, source = path[DELTAS_AT_ONCE:], weights.batches()
            except PatchstoreError as exc:
                self._fail(path, blamed(exc))

    def _streamed(self, anchor: Manifest) -> Iterator[Batch]:
        for _, specs, tensors in stream_anchor(self._store, anchor, self._schema.by_name()):
            yield from batches(specs, tensors)

    def _kept(self, files: ExitStack, path: Sequence[Manifest]) -> _Weights | None:
        """Make the file of the weights between the rounds of a path; None if there is one round."""
        if len(path) <= DELTAS_AT_ONCE + 1:
            return None
        with host.asked("making a temporary file"):
            file = TemporaryFile(prefix="patchstore-", buffering=0)  # noqa: SIM115 -- `files` closes it
        return _Weights(files.enter_context(file), self._run.schema.tensors)

    def _prove_some(
        self, path: Sequence[Manifest], source: Iterator[Batch], weights: _Weights | None
    ) -> bool:
        """Prove the first versions of a path, and keep the weights that the rest begins with.

        Args:
            source: the tensors of the path's first version.

        Returns:
            Whether there is a rest that can be proved.
        """
        some, rest = path[: DELTAS_AT_ONCE + 1], path[DELTAS_AT_ONCE + 1 :]
        is_first = some[0].anchor is not None
        growth: SumsArray = np.zeros((len(some), len(self._schema.tensors), 2), dtype=np.uint64)
        with ExitStack() as files:
            opened = self._opened(files, path)
            # Those that begin at the last of them are counted with the rest.
            rollups = self._rollups(files, some[:-1] if rest else some)
            for batch in source:
                if self._stop.is_set():
                    return False
                self._walk(path, batch, opened, rollups, growth)
                if rest and weights is not None:
                    weights.write(batch)
                self._advance(sum(spec.num_bytes for spec, _ in batch) if is_first else 0)
        # Sums are numbers modulo 2**64, and so are their cumulative sums in this dtype.
        totals = np.cumsum(growth[: 1 + len(opened)], axis=0, dtype=np.uint64)
        for at, sums in enumerate(totals):
            if at or is_first:
                self._compare(some[at], sums, _HOW[at > 0])
            if self._slots[some[at].version].error is None:
                self._compare_rollups(rollups.get(at, ()), sums)
        is_whole = len(totals) == len(some)
        if not is_whole:
            self._check_deltas(rest)
        return is_whole and bool(rest)

    def _opened(self, files: ExitStack, path: Sequence[Manifest]) -> list[Deltas]:
        """Download the first deltas of a path up to a damaged one; check the bytes of those behind it."""
        opened: list[Deltas] = []
        some = path[: DELTAS_AT_ONCE + 1]
        for at, each in enumerate(some[1:], 1):
            assert each.delta is not None
            try:
                opened.append(files.enter_context(open_deltas(self._store, (each,), self._schema, None)))
            except PatchstoreError as exc:
                self._fail(path[at:], blamed(exc))
                self._check_deltas(some[at + 1 :])
                break
            self._advance(each.delta.num_bytes)
        return opened

    def _check_deltas(self, path: Sequence[Manifest]) -> None:
        for each in path:
            assert each.delta is not None
            for wanted in each.delta.payloads:
                self._check_payload(each, wanted)

    def _rollups(self, files: ExitStack, path: Sequence[Manifest]) -> dict[int, list[_Rollup]]:
        """Open the rollups that begin at versions of a path, by place, unless another path proves them."""
        places = {each.version: at for at, each in enumerate(path)}
        with self._lock:
            mine = {ends: each for ends, each in self._shortcuts.items() if ends.parent in places}
            for ends in mine:
                del self._shortcuts[ends]
        found: dict[int, list[_Rollup]] = {}
        for ends, each in mine.items():
            assert ends.parent is not None
            try:
                deltas = files.enter_context(open_deltas(self._store, (each.way,), self._schema, None))
                growth = np.zeros((len(self._schema.tensors), 2), dtype=np.uint64)
                rollup = _Rollup(ends=ends, target=each.manifest, deltas=deltas, growth=growth)
                found.setdefault(places[ends.parent], []).append(rollup)
            except PatchstoreError as exc:
                self._note_wrong(ends, exc)
            self._advance(sum(payload.size for payload in each.payloads))
        return found

    def _walk(
        self,
        path: Sequence[Manifest],
        batch: Batch,
        opened: list[Deltas],
        rollups: Mapping[int, Sequence[_Rollup]],
        growth: SumsArray,
    ) -> None:
        """Count what each version of a path changes of some tensors; cut `opened` where one is damaged."""
        for name, sums in state_digest.of_named({spec.name: held for spec, held in batch}).items():
            growth[0, self._schema.places[name]] += np.array(sums, dtype=np.uint64)
        self._count_rollups(rollups.get(0, ()), batch)
        for at, deltas in enumerate(opened, 1):
            try:
                deltas.counted(batch, growth[at], is_written=True)
            except PatchstoreError as exc:
                self._fail(path[at:], blamed(exc))
                del opened[at - 1 :]
                return
            self._count_rollups(rollups.get(at, ()), batch)

    def _count_rollups(self, rollups: Sequence[_Rollup], batch: Batch) -> None:
        for each in rollups:
            if each.error is None:
                try:
                    each.deltas.counted(batch, each.growth, is_written=False)
                except PatchstoreError as exc:
                    each.error = blamed(exc)

    def _compare(self, found: Manifest, sums: SumsArray, how: str) -> None:
        try:
            state_digest.check_state(self._store, self._run.schema, sums, found)
            self._run.sums(found)
        except PatchstoreError as exc:
            self._fail([found], blamed(exc))
            return
        with self._lock:
            self._slots[found.version].left.discard(how)

    def _compare_rollups(self, rollups: Sequence[_Rollup], sums: SumsArray) -> None:
        """Check that rollups lead to the sums of their versions, from one that has these."""
        for each in rollups:
            try:
                if each.error is not None:
                    raise each.error
                state_digest.check_state(self._store, self._run.schema, sums + each.growth, each.target)
            except PatchstoreError as exc:
                self._note_wrong(each.ends, exc)

    def _check_alone(self, slot: Verdict) -> None:
        """Check the objects of a version that no path leads to, and say why none does."""
        at = slot
        while at.error is None and at.manifest is not None and at.manifest.parent is not None:
            at = self._slots[at.manifest.parent]
        error = at.error or CorruptObject(f"no anchor leads to version {slot.version}")
        if slot.error is None:
            self._fail([slot.found], _derived(error, at.version), is_derived=at is not slot)
        delta = slot.found.delta
        for wanted in (*(delta.payloads if delta else ()), slot.found.state.sums):
            self._check_payload(slot.found, wanted)

    def _check_payload(self, found: Manifest, wanted: Payload) -> None:
        if (wrong := caught(partial(download.check, self._store, wanted))) is not None:
            self._fail([found], wrong)

    def _read_rest(self, begun: set[int]) -> None:
        """Read the shortcuts that no path led over: check digests of rollups, and prove anchors."""
        rest = self._shortcuts

        @host.asked("verifying shortcuts", kinds=host.SHORT_OF_MEMORY)
        def read(ends: Ends) -> None:
            at = ends.version
            is_proved = at in self._added and at in begun and "anchor" not in self._slots[at].left
            try:
                if ends.parent is not None:
                    for each in rest[ends].payloads:
                        download.check(self._store, each)
                elif not is_proved:
                    check_anchor(self._store, self._run.header, rest[ends].way)
            except PatchstoreError as exc:
                self._note_wrong(ends, exc)
            self._advance(sum(payload.size for payload in rest[ends].payloads))

        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="patchstore-verify") as pool:
            deque(pool.map(read, rest), maxlen=0)

    # What was found.

    def _note_wrong(self, ends: Ends, error: PatchstoreError) -> None:
        with self._lock:
            self.wrong[ends] = blamed(error)

    def _fail(self, path: Sequence[Manifest], error: PatchstoreError, *, is_derived: bool = False) -> None:
        """Note what is wrong with the first version of a path, and that the others build on it."""
        with self._lock:
            for each in path:
                slot, is_first = self._slots[each.version], each is path[0]
                if slot.error is None or (slot.is_derived and is_first and not is_derived):
                    slot.error = error if is_first else _derived(error, path[0].version)
                    slot.is_derived = is_derived or not is_first

    def _advance(self, num_bytes: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            self._num_done += num_bytes
            self._progress(self._num_done, self._num_all)


def _derived(error: PatchstoreError, version: int) -> PatchstoreError:
    return type(error)(f"builds on version {version}, which is wrong")


def caught(what: Callable[[], None]) -> PatchstoreError | None:
    """Return what is wrong with the bucket; errors of the store and of this host are raised."""
    try:
        what()
    except PatchstoreError as exc:
        return blamed(exc)
    return None


def blamed(error: PatchstoreError) -> PatchstoreError:
    """Return an error that the bucket is to blame for; raise one of the store or of this host."""
    if isinstance(error, StoreUnavailable | HostError):
        raise error
    return error
