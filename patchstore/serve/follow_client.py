"""A client of the listener of `patchstore follow`; see `http_api`."""

from types import TracebackType
from typing import Any, Self

import httpx

from patchstore.errors import ServerUnavailable
from patchstore.serve.vllm_http import check_url, trusted
from patchstore.serve.vllm_protocol import ERRORS, one_line

_CONNECT_S = 10.0


class FollowClient:
    """Asks a `patchstore follow` for its state, and pins its servers. Calls block; use from one thread.

    Any method raises `ServerUnavailable` if the process does not answer, or something else does; and
    otherwise the error that it reports.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        """Connect lazily.

        Args:
            url: where it listens (`--listen`), such as `http://127.0.0.1:9464`.

        Raises:
            UsageError: no URL.
        """
        self.url = check_url(url)
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S))
        self._http = httpx.Client(base_url=self.url, timeout=timeout, verify=trusted())

    def state(self) -> dict[str, Any]:
        """Return the state of store and servers, healthy or not; see `health.describe`."""
        return self._call("GET", "/healthz", "servers")

    def pin(self, version: int | str, *, allow_rollback: bool = False) -> int:
        """Pin all servers to a version; returns before they serve it.

        Args:
            version: its number, or a tag of the store that it follows.
            allow_rollback: where signatures are required, also if it is older than the newest before.

        Returns:
            The number.

        Raises:
            VersionNotFound: the store lacks it; nothing changed.
            VersionRetired: the version is retired; nothing changed.
            Unsigned, WrongSignature, RollbackRefused: it is not to be used; nothing changed.
        """
        body = {"version": version} | ({"allow_rollback": True} if allow_rollback else {})
        return int(self._call("POST", "/pin", "pinned", json=body)["pinned"])

    def unpin(self) -> None:
        """Let all servers follow the newest version again."""
        self._call("POST", "/unpin", "pinned")

    def _call(self, method: str, path: str, key: str, **request: Any) -> dict[str, Any]:
        """Return an answer that has a key, or raise the error that it reports."""
        what = f"{method} {self.url}{path}"
        try:
            response = self._http.request(method, path, **request)
        except httpx.TransportError as exc:
            raise ServerUnavailable(f"{what}: {type(exc).__name__}: {exc}") from exc
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if isinstance(answer, dict) and key in answer:
            return answer
        error = answer.get("error") if isinstance(answer, dict) else None
        if isinstance(error, dict) and error.keys() >= {"kind", "message"}:
            raise ERRORS.get(error["kind"], ServerUnavailable)(f"{what}: {error['message']}")
        raise ServerUnavailable(
            f"{what} answered HTTP {response.status_code}: {one_line(response.text)!r:.100}, unlike "
            "patchstore follow; give the address of its --listen"
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
