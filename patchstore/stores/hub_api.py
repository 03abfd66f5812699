"""Requests to the Hugging Face Hub about a bucket, each small and limited in time, and its feed of changes.

`HfApi` has these calls too, but waits for an answer for ever: its client is made without time limits and
its methods take none. So they are sent from here, through the session and headers that huggingface_hub makes
public, and proxies or certificates that are set there count here as well. Its retries do not: it waits for as
long as an answer of the Hub asks for, and what was given up would be sent again later.
"""

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Literal, cast
from urllib.parse import quote

from huggingface_hub import constants, get_session, hf_raise_for_status
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, http_backoff  # type: ignore[attr-defined]

from patchstore.errors import PatchstoreError, UsageError
from patchstore.stores.deadline import Deadline, Patience, Service, passes, retry_after
from patchstore.stores.errors import StoreErrors
from patchstore.support import host, web

_TIMEOUT_S = (5.0, 30.0, 30.0, 30.0)
"""To connect; for each read; for each write; for a free connection. Less where less time is left."""
_BEYOND_S = 0.5
_FEED_TIMEOUT_S = (5.0, 90.0, 5.0, 5.0)
"""The Hub sends a comment every 30 s when it has no event."""
FIRST_WAIT_S = 1.0
_LAST_WAIT_S = 60.0
_END_S = 5.0
_TOKEN_MARGIN_S = 60
_HTTP = sys.modules[HfHubHTTPError.__bases__[0].__module__.partition(".")[0]]
"""What huggingface_hub sends requests with: httpx, or httpx2 from its release 2 on."""
# RuntimeError: another thread's failed connection had the session closed, as huggingface_hub then does.
_LOST = cast("tuple[type[Exception], ...]", (_HTTP.TransportError, RuntimeError))
_NO_SUCH_BUCKET = "RepoNotFound"
_OF_THIS_HOST = re.compile(r"I/O error: .*\(os error (\d+)\)")
"""What hf-xet says of a file of its own; errors of the network have other words."""
_IS_IT_THE_HUB = "check that the option endpoint, or HF_ENDPOINT, is the URL of a Hub"

Right = Literal["read", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The object at a path of a bucket."""

    size: int
    content: str
    """The xet hash of its bytes: the same for the same bytes."""
    stored_at: datetime | None
    """By the Hub's clock; None if it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation of a store that needs requests to the Hub."""

    name: str
    key: str
    limit: Deadline | Patience
    errors: StoreErrors

    def translate_errors(self) -> AbstractContextManager[None]:
        """Translate answers of the Hub, and errors of its clients, into errors of a store."""
        return self.errors.translating(self.name, self.key, self._error)

    def refusal(self, what: str) -> UsageError:
        return self.errors.usage(self.name, self.key, what)

    def failure(self, what: str, do: str = "try again") -> PatchstoreError:
        return self.errors.unavailable(self.name, self.key, what, do)

    def _error(self, _operation: str, _key: str, exc: Exception) -> PatchstoreError:
        if isinstance(exc, OfflineModeIsEnabled):
            return self.refusal("the Hub is not asked, for HF_HUB_OFFLINE is set; unset it")
        response = exc.response if isinstance(exc, HfHubHTTPError) else None
        said = self.errors.clean(exc)
        if found := _OF_THIS_HOST.search(str(exc)):
            doing = f"{self.errors.url}: {self.name} {self.key}: hf-xet's use of {constants.HF_XET_CACHE}"
            return host.refused(int(found[1]), f"{doing}, which HF_HOME or HF_XET_CACHE names,")
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
        if fault := web.tls_fault(exc):
            given = (f"{name}={os.environ[name]}" for name in web.CA_NAMES if os.environ.get(name))
            return self.failure(f"failed: {said}", web.tls_advice(fault, next(given, "")))
        return self.failure(f"failed: {said}", "try again, and check the endpoint and the network")


class _Passing(Exception):
    """An answer after which another attempt may succeed."""

    def __init__(self, response: Any) -> None:
        super().__init__(response.status_code)
        self.response = response


class BucketApi:
    """A bucket of the Hub, by `OWNER/NAME`. May be used from several threads.

    Every method raises `UsageError` where there is no such bucket, or no right to it, and
    `StoreUnavailable` where the Hub could not be reached, failed, or did not answer in time.
    """

    def __init__(self, bucket: str, endpoint: str | None, token: str | None) -> None:
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._api = f"{self.endpoint}/api/buckets/{bucket}"
        self._files = f"{self.endpoint}/buckets/{bucket}/resolve"
        self._token = token
        self._grants: dict[Right, dict[str, Any]] = {}
        self._service = Service()

    def read(self, operation: Operation, path: str, start: int, end: int | None) -> bytes:
        """Return bytes of a file, cut at its size, or raise NotFound; `end` is after `start`."""
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
                raise operation.errors.not_found(operation.name, operation.key)
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
                    stored_at = _time(found.get("uploadedAt"))
                    return Entry(size=found["size"], content=found["xetHash"], stored_at=stored_at)
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
            raise operation.failure(f"the Hub did not store it: {operation.errors.clean(failure)}")

    def remove(self, operation: Operation, path: str) -> None:
        """Remove the object at a path; no error if there is none."""
        failure = self._change(operation, {"type": "deleteFile", "path": path})
        # The Hub does not document whether this is a failure.
        if failure and self.entry(operation, path):
            raise operation.failure(f"the Hub did not delete it: {operation.errors.clean(failure)}")

    def grant(self, operation: Operation, right: Right) -> dict[str, Any]:
        """Return access to the service that stores contents, as hf-xet takes it.

        It is valid for at least a minute, if the Hub gives such, and hf-xet renews it.
        """
        grant = self._grants.get(right)
        if grant is None or grant["token_expiry_unix_secs"] <= time.time() + _TOKEN_MARGIN_S:
            url, headers = f"{self._api}/xet-{right}-token", self._headers()
            with operation.translate_errors():
                response = self._send(operation, "GET", url)
                hf_raise_for_status(response)
                found = response.json()
                grant = self._grants[right] = {
                    "endpoint": found["casUrl"],
                    "token": found["accessToken"],
                    "token_expiry_unix_secs": found["exp"],
                    "token_refresh_url": url,
                    "token_refresh_headers": headers,
                    # Not the Hub's token, which is for the Hub.
                    "custom_headers": {
                        name: value for name, value in headers.items() if name.lower() != "authorization"
                    },
                }
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
        """Send a request until an answer is final, or the time is over; then return the last one.

        Raises Overdue if none came in time. Nothing is sent after that.
        """
        headers = self._headers() | (headers or {})
        deadline = operation.limit.request()

        def once() -> Any:
            left_s = deadline.left()
            # A little longer, so that it is the limit of the operation that is told.
            timeout = tuple(min(limit_s, left_s + _BEYOND_S) for limit_s in _TIMEOUT_S)
            request = partial(http_backoff, method, url, max_retries=0, retry_on_status_codes=())
            response = deadline.run(partial(request, timeout=timeout, headers=headers, **body))
            self._service.has_answered = True
            if passes(response.status_code):
                raise _Passing(response)
            return response

        def asked(exc: Exception) -> float | None:
            if isinstance(exc, _Passing):
                return retry_after(exc.response.headers.get("Retry-After", ""))
            is_lost = isinstance(exc, _LOST) and not isinstance(exc, _HTTP.UnsupportedProtocol)
            return self._service.waits_s(deadline) if is_lost else None

        try:
            return deadline.repeat(once, asked)
        except _Passing as exc:
            return exc.response

    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = build_hf_headers(token=self._token, library_name="patchstore")
        return headers


class Feed:
    """Calls `wake` on a separate thread at every event, until `end`, or if the Hub has no feed."""

    def __init__(self, api: BucketApi, wake: Callable[[], None]) -> None:
        self._api = api
        self._wake = wake
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="patchstore-hub-feed", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Disconnect; `wake` is not called any more, except for a call that runs now."""
        self._ended.set()
        with self._lock:
            if self._socket is not None:
                # Closing it would leave a thread that reads from it waiting.
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            # Not longer: the thread may be connecting to a server that does not answer.
            self._thread.join(_END_S)

    def _run(self) -> None:
        wait_s = FIRST_WAIT_S
        while not self._ended.is_set():
            try:
                heard = self._listen()
            except Exception:  # noqa: BLE001 - a hint is not worth an error; its caller also polls
                heard = False
            else:
                if heard is None:
                    return
            wait_s = FIRST_WAIT_S if heard else min(2 * wait_s, _LAST_WAIT_S)
            self._ended.wait(wait_s)

    def _listen(self) -> bool | None:
        """Read one connection to its end; return whether an event came, or None if there is no feed."""
        heard = False
        with self._api.events() as response:
            if not _is_followed(response):
                return None
            with self._lock:
                self._socket = response.extensions["network_stream"].get_extra_info("socket")
            try:
                if self._ended.is_set():
                    return heard
                for line in response.iter_lines():
                    if self._ended.is_set():
                        return heard
                    # The first event says that the feed has begun: before it something may have been missed.
                    if line.startswith("data:"):
                        heard = True
                        self._wake()
            finally:
                with self._lock:
                    self._socket = None
        return heard


def _is_followed(response: Any) -> bool:
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


def _time(text: Any) -> datetime | None:
    """Read a time; None for what is none, or of no time zone."""
    try:
        found = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return found if found.tzinfo is not None else None
