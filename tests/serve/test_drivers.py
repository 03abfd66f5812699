"""Several processes that follow one server, one beside or after the other."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from fleet_thread import EventThread

from patchstore.follow.service import follow
from patchstore.follow.settings import Settings
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.manifests import begin_run, commit


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore("memory://drivers")
    begin_run(store)
    for version in range(4):
        commit(store, version)
    return store


class Following(EventThread):
    """A `patchstore follow` on a thread, and what its server's steps came to."""

    def __init__(self, store: MemoryStore, url: str, at: int | None) -> None:
        stop = threading.Event()
        settings = Settings(servers=[url], at=at, min_poll_interval_s=0.01, max_poll_interval_s=0.02)
        super().__init__(follow(store, settings, stop), stop)

    def steps(self) -> list[str]:
        """Outcomes, and kinds of errors."""
        steps = [event.step for event in self.told if event.server is not None]
        return [step.outcome if step.error is None else step.error.kind for step in steps]

    def until_steps(self, are_so: Callable[[list[str]], bool]) -> None:
        self.until(lambda: are_so(self.steps()))


@contextmanager
def following(store: MemoryStore, url: str, at: int | None = None) -> Iterator[Following]:
    process = Following(store, url, at)
    try:
        yield process
    finally:
        process.end()


def conflicts(kinds: list[str]) -> int:
    return kinds.count("driver-conflict")


@pytest.mark.parametrize(("first", "second", "held"), [(1, 3, 1), (None, 1, 3), (1, None, 1)])
def test_two_that_want_different_versions_both_hear_it_as_long_as_it_lasts(store, stub, first, second, held):
    with following(store, stub.url, first) as a:
        a.until_steps(lambda kinds: "applied" in kinds)
        with following(store, stub.url, second) as b:
            # The 1st, 2nd, 4th and 8th in a row are told.
            b.until_steps(lambda kinds: conflicts(kinds) >= 4)
            a.until_steps(lambda kinds: conflicts(kinds) >= 4)
            assert stub.history == [held]
            a.end()
            b.until_steps(lambda kinds: "applied" in kinds)
        assert stub.history == [held, 3 if second is None else second]


def test_two_that_want_the_same_do_no_harm(store, stub):
    with following(store, stub.url) as a:
        a.until_steps(lambda kinds: "applied" in kinds)
        with following(store, stub.url) as b:
            for version in range(4, 12):
                commit(store, version)
                while stub.held != version:
                    time.sleep(0.01)
    assert conflicts(a.steps()) == conflicts(b.steps()) == 0
    assert (stub.paused, stub.switch) == (False, None)


def test_one_that_has_not_read_the_store_yet_does_not_say_that_the_store_was_emptied(store, stub):
    with following(store, stub.url) as before:
        before.until_steps(lambda kinds: "applied" in kinds)
    let = threading.Event()
    # It answers nothing before it is let.
    slow = FaultyStore(store, Fault(verb="get", effect="delay", times=None), sleep=lambda _: let.wait())
    asked = threading.Semaphore(0)
    stub.on_call = lambda path: asked.release()
    with following(slow, stub.url) as after:
        try:
            # Three looks at the server, which has a version of that store.
            assert all(asked.acquire(timeout=60) for _ in range(40))
        finally:
            let.set()
        commit(store, 4)
        after.until_steps(lambda kinds: "applied" in kinds)
    assert "store-replaced" not in after.steps()
    assert stub.held == 4


def test_a_store_that_was_emptied_is_still_told(store, stub):
    with following(store, stub.url) as before:
        before.until_steps(lambda kinds: "applied" in kinds)
    with following(MemoryStore(store.url), stub.url) as after:
        after.until_steps(lambda kinds: "store-replaced" in kinds)
    assert stub.history == [3]
