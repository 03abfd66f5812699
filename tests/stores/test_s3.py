import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import repeat
from typing import Any

import pytest

from patchstore.errors import AlreadyExists, NotFound, StoreUnavailable, UnsupportedStore, UsageError
from patchstore.stores import multipart, open_store, packages, s3
from patchstore.stores.base import NUM_PARTS, PART_BYTES, Store
from patchstore.stores.probe import check_create_only
from patchstore.stores.s3 import S3Store
from patchstore.testing.store import StoreConformance
from tests.stores.lost_answers import Answer, Request, answering, error, losing_the_answer, passing_on

NO_RETRIES = {"retries": {"max_attempts": 0}}


@pytest.fixture(params=["s3fs", "obstore"])
def client(request: pytest.FixtureRequest) -> str:
    if request.param == "obstore":
        pytest.importorskip("obstore", reason="obstore is not installed: pip install 'obstore>=0.12'")
    return str(request.param)


@pytest.fixture(params=["moto", pytest.param("ministack", marks=pytest.mark.exhaustive)])
def options(request: pytest.FixtureRequest, client: str) -> dict[str, Any]:
    server = "s3_options" if request.param == "moto" else f"{request.param}_options"
    return {**request.getfixturevalue(server), "client": client}


@pytest.fixture
def moto(s3_options: dict[str, Any], client: str) -> dict[str, Any]:
    """One server for what a proxy before it makes up."""
    return {**s3_options, "client": client}


@pytest.fixture
def store(options: dict[str, Any], s3_url: str) -> Iterator[S3Store]:
    store = S3Store(s3_url, **options)
    yield store
    store.close()


class TestS3Store(StoreConformance):
    @pytest.fixture(autouse=True)
    def _options(self, options: dict[str, Any]) -> None:
        self.options = options

    @pytest.fixture
    def store(self, options: dict[str, Any], s3_url: str) -> Iterator[Store]:
        store = open_store(s3_url, **options)
        yield store
        store.close()

    def other_process(self, store: Store) -> tuple[str, dict[str, Any]]:
        return store.url, {name: self.options[name] for name in ("endpoint_url", "key", "secret", "client")}


def call(store: S3Store, method: str, **parameters: Any) -> dict[str, Any]:
    answer: dict[str, Any] = store._client.fs.call_s3(method, Bucket="bucket", **parameters)
    return answer


def unfinished_uploads(store: S3Store) -> list[dict[str, Any]]:
    uploads = call(store, "list_multipart_uploads").get("Uploads", [])
    return [upload for upload in uploads if upload["Key"].startswith(store._prefix)]


def test_it_is_moved_by_the_client_that_was_asked_for(store: S3Store, client: str) -> None:
    assert store.client == client


def test_keys_lie_below_the_prefix_and_only_there(store: S3Store, options: dict[str, Any]) -> None:
    store.put("versions/00000000.json", b"x")
    neighbour = S3Store(f"{store.url}-2", **options)
    neighbour.put("versions/00000001.json", b"y")
    assert list(store.list()) == ["versions/00000000.json"]
    assert list(neighbour.list()) == ["versions/00000001.json"]
    assert S3Store("s3://bucket", **options).get(f"{store._prefix}versions/00000000.json") == b"x"


def test_a_whole_object_is_got_with_one_request(store: S3Store, options: dict[str, Any]) -> None:
    store.put("a", b"x")
    with answering(options["endpoint_url"]) as (endpoint_url, asked):
        reader = S3Store(store.url, **{**options, "endpoint_url": endpoint_url})
        assert reader.get("a") == b"x"
        reader.close()
    assert [request.method for request in asked] == ["GET"]


def test_a_listing_of_several_pages_is_whole(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"versions/{version:08d}.json" for version in range(7)]
    for key in keys:
        store.put(key, b"")
    ask, num_pages = store._client.fs.call_s3, []

    def two_a_page(method: str, **parameters: Any) -> Any:
        num_pages.append(method)
        return ask(method, **parameters, MaxKeys=2)

    monkeypatch.setattr(store._client.fs, "call_s3", two_a_page)
    assert list(store.list("versions/")) == keys
    assert len(num_pages) == 4


def test_objects_of_others_that_are_no_keys_do_not_break_a_listing(store: S3Store) -> None:
    store.put("a", b"")
    call(store, "put_object", Key=f"{store._prefix}a//b c", Body=b"")
    assert list(store.list()) == ["a", "a//b c"]


def test_a_small_upload_is_a_single_put(store: S3Store) -> None:
    store.upload("small", [b"x" * 100])
    assert "-" not in call(store, "head_object", Key=store._full("size", "small"))["ETag"]


@pytest.mark.parametrize("num_parts", [1, NUM_PARTS + 2])
def test_an_upload_whose_chunks_raise_is_aborted(store: S3Store, num_parts: int) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(num_parts):
            yield bytes(PART_BYTES)
            yield b"and a little"
        assert unfinished_uploads(store)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.upload("failed", chunks())
    assert unfinished_uploads(store) == []


def test_what_chunks_raise_is_not_taken_for_what_the_store_says(store: S3Store) -> None:
    def chunks() -> Iterator[bytes]:
        yield bytes(PART_BYTES + 1)
        raise FileNotFoundError("the producer's own")

    with pytest.raises(FileNotFoundError, match="the producer's own"):
        store.upload("failed", chunks())
    assert unfinished_uploads(store) == []


def test_an_upload_of_which_a_part_is_refused_is_aborted(store: S3Store, options: dict[str, Any]) -> None:
    refusal = [error(400, "InvalidRequest")]
    with answering(options["endpoint_url"], "PUT", "/failed?partNumber&uploadId", refusal) as (url, _):
        writer = S3Store(store.url, **{**options, "endpoint_url": url})
        with pytest.raises(StoreUnavailable):
            writer.upload("failed", (bytes(PART_BYTES) for _ in range(12)))
        writer.close()
    assert unfinished_uploads(store) == []
    assert list(store.list()) == []


def test_an_abort_that_fails_is_noted_on_the_error(
    s3_options: dict[str, Any], s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Store(s3_url, **s3_options, client="s3fs")
    ask = store._client.fs.call_s3

    def refuse(method: str, **parameters: Any) -> Any:
        if method in {"complete_multipart_upload", "abort_multipart_upload"}:
            raise OSError(method)
        return ask(method, **parameters)

    monkeypatch.setattr(store._client.fs, "call_s3", refuse)
    with pytest.raises(StoreUnavailable) as caught:
        store.upload("failed", [bytes(PART_BYTES), b"x"])
    assert any("not aborted" in note for note in caught.value.__notes__)
    store.close()


def test_an_upload_sends_parts_in_parallel_and_holds_a_bounded_number(
    store: S3Store, options: dict[str, Any]
) -> None:
    produced, most = 0, 0
    arrived, finished = list[Request](), list[Request]()
    all_under_way = threading.Event()

    def hold(request: Request) -> None:
        if "partNumber" in request.path:
            arrived.append(request)
            if len(arrived) == NUM_PARTS - 1:
                all_under_way.set()
            # No part is answered before as many are under way as may be, beside the one that is collected.
            assert all_under_way.wait(timeout=60)

    def count(request: Request) -> bool:
        if "partNumber" in request.path:
            finished.append(request)
        return False

    def chunks() -> Iterator[bytes]:
        nonlocal produced, most
        for _ in range(NUM_PARTS + 4):
            produced += 1
            most = max(most, produced - len(finished))
            yield bytes(PART_BYTES)

    with passing_on(options["endpoint_url"], instead=hold, is_lost=count) as url:
        writer = S3Store(store.url, **{**options, "endpoint_url": url})
        writer.upload("large", chunks())
        writer.close()
    assert len(finished) == NUM_PARTS + 4
    assert most <= NUM_PARTS + 1  # a part is cut, and sent, when the byte after it comes
    assert store.size("large") == (NUM_PARTS + 4) * PART_BYTES


def test_parts_grow_so_that_ten_thousand_hold_the_largest_object() -> None:
    sizes = [multipart.part_bytes(number) for number in range(1, 10_001)]
    assert sizes == sorted(sizes)
    assert sizes[4_999] == sizes[0] >= 5 << 20
    assert sizes[-1] <= 5 << 30
    assert sum(sizes) >= 5 << 40


def test_parts_are_cut_at_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "part_bytes", lambda number: 2 * number)
    for size in range(14):
        data = bytes(range(size))
        for step in (1, 3, 100):
            chunks = [data[offset : offset + step] for offset in range(0, size, step)]
            parts = list(multipart.in_parts(chunks))
            assert b"".join(parts) == data
            assert [len(part) for part in parts[:-1]] == [2, 4, 6][: len(parts) - 1]
            assert len(parts) == 1 or parts[-1]


def test_a_lost_answer_to_a_create_only_put_reads_as_taken_by_ones_own(
    options: dict[str, Any], s3_url: str
) -> None:
    with losing_the_answer(options["endpoint_url"], "PUT", "/slot") as endpoint_url:
        store = S3Store(s3_url, **{**options, "endpoint_url": endpoint_url})
        with pytest.raises(AlreadyExists):
            store.put("slot", b"mine", if_absent=True)
        assert store.get("slot") == b"mine"
        store.close()


@pytest.mark.parametrize("verb", ["get", "put", "size", "delete", "upload"])
def test_a_lost_answer_to_what_may_be_repeated_is_not_noticed(
    moto: dict[str, Any], s3_url: str, verb: str
) -> None:
    method = {"get": "GET", "size": "HEAD", "delete": "DELETE"}.get(verb, "PUT")
    ending = "/a?partNumber&uploadId" if verb == "upload" else "/a"
    data = bytes(PART_BYTES) + b"x"
    with losing_the_answer(moto["endpoint_url"], method, ending) as endpoint_url:
        store = S3Store(s3_url, **{**moto, "endpoint_url": endpoint_url})
        if verb == "upload":
            store.upload("a", [data])
        else:
            store.put("a", data)
        assert store.size("a") == len(data)
        assert store.get("a") == data
        store.delete("a")
        assert list(store.list()) == []
        store.close()


def test_a_lost_answer_to_the_completion_of_an_upload_is_not_taken_for_not_found(
    options: dict[str, Any], s3_url: str
) -> None:
    with losing_the_answer(options["endpoint_url"], "POST", "/large?uploadId") as endpoint_url:
        store = S3Store(s3_url, **{**options, "endpoint_url": endpoint_url})
        # Some servers repeat their answer, and others know no such upload any more.
        with suppress(StoreUnavailable):
            store.upload("large", [bytes(PART_BYTES), b"x"])
        assert store.size("large") == PART_BYTES + 1
        store.close()


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
def test_a_conflict_between_conditional_puts_is_asked_again(
    moto: dict[str, Any], s3_url: str, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr(s3, "_CONFLICT_WAIT_S", 0)
    with answering(moto["endpoint_url"], "PUT", "/slot", [error(409, code)] * 2) as (endpoint_url, asked):
        store = S3Store(s3_url, **{**moto, "endpoint_url": endpoint_url})
        store.put("slot", b"mine", if_absent=True)
        assert store.get("slot") == b"mine"
        store.close()
    assert [request.method for request in asked] == ["PUT", "PUT", "PUT", "GET"]


def test_conflicts_without_end_are_reported_as_unavailable(
    moto: dict[str, Any], s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_CONFLICT_WAIT_S", 0)
    conflicts = repeat(error(409, "ConditionalRequestConflict"))
    with answering(moto["endpoint_url"], "PUT", "/slot", conflicts) as (endpoint_url, asked):
        store = S3Store(s3_url, **{**moto, "endpoint_url": endpoint_url, "config_kwargs": NO_RETRIES})
        with pytest.raises(StoreUnavailable):
            store.put("slot", b"mine", if_absent=True)
        store.close()
    assert len(asked) >= 5


@pytest.mark.parametrize("answer", [(412, b""), error(412, "PreconditionFailed")])
def test_a_failed_condition_counts_however_the_server_words_it(
    moto: dict[str, Any], s3_url: str, answer: Answer
) -> None:
    # s3fs recognises only an answer that names the condition, which not all servers do.
    with answering(moto["endpoint_url"], "PUT", "/slot", [answer]) as (endpoint_url, _):
        store = S3Store(s3_url, **{**moto, "endpoint_url": endpoint_url})
        with pytest.raises(AlreadyExists):
            store.put("slot", b"mine", if_absent=True)
        store.close()


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
    moto: dict[str, Any], s3_url: str, status: int, code: str, expected: type[Exception]
) -> None:
    with answering(moto["endpoint_url"], "GET", "/a", repeat(error(status, code))) as (endpoint_url, _):
        store = S3Store(s3_url, **{**moto, "endpoint_url": endpoint_url, "config_kwargs": NO_RETRIES})
        with pytest.raises(expected) as caught:
            store.get("a")
        store.close()
    assert type(caught.value) is expected
    assert caught.value.__cause__ is not None
    assert "Debug source" not in str(caught.value)


def test_a_missing_bucket_is_the_callers_mistake_and_not_a_missing_object(options: dict[str, Any]) -> None:
    store = S3Store("s3://no-such-bucket/run", **options)
    for ask in (
        lambda: store.get("a"),
        lambda: store.put("a", b""),
        lambda: store.upload("a", [bytes(PART_BYTES), b"x"]),
        lambda: list(store.list()),
        lambda: store.delete("a"),
    ):
        with pytest.raises(UsageError) as caught:
            ask()
        assert not isinstance(caught.value, NotFound)
    store.close()


def test_the_size_of_an_object_in_a_missing_bucket_is_the_callers_mistake_too(
    options: dict[str, Any],
) -> None:
    store = S3Store("s3://no-such-bucket/run", **options)
    for ask in (lambda: store.size("a"), lambda: store.get("a", 3, 3)):
        with pytest.raises(UsageError, match="there is no bucket no-such-bucket"):
            ask()
    store.close()


def test_sizes_that_are_missing_have_the_bucket_looked_for_once(moto: dict[str, Any], s3_url: str) -> None:
    with answering(moto["endpoint_url"]) as (endpoint_url, asked):
        store = S3Store(s3_url, **{**moto, "endpoint_url": endpoint_url})
        for key in ("a", "b"):
            with pytest.raises(NotFound, match=f"size {key}: there is no such object"):
                store.size(key)
        store.close()
    assert [(request.method, request.path.rpartition("/")[2]) for request in asked] == [
        ("HEAD", "a"),
        ("HEAD", "bucket"),
        ("HEAD", "b"),
    ]


def test_a_size_is_missing_though_the_bucket_may_not_be_looked_for(moto: dict[str, Any], s3_url: str) -> None:
    refusals = repeat(error(403, "AccessDenied"))
    with answering(moto["endpoint_url"], "HEAD", "/bucket", refusals) as (endpoint_url, _):
        store = S3Store(s3_url, **{**moto, "endpoint_url": endpoint_url})
        with pytest.raises(NotFound):
            store.size("a")
        store.close()


def test_an_endpoint_that_does_not_answer_is_unavailable(client: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        store = S3Store(
            "s3://bucket/run",
            endpoint_url=f"http://127.0.0.1:{taken.getsockname()[1]}",
            key="test",
            secret="test",
            client=client,
            config_kwargs=NO_RETRIES,
        )
        for ask in (
            lambda: store.get("a"),
            lambda: store.size("a"),
            lambda: store.put("a", b"", if_absent=True),
            lambda: store.upload("a", [bytes(PART_BYTES), b"x"]),
        ):
            with pytest.raises(StoreUnavailable):
                ask()
        store.close()


def test_a_service_that_creates_only_once_is_proved(store: S3Store) -> None:
    check_create_only(store)
    assert list(store.list()) == []


def test_a_service_that_ignores_conditions_is_refused(
    rclone_options: dict[str, Any], client: str, s3_url: str
) -> None:
    store = S3Store(s3_url, **rclone_options, client=client)
    with pytest.raises(UnsupportedStore, match="create-only"):
        check_create_only(store)
    store.close()


def test_an_old_s3fs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.metadata, "version", {"s3fs": "0.4.2", "aiobotocore": "3.0"}.get)
    with pytest.raises(UnsupportedStore, match="pip install 's3fs"):
        S3Store("s3://bucket/run")


def test_connections_are_neither_shared_nor_listings_kept(s3_options: dict[str, Any]) -> None:
    first, second = (S3Store("s3://bucket/run", **s3_options)._client.fs for _ in range(2))
    assert first is not second
    assert not first.dircache.use_listings_cache
