"""What stores say: the store, the operation and the key first, in every error, and never a secret."""

from collections.abc import Callable
from itertools import repeat

import pytest

from patchstore.errors import AlreadyExists, NotFound, PatchstoreError, UsageError
from patchstore.stores import open_store
from patchstore.stores.base import Store
from patchstore.stores.errors import StoreErrors
from tests.stores.asks import OF_OBJECTS, OPERATIONS
from tests.stores.lost_answers import Answer, Place
from tests.support.hub import Hub

pytestmark = pytest.mark.usefixtures("hubs_clients")

SECRETS = {"key": "AKIDEXAMPLE", "secret": "wJalrXUtnFEMI/K7MDENG", "token": "FwoGZXIvYXdzEXAMPLE"}
SIGNATURE = "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=5d672d79c15b13162d9279b0855cfba6"
TALKATIVE = f"""<Error><Code>SignatureDoesNotMatch</Code>
<Message>It does not match: {SECRETS["key"]} https://u:pw12345678@host/a?{SIGNATURE}</Message>
<AWSAccessKeyId>{SECRETS["key"]}</AWSAccessKeyId>
<StringToSign>AWS4-HMAC-SHA256 {SECRETS["token"]}</StringToSign>
<CanonicalRequest>PUT /bucket/a x-amz-security-token:{SECRETS["token"]}</CanonicalRequest></Error>"""
"""A refusal that repeats the request, as S3's do."""

WITH_KEYS = [(verb, OPERATIONS[verb]) for verb in OF_OBJECTS if verb != "read"]
GETS: list[tuple[str, Callable[..., object]]] = [
    ("get", OPERATIONS["get"]),
    ("get", lambda store, key: store.get(key, 2, 2)),
    ("get", lambda store, key: store.get(key, 2, 5)),
    ("size", OPERATIONS["size"]),
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


def test_what_is_missing_is_said_with_store_operation_and_key(any_store: Store) -> None:
    for operation, ask in GETS:
        with pytest.raises(NotFound) as caught:
            ask(any_store, "a/b")
        expected = f"{any_store.url}: {operation} a/b: there is no such object; check the URL and the key"
        assert said(caught) == expected


def test_what_is_taken_is_said_with_store_operation_and_key(any_store: Store) -> None:
    any_store.put("a", b"x")
    with pytest.raises(AlreadyExists) as caught:
        any_store.put("a", b"y", if_absent=True)
    assert said(caught).startswith(f"{any_store.url}: put a: ")


def test_what_is_no_key_or_range_is_said_with_the_store_and_operation(any_store: Store) -> None:
    for key in ("a//b", "..", "", "a\0b", "ключ", "a b", None, 5):
        for operation, ask in (*GETS, *WITH_KEYS):
            with pytest.raises(UsageError) as caught:
                ask(any_store, key)
            assert said(caught).startswith(f"{any_store.url}: {operation}: ")
    for prefix in ("a//b", "/", None):
        with pytest.raises(UsageError) as caught:
            list(any_store.list(prefix))  # type: ignore[arg-type]
        assert said(caught).startswith(f"{any_store.url}: list: ")
    with pytest.raises(UsageError) as caught:
        any_store.get("a", 5, 4)
    assert said(caught).startswith(f"{any_store.url}: get a: ")


def assert_nothing_is_told(texts: list[str], begin: str, *secrets: str) -> None:
    assert texts
    for text in texts:
        assert text.startswith(begin)
        assert not [each for each in (*secrets, "X-Amz", "pw12345678") if each in text]


@pytest.mark.sample(2)
@pytest.mark.parametrize("operation", ["get", "put", "upload", "list", "delete"])
def test_no_secret_is_repeated_that_a_server_repeats(s3: Place, operation: str) -> None:
    texts = []
    for status in (403, 400):
        for method in ("GET", "PUT", "POST", "DELETE"):
            answers = repeat(Answer(status=status, body=TALKATIVE.encode()))
            with s3.behind(method, "", answers, **SECRETS) as (store, _):
                texts += complaints(lambda store=store: OPERATIONS[operation](store))  # type: ignore[misc]
    assert_nothing_is_told(texts, f"{s3.url}: {operation} a: ", *SECRETS.values())


@pytest.mark.exhaustive
def test_no_secret_is_repeated_that_the_hub_or_its_clients_repeat(hub: Hub) -> None:
    url, token = "hf://buckets/user/bucket/secrets", "hf_abcdefghijklmnop"
    hub.roles[token] = "write"
    store = open_store(url, endpoint=hub.url, token=token, single_writer=True, timeout_s=2)
    store.upload("a", [bytes(100)])
    body = f'{{"error": "Bearer {token} at https://u:pw12345678@cas.example/x?{SIGNATURE}"}}'.encode()
    texts = []
    for part in ("/batch", "/paths-info", "/tree", "/resolve/", "/content/", "xet-", "/v1/", "/xorb-data/"):
        for status in (400, 403, 503):
            hub.fault = lambda method, path, part=part, status=status: (  # type: ignore[misc]
                (status, body) if part in path else None
            )
            for verb in ("get", "put", "read", "list"):
                texts += complaints(lambda verb=verb: OPERATIONS[verb](store))  # type: ignore[misc]
    hub.fault = None
    assert_nothing_is_told(texts, f"{url}: ", token)


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
    cleaned = StoreErrors("s3://bucket", ["my-own-SECRET1"]).clean(ValueError(text))
    assert "SECRET1" not in cleaned


def test_what_is_no_secret_stays_on_one_line_and_short() -> None:
    errors = StoreErrors("s3://bucket", ["test", None, ""])
    assert errors.clean(OSError("no route\n to\thost\0 test")) == "no route to host test"
    assert errors.clean(OSError("https://host:9000/bucket/a")) == "https://host:9000/bucket/a"
    assert errors.clean(TimeoutError()) == "TimeoutError"
    assert len(errors.clean(OSError("x" * 10_000))) < 500
    assert errors.clean(OSError("got b'<!DOCTYPE html><html>'")).startswith("the answer is a web page")
