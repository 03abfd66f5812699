"""What a server says of its bucket to another client than ours."""

from typing import Any

import s3fs


def call(options: dict[str, Any], method: str, **parameters: Any) -> dict[str, Any]:
    """Call an S3 operation on `bucket`."""
    options = {name: value for name, value in options.items() if name != "client"}
    fs = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    answer: dict[str, Any] = fs.call_s3(method, Bucket="bucket", **parameters)
    fs.close_session(fs.loop, fs.s3)
    return answer


def key_of(url: str, key: str) -> str:
    """Return the key in `bucket` that a store at a URL has for its own one."""
    return f"{url.removeprefix('s3://bucket/')}/{key}"


def unfinished_uploads(options: dict[str, Any], url: str) -> list[str]:
    """Return the keys below a store's URL whose uploads were begun and neither ended nor given up."""
    uploads = call(options, "list_multipart_uploads").get("Uploads", [])
    return [upload["Key"] for upload in uploads if upload["Key"].startswith(key_of(url, ""))]
