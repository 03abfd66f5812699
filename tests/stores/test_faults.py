import pytest

from patchstore.errors import AlreadyExists, NotFound, StoreUnavailable
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Effect, Fault, FaultyStore
from patchstore.testing.store import StoreConformance
from tests.stores.asks import OPERATIONS, READS


class TestFaultyStoreWithoutFaults(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return FaultyStore(MemoryStore())


@pytest.fixture
def inner() -> MemoryStore:
    store = MemoryStore()
    store.put("a", bytes(100))
    store.put("b", bytes(100))
    return store


@pytest.mark.parametrize(("effect", "left"), [("fail-before", ["a", "b"]), ("fail-after", ["b", "c", "d"])])
def test_a_fault_is_before_or_after_a_write(inner: MemoryStore, effect: Effect, left: list[str]) -> None:
    store = FaultyStore(inner, Fault(verb="*", effect=effect, times=None))
    for verb, key in (("put", "c"), ("upload", "d"), ("delete", "a")):
        with pytest.raises(StoreUnavailable):
            OPERATIONS[verb](store, key)
    assert list(inner.list()) == left
    for verb in READS:
        with pytest.raises(StoreUnavailable):
            OPERATIONS[verb](store, "b")


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
    for verb in ("get", "size"):
        with pytest.raises(NotFound):
            OPERATIONS[verb](store)
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


def test_a_delay_is_what_was_asked_for(inner: MemoryStore) -> None:
    slept: list[float] = []
    FaultyStore(inner, Fault(verb="get", effect="delay", delay_s=3), sleep=slept.append).get("a")
    assert slept == [3]
