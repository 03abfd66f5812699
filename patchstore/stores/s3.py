"""Objects in S3, or in what speaks its protocol: through obstore where that is installed, or else s3fs.

Of all that S3 offers only one thing is relied on: a single PUT with `If-None-Match: *`. The same
condition on a multipart upload, and `If-Match`, are missing or ignored in too many servers.
"""

import inspect
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal, get_args

import s3fs

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
from patchstore.stores.multipart import in_parts
from patchstore.stores.s3_client import S3fsClient

ClientName = Literal["auto", "s3fs", "obstore"]

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
    `config_kwargs={"request_checksum_calculation": "when_required"}`. `client` says what moves the
    bytes; `auto` is obstore where it is installed and has an equivalent of every option.

    Raises:
        UsageError: no bucket in the URL, a prefix that is no key, or an option that is unknown, or that
            the client asked for does not have.
        UnsupportedStore: the client asked for is not installed, or too old.
    """

    def __init__(self, url: str, *, client: ClientName = "auto", **options: Any) -> None:
        if tuple(int(part) for part in s3fs.__version__.split(".")[:2]) < (2026, 9):
            raise UnsupportedStore(f"s3fs {s3fs.__version__} is too old: pip install 's3fs>=2026.9'")
        _check_options(options)
        options["config_kwargs"] = _CONFIG | options.get("config_kwargs", {})
        fs = s3fs.S3FileSystem(
            # Cached instances share connections that `close` closes; cached listings are stale.
            **{"skip_instance_cache": True, "use_listings_cache": False, **options}
        )
        # s3fs repeats what botocore has already repeated: 2 rounds, or a dead endpoint takes minutes.
        fs.retries = 2
        place = url.partition("://")[2].rstrip("/")
        if not place or place.startswith("/"):
            raise UsageError(f"{url} names no bucket: use s3://bucket/prefix")
        self._bucket, prefix, _ = fs.split_path(place)
        self._prefix = f"{check_key(prefix)}/" if prefix else ""
        self.url = f"s3://{place}"
        self._client = _client(client, fs, self._bucket)
        self.client = self._client.name
        """What moves the bytes: `s3fs` or `obstore`."""
        self._was_there = False

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_range(start, end)
        if start == end:
            # HTTP cannot ask for no bytes; S3 would send all of them.
            self.size(key)
            return b""
        with self._answers(key):
            try:
                return self._client.get(self._full(key), start, end)
            except self._client.failures as exc:
                if self._client.code(exc) in _PAST_END:
                    return b""
                raise

    def size(self, key: str) -> int:
        with self._answers(key):
            try:
                return self._client.size(self._full(key))
            except self._client.failures as exc:
                # The answer to a HEAD has no body, which would tell a missing bucket from a missing object.
                if self._client.code(exc) in _MISSING and not self._has_bucket():
                    raise self._no_bucket() from exc
                raise

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        full = self._full(key)
        for attempt in range(1, _CONFLICT_ATTEMPTS + 1):
            try:
                self._client.put(full, data, create=if_absent)
            except self._client.failures as exc:
                code = self._client.code(exc)
                # Another conditional PUT of this key was under way: S3 says to ask once more.
                if code in _CONFLICT and attempt < _CONFLICT_ATTEMPTS:
                    time.sleep(_CONFLICT_WAIT_S * attempt)
                    continue
                is_taken = code in _TAKEN or self._client.is_taken(exc)
                if if_absent and is_taken and code not in _CONFLICT:
                    raise AlreadyExists(f"{self.url} already has {key}") from exc
                raise self._error(key, exc) from exc
            else:
                return

    def list(self, prefix: str = "") -> Iterator[str]:
        with self._answers(prefix):
            keys = self._client.list(self._prefix + check_prefix(prefix))
        # S3 sorts, except in directory buckets.
        yield from sorted(key.removeprefix(self._prefix) for key in keys)

    def delete(self, key: str) -> None:
        full = self._full(key)
        with self._answers(key):
            try:
                self._client.delete(full)
            except FileNotFoundError as exc:
                if self._client.code(exc) not in _MISSING:
                    raise

    def upload(self, key: str, chunks: Iterable[Chunk]) -> None:
        full = self._full(key)
        parts = in_parts(chunks)
        first = next(parts)
        if len(first) < PART_BYTES:
            self.put(key, bytes(first))
            return
        parts = chain((first,), parts)
        del first
        failed: list[BaseException] = []
        try:
            self._client.send(full, _watched(parts, failed))
        except self._client.failures as exc:
            if failed:
                raise
            error = self._error(key, exc)
            for note in getattr(exc, "__notes__", ()):
                error.add_note(note)
            raise error from exc

    def close(self) -> None:
        self._client.close()

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _has_bucket(self) -> bool:
        """Whether there is the bucket; once there was, S3 is not asked again."""
        self._was_there = self._was_there or self._client.has_bucket()
        return self._was_there

    def _no_bucket(self) -> UsageError:
        return UsageError(f"{self.url}: there is no bucket {self._bucket}; create it, or mend the URL")

    @contextmanager
    def _answers(self, key: str) -> Iterator[None]:
        """Turn what S3 says into what a store says."""
        try:
            yield
        except self._client.failures as exc:
            raise self._error(key, exc) from exc

    def _error(self, key: str, exc: BaseException) -> PatchstoreError:
        code, message = self._client.code(exc), self._client.message(exc)
        if code == "NoSuchBucket":
            return self._no_bucket()
        if code in _MISSING:
            return NotFound(f"{self.url} has no {key}")
        if self._client.is_mistake(exc) and code not in _PASSING:
            return UsageError(
                f"{self.url} refuses {key}: {message}; "
                "check the credentials, the bucket's policy and the options"
            )
        return StoreUnavailable(f"{self.url} failed for {key}: {message}")


def _client(name: ClientName, fs: Any, bucket: str) -> S3fsClient:
    if name not in get_args(ClientName):
        raise UsageError(f"s3:// has no client {name}; known are {', '.join(get_args(ClientName))}")
    if name == "s3fs":
        return S3fsClient(fs, bucket)
    if problem := _no_obstore():
        if name == "auto":
            return S3fsClient(fs, bucket)
        raise UnsupportedStore(f"client='obstore': {problem}: pip install 'obstore>=0.12'")
    from patchstore.stores.s3_obstore import ObstoreClient, unmet

    missing = unmet(fs, bucket)
    if not missing:
        return ObstoreClient(fs, bucket)
    if name == "auto":
        return S3fsClient(fs, bucket)
    raise UsageError(
        f"obstore has no equivalent of {', '.join(missing)}; leave that out, or use client='s3fs'"
    )


def _no_obstore() -> str:
    """Why obstore cannot be used; empty where it can."""
    try:
        import obstore
    except ImportError as exc:
        return str(exc)
    is_old = tuple(int(part) for part in obstore.__version__.split(".")[:2]) < (0, 12)
    return f"obstore {obstore.__version__} is too old" if is_old else ""


def _watched(parts: Iterator[bytearray], failed: list[BaseException]) -> Iterator[bytearray]:
    """Pass parts on, and note what their producer raises: that is no answer of S3's."""
    try:
        yield from parts
    except GeneratorExit:
        raise
    except BaseException as exc:
        failed.append(exc)
        raise


def _check_options(options: dict[str, Any]) -> None:
    # s3fs hands what it does not know to the session, which fails at the first request only.
    known = {*inspect.signature(s3fs.S3FileSystem.__init__).parameters, "profile", "client"}
    known |= {"skip_instance_cache", "use_listings_cache"}
    known -= {"self", "kwargs", "asynchronous", "loop"}
    if unknown := sorted(options.keys() - known):
        raise UsageError(f"s3:// has no option {', '.join(unknown)}; known are {', '.join(sorted(known))}")
