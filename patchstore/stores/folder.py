"""Objects as files of a folder, on a local disk or on a file system that machines share.

An object appears under its name only when all its bytes are on the disk: by rename where it may
replace another, by a hard link where it must not. Opening the final name with O_EXCL would be
exclusive too, but lets readers see a half-written file.
"""

import errno
import os
import stat
import threading
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import BinaryIO

from patchstore.errors import NotFound, UsageError
from patchstore.format.layout import check_key
from patchstore.stores.base import NUM_PARTS, PART_BYTES, Chunk, Store, check_range, in_parts
from patchstore.stores.messages import Messages
from patchstore.support import host

_TEMP = ".tmp"
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
    below the folder is no object either, so nothing outside can be read or written through one;
    nor is a pipe, a socket or a device.

    There is no `timeout_s`: a call of the operating system cannot be interrupted, so where a network file
    system hangs, operations hang with it. Mount it so that it gives up (NFS: `softerr`).

    Raises:
        UsageError: the path is empty, or cannot be one.
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
        self._messages = Messages(self.url)
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
        with self._translate_errors("read", key):
            part = os.pread(file, end - start, start)
            while part and len(part) < end - start:
                if not (more := os.pread(file, end - start - len(part), start + len(part))):
                    break
                part += more
        return part

    def size(self, key: str) -> int:
        with self._translate_errors("size", key), self._open("size", key) as file:
            return os.fstat(file.fileno()).st_size

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self._store("put", key, [data], if_absent=if_absent)

    def upload(self, key: str, chunks: Iterable[Chunk]) -> None:
        self._store("upload", key, chunks, if_absent=False)

    def list(self, prefix: str = "") -> Iterator[str]:
        folder = self._messages.prefix(prefix).rpartition("/")[0]
        with self._translate_errors("list", prefix):
            # Sorted as a whole: in folder order `a/b` would come before `a-b`, as keys after it.
            keys = sorted(key for key in self._walk(folder) if key.startswith(prefix))
        yield from keys

    def delete(self, key: str) -> None:
        path = self._path("delete", key)
        with self._translate_errors("delete", key):
            try:
                # `isfile` would take a folder that may not be looked into for one without the file.
                if not stat.S_ISREG(os.lstat(path).st_mode):
                    return
            except (FileNotFoundError, NotADirectoryError):
                self._check_root("delete", key)
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
                _sync_folder(os.path.dirname(path))
            self._remove_empty_folders(os.path.dirname(path))

    def _path(self, operation: str, key: str) -> str:
        """The file of a key.

        Raises:
            UsageError: no key, one of our own temporary files, or reached through a symbolic link.
        """
        path = os.path.join(self._root, self._messages.key(operation, key))
        if key.partition("/")[0] == _TEMP:
            what = f"unfinished objects are kept under {_TEMP}/; use another key"
            raise self._messages.usage(operation, key, what)
        if os.path.realpath(path) != path:
            what = "there is a symbolic link, which is no object; remove it"
            raise self._messages.usage(operation, key, what)
        return path

    @contextmanager
    def _translate_errors(self, operation: str, key: str) -> Iterator[None]:
        """Translate errors of the operating system into errors of a store."""
        try:
            yield
        except OSError as exc:
            self._check_root(operation, key)
            said = exc.strerror or str(exc)
            if isinstance(exc, IsADirectoryError | NotADirectoryError):
                what = f"a folder cannot hold a key and others below it ({said}); use another key"
                raise self._messages.usage(operation, key, what) from exc
            if isinstance(exc, PermissionError):
                what = f"access is refused ({said}); give this user the right to it"
                raise self._messages.usage(operation, key, what) from exc
            if exc.errno in _IMPOSSIBLE:
                what = f"the file system cannot do this ({said}); use another folder or key, or mount it anew"
                raise self._messages.usage(operation, key, what) from exc
            do = "free some space, or raise the limit, and try again" if exc.errno in _FULL else "try again"
            raise self._messages.unavailable(operation, key, said, do) from exc

    def _check_root(self, operation: str, key: str) -> None:
        """Refuse a root that is not a folder: it must not look like an empty store.

        Raises:
            UsageError: see above.
        """
        try:
            is_folder = stat.S_ISDIR(os.stat(self._root).st_mode)
        except NotADirectoryError:
            is_folder = False
        except OSError:
            # The folder does not exist yet, or may not be read, which the first error says already.
            return
        if not is_folder:
            raise self._messages.usage(
                operation, key, "the store's path is, or leads through, a file; give that of a folder"
            )

    def _open(self, operation: str, key: str) -> BinaryIO:
        path = self._path(operation, key)
        try:
            kind = stat.S_IFMT(os.stat(path).st_mode)
            # A pipe would make the reader wait for a writer, and opening a device may do something.
            if kind not in {stat.S_IFREG, stat.S_IFDIR}:
                raise self._messages.usage(
                    operation, key, "a pipe, socket or device is there, which is no object; remove it"
                )
            # Should a pipe take the file's place meanwhile, opening it does not wait either.
            file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as exc:
            self._check_root(operation, key)
            raise self._messages.not_found(operation, key) from exc
        return file

    def _walk(self, folder: str) -> Iterator[str]:
        """Yield the keys below a folder (`""` is the root), in no order."""
        path = os.path.join(self._root, folder) if folder else self._root
        if folder.partition("/")[0] == _TEMP or os.path.realpath(path) != path:
            return
        try:
            entries = _entries(path)
        except (FileNotFoundError, NotADirectoryError):
            self._check_root("list", folder)
            return  # never made, or removed with its last object while we looked
        for entry in entries:
            key = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(key)
            elif entry.is_file(follow_symlinks=False):
                # A file whose name is no key, left by a person or a tool, is no object.
                with suppress(UsageError):
                    yield check_key(key)

    def _store(self, operation: str, key: str, chunks: Iterable[Chunk], *, if_absent: bool) -> None:
        final = self._path(operation, key)
        with self._translate_errors(operation, key):
            file = self._create_temp()
        try:
            with file:
                # Only our own calls are translated: what `chunks` raises passes through.
                for chunk in chunks:
                    with self._translate_errors(operation, key):
                        _write(file, chunk)
                with self._translate_errors(operation, key):
                    os.fsync(file.fileno())
            with self._translate_errors(operation, key):
                self._place(file.name, final, key, if_absent=if_absent)
        finally:
            with suppress(OSError):
                os.unlink(file.name)

    def _create_temp(self) -> BinaryIO:
        """Open a new file in the temporary folder, which is made first if need be."""
        folder = os.path.join(self._root, _TEMP)
        _make_folder(folder)
        # Not from `tempfile`: its files are private to the user, and servers may run as another.
        file = open(os.path.join(folder, uuid.uuid4().hex), "xb", buffering=0)  # noqa: SIM115
        with self._sweep_lock:
            if not self._swept:
                _sweep(folder, now=os.fstat(file.fileno()).st_mtime)
                self._swept = True
        return file

    def _place(self, temp: str, final: str, key: str, *, if_absent: bool) -> None:
        """Give a finished file its name, and wait until that is on the disk too.

        Raises:
            AlreadyExists: `if_absent` and another file has the name.
            UnsupportedStore: `if_absent` and the file system has no hard links; nothing was stored.
        """
        for attempt in range(1, _PLACE_ATTEMPTS + 1):
            try:
                _make_folder(os.path.dirname(final))
                if if_absent:
                    self._link(temp, final, key)
                else:
                    os.replace(temp, final)
                _sync_folder(os.path.dirname(final))
            except FileNotFoundError:
                # A delete took the folder's last object, and the folder with it. Once more.
                if attempt == _PLACE_ATTEMPTS:
                    raise
            else:
                return

    def _link(self, temp: str, final: str, key: str) -> None:
        try:
            os.link(temp, final)
        except FileExistsError as exc:
            if os.path.isdir(final):
                what = "there are keys below it, so it cannot be one; use another key"
                raise self._messages.usage("put", key, what) from exc
            # NFS may create the link, lose its answer, and then answer "exists" to the repetition.
            if not os.path.samefile(temp, final):
                raise self._messages.taken(key) from exc
        except OSError as exc:
            if exc.errno not in _NO_LINKS:
                raise
            what = (
                f"the file system has no hard links ({exc.strerror}), without which a file cannot be created "
                "whole and only once; use another file system, or s3://"
            )
            raise self._messages.unsupported("put", key, what) from exc

    def _remove_empty_folders(self, folder: str) -> None:
        while folder != self._root:
            try:
                os.rmdir(folder)
            except OSError:
                return  # not empty, or another process removed it
            folder = os.path.dirname(folder)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _entries(path: str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return list(entries)


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
    _sync_folder(parent)


def _sync_folder(path: str) -> None:
    """Wait until the names in a folder are on the disk; syncing a file does not do that."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _sweep(folder: str, now: float) -> None:
    """Remove what killed writers left; `now` is the file server's clock, not ours."""
    for entry in _entries(folder):
        with suppress(OSError):
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(found.st_mode) and now - found.st_mtime > _STALE_S:
                os.unlink(entry.path)
