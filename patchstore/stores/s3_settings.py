"""How a store in S3 is reached: decided once, for both clients, from options, profile and environment.

So all requests of a store take the same way, as the same user, whichever library moves the bytes. The drivers
only translate `S3Settings` into their library's terms.
"""

import asyncio
import http.client
import inspect
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import botocore.session
import s3fs
from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession
from botocore.credentials import Credentials, ReadOnlyCredentials, RefreshableCredentials
from botocore.exceptions import (
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    NoCredentialsError,
    SSOError,
    TokenRetrievalError,
)
from botocore.exceptions import (
    ConnectionError as NoConnection,
)

from patchstore.errors import UsageError
from patchstore.stores.deadline import LONGEST_S, started
from patchstore.stores.options import check_endpoint, check_known, check_texts
from patchstore.support import web

_LOG = logging.getLogger(__name__)
_CONNECT_S = 5.0
_ASKED_S = 5.0
_TEXTS = ("endpoint_url", "key", "secret", "token", "profile", "username", "password")
_MAPPINGS = {"client_kwargs", "config_kwargs", "s3_additional_kwargs"}
_DOUBTED = {
    *("ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken"),
    *("SignatureDoesNotMatch", "TokenRefreshRequired", "400", "401", "403"),
}
"""Refusals of the credentials, not of what they may do. The statuses are of answers without a code."""

_Files = list[tuple[int, int, int] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """The way to a service, and as whom."""

    options: Mapping[str, Any]
    """Those of `s3fs.S3FileSystem`, as given."""
    timeout_s: float
    """For a request with all its repetitions."""
    session: Any
    """Of aiobotocore; knows the profile."""
    credentials: "ChainedCredentials | None"
    """None if the options give them, or a session, or ask for none."""
    endpoint: str
    """The URL that botocore asks: of an option, the environment or the profile, or else AWS's."""
    is_tls: bool
    trusted: web.Authorities | None
    """These CAs and no other; None if certificates are not looked at."""
    proxy: web.Proxy | None

    @classmethod
    def of(cls, options: Mapping[str, Any], timeout_s: float) -> "S3Settings":
        """Decide it."""
        _check_options(options)
        session, credentials = _session(options)
        endpoint = _endpoint(options, session)
        proxy = web.proxy_for(endpoint)
        if proxy is not None and not proxy.url.startswith(("http:", "https:")):
            raise proxy.wrong(urlsplit(endpoint).hostname or "")
        is_tls = endpoint.startswith("https:") or (proxy is not None and proxy.url.startswith("https:"))
        return cls(
            options=options,
            timeout_s=timeout_s,
            session=session,
            credentials=credentials,
            endpoint=endpoint,
            is_tls=is_tls,
            # Without TLS no certificate is looked at, and a variable may name what is not there.
            trusted=_trusted(options, session) if is_tls else web.Authorities(certificates=frozenset()),
            proxy=proxy,
        )

    @property
    def limits(self) -> dict[str, float]:
        """Of a connection and of an answer that stalls, which leaves the time for another attempt."""
        return {"connect_timeout": min(_CONNECT_S, self.timeout_s), "read_timeout": self.timeout_s / 2}

    def advice(self, fault: web.TlsFault) -> str:
        """What to do where there was no connection with TLS."""
        ca = f"{web.CA_FILE}, or in client_kwargs={{'verify': ...}}"
        return web.tls_advice(fault, self.trusted.named if self.trusted else "", ca)

    def moved(self, bucket: str) -> str:
        """Where the endpoint sends what is asked without TLS; empty if it does not, or does not say.

        Clients follow without the signature, and report whatever that leads to.
        """
        asked = urlsplit(self.endpoint)
        if asked.scheme != "http" or self.proxy is not None:
            return ""
        connection = http.client.HTTPConnection(asked.hostname or "", asked.port, timeout=_ASKED_S)
        try:
            with closing(connection):
                connection.request("HEAD", f"{asked.path.rstrip('/')}/{bucket}")
                answer = connection.getresponse()
        except (OSError, http.client.HTTPException):
            return ""
        target = answer.getheader("Location") if 300 <= answer.status < 400 else None
        if not target or not target.startswith("https:"):
            return ""
        host = urlsplit(target).netloc.rpartition("@")[2]
        return f"{self.endpoint} sends every request to https://{host}; give that as endpoint_url"


def secrets_in(options: Mapping[str, Any]) -> Iterator[object]:
    """The values of options and environment variables that no message may contain."""
    yield from (options.get(name) for name in ("key", "secret", "token", "username", "password"))
    for name in ("client_kwargs", "s3_additional_kwargs"):
        given = options.get(name)
        for option, value in given.items() if isinstance(given, Mapping) else ():
            if "key" in str(option).lower() or "token" in str(option).lower():
                yield value
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        yield os.environ.get(name)


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that are unknown, or that could only fail at the first request."""
    # s3fs hands what it does not know to the session, which fails at the first request only.
    known = {*inspect.signature(s3fs.S3FileSystem.__init__).parameters, "profile", "client", "timeout_s"}
    known |= {"skip_instance_cache", "use_listings_cache"}
    known -= {"self", "kwargs", "asynchronous", "loop"}
    check_known("s3://", options, known)
    check_texts(options, _TEXTS)
    for name in _MAPPINGS & options.keys():
        if options[name] is not None and not isinstance(options[name], Mapping):
            raise UsageError(
                f"the option {name} must be a mapping, and is of type {type(options[name]).__name__}"
            )
    verify = (options.get("client_kwargs") or {}).get("verify")
    if verify is not None and not isinstance(verify, bool | str | os.PathLike):
        raise UsageError("client_kwargs: verify is true, false, or the path of a file of certificates")
    for name in ("connect_timeout", "read_timeout"):
        value = (options.get("config_kwargs") or {}).get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_S:
            raise UsageError(f"config_kwargs: {name} must be a number of seconds, and is {value!r}")
    if isinstance(options.get("session"), str | int | float):
        raise UsageError("the option session must be one of aiobotocore; profile= names a profile")
    for where in (options, options.get("client_kwargs") or {}):
        check_endpoint("endpoint_url", where.get("endpoint_url"))


def _session(options: Mapping[str, Any]) -> tuple[Any, "ChainedCredentials | None"]:
    """Return the session of a store, and its credentials if botocore's chain finds them."""
    if options.get("session") is not None:
        return options["session"], None
    profile = options.get("profile")
    session = AioSession(profile=profile)
    session.get_scoped_config()  # where the profile is missing, this says so
    if options.get("anon") or options.get("key") or options.get("username"):
        return session, None
    if (options.get("client_kwargs") or {}).get("aws_access_key_id"):
        return session, None
    credentials = ChainedCredentials(profile)
    session.register_component("credential_provider", credentials)
    return session, credentials


def _endpoint(options: Mapping[str, Any], session: Any) -> str:
    client = options.get("client_kwargs") or {}
    given = options.get("endpoint_url") or client.get("endpoint_url")
    if not given and not session.get_config_variable("ignore_configured_endpoint_urls"):
        profile = session.get_scoped_config()
        services = session.full_config.get("services", {}).get(profile.get("services"), {})
        configured = services.get("s3", {})
        given = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        given = given or configured.get("endpoint_url") or profile.get("endpoint_url")
    if given:
        return str(given)
    region = client.get("region_name") or session.get_config_variable("region") or "us-east-1"
    is_tls = client.get("use_ssl", options.get("use_ssl", True))
    return f"http{'s' if is_tls else ''}://s3.{region}.amazonaws.com"


def _trusted(options: Mapping[str, Any], session: Any) -> web.Authorities | None:
    """Return the CAs that are trusted, and no other; None if certificates are not looked at."""
    verify = (options.get("client_kwargs") or {}).get("verify")
    if verify is False:
        return None
    if verify not in (None, True):
        return web.authorities_at(os.fspath(verify), "verify")
    if bundle := session.get_config_variable("ca_bundle"):
        is_variable = os.environ.get("AWS_CA_BUNDLE") == bundle
        return web.authorities_at(bundle, "AWS_CA_BUNDLE" if is_variable else "the profile's ca_bundle")
    if bundle := os.environ.get("REQUESTS_CA_BUNDLE"):
        return web.authorities_at(bundle, "REQUESTS_CA_BUNDLE")
    return web.authorities()


class CredentialsError(Exception):
    """Credentials were found nowhere, or what issues them failed."""

    def __init__(self, exc: Exception, *, is_mistake: bool) -> None:
        super().__init__(f"no credentials: {_reason(exc)}")
        self.is_mistake = is_mistake
        """Whether another attempt is in vain."""


class ChainedCredentials(AioCredentials):  # type: ignore[misc]
    """Those of botocore's chain: environment, profile, SSO, web identity, container, instance.

    Requests are signed with what `frozen` returns at that moment. From several threads.
    """

    def __init__(self, profile: str | None) -> None:
        super().__init__("", "")
        self._profile = profile
        self._lock = threading.Lock()
        self._paths: list[str] = []
        self._found: Credentials | None = None
        self._files: _Files = []
        self.last: ReadOnlyCredentials | None = None
        """What `frozen` returned last."""

    async def load_credentials(self) -> "ChainedCredentials":
        """Be what a session of botocore asks for credentials."""
        return self

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        if self.is_ready():
            return self.frozen()
        # On s3fs's loop nothing may wait for a program or a service. Shielded: the thread goes on.
        return await asyncio.shield(asyncio.wrap_future(started(self.frozen)))

    def is_ready(self) -> bool:
        """Whether `frozen` returns at once."""
        found = self._found
        if found is None or self._lock.locked() or self._files != _states(self._paths):
            return False
        # Others never change.
        return not isinstance(found, RefreshableCredentials) or found.refresh_needed() is False

    def frozen(self) -> ReadOnlyCredentials:
        """Return what is valid now, or raise CredentialsError. May run a program or ask a service."""
        with self._lock:
            if self._found is None or self._files != _states(self._paths):
                self._look()
            try:
                assert self._found is not None
                self.last = self._found.get_frozen_credentials()
            except Exception as exc:
                raise self._error(exc) from exc
            return self.last

    def renewed(self, code: str, refused: ReadOnlyCredentials | None) -> bool:
        """Look for others, after these were refused with a code of S3; return whether there are."""
        if code not in _DOUBTED or refused is None:
            return False
        with self._lock:
            if self.last == refused:
                self._look()
        return bool(self.frozen() != refused)

    def _look(self) -> None:
        """Go through the chain anew, or keep what there is where that finds nothing: a file may be half
        written.
        """
        try:
            session = botocore.session.Session(profile=self._profile)
            names = (session.get_config_variable(name) for name in ("credentials_file", "config_file"))
            paths = [str(Path(name).expanduser()) for name in names]
            files = _states(paths)
            found = session.get_credentials()
            if found is None:
                raise NoCredentialsError
            found.get_frozen_credentials()
        except Exception as exc:
            if self._found is None:
                raise self._error(exc) from exc
            _LOG.warning("credentials could not be looked for again, and stay: %s", type(exc).__name__)
            return
        self._paths, self._files, self._found = paths, files, found

    def _error(self, exc: Exception) -> CredentialsError:
        passes = isinstance(exc, HTTPClientError | NoConnection) or self.last is not None
        return CredentialsError(exc, is_mistake=not passes)


def _states(paths: list[str]) -> _Files:
    """What changes when a file is written; None for one that is not there."""
    found: _Files = []
    for path in paths:
        try:
            state = os.stat(path)  # noqa: PTH116 - at every request
        except OSError:
            found.append(None)
        else:
            found.append((state.st_mtime_ns, state.st_size, state.st_ino))
    return found


def _reason(exc: Exception) -> str:
    """What failed, and what to do about it."""
    if isinstance(exc, NoCredentialsError):
        return (
            "none are in the environment, a profile or elsewhere that botocore looks; set AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, name a profile, or give the options key and secret"
        )
    if isinstance(exc, CredentialRetrievalError):
        said = str(exc.kwargs.get("error_msg")).strip().partition("\n")[0]
        if exc.kwargs.get("provider") == "custom-process":
            return f"the profile's credential_process failed: {said}"
        return f"{exc.kwargs.get('provider')} failed: {said}"
    if isinstance(exc, SSOError | TokenRetrievalError):
        return f"{exc}; log in with `aws sso login`"
    if isinstance(exc, ClientError):
        return f"the service that issues them refused: {exc}"
    if isinstance(exc, OSError):
        return f"{exc.filename or 'a file of them'} cannot be read: {exc.strerror or exc}"
    return str(exc) or type(exc).__name__
