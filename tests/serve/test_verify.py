"""What a server says of its weights, compared with what the store says they are."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchstore import Publisher
from patchstore.bucket import history
from patchstore.errors import ServerUnavailable, StateMismatch, UsageError
from patchstore.follow.verify import verify_server
from patchstore.stores.memory import MemoryStore
from patchstore.tensors import state_digest

WEIGHTS = {"a": torch.arange(12.0).view(3, 4).bfloat16(), "b": torch.randn(5).bfloat16()}


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    with Publisher(store, WEIGHTS, dtype=None) as publisher:
        publisher.publish_patch(0).result(timeout_s=60)
    return store


def part(name: str, first: int, end: int, changed: bool = False) -> list[Any]:
    """A run of a tensor's elements, as a rank claims it."""
    values = WEIGHTS[name].flatten()[first:end].clone()
    if changed:
        values[0] += 1
    sums = state_digest.of_elements(torch.arange(first, end), values)
    return [[first, end - first, 1], sums.hex()]


@dataclass
class Ranks:
    """A server of some ranks, each of which answers as it is told."""

    run_id: str
    sums: list[dict[str, list[Any]]]
    held: int | None = 0
    commits: list[int] = field(default_factory=lambda: [0])
    """What the count of commits is in each answer; the last one stays."""
    unverified: tuple[str, ...] = ()
    num_engines: int = 1
    engines_differ_at: tuple[int, ...] = ()
    """The parts of which another engine has other sums."""
    url: str = "http://server"

    def server(self) -> Any:
        return SimpleNamespace(
            url=self.url, status=self._status, sums=self._sums, engines_have=self._engines_have
        )

    def _status(self) -> Any:
        return SimpleNamespace(run_id=self.run_id, num_engines=self.num_engines)

    def _engines_have(self, sums: list[dict[str, Any]], first: int, num_elements: int) -> bool:
        return first not in self.engines_differ_at

    def _sums(self, first: int, num_elements: int) -> list[dict[str, Any]]:
        commits = self.commits.pop(0) if len(self.commits) > 1 else self.commits[0]
        name = sorted(WEIGHTS)[first]
        return [
            {
                "serving": self.held,
                "num_applied": commits,
                "next": first + 1 if first + 1 < len(WEIGHTS) else None,
                "sums": {name: rank[name]} if name in rank else {},
                "computed": [],
                "unverified": list(self.unverified),
            }
            for rank in self.sums
        ]


@pytest.fixture
def ranks(store: MemoryStore) -> Ranks:
    """Two ranks that share `a` between them and both hold `b`."""
    whole = [part("b", 0, 5)]
    header = history.read_header(store)
    return Ranks(header.run_id, [{"a": [part("a", 0, 4)], "b": whole}, {"a": [part("a", 4, 12)], "b": whole}])


def test_slices_of_all_ranks_are_added_up_and_copies_counted_once(store: MemoryStore, ranks: Ranks) -> None:
    found = verify_server(store, ranks.server())
    assert (found.manifest.version, found.num_verified, found.unverified) == (0, 2, ())


def test_one_other_element_is_a_mismatch(store: MemoryStore, ranks: Ranks) -> None:
    ranks.sums[1]["a"] = [part("a", 4, 12, changed=True)]
    with pytest.raises(StateMismatch, match="such as a"):
        verify_server(store, ranks.server())


def test_copies_that_differ_are_a_mismatch(store: MemoryStore, ranks: Ranks) -> None:
    ranks.sums[1]["b"] = [part("b", 0, 5, changed=True)]
    with pytest.raises(StateMismatch, match="copies of 'b'"):
        verify_server(store, ranks.server())


def test_a_server_that_never_gets_to_the_end_is_given_up(store: MemoryStore, ranks: Ranks) -> None:
    server = ranks.server()
    server.sums = lambda first, _: [each | {"next": 0} for each in ranks.server().sums(first, 1)]
    with pytest.raises(ServerUnavailable, match="no progress"):
        verify_server(store, server)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slice_that_no_rank_has_is_a_mismatch(store: MemoryStore, ranks: Ranks, rank: int) -> None:
    del ranks.sums[rank]["a"]
    with pytest.raises(StateMismatch, match="such as a"):
        verify_server(store, ranks.server())


def test_names_that_are_not_served_are_listed(store: MemoryStore, ranks: Ranks) -> None:
    ranks.unverified = ("b",)
    for rank in ranks.sums:
        del rank["b"]
    assert verify_server(store, ranks.server()).unverified == ("b",)


def test_engines_that_differ_are_a_mismatch(store: MemoryStore, ranks: Ranks) -> None:
    ranks.num_engines = 2
    assert verify_server(store, ranks.server()).num_engines == 2
    ranks.engines_differ_at = (1,)
    with pytest.raises(StateMismatch, match="2 engines"):
        verify_server(store, ranks.server())


def test_engines_that_differ_because_of_an_update_are_asked_again(store: MemoryStore, ranks: Ranks) -> None:
    ranks.num_engines, ranks.engines_differ_at = 2, (0,)
    ranks.commits = list(range(100))
    with pytest.raises(ServerUnavailable, match="while it was being read"):
        verify_server(store, ranks.server())


def test_an_update_between_two_parts_begins_anew(store: MemoryStore, ranks: Ranks) -> None:
    ranks.commits = [0, 1, 1]
    assert verify_server(store, ranks.server()).num_verified == 2


def test_a_server_that_never_rests_is_given_up(store: MemoryStore, ranks: Ranks) -> None:
    ranks.commits = list(range(100))
    with pytest.raises(ServerUnavailable, match="while it was being read"):
        verify_server(store, ranks.server())


def test_a_server_without_a_version_or_of_another_run_cannot_be_verified(store, ranks):
    with pytest.raises(UsageError, match="not 7"):
        verify_server(store, ranks.server(), 7)
    for rank in ranks.sums:
        rank.clear()
    with pytest.raises(UsageError, match="none can be compared"):
        verify_server(store, ranks.server())
    ranks.held = None
    with pytest.raises(UsageError, match="serves no version"):
        verify_server(store, ranks.server())
    ranks.run_id = "another"
    with pytest.raises(UsageError, match="follows run another"):
        verify_server(store, ranks.server())
