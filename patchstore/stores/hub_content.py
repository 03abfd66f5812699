"""Contents of a Hub bucket, to and from where hf-xet keeps them, as streams.

hf-xet checks what it sends and not what it gets: a flipped bit comes through. Digests are for that.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import hf_xet

from patchstore.errors import StoreUnavailable, UnsupportedStore, UsageError
from patchstore.stores.base import NUM_PARTS, PART_BYTES, Chunk
from patchstore.stores.hub_api import Entry, Grant, Right
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
    "client.connect_timeout": "10s",
}
_FAILURES = (OSError, RuntimeError, ValueError)


class Contents:
    """Uploads and downloads contents; which path has which is not known here.

    `grant` gives the way there. Every method raises `UsageError` where it is refused, and
    `StoreUnavailable` where contents cannot be reached.

    Raises:
        UnsupportedStore: this hf-xet is too old.
    """

    def __init__(self, url: str, grant: Callable[[Right], Grant]) -> None:
        found = version("hf-xet")
        if tuple(int(part) for part in found.split(".")[:2]) < (1, 7):
            # Downloads of 1.6 as streams never end.
            raise UnsupportedStore(f"hf-xet {found} is too old: pip install 'hf-xet>=1.7'")
        self._url = url
        self._grant = grant
        self._session = hf_xet.XetSession(hf_xet.XetConfig().with_config(_CONFIG))

    def upload(self, chunks: Iterable[Chunk]) -> str:
        """Store bytes, and return their hash; no path has them yet.

        Errors of `chunks` pass through.
        """
        way = _arguments(self._grant("write"))
        with self._answers():
            commit = self._session.new_upload_commit(**way)
        try:
            with self._answers():
                stream = commit.start_upload_stream(sha256=hf_xet.SKIP_SHA256)
            for part in in_parts(chunks):
                with self._answers():
                    stream.write(bytes(part))
            with self._answers():
                found: str = stream.finish().xet_info.hash
                commit.wait_to_finish()
        except BaseException:
            commit.abort()
            raise
        return found

    def stream(self, entry: Entry, start: int, end: int) -> Iterator[bytes]:
        """Yield bytes `start` to `end` in order, in pieces of any size; `end` is at most the size."""
        with self._answers():
            stream = self._downloads().download_stream(_file(entry), start=start, end=end)
        try:
            missing = end - start
            while missing:
                with self._answers():
                    piece: bytes = next(stream, b"")
                self._check(bool(piece) and len(piece) <= missing, entry)
                missing -= len(piece)
                yield piece
        finally:
            stream.cancel()

    def fill(self, entry: Entry, buffer: memoryview, start: int) -> None:
        """Fill a buffer with bytes from `start` on, each as soon as it arrives; there must be so many."""
        missing, end = len(buffer), start + len(buffer)
        with self._answers():
            stream = self._downloads().download_unordered_stream(_file(entry), start=start, end=end)
        try:
            with self._answers():
                for offset, piece in stream:
                    self._check(offset + len(piece) <= len(buffer), entry)
                    buffer[offset : offset + len(piece)] = piece
                    missing -= len(piece)
            self._check(missing == 0, entry)
        finally:
            stream.cancel()

    def _downloads(self) -> Any:
        return self._session.new_download_stream_group(**_arguments(self._grant("read")))

    def _check(self, good: bool, entry: Entry) -> None:
        if not good:
            raise StoreUnavailable(
                f"{self._url} sent another number of bytes of {entry.content} than were asked for"
            )

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Turn what hf-xet says into what a store says."""
        try:
            yield
        except PermissionError as exc:
            raise UsageError(f"{self._url} refuses a transfer: {exc}; check the token's rights") from exc
        except _FAILURES as exc:
            raise StoreUnavailable(f"{self._url} failed in a transfer: {exc}") from exc


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
