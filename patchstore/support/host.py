"""This host: its errors, such as a full disk, with advice on what to do; its files; its own name."""

import ctypes
import errno
import ipaddress
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from patchstore.errors import HostError, StoreUnavailable
from patchstore.support.causes import causes_of

_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors that mean that the host is short of something, in any call."""
_ROOM = "make room there, or name a folder on another disk"
_REMOVED = "make the folder; if it was removed while it was in use, try again and leave it alone"
_RIGHTS = "give this user the right to read and write there, or name another folder"
_ADVICE = {
    errno.EMFILE: "raise how many files a process may have open: `ulimit -n`, LimitNOFILE= in a systemd unit",
    errno.ENFILE: "raise how many files all processes together may have open: the sysctl fs.file-max",
    errno.ENOMEM: "free some, or raise the container's limit or `ulimit -v`; where a process maps very many "
    "files, raise the sysctl vm.max_map_count",
    errno.EAGAIN: "raise how many threads there may be (`ulimit -u`, the container's limit of processes), or "
    "how much memory they may have (`ulimit -v`)",
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise how large a file may be: `ulimit -f`; or name a folder on another file system",
    errno.ENOTDIR: "name another folder: a part of this path is a file",
    errno.ENOENT: _REMOVED,
    errno.ESTALE: _REMOVED,
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
}
SHORT_OF_MEMORY = (MemoryError, RuntimeError)
"""Exceptions of Python and torch when memory or threads are short."""
_WORDS = {"DefaultCPUAllocator": errno.ENOMEM, "can't start new thread": errno.EAGAIN}
"""In the message of such a `RuntimeError`; others are errors of another kind."""
_RUST = re.compile(r"\(os error (\d+)\)")
REMOTE = {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "fuse.sshfs", "fuse.glusterfs"}
"""File systems that several hosts share, where a lock may be known to one of them alone."""
TMPFS = 0x01021994
LOCAL = {
    *(TMPFS, 0x858458F6),  # in memory: tmpfs, ramfs
    *(0xEF53, 0x58465342, 0x9123683E, 0x2FC12FC1, 0xF2F52010),  # ext2 to ext4, xfs, btrfs, zfs, f2fs
    0x794C7630,  # overlay
}
"""Numbers (linux/magic.h) of file systems on a disk, or in the memory, of one host. Of others, such as FUSE,
that is not known."""


def refused(number: int | None, doing: str, *, reason: str = "", where: object = None) -> HostError:
    """Return an error about what this host refused, which the system calls by a number, or which has a
    reason.

    `doing` says what the process needed it for, as the subject of "failed on this host".
    """
    said = reason if number is None else os.strerror(number)
    advice = _ADVICE.get(number or 0)
    return HostError(
        f"{doing} failed on this host: {said}{f', {where}' if where else ''}{f'; {advice}' if advice else ''}"
    )


@contextmanager
def asked(doing: str, *, kinds: tuple[type[Exception], ...] = (OSError, *SHORT_OF_MEMORY)) -> Iterator[None]:
    """Translate errors of the operating system in the block into a `HostError`, as of `refused`.

    Only exceptions of these `kinds`: without `OSError` if the block calls code that is not ours.
    """
    try:
        yield
    except kinds as exc:
        if isinstance(exc, OSError):
            raise refused(exc.errno, doing, reason=str(exc), where=exc.filename) from exc
        words = "DefaultCPUAllocator" if isinstance(exc, MemoryError) else str(exc)
        number = next((number for each, number in _WORDS.items() if each in words), None)
        if number is None:
            raise
        raise refused(number, doing) from exc


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Tell a store that does not answer from a host that lacks something that the request needs."""
    try:
        yield
    except StoreUnavailable as exc:
        # Libraries wrap the system's error in errors of their own.
        for cause in causes_of(exc):
            number = getattr(cause, "errno", None)
            # Libraries in Rust pass on only the text.
            if found := _RUST.search(str(cause)):
                number = int(found[1])
            if number in _SHORT:
                raise refused(number, f"reading {what}") from exc
        raise


def file_system(path: Path) -> str | None:
    """Return the kind of file system that has a file, as Linux names it; None where it does not say."""
    device = path.lstat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, source = line.partition(" - ")
            if mount.split()[2] == number:
                return source.split()[0]
    return None


def file_system_number(file: int) -> int | None:
    """Return the number of the file system that has an open file; None where the system does not say."""
    # The first of many fields is the kind of the file system.
    fields = (ctypes.c_long * 64)()
    return int(fields[0]) if ctypes.CDLL(None).fstatfs(file, fields) == 0 else None


def replace_text(path: Path, text: str) -> None:
    """Give a file this text, in UTF-8; after a crash, or an error, it has the old content or the new one."""
    # In a folder that others may write to, a name that can be guessed may be a link that one of them left.
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    # The new name must outlive a crash of the machine too.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_loopback(name: str) -> bool:
    """Whether a name, or an address, is this host's for itself: localhost, 127.0.0.0/8 or ::1."""
    if name.lower().rstrip(".") == "localhost":
        return True
    address = _address(name)
    return address is not None and address.is_loopback


def is_any_address(name: str) -> bool:
    """Whether a server that listens at a name listens at every address of its host: none, 0.0.0.0 or ::."""
    address = _address(name)
    return not name or (address is not None and address.is_unspecified)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a name spells, with or without brackets; None if it is a name."""
    try:
        address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
