"""Objects in S3, or in what speaks its protocol, through s3fs.

Of all that S3 offers only one thing is relied on: a single PUT with `If-None-Match: *`. The same
condition on a multipart upload, and `If-Match`, are missing or ignored in too many servers.
"""

import inspect
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import s3fs
from botocore.exceptions import (
    BotoCoreError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
from s3fs.core import S3_RETRYABLE_ERRORS

from patchstore.errors import (
    AlreadyExists,
    NotFound,
    PatchstoreError,
    StoreUnavailable,
    UnsupportedStore,
    UsageError,
)
from patchstore.layout import check_key
from patchstore.stores.base import PART_BYTES, Chunk, Store, check_prefix, check_range
from patchstore.stores.multipart import in_parts, send_parts

_MAX_PUT_BYTES = 5 << 30
"""S3's limit for a single PUT."""
_CONFLICT_ATTEMPTS = 5
_CONFLICT_WAIT_S = 0.1
_CONFIG = {
    "connect_timeout": 5,
    # botocore's own; s3fs's 15 s is too short for completing an upload of thousands of parts.
    "read_timeout": 60,
    # Several transfers of NUM_PARTS parts each, where botocore would queue them on 10 connections.
    "max_pool_connections": 64,
    "retries": {"mode": "standard", "max_attempts": 4},
}
_FAILURES = (OSError, BotoCoreError, *S3_RETRYABLE_ERRORS)
_MISTAKES = (PermissionError, NoCredentialsError, PartialCredentialsError, ParamValidationError)
_TAKEN = {"PreconditionFailed", "412"}
_CONFLICT = {"ConditionalRequestConflict", "OperationAborted", "409"}
_PAST_END = {"InvalidRange", "416"}
_MISSING = {"NoSuchKey", "404"}
_PASSING = {"ExpiredToken", "RequestTimeTooSkewed"}
"""Refusals that end when credentials are renewed or a clock is set."""


class S3Store(Store):
    """The keys of a bucket below a prefix.

    `options` are those of `s3fs.S3FileSystem`: `endpoint_url`, `key`, `secret`, `token`, `profile`,
    `config_kwargs` and so on. Servers that do not know today's checksums want
    `config_kwargs={"request_checksum_calculation": "when_required"}`.

    Raises:
        UsageError: no bucket in the URL, a prefix that is no key, or an unknown option.
        UnsupportedStore: this s3fs is too old to know conditional writes.
    """

    def __init__(self, url: str, **options: Any) -> None:
        if tuple(int(part) for part in s3fs.__version__.split(".")[:2]) < (2026, 9):
            raise UnsupportedStore(f"s3fs {s3fs.__version__} is too old: pip install 's3fs>=2026.9'")
        _check_options(options)
        options["config_kwargs"] = _CONFIG | options.get("config_kwargs", {})
        self._fs = s3fs.S3FileSystem(
            # Cached instances share connections that `close` closes; cached listings are stale.
            **{"skip_instance_cache": True, "use_listings_cache": False, **options}
        )
        # s3fs repeats what botocore has already repeated: 2 rounds, or a dead endpoint takes minutes.
        self._fs.retries = 2
        place = url.partition("://")[2].rstrip("/")
        if not place or place.startswith("/"):
            raise UsageError(f"{url} names no bucket: use s3://bucket/prefix")
        self._bucket, prefix, _ = self._fs.split_path(place)
        self._prefix = f"{check_key(prefix)}/" if prefix else ""
        self.url = f"s3://{place}"

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_range(start, end)
        if start == end:
            # HTTP cannot ask for no bytes; S3 would send all of them.
            self.size(key)
            return b""
        # `max_concurrency=1` spares the HEAD with which s3fs starts to read a whole object.
        limits = {"start": start, "end": end} if start or end is not None else {"max_concurrency": 1}
        with self._answers(key):
            try:
                data: bytes = self._fs.cat_file(self._path(key), **limits)
            except OSError as exc:
                if _code(exc) in _PAST_END:
                    return b""
                raise
            return data

    def size(self, key: str) -> int:
        # `fs.info` would list when there is no such object, in case it is a folder.
        with self._answers(key):
            return int(self._call("head_object", Key=self._full(key))["ContentLength"])

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        mode = "create" if if_absent else "overwrite"
        for attempt in range(1, _CONFLICT_ATTEMPTS + 1):
            try:
                # One PUT whatever the size, for s3fs would split from 100 MiB on.
                self._fs.pipe_file(self._path(key), data, mode=mode, chunksize=_MAX_PUT_BYTES)
            except _FAILURES as exc:
                if if_absent and (isinstance(exc, FileExistsError) or _code(exc) in _TAKEN):
                    raise AlreadyExists(f"{self.url} already has {key}") from exc
                # Another conditional PUT of this key was under way: S3 says to ask once more.
                if _code(exc) not in _CONFLICT or attempt == _CONFLICT_ATTEMPTS:
                    raise self._error(key, exc) from exc
                time.sleep(_CONFLICT_WAIT_S * attempt)
            else:
                return

    def list(self, prefix: str = "") -> Iterator[str]:
        full = self._prefix + check_prefix(prefix)
        keys: list[str] = []
        page: dict[str, Any] = {}
        with self._answers(prefix):
            while True:
                more = {"ContinuationToken": page["NextContinuationToken"]} if page else {}
                page = self._call("list_objects_v2", Prefix=full, **more)
                keys += [found["Key"].removeprefix(self._prefix) for found in page.get("Contents", [])]
                if not page.get("IsTruncated"):
                    break
        # S3 sorts, except in directory buckets.
        yield from sorted(keys)

    def delete(self, key: str) -> None:
        with self._answers(key):
            try:
                self._call("delete_object", Key=self._full(key))
            except FileNotFoundError as exc:
                if _code(exc) not in _MISSING:
                    raise

    def upload(self, key: str, chunks: Iterable[Chunk]) -> None:
        self._full(key)
        parts = in_parts(chunks)
        first = next(parts)
        if len(first) < PART_BYTES:
            self.put(key, bytes(first))
            return
        parts = chain((first,), parts)
        del first
        send_parts(partial(self._answered, key), self._bucket, self._full(key), parts)

    def close(self) -> None:
        self._fs.close_session(self._fs.loop, self._fs.s3)

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _path(self, key: str) -> str:
        return f"{self._bucket}/{self._full(key)}"

    def _call(self, method: str, **parameters: Any) -> Any:
        return self._fs.call_s3(method, **{"Bucket": self._bucket, **parameters})

    def _answered(self, key: str, method: str, **parameters: Any) -> Any:
        with self._answers(key):
            return self._call(method, **parameters)

    @contextmanager
    def _answers(self, key: str) -> Iterator[None]:
        """Turn what S3 says into what a store says."""
        try:
            yield
        except _FAILURES as exc:
            raise self._error(key, exc) from exc

    def _error(self, key: str, exc: BaseException) -> PatchstoreError:
        code = _code(exc)
        if code == "NoSuchBucket":
            return UsageError(f"{self.url}: there is no bucket {self._bucket}; create it, or mend the URL")
        if code in _MISSING:
            return NotFound(f"{self.url} has no {key}")
        if isinstance(exc, _MISTAKES) and code not in _PASSING:
            return UsageError(
                f"{self.url} refuses {key}: {exc}; check the credentials, the bucket's policy and the options"
            )
        return StoreUnavailable(f"{self.url} failed for {key}: {exc or type(exc).__name__}")


def _code(exc: BaseException) -> str:
    """S3's word for what went wrong, such as `NoSuchKey`; empty where no answer came."""
    response = getattr(exc.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _check_options(options: dict[str, Any]) -> None:
    # s3fs hands what it does not know to the session, which fails at the first request only.
    known = {*inspect.signature(s3fs.S3FileSystem.__init__).parameters, "profile"}
    known |= {"skip_instance_cache", "use_listings_cache"}
    known -= {"self", "kwargs", "asynchronous", "loop"}
    if unknown := sorted(options.keys() - known):
        raise UsageError(f"s3:// has no option {', '.join(unknown)}; known are {', '.join(sorted(known))}")
