"""Endpoints, proxies and options that are wrong: each client's failure is an error that says what to fix."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import fsspec
import huggingface_hub
import pytest

from patchstore.errors import NotFound, PatchstoreError, StoreUnavailable, UsageError
from patchstore.stores import open_store
from patchstore.stores.base import Store
from tests.stores import bad_servers
from tests.stores.asks import OPERATIONS
from tests.stores.bad_servers import serving
from tests.stores.conftest import place
from tests.support.gateway import certified, tunnel
from tests.support.hub import Hub
from tests.support.hub.server import TOKEN

pytestmark = pytest.mark.usefixtures("hubs_clients")

CLIENTS = ["s3fs", "obstore", "hub"]


_PUT = """
import sys
from patchstore.errors import PatchstoreError
from patchstore.stores import open_store

options = {"endpoint": sys.argv[1], "token": sys.argv[2], "single_writer": True}
store = open_store("hf://buckets/user/bucket/run", **options)
try:
    store.put("a", b"x")
except PatchstoreError as exc:
    print(type(exc).__name__, exc)
"""


_FORK = """
import os
import patchstore.stores.hub as hub
made = hub.HubStore.__init__

def made_before_a_fork(*arguments, **options):
    made(*arguments, **options)
    if os.fork():
        os.wait()
        os._exit(0)

hub.HubStore.__init__ = made_before_a_fork
"""


@pytest.fixture(params=CLIENTS)
def at(request: pytest.FixtureRequest) -> Iterator[Callable[..., Store]]:
    """Opens a store behind an endpoint."""
    once = {"config_kwargs": {"retries": {"max_attempts": 1}}} if request.param != "hub" else {}
    with ExitStack() as stack:

        def open_(endpoint: str) -> Store:
            url, options = place(request.param, endpoint)
            return stack.enter_context(closing(open_store(url, **options, **once, timeout_s=30)))

        yield open_


@pytest.fixture
def fresh_session() -> Iterator[None]:
    """Have huggingface_hub read the environment again, and once more afterwards."""
    huggingface_hub.close_session()
    yield
    huggingface_hub.close_session()


def complaint(store: Store, operation: str) -> str:
    """What an operation says, which must be one of our errors, and no answer to what was asked."""
    with pytest.raises(PatchstoreError) as caught:
        OPERATIONS[operation](store)
    assert type(caught.value) in {UsageError, StoreUnavailable}
    assert not isinstance(caught.value, NotFound)
    assert str(caught.value).startswith(f"{store.url}: {operation} a: ")
    return str(caught.value)


@pytest.mark.sample(8)
@pytest.mark.parametrize("operation", ["get", "size", "put", "list", "upload"])
@pytest.mark.parametrize("server", [bad_servers.a_web_server, bad_servers.a_web_server_without_the_page])
def test_a_web_server_is_no_store_and_not_an_empty_one(
    at: Callable[..., Store], server: Any, operation: str
) -> None:
    with serving(server) as url:
        said = complaint(at(url), operation)
    assert "endpoint" in said or "bucket" in said


@pytest.mark.sample(3)
@pytest.mark.parametrize("operation", ["get", "put", "list"])
def test_a_name_that_is_not_known_is_said(at: Callable[..., Store], operation: str) -> None:
    assert "endpoint" in complaint(at("http://no-such-host.invalid:9000"), operation)


@pytest.mark.sample(2)
@pytest.mark.parametrize("operation", ["get", "put"])
def test_tls_to_a_plain_port_is_said(at: Callable[..., Store], operation: str) -> None:
    def plain(connection: bad_servers.Connection) -> None:
        connection.socket.recv(65_536)
        connection.socket.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with serving(plain) as url:
        assert "does not speak TLS" in complaint(at(url.replace("http:", "https:")), operation)
        try:
            raise KeyError("of the caller")
        except KeyError:
            # What is raised now has another context than the failure that caused it.
            assert "does not speak TLS" in complaint(at(url.replace("http:", "https:")), operation)


@pytest.mark.sample(2)
@pytest.mark.parametrize("operation", ["get", "put"])
def test_a_proxy_that_does_not_answer_is_said_without_its_password(
    at: Callable[..., Store], fresh_session: None, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://user:SECRET1234@127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    assert "SECRET1234" not in complaint(at("http://192.0.2.1:9000"), operation)


def test_a_profile_that_is_missing_is_said_when_a_store_is_opened(client: str) -> None:
    with pytest.raises(UsageError, match=r"^s3://bucket/run: open: .*no-such-profile.* could not be found"):
        open_store("s3://bucket/run", profile="no-such-profile", client=client)


@pytest.mark.parametrize(
    "options",
    [
        {"client_kwargs": {"region_name": "no such region!"}},
        {"client_kwargs": {"region_name": 5}},
        {"config_kwargs": {"request_checksum_calculation": "nonsense"}},
        {"secret": None},
    ],
)
def test_what_only_the_first_request_finds_wrong_is_the_callers_mistake(
    options: dict[str, Any], client: str
) -> None:
    url, others = place(client, "http://127.0.0.1:1")
    with (
        closing(open_store(url, **{**others, **options})) as store,
        pytest.raises(UsageError, match=r"^s3://bucket/run: get a: .*check"),
    ):
        store.get("a")


@pytest.mark.parametrize("at", ["hub"], indirect=True)
def test_a_certificate_that_the_hubs_client_does_not_trust_is_named(
    at: Callable[..., Store], fresh_session: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = tmp_path / "its", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    (tls, _), (_, other) = map(certified, folders)
    monkeypatch.setenv("SSL_CERT_FILE", str(other))
    with serving(bad_servers.a_web_server) as plain, tunnel(plain, tls) as url:
        store = at(url)
        for operation in ("get", "list", "put"):
            said = complaint(store, operation)
            assert f"not signed by a CA that is trusted (SSL_CERT_FILE={other})" in said


def run_put(hub: Hub, code: str = "", **environment: str) -> str:
    """What a process prints that puts an object."""
    done = subprocess.run(
        [sys.executable, "-c", code + _PUT, hub.url, TOKEN],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_home_of_the_hubs_client_that_cannot_be_is_an_error_of_this_host(tmp_path: Path, hub: Hub) -> None:
    home = tmp_path / "file"
    home.touch()
    said = run_put(hub, HF_HOME=str(home), HF_XET_CACHE=str(home / "xet"))
    # hf-xet writes a line of its own first.
    assert "HostError hf://buckets/user/bucket/run: put a: hf-xet's use of " in said
    assert f"{home}/xet, which HF_HOME or HF_XET_CACHE names, failed on this host: Not a" in said


def test_a_store_of_the_hub_is_refused_in_a_forked_process(hub: Hub) -> None:
    said = run_put(hub, _FORK)
    assert "UsageError hf://buckets/user/bucket/run: put: the store was opened in process" in said


@pytest.mark.parametrize("protocol", ["abfss", "nosuch"])
def test_a_protocol_whose_package_is_missing_says_what_brings_it(protocol: str) -> None:
    if protocol in fsspec.available_protocols():
        pytest.skip("adlfs is installed")
    with pytest.raises(UsageError, match=f"knows no protocol {protocol}; install .*adlfs"):
        open_store(f"{protocol}://container@account.dfs.core.windows.net/run")
