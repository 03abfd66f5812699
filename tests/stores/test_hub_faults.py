"""What becomes of a Hub's faults: retried, said plainly, or found by digests; never taken for an answer."""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from patchstore import Replica, replay
from patchstore.errors import (
    AlreadyExists,
    CorruptObject,
    NotFound,
    StoreUnavailable,
    UnsupportedStore,
    UsageError,
)
from patchstore.format import layout
from patchstore.stores import hub_api
from patchstore.stores.base import PART_BYTES
from patchstore.stores.hub import HubStore
from patchstore.testing.hub import Hub
from patchstore.testing.hub.clients import quick_clients
from patchstore.testing.hub.server import READ_TOKEN, TOKEN
from patchstore.testing.pattern import pattern, patterned
from tests.support.weights import Run, assert_same_bits

BUCKET = "user/bucket"
URL = f"hf://buckets/{BUCKET}/run"
VERBS: dict[str, Callable[[HubStore], object]] = {
    "get": lambda store: store.get("a"),
    "size": lambda store: store.size("a"),
    "put": lambda store: store.put("a", b"x"),
    "list": lambda store: list(store.list()),
    "delete": lambda store: store.delete("a"),
    "upload": lambda store: store.upload("a", [b"x"]),
    "read": lambda store: list(store.read("a")),
}
READING = {"get", "size", "list", "read"}


@pytest.fixture(scope="module", autouse=True)
def _clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_clients(tmp_path_factory.mktemp("hf")):
        yield


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_api, "_FIRST_WAIT_S", 0.01)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        hub.create_bucket(BUCKET)
        yield hub


@pytest.fixture
def store(hub: Hub) -> HubStore:
    """A store without the gateway."""
    return HubStore(URL, endpoint=hub.url, token=TOKEN, single_writer=True)


def once(method: str, ending: str, status: int, body: bytes = b"{}") -> Callable[[str, str], Any]:
    """A fault: the first request of a method to a path that ends, or goes on, so."""
    left = [(status, body)]

    def fault(asked: str, path: str) -> tuple[int, bytes] | None:
        return left.pop() if left and asked == method and ending in path else None

    return fault


def always(method: str, part: str, status: int) -> Callable[[str, str], Any]:
    return lambda asked, path: (status, b"{}") if asked == method and part in path else None


@pytest.mark.sample(8)
@pytest.mark.parametrize("status", [500, 503, 429])
@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("GET", "/xet-write-token"),
        ("POST", "/v1/xorbs/"),
        ("POST", "/v1/shards"),
        ("POST", "/batch"),
        ("POST", "/paths-info"),
        ("GET", "/resolve/"),
        ("GET", "/content/"),
        ("GET", "/tree"),
        ("GET", "/xet-read-token"),
        ("GET", "/v1/reconstructions/"),
        ("GET", "/xorb-data/"),
    ],
)
def test_a_passing_fault_of_any_request_is_not_seen(
    hub: Hub, store: HubStore, method: str, part: str, status: int
) -> None:
    size = PART_BYTES + 5
    hub.fault = once(method, part, status)
    store.upload("large", patterned(size))
    assert store.size("large") == size
    assert store.get("large", 3, 9) == pattern(3, 9)
    assert b"".join(store.read("large")) == pattern(0, size)
    assert list(store.list()) == ["large"]
    assert not hub.fault(method, part)


@pytest.mark.parametrize("verb", VERBS)
def test_a_fault_that_stays_is_unavailable(hub: Hub, store: HubStore, verb: str) -> None:
    store.put("a", b"x")
    hub.fault = lambda method, path: (503, b"{}")
    with pytest.raises(StoreUnavailable) as caught:
        VERBS[verb](store)
    assert type(caught.value) is StoreUnavailable
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("part", ["/v1/xorbs/", "/v1/shards", "/batch"])
def test_an_upload_that_fails_leaves_nothing_to_be_seen(hub: Hub, store: HubStore, part: str) -> None:
    store.put("taken", b"old")
    for status in (503, 400):
        hub.fault = always("POST", part, status)
        for key in ("new", "taken"):
            with pytest.raises(StoreUnavailable):
                store.upload(key, patterned(3 * PART_BYTES))
    hub.fault = None
    assert list(store.list()) == ["taken"]
    assert store.get("taken") == b"old"


@pytest.mark.parametrize("part", ["/v1/reconstructions/", "/xorb-data/"])
def test_a_download_that_ends_early_is_unavailable(hub: Hub, store: HubStore, part: str) -> None:
    size = 2 * PART_BYTES
    store.upload("large", patterned(size))
    hub.fault = always("GET", part, 503)
    with pytest.raises(StoreUnavailable):
        list(store.read("large"))
    hub.fault = None
    assert b"".join(store.read("large")) == pattern(0, size)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_content_that_is_not_where_the_hub_says_is_no_missing_object(
    hub: Hub, store: HubStore, status: int
) -> None:
    store.put("a", b"x")
    hub.fault = always("GET", "/content/", status)
    with pytest.raises(StoreUnavailable):
        store.get("a")


@pytest.mark.parametrize("verb", VERBS)
def test_a_hub_that_has_gone_is_unavailable(hub: Hub, store: HubStore, verb: str) -> None:
    store.put("a", b"x")
    hub.close()
    with pytest.raises(StoreUnavailable):
        VERBS[verb](store)


@pytest.mark.parametrize("verb", ["get", "list", "put"])
def test_a_hub_that_takes_requests_and_never_answers_is_given_up(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(hub_api, "_TIMEOUT_S", (1.0, 0.05, 0.05, 0.05))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        store = HubStore(URL, endpoint=endpoint, token=TOKEN)
        with pytest.raises(StoreUnavailable):
            VERBS[verb](store)


def test_every_request_has_a_limit_on_its_time(
    hub: Hub, store: HubStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, limits = hub_api.http_backoff, []

    def noting(*args: Any, **kwargs: Any) -> Any:
        limits.append(kwargs["timeout"])
        return send(*args, **kwargs)

    monkeypatch.setattr(hub_api, "http_backoff", noting)
    for verb in VERBS.values():
        store.put("a", b"x")
        verb(store)
    assert all(min(limit) > 0 and max(limit) <= 60 for limit in limits)
    assert len(limits) > len(VERBS)


# Lost answers.


def test_a_lost_answer_to_a_batch_is_asked_for_again(hub: Hub, store: HubStore) -> None:
    lost: list[str] = []

    def lose(method: str, path: str) -> bool:
        if path.endswith("/batch") and len(lost) < 2:
            lost.append(path)
            return True
        return False

    hub.lose = lose
    store.put("a", b"x")
    assert store.get("a") == b"x"
    lost.clear()
    store.delete("a")
    assert list(store.list()) == []
    assert len(lost) == 2


def test_a_lost_answer_of_the_gateway_reads_as_taken_by_ones_own(hub: Hub) -> None:
    store = HubStore(URL, **hub.options("user"))
    lost: list[str] = []

    def lose(method: str, path: str) -> bool:
        if method == "PUT" and not lost:
            lost.append(path)
            return True
        return False

    hub.lose = lose
    with pytest.raises(AlreadyExists):
        store.put("slot", b"mine", if_absent=True)
    assert lost
    assert store.get("slot") == b"mine"
    store.close()


@pytest.mark.parametrize("through_gateway", [True, False])
def test_a_run_goes_on_while_answers_are_lost(hub: Hub, store: HubStore, through_gateway: bool) -> None:
    store = HubStore(URL, **hub.options("user")) if through_gateway else store
    num_asked = [0]

    def lose(method: str, path: str) -> bool:
        if path.endswith("/batch") or method == "PUT":
            num_asked[0] += 1
            return num_asked[0] % 3 == 0
        return False

    hub.lose = lose
    run = Run(store)
    run.publish_versions(4)
    run.close()
    hub.lose = None
    follower = Replica(store, {})
    for version in range(4):
        follower.update(version)
        assert_same_bits(dict(follower.tensors), run.history[version])
    store.close()


# Answers that refuse.


def test_an_operation_that_the_hub_refuses_is_unavailable_with_its_reason(hub: Hub, store: HubStore) -> None:
    store.put("a", b"old")
    hub.refuse = lambda operation: "quota" if operation["path"].endswith("/a") else None
    for write in (VERBS["put"], VERBS["upload"], VERBS["delete"]):
        with pytest.raises(StoreUnavailable, match="quota"):
            write(store)
    store.put("b", b"beside")
    hub.refuse = None
    assert [store.get(key) for key in store.list()] == [b"old", b"beside"]


def test_a_part_of_a_batch_that_failed_counts_however_the_rest_went(hub: Hub, store: HubStore) -> None:
    # 200, as where others of the same batch went well.
    hub.fault = once("POST", "/batch", 200, b'{"success": false, "failed": [{"path": "a", "error": "busy"}]}')
    with pytest.raises(StoreUnavailable, match="busy"):
        store.put("a", b"x")
    with pytest.raises(NotFound):
        store.get("a")


def test_deleting_what_the_hub_calls_missing_is_no_error(hub: Hub, store: HubStore) -> None:
    hub.refuse = lambda operation: "no such file"
    store.delete("nothing")


@pytest.mark.parametrize("verb", VERBS)
def test_a_missing_bucket_is_the_callers_mistake_and_not_a_missing_object(hub: Hub, verb: str) -> None:
    store = HubStore("hf://buckets/user/no-such-bucket/run", endpoint=hub.url, token=TOKEN)
    with pytest.raises(UsageError, match="no such bucket") as caught:
        VERBS[verb](store)
    assert type(caught.value) is UsageError


def test_a_create_only_put_into_a_missing_bucket_is_the_callers_mistake(hub: Hub) -> None:
    for options in (hub.options("user"), {"endpoint": hub.url, "token": TOKEN, "single_writer": True}):
        store = HubStore("hf://buckets/user/no-such-bucket/run", **options)
        with pytest.raises(UsageError) as caught:
            store.put("a", b"x", if_absent=True)
        assert not isinstance(caught.value, NotFound | UnsupportedStore)
        store.close()


@pytest.mark.parametrize("verb", VERBS)
def test_a_token_that_the_hub_does_not_know_is_the_callers_mistake(hub: Hub, verb: str) -> None:
    store = HubStore(URL, endpoint=hub.url, token="hf_expired")
    with pytest.raises(UsageError, match="token=") as caught:
        VERBS[verb](store)
    assert "hf_expired" not in str(caught.value)


@pytest.mark.parametrize("verb", VERBS)
def test_with_the_right_to_read_all_but_writing_works(hub: Hub, store: HubStore, verb: str) -> None:
    store.put("a", b"x")
    reader = HubStore(URL, endpoint=hub.url, token=READ_TOKEN)
    if verb in READING:
        VERBS[verb](reader)
    else:
        with pytest.raises(UsageError, match="token="):
            VERBS[verb](reader)
        assert store.get("a") == b"x"


def test_the_wrong_gateway_key_is_the_callers_mistake(hub: Hub) -> None:
    store = HubStore(URL, **{**hub.options("user"), "gateway_key": "HFAKOTHER"})
    with pytest.raises(UsageError) as caught:
        store.put("slot", b"x", if_absent=True)
    assert type(caught.value) is UsageError
    store.close()


def test_offline_mode_is_named(hub: Hub, store: HubStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE"):
        store.get("a")


def test_a_token_for_transfers_is_used_until_it_ends_soon(hub: Hub) -> None:
    for token_s, num_tokens in ((3600, 1), (30, 4)):
        hub.token_s = token_s
        store = HubStore(URL, endpoint=hub.url, token=TOKEN)
        hub.requests.clear()
        for _ in range(4):
            store._api.grant(store._small("put", "a"), "write")
        assert len([request for request in hub.requests if "token" in request]) == num_tokens
        store.put("a", b"x")
        assert b"".join(store.read("a")) == b"x"


def test_a_transfer_that_outlasts_its_token_gets_another(hub: Hub, store: HubStore) -> None:
    hub.token_s = 2
    size = 2 * PART_BYTES

    def slowly() -> Iterator[bytes]:
        yield pattern(0, size // 2)
        # The server's clock, in whole seconds, has to pass the token's end.
        deadline = time.time() + 3
        while time.time() < deadline:
            time.sleep(0.1)
        yield pattern(size // 2, size)

    store.upload("large", slowly())
    assert store.get("large", size - 5) == pattern(size - 5, size)
    assert len([request for request in hub.requests if request.endswith("xet-write-token")]) >= 2


# Corruption.


def test_hf_xet_lets_a_flipped_bit_through_and_digests_do_not(
    hub: Hub, store: HubStore, tmp_path: Path
) -> None:
    run = Run(store)
    run.publish_versions(3)
    run.close()
    follower = Replica(store, {})
    follower.update(1)
    (delta,) = store.list(f"deltas/{layout.manifest_key(2)[len(layout.VERSIONS) : -len('.json')]}")
    whole, offset = store.get(delta), store.size(delta) // 2
    hub.corrupt(BUCKET, f"run/{delta}", offset)
    spoiled = b"".join(store.read(delta))
    assert len(spoiled) == len(whole)
    assert spoiled != whole
    with pytest.raises(CorruptObject):
        follower.update(2)
    assert follower.held == 1
    assert_same_bits(dict(follower.tensors), run.history[1])
    with pytest.raises(CorruptObject):
        replay(store, 2, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # The same bit again, and all is well.
    hub.corrupt(BUCKET, f"run/{delta}", offset)
    follower.update(2)
    assert_same_bits(dict(follower.tensors), run.history[2])
