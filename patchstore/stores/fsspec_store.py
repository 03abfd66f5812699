"""Objects in any file system that fsspec knows and that can create a file only once.

That is rare: `mode="create"` of fsspec's base class looks first and writes then, which lets
several writers win. File systems that inherit it, and all that ship with fsspec, are refused.
"""

import inspect
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.callbacks import Callback
from fsspec.spec import AbstractFileSystem

from patchstore.errors import PatchstoreError, UnsupportedStore, UsageError
from patchstore.stores.base import Chunk, Store, check_range, keys_of
from patchstore.stores.deadline import DEFAULT_TIMEOUT_S, Deadline, Patience, allowance
from patchstore.stores.errors import StoreErrors, named
from patchstore.stores.options import checked_timeout

_UNCACHED = {"skip_instance_cache": True, "use_listings_cache": False}
_DRIVERS_PART_BYTES = 64 << 20
"""At least what drivers send before they report progress."""


class FsspecStore(Store):
    """The files below `root`, a path of the file system without its protocol.

    `probe.check_create_only` tests whether the file system keeps the promise of its `mode="create"`. One
    that is known not to create atomically is refused here.
    """

    def __init__(
        self,
        fs: Any,
        root: str,
        *,
        url: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        secrets: Iterable[object] = (),
    ) -> None:
        _check_creates(fs)
        self.url = url
        self.timeout_s = timeout_s
        self._errors = StoreErrors(url, secrets, survives_fork=False)
        self._fs = fs
        self._root = root.rstrip("/")

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_range(self.url, "get", key, start, end)
        path = self._path("get", key)
        deadline = self._deadline(0 if end is None else end - start)
        if start == 0 and end is None:
            with self._translating("get", key):
                return deadline.run(lambda: bytes(self._fs.cat_file(path)))
        # File systems treat a range beyond the end differently, so never request one.
        size = self._size("get", key, deadline)
        stop = size if end is None else min(end, size)
        if start >= stop:
            return b""
        with self._translating("get", key):
            return deadline.run(lambda: bytes(self._fs.cat_file(path, start=start, end=stop)))

    def size(self, key: str) -> int:
        return self._size("size", key, self._deadline())

    def stored_at(self, key: str) -> datetime | None:
        path, deadline = self._path("stored_at", key), self._deadline()
        self._size("stored_at", key, deadline)
        with self._translating("stored_at", key):
            try:
                found = deadline.run(lambda: self._fs.modified(path))
            except NotImplementedError:
                return None
        # A time without a zone may be of any.
        return found if isinstance(found, datetime) and found.tzinfo is not None else None

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        path, mode = self._path("put", key), "create" if if_absent else "overwrite"
        with self._translating("put", key):
            try:
                self._deadline(len(data)).run(lambda: self._fs.pipe_file(path, data, mode=mode))
            except FileExistsError as exc:
                raise self._errors.taken(key) from exc

    def list(self, prefix: str = "") -> Iterator[str]:
        folder = self._errors.prefix(prefix).rpartition("/")[0]

        def paths() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return list(self._fs.find(f"{self._root}/{folder}" if folder else self._root))
            except FileNotFoundError:
                return []

        with self._translating("list", prefix):
            found = self._deadline().run(paths)
        yield from keys_of((path.removeprefix(f"{self._root}/") for path in found), prefix)

    def delete(self, key: str) -> None:
        path = self._path("delete", key)
        with self._translating("delete", key):
            try:
                self._deadline().run(lambda: self._fs.rm_file(path))
            except FileNotFoundError:
                return

    def upload(self, key: str, chunks: Iterable[Chunk]) -> None:
        """As the contract says, by way of a temporary file, which needs room for the whole object.

        fsspec's own way, a file opened for writing, stores what it has when an error closes it.
        """
        path = self._path("upload", key)
        with tempfile.NamedTemporaryFile(prefix="patchstore-") as file:
            for chunk in chunks:
                with self._translating("upload", key):
                    file.write(chunk)
            progress = Callback()
            with self._translating("upload", key):
                file.flush()
                patience = Patience(self.timeout_s, min(file.tell(), _DRIVERS_PART_BYTES))
                patience.run(
                    lambda: self._fs.put_file(file.name, path, callback=progress), lambda: progress.value
                )

    def _size(self, operation: str, key: str, deadline: Deadline) -> int:
        path = self._path(operation, key)

        def info() -> Any:
            self._fs.invalidate_cache()
            return self._fs.info(path)

        with self._translating(operation, key):
            found = deadline.run(info)
            if found["type"] != "file":
                raise self._errors.not_found(operation, key)
            return int(found["size"])

    def _deadline(self, num_bytes: int = 0) -> Deadline:
        return Deadline(allowance(self.timeout_s, num_bytes))

    def _path(self, operation: str, key: str) -> str:
        return f"{self._root}/{self._errors.key(operation, key)}"

    def _translating(self, operation: str, key: str) -> AbstractContextManager[None]:
        return self._errors.translating(operation, key, self._error)

    def _error(self, operation: str, key: str, exc: Exception) -> PatchstoreError:
        if isinstance(exc, FileNotFoundError):
            if operation in {"put", "upload"}:
                what = "there is nowhere to put it; does the bucket exist?"
                return self._errors.usage(operation, key, what)
            return self._errors.not_found(operation, key)
        said = self._errors.clean(exc)
        if isinstance(exc, PermissionError):
            return self._errors.usage(operation, key, f"refused: {said}; check the credentials")
        # Not only of OSError: drivers let through whatever their client libraries raise.
        return self._errors.unavailable(operation, key, f"failed: {said}", "try again")


def open_fsspec(url: str, options: dict[str, Any]) -> FsspecStore:
    """Open a URL of any protocol that fsspec knows; it must hold no secrets."""
    protocol = url.partition("://")[0]
    options = dict(options)
    with named(url):
        timeout_s = checked_timeout(options.pop("timeout_s", DEFAULT_TIMEOUT_S))
    try:
        driver = fsspec.get_filesystem_class(protocol)
    except ValueError as exc:
        raise UsageError(
            f"{url}: fsspec knows no protocol {protocol}; install the package that brings it (for Azure: pip "
            "install adlfs), or use a path, or s3://"
        ) from exc
    except ImportError as exc:
        raise UnsupportedStore(f"{url}: {exc}") from exc
    _check_creates(driver)
    secrets = _texts(options)
    errors = StoreErrors(url, secrets)

    def refused(operation: str, key: str, exc: Exception) -> PatchstoreError:
        what = f"{driver.__name__} refuses its options: {errors.clean(exc)}"
        return errors.usage(operation, key, what)

    # Some drivers ask their service when they are opened.
    with errors.translating("open", "", refused):
        fs, root = Deadline(timeout_s).run(lambda: fsspec.url_to_fs(url, **_UNCACHED | options))
    return FsspecStore(fs, root, url=url, timeout_s=timeout_s, secrets=secrets)


def _texts(options: Any) -> list[str]:
    """Return all text values of a driver's options: only the driver knows which are secrets."""
    if isinstance(options, dict):
        return [text for value in options.values() for text in _texts(value)]
    return [options] if isinstance(options, str) and "://" not in options else []


def _check_creates(fs: Any) -> None:
    """Refuse a file system, or its class, if its code alone shows that several writers may win."""
    driver: Any = fs if isinstance(fs, type) else type(fs)
    if issubclass(driver, AsyncFileSystem):
        # `pipe_file` is then a mirror of this; without a `mode` the condition would be dropped.
        creates = "mode" in inspect.signature(driver._pipe_file).parameters
    else:
        creates = driver.pipe_file is not AbstractFileSystem.pipe_file
    if not creates or driver.__module__.startswith("fsspec."):
        raise UnsupportedStore(
            f"{driver.__name__} cannot create a file only once: of several writers two may win, and "
            "a version be lost; use a path for a folder, memory:// within one process, or s3://"
        )
