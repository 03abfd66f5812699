"""The Hub's S3 gateway, as far as s3fs needs it: path style, below `/s3/OWNER`.

An object is the same one that the Hub's own API shows. Like the real gateway it reads no trailing
checksums, takes conditions on PutObject and not on GetObject, and knows ListObjectsV2 only.
Signatures are not checked, only whose key it is.
"""

import re
import time
from email.utils import formatdate
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote
from xml.sax.saxutils import escape  # nosec B406 # writes XML, and parses none

from tests.support.http_server import Answer, Request, answer_range
from tests.support.hub.buckets import Bucket, iso

if TYPE_CHECKING:
    from tests.support.hub.server import Hub

KEY, SECRET = "HFAKTEST", "gateway-secret"
_PAGE_KEYS = 1000


def answer(hub: "Hub", request: Request) -> Answer:
    match = re.fullmatch(r"/s3/([^/]+/[^/]+)(?:/(.*))?", request.path)
    if match is None:
        return _error(501, "NotImplemented")
    if _access_key(request) != KEY:
        return _error(403, "InvalidAccessKeyId")
    bucket = hub.buckets.get(match[1])
    if bucket is None:
        return _error(404, "NoSuchBucket")
    key = unquote(match[2] or "")
    if not key:
        return _listing(bucket, request) if request.method == "GET" else _error(501, "NotImplemented")
    if request.method == "PUT":
        return _put(hub, bucket, key, request)
    if request.method == "DELETE":
        bucket.delete(key)
        return Answer(status=204)
    entry = bucket.get(key)
    if entry is None:
        return _error(404, "NoSuchKey")
    headers = {
        "ETag": f'"{entry.content}"',
        "Last-Modified": formatdate(entry.modified, usegmt=True),
        "Content-Type": "application/octet-stream",
        "Accept-Ranges": "bytes",
    }
    load = partial(hub.load_content, entry.content)
    return answer_range(request, entry.size, load, headers) or _error(416, "InvalidRange")


def _put(hub: "Hub", bucket: Bucket, key: str, request: Request) -> Answer:
    # A part of a multipart upload, a copy, or trailing checksums.
    is_framed = request.headers.get("x-amz-content-sha256", "").startswith("STREAMING-")
    condition = request.headers.get("If-None-Match")
    if request.query or "x-amz-copy-source" in request.headers or is_framed or condition not in {None, "*"}:
        return _error(501, "NotImplemented")
    content = hub.store_content(request.body)
    if not bucket.put(key, content, time.time(), if_absent=condition is not None):
        return _error(412, "PreconditionFailed")
    return Answer(headers={"ETag": f'"{content}"'})


def _access_key(request: Request) -> str:
    match = re.search(r"Credential=([^/]+)/", request.headers.get("Authorization", ""))
    return match[1] if match else ""


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
