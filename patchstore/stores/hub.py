"""Objects in a bucket of the Hugging Face Hub, through huggingface_hub and hf-xet.

The Hub's own API replaces objects without a condition, so of several writers the last one wins. A create-only
put goes through the Hub's S3 gateway, which has conditions, or the caller promises that there is one writer.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import hf_xet

from patchstore.errors import AlreadyExists, UnsupportedStore, UsageError
from patchstore.stores import open_s3
from patchstore.stores.base import NUM_PARTS, PART_BYTES, Chunk, Store, check_range, cut, keys_of
from patchstore.stores.deadline import DEFAULT_TIMEOUT_S, Deadline, Patience, allowance, ended, started
from patchstore.stores.errors import StoreErrors, named
from patchstore.stores.hub_api import BucketApi, Entry, Feed, Operation, Right
from patchstore.stores.options import check_endpoint, check_known, check_texts, checked_timeout

if TYPE_CHECKING:
    from patchstore.stores.s3 import S3Store

_GATEWAY_URL = "https://s3.hf.co"
_GATEWAY_CONFIG = {
    "s3": {"addressing_style": "path"},
    # The gateway cannot read what newer clients send by themselves.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
_BUFFER_BYTES = NUM_PARTS * PART_BYTES
# By itself hf-xet takes up to 6 GB for downloads, and up to 64 blocks of 64 MB for uploads. So it takes about
# 200 MiB and 400 MiB, for it rounds up to whole blocks.
_CONFIG = {
    "reconstruction.download_buffer_size": _BUFFER_BYTES,
    "reconstruction.download_buffer_perfile_size": _BUFFER_BYTES,
    "reconstruction.download_buffer_limit": _BUFFER_BYTES,
    "reconstruction.min_prefetch_buffer": _BUFFER_BYTES,
    "reconstruction.min_reconstruction_fetch_size": _BUFFER_BYTES,
    "reconstruction.max_reconstruction_fetch_size": _BUFFER_BYTES,
    "client.ac_max_upload_concurrency": 4,
}
_BLOCK_BYTES = 64 << 20
"""hf-xet fetches blocks of this size; progress within a block is not visible."""
_CONNECT_S = 10.0
_STOP_S = 1.0
"""How long to wait until hf-xet has stopped a failed transfer; it continues to stop after that."""


class HubStore(Store):
    """The keys of a bucket below a prefix: `hf://buckets/OWNER/NAME/prefix`.

    Args:
        token: of the Hub; by default what `HF_TOKEN` or a login gives.
        endpoint: of the Hub; by default `HF_ENDPOINT`.
        gateway_key: with `gateway_secret`, S3 credentials of the same account: create-only puts then go
            through the S3 gateway.
        gateway_secret: see `gateway_key`.
        gateway_url: of the gateway, with the owner: `https://s3.hf.co/OWNER` by default.
        single_writer: instead of credentials, the caller's promise that no other publisher uses this place. A
            second one is noticed if it writes at another moment; at the same moment it may be missed.
        timeout_s: how long an operation may take, or a transfer may go without moving a byte; see
            `stores/deadline.py`.

    Without credentials and without that promise everything but a create-only put works.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        endpoint: str | None = None,
        gateway_key: str | None = None,
        gateway_secret: str | None = None,
        gateway_url: str | None = None,
        single_writer: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **unknown: Any,
    ) -> None:
        owner, name, prefix = _split(url)
        self._prefix = f"{prefix}/" if prefix else ""
        self.url = "/".join(("hf://buckets", owner, name, *([prefix] if prefix else [])))
        texts = {
            "token": token,
            "endpoint": endpoint,
            "gateway_key": gateway_key,
            "gateway_secret": gateway_secret,
            "gateway_url": gateway_url,
        }
        with named(self.url):
            check_known("hf://", unknown, {*texts, "single_writer", "timeout_s"})
            self.timeout_s = checked_timeout(timeout_s)
            if not isinstance(single_writer, bool):
                # The text "false" would count as true.
                raise UsageError(f"single_writer is true or false, not {single_writer!r}")
            self.single_writer = single_writer
            check_texts(texts, texts)
            for option in ("endpoint", "gateway_url"):
                check_endpoint(option, texts[option])
        secrets = (token, gateway_key, gateway_secret, os.environ.get("HF_TOKEN"))
        self._errors = StoreErrors(self.url, secrets, survives_fork=False)
        self._api = BucketApi(f"{owner}/{name}", endpoint, token)
        self.endpoint = self._api.endpoint
        self._contents = Contents(self.timeout_s, self._api.grant)
        self._gateway: S3Store | None = None
        if gateway_key or gateway_secret or gateway_url:
            if not gateway_key or not gateway_secret or single_writer:
                what = "the S3 gateway needs gateway_key and gateway_secret, and no single_writer"
                raise self._errors.usage("open", "", what)
            self._gateway = open_s3(
                "/".join(("s3:/", name, *([prefix] if prefix else []))),
                endpoint_url=gateway_url or f"{_GATEWAY_URL}/{owner}",
                key=gateway_key,
                secret=gateway_secret,
                client_kwargs={"region_name": "us-east-1"},
                config_kwargs=_GATEWAY_CONFIG,
                timeout_s=self.timeout_s,
            )
            self._gateway.is_part_of(self.url)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._get("get", key, start, end)

    def size(self, key: str) -> int:
        return self._entry(self._small("size", key), key).size

    def stored_at(self, key: str) -> datetime | None:
        return self._entry(self._small("stored_at", key), key).stored_at

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        path, operation = self._full("put", key), self._small("put", key, len(data))
        if not if_absent:
            self._api.add(operation, path, self._contents.upload(operation, (data,)))
        elif self._gateway is not None:
            self._gateway.put(key, data, if_absent=True)
        elif self.single_writer:
            self._claim(operation, path, data)
        else:
            what = (
                "it cannot be created only once: the Hub's own API has no conditional write. Give "
                "gateway_key and gateway_secret, the S3 credentials that the Hub makes from an access token "
                "with the right to write; or single_writer=True, if no other publisher ever writes here"
            )
            raise self._errors.unsupported("put", key, what)

    def list(self, prefix: str = "") -> Iterator[str]:
        full = self._prefix + self._errors.prefix(prefix)
        operation = self._transfer("list", prefix)
        # The Hub lists folders, and a prefix may end anywhere.
        paths = self._api.paths(operation, full.rpartition("/")[0])
        names = (path.removeprefix(self._prefix) for path in paths if path.startswith(self._prefix))
        yield from keys_of(names, prefix)

    def delete(self, key: str) -> None:
        self._api.remove(self._small("delete", key), self._full("delete", key))

    def upload(self, key: str, chunks: Iterable[Chunk]) -> None:
        path, operation = self._full("upload", key), self._transfer("upload", key)
        self._api.add(operation, path, self._contents.upload(operation, chunks))

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        check_range(self.url, "read", key, start, end)
        if end is not None and end - start <= PART_BYTES:
            yield from filter(None, [self._get("read", key, start, end)])
            return
        operation = self._transfer("read", key, _BLOCK_BYTES)
        entry = self._entry(operation, key)
        stop = entry.size if end is None else min(end, entry.size)
        pieces = self._contents.stream(operation, entry, start, stop) if start < stop else ()
        yield from (bytes(part) for part in cut(pieces) if part)

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None] | None:
        return Feed(self._api, wake).end

    def close(self) -> None:
        if self._gateway is not None:
            self._gateway.close()

    def _full(self, operation: str, key: str) -> str:
        return self._prefix + self._errors.key(operation, key)

    def _small(self, name: str, key: str, num_bytes: int = 0) -> Operation:
        """An operation that ends at a moment."""
        limit = Deadline(allowance(self.timeout_s, num_bytes))
        return Operation(name=name, key=key, limit=limit, errors=self._errors)

    def _transfer(self, name: str, key: str, num_bytes: int = PART_BYTES) -> Operation:
        """An operation that ends when nothing moves any more, though `num_bytes` may move unseen."""
        limit = Patience(self.timeout_s, num_bytes)
        return Operation(name=name, key=key, limit=limit, errors=self._errors)

    def _get(self, name: str, key: str, start: int, end: int | None) -> bytes:
        check_range(self.url, name, key, start, end)
        operation = self._small(name, key, 0 if end is None else end - start)
        if start == end:
            # HTTP cannot ask for no bytes.
            self._entry(operation, key)
            return b""
        return self._api.read(operation, self._full(name, key), start, end)

    def _entry(self, operation: Operation, key: str) -> Entry:
        entry = self._api.entry(operation, self._full(operation.name, key))
        if entry is None:
            raise self._errors.not_found(operation.name, key)
        return entry

    def _claim(self, operation: Operation, path: str, data: bytes) -> None:
        """Check that the path is free, write, and check which object is there: the API has no conditions."""
        if self._api.entry(operation, path) is not None:
            raise self._errors.taken(operation.key)
        content = self._contents.upload(operation, (data,))
        self._api.add(operation, path, content)
        stored = self._api.entry(operation, path)
        if stored is None:
            raise operation.failure("the Hub does not show it after it was stored")
        if stored.content != content:
            raise AlreadyExists(
                f"{self.url}: put {operation.key}: another writer stored it at the same moment, though this "
                "store was opened with single_writer=True; end one of the two"
            )


def _split(url: str) -> tuple[str, str, str]:
    kind, _, place = url.removeprefix("hf://").partition("/")
    if kind != "buckets":
        raise UnsupportedStore(
            f"{url} is no bucket: use hf://buckets/OWNER/NAME/prefix; repositories of models and datasets "
            "keep every object ever written"
        )
    owner, _, rest = place.rstrip("/").partition("/")
    name, _, prefix = rest.partition("/")
    if not owner or not name:
        raise UsageError(f"{url} names no bucket: use hf://buckets/OWNER/NAME/prefix")
    errors = StoreErrors(url)
    for part in (owner, name):
        errors.key("open", part)
    return owner, name, errors.key("open", prefix) if prefix else ""


class Contents:
    """Uploads and downloads contents; this class does not know their paths.

    `grant` gives the way there. Every method raises `UsageError` where it is refused, and
    `StoreUnavailable` where contents cannot be reached, or none of them has moved for too long. hf-xet checks
    what it sends and not what it gets: a flipped bit comes through. Digests are for that.
    """

    def __init__(self, timeout_s: float, grant: Callable[[Operation, Right], dict[str, Any]]) -> None:
        self._grant = grant
        # So that an abandoned transfer ends soon.
        limits = {
            "client.connect_timeout": _duration(min(_CONNECT_S, timeout_s)),
            "client.read_timeout": _duration(timeout_s),
            "client.retry_max_duration": _duration(2 * timeout_s),
        }
        self._session = hf_xet.XetSession(hf_xet.XetConfig().with_config(_CONFIG | limits))

    def upload(self, operation: Operation, chunks: Iterable[Chunk]) -> str:
        """Store bytes, and return their hash; no path has them yet.

        Errors of `chunks` pass through.
        """
        way, run = self._grant(operation, "write"), operation.limit.run
        with operation.translate_errors():
            commit = run(lambda: self._session.new_upload_commit(**way))

        def moved() -> object:
            progress = commit.progress()
            return progress.total_transfer_bytes_completed, progress.total_bytes_completed

        try:
            with operation.translate_errors():
                stream = run(lambda: commit.start_upload_stream(sha256=hf_xet.SKIP_SHA256))
            for part in cut(chunks):
                with operation.translate_errors():
                    run(lambda part=bytes(part): stream.write(part), moved)  # type: ignore[misc]
            with operation.translate_errors():
                found: str = run(stream.finish, moved).xet_info.hash
                run(commit.wait_to_finish, moved)
        except BaseException:
            ended(started(commit.abort), _STOP_S)
            raise
        return found

    def stream(self, operation: Operation, entry: Entry, start: int, end: int) -> Iterator[bytes]:
        """Yield bytes `start` to `end` in order, in pieces of any size; `end` is at most the size."""
        run = operation.limit.run
        with operation.translate_errors():
            way = self._grant(operation, "read")
            downloads = run(lambda: self._session.new_download_stream_group(**way))
            file = hf_xet.XetFileInfo(entry.content, entry.size)
            stream = run(lambda: downloads.download_stream(file, start=start, end=end))
        try:
            missing = end - start
            while missing:
                with operation.translate_errors():
                    piece: bytes = run(lambda: next(stream, b""))
                if not 0 < len(piece) <= missing:
                    raise operation.failure("failed: another number of bytes came than were asked for")
                missing -= len(piece)
                yield piece
        finally:
            ended(started(stream.cancel), _STOP_S)


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"
