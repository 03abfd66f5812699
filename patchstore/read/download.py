"""Download payloads to this host, verified, in bounded memory; and files that appear when they are complete.

With a host cache the processes of a host share downloads; without one each process downloads for itself.
"""

import errno
import logging
import os
import re
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch

from patchstore.bucket import digests
from patchstore.bucket.digests import missing
from patchstore.bucket.records import Payload
from patchstore.errors import CorruptObject, HostError, NotFound, UsageError
from patchstore.stores.base import PART_BYTES, Chunk, Store
from patchstore.support import host, locks
from patchstore.support.threads import beside

logger = logging.getLogger(__name__)

SMALL_BYTES = 1 << 16
"""Files up to this size are read into memory: a process may map only 65,530 (`vm.max_map_count`)."""


_ALIGNMENT = 64
_UNASKED_BYTES = 64 << 20
"""Payloads up to this size are downloaded without a request for their size first."""


def chunks(store: Store, wanted: Payload) -> Iterator[bytes]:
    """Stream a payload; its bytes are verified only when the iterator ends. Raises CorruptObject."""
    try:
        # One byte more than there should be, so that a longer object is noticed without asking for its size.
        with host.reading(wanted.key):
            yield from digests.verified(store.read(wanted.key, end=wanted.size + 1), wanted)
    except NotFound as exc:
        raise missing(store, wanted) from exc


def check(store: Store, wanted: Payload) -> None:
    """Read a payload, and keep nothing of it. Raises CorruptObject."""
    deque(chunks(store, wanted), maxlen=0)


def check_size(store: Store, wanted: Payload) -> None:
    """Ask the store for a payload's size, before space is reserved for a false one."""
    try:
        with host.reading(wanted.key):
            size = store.size(wanted.key)
    except NotFound as exc:
        raise missing(store, wanted) from exc
    if size != wanted.size:
        raise CorruptObject(f"{wanted.key} should have {wanted.size:,} bytes but has {size:,}")


def download(store: Store, wanted: Payload, path: Path) -> None:
    """Copy a payload to a local file; on an error the file is incomplete and must not be used."""
    with room_for(store, wanted, path.parent), path.open("xb") as file:
        fill(file, store, wanted)


@contextmanager
def downloading(store: Store, wanted: Payload, path: Path) -> Iterator[Iterator[bytes]]:
    """`download`, while the block reads the payload's bytes, which it must do to the end."""
    with room_for(store, wanted, path.parent), path.open("xb") as file:
        _make_room(file, store, wanted)
        with closing(beside(file.write, chunks(store, wanted))) as passing:
            yield passing


def fill(file: BinaryIO, store: Store, wanted: Payload) -> None:
    """Write a payload to a new file; callers translate its errors with `room_for`."""
    _make_room(file, store, wanted)
    file.writelines(chunks(store, wanted))


def _make_room(file: BinaryIO, store: Store, wanted: Payload) -> None:
    if wanted.size > _UNASKED_BYTES:
        # The space is reserved at once, and a false size could reserve all space of this host.
        check_size(store, wanted)
    if wanted.size:
        reserve(file.fileno(), wanted.size)


class OwnMemory:
    """Memory that is this process's alone, where nothing changes what was verified; no file is made."""

    def __init__(self, payloads: Sequence[Payload], allocate: Callable[[int], torch.Tensor]) -> None:
        """Make room for these payloads at once."""
        num_bytes = self.size_of(payloads)
        with host.asked(f"holding {num_bytes:,} bytes of deltas in memory", kinds=host.SHORT_OF_MEMORY):
            self._memory = allocate(num_bytes)
        self._at = 0

    @staticmethod
    def size_of(payloads: Iterable[Payload]) -> int:
        # One byte more each: see `chunks`.
        return sum(-(-(wanted.size + 1) // _ALIGNMENT) * _ALIGNMENT for wanted in payloads)

    def read(self, store: Store, wanted: Payload) -> memoryview:
        """Read one of them, verified. The memory lives as long as any of what this returns."""
        memory = self._memory[self._at : self._at + wanted.size + 1].numpy().data
        self._at += self.size_of([wanted])
        try:
            with host.reading(wanted.key):
                num_bytes = store.read_into(wanted.key, memory)
        except NotFound as exc:
            raise missing(store, wanted) from exc
        deque(digests.verified((memory[:num_bytes],), wanted), maxlen=0)
        return memory[:num_bytes]


def reserve(file: int, num_bytes: int) -> None:
    """Reserve space for a new file, or see that there is enough."""
    if host.file_system_number(file) == host.TMPFS:
        # Reserving would write zeros, which takes as long as writing the file (tmpfs).
        found = os.fstatvfs(file)
        if found.f_blocks and found.f_bavail * found.f_frsize < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return
    # Saves allocating block by block (1 GB in 0.7 s instead of 3.2, ext4).
    os.posix_fallocate(file, 0, num_bytes)


def in_memory(file: BinaryIO) -> memoryview:
    """Map a file, or read a small one. The file may be closed afterwards, and stays as it is."""
    size = os.fstat(file.fileno()).st_size
    if size <= SMALL_BYTES:
        file.seek(0)
        return memoryview(bytearray(file.read()))
    try:
        # Python's own `mmap` keeps a descriptor for each mapping, and a chain may be of a thousand.
        pages = torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as exc:
        raise HostError(
            f"a file of {size:,} bytes cannot be mapped on this host: {exc}; free some memory, raise "
            "`ulimit -v`, or the sysctl vm.max_map_count"
        ) from exc
    # Writable, because torch wants writable memory; a write changes a copy of the page, and not the file.
    return pages.numpy().data


@contextmanager
def room_for(store: Store, wanted: Payload, where: object) -> Iterator[None]:
    """Report that there is no space for a payload, unless its manifest gives a wrong size."""
    try:
        yield
    except (OSError, MemoryError, OverflowError) as exc:
        check_size(store, wanted)
        number = exc.errno if isinstance(exc, OSError) else errno.ENOMEM
        raise host.refused(
            number, f"holding {wanted.size:,} bytes of {wanted.key} in {where}", reason=str(exc)
        ) from exc


_NAME = re.compile(r"\..+\.[0-9a-f]{32}\.partial")
_NO_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextmanager
def unfinished(target: Path, *, is_folder: bool, is_durable: bool = True) -> Iterator[Path]:
    """Create an empty file or folder beside `target`; it is renamed to `target` when the block ends.

    A durable folder is on the disk with all its files before it has its name. One that is proved before it is
    used again need not be: to wait for the disk can take longer than to write.

    After an error nothing is left. The folder of `target` is made if need be, and what killed processes left
    in it is removed; not on network file systems, where a lock may be known to one host alone.
    """
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        with host.asked(f"making {target}"):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                has_locks = host.file_system(target.parent) not in host.REMOTE
                if has_locks:
                    _remove_left(target.parent)
                handle = _made(draft, is_folder=is_folder, has_locks=has_locks)
            except (FileExistsError, FileNotFoundError, NotADirectoryError) as exc:
                # Such as below a file, or in /proc.
                raise UsageError(f"{target} cannot be made: {exc}; name another place") from exc
        with closing(handle):
            yield draft
            if is_folder and is_durable:
                with host.asked(f"writing {draft}"):
                    for path in (*draft.iterdir(), draft):
                        flush(path)
            with host.asked(f"naming {target}"):
                draft.rename(target)
                if is_durable:
                    flush(target.parent)
    except BaseException:
        _remove(draft)
        raise


def _made(draft: Path, *, is_folder: bool, has_locks: bool) -> locks.Handle:
    """Make an empty file or folder, and lock it where that can be done."""
    while True:
        if is_folder:
            # `exist_ok` would raise where another process removes the folder of an earlier try meanwhile.
            with suppress(FileExistsError):
                draft.mkdir()
        else:
            draft.touch()
        # Until it is locked, another process may take it for a killed process's and remove it: then try
        # again.
        with suppress(FileNotFoundError, BlockingIOError):
            handle = locks.Handle(draft)
            try:
                if has_locks:
                    handle.lock(wait=False)
                if handle.is_at(draft):
                    return handle
            except BaseException as exc:
                if isinstance(exc, OSError) and exc.errno in _NO_LOCKS:
                    return handle
                handle.close()
                raise
            handle.close()


def _remove_left(folder: Path) -> None:
    """Remove what killed processes left in a folder."""
    for path in [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]:
        # A file that cannot be opened, locked or removed is left.
        with suppress(OSError), closing(locks.Handle(path)) as handle:
            handle.lock(wait=False)
            if os.fstat(handle.fileno()).st_uid == os.geteuid():
                _remove(path)
                logger.info("removed %s, which a killed process had left", path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        # Its folder may be none, which is what ended the attempt.
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def parts_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the rest of a file."""
    yield from iter(partial(file.read, PART_BYTES), b"")


def write_file(path: Path, chunks: Iterable[Chunk]) -> None:
    """Write a file; what `chunks` raises passes through."""
    with host.asked(f"writing {path}"):
        file = path.open("wb", buffering=0)
    with file:
        for chunk in chunks:
            rest = memoryview(chunk).cast("B")
            with host.asked(f"writing {path}"):
                while rest:
                    rest = rest[file.write(rest) :]


def flush(path: Path) -> None:
    """Make a file, or a folder's list of files, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
