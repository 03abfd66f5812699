"""The requests that `S3Store` makes of one bucket, through obstore: native threads, without Python's lock.

s3fs stays beside it. It finds the endpoint and the credentials, from everything that botocore reads, so both
clients reach the same bucket as the same user. s3fs also lists, because obstore's prefix is a folder, and a
store's is a string.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError
from obstore.store import S3Store

from patchstore.errors import UsageError
from patchstore.stores.base import NUM_PARTS, PART_BYTES
from patchstore.stores.deadline import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Deadline,
    Overdue,
    allowance,
    ended,
    started,
)
from patchstore.stores.s3_s3fs import Failure, NotS3, S3fsClient
from patchstore.stores.s3_settings import S3Settings
from patchstore.support import web

if TYPE_CHECKING:
    from obstore import GetOptions, PutMode
    from obstore.store import ClientConfig, S3Config, S3Credential

_Result = TypeVar("_Result")
_HONOURED: Mapping[str, set[str]] = {
    "": {
        *("anon", "client_kwargs", "config_kwargs", "endpoint_url", "key", "password", "profile", "secret"),
        *("session", "skip_instance_cache", "token", "use_ssl", "username"),
    },
    "client_kwargs": {"endpoint_url", "region_name", "use_ssl", "verify"},
    "config_kwargs": {
        *("connect_timeout", "max_pool_connections", "read_timeout", "region_name"),
        *("request_checksum_calculation", "response_checksum_validation", "retries", "s3"),
    },
    "config_kwargs.retries": {"max_attempts", "mode", "total_max_attempts"},
    "config_kwargs.s3": {"addressing_style"},
}
"""Options of s3fs that have an equivalent, by where they are."""
_ELSEWHERE = ("use_dualstack_endpoint", "use_fips_endpoint")
"""Settings of a profile or the environment that have none."""
_CREDENTIALS_AGE = timedelta(minutes=5, seconds=10)
"""How long credentials count as fresh in a long upload; obstore asks for new ones in its last 5 minutes."""
MAX_PARTS = 10_000
_NO_NUMBER = 10_000
"""More attempts than fit into any time."""
_AWS = re.compile(r"s3(\.[a-z0-9-]+)?\.amazonaws\.com(\.cn)?")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_REASON = re.compile(r'(?:message|error): "([^"]+)"')
_STATUS = re.compile(r"status code: (\d{3})")
_STALLED = re.compile(r"\bTimedOut\b")
_TLS = re.compile(r"InvalidCertificate\(\s*(\w+)|(InvalidMessage|AlertReceived|InvalidContentType)\b")
_TLS_FAULTS: Mapping[str, web.TlsFault] = {
    **dict.fromkeys(("Expired", "ExpiredContext", "NotValidYet", "NotValidYetContext"), "expired"),
    **dict.fromkeys(("NotValidForName", "NotValidForNameContext"), "name"),
    **dict.fromkeys(("InvalidMessage", "AlertReceived", "InvalidContentType"), "no-tls"),
}
"""By rustls's words; its others about a certificate are of who signed it."""
_NOWHERE = "http://127.0.0.1:1"
_EVERY_HOST = "*,0.0.0.0/0,::/0"
_used_in: list[int] = []
"""The process in which obstore was first used. It keeps threads, which a fork does not copy."""


class ObstoreClient(S3fsClient):
    """The same bucket, as the same user; bytes and small requests go through obstore."""

    name = "obstore"
    checksum: Mapping[str, str] = {"ChecksumCRC64NVME": "p3fhuLX90xs="}

    def __init__(self, fs: Any, bucket: str, settings: S3Settings) -> None:
        super().__init__(fs, bucket, settings)
        self._opened: dict[int, tuple[S3Store, object]] = {}
        """By how often obstore itself repeats a request; and the credentials with which each was opened."""
        self._region_name = ""

    def get(self, key: str, start: int, end: int | None, deadline: Deadline) -> bytes:
        def body(store: S3Store) -> bytes:
            if end is not None:
                return obstore.get_range(store, key, start=start, end=end).to_bytes()
            options: GetOptions | None = {"range": {"offset": start}} if start else None
            found = obstore.get(store, key, options=options)
            if found.meta["e_tag"] is None:
                raise NotS3("get_object")
            return found.bytes().to_bytes()

        return self._run(deadline, body)

    def size(self, key: str, deadline: Deadline) -> int:
        found = self._run(deadline, lambda store: obstore.head(store, key))
        if found["e_tag"] is None:
            raise NotS3("head_object")
        return int(found["size"])

    def put(self, key: str, data: bytes, deadline: Deadline, *, create: bool) -> None:
        mode = cast("PutMode", "create" if create else "overwrite")
        answer = self._run(
            deadline, lambda store: obstore.put(store, key, data, mode=mode, use_multipart=False)
        )
        if answer["e_tag"] is None:
            raise NotS3("put_object")

    def delete(self, key: str, deadline: Deadline) -> None:
        self._run(deadline, lambda store: obstore.delete(store, key))

    def send(self, key: str, parts: Iterable[bytearray]) -> None:
        """Store an object from parts; visible at the end or not at all, and aborted after an error.

        obstore asks for the next part when one has arrived, which is how its progress is seen. More than
        78 GiB are refused; s3fs could send that, because its parts grow.
        """
        if not self._service.has_answered:
            self._ask_first(key)
        # These requests cannot be repeated from here, so obstore does that, until the same time.
        store = self._store(Deadline(self._timeout_s), _NO_NUMBER)
        limit_s = allowance(self._timeout_s, PART_BYTES)
        feed = _Feed()
        sending = started(
            lambda: obstore.put(
                store,
                key,
                feed.asked_for(),
                use_multipart=True,
                chunk_size=PART_BYTES,
                # One more is collected while these travel.
                max_concurrency=NUM_PARTS - 1,
            )
        )
        sending.add_done_callback(lambda _: feed.asking.put(False))
        try:
            remaining = _few_enough(parts)
            # Without a wish for more obstore has ended early, so it failed.
            while feed.wait(limit_s):
                part = next(remaining, None)
                feed.given.put(part)
                if part is None:
                    break
                del part  # obstore has it, and what it has sent is to be freed
            # The last parts, and then the completion.
            if not ended(sending, 2 * limit_s):
                raise Overdue(limit_s)
        except BaseException as exc:
            # What obstore's iterator raises has it abort the upload.
            feed.given.put(exc)
            ended(sending, self._timeout_s)
            raise
        sending.result()

    def _ask_first(self, key: str) -> None:
        """Fail as a small request does where nothing answers: obstore would repeat an upload all the time."""
        try:
            self.size(key, Deadline(self._timeout_s))
        except Exception:
            if not self._service.has_answered:
                raise

    def failure(self, exc: BaseException) -> Failure:
        # What it does not find is of Python's class; s3fs's error of that class has a cause.
        is_missing = isinstance(exc, FileNotFoundError) and exc.__cause__ is None
        if not is_missing and not isinstance(exc, BaseError):
            return super().failure(exc)
        # obstore has the answer in its text only; a HEAD's has no body, so no word either.
        said = str(exc)
        status, tls = _STATUS.search(said), _TLS.search(said)
        code = _CODE.search(said) or status
        # Why a connection failed is only in the source, innermost and so last.
        said, _, source = said.partition("\n\nDebug source")
        reasons = _REASON.findall(source)
        return Failure(
            code=code[1] if code else "",
            status=int(status[1]) if status else None,
            text=f"{said}: {reasons[-1]}" if reasons else said,
            is_taken=isinstance(exc, AlreadyExistsError),
            is_lost=isinstance(exc, GenericError),
            tls_fault=_TLS_FAULTS.get(tls[1] or tls[2], "issuer") if tls else None,
        )

    def _run(self, deadline: Deadline, ask: Callable[[S3Store], _Result]) -> _Result:
        """Make a request, with a store that has the present credentials."""

        def once() -> _Result:
            store = self._store(deadline)
            try:
                return deadline.run(lambda: ask(store))
            except GenericError as exc:
                if _STALLED.search(str(exc)):
                    raise Overdue(deadline.limit_s) from exc
                raise

        return self._repeated(deadline, once)

    def _store(self, deadline: Deadline, max_retries: int = 0) -> S3Store:
        now = None
        if (chained := self._chained) is not None:
            # Here, where what fails is not yet an error of obstore's.
            now = chained.frozen() if chained.is_ready() else deadline.run(chained.frozen)
        opened, of = self._opened.get(max_retries, (None, None))
        if opened is None or of != now:
            # Two threads may both open it, which costs a request.
            opened = self._open(deadline, max_retries)
            self._opened[max_retries] = opened, now
        return opened

    def _open(self, deadline: Deadline, max_retries: int) -> S3Store:
        """The bucket for obstore. It gets every setting, or it would read its own environment variables."""
        meta = self._within(deadline, self.fs.set_session).meta
        region = self._region_name = self._region_name or self._region(meta, deadline)
        style = (meta.config.s3 or {}).get("addressing_style") or "auto"
        endpoint, is_virtual = place(meta.endpoint_url, self._bucket, region=region, style=style)
        is_secret = endpoint.startswith("https:")
        config: S3Config = {
            "aws_endpoint_url_s3": endpoint,
            "virtual_hosted_style_request": is_virtual,
            "region": region,
            "skip_signature": bool(self.fs.anon),
            "disable_bulk_delete": True,
            "unsigned_payload": False,
        }
        # The server checks what it stores by a checksum, as botocore's default is: many do not compare the
        # bytes with the signature. Where TLS keeps others out the bytes need no signature: it costs SHA-256.
        if meta.config.request_checksum_calculation == "when_supported":
            config |= {"unsigned_payload": is_secret, "checksum_algorithm": "CRC64NVME"}
        _used_in[:] = _used_in or [os.getpid()]
        return S3Store(
            self._bucket,
            config=config,
            client_options=self._client_options(meta.config, allow_http=not is_secret),
            retry_config={
                "max_retries": max_retries,
                "backoff": {
                    "init_backoff": timedelta(seconds=FIRST_PAUSE_S),
                    "max_backoff": timedelta(seconds=LONGEST_PAUSE_S),
                },
                # So that an abandoned request ends soon: no attempt begins after this.
                "retry_timeout": timedelta(seconds=self._timeout_s),
            },
            credential_provider=None if self.fs.anon else self._provider(deadline),
        )

    def _client_options(self, config: Any, *, allow_http: bool) -> "ClientConfig":
        options: ClientConfig = {
            "allow_http": allow_http,
            "connect_timeout": timedelta(seconds=config.connect_timeout),
            "read_timeout": timedelta(seconds=config.read_timeout),
            "timeout": timedelta(seconds=allowance(self._timeout_s, PART_BYTES)),
        }
        trusted, proxy = self._settings.trusted, self._settings.proxy
        if trusted is None:
            options["allow_invalid_certificates"] = True
        elif not allow_http:
            options["root_certificate"] = trusted.pem
        if proxy is None:
            # Without one obstore would ask the environment, by a rule of its own.
            options |= {"proxy_url": _NOWHERE, "proxy_excludes": _EVERY_HOST}
        else:
            options["proxy_url"] = proxy.url
            if trusted is not None and proxy.url.startswith("https:"):
                options["proxy_ca_certificate"] = trusted.pem
        return options

    def _region(self, meta: Any, deadline: Deadline) -> str:
        """The bucket's own region; AWS redirects requests to another region, and only s3fs follows that."""
        region = str(meta.region_name or "us-east-1")
        if not _AWS.fullmatch(urlsplit(meta.endpoint_url).netloc):
            return region
        try:
            answer = self.call("head_bucket", deadline)
        except Exception as exc:
            # A refusal says where the bucket is, too.
            answer = getattr(exc.__cause__, "response", None)
            if answer is None:
                raise
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        return str(headers.get("x-amz-bucket-region", region))

    def _provider(self, deadline: Deadline) -> Any:
        """Return credentials to obstore: those of s3fs, which botocore renews if they expire."""
        fs, chained = self.fs, self._chained
        if chained is None:
            given: S3Credential = {
                "access_key_id": fs.key,
                "secret_access_key": fs.secret,
                "token": fs.token,
                "expires_at": None,
            }
            return lambda: given

        def credentials() -> "S3Credential":
            frozen = chained.frozen()
            return {
                "access_key_id": frozen.access_key,
                "secret_access_key": frozen.secret_key,
                "token": frozen.token,
                "expires_at": datetime.now(UTC) + _CREDENTIALS_AGE,
            }

        deadline.run(credentials)  # now, when what is wrong is still an error of Python's
        return credentials


class _Feed:
    """Hands parts to obstore's thread one by one, each when it is asked for, from the caller's thread."""

    def __init__(self) -> None:
        self.asking: SimpleQueue[bool] = SimpleQueue()
        """True when a part is wanted, and False when no more will be."""
        self.given: SimpleQueue[bytearray | BaseException | None] = SimpleQueue()

    def asked_for(self) -> Iterator[bytearray]:
        while True:
            self.asking.put(True)
            part = self.given.get()
            if part is None:
                return
            if isinstance(part, BaseException):
                raise part
            yield part

    def wait(self, limit_s: float) -> bool:
        """Return whether a part is wanted; raise Overdue if that is not known in time, so no part arrived."""
        try:
            return self.asking.get(timeout=limit_s)
        except Empty:
            raise Overdue(limit_s) from None


def obstacle(settings: S3Settings, bucket: str) -> str:
    """Why obstore cannot be used here for a store; empty where it can."""
    if _used_in not in ([], [os.getpid()]):
        return (
            f"process {_used_in[0]} used obstore before this one was forked from it, which does not copy "
            "obstore's threads; start processes by spawn or forkserver, or before the first use of a store, "
            "or give client='s3fs' here"
        )
    if missing := _unmet(settings, bucket):
        return f"obstore has no equivalent of {', '.join(missing)}; leave that out, or use client='s3fs'"
    return ""


def _unmet(settings: S3Settings, bucket: str) -> list[str]:
    """Name the options and settings that obstore has no equivalent for."""
    found = _without_equivalent(settings.options)
    if settings.credentials is None and not any(
        settings.options.get(each) for each in ("anon", "key", "username")
    ):
        found.append("session without key")
    if ":" in bucket or bucket.endswith("--x-s3"):
        found.append(f"bucket {bucket}")
    profile = settings.session.get_scoped_config().get("s3") or {}
    found += [f"{name} of the profile" for name in profile if name.startswith("use_")]
    found += [name for name in _ELSEWHERE if settings.session.get_config_variable(name)]
    trusted = settings.trusted
    if trusted is not None and trusted.named:
        native = web.native_authorities()
        # It trusts those in any case, and others only beside them.
        if native is None or not native <= trusted.certificates:
            found.append(f"{trusted.named} alone, beside which obstore trusts the CAs of this system")
    return found


def _without_equivalent(options: Mapping[str, Any], where: str = "") -> list[str]:
    found: list[str] = []
    for option, value in options.items():
        name = f"{where}.{option}" if where else option
        if option not in _HONOURED[where]:
            # What is off is as if not given.
            found += [name] if value not in (None, False) else []
        elif name in _HONOURED:
            found += _without_equivalent(value or {}, name)
    return found


def place(endpoint_url: str, bucket: str, *, region: str, style: str) -> tuple[str, bool]:
    """Return a bucket's endpoint for obstore, and whether the bucket is part of the host's name.

    >>> place("https://s3.amazonaws.com", "bucket", region="eu-west-1", style="auto")
    ('https://bucket.s3.eu-west-1.amazonaws.com', True)
    """
    parts = urlsplit(endpoint_url.rstrip("/"))
    host = parts.netloc
    if aws := _AWS.fullmatch(host):
        host = f"s3.{region}.amazonaws.com{aws[2] or ''}"
    # As botocore decides: a dot in a bucket's name is none of a wildcard certificate's.
    is_virtual = style == "virtual" or (style == "auto" and aws is not None and "." not in bucket)
    return (
        f"{parts.scheme}://{bucket}.{host}{parts.path}"
        if is_virtual
        else f"{parts.scheme}://{host}{parts.path}",
        is_virtual,
    )


def _few_enough(parts: Iterable[bytearray]) -> Iterator[bytearray]:
    num_bytes = 0
    for part in parts:
        num_bytes += len(part)
        if num_bytes > MAX_PARTS * PART_BYTES:
            limit = MAX_PARTS * PART_BYTES >> 30
            raise UsageError(
                f"obstore stores objects of up to {limit} GiB; open the store with client='s3fs'"
            )
        yield part
