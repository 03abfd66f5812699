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
from fsspec.callbacks import Callback
from fsspec.spec import AbstractFileSystem

from patchstore.errors import PatchstoreError, UnsupportedStore, UsageError
from patchstore.stores.base import Chunk, Store, check_range
from patchstore.stores.deadline import DEFAULT_TIMEOUT_S, Deadline, Overdue, allowance, ended, started
from patchstore.stores.messages import Messages
from patchstore.stores.options import checked_timeout

_UNCACHED = {"skip_instance_cache": True, "use_listings_cache": False}
_DRIVERS_PART_BYTES = 64 << 20
"""At least what drivers send before they report progress."""


class FsspecStore(Store):
    """The files below `root`, a path of the file system without its protocol.

    `probe.check_create_only` tests whether the file system keeps the promise of its `mode="create"`.

    Raises:
        UnsupportedStore: the file system is known not to create atomically.
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
        self._messages = Messages(url, secrets)
        self._fs = fs
        self._root = root.rstrip("/")

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_range(self.url, "get", key, start, end)
        path = self._path("get", key)
        deadline = self._deadline(0 if end is None else end - start)
        if start == 0 and end is None:
            with self._translate_errors("get", key):
                return deadline.run(lambda: bytes(self._fs.cat_file(path)))
        # File systems treat a range beyond the end differently, so never request one.
        size = self._size("get", key, deadline)
        stop = size if end is None else min(end, size)
        if start >= stop:
            return b""
        with self._translate_errors("get", key):
            return deadline.run(lambda: bytes(self._fs.cat_file(path, start=start, end=stop)))

    def size(self, key: str) -> int:
        return self._size("size", key, self._deadline())

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        path, mode = self._path("put", key), "create" if if_absent else "overwrite"
        with self._translate_errors("put", key):
            try:
                self._deadline(len(data)).run(lambda: self._fs.pipe_file(path, data, mode=mode))
            except FileExistsError as exc:
                raise self._messages.taken(key) from exc

    def list(self, prefix: str = "") -> Iterator[str]:
        folder = self._messages.prefix(prefix).rpartition("/")[0]

        def paths() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return list(self._fs.find(f"{self._root}/{folder}" if folder else self._root))
            except FileNotFoundError:
                return []

        with self._translate_errors("list", prefix):
            found = self._deadline().run(paths)
        keys = (path.removeprefix(f"{self._root}/") for path in found)
        yield from sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        path = self._path("delete", key)
        with self._translate_errors("delete", key):
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
                with self._translate_errors("upload", key):
                    file.write(chunk)
            with self._translate_errors("upload", key):
                file.flush()
                self._send(file.name, path, file.tell())

    def _send(self, source: str, path: str, num_bytes: int) -> None:
        """Store a file, for as long as its driver reports progress."""
        progress = Callback()
        limit_s = allowance(self.timeout_s, min(num_bytes, _DRIVERS_PART_BYTES))
        sending, before = started(lambda: self._fs.put_file(source, path, callback=progress)), 0
        while not ended(sending, limit_s):
            if progress.value == before:
                raise Overdue(limit_s)
            before = progress.value
        sending.result()

    def _size(self, operation: str, key: str, deadline: Deadline) -> int:
        path = self._path(operation, key)

        def info() -> Any:
            self._fs.invalidate_cache()
            return self._fs.info(path)

        with self._translate_errors(operation, key):
            found = deadline.run(info)
            if found["type"] != "file":
                raise self._messages.not_found(operation, key)
            return int(found["size"])

    def _deadline(self, num_bytes: int = 0) -> Deadline:
        return Deadline(allowance(self.timeout_s, num_bytes))

    def _path(self, operation: str, key: str) -> str:
        return f"{self._root}/{self._messages.key(operation, key)}"

    @contextmanager
    def _translate_errors(self, operation: str, key: str) -> Iterator[None]:
        """Translate errors of the file system into errors of a store."""
        try:
            yield
        except PatchstoreError:
            raise
        except Overdue as exc:
            raise self._messages.overdue(operation, key, exc) from exc
        except FileNotFoundError as exc:
            if operation in {"put", "upload"}:
                what = "there is nowhere to put it; does the bucket exist?"
                raise self._messages.usage(operation, key, what) from exc
            raise self._messages.not_found(operation, key) from exc
        except PermissionError as exc:
            what = f"refused: {self._messages.clean(exc)}; check the credentials"
            raise self._messages.usage(operation, key, what) from exc
        except Exception as exc:
            # Not only OSError: drivers let through whatever their client libraries raise.
            what = f"failed: {self._messages.clean(exc)}"
            raise self._messages.unavailable(operation, key, what, "try again") from exc


def open_fsspec(url: str, options: dict[str, Any]) -> FsspecStore:
    """Open a URL of any protocol that fsspec knows; it must hold no secrets.

    Raises:
        UsageError: no such protocol, or options that its driver does not take.
        UnsupportedStore: its driver is not installed, or cannot create atomically.
        StoreUnavailable: its driver asks its service when it is opened, and had no answer in time.
    """
    protocol = url.partition("://")[0]
    options = dict(options)
    try:
        timeout_s = checked_timeout(options.pop("timeout_s", DEFAULT_TIMEOUT_S))
        driver = fsspec.get_filesystem_class(protocol)
    except UsageError as exc:
        raise UsageError(f"{url}: {exc}") from exc
    except ValueError as exc:
        raise UsageError(f"{url}: fsspec knows no protocol {protocol}; use a path, or s3://") from exc
    except ImportError as exc:
        raise UnsupportedStore(f"{url}: {exc}") from exc
    _check_creates(driver)
    secrets = _texts(options)
    messages = Messages(url, secrets)
    try:
        fs, root = Deadline(timeout_s).run(lambda: fsspec.url_to_fs(url, **_UNCACHED | options))
    except Overdue as exc:
        raise messages.overdue("open", "", exc) from exc
    except Exception as exc:
        what = f"{driver.__name__} refuses its options: {messages.clean(exc)}"
        raise messages.usage("open", "", what) from exc
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
