"""A store in a bucket of the Hub: over its S3 gateway, by the caller's word, and for readers."""

import json
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import s3fs
from huggingface_hub import HfApi
from safetensors.torch import load_file

from patchstore import Publisher, replay, verify
from patchstore.errors import AlreadyExists, NotFound, UnsupportedStore, VersionConflict
from patchstore.stores import hub_api, layout, open_store
from patchstore.stores.base import NUM_PARTS, PART_BYTES, Store
from patchstore.stores.hub import HubStore
from patchstore.stores.probe import check_create_only
from patchstore.stores.s3 import S3Store
from patchstore.testing.store import StoreConformance, pattern, patterned
from tests.stores.asks import check_versions
from tests.support.hub import Hub
from tests.support.hub.server import GATEWAY_KEY, GATEWAY_SECRET, TOKEN
from tests.support.weights import Run, assert_same_bits

pytestmark = pytest.mark.usefixtures("hubs_clients")

BUCKET = "user/bucket"

WRITER = """
import json, sys
from patchstore.stores import open_store
url, options, me = json.loads(sys.argv[1])
store = open_store(url, **options)
for number in range(5):
    store.upload(f"deltas/{me}-{number}", [f"{me} {number}".encode() * 1000])
    assert store.get(f"deltas/{me}-{number}").startswith(f"{me} {number}".encode())
"""

MOVES_A_LARGE_OBJECT = """
import json, os, resource, sys
from patchstore.stores import open_store
url, options, way, size = json.loads(sys.argv[1])
store = open_store(url, **options)
store.put("small", b"so that what is needed once is there")
store.get("small")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if way == "upload":
    store.upload("large", (os.urandom(1 << 20) for _ in range(size >> 20)))
else:
    assert sum(len(part) for part in store.read("large")) == size
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.fixture
def url() -> str:
    """A prefix that no other test uses."""
    return f"hf://buckets/{BUCKET}/runs/{uuid.uuid4().hex}"


@pytest.fixture
def native(hub: Hub) -> dict[str, Any]:
    """Options with which nothing but the Hub's own API is used."""
    return {"endpoint": hub.url, "token": TOKEN}


@pytest.fixture
def opened(hub: Hub, url: str) -> Iterator[Callable[..., HubStore]]:
    """Opens stores at the test's URL, or another, and closes them."""
    stores: list[HubStore] = []

    def open_(at: str = url, **options: Any) -> HubStore:
        stores.append(HubStore(at, endpoint=hub.url, token=TOKEN, **options))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


class HubConformance(StoreConformance):
    def test_an_object_larger_than_a_transfers_memory_comes_back_in_order_and_bounded(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # hf-xet and not `get` brings the parts: that it holds few is measured in another process.
        size = (NUM_PARTS + 1) * PART_BYTES + 12_345
        store.upload("large", patterned(size))
        assert store.size("large") == size
        assert store.get("large", size - 5) == pattern(size - 5, size)
        offset = 0
        for part in store.read("large"):
            assert part == pattern(offset, offset + len(part))
            offset += len(part)
        assert offset == size
        middle = b"".join(store.read("large", start=size // 2 + 3, end=size - 1))
        assert middle == pattern(size // 2 + 3, size - 1)


class TestThroughTheGateway(HubConformance):
    @pytest.fixture
    def store(self, hub: Hub, url: str) -> Iterator[Store]:
        self.options = hub.options("user")
        store = open_store(url, **self.options)
        assert not store.single_writer
        yield store
        store.close()

    def other_process(self, store: Store) -> tuple[str, dict[str, Any]]:
        return store.url, self.options


@pytest.mark.exhaustive
class TestByTheCallersWord(HubConformance):
    # Nothing decides a race here.
    test_of_threads_that_race_for_a_key_one_wins = None  # type: ignore[assignment]
    test_of_processes_that_race_for_a_key_one_wins = None  # type: ignore[assignment]

    @pytest.fixture
    def store(self, native: dict[str, Any], url: str) -> Iterator[Store]:
        store = open_store(url, **native, single_writer=True)
        assert store.single_writer
        yield store
        store.close()


# Options.


def test_a_stores_url_has_neither_options_nor_a_last_slash(opened: Callable[..., HubStore]) -> None:
    options = {"gateway_key": "HFAKSECRET", "gateway_secret": "SECRET"}
    assert opened("hf://buckets/user/bucket/a/run/", **options).url == "hf://buckets/user/bucket/a/run"
    assert opened("hf://buckets/user/bucket/").url == "hf://buckets/user/bucket"


def test_endpoint_and_token_are_huggingface_hubs_own_by_default(
    hub: Hub, url: str, monkeypatch: pytest.MonkeyPatch, native: dict[str, Any]
) -> None:
    open_store(url, **native).put("a", b"x")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert open_store(url).get("a") == b"x"


def test_the_gateways_place_is_the_owners_at_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    gateways: list[S3Store] = []

    def opened_s3(url: str, **options: Any) -> S3Store:
        gateways.append(S3Store(url, **options))
        return gateways[-1]

    monkeypatch.setattr("patchstore.stores.hub.open_s3", opened_s3)
    HubStore("hf://buckets/user/bucket/run", gateway_key="HFAK", gateway_secret="secret", timeout_s=7).close()
    (gateway,) = gateways
    found = (gateway.url, gateway.endpoint, gateway.timeout_s)
    assert found == ("s3://bucket/run", "https://s3.hf.co/user", 7)


# Where a create-only put is only the caller's word, or not to be had.


def test_without_credentials_or_a_word_all_works_but_a_create_only_put(
    opened: Callable[..., HubStore],
) -> None:
    store = opened()
    store.put("a", b"x")
    store.upload("b", [b"y"])
    assert [store.get(key) for key in store.list()] == [b"x", b"y"]
    with pytest.raises(UnsupportedStore, match=r"gateway_key(?s:.*)single_writer"):
        store.put("c", b"z", if_absent=True)
    with pytest.raises(UnsupportedStore, match="gateway_key"):
        check_create_only(store)
    assert list(store.list()) == ["a", "b"]


def test_the_gateway_is_proved_and_a_word_as_far_as_it_goes(
    hub: Hub, opened: Callable[..., HubStore]
) -> None:
    through_gateway = {name: value for name, value in hub.options("user").items() if "gateway" in name}
    for store, raced in ((opened(**through_gateway), True), (opened(single_writer=True), False)):
        hub.requests.clear()
        check_create_only(store)
        assert any("turn" in request or "PUT" in request for request in hub.requests)
        assert any("race" in request for request in hub.requests) == raced
        assert list(store.list()) == []


def test_a_second_writer_at_the_same_moment_is_noticed_by_the_first(
    hub: Hub, opened: Callable[..., HubStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = opened(single_writer=True), opened(single_writer=True)
    interfered = []

    def interfere(method: str, path: str) -> bool:
        if path.endswith("/batch") and not interfered:
            interfered.append(path)
            other.put("slot", b"theirs")
        return False

    monkeypatch.setattr(hub, "lose", interfere)
    with pytest.raises(AlreadyExists, match="single_writer"):
        store.put("slot", b"ours", if_absent=True)
    assert store.get("slot") == b"theirs"


def test_a_second_publisher_on_a_single_writers_store_is_noticed(opened: Callable[..., HubStore]) -> None:
    run = Run(opened(single_writer=True))
    run.publish()
    second = Publisher(opened(single_writer=True), run.model, resume=True)
    # By opening the run the second one took the next version, which the first one then wants.
    with pytest.raises(VersionConflict):
        run.publish(1)
    run.close()
    assert second.publish_patch(1).result().version == 2
    second.close()


# The same objects, whichever way.


def test_what_the_gateway_stored_the_hub_shows_and_the_other_way_round(
    hub: Hub, opened: Callable[..., HubStore], tmp_path: Path
) -> None:
    options = hub.options("user")
    store = opened(**{name: value for name, value in options.items() if "gateway" in name})
    prefix = store.url.removeprefix(f"hf://buckets/{BUCKET}/")
    store.put("versions/1.json", b"committed", if_absent=True)
    store.put("native", b"uploaded")
    api = HfApi(endpoint=hub.url, token=TOKEN)
    record = f"{prefix}/versions/1.json"
    assert record in [found.path for found in api.list_bucket_tree(BUCKET, prefix, recursive=True)]
    assert [found.size for found in api.get_bucket_paths_info(BUCKET, [record])] == [9]
    api.download_bucket_files(BUCKET, [(record, tmp_path / "record")])
    assert (tmp_path / "record").read_bytes() == b"committed"
    fs = s3fs.S3FileSystem(
        endpoint_url=options["gateway_url"],
        key=GATEWAY_KEY,
        secret=GATEWAY_SECRET,
        config_kwargs={"s3": {"addressing_style": "path"}},
        skip_instance_cache=True,
    )
    assert fs.cat_file(f"bucket/{prefix}/native") == b"uploaded"
    assert fs.cat_file(f"bucket/{prefix}/native", start=2, end=5) == b"loa"
    assert fs.call_s3("head_object", Bucket="bucket", Key=record)["ContentLength"] == 9
    listed = fs.call_s3("list_objects_v2", Bucket="bucket", Prefix=f"{prefix}/")["Contents"]
    assert [found["Key"] for found in listed] == [f"{prefix}/native", record]
    fs.call_s3("delete_object", Bucket="bucket", Key=record)
    fs.close_session(fs.loop, fs.s3)
    with pytest.raises(NotFound):
        store.get("versions/1.json")


def test_keys_lie_below_the_prefix_and_only_there(opened: Callable[..., HubStore]) -> None:
    store = opened()
    neighbour = opened(f"{store.url}-2")
    store.put("versions/00000000.json", b"x")
    neighbour.put("versions/00000001.json", b"y")
    assert list(store.list()) == ["versions/00000000.json"]
    assert list(neighbour.list()) == ["versions/00000001.json"]
    whole = opened(f"hf://buckets/{BUCKET}")
    prefix = store.url.removeprefix(f"{whole.url}/")
    assert whole.get(f"{prefix}/versions/00000000.json") == b"x"
    assert f"{prefix}/versions/00000000.json" in list(whole.list())


def test_a_listing_of_several_pages_is_whole(
    hub: Hub, opened: Callable[..., HubStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    keys = [f"versions/{version:08d}.json" for version in range(7)]
    for key in keys:
        store.put(key, b"")
    monkeypatch.setattr(hub, "page_size", 2)
    hub.requests.clear()
    assert list(store.list("versions/")) == keys
    assert len(hub.requests) == 4


def test_looking_for_the_next_version_is_one_request(hub: Hub, opened: Callable[..., HubStore]) -> None:
    store = opened()
    store.put("a", b"x")
    hub.requests.clear()
    with pytest.raises(NotFound):
        store.get("versions/00000001.json")
    assert len(hub.requests) == 1
    assert store.get("a") == b"x"
    # The Hub redirects a request for a file to its content.
    assert len(hub.requests) == 3


def test_an_object_that_is_replaced_while_it_is_read_comes_out_as_it_was(
    opened: Callable[..., HubStore],
) -> None:
    store = opened()
    size = 10 * PART_BYTES
    store.upload("object", patterned(size))
    parts = store.read("object")
    found = [next(parts)]
    store.upload("object", [bytes(size)])
    assert b"".join([*found, *parts]) == pattern(0, size)


def test_processes_that_write_different_keys_at_once_all_succeed(
    native: dict[str, Any], opened: Callable[..., HubStore]
) -> None:
    store = opened()
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, json.dumps([store.url, native, me])]) for me in "ab"
    ]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    assert list(store.list()) == [f"deltas/{me}-{number}" for me in "ab" for number in range(5)]


@pytest.mark.exhaustive
def test_memory_stays_bounded_while_a_large_object_passes_each_way(native: dict[str, Any], url: str) -> None:
    size, grown_mib = 448 << 20, {}
    for way in ("upload", "read"):
        command = [sys.executable, "-c", MOVES_A_LARGE_OBJECT, json.dumps([url, native, way, size])]
        grown_mib[way] = int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert max(grown_mib.values()) < 400, grown_mib


# A run.


def test_a_run_is_published_followed_and_replayed_bit_for_bit(
    hub: Hub, native: dict[str, Any], url: str, tmp_path: Path
) -> None:
    with closing(open_store(url, **hub.options("user"))) as publishing:
        run = Run(publishing)
        run.publish_and_close(6)
    run.store = reading = open_store(url, **native)
    check_versions(run)
    for version in (2, 5):
        replay(reading, version, out=tmp_path / str(version))
        (file,) = (tmp_path / str(version)).glob("*.safetensors")
        assert_same_bits(load_file(file), run.history[version])
    assert verify(reading).version == 5
    assert layout.manifest_key(5) in list(reading.list(layout.VERSIONS))


# The feed of events.


def test_a_subscriber_is_woken_by_a_change_and_no_more_when_it_has_ended(
    hub: Hub, opened: Callable[..., HubStore]
) -> None:
    store, woken = opened(), threading.Semaphore(0)
    end = store.subscribe(woken.release)
    assert end is not None
    # The feed has begun, before which something may have changed.
    assert woken.acquire(timeout=60)
    store.put("versions/00000001.json", b"x")
    assert woken.acquire(timeout=60)
    (thread,) = feeds()
    end()
    assert not thread.is_alive()
    store.put("versions/00000002.json", b"x")
    assert not woken.acquire(blocking=False)


def test_a_feed_that_ends_early_is_opened_again(
    hub: Hub, opened: Callable[..., HubStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_api, "FIRST_WAIT_S", 0.01)
    store, woken = opened(), threading.Semaphore(0)
    answers = iter([(503, b"{}")])
    fault = lambda method, path: next(answers, None) if path.endswith("/events") else None  # noqa: E731
    monkeypatch.setattr(hub, "fault", fault)
    end = store.subscribe(woken.release)
    assert end is not None
    assert woken.acquire(timeout=60)
    hub.buckets[BUCKET].hang_up()
    assert woken.acquire(timeout=60)
    end()
    assert feeds() == []


@pytest.mark.parametrize("status", [401, 404, 501])
def test_where_there_is_no_feed_a_subscription_ends_by_itself(
    hub: Hub, opened: Callable[..., HubStore], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = lambda method, path: (status, b"{}") if path.endswith("/events") else None  # noqa: E731
    monkeypatch.setattr(hub, "fault", fault)
    end = opened().subscribe(lambda: pytest.fail("woken"))
    for thread in feeds():
        thread.join(60)
        assert not thread.is_alive()
    assert end is not None
    end()


def feeds() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "patchstore-hub-feed"]
