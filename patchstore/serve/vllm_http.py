"""Calls to a vLLM server over HTTP: each returns an answer or raises one of our errors."""

import ssl
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import httpx

from patchstore.errors import ServerUnavailable, UsageError
from patchstore.serve.vllm_protocol import refusal

_CONNECT_S = 10.0


class Connection:
    """A connection to one server. Calls block; use from one thread."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Connect lazily.

        Raises:
            UsageError: no URL of a server.
        """
        self.url = check_url(url)
        self.timeout_s = timeout_s
        self.num_failures = 0
        """Calls without an answer, or with an error other than a missing route. After one of them another
        process may be at the same address."""
        # vLLM closes a connection after it answered with an error and does not say so; a call on a kept one
        # would then fail although the server is well.
        fresh = httpx.Limits(max_keepalive_connections=0)
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S))
        self._http = httpx.Client(base_url=self.url, timeout=timeout, limits=fresh, verify=trusted())

    def close(self) -> None:
        self._http.close()

    def request(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Return the answer, whatever its status is.

        Raises:
            ServerUnavailable: there was none.
        """
        try:
            response = self._http.request(method, path, **request)
        except httpx.TransportError as exc:
            self.num_failures += 1
            raise ServerUnavailable(f"{method} {self.url}{path}: {type(exc).__name__}: {exc}") from exc
        if not (response.is_success or response.status_code == httpx.codes.NOT_FOUND):
            self.num_failures += 1
        return response

    def call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        """Return the JSON object of a successful answer.

        Raises:
            ServerUnavailable: there was none, or it is not vLLM's.
            PatchstoreError: the error whose kind the server names.
        """
        response = self.request(method, path, **request)
        if not response.is_success:
            raise refusal(f"{method} {self.url}{path}", response)
        if not response.content:
            return {}
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ServerUnavailable(
                f"{method} {self.url}{path} answered {response.text!r:.100}, unlike vLLM; check the URL"
            )
        return answer

    def post(self, path: str, body: Mapping[str, Any], **query: str) -> dict[str, Any]:
        return self.call("POST", path, json=body, params=query)

    def collective(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all ranks, and return the answers of one engine's ranks."""
        results = self._results(method, args)
        if (refused := _refusal_among(results)) is not None:
            raise ServerUnavailable(f"{self.url} answered {method}: {refused}")
        return results

    def declined(self, method: str, *args: Any) -> str | None:
        """As `collective`, for methods that do something in an engine core, which answers with `{}`.

        Returns:
            Why it did nothing, or None. Of several data-parallel engines it is the answer of the first.

        Raises:
            ServerUnavailable: another answer, so that it is not known what was done.
        """
        results = self._results(method, args)
        if (refused := _refusal_among(results)) is None and results != [{}]:
            raise _unlike(self.url, method, results)
        return refused

    def _results(self, method: str, args: Sequence[Any]) -> list[Any]:
        return list(self.post("/collective_rpc", {"method": method, "args": list(args)})["results"])

    def every_rank(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """As `collective`, for methods that answer with an object."""
        results = self.collective(method, *args)
        if not results or not all(isinstance(result, dict) for result in results):
            raise _unlike(self.url, method, results)
        return results


def _unlike(url: str, method: str, results: Sequence[Any]) -> ServerUnavailable:
    return ServerUnavailable(f"{url} answered {method} with {results!r:.200}; restart the server")


def _refusal_among(results: Sequence[Any]) -> str | None:
    """Return why ranks did not do what was asked. They must not raise, so one answers with this instead."""
    for result in results:
        if isinstance(result, dict) and result.keys() == {"error"}:
            return str(result["error"])
    return None


@cache
def trusted() -> ssl.SSLContext:
    """The machine's certificates; reading them takes longer than a call, so all clients share them."""
    return httpx.create_ssl_context()


def check_url(url: str) -> str:
    """Return a server's URL as it is used here, without a slash at its end.

    Raises:
        UsageError: it is none.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is not the URL of a server: it begins with http:// or https://")
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as exc:
        raise UsageError(f"{url!r} is not the URL of a server: {exc}") from exc
    if not parts.host:
        raise UsageError(f"{url!r} is not the URL of a server: it names no host")
    if parts.userinfo:
        # Not the URL itself: logs and metrics would show it too.
        raise UsageError(f"a server at {parts.host} is named with a user or password; leave them out")
    if parts.query or parts.fragment:
        raise UsageError(f"{url!r} is not the URL of a server: leave out what follows ? or #")
    bare = url.rstrip("/")
    if parts.path.rstrip("/") == "/v1":
        raise UsageError(f"{url!r} is vLLM's OpenAI API; name the server, {bare.removesuffix('/v1')}")
    return bare
