"""What a rank hears of another one that answers and closes its publisher at once."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from patchstore.errors import RankFailed
from patchstore.publish.ranks import Channel


class BetweenLooks:
    """A store of keys in which something is written before a certain key is looked for.

    Keys are given without what they all begin with.
    """

    def __init__(self, key: str, written: dict[str, str]) -> None:
        self._store, self._key, self._written = dist.HashStore(), key, written

    def check(self, keys: list[str]) -> bool:
        if keys[0].endswith(self._key):
            for key, value in self._written.items():
                self._store.set(keys[0].removesuffix(self._key) + key, value)
        return bool(self._store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def channel(rank: int, store: Any) -> Channel:
    """An end of a group of two ranks that have met, in its first call."""
    found = Channel((0, 1), rank, lambda: store, 5.0)
    found.session = "session"
    found.next_call()
    return found


LEFT = "/session/left/"
ROUND = "/session/1.1"


def test_a_leader_that_answered_before_it_left_is_heard() -> None:
    said = {f"{ROUND}/answer": json.dumps({"ok": {"version": 3}}), f"{LEFT}0": ""}
    follower = channel(1, BetweenLooks(f"{LEFT}0", said))
    assert follower.round("publish", dict, lambda _: {}) == {"version": 3}


def test_a_rank_that_reported_before_it_left_is_heard() -> None:
    said = {f"{ROUND}/1": json.dumps({"ok": {"size": 7}}), f"{LEFT}1": ""}
    leader = channel(0, BetweenLooks(f"{LEFT}1", said))
    assert leader.round("publish", dict, lambda reports: {"reports": reports}) == {
        "reports": [{}, {"size": 7}]
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_left_without_a_word_is_named(rank: int) -> None:
    other = 1 - rank
    with pytest.raises(RankFailed, match=f"rank {other} of 2.*has closed its publisher") as error:
        channel(rank, BetweenLooks(f"{LEFT}{other}", {f"{LEFT}{other}": ""})).round(
            "publish", dict, lambda _: {}
        )
    assert error.value.ranks == (other,)


class Rewriting:
    """A store of keys in which another process changes one message before it is read."""

    def __init__(self, store: dist.Store, key: str, text: str) -> None:
        self._store, self._key, self._text = store, key, text

    def get(self, key: str) -> bytes:
        return self._text.encode() if self._key and key.endswith(self._key) else self._store.get(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize(
    ("rank", "key", "text"),
    [
        (0, f"{ROUND}/1", '{"ok": {"size": 8}}'),
        (1, f"{ROUND}/answer", '{"ok": {"run": "another"}}'),
        (None, "", ""),
    ],
)
def test_what_was_rewritten_before_ranks_had_a_secret_is_found_out_then(
    rank: int | None, key: str, text: str
) -> None:
    store = dist.HashStore()
    ends = [channel(each, Rewriting(store, key if each == rank else "", text)) for each in range(2)]

    def talk(end: Channel) -> object:
        end.round("open a publisher", lambda: {"size": 7}, lambda _: {"run": "this"})
        end.trust(b"secret")
        try:
            return end.round("open a run", dict, lambda _: {"opened": 1})
        except RankFailed as exc:
            return str(exc)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(talk, ends))
    if rank is None:
        assert found == [{"opened": 1}] * 2
    else:
        assert all("another process writes there" in str(each) for each in found)
