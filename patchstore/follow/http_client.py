"""How a server is asked over HTTP: the certificates and the proxy of this machine, the headers that a gateway
wants, and why there was no answer. All clients of servers are made here, that of `patchstore follow` too.
"""

import json
import os
import re
import selectors
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import httpx

from patchstore.errors import PatchstoreError, ServerUnavailable, UsageError, of_kind
from patchstore.support import tracing, web
from patchstore.support.causes import causes_of

TOKEN = "PATCHSTORE_SERVER_TOKEN"  # noqa: S105 # nosec B105 # the name of a variable
"""The environment variable whose value is sent to servers as `Authorization: Bearer ...`."""
_CONNECT_S = 10.0
LOOK_S = 5.0
"""How long an answer is waited for before we look whether anything still listens there, and how often."""
LOOK_AGAIN_S = 1.0
"""If nothing does."""
_PORTS = range(1, 65_536)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FORBIDDEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""In a value. A tab is allowed."""
_OURS = {"connection", "content-length", "content-type", "transfer-encoding"}
"""Headers that say how a request is read."""
_LEAST_HIDDEN = 6
"""Characters; shorter values, such as a tenant's number, are in answers for other reasons."""
_NO_ANSWER = (httpx.HTTPError, OSError, ValueError, OverflowError)
"""The last two are of names and ports that the system does not take."""


class Http:
    """Asks one server. Calls block; use from one thread."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        keep_alive: bool = True,
    ) -> None:
        """Connect lazily. `url` begins the URL of each request. A user and password in it are sent, and never
        shown.

        Headers are sent with each request, and never shown. A token in `PATCHSTORE_SERVER_TOKEN` is sent too,
        unless they have `Authorization`.
        """
        parts = httpx.URL(url)
        self.name = _without_secrets(parts)
        """The URL without secrets, for messages."""
        # httpx logs the URLs that it asks.
        self._url, self._host = str(parts.copy_with(username=None, password=None)), parts.host
        self._headers = _with_token(headers)
        self._secrets = tuple(_secrets([*self._headers.values(), parts.password]))
        self._proxy = web.proxy_for(str(parts))
        self._address = parts.host, parts.port or (443 if parts.scheme == "https" else 80)
        self._client = _client(
            parts, self._proxy, timeout_s=timeout_s, headers=self._headers, keep_alive=keep_alive
        )
        if parts.userinfo:
            self._client.auth = httpx.BasicAuth(parts.username, parts.password)

    def close(self) -> None:
        self._client.close()

    def request(self, method: str, path: str = "", **request: Any) -> httpx.Response:
        """Return the server's answer, whatever its status is. In one that is an error, what was sent as a
        header is replaced. The answer of the proxy, of a gateway that wants credentials, or one that
        redirects is not the server's: ServerUnavailable.
        """
        what, headers = f"{method} {self.name}{path}", tracing.headers()
        # A proxy listens whatever has become of the server.
        watched = {} if self._proxy else {"trace": _Watch(self._address)}
        try:
            response = self._client.request(
                method, self._url + path, headers=headers, extensions=watched, **request
            )
        except _NO_ANSWER as exc:
            raise ServerUnavailable(f"{what}: {self._reason(exc)}") from exc
        if (target := response.next_request) is not None:
            raise ServerUnavailable(
                f"{what} is redirected to {self.hide(_without_secrets(target.url)):.200}, and redirects are "
                "not followed: give the URL of what answers itself"
            )
        if not (response.is_success and json_object(response) is not None):
            response = self._hidden(response)
        if (refusal := self._refusal(response)) is not None:
            raise ServerUnavailable(f"{what} {refusal}")
        return response

    def hide(self, text: str) -> str:
        """Replace what was sent as a header, as a server may repeat it."""
        for secret in self._secrets:
            text = text.replace(secret, "(hidden)")
        return text

    def _hidden(self, response: httpx.Response) -> httpx.Response:
        if not any(secret in response.text for secret in self._secrets):
            return response
        return httpx.Response(response.status_code, text=self.hide(response.text), request=response.request)

    def _reason(self, exc: Exception) -> str:
        found = f"{type(exc).__name__}: {exc}"
        fault = web.tls_fault(exc)
        if fault == "issuer":
            given = web.authorities().named
            found += (
                f"; if its certificate is of your own CA, or signed by itself, name a PEM file of that CA in "
                f"{web.CA_FILE}, which takes the place of the public CAs{given and f' (now {given})'}"
            )
        elif fault == "no-tls":
            found += "; does the server speak TLS? If not, its URL begins with http://"
        return found + (self._by_proxy() or _of_silence(exc))

    def _refusal(self, response: httpx.Response) -> str | None:
        """Why an answer is not that of the server to the request."""
        answer = json_object(response)
        said = f"answered HTTP {response.status_code}: {one_line(response.text)!r:.100}"
        if response.status_code in {401, 403} and _reported(answer) is None:
            names = ", ".join(self._headers)
            advice = (
                f"it does not accept what it was sent as {names}"
                if names
                else "it, or a gateway before it, wants credentials"
            )
            return (
                f"{said}; {advice}: give --server-header 'Authorization: ...' (in Python headers=), or a "
                f"token in the environment variable {TOKEN}{self._by_proxy() if answer is None else ''}"
            )
        if self._proxy is not None and answer is None and not response.is_success:
            return said + self._by_proxy()
        return None

    def _by_proxy(self) -> str:
        if self._proxy is None:
            return ""
        return (
            f"; the request went through the proxy {self._proxy.name}, which {self._proxy.variable} names. "
            f"If the server can be reached without it, add {self._host} to NO_PROXY"
        )


class _Watch:
    """Waits for the answer to one request, but not for a server that has closed its port meanwhile.

    vLLM whose engine has died does so, and never answers what it was asked before. It does not end either, as
    it waits for those answers itself. httpcore calls this with what it does.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._socket: socket.socket | None = None

    def __call__(self, event: str, about: Mapping[str, Any]) -> None:
        match event:
            case "connection.connect_tcp.complete" | "connection.start_tls.complete":
                self._socket = about["return_value"].get_extra_info("socket")
            case "http11.receive_response_headers.started" if self._socket is not None:
                self._wait(self._socket, about["request"].extensions["timeout"]["read"])

    def _wait(self, connection: socket.socket, timeout_s: float) -> None:
        """Return when there is something to read. Raises httpx.ReadTimeout, httpx.ReadError."""
        began, look_s, was_closed = time.monotonic(), LOOK_S, False
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            while (left_s := began + timeout_s - time.monotonic()) > 0:
                if selector.select(min(look_s, left_s)):
                    return
                is_closed = is_port_closed(self._address)
                # Twice: another process may take the port over.
                if is_closed and was_closed:
                    raise httpx.ReadError(
                        "it took the request, and closed its port without an answer: it is ending, or its "
                        "engine has died. Read its log"
                    )
                look_s, was_closed = (LOOK_AGAIN_S if is_closed else LOOK_S), is_closed
        raise httpx.ReadTimeout("timed out")


def is_port_closed(address: tuple[str, int]) -> bool:
    """Whether a host refuses connections to a port; false if it does not answer, as one that is busy."""
    try:
        socket.create_connection(address, timeout=LOOK_AGAIN_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


class FollowClient:
    """Asks a `patchstore follow` for its state, and pins its servers. Calls block; use from one thread.

    Any method raises `ServerUnavailable` if the process does not answer, or something else does; and
    otherwise the error that it reports.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 30.0, headers: Mapping[str, str] | None = None
    ) -> None:
        """Connect lazily.

        Args:
            url: where it listens (`--listen`), such as `http://127.0.0.1:9464`.
            headers: for a gateway in front of it; see `Http`.
        """
        self.url = check_url(url)
        self._http = Http(self.url, timeout_s=timeout_s, headers=headers)

    def state(self) -> dict[str, Any]:
        """Return the state of store and servers, healthy or not; see `http_api.describe`."""
        return self._call("GET", "/healthz", "servers")

    def pin(self, version: int | str, *, allow_rollback: bool = False) -> int:
        """Pin all servers to a version, and return its number; returns before they serve it.

        Args:
            version: its number, or a tag of the store that it follows.
            allow_rollback: where signatures are required, also if it is older than the newest before.

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
        except ServerUnavailable as exc:
            raise ServerUnavailable(f"{exc}; is patchstore follow --listen running there?") from exc
        answer = json_object(response) or {}
        if key in answer:
            return answer
        if (error := _reported(answer)) is not None:
            said = f"{what}: {error['message']}"
            raise error_of(error["kind"], said) or ServerUnavailable(said)
        page = one_line(self._http.hide(response.text))
        raise ServerUnavailable(
            f"{what} answered HTTP {response.status_code}: {page!r:.100}, unlike "
            "patchstore follow; give the address of its --listen"
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _of_silence(exc: Exception) -> str:
    """Why there was no answer, and what to do; empty if the error says it."""
    causes = [*causes_of(exc)]
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return "; nothing listens there: start it, wait until it is up, or correct the URL"
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return "; this host finds no address of that name: correct the URL, or ask again if it is new"
    if isinstance(exc, httpx.ConnectTimeout):
        return (
            "; the connection was not accepted: is it the right address, and does a firewall let it through?"
        )
    if isinstance(exc, httpx.ReadTimeout):
        return "; it took the request, and did not answer in time: is it busy, or does it hang? Read its log"
    return ""


def client(url: str, *, timeout_s: float) -> httpx.Client:
    """Return a client of what is no server of ours, such as a store: no header and no token is sent."""
    parts = httpx.URL(url)
    return _client(parts, web.proxy_for(url), timeout_s=timeout_s, headers={}, keep_alive=False)


def parsed_url(url: str) -> httpx.URL:
    """Read an absolute URL of HTTP."""
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as exc:
        # With a password neither of them may be shown.
        shown, reason = (f"{url!r}", f": {exc}") if "@" not in str(url) else ("what was given", "")
        raise UsageError(f"{shown} is no URL{reason}") from None
    if parts.scheme not in {"http", "https"} or not parts.host:
        raise UsageError(f"{_without_secrets(parts)!r} is no URL such as http://127.0.0.1:8000")
    if parts.port is not None and parts.port not in _PORTS:
        raise UsageError(f"{parts.host}:{parts.port} has no possible port: they go from 1 to 65535")
    return parts


def check_url(url: str) -> str:
    """Return a server's URL as it is used here, without a slash at its end."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is not the URL of a server: it begins with http:// or https://")
    parts = parsed_url(url)
    if parts.userinfo:
        # Not the URL itself: logs and metrics would show it too.
        raise UsageError(f"a server at {parts.host} is named with a user or password; leave them out")
    if parts.query or parts.fragment:
        raise UsageError(f"{url!r} is not the URL of a server: leave out what follows ? or #")
    bare = url.rstrip("/")
    if parts.path.rstrip("/") == "/v1":
        raise UsageError(f"{url!r} is vLLM's OpenAI API; name the server, {bare.removesuffix('/v1')}")
    return bare


def json_object(response: httpx.Response) -> dict[str, Any] | None:
    """Return an answer that is a JSON object; None if it is something else."""
    try:
        found = response.json()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def one_line(text: str) -> str:
    """A page of several lines, on one line."""
    return " ".join(text.split())


def error_of(kind: object, message: str) -> PatchstoreError | None:
    """Return our error of the kind that a server named; None if there is no such kind."""
    error = of_kind(kind) if isinstance(kind, str) else None
    return None if error is None else error(message)


def checked_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return headers that can be sent. No message shows a value, or what may be one."""
    found: dict[str, str] = {}
    given: Mapping[Any, Any] = headers or {}
    for name, value in given.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(
                "the name of a header for servers has letters, digits and hyphens, as in Authorization"
            )
        if name.lower() in _OURS:
            raise UsageError(f"{name} cannot be given as a header for servers: each request has its own")
        if name.lower() in map(str.lower, found):
            raise UsageError(f"the header {name} for servers is given twice")
        found[name] = _checked_value(f"the value of the header {name} for servers", value)
    return found


def _checked_value(what: str, value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not text:
        raise UsageError(f"{what} is empty, or no text")
    if _FORBIDDEN.search(text):
        raise UsageError(f"{what} has a line break, or another control character")
    try:
        text.encode("latin-1")
    except UnicodeEncodeError:
        raise UsageError(f"{what} has characters that are not Latin-1, which HTTP cannot send") from None
    return text


def _with_token(headers: Mapping[str, str] | None) -> dict[str, str]:
    """All headers to send."""
    found = checked_headers(headers)
    token = os.environ.get(TOKEN, "").strip()
    if token and "authorization" not in map(str.lower, found):
        found["Authorization"] = f"Bearer {_checked_value(f'the token in {TOKEN}', token)}"
    return found


def _without_secrets(url: httpx.URL) -> str:
    return str(url.copy_with(username=None, password=None, query=None, fragment=None))


def _secrets(values: Iterable[str]) -> Iterator[str]:
    """What must not be shown: values, what follows a word such as Bearer, and both as JSON writes them."""
    for value in values:
        for secret in (value, value.rpartition(" ")[2]):
            if len(secret) >= _LEAST_HIDDEN:
                yield from (secret, json.dumps(secret)[1:-1])


def _client(
    url: httpx.URL,
    proxy: web.Proxy | None,
    *,
    timeout_s: float,
    headers: Mapping[str, str],
    keep_alive: bool,
) -> httpx.Client:
    # With a transport of ours httpx asks the environment for nothing.
    transport = httpx.HTTPTransport(
        # Without TLS no certificate is looked at, and reading them takes longer than a call.
        verify=web.trusting(web.authorities())
        if url.scheme == "https"
        else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        limits=httpx.Limits() if keep_alive else httpx.Limits(max_keepalive_connections=0),
        proxy=None if proxy is None else _usable(proxy, url.host),
    )
    return httpx.Client(
        transport=transport,
        timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S)),
        headers=[(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
        # A redirect to another host would be sent the headers.
        follow_redirects=False,
        trust_env=False,
    )


def _usable(found: web.Proxy, host: str) -> httpx.Proxy:
    """Return a proxy as httpx takes it."""
    try:
        settings = httpx.Proxy(found.url)
        if settings.url.scheme == "https":
            trusted = web.trusting(web.authorities())
            settings = httpx.Proxy(settings.url, auth=settings.auth, ssl_context=trusted)
        if settings.url.scheme.startswith("socks"):
            httpx.HTTPTransport(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), proxy=settings).close()
    except ImportError as exc:
        raise UsageError(
            f"{found.variable} names a SOCKS proxy, for which a package is missing: pip install "
            f"'httpx[socks]'; or add {host} to NO_PROXY"
        ) from exc
    except (httpx.InvalidURL, ValueError):
        raise found.wrong(host) from None
    return settings


def _reported(answer: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The error in an answer of `patchstore follow`, which says itself what to do; None if it is none."""
    error = (answer or {}).get("error")
    return error if isinstance(error, dict) and error.keys() >= {"kind", "message"} else None
