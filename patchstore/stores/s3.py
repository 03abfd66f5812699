"""Objects in S3, or in a service with its protocol: through obstore if that is installed, or else s3fs.

patchstore relies on only one feature of S3: a single PUT with `If-None-Match: *`. The same
condition on a multipart upload, and `If-Match`, are missing or ignored in too many servers.
"""

import inspect
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import s3fs
from botocore.exceptions import BotoCoreError
from s3fs.core import AioConfig

from patchstore.errors import PatchstoreError, UsageError
from patchstore.stores import packages
from patchstore.stores.base import PART_BYTES, Chunk, Store, check_range
from patchstore.stores.deadline import DEFAULT_TIMEOUT_S, LONGEST_S, Deadline, Overdue, allowance
from patchstore.stores.messages import Messages
from patchstore.stores.multipart import in_parts
from patchstore.stores.options import check_endpoint, check_texts, checked_timeout
from patchstore.stores.s3_client import S3fsClient

ClientName = Literal["auto", "s3fs", "obstore"]

_CONFLICT_ATTEMPTS = 5
_CONFLICT_WAIT_S = 0.1
_CONFIG = {
    # Several transfers of NUM_PARTS parts each, where botocore would queue them on 10 connections.
    "max_pool_connections": 64,
    "retries": {"mode": "standard", "max_attempts": 4},
}
_CONNECT_S = 5.0
_TAKEN = {"PreconditionFailed", "412"}
_CONFLICT = {"ConditionalRequestConflict", "OperationAborted", "409"}
_PAST_END = {"InvalidRange", "416"}
_UNTOLD = "404"
"""Only a status: the answer to a HEAD, or of a service that is not S3."""
_MISSING = {"NoSuchKey", _UNTOLD}
_READS = {"get", "size"}
_PASSING = {"ExpiredToken", "RequestTimeTooSkewed"}
"""Refusals that end when credentials are renewed or a clock is set."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")
"""Also an access point's ARN."""
_TEXTS = ("endpoint_url", "key", "secret", "token", "profile", "username", "password")
_MAPPINGS = {"client_kwargs", "config_kwargs", "s3_additional_kwargs"}


class S3Store(Store):
    """The keys of a bucket below a prefix.

    `options` are those of `s3fs.S3FileSystem`: `endpoint_url`, `key`, `secret`, `token`, `profile`,
    `config_kwargs` and so on. Servers that do not know S3's newer checksums need
    `config_kwargs={"request_checksum_calculation": "when_required"}`. `client` says which library moves the
    bytes; `auto` is obstore if it is installed and has an equivalent of every option. `timeout_s` is how
    long a request may take with all its repetitions; see `stores/deadline.py`.

    Raises:
        UsageError: no bucket in the URL, a prefix that is no key, an option that is unknown or of a wrong
            type, or one that the client asked for does not have.
        UnsupportedStore: the client asked for is not installed, or too old.
    """

    def __init__(
        self,
        url: str,
        *,
        client: ClientName = "auto",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Any,
    ) -> None:
        packages.check("s3://", "s3fs", "aiobotocore")
        place = url.partition("://")[2].rstrip("/")
        self.url = f"s3://{place}"
        if not place or place.startswith("/"):
            raise UsageError(f"{url} names no bucket: use s3://bucket/prefix")
        try:
            self.timeout_s = checked_timeout(timeout_s)
            _check_options(options)
        except UsageError as exc:
            raise UsageError(f"{self.url}: {exc}") from exc
        self._messages = Messages(self.url, _secrets(options))
        limits = {"connect_timeout": min(_CONNECT_S, self.timeout_s), "read_timeout": self.timeout_s}
        options["config_kwargs"] = _CONFIG | limits | (options.get("config_kwargs") or {})
        try:
            AioConfig(**options["config_kwargs"])
            fs = s3fs.S3FileSystem(
                # Cached instances share connections that `close` closes; cached listings are stale.
                **{"skip_instance_cache": True, "use_listings_cache": False, **options}
            )
        except (BotoCoreError, AttributeError, LookupError, TypeError, ValueError) as exc:
            what = f"an option is wrong: {self._messages.clean(exc)}"
            raise self._messages.usage("open", "", what) from exc
        # botocore repeats requests; that s3fs repeats them too would multiply the attempts.
        fs.retries = 1
        self._bucket, prefix, _ = fs.split_path(place)
        if not _BUCKET.fullmatch(self._bucket):
            raise UsageError(f"{self.url}: {self._bucket!r} is no name of a bucket: use s3://bucket/prefix")
        self._prefix = f"{self._messages.key('open', prefix)}/" if prefix else ""
        self._client = self._chosen(client, fs)
        self.client = self._client.name
        """What moves the bytes: `s3fs` or `obstore`."""
        self._was_there = False

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_range(self.url, "get", key, start, end)
        if start == end:
            # HTTP cannot ask for no bytes; S3 would send all of them.
            self._size("get", key)
            return b""
        full = self._full("get", key)
        deadline = self._deadline(0 if end is None else end - start)
        with self._translate_errors("get", key):
            try:
                return self._client.get(full, start, end, deadline)
            except Exception as exc:
                if self._client.code(exc) in _PAST_END:
                    return b""
                self._check_bucket("get", key, exc, deadline)
                raise

    def size(self, key: str) -> int:
        return self._size("size", key)

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self._put("put", key, data, if_absent=if_absent)

    def list(self, prefix: str = "") -> Iterator[str]:
        full = self._prefix + self._messages.prefix(prefix)
        with self._translate_errors("list", prefix):
            keys = self._client.list(full)
        # S3 sorts, except in directory buckets.
        yield from sorted(key.removeprefix(self._prefix) for key in keys)

    def delete(self, key: str) -> None:
        full = self._full("delete", key)
        with self._translate_errors("delete", key):
            try:
                self._client.delete(full, self._deadline(0))
            except FileNotFoundError as exc:
                if self._client.code(exc) not in _MISSING:
                    raise

    def upload(self, key: str, chunks: Iterable[Chunk]) -> None:
        full = self._full("upload", key)
        parts = in_parts(chunks)
        first = next(parts)
        if len(first) < PART_BYTES:
            self._put("upload", key, bytes(first))
            return
        parts = chain((first,), parts)
        del first
        failed: list[BaseException] = []
        try:
            self._client.send(full, _watched(parts, failed))
        except Exception as exc:
            if failed:
                raise
            error = self._error("upload", key, exc)
            for note in getattr(exc, "__notes__", ()):
                error.add_note(self._messages.clean(note))
            if error is exc:
                raise
            raise error from exc

    def close(self) -> None:
        self._client.close()

    def is_part_of(self, url: str) -> None:
        """Let messages name another store, which uses this one."""
        self._messages = self._messages.of(url)

    def _size(self, operation: str, key: str) -> int:
        full, deadline = self._full(operation, key), self._deadline(0)
        with self._translate_errors(operation, key):
            try:
                return self._client.size(full, deadline)
            except Exception as exc:
                self._check_bucket(operation, key, exc, deadline)
                raise

    def _put(self, operation: str, key: str, data: bytes, *, if_absent: bool = False) -> None:
        full, deadline = self._full(operation, key), self._deadline(len(data))
        with self._translate_errors(operation, key):
            for attempt in range(1, _CONFLICT_ATTEMPTS + 1):
                try:
                    self._client.put(full, data, deadline, create=if_absent)
                except Exception as exc:
                    code = self._client.code(exc)
                    # Another conditional PUT of this key was under way: S3 says to ask once more.
                    if code in _CONFLICT and attempt < _CONFLICT_ATTEMPTS:
                        time.sleep(min(_CONFLICT_WAIT_S * attempt, deadline.left()))
                        continue
                    is_taken = code in _TAKEN or self._client.is_taken(exc)
                    if if_absent and is_taken and code not in _CONFLICT:
                        raise self._messages.taken(key) from exc
                    raise
                else:
                    return

    def _deadline(self, num_bytes: int) -> Deadline:
        return Deadline(allowance(self.timeout_s, num_bytes))

    def _full(self, operation: str, key: str) -> str:
        return self._prefix + self._messages.key(operation, key)

    def _check_bucket(self, operation: str, key: str, exc: Exception, deadline: Deadline) -> None:
        """Tell a missing bucket from a missing object where the answer does not, as that to a HEAD.

        Raises:
            UsageError: there is no bucket. Once there was one, S3 is not asked again.
        """
        if self._client.code(exc) == _UNTOLD and not self._was_there:
            self._was_there = self._client.has_bucket(deadline)
            if not self._was_there:
                raise self._no_bucket(operation, key) from exc

    def _no_bucket(self, operation: str, key: str) -> UsageError:
        what = f"there is no bucket {self._bucket} here; create it, or correct the URL or endpoint_url"
        return self._messages.usage(operation, key, what)

    @contextmanager
    def _translate_errors(self, operation: str, key: str) -> Iterator[None]:
        """Translate answers of S3, and errors of its client, into errors of a store."""
        try:
            yield
        except PatchstoreError:
            raise
        except Exception as exc:
            raise self._error(operation, key, exc) from exc

    def _error(self, operation: str, key: str, exc: Exception) -> PatchstoreError:
        if isinstance(exc, PatchstoreError):
            return exc
        if isinstance(exc, Overdue):
            return self._messages.overdue(operation, key, exc)
        code = self._client.code(exc)
        message = self._messages.clean(self._client.message(exc))
        if code == "NoSuchBucket" or (code == _UNTOLD and operation not in _READS):
            return self._no_bucket(operation, key)
        if code in _MISSING:
            return self._messages.not_found(operation, key)
        if self._client.is_mistake(exc) and code not in _PASSING:
            what = f"refused: {message}; check the credentials, the bucket's policy and the options"
            return self._messages.usage(operation, key, what)
        if isinstance(exc, AttributeError | TypeError | ValueError) and not isinstance(exc, OSError):
            what = f"{type(exc).__name__}: {message}; check the options"
            return self._messages.usage(operation, key, what)
        return self._messages.unavailable(operation, key, f"failed: {message}", _advice(message))

    def _chosen(self, name: ClientName, fs: Any) -> S3fsClient:
        if name not in get_args(ClientName):
            what = f"there is no client {name!r}; known are {', '.join(get_args(ClientName))}"
            raise self._messages.usage("open", "", what)
        if name == "s3fs":
            return S3fsClient(fs, self._bucket, self.timeout_s)
        if problem := _no_obstore():
            if name == "auto":
                return S3fsClient(fs, self._bucket, self.timeout_s)
            what = f"client='obstore': {problem}: {packages.advice('obstore')}"
            raise self._messages.unsupported("open", "", what)
        from patchstore.stores.s3_obstore import ObstoreClient, unmet

        missing = unmet(fs, self._bucket)
        if not missing:
            return ObstoreClient(fs, self._bucket, self.timeout_s)
        if name == "auto":
            return S3fsClient(fs, self._bucket, self.timeout_s)
        what = f"obstore has no equivalent of {', '.join(missing)}; leave that out, or use client='s3fs'"
        raise self._messages.usage("open", "", what)


def _no_obstore() -> str:
    """Why obstore cannot be used; empty where it can."""
    try:
        import obstore  # noqa: F401 - it may be installed and not fit this machine
    except ImportError as exc:
        return str(exc)
    return packages.problem("obstore")


def _watched(parts: Iterator[bytearray], failed: list[BaseException]) -> Iterator[bytearray]:
    """Pass parts on, and remember an error of their producer: it is not an answer of S3."""
    try:
        yield from parts
    except GeneratorExit:
        raise
    except BaseException as exc:
        failed.append(exc)
        raise


def _check_options(options: dict[str, Any]) -> None:
    """Refuse options that are unknown, or that could only fail at the first request.

    Raises:
        UsageError: names the option.
    """
    # s3fs hands what it does not know to the session, which fails at the first request only.
    known = {*inspect.signature(s3fs.S3FileSystem.__init__).parameters, "profile", "client", "timeout_s"}
    known |= {"skip_instance_cache", "use_listings_cache"}
    known -= {"self", "kwargs", "asynchronous", "loop"}
    if unknown := sorted(options.keys() - known):
        raise UsageError(f"s3:// has no option {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    check_texts(options, _TEXTS)
    for name in _MAPPINGS & options.keys():
        if options[name] is not None and not isinstance(options[name], Mapping):
            raise UsageError(
                f"the option {name} must be a mapping, and is of type {type(options[name]).__name__}"
            )
    verify = (options.get("client_kwargs") or {}).get("verify")
    if isinstance(verify, str) and not Path(verify).exists():
        raise UsageError(f"client_kwargs: there is no file of certificates {verify}")
    for name in ("connect_timeout", "read_timeout"):
        value = (options.get("config_kwargs") or {}).get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_S:
            raise UsageError(f"config_kwargs: {name} must be a number of seconds, and is {value!r}")
    if isinstance(options.get("session"), str | int | float):
        raise UsageError("the option session must be one of aiobotocore; profile= names a profile")
    for where in (options, options.get("client_kwargs") or {}):
        check_endpoint("endpoint_url", where.get("endpoint_url"))


def _secrets(options: Mapping[str, Any]) -> Iterator[object]:
    """The values of options and environment variables that no message may contain."""
    yield from (options.get(name) for name in ("key", "secret", "token", "username", "password"))
    for name in ("client_kwargs", "s3_additional_kwargs"):
        for option, value in (options.get(name) or {}).items():
            if "key" in option.lower() or "token" in option.lower():
                yield value
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        yield os.environ.get(name)


def _advice(message: str) -> str:
    """Return what to do about a failure, as far as its text shows."""
    text = message.lower()
    if any(word in text for word in ("ssl", "certificate", "tls", "invalidcontenttype", "corrupt message")):
        return "check that the endpoint speaks TLS if its URL begins with https, and its certificate"
    if any(word in text for word in ("resolve", "dns", "name or service", "lookup address", "getaddrinfo")):
        return "check the name in endpoint_url, and the network"
    if "proxy" in text:
        return "check the proxy in HTTP_PROXY, HTTPS_PROXY and NO_PROXY"
    if "connect" in text:
        return "check endpoint_url, the network and HTTP_PROXY, and that the service is running"
    return "try again, and check endpoint_url if that does not help"
