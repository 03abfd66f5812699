"""Requests to the Hugging Face Hub about a bucket: each is small, and its time is limited.

`HfApi` has these calls too, but waits for an answer for ever: its client is made without time limits and
its methods take none. So they are sent from here, through the session and headers that huggingface_hub makes
public, and proxies or certificates that are set there count here as well. Its retries do not: it waits for as
long as an answer of the Hub asks for, and what was given up would be sent again later.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast
from urllib.parse import quote

from huggingface_hub import constants, get_session, hf_raise_for_status
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, http_backoff  # type: ignore[attr-defined]

from patchstore.errors import PatchstoreError, UsageError
from patchstore.stores.deadline import Deadline, Overdue, Patience
from patchstore.stores.messages import Messages

_TIMEOUT_S = (5.0, 30.0, 30.0, 30.0)
"""To connect; for each read; for each write; for a free connection. Less where less time is left."""
_FEED_TIMEOUT_S = (5.0, 90.0, 5.0, 5.0)
"""The Hub sends a comment every 30 s when it has no event."""
_NUM_RETRIES = 3
_FIRST_WAIT_S = 0.5
_PASSING = {408, 429, 500, 502, 503, 504}
"""Statuses after which another attempt may succeed."""
_TOKEN_MARGIN_S = 60
_HTTP = sys.modules[HfHubHTTPError.__bases__[0].__module__.partition(".")[0]]
"""What huggingface_hub sends requests with: httpx, or httpx2 from its release 2 on."""
# RuntimeError: another thread's failed connection had the session closed, as huggingface_hub then does.
_LOST = cast("tuple[type[Exception], ...]", (_HTTP.TransportError, RuntimeError))
_NO_SUCH_BUCKET = "RepoNotFound"
_IS_IT_THE_HUB = "check that the option endpoint, or HF_ENDPOINT, is the URL of a Hub"

Right = Literal["read", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The object at a path of a bucket."""

    size: int
    content: str
    """The xet hash of its bytes: the same for the same bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Access to the service that stores contents, for a limited time."""

    endpoint: str
    token: str
    expiry: int
    """In seconds since 1970."""
    refresh_url: str
    """URL that returns a new token."""
    headers: dict[str, str]
    """The token to send to that service."""

    @property
    def lasts(self) -> bool:
        return self.expiry > time.time() + _TOKEN_MARGIN_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation of a store that needs requests to the Hub."""

    name: str
    key: str
    limit: Deadline | Patience
    messages: Messages

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translate answers of the Hub, and errors of its clients, into errors of a store."""
        try:
            yield
        except PatchstoreError:
            raise
        except Overdue as exc:
            raise self.messages.overdue(self.name, self.key, exc) from exc
        except OfflineModeIsEnabled as exc:
            raise self.refusal("the Hub is not asked, for HF_HUB_OFFLINE is set; unset it") from exc
        except Exception as exc:
            raise self._error(exc) from exc

    def refusal(self, what: str) -> UsageError:
        return self.messages.usage(self.name, self.key, what)

    def failure(self, what: str, do: str = "try again") -> PatchstoreError:
        return self.messages.unavailable(self.name, self.key, what, do)

    def _error(self, exc: Exception) -> PatchstoreError:
        response = exc.response if isinstance(exc, HfHubHTTPError) else None
        said = self.messages.clean(exc)
        if response is not None and response.status_code == 404:
            return self.refusal(
                "there is no such bucket, or none that this token may see; create it, correct the URL, or "
                "give token="
            )
        if (response is not None and response.status_code in {401, 403}) or isinstance(exc, PermissionError):
            return self.refusal(f"refused: {said}; log in, set HF_TOKEN, or give a token= that may")
        if isinstance(exc, _HTTP.UnsupportedProtocol | _HTTP.InvalidURL):
            return self.refusal(f"{said}; correct the option endpoint, or HF_ENDPOINT")
        if isinstance(exc, json.JSONDecodeError | LookupError | TypeError):
            return self.failure(f"failed: the answer is not one of the Hub ({said})", _IS_IT_THE_HUB)
        return self.failure(f"failed: {said}", "try again, and check the endpoint and the network")


class BucketApi:
    """A bucket of the Hub, by `OWNER/NAME`. May be used from several threads.

    Every method raises `UsageError` where there is no such bucket, or no right to it, and
    `StoreUnavailable` where the Hub could not be reached, failed, or did not answer in time.
    """

    def __init__(self, bucket: str, endpoint: str | None, token: str | None) -> None:
        self._endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._api = f"{self._endpoint}/api/buckets/{bucket}"
        self._files = f"{self._endpoint}/buckets/{bucket}/resolve"
        self._token = token
        self._grants: dict[Right, Grant] = {}

    def read(self, operation: Operation, path: str, start: int, end: int | None) -> bytes:
        """Return bytes of a file, cut at its size; `end` is after `start`.

        Raises:
            NotFound: no such file.
        """
        # A compressed answer has no ranges.
        headers = {"Accept-Encoding": "identity"}
        if start or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        with operation.translate_errors():
            response = self._send(operation, "GET", f"{self._files}/{quote(path, safe='')}", headers=headers)
            if response.status_code == 416:
                return b""
            if response.history and response.is_error:
                # The Hub sent us on, so there is such a file and we may have it.
                raise operation.failure(f"failed: {response.status_code} for its content")
            if response.status_code == 404 and _is_of_an_object(response):
                raise operation.messages.not_found(operation.name, operation.key)
            hf_raise_for_status(response)
            if _is_page(response) and not response.history:
                # The Hub sends on to the content; another web server has a page for everything.
                raise operation.failure("failed: the answer is a web page", _IS_IT_THE_HUB)
            data: bytes = response.content
            return data if response.status_code == 206 else data[start:end]

    def entry(self, operation: Operation, path: str) -> Entry | None:
        """Return the object at a path, or None if there is none."""
        with operation.translate_errors():
            response = self._send(operation, "POST", f"{self._api}/paths-info", json={"paths": [path]})
            hf_raise_for_status(response)
            for found in response.json():
                if found["path"] == path and found["type"] == "file":
                    return Entry(size=found["size"], content=found["xetHash"])
        return None

    def paths(self, operation: Operation, folder: str) -> Iterator[str]:
        """Yield the paths of all files below a folder, in no order that can be relied on."""
        url: str | None = f"{self._api}/tree{'/' * bool(folder)}{quote(folder, safe='')}?recursive=true"
        while url:
            with operation.translate_errors():
                response = self._send(operation, "GET", url)
                if response.status_code == 404 and response.headers.get("X-Error-Code") == "EntryNotFound":
                    return
                hf_raise_for_status(response)
                page = [found["path"] for found in response.json() if found["type"] == "file"]
            yield from page
            before, url = url, response.links.get("next", {}).get("url")
            if url == before:
                raise operation.failure("failed: a page of the listing names itself as the next one")

    def add(self, operation: Operation, path: str, content: str) -> None:
        """Put an uploaded content at a path, in place of any other."""
        now_ms = int(time.time() * 1000)
        change = {"type": "addFile", "path": path, "xetHash": content, "mtime": now_ms}
        if failure := self._change(operation, change):
            raise operation.failure(f"the Hub did not store it: {operation.messages.clean(failure)}")

    def remove(self, operation: Operation, path: str) -> None:
        """Remove the object at a path; no error if there is none."""
        failure = self._change(operation, {"type": "deleteFile", "path": path})
        # The Hub does not document whether this is a failure.
        if failure and self.entry(operation, path):
            raise operation.failure(f"the Hub did not delete it: {operation.messages.clean(failure)}")

    def grant(self, operation: Operation, right: Right) -> Grant:
        """Return access to the contents that is valid for at least a minute, if the Hub gives such."""
        grant = self._grants.get(right)
        if grant is None or not grant.lasts:
            refresh_url, headers = f"{self._api}/xet-{right}-token", self._headers()
            with operation.translate_errors():
                response = self._send(operation, "GET", refresh_url)
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

    def _change(self, operation: Operation, change: dict[str, Any]) -> str | None:
        """Carry out one change, and return why it failed. After a lost answer the request is repeated."""
        headers = {"Content-Type": "application/x-ndjson"}
        body = json.dumps(change).encode() + b"\n"
        with operation.translate_errors():
            response = self._send(operation, "POST", f"{self._api}/batch", headers=headers, content=body)
            # 422: all of the batch failed, so this one.
            if response.status_code != 422:
                hf_raise_for_status(response)
            failed = response.json().get("failed", [])
            return str(failed[0]["error"]) if failed else None

    def _send(
        self,
        operation: Operation,
        method: Any,
        url: str,
        *,
        headers: dict[str, str] | None = None,
        **body: Any,
    ) -> Any:
        """Send a request until an answer is final, or the remaining time is too short for another attempt.

        Raises:
            Overdue: no answer in time. Nothing is sent after that.
        """
        headers = self._headers() | (headers or {})
        deadline, wait_s = operation.limit.request(), _FIRST_WAIT_S
        for attempt in range(1, _NUM_RETRIES + 2):
            left_s = deadline.left()
            timeout = tuple(min(limit_s, left_s) for limit_s in _TIMEOUT_S)
            is_last = attempt > _NUM_RETRIES
            asked_s = 0.0
            once = partial(
                http_backoff, method, url, max_retries=0, retry_on_status_codes=(), timeout=timeout, **body
            )
            try:
                response = deadline.run(partial(once, headers=headers))
            except _LOST as exc:
                if is_last or wait_s >= deadline.left() or isinstance(exc, _HTTP.UnsupportedProtocol):
                    raise
            else:
                asked_s = _seconds(response.headers.get("Retry-After", ""))
                if response.status_code not in _PASSING or is_last:
                    return response
                if max(wait_s, asked_s) >= deadline.left():
                    return response
            time.sleep(max(wait_s, asked_s))
            wait_s *= 2
        raise AssertionError("unreachable")

    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = build_hf_headers(token=self._token, library_name="patchstore")
        return headers


def is_followed(response: Any) -> bool:
    """Whether an answer is the feed of changes; raises, like other requests, if another attempt may help."""
    if response.status_code in {401, 403, 404, 501}:
        return False
    hf_raise_for_status(response)
    return str(response.headers.get("Content-Type", "")).startswith("text/event-stream")


def _is_of_an_object(response: Any) -> bool:
    """Whether a 404 is about the object: not about the bucket, and not from another web server."""
    code = response.headers.get("X-Error-Code")
    return code != _NO_SUCH_BUCKET and not (code is None and _is_page(response))


def _is_page(response: Any) -> bool:
    return str(response.headers.get("Content-Type", "")).startswith("text/html")


def _seconds(text: str) -> float:
    """Seconds that a header asks to wait for; a date counts as none."""
    return float(text) if text.isascii() and text.isdecimal() else 0.0
