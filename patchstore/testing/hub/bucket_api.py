"""The Hub's own API for buckets, as far as `huggingface_hub` uses it."""

import json
import re
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlencode

from patchstore.testing.hub.buckets import Entry, iso
from patchstore.testing.hub.routes import Routes, not_found
from patchstore.testing.hub.serving import Answer, Request, json_answer

if TYPE_CHECKING:
    from patchstore.testing.hub.server import Hub

ROUTES = Routes()

_BUCKET = "/api/buckets/([^/]+/[^/]+)"


@ROUTES.add("POST", _BUCKET)
def _create(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    url = f"{hub.url}/buckets/{match[1]}"
    if match[1] in hub.buckets:
        return json_answer({"error": "exists", "url": url}, 409)
    hub.create_bucket(match[1])
    return json_answer({"url": url, "name": match[1]})


@ROUTES.add("GET", _BUCKET)
def _info(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    bucket = hub.bucket(request, match[1], "read")
    if isinstance(bucket, Answer):
        return bucket
    entries = [entry for _, entry in bucket.items()]
    return json_answer(
        {
            "id": match[1],
            "private": True,
            "createdAt": iso(bucket.created),
            "updatedAt": iso(max([bucket.created, *(entry.uploaded for entry in entries)])),
            "size": sum(entry.size for entry in entries),
            "totalFiles": len(entries),
        }
    )


@ROUTES.add("GET", f"{_BUCKET}/xet-(read|write)-token")
def _token(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    bucket = hub.bucket(request, match[1], match[2])
    if isinstance(bucket, Answer):
        return bucket
    expiry = int(time.time()) + hub.token_s
    token = f"{match[2]}-{expiry}"
    return json_answer(
        {"casUrl": hub.url, "accessToken": token, "exp": expiry},
        X_Xet_Cas_Url=hub.url,
        X_Xet_Access_Token=token,
        X_Xet_Token_Expiration=str(expiry),
    )


@ROUTES.add("POST", f"{_BUCKET}/batch")
def _batch(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    bucket = hub.bucket(request, match[1], "write")
    if isinstance(bucket, Answer):
        return bucket
    operations = [json.loads(line) for line in request.body if line.strip()]
    failed = []
    for operation in operations:
        path = operation["path"]
        wrong = hub.refuse(operation) if hub.refuse else None
        if wrong is None and operation["type"] == "deleteFile":
            bucket.delete(path)
        elif wrong is None and not hub.contents.has_file(operation["xetHash"]):
            wrong = "no such content"
        elif wrong is None:
            bucket.put(path, operation["xetHash"], operation["mtime"] / 1000)
        if wrong is not None:
            failed.append({"path": path, "error": wrong})
    num_done = len(operations) - len(failed)
    found = {
        "success": not failed,
        "processed": len(operations),
        "succeeded": num_done,
        "failed": failed,
    }
    return json_answer(found, 422 if failed and not num_done else 200)


@ROUTES.add("POST", f"{_BUCKET}/paths-info")
def _paths_info(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    bucket = hub.bucket(request, match[1], "read")
    if isinstance(bucket, Answer):
        return bucket
    found = ((path, bucket.get(path)) for path in request.json()["paths"])
    return json_answer([entry.described(path) for path, entry in found if entry])


@ROUTES.add("GET", f"{_BUCKET}/tree(?:/(.*))?")
def _tree(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    bucket = hub.bucket(request, match[1], "read")
    if isinstance(bucket, Answer):
        return bucket
    folder = unquote(match[2] or "").rstrip("/")
    below = f"{folder}/" if folder else ""
    files = [(path, entry) for path, entry in bucket.items() if path.startswith(below)]
    if request.query.get("recursive", "").lower() == "true":
        found = [entry.described(path) for path, entry in files]
    else:
        found = _one_level(files, below)
    begin = int(request.query.get("cursor", 0))
    page, end = found[begin : begin + hub.page_size], begin + hub.page_size
    if end >= len(found):
        return json_answer(page)
    following = urlencode({**request.query, "cursor": end})
    return json_answer(page, Link=f'<{hub.url}{request.path}?{following}>; rel="next"')


def _one_level(files: Iterable[tuple[str, Entry]], below: str) -> list[dict[str, Any]]:
    found = {}
    for path, entry in files:
        name, slash, _ = path.removeprefix(below).partition("/")
        found[below + name] = (
            {"type": "directory", "path": below + name, "uploadedAt": iso(entry.uploaded)}
            if slash
            else entry.described(path)
        )
    return list(found.values())


@ROUTES.add("GET", f"{_BUCKET}/events")
def _events(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    bucket = hub.bucket(request, match[1], "read")
    if isinstance(bucket, Answer):
        return bucket

    def feed() -> Iterator[bytes]:
        yield b": comments are no events\n\n"
        for change in bucket.changes():
            if change is None:
                yield b"event: ready\ndata: {}\n\n"
            else:
                yield f"event: changes\ndata: {json.dumps(change)}\n\n".encode()

    return Answer(body=feed(), endless=True, headers={"Content-Type": "text/event-stream"})


@ROUTES.add("GET", "/buckets/([^/]+/[^/]+)/resolve/(.+)")
@ROUTES.add("HEAD", "/buckets/([^/]+/[^/]+)/resolve/(.+)")
def _resolve(hub: "Hub", request: Request, match: re.Match[str]) -> Answer:
    """Redirect a client that wants the bytes to where they are, as the real Hub does."""
    bucket = hub.bucket(request, match[1], "read")
    if isinstance(bucket, Answer):
        return bucket
    entry = bucket.get(unquote(match[2]))
    if entry is None:
        return not_found("EntryNotFound")
    tokens = f"{hub.url}/api/buckets/{match[1]}/xet-read-token"
    return Answer(
        status=302 if request.method == "GET" else 200,
        size=0 if request.method == "GET" else entry.size,
        headers={
            "Location": f"{hub.url}/content/{entry.content}",
            "X-Xet-Hash": entry.content,
            "X-Linked-Size": str(entry.size),
            "X-Linked-Etag": f'"{entry.content}"',
            "Link": f'<{tokens}>; rel="xet-auth"',
        },
    )
