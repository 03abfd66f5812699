"""The requests that `S3Store` makes of one bucket, through s3fs.

This is the boundary between a store and the library that moves the bytes. Keys are whole, and errors are the
library's own, of any class; `code` and `is_mistake` interpret them. A request ends
with its `Deadline`, by `Overdue`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from botocore.exceptions import (
    ConfigNotFound,
    ConfigParseError,
    InvalidChecksumConfigError,
    InvalidConfigError,
    InvalidProxiesConfigError,
    InvalidRetryModeError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    UnknownEndpointError,
    UnknownSignatureVersionError,
)
from fsspec.asyn import sync
from fsspec.exceptions import FSTimeoutError
from s3fs.core import S3_RETRYABLE_ERRORS

from patchstore.stores.deadline import Deadline, Overdue, allowance
from patchstore.stores.multipart import send_parts

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
_BODY_ATTEMPTS = 2
"""botocore repeats what failed before the answer's body, and nothing after that."""


class NotS3(Exception):
    """An answer that reports success but does not come from S3."""

    def __init__(self, method: str) -> None:
        super().__init__(f"the answer to {method} is not one of S3; is endpoint_url that of an S3 service?")


class S3fsClient:
    """A bucket, reached with the options of an `s3fs.S3FileSystem`."""

    name = "s3fs"

    def __init__(self, fs: Any, bucket: str, timeout_s: float) -> None:
        self.fs = fs
        self._bucket = bucket
        self._timeout_s = timeout_s

    def get(self, key: str, start: int, end: int | None, deadline: Deadline) -> bytes:
        """Return a range that is not empty; one beyond the object's end fails with S3's `InvalidRange`."""
        span = (
            {"Range": f"bytes={start}-{'' if end is None else end - 1}"} if start or end is not None else {}
        )

        async def body() -> bytes:
            for attempt in range(1, _BODY_ATTEMPTS + 1):
                answer = await self.fs._call_s3("get_object", Bucket=self._bucket, Key=key, **span)
                _check("get_object", answer)
                try:
                    return bytes(await answer["Body"].read())
                except S3_RETRYABLE_ERRORS:
                    if attempt == _BODY_ATTEMPTS:
                        raise
                finally:
                    answer["Body"].close()
            raise AssertionError("unreachable")

        data: bytes = self._within(deadline, body)
        return data

    def size(self, key: str, deadline: Deadline) -> int:
        # `fs.info` would list when there is no such object, in case it is a folder.
        return int(_check("head_object", self.call("head_object", deadline, Key=key))["ContentLength"])

    def has_bucket(self, deadline: Deadline) -> bool:
        """Whether the bucket exists; True also if S3 does not tell."""
        try:
            self.call("head_bucket", deadline)
        except Overdue:
            raise
        except Exception as exc:  # noqa: BLE001 - only one answer is of interest
            return S3fsClient.code(self, exc) not in _NO_BUCKET
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

    def delete(self, key: str, deadline: Deadline) -> None:
        self.call("delete_object", deadline, Key=key)

    def send(self, key: str, parts: Iterable[bytearray]) -> None:
        """Store an object from parts, as `multipart.send_parts` does; what `parts` raises passes through."""

        def call(method: str, **parameters: Any) -> Any:
            num_bytes = len(parameters.get("Body", b""))
            return self.call(method, Deadline(allowance(self._timeout_s, num_bytes)), **parameters)

        send_parts(call, self._bucket, key, parts)

    def code(self, exc: BaseException) -> str:
        """S3's code of an error, such as `NoSuchKey`; empty if no answer came."""
        response = getattr(exc.__cause__, "response", None) or getattr(exc, "response", None)
        if not isinstance(response, dict):
            return ""
        # What is no S3 service, or has no body, leaves only the status.
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
        return str(response.get("Error", {}).get("Code") or status)

    def is_taken(self, exc: BaseException) -> bool:
        """Whether the library itself says that a create-only put found an object."""
        return isinstance(exc, FileExistsError)

    def is_mistake(self, exc: BaseException) -> bool:
        """Whether the caller lacks the right or credentials, or gave impossible options."""
        return isinstance(exc, _MISTAKES)

    def message(self, exc: BaseException) -> str:
        if isinstance(exc, LookupError):
            return f"the answer lacks {exc}; is endpoint_url that of an S3 service?"
        return str(exc) or type(exc).__name__

    def close(self) -> None:
        # To ask for the client makes one, which takes most of a second.
        if self.fs._s3 is not None:
            self.fs.close_session(self.fs.loop, self.fs._s3)

    def call(self, method: str, deadline: Deadline, **parameters: Any) -> Any:
        with _ending_with(deadline):
            parameters = {"Bucket": self._bucket, **parameters}
            return self.fs.call_s3(method, timeout=deadline.left(), **parameters)

    def _within(self, deadline: Deadline, call: Callable[[], Any]) -> Any:
        """Run a coroutine on s3fs's loop, and cancel it when the time has passed."""
        with _ending_with(deadline):
            return sync(self.fs.loop, call, timeout=deadline.left())


@contextmanager
def _ending_with(deadline: Deadline) -> Iterator[None]:
    try:
        yield
    except FSTimeoutError as exc:
        raise Overdue(deadline.limit_s) from exc


def _check(method: str, answer: Any) -> Any:
    """Return an answer that an S3 service may have given: a web server answers 200 to anything."""
    if "ETag" not in answer:
        raise NotS3(method)
    return answer
