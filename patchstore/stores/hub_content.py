"""Streams of contents to and from the service behind hf-xet.

hf-xet checks what it sends and not what it gets: a flipped bit comes through. Digests are for that.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import hf_xet

from patchstore.stores import packages
from patchstore.stores.base import NUM_PARTS, PART_BYTES, Chunk
from patchstore.stores.deadline import ended, started
from patchstore.stores.hub_api import Entry, Grant, Operation, Right
from patchstore.stores.multipart import in_parts

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
BLOCK_BYTES = 64 << 20
"""hf-xet fetches blocks of this size; progress within a block is not visible."""
_CONNECT_S = 10.0
_STOP_S = 1.0
"""How long to wait until hf-xet has stopped a failed transfer; it continues to stop after that."""


class Contents:
    """Uploads and downloads contents; this class does not know their paths.

    `grant` gives the way there. Every method raises `UsageError` where it is refused, and
    `StoreUnavailable` where contents cannot be reached, or none of them has moved for too long.

    Raises:
        UnsupportedStore: this hf-xet or huggingface_hub is too old.
    """

    def __init__(self, timeout_s: float, grant: Callable[[Operation, Right], Grant]) -> None:
        packages.check("hf://", "huggingface_hub", "hf-xet")
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
        way, run = _arguments(self._grant(operation, "write")), operation.limit.run
        with operation.translate_errors():
            commit = run(lambda: self._session.new_upload_commit(**way))

        def moved() -> object:
            progress = commit.progress()
            return progress.total_transfer_bytes_completed, progress.total_bytes_completed

        try:
            with operation.translate_errors():
                stream = run(lambda: commit.start_upload_stream(sha256=hf_xet.SKIP_SHA256))
            for part in in_parts(chunks):
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
            downloads = self._downloads(operation)
            stream = run(lambda: downloads.download_stream(_file(entry), start=start, end=end))
        try:
            missing = end - start
            while missing:
                with operation.translate_errors():
                    piece: bytes = run(lambda: next(stream, b""))
                _check(bool(piece) and len(piece) <= missing, operation)
                missing -= len(piece)
                yield piece
        finally:
            ended(started(stream.cancel), _STOP_S)

    def _downloads(self, operation: Operation) -> Any:
        way = _arguments(self._grant(operation, "read"))
        return operation.limit.run(lambda: self._session.new_download_stream_group(**way))


def _check(good: bool, operation: Operation) -> None:
    if not good:
        raise operation.failure("failed: another number of bytes came than were asked for")


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def _arguments(grant: Grant) -> dict[str, Any]:
    headers = {name: value for name, value in grant.headers.items() if name.lower() != "authorization"}
    return {
        "endpoint": grant.endpoint,
        "token": grant.token,
        "token_expiry_unix_secs": grant.expiry,
        "token_refresh_url": grant.refresh_url,
        "token_refresh_headers": grant.headers,
        "custom_headers": headers,
    }


def _file(entry: Entry) -> Any:
    return hf_xet.XetFileInfo(entry.content, entry.size)
