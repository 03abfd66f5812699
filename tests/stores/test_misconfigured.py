"""Endpoints, proxies and options that are wrong: each client's failure is an error that says what to fix."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from patchstore.errors import NotFound, PatchstoreError, StoreUnavailable, UsageError
from patchstore.stores import open_store
from patchstore.stores.base import PART_BYTES, Store
from patchstore.testing.hub.clients import quick_clients
from tests.stores import bad_servers
from tests.stores.bad_servers import serving

CLIENTS = ["s3fs", "obstore", "hub"]
OPERATIONS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("a"),
    "size": lambda store: store.size("a"),
    "put": lambda store: store.put("a", b"x"),
    "list": lambda store: list(store.list("a")),
    "upload": lambda store: store.upload("a", [bytes(PART_BYTES), b"x"]),
}


@pytest.fixture(scope="module", autouse=True)
def _clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_clients(tmp_path_factory.mktemp("hf")):
        yield


@pytest.fixture(params=CLIENTS)
def at(request: pytest.FixtureRequest) -> Iterator[Callable[..., Store]]:
    """Opens a store behind an endpoint."""
    stores: list[Store] = []
    if request.param == "obstore":
        pytest.importorskip("obstore", reason="obstore is not installed: pip install 'obstore>=0.12'")

    def open_(endpoint: str, **more: Any) -> Store:
        if request.param == "hub":
            options = {"endpoint": endpoint, "token": "hf_test", "single_writer": True}
            stores.append(open_store("hf://buckets/user/bucket/run", **options, timeout_s=30))
        else:
            options = {"endpoint_url": endpoint, "key": "test-key", "secret": "test-secret"}
            more = {"config_kwargs": {"retries": {"max_attempts": 1}}, "client": request.param, **more}
            stores.append(open_store("s3://bucket/run", **options, **more, timeout_s=30))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


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
    class Plain(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Plain)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        assert "endpoint" in complaint(at(f"https://127.0.0.1:{server.server_port}"), operation)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.sample(2)
@pytest.mark.parametrize("operation", ["get", "put"])
def test_a_proxy_that_does_not_answer_is_said_without_its_password(
    at: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://user:SECRET1234@127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    huggingface_hub.close_session()
    try:
        said = complaint(at("http://192.0.2.1:9000"), operation)
    finally:
        huggingface_hub.close_session()
    assert "SECRET1234" not in said


def test_a_private_certificate_that_is_missing_is_the_callers_mistake(tmp_path: Path) -> None:
    missing = tmp_path / "ca.pem"
    with pytest.raises(UsageError, match=str(missing)):
        open_store("s3://bucket/run", client_kwargs={"verify": str(missing)})


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
@pytest.mark.parametrize(
    "options",
    [
        {"client_kwargs": {"region_name": "no such region!"}},
        {"client_kwargs": {"region_name": 5}},
        {"config_kwargs": {"request_checksum_calculation": "nonsense"}},
        {"profile": "no-such-profile", "key": None, "secret": None},
        {"secret": None},
    ],
)
def test_what_only_the_first_request_finds_wrong_is_the_callers_mistake(
    options: dict[str, Any], client: str
) -> None:
    keys = {"key": "test-key", "secret": "test-secret", "endpoint_url": "http://127.0.0.1:1"}
    store = open_store("s3://bucket/run", **{**keys, **options}, client=client)
    with pytest.raises(UsageError, match=r"^s3://bucket/run: get a: .*check"):
        store.get("a")
    store.close()
