"""No operation of a store outlasts its time, whatever the server does: against real sockets on 127.0.0.1.

That a limit was kept is seen by its error, which only the limit raises; the clock is never asked.
"""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import s3fs
from fsspec.callbacks import Callback

from patchstore.errors import PublishFailed, StoreUnavailable, UsageError
from patchstore.publish import uploads
from patchstore.stores import multipart, open_store, s3
from patchstore.stores.base import NUM_PARTS, PART_BYTES, Store
from patchstore.stores.deadline import DEFAULT_TIMEOUT_S, Deadline, Overdue, Patience, allowance
from patchstore.stores.fsspec_store import FsspecStore
from patchstore.stores.hub import HubStore
from patchstore.stores.s3 import S3Store
from patchstore.testing.hub import Hub
from patchstore.testing.hub.clients import quick_clients
from patchstore.testing.hub.server import TOKEN
from patchstore.testing.pattern import pattern, patterned
from tests.stores import bad_servers
from tests.stores.bad_servers import Behaviour, serving
from tests.stores.lost_answers import Answer, Request, passing_on
from tests.support.weights import Run

TIMEOUT_S = 0.7
OPERATIONS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("a"),
    "size": lambda store: store.size("a"),
    "put": lambda store: store.put("a", b"x"),
    "list": lambda store: list(store.list("a")),
    "delete": lambda store: store.delete("a"),
    "upload": lambda store: store.upload("a", [bytes(PART_BYTES), b"x"]),
    "read": lambda store: list(store.read("a")),
}
WRITES = {"put", "delete", "upload"}
CLIENTS = ["s3fs", "obstore", "hub", "fsspec"]

ASKS_AND_EXITS = """
import json, sys
from patchstore.errors import StoreUnavailable
from patchstore.stores import multipart, open_store, s3
url, options = json.loads(sys.argv[1])
store = open_store(url, **options)
large = [bytes(9 << 20)]
for ask in (lambda: store.get("a"), lambda: store.put("a", b"x"), lambda: store.upload("a", large)):
    try:
        ask()
    except StoreUnavailable:
        print("unavailable", flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def _clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_clients(tmp_path_factory.mktemp("hf")):
        yield


def place(client: str, endpoint_url: str) -> tuple[str, dict[str, Any]]:
    """URL and options of a store behind an endpoint."""
    if client == "hub":
        options = {"endpoint": endpoint_url, "token": TOKEN, "single_writer": True}
        return "hf://buckets/user/bucket/run", options
    if client == "obstore":
        pytest.importorskip("obstore", reason="obstore is not installed: pip install 'obstore>=0.12'")
    return "s3://bucket/run", {
        "endpoint_url": endpoint_url,
        "key": "test-key",
        "secret": "test-secret",
        "client": client,
    }


@contextmanager
def opened(client: str, endpoint_url: str, **more: Any) -> Iterator[Store]:
    url, options = place("s3fs" if client == "fsspec" else client, endpoint_url)
    if client == "fsspec":
        del options["client"]
        fs = s3fs.S3FileSystem(**options, skip_instance_cache=True)
        yield FsspecStore(fs, "bucket/run", url=url, timeout_s=more["timeout_s"])
        return
    store = open_store(url, **options, **more)
    yield store
    store.close()


def ask(client: str, operation: str, behaviour: Behaviour, timeout_s: float = TIMEOUT_S) -> StoreUnavailable:
    """Return what an operation raises."""
    with serving(behaviour) as url, opened(client, url, timeout_s=timeout_s) as store:
        with pytest.raises(StoreUnavailable) as caught:
            OPERATIONS[operation](store)
        assert type(caught.value) is StoreUnavailable
        assert str(caught.value).startswith(f"{store.url}: ")
        assert ("whether it was carried out is unknown" in str(caught.value)) == (operation in WRITES)
        return caught.value


# Servers.


@pytest.mark.sample(4)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_never_answers_is_given_up(client: str, operation: str) -> None:
    error = ask(client, operation, bad_servers.silent)
    # obstore's own limit for a request with a part ends with ours.
    assert "not done within" in str(error) or (client, operation) == ("obstore", "upload")


@pytest.mark.sample(2)
@pytest.mark.parametrize("behaviour", [bad_servers.stalls_in_the_body, bad_servers.drips])
@pytest.mark.parametrize("operation", ["get", "list"])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_small_answer_that_stops_or_drips_is_given_up(
    client: str, operation: str, behaviour: Behaviour
) -> None:
    assert f"{operation} a: not done within {TIMEOUT_S} s" in str(ask(client, operation, behaviour))


@pytest.mark.sample(4)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("behaviour", [bad_servers.resets, bad_servers.unavailable_for_ever])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_resets_or_is_never_available_is_given_up(
    client: str, behaviour: Behaviour, operation: str
) -> None:
    ask(client, operation, behaviour)


def test_a_hub_that_asks_to_come_back_in_an_hour_is_not_waited_for() -> None:
    later = bad_servers.saying("429 Too Many Requests", b"{}", "application/json", "Retry-After: 3600\r\n")
    for operation in OPERATIONS:
        assert "429" in str(ask("hub", operation, later, timeout_s=5))


def test_the_hubs_gateway_has_the_stores_time_too() -> None:
    with serving(bad_servers.silent) as url:
        store = HubStore(
            "hf://buckets/user/bucket/run",
            endpoint=url,
            gateway_url=url,
            gateway_key="HFAKTEST",
            gateway_secret="gateway-secret",
            timeout_s=TIMEOUT_S,
        )
        with pytest.raises(StoreUnavailable, match=r"^hf://buckets/user/bucket/run: put a: "):
            store.put("a", b"x", if_absent=True)
        store.close()


# Transfers.


@contextmanager
def holding(endpoint_url: str, is_held: Callable[[Request], bool]) -> Iterator[str]:
    """Yield the URL of a proxy that keeps some requests until the end."""
    ended = threading.Event()

    def hold(request: Request) -> None:
        if is_held(request):
            ended.wait()

    with passing_on(endpoint_url, instead=hold) as url:
        try:
            yield url
        finally:
            ended.set()


@pytest.mark.exhaustive
@pytest.mark.parametrize("held", [2, 12])
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_an_upload_of_which_parts_stall_is_given_up_and_aborted(
    s3_options: dict[str, Any], s3_url: str, client: str, held: int
) -> None:
    plain = S3Store(s3_url, **s3_options)

    def unfinished() -> list[Any]:
        uploads = plain._client.fs.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", [])
        return [upload for upload in uploads if upload["Key"].startswith(plain._prefix)]

    # Clients differ in the order of a query's parts.
    part = re.compile(rf"partNumber={held}(&|$)")
    with holding(s3_options["endpoint_url"], lambda request: part.search(request.path) is not None) as url:
        store = S3Store(s3_url, **{**s3_options, "endpoint_url": url, "client": client}, timeout_s=8)
        store.put("small", b"so that the first request is not the one that makes the connection")
        with pytest.raises(StoreUnavailable, match=f"{s3_url}: upload large: ") as caught:
            store.upload("large", (bytes(PART_BYTES) for _ in range(13)))
        # obstore aborts it on its thread, when its own request has ended.
        while not getattr(caught.value, "__notes__", ()) and unfinished():
            threading.Event().wait(0.05)
        store.close()
    assert list(plain.list()) == ["small"]
    plain.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_a_download_that_stalls_in_the_middle_is_given_up(
    s3_options: dict[str, Any], s3_url: str, client: str
) -> None:
    size = 3 * PART_BYTES
    S3Store(s3_url, **s3_options).upload("large", patterned(size))

    def is_second_part(request: Request) -> bool:
        return request.headers.get("range", "").startswith(f"bytes={PART_BYTES}-")

    with holding(s3_options["endpoint_url"], is_second_part) as url:
        store = S3Store(s3_url, **{**s3_options, "endpoint_url": url, "client": client}, timeout_s=5)
        parts = store.read("large")
        assert next(parts) == pattern(0, PART_BYTES)
        with pytest.raises(StoreUnavailable, match=f"{s3_url}: get large: "):
            list(parts)
        store.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_an_upload_that_moves_slowly_is_not_cut(monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    # Small parts, so that the pauses of the server and not the machine are what is slow.
    part_bytes, timeout_s, pauses = 1 << 16, 4, threading.Event()
    monkeypatch.setattr(multipart, "part_bytes", lambda number: part_bytes)
    monkeypatch.setattr(s3, "PART_BYTES", part_bytes)
    if client == "obstore":
        monkeypatch.setattr(pytest.importorskip("patchstore.stores.s3_obstore"), "PART_BYTES", part_bytes)
    sent: list[str] = []

    def slowly(request: Request) -> Answer:
        if "partNumber=" in request.path:
            # In three rounds of parts that is more than the limit, and less in each.
            pauses.wait(timeout_s / 2)
            sent.append(request.path)
        body = b"<R><UploadId>id</UploadId><ETag>tag</ETag><Bucket>bucket</Bucket><Key>key</Key></R>"
        return 200, body, [("ETag", '"tag"'), ("Content-Type", "application/xml")]

    with passing_on("http://127.0.0.1:1", instead=slowly) as url, opened(client, url, timeout_s=4) as store:
        store.upload("large", [bytes(part_bytes)] * 3 * NUM_PARTS)
    assert len(set(sent)) == 3 * NUM_PARTS


@pytest.mark.parametrize(
    ("operation", "part"),
    [
        ("upload", "/v1/xorbs/"),
        ("upload", "/v1/shards"),
        ("put", "/v1/xorbs/"),
        ("read", "/xorb-data/"),
        ("read", "/v1/reconstructions/"),
    ],
)
def test_a_transfer_of_the_hub_that_stalls_is_given_up(operation: str, part: str) -> None:
    ended = threading.Event()
    with Hub() as hub:
        hub.create_bucket("user/bucket")
        url, options = place("hub", hub.url)
        open_store(url, **options).upload("a", patterned(2 * PART_BYTES))
        hub.fault = lambda method, path: ended.wait() and None if part in path else None  # type: ignore[func-returns-value]
        store = open_store(url, **options, timeout_s=0.2)
        with pytest.raises(StoreUnavailable, match=f"{url}: {operation} a: "):
            OPERATIONS[operation](store)
        hub.fault = None
        ended.set()
        store.close()


@pytest.mark.exhaustive
def test_a_driver_that_hangs_is_given_up_and_one_that_reports_progress_is_not(
    s3_options: dict[str, Any], s3_url: str
) -> None:
    ended = threading.Event()

    class Hanging(s3fs.S3FileSystem):
        moves = True

        def put_file(self, source: str, path: str, callback: Callback, **kwargs: Any) -> None:
            for _ in range(4):
                # Longer than the limit in all, and shorter each time.
                ended.wait(1.2)
                callback.relative_update(1)
            if not self.moves:
                ended.wait()

        def info(self, path: str, **kwargs: Any) -> Any:
            ended.wait()

    fs = Hanging(**s3_options, skip_instance_cache=True)
    store = FsspecStore(fs, "bucket/run", url=s3_url, timeout_s=3)
    store.upload("a", [b"x"])
    with pytest.raises(StoreUnavailable, match=f"{s3_url}: size a: not done within 3 s"):
        store.size("a")
    Hanging.moves = False
    with pytest.raises(StoreUnavailable, match=f"{s3_url}: upload a: not done within 3 s"):
        store.upload("a", [b"x"])
    ended.set()


# What waits for a store.


@pytest.mark.sample(1)
@pytest.mark.parametrize("client", ["s3fs", "obstore", "hub"])
def test_what_a_library_left_behind_does_not_keep_a_process_from_exiting(client: str) -> None:
    with serving(bad_servers.silent) as endpoint_url:
        url, options = place(client, endpoint_url)
        argument = json.dumps([url, {**options, "timeout_s": 0.5}])
        command = [sys.executable, "-c", ASKS_AND_EXITS, argument]
        # Its limit ends a process that does not exit, and fails this.
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert answer.stdout.split() == ["unavailable"] * 3
    assert not [word for word in ("Traceback", "Fatal", "panicked") if word in answer.stderr]


@pytest.mark.exhaustive
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_a_publication_to_a_store_that_falls_silent_fails_and_the_publisher_closes(
    s3_options: dict[str, Any], s3_url: str, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    monkeypatch.setattr(uploads, "FIRST_PAUSE_S", 0)
    monkeypatch.setattr(uploads, "ATTEMPTS", 2)
    is_silent = threading.Event()
    with holding(s3_options["endpoint_url"], lambda request: is_silent.is_set()) as url:
        options = {**s3_options, "endpoint_url": url, "client": client, "timeout_s": 5}
        store = S3Store(s3_url, **options)
        run = Run(store)
        run.publish_versions(2)
        is_silent.set()
        run.train()
        publication = run.publisher.publish_patch(3)
        # On a busy machine the client's own limit for a request may come before the deadline.
        with pytest.raises(PublishFailed, match="failed 2 times"):
            publication.result()
        run.close()
        store.close()


# The limits themselves.


def test_an_operation_may_take_as_long_again_for_each_part_that_it_carries() -> None:
    assert allowance(60, 0) == 60
    assert allowance(60, PART_BYTES) == 120
    assert allowance(60, 3 * PART_BYTES) == 240


def test_a_deadline_counts_all_that_is_run_before_it() -> None:
    never = threading.Event()
    deadline = Deadline(0.05)
    assert deadline.run(lambda: "at once") == "at once"
    for _ in range(2):
        with pytest.raises(Overdue):
            deadline.run(never.wait)
    never.set()


def test_patience_lasts_as_long_as_something_moves() -> None:
    never, seen = threading.Event(), iter([1, 2, 3, 3])
    with pytest.raises(Overdue):
        Patience(0.01).run(never.wait, lambda: next(seen))
    assert list(seen) == []
    never.set()


def test_errors_of_what_is_run_pass_through_also_a_timeout_of_its_own() -> None:
    def fail() -> None:
        raise TimeoutError("the library's own")

    for limit in (Deadline(60), Patience(60)):
        with pytest.raises(TimeoutError, match="the library's own"):
            limit.run(fail)


@pytest.mark.parametrize("url", ["s3://bucket/run", "hf://buckets/user/bucket/run"])
def test_the_time_is_an_option_of_all_stores_behind_a_network(url: str) -> None:
    for given, expected in (({}, DEFAULT_TIMEOUT_S), ({"timeout_s": 5}, 5.0)):
        store = open_store(url, **given)
        assert store.timeout_s == expected  # type: ignore[attr-defined]
        store.close()


@pytest.mark.parametrize("timeout_s", ["abc", "5", None, True, 0, -1, float("nan"), float("inf"), 1e6, [5]])
@pytest.mark.parametrize("url", ["s3://bucket/run", "hf://buckets/user/bucket/run"])
def test_a_time_that_is_none_is_refused(url: str, timeout_s: object) -> None:
    with pytest.raises(UsageError, match=f"{url}: .*timeout_s"):
        open_store(url, timeout_s=timeout_s)


@pytest.mark.parametrize("url", ["folder", "memory://name"])
def test_a_store_without_a_network_says_that_it_has_no_limit(url: str) -> None:
    with pytest.raises(UsageError, match="leave the option out"):
        open_store(url, timeout_s=5)
