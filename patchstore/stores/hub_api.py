"""What the Hugging Face Hub is asked about a bucket: one small request each, with a limit on its time.

`HfApi` has these calls too, but waits for an answer for ever: its client is made without time limits and
its methods take none. So they are sent from here, through the session, headers and retries that
huggingface_hub makes public, and whoever sets proxies or certificates there is heeded here as well.
"""

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast
from urllib.parse import quote

from huggingface_hub import constants, get_session, hf_raise_for_status
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, http_backoff  # type: ignore[attr-defined]

from patchstore.errors import NotFound, PatchstoreError, StoreUnavailable, UsageError

_TIMEOUT_S = (5.0, 30.0, 30.0, 30.0)
"""To connect; for each read; for each write; for a free connection."""
_FEED_TIMEOUT_S = (5.0, 90.0, 5.0, 5.0)
"""The Hub sends a comment every 30 s when it has no event."""
_NUM_RETRIES = 3
_FIRST_WAIT_S = 0.5
_TOKEN_MARGIN_S = 60
# huggingface_hub has httpx inside, from release 2 on httpx2: its own error derives from the root of either.
# RuntimeError: another thread's failed connection had the session closed, as huggingface_hub then does.
_FAILURES = cast(
    "tuple[type[Exception], ...]", (*HfHubHTTPError.__bases__, RuntimeError, ValueError, KeyError)
)
_NO_SUCH_BUCKET = "RepoNotFound"

Right = Literal["read", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a path of a bucket has."""

    size: int
    content: str
    """The xet hash of its bytes: the same for the same bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The way to where contents lie, for a while."""

    endpoint: str
    token: str
    expiry: int
    """In seconds since 1970."""
    refresh_url: str
    """Gives another token."""
    headers: dict[str, str]
    """To send there."""

    @property
    def lasts(self) -> bool:
        return self.expiry > time.time() + _TOKEN_MARGIN_S


class BucketApi:
    """A bucket of the Hub, by `OWNER/NAME`. May be used from several threads.

    Every method raises `UsageError` where there is no such bucket, or no right to it, and
    `StoreUnavailable` where the Hub could not be reached or failed.
    """

    def __init__(self, bucket: str, endpoint: str | None, token: str | None) -> None:
        self.url = f"hf://buckets/{bucket}"
        self._endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._api = f"{self._endpoint}/api/buckets/{bucket}"
        self._files = f"{self._endpoint}/buckets/{bucket}/resolve"
        self._token = token
        self._grants: dict[Right, Grant] = {}

    def read(self, path: str, start: int, end: int | None) -> bytes:
        """Return bytes of a file, cut at its size; `end` is after `start`.

        Raises:
            NotFound: no such file.
        """
        # What is compressed on the way has no ranges.
        headers = {"Accept-Encoding": "identity"}
        if start or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        with self._answers(path):
            response = self._send("GET", f"{self._files}/{quote(path, safe='')}", headers=headers)
            if response.status_code == 416:
                return b""
            if response.history and response.is_error:
                # The Hub sent us on, so there is such a file and we may have it.
                raise StoreUnavailable(
                    f"{self.url} failed for {path}: {response.status_code} for its content"
                )
            if response.status_code == 404 and response.headers.get("X-Error-Code") != _NO_SUCH_BUCKET:
                raise NotFound(f"{self.url} has no {path}")
            hf_raise_for_status(response)
            data: bytes = response.content
            return data if response.status_code == 206 else data[start:end]

    def entry(self, path: str) -> Entry | None:
        """Return what a path has, or None where it has nothing."""
        with self._answers(path):
            response = self._send("POST", f"{self._api}/paths-info", json={"paths": [path]})
            hf_raise_for_status(response)
            for found in response.json():
                if found["path"] == path and found["type"] == "file":
                    return Entry(size=found["size"], content=found["xetHash"])
        return None

    def paths(self, folder: str) -> Iterator[str]:
        """Yield the paths of all files below a folder, in no order that can be relied on."""
        url: str | None = f"{self._api}/tree{'/' * bool(folder)}{quote(folder, safe='')}?recursive=true"
        while url:
            with self._answers(folder):
                response = self._send("GET", url)
                if response.status_code == 404 and response.headers.get("X-Error-Code") == "EntryNotFound":
                    return
                hf_raise_for_status(response)
                page = response.json()
            yield from (found["path"] for found in page if found["type"] == "file")
            url = response.links.get("next", {}).get("url")

    def add(self, path: str, content: str) -> None:
        """Give a path a content that has been uploaded, in place of any other."""
        now_ms = int(time.time() * 1000)
        if failure := self._change({"type": "addFile", "path": path, "xetHash": content, "mtime": now_ms}):
            raise StoreUnavailable(f"{self.url} did not store {path}: {failure}")

    def remove(self, path: str) -> None:
        """Take away a path; one that is not there is no error."""
        # Whether the Hub calls it a failure is not said.
        if (failure := self._change({"type": "deleteFile", "path": path})) and self.entry(path):
            raise StoreUnavailable(f"{self.url} did not delete {path}: {failure}")

    def grant(self, right: Right) -> Grant:
        """Return a way to the contents that is good for a minute at least, where the Hub gives such."""
        grant = self._grants.get(right)
        if grant is None or not grant.lasts:
            refresh_url, headers = f"{self._api}/xet-{right}-token", self._headers()
            with self._answers(f"a token to {right}"):
                response = self._send("GET", refresh_url)
                hf_raise_for_status(response)
                found = response.json()
                grant = self._grants[right] = Grant(
                    endpoint=found["casUrl"],
                    token=found["accessToken"],
                    expiry=found["exp"],
                    refresh_url=refresh_url,
                    headers=headers,
                )
        return grant

    def events(self) -> AbstractContextManager[Any]:
        """Open the feed of changes: a streamed response of httpx, or httpx2, of whatever status."""
        headers = {**self._headers(), "Accept": "text/event-stream"}
        return get_session().stream("GET", f"{self._api}/events", headers=headers, timeout=_FEED_TIMEOUT_S)

    def _change(self, operation: dict[str, Any]) -> str | None:
        """Carry out one operation, and return why it failed. A lost answer is asked for again."""
        headers = {"Content-Type": "application/x-ndjson"}
        body = json.dumps(operation).encode() + b"\n"
        with self._answers(operation["path"]):
            response = self._send("POST", f"{self._api}/batch", headers=headers, content=body)
            # 422: all of the batch failed, so this one.
            if response.status_code != 422:
                hf_raise_for_status(response)
            failed = response.json().get("failed", [])
        return str(failed[0]["error"]) if failed else None

    def _send(self, method: Any, url: str, *, headers: dict[str, str] | None = None, **body: Any) -> Any:
        return http_backoff(
            method,
            url,
            headers=self._headers() | (headers or {}),
            timeout=_TIMEOUT_S,
            max_retries=_NUM_RETRIES,
            base_wait_time=_FIRST_WAIT_S,
            **body,
        )

    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = build_hf_headers(token=self._token, library_name="patchstore")
        return headers

    @contextmanager
    def _answers(self, what: str) -> Iterator[None]:
        """Turn what the Hub says into what a store says."""
        try:
            yield
        except PatchstoreError:
            raise
        except OfflineModeIsEnabled as exc:
            raise UsageError(f"{self.url} is not asked for {what}: HF_HUB_OFFLINE is set; unset it") from exc
        except _FAILURES as exc:
            raise self._error(what, exc) from exc

    def _error(self, what: str, exc: Exception) -> PatchstoreError:
        response = exc.response if isinstance(exc, HfHubHTTPError) else None
        if response is not None and response.status_code == 404:
            return UsageError(
                f"{self.url}: there is no such bucket, or none that this token may see; create it, mend the "
                "URL, or give token="
            )
        if response is not None and response.status_code in {401, 403}:
            return UsageError(
                f"{self.url} refuses {what}: {_said(exc)}; log in, set HF_TOKEN, or give a token= that may"
            )
        return StoreUnavailable(f"{self.url} failed for {what}: {_said(exc)}")


def is_followed(response: Any) -> bool:
    """Whether an answer for the feed of changes is one; raises as other requests do where it may be later."""
    if response.status_code in {401, 403, 404, 501}:
        return False
    hf_raise_for_status(response)
    return str(response.headers.get("Content-Type", "")).startswith("text/event-stream")


def _said(exc: Exception) -> str:
    """An error's message on one line."""
    return " ".join(str(exc).split()) or type(exc).__name__
