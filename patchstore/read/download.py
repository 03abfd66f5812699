"""Download the payloads of a plan to this host, verified, in bounded memory.

With a host cache the processes of a host share downloads; without one each process downloads for itself.
"""

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch

from patchstore.errors import CorruptObject, HostError, NotFound
from patchstore.format import hashing
from patchstore.format.missing import missing
from patchstore.format.records import Payload
from patchstore.stores.base import Store
from patchstore.support import host

SMALL_BYTES = 1 << 16
"""Files up to this size are read into memory: a process may map only 65,530 (`vm.max_map_count`)."""


_ALIGNMENT = 64
_UNASKED_BYTES = 64 << 20
"""Payloads up to this size are downloaded without a request for their size first."""


def chunks(store: Store, wanted: Payload) -> Iterator[bytes]:
    """Stream a payload; its bytes are verified only when the iterator ends.

    Raises:
        CorruptObject: missing, or not the bytes that the manifest names.
    """
    try:
        # One byte more than there should be, so that a longer object is noticed without asking for its size.
        with host.reading(wanted.key):
            yield from hashing.verified(store.read(wanted.key, end=wanted.size + 1), wanted)
    except NotFound as exc:
        raise missing(store, wanted) from exc


def check_size(store: Store, wanted: Payload) -> None:
    """Ask the store for a payload's size, before space is reserved for a false one.

    Raises:
        CorruptObject: missing, or not of the size that the manifest says.
    """
    try:
        with host.reading(wanted.key):
            size = store.size(wanted.key)
    except NotFound as exc:
        raise missing(store, wanted) from exc
    if size != wanted.size:
        raise CorruptObject(f"{wanted.key} should have {wanted.size:,} bytes but has {size:,}")


def download(store: Store, wanted: Payload, path: Path) -> None:
    """Copy a payload to a local file; on an error the file is incomplete and must not be used.

    Raises:
        CorruptObject: as `chunks`.
        HostError: there is no space, which is checked before the download begins, or the disk fails.
    """
    with room_for(store, wanted, path.parent), path.open("xb") as file:
        fill(file, store, wanted)


def fill(file: BinaryIO, store: Store, wanted: Payload) -> None:
    """Write a payload to a new file; callers translate its errors with `room_for`."""
    if wanted.size > _UNASKED_BYTES:
        # The space is reserved at once, and a false size could reserve all space of this host.
        check_size(store, wanted)
    if wanted.size:
        reserve(file.fileno(), wanted.size)
    file.writelines(chunks(store, wanted))


class OwnMemory:
    """Memory that is this process's alone, where nothing changes what was verified; no file is made."""

    def __init__(self, payloads: Sequence[Payload], allocate: Callable[[int], torch.Tensor]) -> None:
        """Make room for these payloads at once.

        Args:
            allocate: returns so many bytes of host memory, uint8.

        Raises:
            HostError: there is no memory for them.
        """
        num_bytes = self.size_of(payloads)
        with host.asked(f"holding {num_bytes:,} bytes of deltas in memory", kinds=host.SHORT_OF_MEMORY):
            self._memory = allocate(num_bytes)
        self._at = 0

    @staticmethod
    def size_of(payloads: Iterable[Payload]) -> int:
        """Return how many bytes these take."""
        # One byte more each: see `chunks`.
        return sum(-(-(wanted.size + 1) // _ALIGNMENT) * _ALIGNMENT for wanted in payloads)

    def read(self, store: Store, wanted: Payload) -> memoryview:
        """Read one of them, verified. The memory lives as long as any of what this returns.

        Raises:
            CorruptObject: as `chunks`.
        """
        memory = self._memory[self._at : self._at + wanted.size + 1].numpy().data
        self._at += self.size_of([wanted])
        try:
            with host.reading(wanted.key):
                num_bytes = store.read_into(wanted.key, memory)
        except NotFound as exc:
            raise missing(store, wanted) from exc
        deque(hashing.verified((memory[:num_bytes],), wanted), maxlen=0)
        return memory[:num_bytes]


def reserve(file: int, num_bytes: int) -> None:
    """Reserve space for a new file, or see that there is enough.

    Raises:
        OSError: there is not (ENOSPC), or the system refuses.
    """
    if host.file_system_number(file) == host.TMPFS:
        # Reserving would write zeros, which takes as long as writing the file (tmpfs).
        found = os.fstatvfs(file)
        if found.f_blocks and found.f_bavail * found.f_frsize < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return
    # Saves allocating block by block (1 GB in 0.7 s instead of 3.2, ext4).
    os.posix_fallocate(file, 0, num_bytes)


def in_memory(file: BinaryIO) -> memoryview:
    """Map a file, or read a small one. The file may be closed afterwards, and stays as it is.

    Raises:
        HostError: it cannot be mapped.
    """
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
    """Report that there is no space for a payload, unless its manifest gives a wrong size.

    Raises:
        CorruptObject, HostError
    """
    try:
        yield
    except (OSError, MemoryError, OverflowError) as exc:
        check_size(store, wanted)
        number = exc.errno if isinstance(exc, OSError) else errno.ENOMEM
        raise host.refused(
            number, f"holding {wanted.size:,} bytes of {wanted.key} in {where}", reason=str(exc)
        ) from exc
