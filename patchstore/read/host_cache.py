"""Share downloads between the processes of a host: each payload is downloaded once, and stored once.

All ranks of a server, and all servers of a host, stage the same versions. The first process that asks for a
payload downloads it; the others wait and then find it. After its last use it stays until others need the
space: for a second server, or for one that restarts or lags. The kernel keeps the locks (`flock`), so a
killed process blocks no other, and a half-written file never has the name that readers look for. Deltas that
`deltas.open_deltas` reads from a folder on this host are not kept here.

Each payload has a lock, `<digest>.lock`. Its holder downloads, verifies or removes the file. A process that
uses the file does not hold that lock. It lists the digest in a file of its own, `uses/<random>`, and keeps
that file locked while it uses anything; so it needs one descriptor for any number of payloads. A list that is
not locked belongs to a killed process and is ignored. Only the holder of a payload's lock enters its digest
or looks for it, so no process can begin to use a file while another removes it. A lock on the folder makes
evictions take turns; its holder waits for no other lock. A forked child has none of these locks, see `locks`.

A file may be removed, but never truncated or overwritten: the kernel ends a process (SIGBUS) that reads a
part of a mapped file that no longer exists. So files are read-only, in a folder that only this user can open.
"""

import logging
import os
import re
import stat
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from patchstore.bucket import digests
from patchstore.bucket.records import Manifest, Payload, Schema
from patchstore.bucket.state_sums import SumsArray, sums_object, unpack_sums
from patchstore.errors import CorruptObject, HostError, UsageError
from patchstore.read.download import check_size, download, parts_of
from patchstore.stores.base import Store
from patchstore.support import host, locks

logger = logging.getLogger(__name__)

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


MAX_BYTES = 4 << 30
"""How much lies unused by default. A delta is about 1 % of a model and is asked for again, by a server that
starts later or lags. An anchor is all of it, and is needed once: its shards of 5 GB are larger than this, so
they go when their last user does, and do not drive out the deltas."""

_LOCK = ".lock"
_PART = ".part"
_NAME = re.compile(rf"([0-9a-f]{{64}})({re.escape(_LOCK)}|{re.escape(_PART)})?")
_SEAL_NS = 0
"""mtime of a verified file: any later write to the file changes it."""


class HostCache:
    """Payloads as files of a folder of their own: those in use, and those used last.

    The folder must be on a local disk or in shared memory (`/dev/shm/...`), where every byte of it is a byte
    of the host's memory. Files are named by content, so versions, runs and stores may share it. So may caches
    with different bounds: each process keeps its own whenever it lets go of a payload.
    """

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """Open a cache, which is made if need be, and remove what killed processes left in it.

        Args:
            max_bytes: how many bytes of unused payloads may stay. The least recently used goes first, and a
                payload that is larger does not stay. 0 keeps nothing. Payloads in use are not counted.

        Raises:
            UsageError: a negative bound; or not a folder of this user alone on this host, and nothing was
                written to it.
            HostError: the system refuses what is to be done there.
        """
        if max_bytes < 0:
            raise UsageError(f"a cache cannot keep {max_bytes:,} bytes; give 0 to keep nothing")
        self._folder = folder.absolute()
        self._max_bytes = max_bytes
        self._uses: Uses | None = None
        with host.asked(f"opening the cache {folder}"):
            own_folder(folder)
            self._evict()

    @contextmanager
    def fetch(self, store: Store, wanted: Payload) -> Iterator[BinaryIO]:
        """`lease` for a single payload."""
        with self.lease() as lend, lend(store, wanted) as file:
            yield file

    @contextmanager
    def lease(self) -> Iterator[Callable[[Store, Payload], BinaryIO]]:
        """Lend local files until the block ends.

        Yields:
            What returns a file that holds exactly the payload's bytes; it waits while another process
            downloads it. The file was proved since any process began to use it: by its download, or by
            digesting what was kept, once for all that use it together. It is not removed before the block
            ends; a mapping of it stays valid for longer. It may be closed before, so that any number of
            payloads can be lent. Several threads may call it. After an error nothing of a download is left,
            and the next process that asks begins anew.
        """
        lent: list[tuple[Uses, Path]] = []

        def lend(store: Store, wanted: Payload) -> BinaryIO:
            path = self._folder / wanted.digest.partition(":")[2]
            with host.asked(f"keeping {wanted.size:,} bytes of {wanted.key} in {self._folder}"):
                # Folders for temporary files are cleaned, this one with them.
                own_folder(self._folder)
                file, uses = self._open(store, wanted, path)
            lent.append((uses, path))
            return file

        try:
            yield lend
        finally:
            with host.asked(f"letting go of what is kept in {self._folder}"):
                self._let_go(lent)

    def _open(self, store: Store, wanted: Payload, path: Path) -> tuple[BinaryIO, Uses]:
        """Open a payload's file, marked as used, that is proved; download it if there is none."""
        with alone(path):
            file = _proved(path, wanted)
            try:
                if file is None:
                    self._download(store, wanted, path)
                    file = path.open("rb")
                return file, self._begin_use(path)
            except BaseException:
                if file is not None:
                    file.close()
                if_unused(path)
                raise

    def _begin_use(self, path: Path) -> Uses:
        with locks.guard:
            uses = self._uses
            if uses is None or not uses.can_be_seen:
                self._uses = uses = Uses(self._folder)
            try:
                uses.add(path)
            except BaseException:
                uses.end_if_empty()
                raise
            return uses

    def _download(self, store: Store, wanted: Payload, path: Path) -> None:
        part = path.with_suffix(_PART)
        part.unlink(missing_ok=True)  # a killed process's
        if self._free_bytes() < wanted.size:
            check_size(store, wanted)
            self._evict(wanted.size)
        if (free := self._free_bytes()) < wanted.size:
            raise HostError(
                f"{self._folder} has no room for {wanted.size:,} bytes of {wanted.key}: {free:,} are free, "
                "and all that is kept here is in use; make room, or name a folder on another disk"
            )
        download(store, wanted, part)
        part.chmod(0o400)
        _seal(part)
        # Readers believe a file once it has this name, so only what was proved gets it.
        part.rename(path)

    def _let_go(self, lent: list[tuple[Uses, Path]]) -> None:
        with locks.guard:
            for uses, path in lent:
                uses.remove(path)
        for _, path in lent:
            # Another holder of the lock either begins to use the file, and will let go of it too, or evicts.
            with suppress(BlockingIOError, FileNotFoundError), alone(path, wait=False):
                if if_unused(path) is not None:
                    _seal(path)
        with suppress(FileNotFoundError):
            if self._num_bytes() > self._max_bytes:
                self._evict()

    def _evict(self, needed_bytes: int = 0) -> None:
        """Remove unused payloads until the rest is within the bound and `needed_bytes` are free."""
        with _locked(self._folder):
            unused: list[tuple[bool, int, int, Path]] = []
            for path in {self._folder / match[1] for match in self._names()}:
                # Who holds the lock begins to use the file, or lets go of it and evicts next.
                with suppress(BlockingIOError), alone(path, wait=False):
                    if (found := if_unused(path)) is not None:
                        # What is larger than the bound first, or all else would go before it.
                        fits = found.st_size <= self._max_bytes
                        unused.append((fits, found.st_atime_ns, _size(found), path))
            num_bytes = sum(size for _, _, size, _ in unused)
            for _, _, size, path in sorted(unused):
                if num_bytes <= self._max_bytes and self._free_bytes() >= needed_bytes:
                    break
                with suppress(BlockingIOError), alone(path, wait=False):
                    if if_unused(path) is not None:
                        path.unlink(missing_ok=True)
                        # Last: another process may make a new lock file from here on.
                        path.with_suffix(_LOCK).unlink(missing_ok=True)
                num_bytes -= size
            with suppress(OSError):
                # Not while there is a list in it.
                (self._folder / USES).rmdir()

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


def own_folder(folder: Path) -> None:
    """Make a folder, or prove that the one there is this user's alone, on this host."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{folder} is a file or a symbolic link; name a folder, or one to be made")
    if found.st_uid != os.geteuid():
        raise UsageError(
            f"{folder} belongs to user {found.st_uid}, but this process runs as {os.geteuid()}; a user "
            "who can write there could change weights, so name a folder of your own"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise UsageError(
            f"{folder} is open to other users (mode {stat.S_IMODE(found.st_mode):o}); chmod it to 700"
        )
    if (kind := host.file_system(folder)) in host.REMOTE:
        raise UsageError(
            f"{folder} is on a network file system ({kind}), where locks and mapped files are weaker; "
            "name a folder on a local disk, or in /dev/shm"
        )


def _proved(path: Path, wanted: Payload) -> BinaryIO | None:
    """Open a kept file that holds the payload; removes one that does not. The caller holds its lock.

    A disk rots, a power cut leaves holes, and other programs may write, so it is digested again, at 2 GB/s
    per core. While other processes use it that is not needed: they verified it, and its mtime shows that it
    was not written to since.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    try:
        in_use = is_used(path)
        if in_use and os.fstat(file.fileno()).st_mtime_ns == _SEAL_NS:
            return file
        if not in_use:
            # Not where others use it: were this process killed now, they would pass for a proof.
            _seal(file.fileno())
        if holds(file, wanted):
            return file
    except BaseException:
        file.close()
        raise
    file.close()
    logger.warning("%s no longer holds %s: downloading it again", path, wanted.key)
    path.unlink(missing_ok=True)
    return None


def holds(file: BinaryIO, wanted: Payload) -> bool:
    try:
        deque(digests.verified(parts_of(file), wanted), maxlen=0)
    except CorruptObject:
        return False
    file.seek(0)
    return True


def _seal(file: Path | int) -> None:
    """Set the time of last use, and the mtime of a verified file. An open file may be a removed one."""
    os.utime(file, ns=(time.time_ns(), _SEAL_NS))


def if_unused(path: Path) -> os.stat_result | None:
    """Return the status of a payload's file if no process uses it; remove what killed processes left of it.

    The caller holds its lock, and must let go of it next if this returns None.
    """
    path.with_suffix(_PART).unlink(missing_ok=True)
    try:
        with path.open("rb") as file:
            return None if is_used(path) else os.fstat(file.fileno())
    except FileNotFoundError:
        path.with_suffix(_LOCK).unlink(missing_ok=True)
        return None


def _size(found: os.stat_result) -> int:
    # Where nothing is kept, an empty file is not kept either.
    return found.st_size or 1


@contextmanager
def alone(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a payload, or of a folder: no other one makes, verifies or removes it meanwhile."""
    lock = path.with_suffix(_LOCK)
    while True:
        with closing(locks.Handle(lock, os.O_RDWR | os.O_CREAT)) as handle:
            handle.lock(wait=wait)
            # Its last holder may have removed it, and others lock a new one by now.
            if handle.is_at(lock):
                yield
                return


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with closing(locks.Handle(folder, os.O_RDONLY | os.O_DIRECTORY)) as handle:
        handle.lock(wait=True)
        yield


def cached_sums(store: Store, schema: Schema, manifest: Manifest, cache: "HostCache") -> SumsArray:
    """Fetch the digest sums of a version's tensors through the host's cache."""
    with cache.fetch(store, sums_object(schema, manifest)) as file:
        return unpack_sums(schema, manifest, file.read())
