import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import repeat
from typing import Any

import pytest
import s3fs

from patchstore.errors import AlreadyExists, NotFound, StoreUnavailable, UnsupportedStore, UsageError
from patchstore.stores.base import NUM_PARTS, PART_BYTES, Store, cut
from patchstore.stores.probe import check_create_only
from patchstore.stores.s3 import S3Store
from patchstore.stores.s3_s3fs import part_bytes
from patchstore.testing.store import StoreConformance
from tests.stores.asks import OPERATIONS
from tests.stores.lost_answers import Answer, Place, Request, error
from tests.stores.s3_server import key_of, unfinished_uploads

SOON_S = 2
"""After which faults that stay are seen, if the machine is not too busy for a request of that time."""


@pytest.fixture(
    params=["s3", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("ministack", "seaweedfs"))]
)
def place(request: pytest.FixtureRequest, s3_url: str, client: str) -> Place:
    """A place at each service; `s3` is one at moto, for what a proxy before it makes up."""
    return Place(s3_url, {**request.getfixturevalue(f"{request.param}_options"), "client": client})


@pytest.fixture
def store(place: Place) -> Iterator[S3Store]:
    with place.opened() as store:
        yield store


class TestS3Store(StoreConformance):
    @pytest.fixture
    def store(self, place: Place) -> Iterator[Store]:
        self.options = place.options
        with place.opened() as store:
            yield store

    def other_process(self, store: Store) -> tuple[str, dict[str, Any]]:
        return store.url, {name: self.options[name] for name in ("endpoint_url", "key", "secret", "client")}


def test_it_is_moved_by_the_client_that_was_asked_for(store: S3Store, client: str) -> None:
    assert store.client == client


def test_keys_lie_below_the_prefix_and_only_there(store: S3Store, place: Place) -> None:
    store.put("versions/00000000.json", b"x")
    neighbour = S3Store(f"{store.url}-2", **place.options)
    neighbour.put("versions/00000001.json", b"y")
    assert list(store.list()) == ["versions/00000000.json"]
    assert list(neighbour.list()) == ["versions/00000001.json"]
    assert S3Store("s3://bucket", **place.options).get(key_of(store.url, "versions/00000000.json")) == b"x"


def test_what_is_small_is_got_or_uploaded_with_one_request(place: Place) -> None:
    with place.behind() as (store, asked):
        store.upload("small", [b"x" * 100])
        assert store.get("small") == b"x" * 100
    assert [request.method for request in asked] == ["PUT", "GET"]


def test_a_listing_of_several_pages_is_whole(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"versions/{version:08d}.json" for version in range(7)]
    for key in keys:
        store.put(key, b"")
    ask, num_pages = s3fs.S3FileSystem.call_s3, []

    def two_a_page(fs: Any, method: str, **parameters: Any) -> Any:
        num_pages.append(method)
        return ask(fs, method, **parameters, MaxKeys=2)

    monkeypatch.setattr(s3fs.S3FileSystem, "call_s3", two_a_page)
    assert list(store.list("versions/")) == keys
    assert len(num_pages) == 4


@pytest.mark.parametrize(
    ("num_parts", "raised"),
    [(1, KeyboardInterrupt), (NUM_PARTS + 2, KeyboardInterrupt), (1, FileNotFoundError)],
)
def test_an_upload_whose_chunks_raise_is_aborted_with_their_error(
    store: S3Store, place: Place, num_parts: int, raised: type[BaseException]
) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(num_parts):
            yield bytes(PART_BYTES)
            yield b"and a little"
        assert unfinished_uploads(place.options, store.url)
        raise raised("the producer's own")

    with pytest.raises(raised, match="the producer's own"):
        store.upload("failed", chunks())
    assert unfinished_uploads(place.options, store.url) == []


def test_an_upload_of_which_a_part_is_refused_is_aborted(store: S3Store, place: Place) -> None:
    refusal = [error(400, "InvalidRequest")]
    with (
        place.behind("PUT", "/failed?partNumber&uploadId", refusal) as (writer, _),
        pytest.raises(StoreUnavailable),
    ):
        writer.upload("failed", (bytes(PART_BYTES) for _ in range(12)))
    assert unfinished_uploads(place.options, store.url) == []
    assert list(store.list()) == []


@pytest.mark.parametrize("client", ["s3fs"])
def test_an_abort_that_fails_is_noted_on_the_error(s3: Place) -> None:
    def refuse(request: Request) -> Answer | None:
        is_end = request.method in {"POST", "DELETE"} and "uploadId=" in request.target
        return error(400, "InvalidRequest") if is_end else None

    with s3.through(instead=refuse) as store, pytest.raises(StoreUnavailable) as caught:
        store.upload("failed", [bytes(PART_BYTES), b"x"])
    assert any("not aborted" in note for note in caught.value.__notes__)


def test_an_upload_sends_parts_in_parallel_and_holds_a_bounded_number(store: S3Store, place: Place) -> None:
    produced, most = 0, 0
    arrived, finished = list[Request](), list[Request]()
    all_under_way = threading.Event()

    def hold(request: Request) -> None:
        if "partNumber" in request.target:
            arrived.append(request)
            if len(arrived) == NUM_PARTS - 1:
                all_under_way.set()
            # No part is answered before as many are under way as may be, beside the one that is collected.
            assert all_under_way.wait(timeout=60)

    def count(request: Request) -> bool:
        if "partNumber" in request.target:
            finished.append(request)
        return False

    def chunks() -> Iterator[bytes]:
        nonlocal produced, most
        for _ in range(NUM_PARTS + 4):
            produced += 1
            most = max(most, produced - len(finished))
            yield bytes(PART_BYTES)

    with place.through(instead=hold, is_lost=count) as writer:
        writer.upload("large", chunks())
    assert len(finished) == NUM_PARTS + 4
    assert most <= NUM_PARTS + 1  # a part is cut, and sent, when the byte after it comes
    assert store.size("large") == (NUM_PARTS + 4) * PART_BYTES


def test_parts_grow_so_that_ten_thousand_hold_the_largest_object() -> None:
    sizes = [part_bytes(number) for number in range(1, 10_001)]
    assert sizes == sorted(sizes)
    assert sizes[4_999] == sizes[0] >= 5 << 20
    assert sizes[-1] <= 5 << 30
    assert sum(sizes) >= 5 << 40


def test_parts_are_cut_at_their_sizes() -> None:
    for size in range(14):
        data = bytes(range(size))
        for step in (1, 3, 100):
            chunks = [data[offset : offset + step] for offset in range(0, size, step)]
            parts = list(cut(chunks, lambda number: 2 * number))
            assert b"".join(parts) == data
            assert [len(part) for part in parts[:-1]] == [2, 4, 6][: len(parts) - 1]
            assert len(parts) == 1 or parts[-1]


def test_a_lost_answer_to_a_create_only_put_reads_as_taken_by_ones_own(place: Place) -> None:
    with place.losing_the_answer("PUT", "/slot") as store:
        with pytest.raises(AlreadyExists):
            store.put("slot", b"mine", if_absent=True)
        assert store.get("slot") == b"mine"


@pytest.mark.parametrize("verb", ["get", "put", "size", "delete", "upload"])
def test_a_lost_answer_to_what_may_be_repeated_is_not_noticed(s3: Place, verb: str) -> None:
    method = {"get": "GET", "size": "HEAD", "delete": "DELETE"}.get(verb, "PUT")
    ending = "/a?partNumber&uploadId" if verb == "upload" else "/a"
    data = bytes(PART_BYTES) + b"x"
    with s3.losing_the_answer(method, ending) as store:
        if verb == "upload":
            store.upload("a", [data])
        else:
            store.put("a", data)
        assert store.size("a") == len(data)
        assert store.get("a") == data
        store.delete("a")
        assert list(store.list()) == []


def test_a_lost_answer_to_the_completion_of_an_upload_is_not_taken_for_not_found(place: Place) -> None:
    with place.losing_the_answer("POST", "/large?uploadId") as store:
        # Some servers repeat their answer, and others know no such upload any more.
        with suppress(StoreUnavailable):
            store.upload("large", [bytes(PART_BYTES), b"x"])
        assert store.size("large") == PART_BYTES + 1


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
def test_a_conflict_between_conditional_puts_is_asked_again(s3: Place, code: str) -> None:
    with s3.behind("PUT", "/slot", [error(409, code)] * 2) as (store, asked):
        store.put("slot", b"mine", if_absent=True)
        assert store.get("slot") == b"mine"
    assert [request.method for request in asked] == ["PUT", "PUT", "PUT", "GET"]


def test_conflicts_without_end_are_reported_as_unavailable(s3: Place) -> None:
    conflicts = repeat(error(409, "ConditionalRequestConflict"))
    with (
        s3.behind("PUT", "/slot", conflicts, timeout_s=SOON_S) as (store, asked),
        pytest.raises(StoreUnavailable),
    ):
        store.put("slot", b"mine", if_absent=True)
    assert len(asked) > 1


@pytest.mark.parametrize("answer", [Answer(status=412), error(412, "PreconditionFailed")])
def test_a_failed_condition_counts_however_the_server_words_it(s3: Place, answer: Answer) -> None:
    # s3fs recognises only an answer that names the condition, which not all servers do.
    with s3.behind("PUT", "/slot", [answer]) as (store, _), pytest.raises(AlreadyExists):
        store.put("slot", b"mine", if_absent=True)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (403, "AccessDenied", UsageError),
        (403, "SignatureDoesNotMatch", UsageError),
        (403, "InvalidAccessKeyId", UsageError),
        (403, "RequestTimeTooSkewed", StoreUnavailable),
        (400, "ExpiredToken", StoreUnavailable),
        (404, "NoSuchBucket", UsageError),
        (404, "NoSuchKey", NotFound),
        (404, "NoSuchUpload", StoreUnavailable),
        (400, "InvalidRequest", StoreUnavailable),
        (503, "SlowDown", StoreUnavailable),
    ],
)
def test_what_s3_says_becomes_an_error_that_says_how_to_handle_it(
    s3: Place, status: int, code: str, expected: type[Exception]
) -> None:
    timeout_s = SOON_S if status == 503 else 60
    with (
        s3.behind("GET", "/a", repeat(error(status, code)), timeout_s=timeout_s) as (store, _),
        pytest.raises(expected) as caught,
    ):
        store.get("a")
    assert type(caught.value) is expected
    assert caught.value.__cause__ is not None
    assert "Debug source" not in str(caught.value)


def test_a_missing_bucket_is_the_callers_mistake_and_not_a_missing_object(place: Place) -> None:
    store = S3Store("s3://no-such-bucket/run", **place.options)
    for ask in (*OPERATIONS.values(), lambda store: store.get("a", 3, 3)):
        with pytest.raises(UsageError, match="there is no bucket no-such-bucket") as caught:
            ask(store)
        assert not isinstance(caught.value, NotFound)
    store.close()


def test_sizes_that_are_missing_have_the_bucket_looked_for_once(s3: Place) -> None:
    with s3.behind() as (store, asked):
        for key in ("a", "b"):
            with pytest.raises(NotFound, match=f"size {key}: there is no such object"):
                store.size(key)
    assert [(request.method, request.path.rpartition("/")[2]) for request in asked] == [
        ("HEAD", "a"),
        ("HEAD", "bucket"),
        ("HEAD", "b"),
    ]


def test_a_size_is_missing_though_the_bucket_may_not_be_looked_for(s3: Place) -> None:
    refusals = repeat(error(403, "AccessDenied"))
    with s3.behind("HEAD", "/bucket", refusals) as (store, _), pytest.raises(NotFound):
        store.size("a")


def test_a_service_that_creates_only_once_is_proved(store: S3Store) -> None:
    check_create_only(store)
    assert list(store.list()) == []


def test_a_service_that_ignores_conditions_is_refused(
    rclone_options: dict[str, Any], client: str, s3_url: str
) -> None:
    with (
        Place(s3_url, rclone_options).opened(client=client) as store,
        pytest.raises(UnsupportedStore, match="create-only"),
    ):
        check_create_only(store)


def test_closing_a_store_leaves_another_one_open(s3: Place) -> None:
    with s3.opened() as second:
        with s3.opened() as first:
            for store in (first, second):
                store.put("a", b"x")
        assert second.get("a") == b"x"
