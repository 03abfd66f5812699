"""Keep what the processes of a host download: each payload is fetched once, and lies on the host once.

All ranks of a server, and all servers of a host, stage the same versions. The first to ask for a payload
downloads it, the others wait and find it. When the last of them lets go of it, it stays for who comes later,
a second server, a restarted one, one that lags, until others need the room. The kernel keeps the locks
(`flock`), so a killed process holds up nobody, and a half-written file never has the name that readers look
for.

A payload has two locks. On `<digest>.lock`, exclusive: who brings the file in, proves it or takes it away.
On the file itself, shared: all who use it. The second is tested only by holders of the first, so nobody can
begin to use what another is about to remove. A third, on the folder, makes evictions take turns; its holder
waits for no other lock.
"""

import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from patchstore import checksum
from patchstore.errors import CorruptObject, UsageError
from patchstore.fetch import check_size, download
from patchstore.model import Payload
from patchstore.stores.base import PART_BYTES, Store

logger = logging.getLogger(__name__)

MAX_BYTES = 4 << 30
"""How much lies unused by default. A delta is about 1 % of a model and is asked for again, by a server that
starts later or lags. An anchor is all of it, and is needed once: its shards of 5 GB are larger than this, so
they go when their last user does, and do not drive out the deltas."""

_LOCK = ".lock"
_PART = ".part"
_NAME = re.compile(rf"([0-9a-f]{{64}})({re.escape(_LOCK)}|{re.escape(_PART)})?")
_SEAL_NS = 0
"""Time of last modification of a file that was proved. Whoever writes to it sets another, of today."""
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "fuse.sshfs", "fuse.glusterfs"}


class NodeCache:
    """Payloads as files of a folder of their own: those in use, and those used last.

    The folder must be on a local disk or in shared memory (`/dev/shm/...`), where every byte of it is a byte
    of the host's memory. Files are named by content, so versions, runs and stores may share it. So may caches
    with different bounds: each process keeps its own whenever it lets go of a payload.
    """

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """Open a cache, which is made if need be, and remove what killed processes left in it.

        Args:
            max_bytes: how much of what nobody uses may stay; the least recently used goes first, and a
                payload that is larger does not stay. 0 to keep nothing. What is in use is not counted.

        Raises:
            UsageError: a negative bound; or not a folder of this user alone on this host, and nothing was
                written to it.
        """
        if max_bytes < 0:
            raise UsageError(f"a cache cannot keep {max_bytes:,} bytes; give 0 to keep nothing")
        _prepare(folder)
        self._folder = folder.absolute()
        self._max_bytes = max_bytes
        self._evict()

    @contextmanager
    def fetch(self, store: Store, wanted: Payload) -> Iterator[BinaryIO]:
        """Lend a local file that holds exactly the payload's bytes; waits while another process downloads it.

        It was proved since anybody began to use it: by its download, or by digesting what was kept, once for
        all that use it together. It is not removed before the block ends; a mapping of it stays valid for
        longer.

        Raises:
            CorruptObject: as `fetch.chunks`.
            OSError: the disk is full, which is said before the download begins, or fails. As after every
                error, nothing of a download is left, and the next process that asks begins anew.
        """
        path = self._folder / wanted.digest.partition(":")[2]
        # Folders for temporary files are cleaned, this one with them.
        _prepare(self._folder)
        with self._open(store, wanted, path) as file:
            try:
                yield file
            finally:
                # Explicitly, as a mapping or a forked child keeps the open file, and with it the lock.
                fcntl.flock(file, fcntl.LOCK_UN)
                self._let_go(path)

    def _open(self, store: Store, wanted: Payload, path: Path) -> BinaryIO:
        """Open a payload's file, marked as used, that is proved; download it if there is none."""
        with _alone(path):
            file = _proved(path, wanted)
            if file is None:
                try:
                    self._download(store, wanted, path)
                except BaseException:
                    _if_unused(path)
                    raise
                file = path.open("rb")
            fcntl.flock(file, fcntl.LOCK_SH)
        return file

    def _download(self, store: Store, wanted: Payload, path: Path) -> None:
        part = path.with_suffix(_PART)
        part.unlink(missing_ok=True)  # a killed process's
        if self._free_bytes() < wanted.size:
            check_size(store, wanted)
            self._evict(wanted.size)
        if (free := self._free_bytes()) < wanted.size:
            raise OSError(
                errno.ENOSPC,
                f"{os.strerror(errno.ENOSPC)}, for {wanted.size:,} bytes of {wanted.key}: {free:,} are free, "
                "and all that is kept here is in use. Make room, or name another folder",
                str(self._folder),
            )
        try:
            download(store, wanted, part)
        except OSError as exc:
            # Of a failed write the system says neither where nor how much.
            raise OSError(
                exc.errno, f"{exc.strerror}, for {wanted.size:,} bytes of {wanted.key}", str(part)
            ) from exc
        part.chmod(0o400)
        _seal(part)
        # Readers believe a file once it has this name, so only what was proved gets it.
        part.rename(path)

    def _let_go(self, path: Path) -> None:
        # Whoever holds the lock either begins to use the file, and will let go of it too, or evicts.
        with suppress(BlockingIOError, FileNotFoundError), _alone(path, wait=False):
            if _if_unused(path) is not None:
                _seal(path)
        with suppress(FileNotFoundError):
            if self._num_bytes() > self._max_bytes:
                self._evict()

    def _evict(self, needed_bytes: int = 0) -> None:
        """Remove what nobody uses, until no more of it is left than may be and `needed_bytes` are free."""
        with _locked(self._folder):
            unused: list[tuple[bool, int, int, Path]] = []
            for path in {self._folder / match[1] for match in self._names()}:
                # Who holds the lock begins to use the file, or lets go of it and evicts next.
                with suppress(BlockingIOError), _alone(path, wait=False):
                    if (found := _if_unused(path)) is not None:
                        # What is larger than the bound first, or all else would go before it.
                        fits = found.st_size <= self._max_bytes
                        unused.append((fits, found.st_atime_ns, _size(found), path))
            num_bytes = sum(size for _, _, size, _ in unused)
            for _, _, size, path in sorted(unused):
                if num_bytes <= self._max_bytes and self._free_bytes() >= needed_bytes:
                    break
                with suppress(BlockingIOError), _alone(path, wait=False):
                    if _if_unused(path) is not None:
                        path.unlink(missing_ok=True)
                        # Last: whoever makes a new one may begin at once.
                        path.with_suffix(_LOCK).unlink(missing_ok=True)
                num_bytes -= size

    def _names(self) -> Iterator[re.Match[str]]:
        return filter(None, (_NAME.fullmatch(path.name) for path in self._folder.iterdir()))

    def _num_bytes(self) -> int:
        """Size of all files, used or not; at times of another moment."""
        num_bytes = 0
        for match in self._names():
            with suppress(FileNotFoundError):
                num_bytes += _size((self._folder / match[0]).stat())
        return num_bytes

    def _free_bytes(self) -> float:
        found = os.statvfs(self._folder)
        # Shared memory without a limit of its own has 0 of 0 blocks.
        return found.f_bavail * found.f_frsize if found.f_blocks else float("inf")


def _prepare(folder: Path) -> None:
    """Make a folder, or prove that the one there is fit for a cache."""
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
    if (kind := _file_system(found.st_dev)) in _REMOTE:
        raise UsageError(
            f"{folder} is on a network file system ({kind}), where locks and mapped files are weaker; "
            "name a folder on a local disk, or in /dev/shm"
        )


def _proved(path: Path, wanted: Payload) -> BinaryIO | None:
    """Open a kept file that holds the payload; removes one that does not. The caller holds its lock.

    Digesting it is cheap (2 GB/s a core) for a disk's bit rot, a power cut's holes, or somebody's hands, and
    needless where others use it: they began with a proof, and nobody has written to it since.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    try:
        is_used = _is_used(file)
        if is_used and os.fstat(file.fileno()).st_mtime_ns == _SEAL_NS:
            return file
        if not is_used:
            # Not where others use it: were this process killed now, they would pass for a proof.
            _seal(file.fileno())
        if _holds(file, wanted):
            return file
    except BaseException:
        file.close()
        raise
    file.close()
    logger.warning("%s no longer holds %s: downloading it again", path, wanted.key)
    path.unlink(missing_ok=True)
    return None


def _holds(file: BinaryIO, wanted: Payload) -> bool:
    try:
        deque(checksum.verified(iter(partial(file.read, PART_BYTES), b""), wanted), maxlen=0)
    except CorruptObject:
        return False
    file.seek(0)
    return True


def _seal(file: Path | int) -> None:
    """Note the time of last use, and from when on a write would show. Of an open file, whoever removed it."""
    os.utime(file, ns=(time.time_ns(), _SEAL_NS))


def _if_unused(path: Path) -> os.stat_result | None:
    """Look at a payload's file if nobody uses it; removes what killed processes left instead of one.

    The caller holds its lock, and must let go of it next if this returns None.
    """
    path.with_suffix(_PART).unlink(missing_ok=True)
    try:
        with path.open("rb") as file:
            return None if _is_used(file) else os.fstat(file.fileno())
    except FileNotFoundError:
        path.with_suffix(_LOCK).unlink(missing_ok=True)
        return None


def _size(found: os.stat_result) -> int:
    # Where nothing is kept, an empty file is not kept either.
    return found.st_size or 1


def _is_used(file: BinaryIO) -> bool:
    """Whether others use this open file. The caller holds the payload's lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


@contextmanager
def _alone(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Be the only one of all processes and threads that brings, proves or removes this file.

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


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _file_system(device: int) -> str | None:
    """Return the kind of file system with this number, as Linux names it; None where nobody says."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, source = line.partition(" - ")
            if mount.split()[2] == number:
                return source.split()[0]
    return None
