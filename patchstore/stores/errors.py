"""The errors of stores: each names the store, the operation and the key first, and never a secret."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from patchstore.errors import (
    AlreadyExists,
    NotFound,
    PatchstoreError,
    StoreUnavailable,
    UnsupportedStore,
    UsageError,
)
from patchstore.stores.deadline import Overdue
from patchstore.stores.layout import check_key

_MOST_CHARACTERS = 400
_SHORTEST_SECRET = 6
"""A shorter secret would also match parts of ordinary words."""
_WRITES = {"put", "upload", "delete"}
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^\s'\"<>/@]*@)?(?P<rest>[^\s'\"<>]*)")
_QUERY = re.compile(r"[?#][^\s'\"<>()]*=[^\s'\"<>()]*")
_CREDENTIAL = re.compile(
    r"(?i)\b(authorization|x-amz-[a-z-]*(?:signature|credential|token)|bearer|(?:secret|access)[_ -]?key)"
    r"(\s*[:=]\s*|\s+)(?:(?:bearer|basic|aws4-hmac-sha256)\s+)?(?=\S*\d)[^\s,;'\"<>]+"
)
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}|\bAWS4-HMAC-SHA256\b[^'\"<>]*")
_PAGE = re.compile(r"(?i)<!doctype html|<html[\s>]")


@contextmanager
def named(what: str) -> Iterator[None]:
    """Begin the text of a `UsageError` of the block with what it is about."""
    try:
        yield
    except UsageError as exc:
        raise UsageError(f"{what}: {exc}") from exc


class StoreErrors:
    """The errors of one store, in one form: `URL: OPERATION KEY: what happened; what to do`.

    No message contains `secrets`, the values of options. A forked process may use only a store that
    `survives_fork`: clients have threads and sockets, which a fork does not copy, or copies for two.
    """

    def __init__(self, url: str, secrets: Iterable[object] = (), *, survives_fork: bool = True) -> None:
        self.url = url
        self._process = None if survives_fork else os.getpid()
        texts = {secret for secret in secrets if isinstance(secret, str) and len(secret) >= _SHORTEST_SECRET}
        # The longest first, in case one is part of another.
        self._secrets = sorted(texts, key=len, reverse=True)

    def of(self, url: str) -> "StoreErrors":
        """Return the errors of another store with the same secrets."""
        return StoreErrors(url, self._secrets, survives_fork=self._process is None)

    def key(self, operation: str, key: object) -> str:
        """Return the key. Refuse one that no store has, and a process that may not use this store."""
        self._check_process(operation)
        if not isinstance(key, str):
            raise self.usage(operation, "", f"a key is text, not {type(key).__name__}")
        with named(f"{self.url}: {operation}"):
            return check_key(key)

    def prefix(self, prefix: object) -> str:
        """Return a prefix for `list`: empty, or the beginning of a key. Refuse what no key starts with."""
        self._check_process("list")
        if not isinstance(prefix, str):
            raise self.usage("list", "", f"a prefix is text, not {type(prefix).__name__}")
        if prefix:
            self.key("list", prefix.removesuffix("/"))
        return prefix

    @contextmanager
    def translating(
        self,
        operation: str,
        key: str,
        translated: Callable[[str, str, Exception], PatchstoreError],
        *,
        spared: Sequence[BaseException] = (),
    ) -> Iterator[None]:
        """Turn what a client raises in the block into an error of a store, by `translated`.

        `spared` pass through: errors of the caller's own.
        """
        try:
            yield
        except PatchstoreError:
            raise
        except Overdue as exc:
            do = "check the endpoint and the network, or give a larger timeout_s"
            raise self.unavailable(operation, key, f"not done within {exc.limit_s:.4g} s", do) from exc
        except Exception as exc:
            if exc in spared:
                raise
            error = translated(operation, key, exc)
            for note in getattr(exc, "__notes__", ()):
                error.add_note(self.clean(note))
            raise error from exc

    def usage(self, operation: str, key: str, what: object) -> UsageError:
        return UsageError(self._said(operation, key, what))

    def unsupported(self, operation: str, key: str, what: object) -> UnsupportedStore:
        return UnsupportedStore(self._said(operation, key, what))

    def not_found(self, operation: str, key: str) -> NotFound:
        return NotFound(self._said(operation, key, "there is no such object; check the URL and the key"))

    def taken(self, key: str) -> AlreadyExists:
        return AlreadyExists(self._said("put", key, "the object is already there, and was left as it is"))

    def unavailable(self, operation: str, key: str, what: object, do: str = "") -> StoreUnavailable:
        """An error after which a later attempt may succeed; of a write it says that it may have happened."""
        unknown = "; whether it was carried out is unknown" if operation in _WRITES else ""
        return StoreUnavailable(self._said(operation, key, what) + unknown + (f"; {do}" if do else ""))

    def clean(self, what: object) -> str:
        """Return a text on one line, shortened, without secrets, which may also be in queries of URLs."""
        text = str(what) or type(what).__name__
        if _PAGE.search(text):
            return "the answer is a web page; is the endpoint really that of a store?"
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = _URL.sub(lambda found: found["scheme"] + re.split("[?#]", found["rest"])[0], text)
        text = _QUERY.sub("", text)
        text = _CREDENTIAL.sub(r"\1\2***", _TOKEN.sub("***", text))
        text = " ".join("".join(each if each.isprintable() else " " for each in text).split())
        return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."

    def _check_process(self, operation: str) -> None:
        if self._process not in (None, os.getpid()):
            what = (
                f"the store was opened in process {self._process}, of which this one is a fork, and cannot "
                "be used here; open it again, in a process that was started by spawn or forkserver"
            )
            raise self.usage(operation, "", what)

    def _said(self, operation: str, key: str, what: object) -> str:
        where = f"{operation} {key}" if key else operation
        # Our own text is clean; the text of a library may contain anything.
        text = what if isinstance(what, str) else self.clean(what)
        return f"{self.url}: {where}: {text}"
