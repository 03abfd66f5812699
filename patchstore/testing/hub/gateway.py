"""The Hub's S3 gateway, as far as s3fs needs it: path style, below `/s3/OWNER`.

An object is the same one that the Hub's own API shows. Like the real gateway it reads no trailing
checksums, takes conditions on PutObject and not on GetObject, and knows ListObjectsV2 only.
Signatures are not checked, only whose key it is.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from email.utils import formatdate
from typing import IO
from urllib.parse import unquote
from xml.sax.saxutils import escape  # nosec B406 # writes XML, and parses none

from patchstore.testing.hub.buckets import Bucket, Entry, iso
from patchstore.testing.hub.serving import Answer, Request

_PAGE_KEYS = 1000


class Gateway:
    """Answers S3 requests.

    Args:
        buckets: by `OWNER/NAME`.
        roles: `read` or `write` by access key.
        store: keeps a body and returns its content's hash.
        load: yields bytes of a content, from a first one to the end before another.
    """

    def __init__(
        self,
        buckets: Mapping[str, Bucket],
        roles: Mapping[str, str],
        store: Callable[[IO[bytes]], str],
        load: Callable[[str, int, int], Iterable[bytes]],
    ) -> None:
        self._buckets = buckets
        self._roles = roles
        self._store = store
        self._load = load

    def answer(self, request: Request) -> Answer:
        match = re.fullmatch(r"/s3/([^/]+/[^/]+)(?:/(.*))?", request.path)
        if match is None:
            return _error(501, "NotImplemented")
        role = self._roles.get(_access_key(request))
        if role is None or (role != "write" and request.method not in {"GET", "HEAD"}):
            return _error(403, "AccessDenied" if role else "InvalidAccessKeyId")
        bucket = self._buckets.get(match[1])
        if bucket is None:
            return _error(404, "NoSuchBucket")
        key = unquote(match[2] or "")
        if not key:
            return _listing(bucket, request) if request.method == "GET" else _error(501, "NotImplemented")
        if request.method == "PUT":
            return self._put(bucket, key, request)
        if request.method == "DELETE":
            bucket.delete(key)
            return Answer(status=204)
        if request.method not in {"GET", "HEAD"}:
            return _error(501, "NotImplemented")
        entry = bucket.get(key)
        return _error(404, "NoSuchKey") if entry is None else self._get(entry, request)

    def _put(self, bucket: Bucket, key: str, request: Request) -> Answer:
        # A part of a multipart upload, a copy, or trailing checksums.
        if request.query or "x-amz-copy-source" in request.headers or _is_framed(request):
            return _error(501, "NotImplemented")
        condition = request.headers.get("If-None-Match")
        if condition not in {None, "*"}:
            return _error(501, "NotImplemented")
        content = self._store(request.body)
        if not bucket.put(key, content, time.time(), if_absent=condition is not None):
            return _error(412, "PreconditionFailed")
        return Answer(headers={"ETag": f'"{content}"'})

    def _get(self, entry: Entry, request: Request) -> Answer:
        headers = {
            "ETag": f'"{entry.content}"',
            "Last-Modified": formatdate(entry.modified, usegmt=True),
            "Content-Type": "application/octet-stream",
            "Accept-Ranges": "bytes",
        }
        wanted = request.range()
        if request.method == "HEAD" or wanted is None:
            body = () if request.method == "HEAD" else self._load(entry.content, 0, entry.size)
            return Answer(body=body, size=entry.size, headers=headers)
        first, last = wanted
        if first >= entry.size:
            return _error(416, "InvalidRange")
        end = entry.size if last is None else min(last + 1, entry.size)
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{entry.size}"
        body = self._load(entry.content, first, end)
        return Answer(status=206, body=body, size=end - first, headers=headers)


def _access_key(request: Request) -> str:
    match = re.search(r"Credential=([^/]+)/", request.headers.get("Authorization", ""))
    return match[1] if match else ""


def _is_framed(request: Request) -> bool:
    return request.headers.get("x-amz-content-sha256", "").startswith("STREAMING-")


def _listing(bucket: Bucket, request: Request) -> Answer:
    if request.query.get("list-type") != "2" or request.query.get("delimiter"):
        return _error(501, "NotImplemented")
    prefix, after = request.query.get("prefix", ""), request.query.get("continuation-token", "")
    num_keys = min(int(request.query.get("max-keys", _PAGE_KEYS)), _PAGE_KEYS)
    found = [(key, entry) for key, entry in bucket.items() if key.startswith(prefix) and key > after]
    page = found[:num_keys]
    objects = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{entry.size}</Size>"
        f"<LastModified>{iso(entry.modified)}</LastModified><ETag>&quot;{entry.content}&quot;</ETag>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
        for key, entry in page
    )
    more = len(found) > len(page)
    token = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if more else ""
    return _xml(
        200,
        f"<ListBucketResult><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
        f"<MaxKeys>{num_keys}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>"
        f"{token}{objects}</ListBucketResult>",
    )


def _error(status: int, code: str) -> Answer:
    return _xml(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>")


def _xml(status: int, text: str) -> Answer:
    body = f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()
    return Answer(status=status, body=body, headers={"Content-Type": "application/xml"})
