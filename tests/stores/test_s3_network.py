"""Certificates and proxies: one rule for both clients, and for each request that a store makes."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import certifi
import pytest

from patchstore.errors import PatchstoreError, StoreUnavailable, UsageError
from patchstore.stores import open_store
from patchstore.stores.base import Store
from patchstore.stores.s3_s3fs import LOOKS_AT_HOSTS
from patchstore.support import web
from tests.stores.asks import OPERATIONS
from tests.stores.bad_servers import saying, serving
from tests.stores.lost_answers import Answer, Place, answering
from tests.support.gateway import certified, tunnel

pytestmark = pytest.mark.usefixtures("no_identity")

ASKS = {"create": lambda store: store.put("a", b"x", if_absent=True), **OPERATIONS}
UNKNOWN, EXPIRED, MISNAMED = "not signed by a CA that is trusted", "has expired", "is for another host"
_VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")


class Servers(NamedTuple):
    """URLs of S3 with certificates of one CA."""

    right: str
    expired: str
    misnamed: str
    ca: Path
    expired_ca: Path
    misnamed_ca: Path


@pytest.fixture(scope="module")
def servers(s3_options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        urls, cas = [], []
        for more in ({}, {"ended": True}, {"address": "192.0.2.1"}):
            tls, ca = certified(tmp_path_factory.mktemp("ca"), **more)  # type: ignore[arg-type]
            urls.append(stack.enter_context(tunnel(s3_options["endpoint_url"], tls)))
            cas.append(ca)
        yield Servers(*urls, *cas)


@pytest.fixture
def at(s3: Place) -> Iterator[Callable[..., Store]]:
    """Opens a store behind an endpoint."""
    with ExitStack() as stack:

        def open_(endpoint: str, verify: object = None, **more: Any) -> Store:
            region = {"region_name": "us-east-1"} | ({} if verify is None else {"verify": verify})
            return stack.enter_context(s3.opened(endpoint_url=endpoint, client_kwargs=region, **more))

        yield open_


def complaints(store: Store) -> set[str]:
    """What each request says that fails, without what names it."""
    found = set()
    for ask in ASKS.values():
        try:
            ask(store)
        except StoreUnavailable as exc:
            found.add(str(exc).rpartition("; the server's certificate")[2])
        else:
            found.add("")
    return found


def hashed(folder: Path, ca: Path) -> Path:
    """A folder with a CA, under the name that OpenSSL looks for."""
    command = ["openssl", "x509", "-hash", "-noout", "-in", str(ca)]
    name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    folder.mkdir()
    (folder / f"{name}.0").write_bytes(ca.read_bytes())
    return folder


# What is trusted


@pytest.mark.parametrize("given", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_cas_of_the_environment_are_trusted_alone_and_by_both_clients(
    at: Callable[..., Store],
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: str,
) -> None:
    of = {"SSL_CERT_FILE": lambda ca, _: ca, "SSL_CERT_DIR": lambda ca, name: hashed(tmp_path / name, ca)}
    monkeypatch.setenv(given, str(of[given](servers.ca, "right")))
    assert complaints(at(servers.right)) == {""}
    monkeypatch.setenv(given, str(of[given](servers.misnamed_ca, "other")))
    (said,) = complaints(at(servers.right))
    assert UNKNOWN in said
    assert f"{given}={os.environ[given]}" in said


@pytest.mark.parametrize("given", ["verify", "folder", "AWS_CA_BUNDLE", "ca_bundle", "REQUESTS_CA_BUNDLE"])
@pytest.mark.parametrize("is_right", [True, False])
def test_cas_that_are_named_for_s3_are_trusted_alone_or_the_client_is_refused(
    at: Callable[..., Store],
    servers: Servers,
    client: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: str,
    is_right: bool,
) -> None:
    ca = servers.ca if is_right else servers.misnamed_ca
    verify, session = None, {}
    if given in {"verify", "folder"}:
        verify = str(ca) if given == "verify" else hashed(tmp_path / "cas", ca)
    elif given == "ca_bundle":
        (tmp_path / "config").write_text(f"[default]\nca_bundle = {ca}\n")
        session = {"session": None}  # the one of all tests has read its files
    else:
        monkeypatch.setenv(given, str(ca))
    if client == "obstore":
        # It would trust the system's too.
        with pytest.raises(UsageError, match=r"alone, beside which obstore trusts .*client='s3fs'"):
            at(servers.right, verify, **session)
        monkeypatch.setenv("SSL_CERT_FILE", str(servers.expired_ca))
        with pytest.raises(UsageError, match="alone"):
            at(servers.right, verify, **session)
        monkeypatch.setenv("SSL_CERT_FILE", str(ca))
    (said,) = complaints(at(servers.right, verify, **session))
    if is_right:
        assert said == ""
    else:
        assert UNKNOWN in said
        assert f"{'verify' if given == 'folder' else given}={verify or ca}" in said


def test_without_a_word_obstore_is_left_where_it_would_trust_more(
    s3_url: str, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'obstore>=0.12'")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(servers.ca))
    keys = {"key": "test", "secret": "test"}
    assert open_store(s3_url, **keys, endpoint_url=servers.right).client == "s3fs"  # type: ignore[attr-defined]
    plain = servers.right.replace("https:", "http:")
    assert open_store(s3_url, **keys, endpoint_url=plain).client == "obstore"  # type: ignore[attr-defined]
    monkeypatch.setenv("SSL_CERT_FILE", str(servers.ca))
    assert open_store(s3_url, **keys, endpoint_url=servers.right).client == "obstore"  # type: ignore[attr-defined]


def test_a_bundle_with_more_than_the_environments_cas_is_trusted_as_a_whole(
    at: Callable[..., Store], servers: Servers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(servers.ca.read_bytes() + b"# a comment\n" + servers.expired_ca.read_bytes())
    monkeypatch.setenv("SSL_CERT_FILE", str(servers.expired_ca))
    assert complaints(at(servers.right, str(bundle))) == {""}


def test_without_a_variable_a_cas_of_ones_own_is_unknown(at: Callable[..., Store], servers: Servers) -> None:
    (said,) = complaints(at(servers.right))
    assert UNKNOWN in said and "the public ones" in said and "SSL_CERT_FILE" in said
    assert web.authorities().certificates >= web.authorities_at(certifi.where(), "").certificates


def test_a_certificate_that_has_expired_or_is_anothers_is_called_that(
    at: Callable[..., Store],
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(servers.expired_ca))
    (said,) = complaints(at(servers.expired))
    assert EXPIRED in said
    monkeypatch.setenv("SSL_CERT_FILE", str(servers.misnamed_ca))
    caplog.clear()
    said = complaints(at(servers.misnamed))
    if LOOKS_AT_HOSTS:
        assert len(said) == 1 and MISNAMED in said.pop()
        assert "aiobotocore" not in caplog.text
    else:
        # Upstream's fault in older releases: the warning names the release that corrects it.
        assert "aiobotocore 3.9 and later" in caplog.text


@pytest.mark.parametrize("which", ["right", "expired", "misnamed"])
def test_certificates_are_not_looked_at_if_that_is_asked_for(
    at: Callable[..., Store], servers: Servers, which: str
) -> None:
    assert complaints(at(getattr(servers, which), False)) == {""}


@pytest.mark.parametrize("given", ["verify", *_VARIABLES])
@pytest.mark.parametrize(
    "content", [None, "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"]
)
def test_certificates_that_cannot_be_read_are_said_in_a_sentence(
    at: Callable[..., Store],
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: str,
    content: str | None,
) -> None:
    place = tmp_path / "ca.pem"
    if content is not None:
        place.write_text(content)
    if given != "verify":
        monkeypatch.setenv(given, str(place))
    with pytest.raises(UsageError, match=f"{given}={place} has no certificates that can be read"):
        at(servers.right, str(place) if given == "verify" else None)
    at(servers.right.replace("https:", "http:"))


def test_what_speaks_no_tls_is_called_that(at: Callable[..., Store], s3_options: dict[str, Any]) -> None:
    store = at(s3_options["endpoint_url"].replace("http:", "https:"))
    for ask in ASKS.values():
        with pytest.raises(StoreUnavailable, match=r"does not speak TLS; .*begins with http://"):
            ask(store)


def test_an_endpoint_that_sends_on_to_tls_is_not_taken_for_a_refusal(at: Callable[..., Store]) -> None:
    moved = saying(
        "301 Moved Permanently", b"", headers="Location: https://s3.example/bucket?token=SECRET1\r\n"
    )
    with serving(moved) as url:
        store = at(url, timeout_s=5)
        for ask in ASKS.values():
            with pytest.raises(
                UsageError, match=r"sends every request to https://s3.example; give that"
            ) as said:
                ask(store)
            assert "SECRET1" not in str(said.value)


# Proxies


NAMED = "http://192.0.2.9:9000"
"""A service that only a proxy can find."""
DEAD = "http://127.0.0.1:1"


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_every_request_goes_through_the_proxy_with_its_password(
    at: Callable[..., Store], s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    with answering(s3_options["endpoint_url"]) as (url, asked):
        monkeypatch.setenv(variable, url.replace("//", "//me:pass1234@"))
        store = at(NAMED)
        for ask in ASKS.values():
            before = len(asked)
            ask(store)
            assert len(asked) > before
    assert all(request.target.startswith(NAMED) for request in asked)
    assert {request.headers.get("proxy-authorization", "")[:6] for request in asked} == {"Basic "}


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"])
@pytest.mark.parametrize("is_tls", [True, False])
def test_this_machine_is_never_asked_through_a_proxy(
    at: Callable[..., Store],
    servers: Servers,
    s3_options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    is_tls: bool,
) -> None:
    monkeypatch.setenv(variable, DEAD)
    monkeypatch.setenv("SSL_CERT_FILE", str(servers.ca))
    store = at(servers.right if is_tls else s3_options["endpoint_url"])
    for ask in ASKS.values():
        ask(store)


@pytest.mark.parametrize(
    ("listed", "host", "is_exempt"),
    [
        ("s3.example", "s3.example", True),
        ("other.example, .example", "s3.example", True),
        ("example", "s3.example", True),
        ("s3.example:9000", "s3.example", True),
        ("s3.example:9001", "s3.example", False),
        ("*", "s3.example", True),
        ("192.0.2.7", "192.0.2.7", True),
        ("192.0.2.0/24", "192.0.2.7", True),
        ("192.0.3.0/24", "192.0.2.7", False),
        ("2001:db8::/32", "[2001:db8::7]", True),
        ("ample", "s3.example", False),
    ],
)
def test_no_proxy_exempts_names_domains_ports_addresses_and_networks(
    at: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, listed: str, host: str, is_exempt: bool
) -> None:
    monkeypatch.setenv("NO_PROXY", listed)
    with answering("", "", "", [Answer(status=403, body=b"denied by the proxy")] * 9) as (url, asked):
        monkeypatch.setenv("HTTP_PROXY", url)
        store = at(f"http://{host}:9000", timeout_s=0.4 if is_exempt else 60)
        for ask in (ASKS["get"], ASKS["list"]):
            asked.clear()
            with pytest.raises(PatchstoreError):
                ask(store)
            assert bool(asked) != is_exempt


@pytest.mark.parametrize(
    "value",
    [
        "http://me:SECRET12/x@proxy:3128",
        "http://me:SECRET12@proxy:99999",
        "http://",
        "socks5://me:SECRET12@p:1080",
    ],
)
def test_a_proxy_that_cannot_be_used_is_said_in_a_sentence(
    at: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("http_proxy", value)
    with pytest.raises(
        UsageError, match=r"^s3://.*: open: http_proxy is no address .*192.0.2.9 to NO_PROXY"
    ) as said:
        at(NAMED)
    assert "SECRET12" not in str(said.value)
