"""Stores of objects, opened by URL. The code of each kind is imported when one is opened."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import unquote_to_bytes, urlsplit

from patchstore.errors import UnsupportedStore, UsageError
from patchstore.stores.base import Store
from patchstore.stores.options import advice, check_known, check_packages

if TYPE_CHECKING:
    from patchstore.stores.s3 import S3Store

__all__ = ["Store", "open_store", "opened", "opened_elsewhere", "opens_store"]

_Rest = ParamSpec("_Rest")
_Result = TypeVar("_Result")

_KNOWN = ("s3", "s3a", "hf", "file", "memory", "gs", "gcs", "az", "abfs", "abfss", "adl", "http", "https")
_MISTYPED = re.compile(rf"(?i)(?:({'|'.join(_KNOWN)})(?::|//)|([a-z][a-z0-9+.-]*):/|:/)/*(.*)", re.DOTALL)
"""Probably not the path of a folder: `s3:/bucket`, `s3//bucket`, `s3:bucket`, `://bucket`."""

_UNEXPANDED = re.compile(r"\$\w+|\$\{\w*\}?|%\w+%|[A-Za-z]:\\|\\")
"""Beginnings that mean something to a shell or another operating system: `$HOME`, `%TEMP%`, `C:\\`."""


def open_store(url: str | os.PathLike[str], /, **storage_options: Any) -> Store:
    """Open the store at a URL; nothing is read or written yet.

    - a path, also one that begins with `~`, or `file:///path`: files of a folder
    - `memory://name`: within this process; the same store for the same name
    - `s3://bucket/prefix`: options are those of s3fs, such as `endpoint_url`, `key`, `secret`, and
      `client`: `auto`, `s3fs` or `obstore`
    - `hf://buckets/OWNER/NAME/prefix`: a bucket of the Hugging Face Hub; options are `token`, `endpoint`, and
      for publishers `gateway_key` and `gateway_secret`, or `single_writer=True`: see `stores/hub.py`
    - any other protocol of fsspec, such as `gs://` or `abfs://`; options are its driver's

    All but folders and `memory://` have an option `timeout_s`, 60 by default: see `docs/stores.md`.

    Raises:
        UsageError: no such protocol, a mistyped URL, an option that the store does not have, or one of a
            wrong type.
        UnsupportedStore: a package is missing, or the store cannot create an object only once.
    """
    store = _open(_checked(url), storage_options)
    if not store.url.startswith("memory://"):
        store.opened_as = (store.url, storage_options)
    return store


def opened_elsewhere(store: Store) -> tuple[str, Mapping[str, Any]]:
    """Return the URL and the options with which another process of this host opens the same place."""
    from patchstore.stores.folder import FolderStore

    if store.opened_as is not None:
        return store.opened_as
    if isinstance(store, FolderStore):
        return store.url, {}
    raise UsageError(
        f"{store.url}: another process cannot open this place: give a URL or a path, or what open_store "
        "returns for one"
    )


def _open(url: str, storage_options: dict[str, Any]) -> Store:
    if wrong := sorted(storage_options.keys() & {"url", "self"}):
        # They would collide with what a store's constructor takes.
        raise UsageError(f"{_public(url)}: stores have no option {', '.join(wrong)}")
    protocol, separator, rest = url.partition("://")
    protocol = protocol.lower()
    if not separator or protocol == "file":
        _check_no_options("folder", storage_options)
        from patchstore.stores.folder import FolderStore

        return FolderStore(_file_path(url) if separator else _expanded(url))
    if protocol == "memory":
        _check_no_options("memory://", storage_options)
        from patchstore.stores.memory import named

        if not rest:
            raise UsageError("memory:// needs a name: memory://name")
        return named(rest)
    url = f"{protocol}://{rest}"
    if url != _public(url):
        raise UsageError(f"{_public(url)}: give passwords and options as keywords, not in the URL")
    if protocol in {"s3", "s3a"}:
        return open_s3(url, **storage_options)
    if protocol == "hf":
        with _needing("hf://", "huggingface_hub", "hf-xet"):
            from patchstore.stores.hub import HubStore

        return HubStore(url, **storage_options)
    with _needing(f"{protocol}://", "fsspec"):
        from patchstore.stores.fsspec_store import open_fsspec

    return open_fsspec(url, storage_options)


def open_s3(url: str, **options: Any) -> "S3Store":
    """Open a store in S3, whose code takes a second to import."""
    with _needing("s3://", "s3fs", "aiobotocore"):
        from patchstore.stores.s3 import S3Store

    return S3Store(url, **options)


@contextmanager
def _needing(kind: str, *packages: str) -> Iterator[None]:
    """Say what to install where a kind of store cannot be imported, or one of its packages is too old."""
    try:
        yield
    except ImportError as exc:
        raise UnsupportedStore(f"{kind} stores cannot be opened ({exc}): {advice(*packages)}") from exc
    check_packages(kind, *packages)


@contextmanager
def opened(store: Store | str | os.PathLike[str]) -> Iterator[Store]:
    """Yield an open store as it is; open a URL or path, and close that store at the end."""
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


def opens_store(
    function: Callable[Concatenate[Store, _Rest], _Result],
) -> Callable[Concatenate[Store | str | os.PathLike[str], _Rest], _Result]:
    """Let a function's first argument, `store`, also be a URL or a path, as of `opened`."""

    @wraps(function)
    def call(store: Store | str | os.PathLike[str], *args: _Rest.args, **kwargs: _Rest.kwargs) -> _Result:
        with opened(store) as mine:
            return function(mine, *args, **kwargs)

    # Typing has no way to name the first argument, which may be named all the same.
    return call  # type: ignore[return-value]


def _checked(url: object) -> str:
    """Return a URL or path; refuse one that looks mistyped, and say what was probably meant."""
    if not isinstance(url, str | os.PathLike):
        raise UsageError(f"a store is named by a URL or a path, as text, not by {type(url).__name__}")
    text: object = os.fspath(url)
    if not isinstance(text, str):
        raise UsageError(f"a store is named by a URL or a path, as text, not by {type(text).__name__}")
    if not text.strip():
        raise UsageError(
            "the store's URL is empty: give one such as s3://bucket/run, or the path of a folder"
        )
    if text != text.strip() or any(ord(each) < 32 or ord(each) == 127 for each in text):
        raise UsageError(
            f"{_public(text)!r}: a store's URL has no white space around it or control characters"
        )
    if found := _UNEXPANDED.match(text):
        raise UsageError(
            f"{_public(text)!r} is taken as it is, so {found[0]!r} would be part of a folder's name; write "
            "the path or URL itself. A path that looks so begins with ./"
        )
    if re.match("(?i)file:/[^/]", text):
        text = f"file://{text[5:]}"
    if "://" not in text.removeprefix(":") and (found := _MISTYPED.match(text)):
        protocol = (found[1] or found[2] or "s3").lower()
        meant = f"{protocol}://{'/' if protocol == 'file' else ''}{found[3]}"
        raise UsageError(
            f"the store's URL looks mistyped: is {_public(meant)} meant? A path that looks so begins with ./"
        )
    return text


def _check_no_options(store: str, options: dict[str, Any]) -> None:
    if "timeout_s" in options:
        raise UsageError(
            f"{store} stores have no option timeout_s: calls of the operating system cannot be interrupted, "
            "also if a network file system hangs; leave the option out"
        )
    check_known(store, options, ())


def _file_path(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise UsageError(f"{url} is not a URL ({exc}): use file:///path") from exc
    if parts.netloc not in {"", "localhost"} or not parts.path:
        raise UsageError(f"{url} names another machine or no path: use file:///path")
    if "?" in url or "#" in url:
        raise UsageError(f"{_public(url)}: a path is not followed by a query; write %3F for ? and %23 for #")
    return os.fsdecode(unquote_to_bytes(parts.path))


def _expanded(path: str) -> str:
    """Replace `~` by the user's folder, which a shell does not do within quotes."""
    expanded = os.path.expanduser(path)  # noqa: PTH111 - of a user that does not exist pathlib raises its own
    if expanded.startswith("~"):
        raise UsageError(f"{path}: there is no such user's folder; a folder of that name is ./{path}")
    return expanded


def _public(url: str) -> str:
    """Return the URL without parts that may be secret: a user's password, a query, a fragment."""
    protocol, separator, rest = url.partition("://")
    host, slash, path = rest.partition("?")[0].partition("#")[0].partition("/")
    user, at, name = host.rpartition("@")
    return f"{protocol}{separator}{user.partition(':')[0]}{at}{name}{slash}{path}"
