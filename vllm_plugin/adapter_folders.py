"""Versions of adapters as folders of this host, which the servers of the host share.

`adapters/RUN_ID/00000012-0123456789abcdef` is version 12 of a run, as PEFT and vLLM read adapters. The digits
are the first of its manifest's digest, so its path names its content: vLLM keys its prefix cache by it.

A folder is made once, by the process that asks first: from an earlier version's folder and deltas where that
is less to read. It has its name when it is proved, and nothing is written to it after that. A process that
serves it holds a shared lock on it. What no process holds stays for a while, and is verified before it is
used again, also after a power cut: so nothing waits for the disk.
"""

import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from patchstore.bucket import digests, history, kept
from patchstore.bucket.records import Manifest, Plan
from patchstore.errors import DataError, NotFound, StoreReplaced, WrongParent
from patchstore.ops.mirror import build
from patchstore.read import anchors, download, replay
from patchstore.read.host_cache import alone, own_folder
from patchstore.read.run import Run
from patchstore.stores import layout
from patchstore.support import host, locks
from patchstore.tensors import state_digest

logger = logging.getLogger(__name__)

KEPT = 8
"""Folders that stay on a host when no process holds them."""

_NAME = re.compile(r"(\d{8,})-[0-9a-f]{16}")


class _Lost(Exception):
    """The folder of an earlier version is gone, or wrong."""


@dataclass(frozen=True, slots=True)
class Lent:
    """A version's folder, which is not removed before `close`."""

    path: Path
    _lock: locks.Handle

    def is_whole(self) -> bool:
        """Whether what vLLM reads is still there: who cleans folders for temporary files knows no lock."""
        return self._lock.is_at(self.path) and _is_whole(self.path)

    def close(self) -> None:
        self._lock.close()


class AdapterFolders:
    """The folders of this host. For any thread; each call may wait for the store, or for another process."""

    def __init__(self, scratch: Path, *, keep: int = KEPT) -> None:
        """Keep them in `adapters` of a folder, which is made when it is needed."""
        self._folder, self._keep = scratch.absolute() / "adapters", keep

    def path(self, run: Run, version: int) -> Path:
        """Return which folder a version has, whether it is there or not. Raises as `lend`."""
        return self._path(run, *run.stored(version))

    def _path(self, run: Run, manifest: Manifest, data: bytes) -> Path:
        return self._folder / layout.check_file_name(run.header.run_id) / _name(manifest.version, data)

    def lend(self, run: Run, version: int) -> Lent:
        """Return a version's folder; make it if there is none. After an error nothing of it is left.

        Raises:
            UsageError: the folder is not one of this user alone, or not of this host.
            NotFound, DataError, StoreReplaced, WrongParent: as `Run.reach`.
            HostError: there is no space for it, or the system refuses something else.
        """
        manifest, data = run.stored(version)
        kept.check(run.store, version)
        path = self._path(run, manifest, data)
        with host.asked(f"keeping {path}", kinds=(OSError,)):
            # Folders for temporary files are cleaned, this one with them.
            for folder in (self._folder.parent, self._folder, path.parent):
                own_folder(folder)
            with alone(path):
                lent = self._found(run, manifest, path)
                if lent is None:
                    self._make(run, manifest, path)
                    lent = _held(path)
            self._remove_unused()
        return lent

    def _found(self, run: Run, manifest: Manifest, path: Path) -> Lent | None:
        """Return a folder that is there, proved; one that is wrong is removed. The caller holds its lock."""
        if not path.is_dir():
            return None
        if _is_unused(path):
            try:
                build.verify(run, manifest, path)
            except (DataError, NotFound, WrongParent, OSError) as exc:
                logger.warning("%s is made again: %s", path, exc)
                _remove(path)
                return None
        elif run.header.adapter is not None and not _is_whole(path):
            _remove(path)
            return None
        return _held(path)

    def _make(self, run: Run, manifest: Manifest, path: Path) -> None:
        def make(way: Plan, source: tuple[Path, Manifest] | None = None) -> None:
            if way.anchor is None:
                assert source is not None
                self._patch(run, *source, way, path)
                return
            if way.deltas:
                replay.write(run, way, path, is_durable=False)
                build.protect(path)
            else:
                # It may be an anchor that was added later, of which the manifest does not know.
                _copy(run, way.anchor, path)

        for source in self._earlier(run, path):
            try:
                run.reach(manifest.version, partial(make, source=source), held=source[1])
            except _Lost:
                continue
            except (DataError, StoreReplaced) as exc:
                logger.warning("%s is made from its anchor: %s", path, exc)
                break
            else:
                return
        run.reach(manifest.version, make)

    def _earlier(self, run: Run, path: Path) -> Iterator[tuple[Path, Manifest]]:
        """Yield older versions of the run that are there, the nearest first; they are not proved."""
        siblings = [each for each in self._folders() if each.parent == path.parent]
        older = [each for each in siblings if _version(each) < _version(path)]
        for each in sorted(older, key=_version, reverse=True):
            with suppress(DataError, NotFound):
                # Signed or not: the digests of the version that is made of it prove both.
                manifest, data = history.read_stored(run.store, _version(each))
                if _name(manifest.version, data) == each.name:
                    yield each, manifest

    def _patch(self, run: Run, source: Path, held: Manifest, way: Plan, path: Path) -> None:
        """Make a folder from that of an earlier version. Raises _Lost where that is gone or wrong."""
        # Only ever an older one than the own, so no two processes wait for each other.
        with alone(source):
            lent = self._found(run, held, source)
        if lent is None:
            raise _Lost
        with closing(lent):
            build.patch(run, source, held, way.deltas, path, is_durable=False)

    def _folders(self) -> list[Path]:
        return [each for each in self._folder.glob("*/*") if _NAME.fullmatch(each.name)]

    def _remove_unused(self) -> None:
        """Remove folders that no process holds, all but those that were used last."""
        with suppress(FileNotFoundError):
            num_unused = 0
            for path in sorted(self._folders(), key=lambda each: -each.stat().st_mtime_ns):
                # Who holds the lock makes it, or begins to use it.
                with suppress(BlockingIOError), alone(path, wait=False):
                    if path.is_dir() and _is_unused(path):
                        num_unused += 1
                        if num_unused > self._keep:
                            _remove(path)
                    if not path.is_dir():
                        path.with_suffix(".lock").unlink(missing_ok=True)


def _copy(run: Run, manifest: Manifest, path: Path) -> None:
    """Make the folder of a version that is stored in full: its own files, which are read once."""
    anchor = manifest.anchor
    assert anchor is not None
    with download.unfinished(path, is_folder=True, is_durable=False) as draft:
        sums = anchors.copy_anchor(run.store, manifest, run.schema, draft)
        state_digest.check_state(run.store, run.schema, sums, manifest)
        for wanted in anchor.files:
            download.download(run.store, wanted, draft / wanted.key.rpartition("/")[2])
        build.protect(draft)


def _name(version: int, data: bytes) -> str:
    """Return what the folder of a version is called, by the bytes of its manifest."""
    return f"{version:08d}-{digests.digest(data).partition(':')[2][:16]}"


def _version(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _held(path: Path) -> Lent:
    """Lock a folder that is there, and note that it is used now. The caller holds its lock of `alone`."""
    lock = locks.Handle(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock.lock(wait=True, shared=True)
        os.utime(path)
    except BaseException:
        lock.close()
        raise
    return Lent(path, lock)


def _is_whole(path: Path) -> bool:
    """Whether a folder of adapters has both files that vLLM reads."""
    return all((path / name).is_file() for name in (layout.ADAPTER_CONFIG, layout.ADAPTER_WEIGHTS))


def _is_unused(path: Path) -> bool:
    """Whether no process holds a folder, this one included. The caller holds its lock of `alone`."""
    with closing(locks.Handle(path, os.O_RDONLY | os.O_DIRECTORY)) as handle:
        try:
            handle.lock(wait=False)
        except BlockingIOError:
            return False
        return True


def _remove(path: Path) -> None:
    # Never half of it under its name; what a killed process leaves is removed as `download.unfinished` says.
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    path.rename(draft)
    shutil.rmtree(draft, ignore_errors=True)
