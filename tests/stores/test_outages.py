"""A service that fails at once is waited for as long as one that hangs, and nothing is lost by that."""

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import pytest

from patchstore.errors import NotFound, StoreUnavailable
from patchstore.stores import deadline
from patchstore.stores.base import Store
from patchstore.stores.deadline import Deadline, retry_after
from patchstore.stores.hub import HubStore
from tests.stores.asks import OPERATIONS, check_versions
from tests.stores.lost_answers import CLOSED, Answer, Place, error, passing_on, taken
from tests.support.hub import Hub
from tests.support.weights import Run

FAILURES: dict[str, Answer] = {
    "503": error(503, "SlowDown"),
    "500": error(500, "InternalError"),
    "429 and when to come back": error(429, "TooManyRequests", Retry_After="0"),
    "closed": CLOSED,
}
FINAL = [401, 403, 405, 412, 501]
MANY = 60
"""More failures than publisher and clients have attempts: five of one, and five of the others in each."""


@pytest.fixture
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(deadline, name, 0.002)


def check_nothing_is_lost(store: Store, fail: Callable[[], None]) -> None:
    """Publish before, in and after an outage: three deltas in a row, each with the trainer's bits."""
    run = Run(store)
    run.open(anchor_every=100)
    run.publish_versions(2)
    fail()
    published = run.publish_and_close(2)
    assert [(each.version, each.kind) for each in published] == [(2, "delta"), (3, "delta")]
    check_versions(run)


@pytest.mark.usefixtures("_short_pauses")
@pytest.mark.parametrize("failure", FAILURES)
def test_an_outage_that_fails_fast_is_outlived_without_an_anchor(s3: Place, failure: str) -> None:
    left: list[Answer] = []
    with s3.through(instead=lambda _: taken(left)) as store:
        check_nothing_is_lost(store, lambda: left.extend([FAILURES[failure]] * MANY))
    assert not left


def test_refused_connections_are_outlived_without_an_anchor(
    s3: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep, is_out, num_pauses = time.sleep, threading.Event(), itertools.count()
    endpoint = s3.options["endpoint_url"]
    with ExitStack() as listening, ExitStack() as later:
        # Connections that are open are closed.
        proxy = passing_on(endpoint, instead=lambda request: CLOSED if is_out.is_set() else None)
        url = listening.enter_context(proxy)

        def pause(seconds: float) -> None:
            if is_out.is_set() and next(num_pauses) == MANY:
                later.enter_context(passing_on(endpoint, port=urlsplit(url).port or 0))
                is_out.clear()
            sleep(min(seconds, 0.002))

        def fail() -> None:
            is_out.set()
            listening.close()
            monkeypatch.setattr(time, "sleep", pause)

        with s3.opened(endpoint_url=url) as store:
            check_nothing_is_lost(store, fail)
            assert not is_out.is_set()


@pytest.mark.usefixtures("_short_pauses")
@pytest.mark.parametrize("status", [503, 429])
def test_an_outage_of_the_hub_is_outlived_too(hubs_clients: None, status: int) -> None:
    left: list[tuple[int, bytes]] = []
    with Hub() as hub:
        hub.create_bucket("user/bucket")
        # What hf-xet asks for, it repeats by itself.
        hub.fault = lambda method, path: taken(left) if path.startswith("/api/") else None
        with closing(HubStore("hf://buckets/user/bucket/run", **hub.options("user"))) as store:
            check_nothing_is_lost(store, lambda: left.extend([(status, b"{}")] * MANY))
    assert not left


@pytest.mark.parametrize("status", FINAL)
def test_an_answer_that_would_not_change_is_not_asked_for_again(s3: Place, status: int) -> None:
    for verb, method in {"get": "GET", "put": "PUT", "delete": "DELETE", "size": "HEAD"}.items():
        answers = itertools.repeat(error(status, "Code"))
        with (
            s3.behind(method, "/a", answers) as (store, asked),
            pytest.raises(Exception, match=s3.url),
        ):
            OPERATIONS[verb](store)
        assert [request.method for request in asked if request.path.endswith("/a")] == [method]


@pytest.mark.usefixtures("_short_pauses")
def test_a_body_that_is_refused_as_damaged_is_sent_again(s3: Place) -> None:
    with s3.behind("PUT", "/a", [error(400, "BadDigest")] * 7) as (store, _):
        store.put("a", b"x", if_absent=True)
        assert store.get("a") == b"x"


@pytest.mark.usefixtures("_short_pauses")
@pytest.mark.parametrize(("verb", "found"), {"get": b"x", "list": ["a"], "size": 1, "read": [b"x"]}.items())
def test_readers_outlive_it_too(s3: Place, verb: str, found: object) -> None:
    left: list[Answer] = []
    with s3.through(instead=lambda _: taken(left)) as store:
        store.put("a", b"x")
        left += [CLOSED] * MANY
        assert OPERATIONS[verb](store) == found
    assert not left


def test_an_endpoint_at_which_nothing_ever_answered_is_given_up_before_the_limit(
    monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    monkeypatch.setattr(deadline, "FIRST_ANSWER_S", 0.3)
    nowhere = Place("s3://bucket/run", {"endpoint_url": "http://127.0.0.1:1", "key": "k", "secret": "s"})
    with (
        nowhere.opened(client=client, timeout_s=3600) as store,
        pytest.raises(StoreUnavailable, match=r"(efused|ould not connect).*check endpoint_url"),
    ):
        store.get("a")


def test_once_it_has_answered_it_is_waited_for(monkeypatch: pytest.MonkeyPatch, s3: Place) -> None:
    monkeypatch.setattr(deadline, "FIRST_ANSWER_S", 0)
    fails = [False, True, True, True]
    with s3.through(instead=lambda _: CLOSED if fails and fails.pop(0) else None) as store:
        for _ in range(2):
            with pytest.raises(NotFound):
                store.get("a")
    assert not fails


# The rule itself.


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses, of which none is made."""
    pauses: list[float] = []
    monkeypatch.setattr(deadline.time, "sleep", pauses.append)
    return pauses


def calling(*outcomes: BaseException | str) -> Callable[[], str]:
    """A call that ends in one way after the other, and then always in the last one."""
    left = list(outcomes)

    def call() -> str:
        outcome = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return call


def test_what_a_service_asks_to_wait_is_waited(slept: list[float]) -> None:
    call = calling(ValueError("3"), ValueError("0"), "done")
    assert Deadline(60).repeat(call, lambda exc: float(str(exc))) == "done"
    assert slept[0] == 3
    assert 0 < slept[1] < 1


def test_a_wait_beyond_the_limit_ends_with_one_last_attempt_before_it(slept: list[float]) -> None:
    with pytest.raises(ValueError, match="again"):
        Deadline(60).repeat(calling(ValueError("busy"), ValueError("again")), lambda exc: 3600.0)
    (pause,) = slept
    assert 50 < pause < 60


def test_where_the_time_is_over_the_last_answer_is_told() -> None:
    call = calling(ValueError("busy"), deadline.Overdue(1))
    with pytest.raises(ValueError, match="busy"):
        Deadline(1).repeat(call, lambda exc: 0.0)
    with pytest.raises(deadline.Overdue):
        Deadline(1).repeat(call, lambda exc: 0.0)


def test_times_of_retry_after_are_seconds_or_dates() -> None:
    assert retry_after("120") == 120
    assert 86_000 < retry_after("Fri, 31 Dec 2100 23:59:59 GMT") <= 86_400
    assert [retry_after(text) for text in ("", "soon", "-5", "Thu, 01 Jan 1970 00:00:00 GMT")] == [0] * 4
