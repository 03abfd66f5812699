"""What stores say: the store, the operation and the key first, in every error, and never a secret."""

import socket
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import s3fs

from patchstore.errors import AlreadyExists, NotFound, PatchstoreError, StoreUnavailable, UsageError
from patchstore.stores import open_store
from patchstore.stores.base import PART_BYTES, Store
from patchstore.stores.folder import FolderStore
from patchstore.stores.fsspec_store import FsspecStore
from patchstore.stores.memory import MemoryStore
from patchstore.stores.messages import Messages
from patchstore.testing.hub import Hub
from patchstore.testing.hub.clients import quick_clients
from patchstore.testing.hub.server import TOKEN
from tests.stores.lost_answers import answering

SECRETS = {"key": "AKIDEXAMPLE", "secret": "wJalrXUtnFEMI/K7MDENG", "token": "FwoGZXIvYXdzEXAMPLE"}
SIGNATURE = "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=5d672d79c15b13162d9279b0855cfba6"
TALKATIVE = f"""<Error><Code>SignatureDoesNotMatch</Code>
<Message>It does not match: {SECRETS["key"]} https://u:pw12345678@host/a?{SIGNATURE}</Message>
<AWSAccessKeyId>{SECRETS["key"]}</AWSAccessKeyId>
<StringToSign>AWS4-HMAC-SHA256 {SECRETS["token"]}</StringToSign>
<CanonicalRequest>PUT /bucket/a x-amz-security-token:{SECRETS["token"]}</CanonicalRequest></Error>"""
"""A refusal that repeats the request, as S3's do."""
STORES = ["memory", "folder", "s3fs", "obstore", "fsspec", "hub"]


@pytest.fixture(scope="module", autouse=True)
def _clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_clients(tmp_path_factory.mktemp("hf")):
        yield


@pytest.fixture(scope="module")
def hub(_clients: None) -> Iterator[Hub]:
    with Hub() as hub:
        hub.create_bucket("user/bucket")
        yield hub


@pytest.fixture(params=STORES)
def store(
    request: pytest.FixtureRequest, tmp_path: Path, s3_options: dict[str, Any], s3_url: str, hub: Hub
) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore("memory://a-name")
    elif request.param == "folder":
        yield FolderStore(tmp_path)
    elif request.param == "fsspec":
        fs = s3fs.S3FileSystem(**s3_options, skip_instance_cache=True)
        yield FsspecStore(fs, s3_url.removeprefix("s3://"), url=s3_url)
    elif request.param == "hub":
        url = f"hf://buckets/user/bucket/{s3_url.rpartition('/')[2]}"
        yield open_store(url, endpoint=hub.url, token=TOKEN, single_writer=True)
    else:
        if request.param == "obstore":
            pytest.importorskip("obstore", reason="obstore is not installed: pip install 'obstore>=0.12'")
        store = open_store(s3_url, **s3_options, client=request.param)
        yield store
        store.close()


ASKS: list[tuple[str, Callable[[Store, str], object]]] = [
    ("get", lambda store, key: store.get(key)),
    ("get", lambda store, key: store.get(key, 2, 2)),
    ("get", lambda store, key: store.get(key, 2, 5)),
    ("size", lambda store, key: store.size(key)),
    ("put", lambda store, key: store.put(key, b"")),
    ("upload", lambda store, key: store.upload(key, [b""])),
    ("delete", lambda store, key: store.delete(key)),
]


def said(caught: pytest.ExceptionInfo[PatchstoreError]) -> str:
    return str(caught.value)


def complaints(ask: Callable[[], object]) -> list[str]:
    """What an operation says when it fails; nothing when it does not."""
    try:
        ask()
    except PatchstoreError as exc:
        return ["\n".join((str(exc), *getattr(exc, "__notes__", ())))]
    return []


def test_what_is_missing_is_said_with_store_operation_and_key(store: Store) -> None:
    for operation, ask in ASKS[:4]:
        with pytest.raises(NotFound) as caught:
            ask(store, "a/b")
        assert (
            said(caught)
            == f"{store.url}: {operation} a/b: there is no such object; check the URL and the key"
        )


def test_what_is_taken_is_said_with_store_operation_and_key(store: Store) -> None:
    store.put("a", b"x")
    with pytest.raises(AlreadyExists) as caught:
        store.put("a", b"y", if_absent=True)
    assert said(caught).startswith(f"{store.url}: put a: ")


def test_what_is_no_key_or_range_is_said_with_the_store_and_operation(store: Store) -> None:
    for key in ("a//b", "..", "", "a\0b", "ключ", "a b", None, 5):
        for operation, ask in ASKS:
            with pytest.raises(UsageError) as caught:
                ask(store, key)  # type: ignore[arg-type]
            assert said(caught).startswith(f"{store.url}: {operation}: ")
    for prefix in ("a//b", "/", None):
        with pytest.raises(UsageError) as caught:
            list(store.list(prefix))  # type: ignore[arg-type]
        assert said(caught).startswith(f"{store.url}: list: ")
    with pytest.raises(UsageError) as caught:
        store.get("a", 5, 4)
    assert said(caught).startswith(f"{store.url}: get a: ")


@pytest.mark.sample(2)
@pytest.mark.parametrize("operation", ["get", "put", "upload", "list", "delete"])
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_no_secret_is_repeated_that_a_server_repeats(
    s3_options: dict[str, Any], s3_url: str, client: str, operation: str
) -> None:
    asks: dict[str, Callable[[Store], object]] = {
        "get": lambda store: store.get("a"),
        "put": lambda store: store.put("a", b"", if_absent=True),
        "upload": lambda store: store.upload("a", [bytes(PART_BYTES), b"x"]),
        "list": lambda store: list(store.list("a")),
        "delete": lambda store: store.delete("a"),
    }
    texts = []
    for status in (403, 400):
        for method in ("GET", "PUT", "POST", "DELETE"):
            answers = repeat((status, TALKATIVE.encode()))
            with answering(s3_options["endpoint_url"], method, "", answers) as (url, _):
                store = open_store(s3_url, **SECRETS, endpoint_url=url, client=client)
                texts += complaints(lambda store=store: asks[operation](store))  # type: ignore[misc]
                store.close()
    assert texts
    for text in texts:
        assert text.startswith(f"{s3_url}: {operation} a: ")
        assert not [each for each in (*SECRETS.values(), "X-Amz", "pw12345678") if each in text]


@pytest.mark.exhaustive
def test_no_secret_is_repeated_that_the_hub_or_its_clients_repeat(hub: Hub) -> None:
    url, token = "hf://buckets/user/bucket/secrets", "hf_abcdefghijklmnop"
    hub.roles[token] = "write"
    store = open_store(url, endpoint=hub.url, token=token, single_writer=True)
    store.upload("a", [bytes(100)])
    body = f'{{"error": "Bearer {token} at https://u:pw12345678@cas.example/x?{SIGNATURE}"}}'.encode()
    texts = []
    for part in ("/batch", "/paths-info", "/tree", "/resolve/", "/content/", "xet-", "/v1/", "/xorb-data/"):
        for status in (400, 403, 503):
            hub.fault = lambda method, path, part=part, status=status: (  # type: ignore[misc]
                (status, body) if part in path else None
            )
            for ask in (
                lambda: store.get("a"),
                lambda: store.put("b", b"x"),
                lambda: list(store.read("a")),
                lambda: list(store.list()),
            ):
                texts += complaints(ask)
    hub.fault = None
    assert texts
    for text in texts:
        assert text.startswith(f"{url}: ")
        assert not [each for each in (token, "X-Amz", "pw12345678") if each in text]


@pytest.mark.parametrize(
    "text",
    [
        "GET https://host/a/b?X-Amz-Signature=SECRET1 failed",
        "https://user:SECRET1@host/a",
        "for url 'https://host/a?token=SECRET1'",
        "/bucket/a?X-Amz-Credential=SECRET1/20261121 was refused",
        "Authorization: Bearer SECRET1",
        "authorization=AWS4-HMAC-SHA256 Credential=SECRET1/20261121, Signature=SECRET1",
        "token hf_SECRET1abcdefg",
        "x-amz-security-token: SECRET1",
        "my-own-SECRET1",
    ],
)
def test_secrets_are_taken_out_of_what_libraries_say(text: str) -> None:
    cleaned = Messages("s3://bucket", ["my-own-SECRET1"]).clean(ValueError(text))
    assert "SECRET1" not in cleaned


def test_what_is_no_secret_stays_on_one_line_and_short() -> None:
    messages = Messages("s3://bucket", ["test", None, ""])
    assert messages.clean(OSError("no route\n to\thost\0 test")) == "no route to host test"
    assert messages.clean(OSError("https://host:9000/bucket/a")) == "https://host:9000/bucket/a"
    assert messages.clean(TimeoutError()) == "TimeoutError"
    assert len(messages.clean(OSError("x" * 10_000))) < 500
    assert messages.clean(OSError("got b'<!DOCTYPE html><html>'")).startswith("the answer is a web page")


def test_a_refused_connection_says_so_and_what_to_check(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        options = {"key": "k", "secret": "s", "endpoint_url": endpoint, "client": "obstore"}
        store = open_store("s3://bucket/run", **options)
        with pytest.raises(StoreUnavailable, match=r"get a: .*[Rr]efused.*endpoint_url"):
            store.get("a")
        store.close()
