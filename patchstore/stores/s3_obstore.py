"""The requests that `S3Store` makes of one bucket, through obstore: native threads, without Python's lock.

s3fs stays beside it. It finds the endpoint and the credentials, from everything that botocore reads, so both
clients reach the same bucket as the same user. s3fs also lists, because obstore's prefix is a folder, and a
store's is a string.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import botocore.session
import obstore
from botocore.exceptions import BotoCoreError, NoCredentialsError
from fsspec.asyn import sync
from obstore.exceptions import (
    AlreadyExistsError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from patchstore.errors import UsageError
from patchstore.stores.base import NUM_PARTS, PART_BYTES
from patchstore.stores.deadline import Deadline, Overdue, allowance, ended, started
from patchstore.stores.s3_client import NotS3, S3fsClient

if TYPE_CHECKING:
    from obstore import GetOptions, PutMode
    from obstore.store import ClientConfig, S3Config, S3Credential

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
_CREDENTIALS_S = 600
"""How long credentials count as fresh; obstore asks for new ones in the last 5 minutes of that."""
_MAX_PARTS = 10_000
_AWS = re.compile(r"s3(\.[a-z0-9-]+)?\.amazonaws\.com(\.cn)?")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_REASON = re.compile(r'(?:message|error): "([^"]+)"')
_STATUS = re.compile(r"status code: (\d{3})")


class ObstoreClient(S3fsClient):
    """The same bucket, as the same user; bytes and small requests go through obstore."""

    name = "obstore"

    def __init__(self, fs: Any, bucket: str, timeout_s: float) -> None:
        super().__init__(fs, bucket, timeout_s)
        self._opened: S3Store | None = None

    def get(self, key: str, start: int, end: int | None, deadline: Deadline) -> bytes:
        store = self._store(deadline)

        def body() -> bytes:
            if end is not None:
                return obstore.get_range(store, key, start=start, end=end).to_bytes()
            options: GetOptions | None = {"range": {"offset": start}} if start else None
            found = obstore.get(store, key, options=options)
            if found.meta["e_tag"] is None:
                raise NotS3("get_object")
            return found.bytes().to_bytes()

        return deadline.run(body)

    def size(self, key: str, deadline: Deadline) -> int:
        store = self._store(deadline)
        found = deadline.run(lambda: obstore.head(store, key))
        if found["e_tag"] is None:
            raise NotS3("head_object")
        return int(found["size"])

    def put(self, key: str, data: bytes, deadline: Deadline, *, create: bool) -> None:
        store, mode = self._store(deadline), "create" if create else "overwrite"
        answer = deadline.run(
            lambda: obstore.put(store, key, data, mode=cast("PutMode", mode), use_multipart=False)
        )
        if answer["e_tag"] is None:
            raise NotS3("put_object")

    def delete(self, key: str, deadline: Deadline) -> None:
        store = self._store(deadline)
        deadline.run(lambda: obstore.delete(store, key))

    def send(self, key: str, parts: Iterable[bytearray]) -> None:
        """Store an object from parts; visible at the end or not at all, and aborted after an error.

        obstore asks for the next part when one has arrived, which is how its progress is seen.

        Raises:
            UsageError: more than 78 GiB; s3fs could send that, because its parts grow.
        """
        store, limit_s = self._store(Deadline(self._timeout_s)), allowance(self._timeout_s, PART_BYTES)
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

    def code(self, exc: BaseException) -> str:
        # obstore has the answer in its text only; a HEAD's has no body, so no word either.
        found = _CODE.search(str(exc)) or _STATUS.search(str(exc))
        return found[1] if found else super().code(exc)

    def is_taken(self, exc: BaseException) -> bool:
        return isinstance(exc, AlreadyExistsError)

    def is_mistake(self, exc: BaseException) -> bool:
        # Without an answer of S3's it was our own attempt at fresh credentials that failed.
        refused = isinstance(exc, (PermissionDeniedError, UnauthenticatedError)) and bool(self.code(exc))
        return refused or super().is_mistake(exc)

    def message(self, exc: BaseException) -> str:
        said, _, source = super().message(exc).partition("\n\nDebug source")
        # Why a connection failed is only there, innermost and so last.
        reasons = _REASON.findall(source)
        return f"{said}: {reasons[-1]}" if reasons else said

    def _store(self, deadline: Deadline) -> S3Store:
        # Two threads may both open it, which costs a request.
        if self._opened is None:
            self._opened = self._open(deadline)
        return self._opened

    def _open(self, deadline: Deadline) -> S3Store:
        """The bucket for obstore. It gets every setting, or it would read its own environment variables."""
        meta = self._within(deadline, self.fs.set_session).meta
        region = self._region(meta, deadline)
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
        # Either way the server checks what it stores: by the signature, or, where TLS already keeps others
        # out and botocore's default holds, by a checksum, which is cheaper than SHA-256.
        if is_secret and meta.config.request_checksum_calculation == "when_supported":
            config |= {"unsigned_payload": True, "checksum_algorithm": "CRC64NVME"}
        retries = meta.config.retries or {}
        return S3Store(
            self._bucket,
            config=config,
            client_options=self._client_options(meta.config, allow_http=not is_secret),
            retry_config={
                "max_retries": max(0, retries.get("total_max_attempts", 5) - 1),
                # So that an abandoned request ends soon: no attempt begins after this.
                "retry_timeout": timedelta(seconds=self._timeout_s),
            },
            credential_provider=None if self.fs.anon else self._credentials(deadline),
        )

    def _client_options(self, config: Any, *, allow_http: bool) -> "ClientConfig":
        options: ClientConfig = {
            "allow_http": allow_http,
            "connect_timeout": timedelta(seconds=config.connect_timeout),
            "read_timeout": timedelta(seconds=config.read_timeout),
            "timeout": timedelta(seconds=allowance(self._timeout_s, PART_BYTES)),
        }
        verify = self.fs.client_kwargs.get("verify")
        if verify is None:
            verify = self.fs.session.get_config_variable("ca_bundle")
        if isinstance(verify, str):
            options["root_certificate"] = Path(verify).read_bytes()
        elif verify is False:
            options["allow_invalid_certificates"] = True
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

    def _credentials(self, deadline: Deadline) -> Any:
        """Return credentials to obstore: those of s3fs, which botocore renews if they expire.

        Raises:
            NoCredentialsError: botocore finds none anywhere.
        """
        fs = self.fs
        if fs.key:
            given: S3Credential = {
                "access_key_id": fs.key,
                "secret_access_key": fs.secret,
                "token": fs.token,
                "expires_at": None,
            }
            return lambda: given

        async def fresh() -> "S3Credential":
            found = await fs.session.get_credentials()
            if found is None:
                raise NoCredentialsError
            frozen = await found.get_frozen_credentials()
            return {
                "access_key_id": frozen.access_key,
                "secret_access_key": frozen.secret_key,
                "token": frozen.token,
                "expires_at": datetime.now(UTC) + timedelta(seconds=_CREDENTIALS_S),
            }

        def credentials() -> "S3Credential":
            return cast("S3Credential", sync(fs.loop, fresh, timeout=self._timeout_s))

        self._within(deadline, fresh)  # now, when what is wrong is still botocore's own error
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
        """Return whether a part is wanted.

        Raises:
            Overdue: it is not known in time, so no part arrived.
        """
        try:
            return self.asking.get(timeout=limit_s)
        except Empty:
            raise Overdue(limit_s) from None


def unmet(fs: Any, bucket: str) -> list[str]:
    """Name the options and settings of a file system that obstore has no equivalent for."""
    found = _unmet(fs.storage_options)
    if ":" in bucket or bucket.endswith("--x-s3"):
        found.append(f"bucket {bucket}")
    try:
        session = fs.session or botocore.session.Session(profile=fs.storage_options.get("profile"))
        settings = session.get_scoped_config().get("s3") or {}
        found += [f"{name} of the profile" for name in settings if name.startswith("use_")]
        found += [name for name in _ELSEWHERE if session.get_config_variable(name)]
    except BotoCoreError:
        # No such profile, say: the first request says so.
        return found
    return found


def place(endpoint_url: str, bucket: str, *, region: str, style: str) -> tuple[str, bool]:
    """Return a bucket's endpoint for obstore, and whether the bucket is part of the host's name.

    >>> place("https://s3.amazonaws.com", "bucket", region="eu-west-1", style="auto")
    ('https://bucket.s3.eu-west-1.amazonaws.com', True)
    >>> place("https://s3.amazonaws.com", "my.bucket", region="eu-west-1", style="auto")
    ('https://s3.eu-west-1.amazonaws.com', False)
    >>> place("http://127.0.0.1:9000", "bucket", region="us-east-1", style="auto")
    ('http://127.0.0.1:9000', False)
    >>> place("https://objects.example/", "bucket", region="us-east-1", style="virtual")
    ('https://bucket.objects.example', True)
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


def _unmet(options: Mapping[str, Any], where: str = "") -> list[str]:
    found: list[str] = []
    for option, value in options.items():
        name = f"{where}.{option}" if where else option
        if option not in _HONOURED[where]:
            # What is off is as if not given.
            found += [name] if value not in (None, False) else []
        elif name in _HONOURED:
            found += _unmet(value or {}, name)
    return found


def _few_enough(parts: Iterable[bytearray]) -> Iterator[bytearray]:
    num_bytes = 0
    for part in parts:
        num_bytes += len(part)
        if num_bytes > _MAX_PARTS * PART_BYTES:
            limit = _MAX_PARTS * PART_BYTES >> 30
            raise UsageError(
                f"obstore stores objects of up to {limit} GiB; open the store with client='s3fs'"
            )
        yield part
