"""What a request may make this server open, and which keys it requires: limits that the operator sets.

The sender of a request chooses the store. A request must not send this server's own credentials to a place
that the request names, nor read or make folders anywhere on its machine.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any
from urllib.parse import unquote

from patchstore.errors import DataError, UsageError
from patchstore.signing.required import RequiredKeys

STORES = "PATCHSTORE_ALLOWED_STORES"
"""Environment variable: URLs and folders, with commas between. Only what is there or below may be opened."""
ENDPOINTS = "PATCHSTORE_ALLOWED_ENDPOINTS"
"""Environment variable: further URLs that this server's own credentials may be sent to."""
SCRATCH = "PATCHSTORE_ALLOWED_SCRATCH"
"""Environment variable: folders below which a request may have temporary files."""
KEYS = "PATCHSTORE_REQUIRED_KEYS"
"""Environment variable: PEM files with public keys. Only versions that one of them has signed are applied."""

_OWN_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "HF_ENDPOINT")
"""Environment variables that say where this server's credentials belong."""
_KNOWN = frozenset({"s3", "s3a", "hf", "memory", "file", ""})
"""Protocols of which the options are understood here."""
_PLACES = frozenset({"endpoint", "endpoint_url", "gateway_url", "proxies", "proxy"})
"""Options, at any depth, that say where requests are sent."""


def check_store(url: str, options: Mapping[str, Any]) -> None:
    allowed = _listed(STORES)
    protocol, separator, _ = url.partition("://")
    protocol = protocol.lower() if separator else ""
    if allowed and not any(_is_below(url, each) for each in allowed):
        raise UsageError(f"this server may open only what was allowed when it was started, with {STORES}")
    if not allowed and protocol not in _KNOWN:
        raise UsageError(
            f"this server opens {protocol}:// stores only if they were allowed when it was started: set "
            f"{STORES} to the URL"
        )
    own = {each.rstrip("/") for name in _OWN_ENDPOINTS if (each := os.environ.get(name))}
    may_have = own | {each.rstrip("/") for each in _listed(ENDPOINTS)}
    for place in _places(options):
        if place.rstrip("/") not in may_have and not _has_credentials(protocol, options):
            raise UsageError(
                "an endpoint was given without credentials, and this server does not send its own there: "
                f"give them with it, or set {ENDPOINTS} to the endpoint where the server is started"
            )


def required_keys() -> RequiredKeys | None:
    """Read the keys that this server requires, when it starts; None if the operator named none.

    No request can change them. If the variable names no key, or a file that is none, the server must not
    start: it would serve versions that no one signed.
    """
    if os.environ.get(KEYS) is None:
        return None
    paths = _listed(KEYS)
    if not paths:
        raise UsageError(f"{KEYS} is set but names no key: name PEM files with public keys, or unset it")
    try:
        return RequiredKeys.of(paths)
    except UsageError as exc:
        raise UsageError(f"{KEYS}: {exc}") from exc


def default_scratch() -> Path:
    """Return the folder of this user for what the servers of this host share."""
    return Path(tempfile.gettempdir()) / f"patchstore-{os.geteuid()}"


def check_scratch(folder: Path) -> None:
    """Refuse a folder for temporary files that is neither below the system's own nor allowed."""
    roots = [tempfile.gettempdir(), "/dev/shm", *_listed(SCRATCH)]  # noqa: S108 # nosec B108 # a folder of this user
    if not any(_is_below(os.fspath(folder), each) for each in roots):
        raise UsageError(
            f"scratch must be below {tempfile.gettempdir()} or /dev/shm, or in a folder that was allowed "
            f"when this server was started, with {SCRATCH}"
        )


@contextmanager
def unquoted(url: str) -> Iterator[None]:
    """Keep what is in a folder's files out of errors, unless the folder was allowed."""
    try:
        yield
    except DataError as exc:
        if "://" in _path(url) or _listed(STORES):
            raise
        raise type(exc)(
            f"{url} has no run that can be read; `patchstore doctor {url}` on that machine says what is wrong"
        ) from None


def _listed(name: str) -> list[str]:
    return [each.strip() for each in os.environ.get(name, "").split(",") if each.strip()]


def _is_below(url: str, root: str) -> bool:
    url, root = (_path(each) for each in (url, root))
    if "://" in url or "://" in root:
        base = root.rstrip("/")
        parts = url.partition("://")[2].split("/")
        return (url == base or url.startswith(f"{base}/")) and not {".", ".."} & {*parts}
    one, other = (Path(each).expanduser().resolve() for each in (url, root))
    return one == other or other in one.parents


def _path(url: str) -> str:
    """The path of a file's URL, with what is escaped in it; all else as it is."""
    return unquote(url.removeprefix("file://")) if url.startswith("file://") else url


def _places(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if name in _PLACES and value is not None:
            yield from (str(each) for each in value.values()) if isinstance(value, Mapping) else [str(value)]
        elif isinstance(value, Mapping):
            yield from _places(value)


def _has_credentials(protocol: str, options: Mapping[str, Any]) -> bool:
    """Whether a store takes its credentials, or their absence, from the options alone."""
    if protocol == "hf":
        return isinstance(options.get("token"), str) and bool(options["token"])
    return options.get("anon") is True or (bool(options.get("key")) and bool(options.get("secret")))


def keywords(
    what: str, given: object, types: Mapping[str, type | UnionType], required: set[str]
) -> Mapping[str, Any]:
    """Return keyword arguments, after checking names and types. Errors leave out values, perhaps secrets."""
    known = ", ".join(
        f"{name!r} ({getattr(kind, '__name__', kind)}{'' if name in required else ', optional'})"
        for name, kind in types.items()
    )
    if not isinstance(given, Mapping):
        raise UsageError(f"{what} must be an object with {known}, not a {type(given).__name__}")
    if unknown := given.keys() - types.keys():
        raise UsageError(f"{what} has unknown keys {sorted(unknown)}; known are {known}")
    if missing := required - given.keys():
        raise UsageError(f"{what} lacks {sorted(missing)}; known are {known}")
    for name, value in given.items():
        # To Python, True is a number too.
        if not isinstance(value, types[name]) or isinstance(value, bool) is not (types[name] is bool):
            raise UsageError(f"{what} has a {type(value).__name__} as {name!r}; known are {known}")
    return given
