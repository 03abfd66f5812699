"""An address at which several servers answer: nothing is changed in any, and the error says what to do."""

from collections.abc import Iterator
from contextlib import suppress

import pytest

from patchstore.errors import OtherServer, PatchstoreError, WaitTimeout
from patchstore.follow.reconcile import Reconciler
from patchstore.follow.verify import verify_server
from patchstore.follow.vllm_server import VllmServer
from patchstore.follow.wait import wait_until
from patchstore.stores.memory import MemoryStore
from tests.support.gateway import balanced
from tests.support.manifests import begin_run, commit
from tests.support.vllm_stub import StubServer, serving


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore("memory://several")
    begin_run(store)
    for version in range(3):
        commit(store, version)
    return store


@pytest.fixture(params=[2, 3])
def stubs(request: pytest.FixtureRequest) -> Iterator[list[StubServer]]:
    with serving(StubServer()) as a, serving(StubServer()) as b, serving(StubServer()) as c:
        yield [a, b, c][: request.param]


@pytest.fixture
def balancer(stubs: list[StubServer]) -> Iterator[str]:
    with balanced([stub.url for stub in stubs]) as url:
        yield url


def untouched(stubs: list[StubServer]) -> bool:
    return all(
        (stub.calls, stub.held, stub.paused, stub.weight_version) == ([], None, False, "default")
        for stub in stubs
    )


@pytest.mark.parametrize("num_engines", [1, 2])
def test_no_way_to_an_update_changes_anything(store, stubs, balancer, num_engines):
    for stub in stubs:
        stub.num_engines = num_engines
    with VllmServer(balancer, timeout_s=30) as server:
        follow = Reconciler(store, server)
        for act in (lambda: server.apply(2), server.status, lambda: verify_server(store, server)):
            with pytest.raises(OtherServer, match=r"several servers answer .* name every server"):
                act()
        for _ in range(5):
            done = follow.step()
            assert (done.outcome, done.error.kind) == ("failed", "other-server")
    assert untouched(stubs)


def test_no_one_waits_for_one_of_them_in_vain(stubs, balancer):
    for stub in stubs:
        stub.initialised, stub.held = True, 2
    with pytest.raises(WaitTimeout, match="several servers answer"):
        wait_until(2, servers=balancer, timeout_s=0.5)


def test_what_answered_alone_at_first_and_is_balanced_later_is_noticed(store, stubs):
    """As a service that scales up from one replica, in the middle of an update too."""
    first, others = stubs[0], stubs[1:]
    with balanced([first.url] * 12 + [stub.url for stub in stubs] * 100) as url, VllmServer(url) as server:
        follow = Reconciler(store, server)
        errors = [follow.step().error for _ in range(20)]
    kinds = [None if error is None else error.kind for error in errors]
    assert set(kinds[-5:]) == {"other-server"}
    for stub in others:
        assert (stub.history, stub.paused, stub.switch, stub.weight_version) == ([], False, None, "default")


@pytest.mark.parametrize("turn", range(7))
def test_one_call_that_goes_astray_in_an_update_changes_nothing_where_it_arrives(stubs, turn):
    first, other = stubs[:2]
    way = [first.url] * 12
    # What the client learns at first takes ten calls.
    way = [*[first.url] * 11, *way[:turn], other.url, *way * 50]
    with balanced(way) as url, VllmServer(url, timeout_s=30) as server:
        server.status()
        with suppress(PatchstoreError):
            server.apply(2)
        assert (other.history, other.paused, other.switch) == ([], False, None)
        assert other.weight_version == "default"
        server.apply(2)
    assert (first.held, first.paused, first.switch, first.weight_version) == (2, False, None, "2")
