"""The requests that `S3Store` makes of one bucket, through s3fs.

This is the boundary between a store and the library that moves the bytes. Keys are whole, and errors are the
library's own, of any class; `failure` interprets them. A request ends with its `Deadline`, by `Overdue`.
"""

import logging
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiobotocore
import s3fs
from aiohttp import ClientError as ConnectionFailed
from botocore.exceptions import (
    ConfigNotFound,
    ConfigParseError,
    FlexibleChecksumError,
    InvalidChecksumConfigError,
    InvalidConfigError,
    InvalidProxiesConfigError,
    InvalidRetryModeError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
    UnknownEndpointError,
    UnknownSignatureVersionError,
)
from botocore.exceptions import (
    ConnectionError as BotoConnectionError,
)
from fsspec import asyn
from fsspec.asyn import sync
from fsspec.exceptions import FSTimeoutError
from s3fs.core import S3_RETRYABLE_ERRORS, AioConfig

from patchstore.stores.base import NUM_PARTS, PART_BYTES
from patchstore.stores.deadline import Deadline, Overdue, Service, allowance, passes, retry_after
from patchstore.stores.s3_settings import CredentialsError, S3Settings
from patchstore.support import web

logger = logging.getLogger(__name__)

if not hasattr(asyn, "reset_after_fork"):
    # Before 2025.3.2 fsspec waits in a forked process for a thread that only its parent has.
    os.register_at_fork(after_in_child=asyn.reset_lock)

LOOKS_AT_HOSTS = tuple(map(int, aiobotocore.__version__.split(".")[:2])) >= (3, 9)
"""Whether s3fs finds out that a certificate is of another host, and looks at certificates behind a proxy."""
_CONFIG = {
    # Several transfers of NUM_PARTS parts each, where botocore would queue them on 10 connections.
    "max_pool_connections": 64,
    # `S3fsClient` repeats requests: by time, and with obstore by the same rule.
    "retries": {"mode": "standard", "total_max_attempts": 1},
}
_UNIFORM_PARTS = 5_000
_GROW_EVERY = 16
_NO_BUCKET = {"NoSuchBucket", "404"}
_MISTAKES = (
    ConfigNotFound,
    ConfigParseError,
    InvalidChecksumConfigError,
    InvalidConfigError,
    InvalidProxiesConfigError,
    InvalidRetryModeError,
    PermissionError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    UnknownEndpointError,
    UnknownSignatureVersionError,
)
_LOST = (
    *S3_RETRYABLE_ERRORS,
    ReadTimeoutError,
    BotoConnectionError,
    ConnectionFailed,
    ConnectionError,
    FlexibleChecksumError,
)
"""No answer came, or not all of it, or a damaged one."""
_CONFLICT = 409
"""Another conditional PUT of the key is under way."""
_PASSING_CODES = {
    # Bytes were damaged or lost on the way there.
    *("BadDigest", "IncompleteBody", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"),
    # With a status that says something else.
    *("InternalError", "RequestTimeout", "SlowDown"),
}

DAMAGED = b"a bit of this changes on the way"
"""What `S3fsClient.takes_damage` sends."""

_Result = TypeVar("_Result")


class NotS3(Exception):
    """An answer that reports success but does not come from S3."""

    def __init__(self, method: str) -> None:
        super().__init__(f"the answer to {method} is not one of S3; is endpoint_url that of an S3 service?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What an error of a client says."""

    code: str
    """S3's, such as `NoSuchKey`; the status where the answer has none; empty if no answer came."""
    status: int | None
    """Of HTTP; None if no answer came."""
    text: str
    is_taken: bool = False
    """The library itself says that a create-only put found an object."""
    is_lost: bool = False
    """No answer came, or not as it was sent."""
    is_mistake: bool = False
    """No request was made, because the caller lacks credentials or gave impossible options."""
    tls_fault: web.TlsFault | None = None
    """Why there was no connection with TLS."""
    retry_after: str = ""
    """What the service asks for in that header."""


class S3fsClient:
    """A bucket, reached with an `s3fs.S3FileSystem`."""

    name = "s3fs"
    checksum: Mapping[str, str] = {"ChecksumCRC32": "R2xScw=="}
    """Of `DAMAGED`, as this client sends it by default."""

    def __init__(self, fs: Any, bucket: str, settings: S3Settings) -> None:
        self.fs = fs
        self._bucket = bucket
        self._settings = settings
        self._timeout_s = settings.timeout_s
        self._chained = settings.credentials
        self._service = Service()

    def get(self, key: str, start: int, end: int | None, deadline: Deadline) -> bytes:
        """Return a range that is not empty; one beyond the object's end fails with S3's `InvalidRange`."""
        span = (
            {"Range": f"bytes={start}-{'' if end is None else end - 1}"} if start or end is not None else {}
        )

        async def body() -> bytes:
            answer = await self.fs._call_s3("get_object", Bucket=self._bucket, Key=key, **span)
            _check("get_object", answer)
            try:
                return bytes(await answer["Body"].read())
            finally:
                answer["Body"].close()

        data: bytes = self._repeated(deadline, lambda: self._within(deadline, body))
        return data

    def size(self, key: str, deadline: Deadline) -> int:
        # `fs.info` would list when there is no such object, in case it is a folder.
        return int(_check("head_object", self.call("head_object", deadline, Key=key))["ContentLength"])

    def stored_at(self, key: str, deadline: Deadline) -> datetime | None:
        """Return when an object was stored, if the server says it; by S3's clock, and to the second."""
        answer = _check("head_object", self.call("head_object", deadline, Key=key))
        found = answer.get("LastModified")
        return found if isinstance(found, datetime) else None

    def has_bucket(self, deadline: Deadline) -> bool:
        """Whether the bucket exists; True also if S3 does not tell."""
        try:
            self.call("head_bucket", deadline)
        except Overdue:
            raise
        except Exception as exc:  # noqa: BLE001 - only one answer is of interest
            return self.failure(exc).code not in _NO_BUCKET
        return True

    def put(self, key: str, data: bytes, deadline: Deadline, *, create: bool) -> None:
        """Store an object with one PUT, with `create` on condition that there is none."""
        condition = {"IfNoneMatch": "*"} if create else {}
        _check("put_object", self.call("put_object", deadline, Key=key, Body=data, **condition))

    def list(self, prefix: str) -> list[str]:
        """Return all keys that start with a string, in the server's order; each page has its own deadline."""
        keys: list[str] = []
        token: str | None = None
        while True:
            more = {"ContinuationToken": token} if token else {}
            page = self.call("list_objects_v2", Deadline(self._timeout_s), Prefix=prefix, **more)
            if not {"IsTruncated", "Name", "KeyCount"} & page.keys():
                raise NotS3("list_objects_v2")
            keys += [found["Key"] for found in page.get("Contents", [])]
            if not page.get("IsTruncated"):
                return keys
            before, token = token, page.get("NextContinuationToken")
            if not token or token == before:
                # Asking on would have the same page for ever.
                raise NotS3("list_objects_v2")

    def takes_damage(self, key: str, deadline: Deadline) -> bool:
        """Send an object of which a bit changes after it was signed; return whether the service stores it.

        It has the checksum that this client sends with every object, if any.
        """
        client = self._within(deadline, self.fs.set_session)
        is_sent = client.meta.config.request_checksum_calculation == "when_supported"

        def damage(request: Any, **_: Any) -> None:
            if request.url.partition("?")[0].endswith(key):
                request.body = bytes([DAMAGED[0] ^ 1]) + DAMAGED[1:]

        event = "before-send.s3.PutObject"
        client.meta.events.register(event, damage)
        try:
            # Once only: what is refused as damaged is otherwise sent again.
            with _ending_with(deadline):
                self.fs.call_s3(
                    "put_object",
                    timeout=deadline.left(),
                    **{
                        "Bucket": self._bucket,
                        "Key": key,
                        "Body": DAMAGED,
                        **(self.checksum if is_sent else {}),
                    },
                )
        except Exception as exc:
            if not 400 <= (self.failure(exc).status or 0) < 500:
                raise
            return False
        finally:
            client.meta.events.unregister(event, damage)
        return True

    def delete(self, key: str, deadline: Deadline) -> None:
        self.call("delete_object", deadline, Key=key)

    def send(self, key: str, parts: Iterable[bytearray]) -> None:
        """Store an object from parts, several at once; it becomes visible at the end or not at all.

        Holds at most `NUM_PARTS * PART_BYTES` bytes, or two parts where those are larger. What `parts` raises
        passes through. After an error the upload has been aborted, because S3 keeps the parts of an
        unfinished upload, and charges for them; if the abort failed too, the error has a note that says so.
        """

        def call(method: str, **parameters: Any) -> Any:
            num_bytes = len(parameters.get("Body", b""))
            return self.call(method, Deadline(allowance(self._timeout_s, num_bytes)), **parameters)

        upload = {"Key": key}
        upload["UploadId"] = call("create_multipart_upload", **upload)["UploadId"]
        sending: deque[tuple[int, Future[Any]]] = deque()
        sent: list[dict[str, Any]] = []
        with ThreadPoolExecutor(NUM_PARTS, thread_name_prefix="patchstore-upload") as pool:
            try:
                for number, part in enumerate(parts, 1):
                    # Bytes and not a file, which a retry would send from where the first attempt left it.
                    future = pool.submit(call, "upload_part", **upload, PartNumber=number, Body=part)
                    sending.append((len(part), future))
                    # The next part is collected while these travel, so it counts as well.
                    while sum(size for size, _ in sending) + part_bytes(number + 1) > NUM_PARTS * PART_BYTES:
                        sent.append(_sent(len(sent) + 1, sending.popleft()[1]))
                        if not sending:
                            break
                while sending:
                    sent.append(_sent(len(sent) + 1, sending.popleft()[1]))
                call("complete_multipart_upload", **upload, MultipartUpload={"Parts": sent})
            except BaseException as exc:
                # A part that arrives after the abort would stay: first let those under way finish.
                for _, future in sending:
                    future.cancel()
                wait([future for _, future in sending])
                try:
                    call("abort_multipart_upload", **upload)
                except Exception as failure:  # noqa: BLE001 - of the two errors the first one matters
                    exc.add_note(
                        f"unfinished upload {upload['UploadId']} of {key} was not aborted: {failure}"
                    )
                raise

    def failure(self, exc: BaseException) -> Failure:
        """Interpret an error, of any class."""
        answer = _answer(exc)
        metadata = answer.get("ResponseMetadata", {})
        status = metadata.get("HTTPStatusCode")
        return Failure(
            code=str(answer.get("Error", {}).get("Code") or status or ""),
            status=int(status) if status else None,
            text=_text(exc),
            is_taken=isinstance(exc, FileExistsError),
            is_lost=isinstance(exc, _LOST),
            is_mistake=exc.is_mistake if isinstance(exc, CredentialsError) else isinstance(exc, _MISTAKES),
            tls_fault=web.tls_fault(exc),
            retry_after=str(metadata.get("HTTPHeaders", {}).get("retry-after", "")),
        )

    def close(self) -> None:
        # To ask for the client makes one, which takes most of a second.
        if self.fs._s3 is not None:
            self.fs.close_session(self.fs.loop, self.fs._s3)

    def call(self, method: str, deadline: Deadline, **parameters: Any) -> Any:
        parameters = {"Bucket": self._bucket, **parameters}

        def ask() -> Any:
            with _ending_with(deadline):
                return self.fs.call_s3(method, timeout=deadline.left(), **parameters)

        return self._repeated(deadline, ask)

    def _repeated(self, deadline: Deadline, ask: Callable[[], _Result]) -> _Result:
        """Make a request until another attempt would not change the answer, or the time is over."""
        result = deadline.repeat(lambda: self._signed(ask), lambda exc: self._wait_s(deadline, exc))
        self._service.has_answered = True
        return result

    def _wait_s(self, deadline: Deadline, exc: Exception) -> float | None:
        """Seconds that the service asks to wait before another attempt; None if that would fail as well."""
        failure = self.failure(exc)
        if not failure.code:
            is_lost = failure.is_lost and failure.tls_fault is None
            return self._service.waits_s(deadline) if is_lost else None
        self._service.has_answered = True
        is_passing = failure.status == _CONFLICT or passes(failure.status or 0)
        return retry_after(failure.retry_after) if is_passing or failure.code in _PASSING_CODES else None

    def _signed(self, ask: Callable[[], _Result]) -> _Result:
        """Make a request; once more, if its credentials are refused and others are there by now."""
        used = self._chained and self._chained.last
        try:
            return ask()
        except Exception as exc:
            if self._chained is None or not self._chained.renewed(self.failure(exc).code, used):
                raise
        return ask()

    def _within(self, deadline: Deadline, call: Callable[[], Any]) -> Any:
        """Run a coroutine on s3fs's loop, and cancel it when the time has passed."""
        with _ending_with(deadline):
            return sync(self.fs.loop, call, timeout=deadline.left())


@contextmanager
def _ending_with(deadline: Deadline) -> Iterator[None]:
    try:
        yield
    except (FSTimeoutError, ReadTimeoutError) as exc:
        # The second one before the time is over: an answer, or a part of it, did not come for half of it.
        raise Overdue(deadline.limit_s) from exc


def _check(method: str, answer: Any) -> Any:
    """Return an answer that an S3 service may have given: a web server answers 200 to anything."""
    if "ETag" not in answer:
        raise NotS3(method)
    return answer


def _answer(exc: BaseException) -> dict[str, Any]:
    """The answer that an error is about, as botocore has it; empty if none came."""
    found = getattr(exc.__cause__, "response", None) or getattr(exc, "response", None)
    return found if isinstance(found, dict) and not isinstance(exc, CredentialsError) else {}


def _text(exc: BaseException) -> str:
    if isinstance(exc, LookupError):
        return f"the answer lacks {exc}; is endpoint_url that of an S3 service?"
    if isinstance(exc, RecursionError):
        return "the bucket is in another region, which the answer does not name; give region_name"
    return str(exc) or type(exc).__name__


def file_system(settings: S3Settings) -> Any:
    """Return the file system of a store. A proxy that its options name themselves stays."""
    options = {name: value for name, value in settings.options.items() if name != "profile"}
    if settings.is_tls and settings.trusted is not None and not LOOKS_AT_HOSTS:
        logger.warning(
            "aiobotocore %s, with which s3fs reaches %s, does not compare the host with its certificate, "
            "and behind a proxy looks at no certificate; aiobotocore 3.9 and later do both",
            aiobotocore.__version__,
            settings.endpoint,
        )
    verify = settings.trusted is not None and (not settings.is_tls or _in_a_file(settings.trusted.pem))
    proxies = {} if settings.proxy is None else {urlsplit(settings.endpoint).scheme: settings.proxy.url}
    config = {**_CONFIG, **settings.limits, "proxies": proxies, **(options.get("config_kwargs") or {})}
    AioConfig(**config)  # what is wrong would only be said at the first request
    options |= {
        "session": settings.session,
        "client_kwargs": {**(options.get("client_kwargs") or {}), "verify": verify},
        "config_kwargs": config,
    }
    # Cached instances share connections that `close` closes; cached listings are stale.
    fs = s3fs.S3FileSystem(**{"skip_instance_cache": True, "use_listings_cache": False, **options})
    # Nor does s3fs repeat requests, or the attempts would multiply.
    fs.retries = 1
    return fs


@cache
def _in_a_file(pem: str) -> str:
    """Return the path of a file without a name, which is gone with the process: s3fs takes nothing else."""
    number, path = tempfile.mkstemp()
    os.unlink(path)  # noqa: PTH108
    with open(number, "wb", closefd=False) as file:
        file.write(pem.encode())
    return f"/dev/fd/{number}"


def part_bytes(number: int) -> int:
    """Size of a part in bytes; `number` counts from 1.

    S3 takes parts of 5 MiB to 5 GiB and at most 10,000 of them, and a stream does not say its size
    beforehand. So parts stay `PART_BYTES` up to the 5,000th (40 GiB, more than any shard of a model), which
    also suits servers that want all parts equal, and grow after that to a total of 6 TiB.

    >>> [part_bytes(number) // PART_BYTES for number in (1, 5_000, 5_017, 10_000)]
    [1, 1, 2, 313]
    """
    return PART_BYTES * (1 + max(0, number - 1 - _UNIFORM_PARTS) // _GROW_EVERY)


def _sent(number: int, future: Future[Any]) -> dict[str, Any]:
    return {"PartNumber": number, "ETag": future.result()["ETag"]}
