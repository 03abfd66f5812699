"""Locks between the processes of a host, which end with the process that took them.

The kernel keeps a lock for as long as a file that was opened for it stays open, and a forked child has all
open files of its parent: through it the lock would outlive the parent. So a child closes them before it does
anything else.
"""

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

guard = threading.RLock()
"""Held while this process forks, so that the child gets consistent data, and a free lock."""
_handles: "WeakSet[Handle]" = WeakSet()


class Handle:
    """A file or folder that is open in order to lock it. In a forked child it is closed."""

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        """Open it, but no symbolic link; `flags` are those of `os.open`."""
        with guard:
            self._number: int | None = os.open(path, flags | os.O_NOFOLLOW, 0o600)
            _handles.add(self)

    @property
    def is_open(self) -> bool:
        return self._number is not None

    def fileno(self) -> int:
        """Its descriptor, which makes it a file to `fcntl` and `os`."""
        if self._number is None:
            raise ValueError("closed, as this process is a child of the one that opened it")
        return self._number

    def lock(self, *, wait: bool, shared: bool = False) -> None:
        """Lock it against all other handles, or against those alone that do not share it.

        BlockingIOError if another has it, and `wait` is false.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(self, kind if wait else kind | fcntl.LOCK_NB)

    def is_at(self, path: Path) -> bool:
        """Whether this file has that name now."""
        try:
            return os.path.samestat(os.fstat(self.fileno()), path.lstat())
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release the lock."""
        with guard:
            if self._number is not None:
                # Not left to the closing: a library that forks by itself, past Python, has the file open too.
                with suppress(OSError):
                    fcntl.flock(self._number, fcntl.LOCK_UN)
                self._abandon()

    def _abandon(self) -> None:
        """Close it, and leave the lock to the parent."""
        number, self._number = self._number, None
        if number is not None:
            os.close(number)


def _abandon_all() -> None:
    for handle in list(_handles):
        handle._abandon()
    guard.release()


os.register_at_fork(before=guard.acquire, after_in_parent=guard.release, after_in_child=_abandon_all)
