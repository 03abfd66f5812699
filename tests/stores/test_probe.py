from pathlib import Path
from threading import Barrier

import pytest

from patchstore.errors import AlreadyExists, StoreUnavailable, UnsupportedStore, UsageError
from patchstore.stores import layout, open_store
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.stores.probe import check_create_only
from patchstore.testing.faults import Effect, Fault, FaultyStore


class IgnoresConditions(MemoryStore):
    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        super().put(key, data)


class ChecksThenWrites(MemoryStore):
    """All racers look before the first one writes."""

    def __init__(self, num_racers: int = 8) -> None:
        super().__init__()
        self._all_have_looked = Barrier(num_racers)

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        if if_absent and key in list(self.list(layout.PROBES)):
            raise AlreadyExists(key)
        if "race" in key:
            self._all_have_looked.wait(timeout=60)
        super().put(key, data)


class SaysExistsAndOverwrites(MemoryStore):
    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        taken = key in list(self.list(layout.PROBES))
        super().put(key, data)
        if taken:
            raise AlreadyExists(key)


def test_a_folder_passes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    check_create_only(store)
    assert list(store.list()) == []


@pytest.mark.parametrize("store", [IgnoresConditions(), ChecksThenWrites(), SaysExistsAndOverwrites()])
def test_a_store_that_lets_two_writers_win_is_refused(store: Store) -> None:
    with pytest.raises(UnsupportedStore) as caught:
        check_create_only(store)
    assert caught.value.kind == "unsupported-store"
    assert list(store.list()) == []


@pytest.mark.parametrize("effect", ["fail-before", "fail-after", "exists"])
def test_a_lost_answer_is_no_reason_for_refusal(effect: Effect) -> None:
    first = Fault(verb="put", key="*/turn", effect=effect)
    in_races = Fault(verb="put", key="*/race-?", effect=effect, times=None, chance=0.3)
    for seed in range(5):
        check_create_only(FaultyStore(MemoryStore(), first, in_races, seed=seed))


def test_every_answer_to_a_successful_put_may_be_lost() -> None:
    check_create_only(FaultyStore(MemoryStore(), Fault(verb="put", effect="exists", times=None)))


def test_a_read_that_lags_is_no_reason_for_refusal() -> None:
    check_create_only(FaultyStore(MemoryStore(), Fault(verb="get", effect="stale", times=2)))


def test_a_store_that_does_not_answer_is_unavailable_and_not_refused() -> None:
    with pytest.raises(StoreUnavailable) as caught:
        check_create_only(FaultyStore(MemoryStore(), Fault(verb="put", effect="fail-before", times=None)))
    assert caught.value.__cause__ is not None
    # The reason stands in the message itself, which is all that a command line shows.
    assert str(caught.value.__cause__) in str(caught.value)


class OneWriterByWord(ChecksThenWrites):
    """Would let all racers win."""

    single_writer = True


def test_where_there_is_one_writer_by_word_nothing_is_raced_for() -> None:
    store = FaultyStore(OneWriterByWord())
    store.single_writer = True
    check_create_only(store)
    assert not any("race" in key for _, key in store.calls)
    assert list(store.list()) == []


def test_even_one_writer_has_to_see_what_it_wrote_before() -> None:
    class Forgets(IgnoresConditions):
        single_writer = True

    with pytest.raises(UnsupportedStore):
        check_create_only(Forgets())


def test_a_publisher_without_the_right_to_delete_passes() -> None:
    class Keeps(MemoryStore):
        def delete(self, key: str) -> None:
            raise UsageError("no right to delete")

    check_create_only(Keeps())


def test_probe_keys_are_where_the_layout_says_and_new_each_time() -> None:
    store = FaultyStore(MemoryStore())
    check_create_only(store)
    check_create_only(store)
    keys = {key for verb, key in store.calls if verb == "put"}
    assert all(key.startswith(layout.PROBES) for key in keys)
    assert len({key.split("/")[1] for key in keys}) == 2
