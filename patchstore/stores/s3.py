"""Objects in S3, or in a service with its protocol: through obstore if that is installed, or else s3fs.

patchstore relies on only one feature of S3: a single PUT with `If-None-Match: *`. The same
condition on a multipart upload, and `If-Match`, are missing or ignored in too many servers.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from itertools import chain
from typing import Any, Literal, get_args

from botocore.exceptions import BotoCoreError

from patchstore.errors import PatchstoreError, UsageError
from patchstore.stores import options as checks
from patchstore.stores.base import PART_BYTES, Chunk, Store, check_range, cut, keys_of
from patchstore.stores.deadline import DEFAULT_TIMEOUT_S, Deadline, allowance
from patchstore.stores.errors import StoreErrors, named
from patchstore.stores.s3_s3fs import S3fsClient, file_system, part_bytes
from patchstore.stores.s3_settings import S3Settings, secrets_in

ClientName = Literal["auto", "s3fs", "obstore"]

_TAKEN = {"PreconditionFailed", "412"}
_CONFLICT = {"ConditionalRequestConflict", "OperationAborted", "409"}
_PAST_END = {"InvalidRange", "416"}
_UNTOLD = "404"
"""Only a status: the answer to a HEAD, or of a service that is not S3."""
_MISSING = {"NoSuchKey", _UNTOLD}
_READS = {"get", "size", "stored_at"}
_PASSING = {"ExpiredToken", "RequestTimeTooSkewed"}
"""Refusals that end when credentials are renewed or a clock is set."""
_REFUSED = {401, 403, 405, 501}
"""Statuses that no other attempt changes: no right, or the service has no such operation."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")
"""Also an access point's ARN."""
_MOVED = {None, 301, 302, 307, 308, 400, 403, 404, 405}
"""Statuses, and none, that follow where an endpoint redirects to one with TLS."""


class S3Store(Store):
    """The keys of a bucket below a prefix.

    `options` are those of `s3fs.S3FileSystem`: `endpoint_url`, `key`, `secret`, `token`, `profile`,
    `config_kwargs` and so on. Servers that do not know S3's newer checksums need
    `config_kwargs={"request_checksum_calculation": "when_required"}`. `client` says which library moves the
    bytes; `auto` is obstore if it is installed and has an equivalent of every option. `timeout_s` is how
    long a request may take with all its repetitions; see `stores/deadline.py`.
    """

    def __init__(
        self,
        url: str,
        *,
        client: ClientName = "auto",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Any,
    ) -> None:
        place = url.partition("://")[2].rstrip("/")
        self.url = f"s3://{place}"
        if not place or place.startswith("/"):
            raise UsageError(f"{url} names no bucket: use s3://bucket/prefix")
        self._process = os.getpid()
        self._errors = StoreErrors(self.url, secrets_in(options), survives_fork=False)
        try:
            with named(f"{self.url}: open"):
                self.timeout_s = checks.checked_timeout(timeout_s)
                self._settings = S3Settings.of(options, self.timeout_s)
            fs = file_system(self._settings)
        except (BotoCoreError, AttributeError, LookupError, TypeError, ValueError) as exc:
            what = f"an option is wrong: {self._errors.clean(exc)}"
            raise self._errors.usage("open", "", what) from exc
        self.endpoint = self._settings.endpoint
        self._bucket, prefix, _ = fs.split_path(place)
        if not _BUCKET.fullmatch(self._bucket):
            raise UsageError(f"{self.url}: {self._bucket!r} is no name of a bucket: use s3://bucket/prefix")
        self._prefix = f"{self._errors.key('open', prefix)}/" if prefix else ""
        self._client = self._chosen(client, S3fsClient(fs, self._bucket, self._settings))
        self.client = self._client.name
        """What moves the bytes: `s3fs` or `obstore`."""
        self._was_there = False
        self._moved_to: str | None = None

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_range(self.url, "get", key, start, end)
        if start == end:
            # HTTP cannot ask for no bytes; S3 would send all of them.
            self._size("get", key)
            return b""
        full = self._full("get", key)
        deadline = self._deadline(0 if end is None else end - start)
        with self._translating("get", key):
            try:
                return self._client.get(full, start, end, deadline)
            except Exception as exc:
                if self._client.failure(exc).code in _PAST_END:
                    return b""
                self._check_bucket("get", key, exc, deadline)
                raise

    def size(self, key: str) -> int:
        return self._size("size", key)

    def stored_at(self, key: str) -> datetime | None:
        full, deadline = self._full("stored_at", key), self._deadline(0)
        with self._translating("stored_at", key):
            try:
                return self._client.stored_at(full, deadline)
            except Exception as exc:
                self._check_bucket("stored_at", key, exc, deadline)
                raise

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self._put("put", key, data, if_absent=if_absent)

    def list(self, prefix: str = "") -> Iterator[str]:
        full = self._prefix + self._errors.prefix(prefix)
        with self._translating("list", prefix):
            keys = self._client.list(full)
        # S3 sorts, except in directory buckets.
        yield from keys_of((key.removeprefix(self._prefix) for key in keys), prefix)

    def delete(self, key: str) -> None:
        full = self._full("delete", key)
        with self._translating("delete", key):
            try:
                self._client.delete(full, self._deadline(0))
            except Exception as exc:
                if self._client.failure(exc).code not in _MISSING:
                    raise

    def upload(self, key: str, chunks: Iterable[Chunk]) -> None:
        full = self._full("upload", key)
        parts: Iterator[bytearray] = cut(chunks, part_bytes)
        first = next(parts)
        if len(first) < PART_BYTES:
            self._put("upload", key, bytes(first))
            return
        parts = chain((first,), parts)
        del first
        failed: list[BaseException] = []
        with self._errors.translating("upload", key, self._error, spared=failed):
            self._client.send(full, _watched(parts, failed))

    def takes_damage(self, key: str) -> bool:
        """Whether an object is stored of which a bit changes on the way.

        If so, the service compares neither the signature nor the checksum that this store sends with it.
        """
        full = self._full("put", key)
        with self._translating("put", key):
            return self._client.takes_damage(full, self._deadline(0))

    def close(self) -> None:
        # What a fork has copied is the parent's.
        if self._process == os.getpid():
            self._client.close()

    def is_part_of(self, url: str) -> None:
        """Let messages name another store, which uses this one."""
        self._errors = self._errors.of(url)

    def _size(self, operation: str, key: str) -> int:
        full, deadline = self._full(operation, key), self._deadline(0)
        with self._translating(operation, key):
            try:
                return self._client.size(full, deadline)
            except Exception as exc:
                self._check_bucket(operation, key, exc, deadline)
                raise

    def _put(self, operation: str, key: str, data: bytes, *, if_absent: bool = False) -> None:
        full, deadline = self._full(operation, key), self._deadline(len(data))
        with self._translating(operation, key):
            try:
                self._client.put(full, data, deadline, create=if_absent)
            except Exception as exc:
                failure = self._client.failure(exc)
                is_taken = failure.code in _TAKEN or failure.is_taken
                # A conflict that did not end: another conditional PUT of this key is under way still.
                if if_absent and is_taken and failure.code not in _CONFLICT:
                    raise self._errors.taken(key) from exc
                raise

    def _deadline(self, num_bytes: int) -> Deadline:
        return Deadline(allowance(self.timeout_s, num_bytes))

    def _full(self, operation: str, key: str) -> str:
        return self._prefix + self._errors.key(operation, key)

    def _check_bucket(self, operation: str, key: str, exc: Exception, deadline: Deadline) -> None:
        """Raise UsageError where an answer that does not tell, as that to a HEAD, is about a missing bucket.

        Once there was one, S3 is not asked again.
        """
        if self._client.failure(exc).code == _UNTOLD and not self._was_there:
            self._was_there = self._client.has_bucket(deadline)
            if not self._was_there:
                raise self._no_bucket(operation, key) from exc

    def _no_bucket(self, operation: str, key: str) -> UsageError:
        what = f"there is no bucket {self._bucket} here; create it, or correct the URL or endpoint_url"
        return self._errors.usage(operation, key, what)

    def _translating(self, operation: str, key: str) -> AbstractContextManager[None]:
        return self._errors.translating(operation, key, self._error)

    def _error(self, operation: str, key: str, exc: Exception) -> PatchstoreError:
        """Translate an answer of S3, or an error of its client."""
        failure = self._client.failure(exc)
        code, status = failure.code, failure.status
        is_mistake = status is None and failure.is_mistake
        said = self._errors.clean(failure.text)
        if code == "NoSuchBucket" or (code == _UNTOLD and operation not in _READS):
            return self._no_bucket(operation, key)
        if code in _MISSING:
            return self._errors.not_found(operation, key)
        if status in _MOVED and not is_mistake and (moved := self._moved()):
            return self._errors.usage(operation, key, moved)
        if (status in _REFUSED or is_mistake) and code not in _PASSING:
            what = f"refused: {said}; check the credentials, the bucket's policy and the options"
            return self._errors.usage(operation, key, what)
        if isinstance(exc, AttributeError | TypeError | ValueError) and not isinstance(exc, OSError):
            return self._errors.usage(operation, key, f"{type(exc).__name__}: {said}; check the options")
        advice = self._settings.advice(failure.tls_fault) if failure.tls_fault else _advice(said)
        return self._errors.unavailable(operation, key, f"failed: {said}", advice)

    def _moved(self) -> str:
        # Asked once, for refusals may be many.
        if self._moved_to is None:
            self._moved_to = self._settings.moved(self._bucket)
        return self._moved_to

    def _chosen(self, name: ClientName, with_s3fs: S3fsClient) -> S3fsClient:
        if name not in get_args(ClientName):
            what = f"there is no client {name!r}; known are {', '.join(get_args(ClientName))}"
            raise self._errors.usage("open", "", what)
        if name == "s3fs":
            return with_s3fs
        if problem := _no_obstore():
            if name == "auto":
                return with_s3fs
            what = f"client='obstore': {problem}: {checks.advice('obstore')}"
            raise self._errors.unsupported("open", "", what)
        from patchstore.stores.s3_obstore import ObstoreClient, obstacle

        what = obstacle(self._settings, self._bucket)
        if not what:
            return ObstoreClient(with_s3fs.fs, self._bucket, self._settings)
        if name == "auto":
            return with_s3fs
        raise self._errors.usage("open", "", what)


def _no_obstore() -> str:
    """Why obstore cannot be used; empty where it can."""
    try:
        import obstore  # noqa: F401 - it may be installed and not fit this machine
    except ImportError as exc:
        return str(exc)
    return checks.problem("obstore")


def _watched(parts: Iterator[bytearray], failed: list[BaseException]) -> Iterator[bytearray]:
    """Pass parts on, and remember an error of their producer: it is not an answer of S3."""
    try:
        yield from parts
    except GeneratorExit:
        raise
    except BaseException as exc:
        failed.append(exc)
        raise


def _advice(message: str) -> str:
    """Return what to do about a failure, as far as its text shows."""
    text = message.lower()
    if any(word in text for word in ("resolve", "dns", "name or service", "lookup address", "getaddrinfo")):
        return "check the name in endpoint_url, and the network"
    if "proxy" in text:
        return "check the proxy in HTTP_PROXY, HTTPS_PROXY and NO_PROXY"
    if "connect" in text:
        return "check endpoint_url, the network and HTTP_PROXY, and that the service is running"
    return "try again, and check endpoint_url if that does not help"
