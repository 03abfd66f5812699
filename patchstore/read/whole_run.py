"""Verify all versions of a run in one pass: each anchor is read once, and each delta is decoded once.

Versions are proved along a *path*: an anchor, and the versions that build on it one after the other. The
tensors of the anchor are streamed, and each delta is written into a tensor while the digest sums of every
version on the path are counted. So the work grows with the bytes in the bucket, and not with the square of
the number of versions. Paths are independent, and some are proved at the same time.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from patchstore.errors import CorruptObject, PatchstoreError
from patchstore.format.records import Manifest, Payload, StoreHeader
from patchstore.format.state_sums import Sums, read_sums
from patchstore.read import download
from patchstore.read.anchors import stream_anchor
from patchstore.read.deltas import Deltas, open_deltas
from patchstore.read.run_paths import RunPaths, Slot, blamed, caught, derived, found_in
from patchstore.read.waypoint import Batch, Waypoint
from patchstore.signing.required import RequiredKeys, checks
from patchstore.stores.base import Store
from patchstore.support import host
from patchstore.tensors import state_digest
from patchstore.tensors.bits import batches

PATHS_AT_ONCE = 4
"""Paths that are proved at the same time, each with its largest tensor in memory."""
_DELTAS_AT_ONCE = 64
"""Deltas of a path that are on disk at the same time."""

_HOW = ("anchor", "delta")
"""How the first version of a path is proved, and how the others are."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found of a version."""

    version: int
    manifest: Manifest | None
    """None if it cannot be read."""
    digest: str | None
    """Of the manifest's bytes; None if there are none."""
    error: PatchstoreError | None
    """What is wrong; None if everything is right."""
    is_fork: bool = False
    """Whether its parent is another version than the one before it."""
    is_known: bool = False
    """Whether it was not read again, as the caller knew its digest."""


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
        scratch: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            newest: the number of the newest version.
            required: keys, one of which must have signed each version.
            known: version -> digest of its manifest, of versions that were verified before. A path is left
                out if all its versions are known and have these digests still.
            is_collected: payloads may have been deleted, so anchors that were added to versions are proved
                too, and the versions behind them are proved from there. Not with required keys.
            scratch: folder for temporary files: the deltas between two anchors, or 64 of them and the
                weights; for each of `PATHS_AT_ONCE` paths.
            progress: is called with the bytes read so far, and those to read in all.
        """
        self._store, self._header, self._newest = store, header, newest
        self._schema = header.schema.by_name()
        self._place = {spec.name: at for at, spec in enumerate(header.schema.tensors)}
        self._known, self._scratch, self._progress = known or {}, scratch, progress
        self._over_added = is_collected and required is None
        self._run = RunPaths(store, header, checks(required, store, header))
        self._lock = threading.Lock()
        self._num_done = self._num_all = 0
        self._stop = threading.Event()

    def verify(self, note: Callable[[Mapping[int, str]], None] | None = None) -> Iterator[Verdict]:
        """Verify all versions, and then yield a verdict for each, oldest first.

        Args:
            note: is called after each path with the versions that are verified so far, and the digests of
                their manifests; also before an error is raised.

        Raises:
            StoreUnavailable, HostError: the store or this host failed, so nothing is known of the rest.
        """
        self._run.read(self._newest)
        if self._over_added:
            self._run.read_added()
        paths, known = self._run.paths(self._known)
        self._num_all = sum(self._cost(path) for path in paths)
        self._prove_all(paths, note)
        for slot in self._run.slots.values():
            assert slot.error is not None or not slot.left, f"version {slot.version} was not proved"
            yield Verdict(
                version=slot.version,
                manifest=slot.manifest,
                digest=slot.digest,
                error=slot.error,
                is_fork=slot.manifest is not None and slot.manifest.parent not in {None, slot.version - 1},
                is_known=slot.version in known,
            )

    def _cost(self, path: Sequence[Manifest]) -> int:
        deltas = sum(each.delta.num_bytes for each in path[1:] if each.delta is not None)
        return self._header.schema.num_bytes + deltas

    # Proofs.

    def _prove_all(
        self, paths: Sequence[list[Manifest]], note: Callable[[Mapping[int, str]], None] | None
    ) -> None:
        jobs = [partial(self._prove, path) for path in paths]
        reached = {(each.version, _HOW[at > 0]) for path in paths for at, each in enumerate(path)}
        jobs += [
            partial(self._check_alone, slot)
            for slot in self._run.slots.values()
            if slot.manifest is not None and any((slot.version, how) not in reached for how in slot.left)
        ]
        waiting, running = deque(jobs), set[Future[None]]()
        with ThreadPoolExecutor(PATHS_AT_ONCE, thread_name_prefix="patchstore-verify") as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < PATHS_AT_ONCE:
                        running.add(pool.submit(waiting.popleft()))
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for each in done:
                        each.result()
                    if note is not None:
                        note(self.verified)
            finally:
                self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                if note is not None:
                    note(self.verified)

    @property
    def verified(self) -> dict[int, str]:
        """Versions that are verified so far, or were before, and the digests of their manifests."""
        with self._lock:
            return {
                slot.version: slot.digest
                for slot in self._run.slots.values()
                if slot.digest is not None and slot.error is None and not slot.left
            }

    @host.asked("verifying all versions", kinds=host.SHORT_OF_MEMORY)
    def _prove(self, path: Sequence[Manifest]) -> None:
        """Prove the versions of a path; what is wrong is written down, and not raised."""
        path = list(path)
        with ExitStack() as files:
            self._prove_path(path, files)

    def _prove_path(self, path: list[Manifest], files: ExitStack) -> None:
        try:
            assert path[0].anchor is not None
            for wanted in path[0].anchor.files:
                self._check_object(wanted)
            source = self._streamed(path[0])
            is_first = True
            while is_first or len(path) > 1:
                # The first version of each round is known, unless it is the anchor itself.
                path, source = self._prove_some(path, source, files, is_first=is_first)
                is_first = False
        except PatchstoreError as exc:
            self._fail(path, blamed(exc))

    def _check_alone(self, slot: Slot) -> None:
        """Check the objects of a version that no path leads to, and say why none does."""
        found = found_in(slot)
        at = slot
        while at.error is None and at.manifest is not None and at.manifest.parent is not None:
            at = self._run.slots[at.manifest.parent]
        error = at.error or CorruptObject(f"no anchor leads to version {slot.version}")
        if slot.error is None:
            self._fail([found_in(slot)], derived(error, at.version), is_derived=at is not slot)
        for wanted in (*(found.delta.payloads if found.delta else ()), found.state.sums):
            if (wrong := caught(partial(self._check_object, wanted))) is not None:
                self._fail([found], wrong)

    def _check_object(self, wanted: Payload) -> None:
        deque(download.chunks(self._store, wanted), maxlen=0)

    def _streamed(self, anchor: Manifest) -> Iterator[Batch]:
        for _, specs, tensors in stream_anchor(self._store, anchor, self._schema):
            yield from batches(specs, tensors)

    def _prove_some(
        self, path: list[Manifest], source: Iterator[Batch], kept: ExitStack, *, is_first: bool
    ) -> tuple[list[Manifest], Iterator[Batch]]:
        """Prove the first versions of a path; return the rest, and the tensors that it begins with.

        Args:
            source: the tensors of the path's first version.
            kept: closes what the rest is read from.
            is_first: whether that is the anchor, which is to be proved too.
        """
        some, rest = path[: _DELTAS_AT_ONCE + 1], path[_DELTAS_AT_ONCE + 1 :]
        growth: npt.NDArray[np.uint64] = np.zeros((len(some), len(self._place), 2), dtype=np.uint64)
        after = Waypoint(self._scratch) if rest else None
        if after is not None:
            kept.callback(after.close)
        with ExitStack() as files:
            opened = self._opened(files, path)
            for batch in source:
                if self._stop.is_set():
                    return [], iter(())
                self._count(growth[0], state_digest.of_named({spec.name: held for spec, held in batch}))
                for at, deltas in enumerate(opened, 1):
                    try:
                        self._count(growth[at], deltas.apply_counted(batch))
                    except PatchstoreError as exc:
                        self._fail(path[at:], blamed(exc))
                        del opened[at - 1 :]
                        break
                if after is not None:
                    after.write(batch)
                self._advance(sum(spec.num_bytes for spec, _ in batch) if is_first else 0)
            num_proved = 1 + len(opened)
        # Sums are numbers modulo 2**64, and so are their cumulative sums in this dtype.
        totals = np.cumsum(growth[:num_proved], axis=0, dtype=np.uint64)
        for at in range(0 if is_first else 1, num_proved):
            self._compare(some[at], totals[at], _HOW[at > 0])
        if after is None or num_proved <= len(some) - 1:
            return [], iter(())
        return [some[-1], *rest], after.batches()

    def _opened(self, files: ExitStack, path: Sequence[Manifest]) -> list[Deltas]:
        """Download the deltas of a path up to the first damaged one; check the bytes of those behind it."""
        opened: list[Deltas] = []
        for at, each in enumerate(path[1 : _DELTAS_AT_ONCE + 1], 1):
            assert each.delta is not None
            try:
                opened.append(
                    files.enter_context(open_deltas(self._store, (each,), self._schema, self._scratch))
                )
            except PatchstoreError as exc:
                self._fail(path[at:], blamed(exc))
                self._check_payloads(path[at + 1 :])
                break
            self._advance(each.delta.num_bytes)
        return opened

    def _check_payloads(self, path: Sequence[Manifest]) -> None:
        for each in path:
            assert each.delta is not None
            for wanted in each.delta.payloads:
                if (error := caught(partial(self._check_object, wanted))) is not None:
                    self._fail([each], error)

    def _count(self, growth: npt.NDArray[np.uint64], sums: Mapping[str, Sums]) -> None:
        for name, each in sums.items():
            growth[self._place[name]] += np.array(each, dtype=np.uint64)

    def _compare(self, found: Manifest, totals: npt.NDArray[np.uint64], how: str) -> None:
        sums = {
            spec.name: Sums(*each)
            for spec, each in zip(self._header.schema.tensors, totals.tolist(), strict=True)
        }
        try:
            state_digest.check_state(self._store, self._header.schema, sums, found)
            read_sums(self._store, self._header.schema, found)
        except PatchstoreError as exc:
            self._fail([found], blamed(exc))
            return
        with self._lock:
            self._run.slots[found.version].left.discard(how)

    def _fail(self, path: Sequence[Manifest], error: PatchstoreError, *, is_derived: bool = False) -> None:
        """Note what is wrong with the first version of a path, and that the others build on it."""
        with self._lock:
            for each in path:
                slot, is_first = self._run.slots[each.version], each is path[0]
                if slot.error is None or (slot.is_derived and is_first and not is_derived):
                    slot.error = error if is_first else derived(error, path[0].version)
                    slot.is_derived = is_derived or not is_first

    def _advance(self, num_bytes: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            self._num_done += num_bytes
            self._progress(self._num_done, self._num_all)
