"""Share downloads between the processes of a host: each payload is fetched once, and lies on its disk once.

All ranks of a server stage the same version. The first to ask for a payload downloads it, the others wait
and find it, and the last to let go of it removes it. The kernel keeps the locks (`flock`), so a killed
process holds up nobody, and a half-written file never has the name that readers look for.

A payload has two locks. On `<digest>.lock`, exclusive: who brings the file in or takes it away. On the file
itself, shared: all who use it. The second is tested only by holders of the first, so nobody can begin to
use what another is about to remove.
"""

import fcntl
import logging
import os
import re
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from patchstore import checksum
from patchstore.errors import CorruptObject, UsageError
from patchstore.fetch import download
from patchstore.model import Payload
from patchstore.stores.base import PART_BYTES, Store

logger = logging.getLogger(__name__)

_LOCK = ".lock"
_PART = ".part"
_NAME = re.compile(rf"([0-9a-f]{{64}})({re.escape(_LOCK)}|{re.escape(_PART)})?")


class Spool:
    """The payloads that processes of this host use at this moment, as files of a folder of their own.

    The folder must be on a local disk: `flock` and mapped files that were unlinked are weaker over a network.
    Files are named by content, so versions, runs and stores may share it.
    """

    def __init__(self, folder: Path) -> None:
        """Open a spool, which is made if need be, and remove what killed processes left in it.

        Raises:
            UsageError: not a folder of this user alone; nothing was written to it.
        """
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise UsageError(f"{folder} is a file or a symbolic link; name a folder, or one to be made")
        if found.st_uid != os.geteuid():
            raise UsageError(
                f"{folder} belongs to user {found.st_uid}, but this process runs as {os.geteuid()}; whoever "
                "may write there could change weights, so name a folder of your own"
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise UsageError(
                f"{folder} is open to other users (mode {stat.S_IMODE(found.st_mode):o}); chmod it to 700"
            )
        self._folder = folder.absolute()
        for name in {match[1] for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}:
            # Where another process holds the lock there is nothing to clean up, or it will do so itself.
            with suppress(BlockingIOError), _alone(self._folder / name, wait=False):
                _remove_unless_used(self._folder / name)

    @contextmanager
    def fetch(self, store: Store, wanted: Payload) -> Iterator[BinaryIO]:
        """Lend a local file that holds exactly the payload's bytes; waits while another process downloads it.

        The file is removed when the last user's block ends. A mapping of it stays valid for longer.

        Raises:
            CorruptObject: as `fetch.chunks`.
            OSError: the disk is full, or fails. As after every error, nothing of a download is left, and
                the next process that asks begins anew.
        """
        path = self._folder / wanted.digest.partition(":")[2]
        while True:
            file, is_proved = _open(store, wanted, path)
            with file:
                try:
                    # Not taken on trust, although it was proved once: 2 GB/s is cheap for a disk's bit rot,
                    # a power cut's holes, or somebody's hands. Only the one that downloaded skips this.
                    if is_proved or _holds(file, wanted):
                        file.seek(0)
                        yield file
                        return
                    logger.warning("%s no longer holds %s: downloading it again", path, wanted.key)
                    with _alone(path):
                        if _is_at(file, path):
                            path.unlink()
                finally:
                    # Explicitly, as a mapping or a forked child keeps the open file, and with it the lock.
                    fcntl.flock(file, fcntl.LOCK_UN)
                    with _alone(path):
                        _remove_unless_used(path)


def _open(store: Store, wanted: Payload, path: Path) -> tuple[BinaryIO, bool]:
    """Open a payload's file, marked as used; and say whether it was downloaded here and so is proved."""
    with _alone(path):
        try:
            file, is_proved = path.open("rb"), False
        except FileNotFoundError:
            try:
                _download(store, wanted, path)
            except BaseException:
                _remove_unless_used(path)
                raise
            file, is_proved = path.open("rb"), True
        fcntl.flock(file, fcntl.LOCK_SH)
    return file, is_proved


def _download(store: Store, wanted: Payload, path: Path) -> None:
    part = path.with_suffix(_PART)
    part.unlink(missing_ok=True)  # a killed process's
    try:
        download(store, wanted, part)
    except OSError as exc:
        # Of a failed write the system says neither where nor how much.
        raise OSError(
            exc.errno, f"{exc.strerror}, for {wanted.size:,} bytes of {wanted.key}", str(part)
        ) from exc
    part.chmod(0o400)
    # Readers believe a file once it has this name, so only what was proved gets it.
    part.rename(path)


def _holds(file: BinaryIO, wanted: Payload) -> bool:
    try:
        deque(checksum.verified(iter(partial(file.read, PART_BYTES), b""), wanted), maxlen=0)
    except CorruptObject:
        return False
    return True


@contextmanager
def _alone(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Be the only one of all processes and threads that brings or removes this file.

    Raises:
        BlockingIOError: another is, and `wait` is false.
    """
    lock = path.with_suffix(_LOCK)
    while True:
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                # Its last holder may have removed it, and others lock a new one by now.
                if _is_at(file, lock):
                    yield
                    return
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)


def _remove_unless_used(path: Path) -> None:
    """Remove a payload's files if nobody uses it. The caller holds its lock, and must let go of it next."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
    path.unlink(missing_ok=True)
    path.with_suffix(_PART).unlink(missing_ok=True)
    # Last: whoever makes a new one may begin at once.
    path.with_suffix(_LOCK).unlink()


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
