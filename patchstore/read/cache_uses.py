"""Which payloads of the host's cache a process uses, so that no process removes them.

A process lists what it uses in a file of its own, `uses/<random>`, and keeps that file locked. A list that is
not locked belongs to a killed process, and is removed. See `host_cache`.
"""

import os
import uuid
from contextlib import closing, suppress
from pathlib import Path

from patchstore.support import locks

USES = "uses"
_LINE_BYTES = 65
"""Of a list of uses: a digest, and the line's end."""


class Uses:
    """The list of what one cache uses, each payload as often as it was added. Callers hold `locks.guard`."""

    def __init__(self, folder: Path) -> None:
        self._path, self._handle = _listed(folder)
        self._places: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._free: list[int] = []

    @property
    def can_be_seen(self) -> bool:
        """Whether others find the list: not in a forked child, nor where the folder was removed."""
        return self._handle.is_open and self._handle.is_at(self._path)

    def add(self, path: Path) -> None:
        if path.name not in self._places:
            place = self._free.pop() if self._free else len(self._places)
            # Each at a place of its own, so that no reader finds another's name half written.
            os.pwrite(self._handle.fileno(), f"{path.name}\n".encode(), place * _LINE_BYTES)
            self._places[path.name], self._counts[path.name] = place, 0
        self._counts[path.name] += 1

    def remove(self, path: Path) -> None:
        """Remove one use of a payload. The list ends with the last of all."""
        self._counts[path.name] -= 1
        if not self._counts[path.name]:
            place = self._places.pop(path.name)
            del self._counts[path.name]
            self._free.append(place)
            if self._handle.is_open:
                os.pwrite(self._handle.fileno(), b" " * (_LINE_BYTES - 1), place * _LINE_BYTES)
        self.end_if_empty()

    def end_if_empty(self) -> None:
        if not self._places and self._handle.is_open:
            self._path.unlink(missing_ok=True)
            self._handle.close()
            with suppress(OSError):
                # Not while there is another list in it.
                self._path.parent.rmdir()


def _listed(folder: Path) -> tuple[Path, locks.Handle]:
    """Make an empty list of uses, and lock it."""
    while True:
        path = folder / USES / uuid.uuid4().hex
        with suppress(FileExistsError):
            path.parent.mkdir(mode=0o700)
        # Until it is locked, others take it for a killed process's, and remove it, also with its folder.
        with suppress(FileNotFoundError, BlockingIOError):
            handle = locks.Handle(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                handle.lock(wait=False)
                if handle.is_at(path):
                    return path, handle
            except BaseException:
                handle.close()
                raise
            handle.close()


def is_used(path: Path) -> bool:
    """Whether any process uses a payload, this one included; removes lists of killed ones.

    The caller holds the payload's lock.
    """
    uses = path.parent / USES
    try:
        lists = list(uses.iterdir())
    except FileNotFoundError:
        return False
    for each in lists:
        with suppress(FileNotFoundError), closing(locks.Handle(each)) as handle:
            try:
                handle.lock(wait=False)
            except BlockingIOError:
                if path.name.encode() in _content(handle):
                    return True
            else:
                each.unlink()
    return False


def _content(handle: locks.Handle) -> bytes:
    return os.pread(handle.fileno(), os.fstat(handle.fileno()).st_size, 0)
