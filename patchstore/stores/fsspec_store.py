"""Objects in any file system that fsspec knows and that can create a file only once.

That is rare: `mode="create"` of fsspec's base class looks first and writes then, which lets
several writers win. File systems that inherit it, and all that ship with fsspec, are refused.
"""

import inspect
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from patchstore.errors import (
    AlreadyExists,
    NotFound,
    PatchstoreError,
    StoreUnavailable,
    UnsupportedStore,
    UsageError,
)
from patchstore.layout import check_key
from patchstore.stores.base import Chunk, Store, check_prefix, check_range

_UNCACHED = {"skip_instance_cache": True, "use_listings_cache": False}


class FsspecStore(Store):
    """The files below `root`, a path of the file system without its protocol.

    Whether the file system keeps what its `mode="create"` promises, `probe.prove_create_only` finds out.

    Raises:
        UnsupportedStore: the file system is known not to create atomically.
    """

    def __init__(self, fs: Any, root: str, *, url: str) -> None:
        _check_creates(fs)
        self.url = url
        self._fs = fs
        self._root = root.rstrip("/")

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_range(start, end)
        path = self._path(key)
        if start == 0 and end is None:
            with self._answers(key):
                return bytes(self._fs.cat_file(path))
        # File systems differ in what they make of a range beyond the end, so ask for none.
        size = self.size(key)
        stop = size if end is None else min(end, size)
        if start >= stop:
            return b""
        with self._answers(key):
            return bytes(self._fs.cat_file(path, start=start, end=stop))

    def size(self, key: str) -> int:
        path = self._path(key)
        with self._answers(key):
            self._fs.invalidate_cache()
            found = self._fs.info(path)
        if found["type"] != "file":
            raise NotFound(f"{self.url} has no {key}")
        return int(found["size"])

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        path = self._path(key)
        with self._answers(key, writing=True):
            try:
                self._fs.pipe_file(path, data, mode="create" if if_absent else "overwrite")
            except FileExistsError as exc:
                raise AlreadyExists(f"{self.url} already has {key}") from exc

    def list(self, prefix: str = "") -> Iterator[str]:
        folder = check_prefix(prefix).rpartition("/")[0]
        with self._answers(prefix):
            self._fs.invalidate_cache()
            try:
                paths = self._fs.find(f"{self._root}/{folder}" if folder else self._root)
            except FileNotFoundError:
                paths = []
        keys = (path.removeprefix(f"{self._root}/") for path in paths)
        yield from sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._answers(key):
            try:
                self._fs.rm_file(path)
            except FileNotFoundError:
                return

    def upload(self, key: str, chunks: Iterable[Chunk]) -> None:
        """As the contract says, by way of a temporary file, which needs room for the whole object.

        fsspec's own way, a file opened for writing, stores what it has when an error closes it.
        """
        path = self._path(key)
        with tempfile.NamedTemporaryFile(prefix="patchstore-") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            with self._answers(key, writing=True):
                self._fs.put_file(file.name, path)

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    @contextmanager
    def _answers(self, key: str, *, writing: bool = False) -> Iterator[None]:
        """Turn what the file system says into what a store says."""
        try:
            yield
        except PatchstoreError:
            raise
        except FileNotFoundError as exc:
            if writing:
                raise UsageError(f"{self.url}: nowhere to put {key}; does the bucket exist?") from exc
            raise NotFound(f"{self.url} has no {key}") from exc
        except PermissionError as exc:
            raise UsageError(f"{self.url} refuses {key}: {exc}; check the credentials") from exc
        except Exception as exc:
            # Not only OSError: drivers let through whatever their client libraries raise.
            raise StoreUnavailable(f"{self.url} failed for {key}: {exc or type(exc).__name__}") from exc


def open_fsspec(url: str, options: dict[str, Any]) -> FsspecStore:
    """Open a URL of any protocol that fsspec knows; it must hold no secrets.

    Raises:
        UsageError: no such protocol, or options that its driver does not take.
        UnsupportedStore: its driver is not installed, or cannot create atomically.
    """
    protocol = url.partition("://")[0]
    try:
        driver = fsspec.get_filesystem_class(protocol)
    except ValueError as exc:
        raise UsageError(f"{url}: fsspec knows no protocol {protocol}; use a path, or s3://") from exc
    except ImportError as exc:
        raise UnsupportedStore(f"{url}: {exc}") from exc
    _check_creates(driver)
    try:
        fs, root = fsspec.url_to_fs(url, **_UNCACHED | options)
    except (TypeError, ValueError) as exc:
        raise UsageError(f"{url}: {driver.__name__} refuses its options: {exc}") from exc
    return FsspecStore(fs, root, url=url)


def _check_creates(fs: Any) -> None:
    """Refuse a file system, or its class, whose code alone shows that several writers may win."""
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
