import errno
import socket
from collections.abc import Iterator
from contextlib import suppress
from threading import Event
from typing import Any

import pytest
from botocore.exceptions import ClientError

from patchstore.errors import AlreadyExists, NotFound, StoreUnavailable, UnsupportedStore, UsageError
from patchstore.stores import multipart, open_store, s3
from patchstore.stores.base import NUM_PARTS, PART_BYTES, Store
from patchstore.stores.s3 import S3Store
from patchstore.testing.store import StoreConformance
from tests.stores.lost_answers import losing_the_answer


@pytest.fixture
def store(s3_options: dict[str, Any], s3_url: str) -> Iterator[S3Store]:
    store = S3Store(s3_url, **s3_options)
    yield store
    store.close()


class TestS3Store(StoreConformance):
    @pytest.fixture(autouse=True)
    def _options(self, s3_options: dict[str, Any]) -> None:
        self.options = s3_options

    @pytest.fixture
    def store(self, s3_options: dict[str, Any], s3_url: str) -> Iterator[Store]:
        store = open_store(s3_url, **s3_options)
        yield store
        store.close()

    def other_process(self, store: Store) -> tuple[str, dict[str, Any]]:
        return store.url, {name: self.options[name] for name in ("endpoint_url", "key", "secret")}


def unfinished_uploads(store: S3Store) -> list[dict[str, Any]]:
    uploads = store._fs.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", [])
    return [upload for upload in uploads if upload["Key"].startswith(store._prefix)]


def refusal(code: str, number: int = errno.EIO) -> OSError:
    """What s3fs raises when S3 answers with this code."""
    exc = OSError(number, code)
    exc.__cause__ = ClientError({"Error": {"Code": code, "Message": code}}, "Any")
    return exc


def test_keys_lie_below_the_prefix_and_only_there(store: S3Store, s3_options: dict[str, Any]) -> None:
    store.put("versions/00000000.json", b"x")
    neighbour = S3Store(f"{store.url}-2", **s3_options)
    neighbour.put("versions/00000001.json", b"y")
    assert list(store.list()) == ["versions/00000000.json"]
    assert list(neighbour.list()) == ["versions/00000001.json"]
    assert S3Store("s3://bucket", **s3_options).get(f"{store._prefix}versions/00000000.json") == b"x"


def test_a_whole_object_is_got_with_one_request(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", b"x")

    def no_size(*args: object, **kwargs: object) -> None:
        raise AssertionError("asked for the size first")

    monkeypatch.setattr(store._fs, "_info", no_size)
    monkeypatch.setattr(store._fs, "_size", no_size)
    assert store.get("a") == b"x"


def test_a_listing_of_several_pages_is_whole(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"versions/{version:08d}.json" for version in range(7)]
    for key in keys:
        store.put(key, b"")
    call, num_pages = store._fs.call_s3, []

    def two_a_page(method: str, **parameters: Any) -> Any:
        num_pages.append(method)
        return call(method, **parameters, MaxKeys=2)

    monkeypatch.setattr(store._fs, "call_s3", two_a_page)
    assert list(store.list("versions/")) == keys
    assert len(num_pages) == 4


def test_a_small_upload_is_a_single_put(store: S3Store) -> None:
    store.upload("small", [b"x" * 100])
    assert "-" not in store._fs.call_s3("head_object", Bucket="bucket", Key=store._full("small"))["ETag"]


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


def test_an_upload_of_which_a_part_is_refused_is_aborted(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = store._fs.call_s3

    def refuse_the_second(method: str, **parameters: Any) -> Any:
        if method == "upload_part" and parameters["PartNumber"] == 2:
            raise refusal("InternalError")
        return call(method, **parameters)

    monkeypatch.setattr(store._fs, "call_s3", refuse_the_second)
    with pytest.raises(StoreUnavailable):
        store.upload("failed", (bytes(PART_BYTES) for _ in range(12)))
    assert unfinished_uploads(store) == []
    assert list(store.list()) == []


def test_an_abort_that_fails_is_noted_on_the_error(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    call = store._fs.call_s3

    def refuse(method: str, **parameters: Any) -> Any:
        if method in {"complete_multipart_upload", "abort_multipart_upload"}:
            raise refusal("InternalError")
        return call(method, **parameters)

    monkeypatch.setattr(store._fs, "call_s3", refuse)
    with pytest.raises(StoreUnavailable) as caught:
        store.upload("failed", [bytes(PART_BYTES), b"x"])
    assert any("not aborted" in note for note in caught.value.__notes__)


def test_an_upload_sends_parts_in_parallel_and_holds_a_bounded_number(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, produced, finished, most = store._fs.call_s3, 0, [], 0
    all_collected = Event()

    def call_counting(method: str, **parameters: Any) -> Any:
        if method == "upload_part":
            # No part arrives before as many have been produced as may be under way.
            assert all_collected.wait(timeout=60)
        answer = call(method, **parameters)
        if method == "upload_part":
            finished.append(parameters["PartNumber"])
        return answer

    def chunks() -> Iterator[bytes]:
        nonlocal produced, most
        for _ in range(NUM_PARTS + 4):
            produced += 1
            if produced == NUM_PARTS:
                all_collected.set()
            most = max(most, produced - len(finished))
            yield bytes(PART_BYTES)

    monkeypatch.setattr(store._fs, "call_s3", call_counting)
    store.upload("large", chunks())
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
    s3_options: dict[str, Any], s3_url: str
) -> None:
    with losing_the_answer(s3_options["endpoint_url"], "PUT", "/slot") as endpoint_url:
        store = S3Store(s3_url, **{**s3_options, "endpoint_url": endpoint_url})
        with pytest.raises(AlreadyExists):
            store.put("slot", b"mine", if_absent=True)
        assert store.get("slot") == b"mine"
        store.close()


def test_a_lost_answer_to_the_completion_of_an_upload_is_not_taken_for_not_found(
    s3_options: dict[str, Any], s3_url: str
) -> None:
    class Lossy(S3Store):
        """Loses the answer to the completion, which s3fs then repeats."""

        def _call(self, method: str, **parameters: Any) -> Any:
            if method == "complete_multipart_upload":
                super()._call(method, **parameters)
            return super()._call(method, **parameters)

    store = Lossy(s3_url, **s3_options)
    # Some servers repeat their answer, and others know no such upload any more.
    with suppress(StoreUnavailable):
        store.upload("large", [bytes(PART_BYTES), b"x"])
    assert store.size("large") == PART_BYTES + 1
    store.close()


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
def test_a_conflict_between_conditional_puts_is_asked_again(
    store: S3Store, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    answers = iter([refusal(code), refusal(code)])
    put = store._fs.pipe_file

    def conflicting(*args: Any, **kwargs: Any) -> Any:
        if exc := next(answers, None):
            raise exc
        return put(*args, **kwargs)

    monkeypatch.setattr(store._fs, "pipe_file", conflicting)
    monkeypatch.setattr(s3, "_CONFLICT_WAIT_S", 0)
    store.put("slot", b"mine", if_absent=True)
    assert store.get("slot") == b"mine"


def test_conflicts_without_end_are_reported_as_unavailable(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def conflicting(*args: Any, **kwargs: Any) -> Any:
        raise refusal("ConditionalRequestConflict")

    monkeypatch.setattr(store._fs, "pipe_file", conflicting)
    monkeypatch.setattr(s3, "_CONFLICT_WAIT_S", 0)
    with pytest.raises(StoreUnavailable):
        store.put("slot", b"mine", if_absent=True)


def test_a_failed_condition_counts_however_the_server_words_it(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # s3fs recognises only an answer that names the condition, which not all servers do.
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise refusal("PreconditionFailed", errno.EINVAL)

    monkeypatch.setattr(store._fs, "pipe_file", failing)
    with pytest.raises(AlreadyExists):
        store.put("slot", b"mine", if_absent=True)


@pytest.mark.parametrize(
    ("code", "exc", "expected"),
    [
        ("AccessDenied", PermissionError, UsageError),
        ("SignatureDoesNotMatch", PermissionError, UsageError),
        ("ExpiredToken", PermissionError, StoreUnavailable),
        ("NoSuchBucket", FileNotFoundError, UsageError),
        ("NoSuchKey", FileNotFoundError, NotFound),
        ("NoSuchUpload", FileNotFoundError, StoreUnavailable),
        ("SlowDown", OSError, StoreUnavailable),
        ("", TimeoutError, StoreUnavailable),
    ],
)
def test_what_s3_says_becomes_an_error_that_says_how_to_handle_it(
    store: S3Store, monkeypatch: pytest.MonkeyPatch, code: str, exc: type[OSError], expected: type[Exception]
) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        error = exc(code)
        error.__cause__ = refusal(code).__cause__ if code else None
        raise error

    monkeypatch.setattr(store._fs, "call_s3", failing)
    with pytest.raises(expected) as caught:
        store.size("a")
    assert type(caught.value) is expected
    assert isinstance(caught.value.__cause__, exc)


def test_a_missing_bucket_is_the_callers_mistake_and_not_a_missing_object(s3_options: dict[str, Any]) -> None:
    store = S3Store("s3://no-such-bucket/run", **s3_options)
    for ask in (
        lambda: store.get("a"),
        lambda: store.put("a", b""),
        lambda: store.upload("a", [bytes(PART_BYTES), b"x"]),
        lambda: list(store.list()),
    ):
        with pytest.raises(UsageError) as caught:
            ask()
        assert not isinstance(caught.value, NotFound)
    store.close()


def test_an_endpoint_that_does_not_answer_is_unavailable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        store = S3Store(
            "s3://bucket/run",
            endpoint_url=f"http://127.0.0.1:{taken.getsockname()[1]}",
            key="test",
            secret="test",
            config_kwargs={"retries": {"max_attempts": 0}},
        )
        with pytest.raises(StoreUnavailable):
            store.get("a")
        store.close()


def test_an_old_s3fs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3fs.__version__", "0.4.2")
    with pytest.raises(UnsupportedStore, match="pip install"):
        S3Store("s3://bucket/run")


def test_connections_are_neither_shared_nor_listings_kept(s3_options: dict[str, Any]) -> None:
    first, second = (S3Store("s3://bucket/run", **s3_options) for _ in range(2))
    assert first._fs is not second._fs
    assert not first._fs.dircache.use_listings_cache
