"""Places to keep objects, opened by URL. The code for each is imported when one is opened."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

from patchstore.errors import UnsupportedStore, UsageError
from patchstore.stores.base import Store

__all__ = ["Store", "open_store", "opened"]


def open_store(url: str | os.PathLike[str], **storage_options: Any) -> Store:
    """Open the store at a URL; nothing is read or written yet.

    - a path, or `file:///path`: files of a folder
    - `memory://name`: within this process; the same store for the same name
    - `s3://bucket/prefix`: options are those of s3fs, such as `endpoint_url`, `key`, `secret`, and
      `client`: `auto`, `s3fs` or `obstore`
    - `hf://buckets/OWNER/NAME/prefix`: a bucket of the Hugging Face Hub; options are `token`, `endpoint`, and
      for publishers `gateway_key` and `gateway_secret`, or `single_writer=True`: see `stores/hub.py`
    - any other protocol of fsspec, such as `gs://` or `abfs://`; options are its driver's

    Raises:
        UsageError: no such protocol, or an option that its store does not have.
        UnsupportedStore: a package is missing, or the store cannot create an object only once.
    """
    url = os.fspath(url)
    protocol, separator, rest = url.partition("://")
    if not separator or protocol == "file":
        _check_no_options("folder", storage_options)
        from patchstore.stores.folder import FolderStore

        return FolderStore(_file_path(url) if separator else url)
    if protocol == "memory":
        _check_no_options("memory://", storage_options)
        from patchstore.stores.memory import named

        if not rest:
            raise UsageError("memory:// needs a name: memory://name")
        return named(rest)
    if url != _public(url):
        raise UsageError(f"{_public(url)}: give passwords and options as keywords, not in the URL")
    if protocol == "hf":
        try:
            from patchstore.stores.hub import HubStore
        except ImportError as exc:
            raise UnsupportedStore(
                "hf:// stores need two packages: pip install 'huggingface_hub>=1.33' 'hf-xet>=1.7'"
            ) from exc

        return HubStore(url, **storage_options)
    try:
        if protocol in {"s3", "s3a"}:
            from patchstore.stores.s3 import S3Store

            return S3Store(url, **storage_options)
        from patchstore.stores.fsspec_store import open_fsspec
    except ImportError as exc:
        raise UnsupportedStore(f"{protocol}:// stores need s3fs: pip install 's3fs>=2026.9'") from exc
    return open_fsspec(url, storage_options)


@contextmanager
def opened(store: Store | str | os.PathLike[str]) -> Iterator[Store]:
    """Yield an open store as it is; open one that is given by its URL or path, and close it in the end.

    Raises:
        UsageError: this is neither. And as `open_store`.
    """
    if isinstance(store, Store):
        yield store
        return
    if not isinstance(store, str | os.PathLike):
        raise UsageError(
            "a store is given by its URL, by a path, or as open_store returns it, not by "
            f"{type(store).__name__}"
        )
    mine = open_store(store)
    try:
        yield mine
    finally:
        mine.close()


def _check_no_options(store: str, options: dict[str, Any]) -> None:
    if options:
        raise UsageError(f"{store} stores have no option {', '.join(sorted(options))}; known are none")


def _file_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in {"", "localhost"} or not parts.path:
        raise UsageError(f"{url} names another machine or no path: use file:///path")
    return unquote(parts.path)


def _public(url: str) -> str:
    """The URL without what may be secret: a user's password, a query, a fragment."""
    protocol, separator, rest = url.partition("://")
    host, slash, path = rest.partition("?")[0].partition("#")[0].partition("/")
    user, at, name = host.rpartition("@")
    return f"{protocol}{separator}{user.partition(':')[0]}{at}{name}{slash}{path}"
