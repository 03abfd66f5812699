"""Error messages of stores: first the store, the operation and the key, and never a secret."""

import re
from collections.abc import Iterable

from patchstore.errors import (
    AlreadyExists,
    NotFound,
    StoreUnavailable,
    UnsupportedStore,
    UsageError,
)
from patchstore.format.layout import check_key
from patchstore.stores.deadline import Overdue

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


class Messages:
    """The errors of one store, in one form: `URL: OPERATION KEY: what happened; what to do`.

    Args:
        url: of the store.
        secrets: the values of options that no message may contain.
    """

    def __init__(self, url: str, secrets: Iterable[object] = ()) -> None:
        self.url = url
        texts = {secret for secret in secrets if isinstance(secret, str) and len(secret) >= _SHORTEST_SECRET}
        # The longest first, in case one is part of another.
        self._secrets = sorted(texts, key=len, reverse=True)

    def of(self, url: str) -> "Messages":
        """Return the messages of another store with the same secrets."""
        return Messages(url, self._secrets)

    def key(self, operation: str, key: object) -> str:
        """Return the key, or refuse one that no store has.

        Raises:
            UsageError: see `layout.check_key`.
        """
        if not isinstance(key, str):
            raise self.usage(operation, "", f"a key is text, not {type(key).__name__}")
        try:
            return check_key(key)
        except UsageError as exc:
            raise UsageError(f"{self.url}: {operation}: {exc}") from exc

    def prefix(self, prefix: object) -> str:
        """Return a prefix for `list`: empty, or the beginning of a key.

        Raises:
            UsageError: no key starts so.
        """
        if not isinstance(prefix, str):
            raise self.usage("list", "", f"a prefix is text, not {type(prefix).__name__}")
        if prefix:
            self.key("list", prefix.removesuffix("/"))
        return prefix

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

    def overdue(self, operation: str, key: str, exc: Overdue) -> StoreUnavailable:
        return self.unavailable(
            operation,
            key,
            f"not done within {exc.limit_s:.4g} s",
            "check the endpoint and the network, or give a larger timeout_s",
        )

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

    def _said(self, operation: str, key: str, what: object) -> str:
        where = f"{operation} {key}" if key else operation
        # Our own text is clean; the text of a library may contain anything.
        text = what if isinstance(what, str) else self.clean(what)
        return f"{self.url}: {where}: {text}"
