"""What becomes of a Hub's faults: retried, said plainly, or found by digests; never taken for an answer."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
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
    UsageError,
)
from patchstore.stores import layout
from patchstore.stores.base import PART_BYTES
from patchstore.stores.hub import HubStore
from patchstore.testing.store import pattern, patterned
from tests.stores.asks import OPERATIONS, READS, check_versions
from tests.support.hub import Hub
from tests.support.hub.server import READ_TOKEN, TOKEN
from tests.support.weights import Run, assert_same_bits

pytestmark = pytest.mark.usefixtures("hubs_clients")

BUCKET = "user/bucket"
URL = f"hf://buckets/{BUCKET}/run"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        hub.create_bucket(BUCKET)
        yield hub


@pytest.fixture
def store(hub: Hub) -> HubStore:
    """A store without the gateway."""
    return HubStore(URL, endpoint=hub.url, token=TOKEN, single_writer=True)


@pytest.fixture
def hasty(hub: Hub) -> HubStore:
    """The same, of which faults that stay are seen soon."""
    return HubStore(URL, endpoint=hub.url, token=TOKEN, single_writer=True, timeout_s=1)


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


@pytest.mark.parametrize("part", ["/v1/xorbs/", "/v1/shards", "/batch"])
def test_an_upload_that_fails_leaves_nothing_to_be_seen(
    hub: Hub, store: HubStore, hasty: HubStore, part: str
) -> None:
    store.put("taken", b"old")
    for status in (503, 400):
        hub.fault = always("POST", part, status)
        for key in ("new", "taken"):
            with pytest.raises(StoreUnavailable):
                hasty.upload(key, patterned(3 * PART_BYTES))
    hub.fault = None
    assert list(store.list()) == ["taken"]
    assert store.get("taken") == b"old"


@pytest.mark.parametrize("part", ["/v1/reconstructions/", "/xorb-data/"])
def test_a_download_that_ends_early_is_unavailable(
    hub: Hub, store: HubStore, hasty: HubStore, part: str
) -> None:
    size = 2 * PART_BYTES
    store.upload("large", patterned(size))
    hub.fault = always("GET", part, 503)
    with pytest.raises(StoreUnavailable):
        list(hasty.read("large"))
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


def test_a_hub_that_has_gone_is_unavailable(hub: Hub, hasty: HubStore) -> None:
    hasty.put("a", b"x")
    hub.close()
    for ask in OPERATIONS.values():
        with pytest.raises(StoreUnavailable):
            ask(hasty)


# Lost answers.


def losing(hub: Hub, num: int, is_matched: Callable[[str, str], bool]) -> list[str]:
    """Have the hub lose its first answers to requests that match; return those so far."""
    lost: list[str] = []

    def lose(method: str, path: str) -> bool:
        if not is_matched(method, path) or len(lost) >= num:
            return False
        lost.append(path)
        return True

    hub.lose = lose
    return lost


def test_a_lost_answer_to_a_batch_is_asked_for_again(hub: Hub, store: HubStore) -> None:
    lost = losing(hub, 2, lambda method, path: path.endswith("/batch"))
    store.put("a", b"x")
    assert store.get("a") == b"x"
    lost.clear()
    store.delete("a")
    assert list(store.list()) == []
    assert len(lost) == 2


def test_a_lost_answer_of_the_gateway_reads_as_taken_by_ones_own(hub: Hub) -> None:
    lost = losing(hub, 1, lambda method, path: method == "PUT")
    with closing(HubStore(URL, **hub.options("user"))) as store:
        with pytest.raises(AlreadyExists):
            store.put("slot", b"mine", if_absent=True)
        assert lost
        assert store.get("slot") == b"mine"


@pytest.mark.parametrize("through_gateway", [True, False])
def test_a_run_goes_on_while_answers_are_lost(hub: Hub, store: HubStore, through_gateway: bool) -> None:
    numbers = itertools.count(1)
    hub.lose = lambda method, path: (path.endswith("/batch") or method == "PUT") and not next(numbers) % 3
    with closing(HubStore(URL, **hub.options("user")) if through_gateway else store) as chosen:
        run = Run(chosen)
        run.publish_and_close(4)
        hub.lose = None
        check_versions(run)


# Answers that refuse.


def test_an_operation_that_the_hub_refuses_is_unavailable_with_its_reason(hub: Hub, store: HubStore) -> None:
    store.put("a", b"old")
    hub.refuse = lambda operation: "quota" if operation["path"].endswith("/a") else None
    for write in (OPERATIONS["put"], OPERATIONS["upload"], OPERATIONS["delete"]):
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


@pytest.mark.parametrize(
    ("url", "token", "match"),
    [
        ("hf://buckets/user/no-such-bucket/run", TOKEN, "no such bucket"),
        (URL, "hf_expired", "token="),
    ],
)
def test_a_missing_bucket_or_an_unknown_token_is_the_callers_mistake(
    hub: Hub, url: str, token: str, match: str
) -> None:
    store = HubStore(url, endpoint=hub.url, token=token)
    for ask in OPERATIONS.values():
        with pytest.raises(UsageError, match=match) as caught:
            ask(store)
        assert type(caught.value) is UsageError
        assert "hf_expired" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "more", "by_word"),
    [
        ("hf://buckets/user/no-such-bucket/run", {}, False),
        ("hf://buckets/user/no-such-bucket/run", {}, True),
        (URL, {"gateway_key": "HFAKOTHER"}, False),
    ],
)
def test_a_create_only_put_with_a_wrong_bucket_or_key_is_the_callers_mistake(
    hub: Hub, url: str, more: dict[str, str], by_word: bool
) -> None:
    options = {"endpoint": hub.url, "token": TOKEN, "single_writer": True} if by_word else hub.options("user")
    with closing(HubStore(url, **options | more)) as store, pytest.raises(UsageError) as caught:
        store.put("a", b"x", if_absent=True)
    assert type(caught.value) is UsageError


def test_with_the_right_to_read_all_but_writing_works(hub: Hub, store: HubStore) -> None:
    store.put("a", b"x")
    reader = HubStore(URL, endpoint=hub.url, token=READ_TOKEN)
    for verb, ask in OPERATIONS.items():
        with nullcontext() if verb in READS else pytest.raises(UsageError, match="token="):
            ask(reader)
    assert store.get("a") == b"x"


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
            store.put("a", b"x")
        tokens = [request for request in hub.requests if request.endswith("xet-write-token")]
        # hf-xet asks too, where a token ends soon.
        assert len(tokens) == 1 if num_tokens == 1 else len(tokens) >= num_tokens
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
    run.publish_and_close(3)
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
