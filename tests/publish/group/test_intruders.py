"""A process that reaches the port of the ranks' key-value store makes no rank report a wrong version."""

import base64
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
import troubles
from test_troubles import check_repaired, read

from patchstore.format import history
from patchstore.stores import opened
from tests.support.ranks import Ranks

RanksOf = Callable[[int], Ranks]

# Ranks wait for each other, and a busy machine is slow.
pytestmark = pytest.mark.timeout(600)

FIRST = re.compile("^(.*/patchstore/[0-9a-f]+/(?:maxima/)?[0-9a-f]{16,})/([0-9]+[.][0-9]+/(?:1|answer))$")
"""A message of a publisher: what its session's keys begin with, and the rest."""
NOTHING = json.dumps({"ok": {"encoding": "gap", "num_changed": 0, "payloads": [], "growth": {}}})
"""What a rank reports of its part if nothing has changed."""


@contextmanager
def intruder(
    ranks: Ranks, ready: Path, key: str, forge: Callable[[dict[str, str]], str], *, maxima: bool = False
) -> Iterator[None]:
    """Write one key of the session again and again, also before it is written by who should.

    Args:
        ready: touched once the first version exists, and the key is written.
        key: without what all keys of the session begin with.
        forge: returns what to write, given all messages that were seen, by key.
        maxima: of the session in which ranks compare blocks of weights.
    """
    store, over = ranks.reach_store(), Event()
    seen: dict[str, str] = {}
    prefixes: set[str] = set()
    of_before = set(store.list_keys())

    def look() -> None:
        nonlocal store
        for each in set(store.list_keys()) - of_before:
            found = FIRST.match(each)
            if found is not None and ("/maxima/" in each) == maxima:
                prefixes.add(found[1])
                try:
                    seen[found[2]] = store.get(each).decode()
                except RuntimeError:
                    # It was deleted meanwhile, and the connection is of no use any more.
                    store = ranks.reach_store()

    def write() -> None:
        while not over.wait(0.001):
            if not ready.exists():
                look()
                if not any(maxima or "manifest" in value for value in seen.values()):
                    continue
            for prefix in prefixes:
                store.set(f"{prefix}/{key}", forge(seen))
                ready.touch()

    thread = Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def with_a_tag_of_another(seen: dict[str, str]) -> str:
    """The start of the rank's own last message, and another text."""
    last = max(key for key in seen if key.endswith("/1"))
    return seen[last].partition("{")[0] + NOTHING


def its_own_of_before(seen: dict[str, str]) -> str:
    return seen[max(key for key in seen if key.endswith("/1"))]


@pytest.mark.parametrize(
    "forge", [lambda seen: NOTHING, with_a_tag_of_another, its_own_of_before, lambda seen: "\0garbage"]
)
def test_a_report_that_was_rewritten_ends_the_publication_on_all_ranks(
    ranks_of: RanksOf, tmp_path: Path, forge: Callable[[dict[str, str]], str]
) -> None:
    url, ready = str(tmp_path / "store"), tmp_path / "ready"
    ranks = ranks_of(2)
    with intruder(ranks, ready, "2.2/1", forge):
        results = ranks.run(troubles.publish_beside_an_intruder, url, str(ready), 1)
    for (kind, message, named, _), _ in results:
        assert kind == "rank-failed"
        assert "rank 0 of 2 found another message in the place of that of rank 1 of 2" in message
        assert named == [1]
    check_repaired(url, [found for _, found in results])
    with opened(url) as store:
        assert [history.read_manifest(store, version).step for version in range(2)] == [0, 2]


def test_an_answer_that_was_rewritten_is_an_error_on_the_rank_that_hears_it(
    ranks_of: RanksOf, tmp_path: Path
) -> None:
    url, ready = str(tmp_path / "store"), tmp_path / "ready"
    ranks = ranks_of(2)

    def answer_of_before(seen: dict[str, str]) -> str:
        return next(value for key, value in seen.items() if "/answer" in key and "manifest" in value)

    with intruder(ranks, ready, "2.2/answer", answer_of_before):
        results = ranks.run(troubles.publish_beside_an_intruder, url, str(ready), 0)
    (leader, _), ((kind, message, named, _), _) = results
    # The leader has committed what both stored.
    assert leader[0] == ""
    assert kind == "rank-failed"
    assert "rank 1 of 2 found another message in the place of that of rank 0 of 2" in message
    assert "what the ranks concluded is unknown here" in message
    assert named == [0]
    check_repaired(url, [found for _, found in results])
    read(url, 1)


def test_the_largest_weights_of_a_block_that_were_rewritten_end_the_publication(
    ranks_of: RanksOf, tmp_path: Path
) -> None:
    url, ready = str(tmp_path / "store"), tmp_path / "ready"
    ranks = ranks_of(2)
    large = base64.b64encode(np.full(1, 1e9, dtype="<f4").tobytes()).decode()
    forged = json.dumps({"ok": {"values": large}})
    with intruder(ranks, ready, "2.1/1", lambda seen: forged, maxima=True):
        results = ranks.run(troubles.quantize_beside_an_intruder, url, str(ready))
    for kind, message, _, _ in results:
        assert kind == "rank-failed"
        assert "another process writes there" in message
    with opened(url) as store:
        head = history.head(store)
    assert head is not None and head.version == 0
