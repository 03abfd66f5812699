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

from patchstore.errors import PublishFailed, StoreUnavailable
from patchstore.stores import open_store, s3_s3fs, tries
from patchstore.stores import s3 as s3_module
from patchstore.stores.base import NUM_PARTS, PART_BYTES, Store
from patchstore.stores.deadline import DEFAULT_TIMEOUT_S, Deadline, Overdue, Patience
from patchstore.stores.fsspec_store import FsspecStore
from patchstore.stores.hub import HubStore
from patchstore.stores.s3 import S3Store
from patchstore.testing.store import pattern, patterned
from tests.stores import bad_servers
from tests.stores.asks import OPERATIONS, READS
from tests.stores.bad_servers import Behaviour, serving
from tests.stores.conftest import place
from tests.stores.lost_answers import Answer, Place, Request, passing_on
from tests.stores.s3_server import unfinished_uploads
from tests.support.hub import Hub
from tests.support.weights import Run

pytestmark = pytest.mark.usefixtures("hubs_clients")

TIMEOUT_S = 0.7
CLIENTS = ["s3fs", "obstore", "hub", "fsspec"]

ASKS_AND_EXITS = """
import json, sys
from patchstore.errors import StoreUnavailable
from patchstore.stores import open_store
url, options = json.loads(sys.argv[1])
store = open_store(url, **options)
large = [bytes(9 << 20)]
for ask in (lambda: store.get("a"), lambda: store.put("a", b"x"), lambda: store.upload("a", large)):
    try:
        ask()
    except StoreUnavailable:
        print("unavailable", flush=True)
"""


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
        assert ("whether it was carried out is unknown" in str(caught.value)) == (operation not in READS)
        return caught.value


# Servers.


@pytest.mark.sample(8)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "behaviour", [bad_servers.silent, bad_servers.resets, bad_servers.unavailable_for_ever]
)
def test_a_server_that_never_answers_resets_or_is_never_available_is_given_up(
    client: str, behaviour: Behaviour, operation: str
) -> None:
    error = ask(client, operation, behaviour)
    if behaviour is bad_servers.silent:
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("client", ["hub", "s3fs"])
def test_a_service_that_asks_to_come_back_in_an_hour_is_asked_until_the_limit(
    client: str, operation: str
) -> None:
    later = bad_servers.saying("429 Too Many Requests", b"{}", "application/json", "Retry-After: 3600\r\n")
    # What the service said is what the caller is told, and not that the time is over.
    assert "429" in str(ask(client, operation, later, timeout_s=5))


def test_the_hubs_gateway_has_the_stores_time_too() -> None:
    with serving(bad_servers.silent) as url:
        keys = {"gateway_key": "HFAKTEST", "gateway_secret": "gateway-secret"}
        at = {"endpoint": url, "gateway_url": url}
        store = HubStore("hf://buckets/user/bucket/run", **at, **keys, timeout_s=TIMEOUT_S)
        with pytest.raises(StoreUnavailable, match=r"^hf://buckets/user/bucket/run: put a: "):
            store.put("a", b"x", if_absent=True)
        store.close()


# Transfers.


@contextmanager
def holding(s3: Place, is_held: Callable[[Request], object], **more: Any) -> Iterator[S3Store]:
    """Yield a store behind a proxy that keeps some requests until the end."""
    ended = threading.Event()

    def hold(request: Request) -> None:
        if is_held(request):
            ended.wait()

    with s3.through(instead=hold, **more) as store:
        try:
            yield store
        finally:
            ended.set()


@pytest.mark.exhaustive
@pytest.mark.parametrize("held", [2, 12])
def test_an_upload_of_which_parts_stall_is_given_up_and_aborted(s3: Place, held: int) -> None:
    # Clients differ in the order of a query's parts.
    part = re.compile(rf"partNumber={held}(&|$)")
    with holding(s3, lambda request: part.search(request.target), timeout_s=8) as store:
        store.put("small", b"so that the first request is not the one that makes the connection")
        with pytest.raises(StoreUnavailable, match=f"{s3.url}: upload large: ") as caught:
            store.upload("large", (bytes(PART_BYTES) for _ in range(13)))
        # obstore aborts it on its thread, when its own request has ended.
        while not getattr(caught.value, "__notes__", ()) and unfinished_uploads(s3.options, s3.url):
            threading.Event().wait(0.05)
    with s3.opened() as plain:
        assert list(plain.list()) == ["small"]


@pytest.mark.exhaustive
def test_a_download_that_stalls_in_the_middle_is_given_up(s3: Place) -> None:
    with s3.opened() as plain:
        plain.upload("large", patterned(3 * PART_BYTES))

    def is_second_part(request: Request) -> bool:
        return request.headers.get("range", "").startswith(f"bytes={PART_BYTES}-")

    with holding(s3, is_second_part, timeout_s=5) as store:
        parts = store.read("large")
        assert next(parts) == pattern(0, PART_BYTES)
        with pytest.raises(StoreUnavailable, match=f"{s3.url}: get large: "):
            list(parts)


@pytest.mark.exhaustive
def test_an_upload_that_moves_slowly_is_not_cut(monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    # Small parts, so that the pauses of the server and not the machine are what is slow.
    part_bytes, timeout_s, pauses = 1 << 16, 4, threading.Event()
    for module in (s3_module, s3_s3fs):
        monkeypatch.setattr(module, "part_bytes", lambda number: part_bytes)
    monkeypatch.setattr(s3_module, "PART_BYTES", part_bytes)
    if client == "obstore":
        monkeypatch.setattr(pytest.importorskip("patchstore.stores.s3_obstore"), "PART_BYTES", part_bytes)
    sent: list[str] = []

    def slowly(request: Request) -> Answer:
        if "partNumber=" in request.target:
            # In three rounds of parts that is more than the limit, and in each less than a stall.
            pauses.wait(0.4 * timeout_s)
            sent.append(request.target)
        body = b"<R><UploadId>id</UploadId><ETag>tag</ETag><Bucket>bucket</Bucket><Key>key</Key></R>"
        return Answer(body=body, headers={"ETag": '"tag"', "Content-Type": "application/xml"})

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
def test_a_publication_to_a_store_that_falls_silent_fails_and_the_publisher_closes(
    s3: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tries, "FIRST_PAUSE_S", 0)
    monkeypatch.setattr(tries, "ATTEMPTS", 2)
    is_silent = threading.Event()
    with holding(s3, lambda _: is_silent.is_set(), timeout_s=5) as store:
        run = Run(store)
        run.publish_versions(2)
        is_silent.set()
        run.train()
        publication = run.publisher.publish_patch(3)
        # On a busy machine the client's own limit for a request may come before the deadline.
        with pytest.raises(PublishFailed, match="failed 2 times"):
            publication.result()
        run.close()


# The limits themselves.


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
