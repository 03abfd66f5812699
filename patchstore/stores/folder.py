"""Objects as files of a folder, on a local disk or on a file system that machines share.

An object appears under its name only when all its bytes are on the disk: by rename where it may
replace another, by a hard link where it must not. Opening the final name with O_EXCL would be
exclusive too, but lets readers see a half-written file.
"""

import errno
import os
import re
import stat
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import BinaryIO

from patchstore.errors import NotFound, UsageError
from patchstore.stores.base import NUM_PARTS, PART_BYTES, Chunk, Store, check_range, in_parts, keys_of
from patchstore.stores.errors import StoreErrors
from patchstore.support import host

_TEMP = ".tmp"
_TEMP_NAME = re.compile("[0-9a-f]{32}")
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)
"""Opens a folder to reach what is in it, which takes no right to list it."""
_STALE_S = 7 * 86_400
"""A temporary file that was not touched for so long was left by a killed writer."""
_PLACE_ATTEMPTS = 10
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_IMPOSSIBLE = {errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP}
"""Errors that another attempt would not change."""


class FolderStore(Store):
    """The files below a folder; the folder is made by the first write.

    Unfinished objects lie in `.tmp/` below it, which is no part of the store. A symbolic link
    below the folder is no object either, and none is followed: all folders on the way are opened one by
    one, so nothing outside can be read, written or deleted through one, also if a link takes a folder's
    place meanwhile. A pipe, a socket or a device is no object. The folder itself may be a link.

    There is no `timeout_s`: a call of the operating system cannot be interrupted, so where a network file
    system hangs, operations hang with it. Mount it so that it gives up (NFS: `softerr`).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            if not os.fspath(path):
                raise UsageError("the path of a folder is empty; '.' is the working directory")
            self._root = os.path.realpath(path)
        except ValueError as exc:
            raise UsageError(f"{path!r} cannot be a path: {exc}") from exc
        if self._root == os.path.sep:
            raise UsageError("the root of the file system is no place for a run; name a folder below it")
        # Absolute, since it is handed on to servers that run in other folders.
        self.url = self._root
        self._errors = StoreErrors(self.url)
        self._swept = False
        self._sweep_lock = threading.Lock()

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_range(self.url, "get", key, start, end)
        with self._translate_errors("get", key), self._open("get", key) as file:
            # Cut at the size first: reading n bytes allocates n bytes, whatever the file has.
            size = os.fstat(file.fileno()).st_size
            stop = size if end is None else min(end, size)
            file.seek(start)
            return file.read(max(0, stop - start))

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        check_range(self.url, "read", key, start, end)
        # Opened once: for a part in memory, that takes as long as reading it.
        with self._translate_errors("read", key):
            file = self._open("read", key)
        with file:
            with self._translate_errors("read", key):
                size = os.fstat(file.fileno()).st_size
            stop = size if end is None else min(end, size)
            yield from in_parts(partial(self._part, key, file.fileno()), start, stop)

    def is_on_this_host(self, key: str) -> bool:
        # Of the file itself, as another file system may be mounted below the root.
        with suppress(NotFound), self._translate_errors("read", key), self._open("read", key) as file:
            return host.file_system_number(file.fileno()) in host.LOCAL
        return False

    def read_into(self, key: str, memory: memoryview) -> int:
        with self._translate_errors("read", key):
            file = self._open("read", key)
        with file, self._translate_errors("read", key):
            num = min(os.fstat(file.fileno()).st_size, len(memory))

            def fill(start: int) -> int:
                at, end = start, min(start + PART_BYTES, num)
                while at < end and (some := os.preadv(file.fileno(), [memory[at:end]], at)):
                    at += some
                return at - start

            starts = range(0, num, PART_BYTES)
            if len(starts) < 2:
                return sum(map(fill, starts))
            with ThreadPoolExecutor(min(NUM_PARTS, len(starts)), "patchstore-read") as pool:
                return sum(pool.map(fill, starts))

    def _part(self, key: str, file: int, start: int, end: int) -> bytes:
        part = b""
        with self._translate_errors("read", key):
            # A signal may end a call early.
            while more := os.pread(file, end - start - len(part), start + len(part)):
                part += more
        return part

    def size(self, key: str) -> int:
        with self._translate_errors("size", key), self._open("size", key) as file:
            return os.fstat(file.fileno()).st_size

    def stored_at(self, key: str) -> datetime | None:
        # When the file got its name: its bytes are older if the writer slept before that, and a copy or a
        # user may set their time.
        with self._translate_errors("stored_at", key), self._open("stored_at", key) as file:
            return datetime.fromtimestamp(os.fstat(file.fileno()).st_ctime, UTC)

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self._store("put", key, [data], if_absent=if_absent)

    def upload(self, key: str, chunks: Iterable[Chunk]) -> None:
        self._store("upload", key, chunks, if_absent=False)

    def list(self, prefix: str = "") -> Iterator[str]:
        folder = self._errors.prefix(prefix).rpartition("/")[0]
        with self._translate_errors("list", prefix):
            # Sorted as a whole: in folder order `a/b` would come before `a-b`, as keys after it.
            keys = keys_of(self._names(folder), prefix)
        yield from keys

    def delete(self, key: str) -> None:
        folders, name = self._parts("delete", key)
        with self._translate_errors("delete", key):
            try:
                with self._folder(folders) as folder:
                    if not stat.S_ISREG(_mode(name, folder)):
                        return
                    os.unlink(name, dir_fd=folder)
                    _sync_folder(folder)
            except (FileNotFoundError, NotADirectoryError):
                self._check_root("delete", key)
                return
            self._remove_empty_folders(folders)

    def _parts(self, operation: str, key: str) -> tuple[Sequence[str], str]:
        """The folders below the root that lead to the file of a key, and its name in the last of them."""
        *folders, name = self._errors.key(operation, key).split("/")
        if [*folders, name][0] == _TEMP:
            what = f"unfinished objects are kept under {_TEMP}/; use another key"
            raise self._errors.usage(operation, key, what)
        return folders, name

    @contextmanager
    def _folder(self, folders: Sequence[str], *, make: bool = False) -> Iterator[int]:
        """Open the last of some folders, of which each lies in the one before, and the first in the root.

        `make` those that are missing, the root among them. Raises _Link where one of them is a symbolic link.
        """
        if make:
            _make_folder(self._root)
        # Descriptors of the folders themselves: a path could come to lead elsewhere at any time.
        folder = os.open(self._root, _FOLDER & ~os.O_NOFOLLOW)
        try:
            for name in folders:
                below = _opened_folder(name, folder, make=make)
                os.close(folder)
                folder = below
            yield folder
        finally:
            os.close(folder)

    @contextmanager
    def _translate_errors(self, operation: str, key: str) -> Iterator[None]:
        """Translate errors of the operating system into errors of a store."""
        try:
            yield
        except _Link as exc:
            what = (
                f"{exc} is a symbolic link, and below a store's folder none is followed: remove it, or mount "
                "the other disk there"
            )
            raise self._errors.usage(operation, key, what) from exc
        except OSError as exc:
            self._check_root(operation, key)
            said = exc.strerror or str(exc)
            if isinstance(exc, IsADirectoryError | NotADirectoryError):
                what = f"a folder cannot hold a key and others below it ({said}); use another key"
                raise self._errors.usage(operation, key, what) from exc
            if isinstance(exc, PermissionError):
                what = f"access is refused ({said}); give this user the right to it"
                raise self._errors.usage(operation, key, what) from exc
            if exc.errno in _IMPOSSIBLE:
                what = f"the file system cannot do this ({said}); use another folder or key, or mount it anew"
                raise self._errors.usage(operation, key, what) from exc
            do = "free some space, or raise the limit, and try again" if exc.errno in _FULL else "try again"
            raise self._errors.unavailable(operation, key, said, do) from exc

    def _check_root(self, operation: str, key: str) -> None:
        """Refuse a root that is not a folder: it must not look like an empty store."""
        try:
            is_folder = stat.S_ISDIR(os.stat(self._root).st_mode)
        except NotADirectoryError:
            is_folder = False
        except OSError:
            # The folder does not exist yet, or may not be read, which the first error says already.
            return
        if not is_folder:
            raise self._errors.usage(
                operation, key, "the store's path is, or leads through, a file; give that of a folder"
            )

    def _open(self, operation: str, key: str) -> BinaryIO:
        folders, name = self._parts(operation, key)
        try:
            with self._folder(folders) as folder:
                kind = stat.S_IFMT(_mode(name, folder))
                # A pipe would make the reader wait for a writer, and opening a device may do something.
                if kind not in {stat.S_IFREG, stat.S_IFDIR}:
                    raise self._errors.usage(
                        operation, key, "a pipe, socket or device is there, which is no object; remove it"
                    )
                # Should a pipe take the file's place meanwhile, opening it does not wait either.
                opener = partial(_without_waiting, folder=folder)
                file = open(name, "rb", opener=opener)  # noqa: SIM115 - the caller closes it
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as exc:
            self._check_root(operation, key)
            raise self._errors.not_found(operation, key) from exc
        return file

    def _names(self, folder: str) -> Iterator[str]:
        """Yield the names of all files below a folder (`""` is the root), in no order; some are no keys."""
        waiting = [folder]
        while waiting:
            at = waiting.pop()
            if at.partition("/")[0] == _TEMP:
                continue
            try:
                with self._folder(at.split("/") if at else []) as found:
                    below, files = _entries(found)
            except _Link:
                continue
            except (FileNotFoundError, NotADirectoryError):
                self._check_root("list", folder)
                continue  # never made, or removed with its last object while we looked
            waiting += (f"{at}/{name}" if at else name for name in below)
            yield from (f"{at}/{name}" if at else name for name in files)

    def _store(self, operation: str, key: str, chunks: Iterable[Chunk], *, if_absent: bool) -> None:
        self._parts(operation, key)
        name = uuid.uuid4().hex
        with ExitStack() as stack:
            with self._translate_errors(operation, key):
                unfinished = stack.enter_context(self._folder([_TEMP], make=True))
                # Not from `tempfile`: its files are private to the user, and servers may run as another.
                opener = partial(os.open, mode=0o666, dir_fd=unfinished)
                file = stack.enter_context(open(name, "xb", buffering=0, opener=opener))
                stack.callback(_remove, name, unfinished)
                temp = _Temp(name, unfinished, os.fstat(file.fileno()))
                with self._sweep_lock:
                    if not self._swept:
                        _sweep(temp)
                        self._swept = True
            # Only our own calls are translated: what `chunks` raises passes through.
            for chunk in chunks:
                with self._translate_errors(operation, key):
                    _write(file, chunk)
            with self._translate_errors(operation, key):
                os.fsync(file.fileno())
                # A file system may tell only now that it has no room.
                file.close()
                self._place(operation, temp, key, if_absent=if_absent)

    def _place(self, operation: str, temp: "_Temp", key: str, *, if_absent: bool) -> None:
        """Give a finished file its name, and wait until that is on the disk too."""
        folders, name = self._parts(operation, key)
        for attempt in range(1, _PLACE_ATTEMPTS + 1):
            try:
                with self._folder(folders, make=True) as folder:
                    with suppress(FileNotFoundError):
                        _mode(name, folder)
                    if if_absent:
                        self._link(temp, name, folder, key)
                    else:
                        os.replace(temp.name, name, src_dir_fd=temp.folder, dst_dir_fd=folder)
                    _sync_folder(folder)
            except FileNotFoundError:
                # A delete took the folder's last object, and the folder with it. Once more.
                if attempt == _PLACE_ATTEMPTS:
                    raise
            else:
                return

    def _link(self, temp: "_Temp", name: str, folder: int, key: str) -> None:
        try:
            os.link(temp.name, name, src_dir_fd=temp.folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError as exc:
            there = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(there.st_mode):
                what = "there are keys below it, so it cannot be one; use another key"
                raise self._errors.usage("put", key, what) from exc
            # NFS may create the link, lose its answer, and then answer "exists" to the repetition.
            if not os.path.samestat(there, temp.found):
                raise self._errors.taken(key) from exc
        except OSError as exc:
            if exc.errno not in _NO_LINKS:
                raise
            what = (
                f"the file system has no hard links ({exc.strerror}), without which a file cannot be created "
                "whole and only once; use another file system, or s3://"
            )
            raise self._errors.unsupported("put", key, what) from exc

    def _remove_empty_folders(self, folders: Sequence[str]) -> None:
        for number in reversed(range(len(folders))):
            try:
                with self._folder(folders[:number]) as folder:
                    os.rmdir(folders[number], dir_fd=folder)
            except OSError:
                return  # not empty, or another process removed it


class _Link(OSError):
    """A symbolic link is where a folder or an object should be; its text is the link's name."""


@dataclass(frozen=True, slots=True)
class _Temp:
    """A file of ours that has no key yet."""

    name: str
    folder: int
    """Descriptor of the folder in which it lies."""
    found: os.stat_result


def _mode(name: str, folder: int) -> int:
    """Return type and rights of what has a name in a folder. Raises _Link, FileNotFoundError, OSError."""
    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        raise _Link(name)
    return mode


def _opened_folder(name: str, folder: int, *, make: bool) -> int:
    """Open a folder within another one. Raises _Link, OSError."""
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
    except OSError:
        _mode(name, folder)
        raise
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=folder)
    _sync_folder(folder)
    return _opened_folder(name, folder, make=False)


def _without_waiting(name: str, flags: int, folder: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)


def _entries(folder: int) -> tuple[list[str], list[str]]:
    """Return the names of the folders in a folder, and those of the files. Links and pipes are neither."""
    with _readable(folder) as readable, os.scandir(readable) as entries:
        found = list(entries)
        folders = [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
        return folders, [entry.name for entry in found if entry.is_file(follow_symlinks=False)]


def _remove(name: str, folder: int) -> None:
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)


def _write(file: BinaryIO, chunk: Chunk) -> None:
    rest = memoryview(chunk).cast("B")
    while rest:
        rest = rest[file.write(rest) :]


def _make_folder(path: str) -> None:
    """Make a folder and those above it, each on the disk before the next."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    _make_folder(parent)
    with suppress(FileExistsError):
        os.mkdir(path)
    above = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(above)
    finally:
        os.close(above)


@contextmanager
def _readable(folder: int) -> Iterator[int]:
    """Open a folder once more, to list or to sync it."""
    readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    try:
        yield readable
    finally:
        os.close(readable)


def _sync_folder(folder: int) -> None:
    """Wait until the names in a folder are on the disk; syncing a file does not do that."""
    with _readable(folder) as readable:
        os.fsync(readable)


def _sweep(temp: _Temp) -> None:
    """Remove what killed writers of this user left beside a new temporary file.

    Its time is that of the file server's clock, not ours. What is not named as we name files is not ours.
    """
    for name in _entries(temp.folder)[1]:
        with suppress(OSError):
            found = os.stat(name, dir_fd=temp.folder, follow_symlinks=False)
            is_ours = _TEMP_NAME.fullmatch(name) is not None and found.st_uid == temp.found.st_uid
            if is_ours and stat.S_ISREG(found.st_mode) and temp.found.st_mtime - found.st_mtime > _STALE_S:
                os.unlink(name, dir_fd=temp.folder)
