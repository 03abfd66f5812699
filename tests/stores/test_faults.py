import pytest

from patchstore.errors import AlreadyExists, NotFound, StoreUnavailable
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore, SlowStore
from patchstore.testing.store import StoreConformance


class TestFaultyStoreWithoutFaults(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return FaultyStore(MemoryStore())


class TestSlowStoreWithoutDelay(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return SlowStore(MemoryStore(), latency_s=0)


@pytest.fixture
def inner() -> MemoryStore:
    store = MemoryStore()
    store.put("a", bytes(100))
    store.put("b", bytes(100))
    return store


def test_a_fault_before_leaves_the_store_as_it_was(inner: MemoryStore) -> None:
    store = FaultyStore(inner, Fault(verb="*", effect="fail-before", times=None))
    for read in (store.get, store.size, lambda key: next(store.read(key)), lambda key: next(store.list(key))):
        with pytest.raises(StoreUnavailable):
            read("a")
    for write in (lambda: store.put("c", b""), lambda: store.upload("c", [b""]), lambda: store.delete("a")):
        with pytest.raises(StoreUnavailable):
            write()
    assert list(inner.list()) == ["a", "b"]


def test_a_lost_answer_is_a_write_that_happened(inner: MemoryStore) -> None:
    store = FaultyStore(inner, Fault(verb="*", effect="fail-after", times=None))
    for ask in (lambda: store.put("c", b"x"), lambda: store.upload("d", [b"y"]), lambda: store.delete("a")):
        with pytest.raises(StoreUnavailable):
            ask()
    assert list(inner.list()) == ["b", "c", "d"]


def test_ones_own_put_may_be_reported_as_existing(inner: MemoryStore) -> None:
    store = FaultyStore(inner, Fault(verb="put", effect="exists"))
    with pytest.raises(AlreadyExists):
        store.put("c", b"mine", if_absent=True)
    assert inner.get("c") == b"mine"


def test_bytes_are_spoiled_on_the_way_in_or_out(inner: MemoryStore) -> None:
    def num_flipped(data: bytes) -> int:
        return sum(byte.bit_count() for byte in data)

    assert len(FaultyStore(inner, Fault(verb="get", effect="truncate")).get("a")) == 50
    assert num_flipped(FaultyStore(inner, Fault(verb="get", effect="flip")).get("a")) == 1
    assert num_flipped(b"".join(FaultyStore(inner, Fault(verb="get", effect="flip")).read("a"))) == 1
    assert num_flipped(inner.get("a")) == 0
    store = FaultyStore(inner, Fault(verb="*", effect="truncate"), Fault(verb="*", effect="flip"))
    store.put("short", bytes(10))
    store.upload("flipped", [bytes(5), bytes(5)])
    assert inner.size("short") == 5
    assert num_flipped(inner.get("flipped")) == 1


def test_what_is_stored_may_not_be_found_for_a_while(inner: MemoryStore) -> None:
    store = FaultyStore(inner, Fault(verb="*", effect="stale", times=3))
    with pytest.raises(NotFound):
        store.get("a")
    with pytest.raises(NotFound):
        store.size("a")
    assert list(store.list()) == ["a"]
    assert list(store.list()) == ["a", "b"]


def test_a_fault_strikes_its_keys_as_often_as_it_says(inner: MemoryStore) -> None:
    store = FaultyStore(inner, Fault(verb="size", key="a*", effect="fail-before", skip=1, times=2))

    def fails(key: str) -> bool:
        try:
            store.size(key)
        except StoreUnavailable:
            return True
        return False

    assert [fails(key) for key in "babaaa"] == [False, False, False, True, True, False]
    assert store.calls == [("size", key) for key in "babaaa"]


def test_the_same_seed_gives_the_same_faults(inner: MemoryStore) -> None:
    def struck(seed: int) -> list[bool]:
        store = FaultyStore(inner, Fault(verb="get", effect="truncate", times=None, chance=0.5), seed=seed)
        return [len(store.get("a")) < 100 for _ in range(50)]

    assert struck(1) == struck(1) != struck(2)
    assert 10 < sum(struck(1)) < 40


def test_delays_and_slowness_are_what_was_asked_for(inner: MemoryStore) -> None:
    slept: list[float] = []
    FaultyStore(inner, Fault(verb="get", effect="delay", delay_s=3), sleep=slept.append).get("a")
    slow = SlowStore(inner, latency_s=0.5, bytes_per_s=100, sleep=slept.append)
    slow.get("a")
    slow.put("c", bytes(50))
    slow.size("c")
    slow.upload("d", [bytes(200), bytes(100)])
    assert slept == [3, 1.5, 1.0, 0.5, 0.5, 2.0, 1.0]
