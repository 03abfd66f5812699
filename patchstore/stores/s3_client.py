"""The requests that `S3Store` makes of one bucket, through s3fs.

This is the seam between what a store means and the library that moves the bytes: keys are whole,
and errors are the library's own, which `failures`, `code` and `is_mistake` make sense of.
"""

from collections.abc import Iterable
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
from s3fs.core import S3_RETRYABLE_ERRORS

from patchstore.stores.multipart import send_parts

_MAX_PUT_BYTES = 5 << 30
"""S3's limit for a single PUT."""
_NO_BUCKET = {"NoSuchBucket", "404"}
_MISTAKES = (PermissionError, NoCredentialsError, PartialCredentialsError, ParamValidationError)


class S3fsClient:
    """A bucket, reached with the options of an `s3fs.S3FileSystem`."""

    name = "s3fs"
    failures: tuple[type[BaseException], ...] = (OSError, BotoCoreError, *S3_RETRYABLE_ERRORS)
    """What any of the requests may raise."""

    def __init__(self, fs: Any, bucket: str) -> None:
        self.fs = fs
        self._bucket = bucket

    def get(self, key: str, start: int, end: int | None) -> bytes:
        """Return a range that is not empty; one beyond the object's end fails with S3's `InvalidRange`."""
        # `max_concurrency=1` spares the HEAD with which s3fs starts to read a whole object.
        limits = {"start": start, "end": end} if start or end is not None else {"max_concurrency": 1}
        data: bytes = self.fs.cat_file(f"{self._bucket}/{key}", **limits)
        return data

    def size(self, key: str) -> int:
        # `fs.info` would list when there is no such object, in case it is a folder.
        return int(self.call("head_object", Key=key)["ContentLength"])

    def has_bucket(self) -> bool:
        """Whether there is the bucket; True also where S3 does not say."""
        try:
            self.call("head_bucket")
        except S3fsClient.failures as exc:
            return S3fsClient.code(self, exc) not in _NO_BUCKET
        return True

    def put(self, key: str, data: bytes, *, create: bool) -> None:
        """Store an object with one PUT, with `create` on condition that there is none."""
        mode = "create" if create else "overwrite"
        # One PUT whatever the size, for s3fs would split from 100 MiB on.
        self.fs.pipe_file(f"{self._bucket}/{key}", data, mode=mode, chunksize=_MAX_PUT_BYTES)

    def list(self, prefix: str) -> list[str]:
        """Return all keys that start with a string, in the server's order."""
        keys: list[str] = []
        page: dict[str, Any] = {}
        while True:
            more = {"ContinuationToken": page["NextContinuationToken"]} if page else {}
            page = self.call("list_objects_v2", Prefix=prefix, **more)
            keys += [found["Key"] for found in page.get("Contents", [])]
            if not page.get("IsTruncated"):
                return keys

    def delete(self, key: str) -> None:
        self.call("delete_object", Key=key)

    def send(self, key: str, parts: Iterable[bytearray]) -> None:
        """Store an object from parts, as `multipart.send_parts` does; what `parts` raises passes through."""
        send_parts(self.call, self._bucket, key, parts)

    def code(self, exc: BaseException) -> str:
        """S3's word for what went wrong, such as `NoSuchKey`; empty where no answer came."""
        response = getattr(exc.__cause__, "response", None) or {}
        return str(response.get("Error", {}).get("Code", ""))

    def is_taken(self, exc: BaseException) -> bool:
        """Whether the library itself says that a create-only put found an object."""
        return isinstance(exc, FileExistsError)

    def is_mistake(self, exc: BaseException) -> bool:
        """Whether the caller has no right, or no credentials, to ask for this."""
        return isinstance(exc, _MISTAKES)

    def message(self, exc: BaseException) -> str:
        return str(exc) or type(exc).__name__

    def close(self) -> None:
        # To ask for the client makes one, which takes most of a second.
        if self.fs._s3 is not None:
            self.fs.close_session(self.fs.loop, self.fs._s3)

    def call(self, method: str, **parameters: Any) -> Any:
        return self.fs.call_s3(method, **{"Bucket": self._bucket, **parameters})
