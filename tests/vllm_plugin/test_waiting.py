"""Calls that are answered when ranks have rung, or late."""

import math
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from bare_core import Core

from patchstore.errors import UsageError
from vllm_plugin.waiting import can_ring, ring, when_rung


class Ranks:
    """Some that are done, and some that will ring."""

    def __init__(self, *is_done: bool, num_silent: int = 0) -> None:
        self._answers: list[dict[str, Any]] = [
            {"rank": rank, "is_done": each, "rings": not each and rank >= num_silent}
            for rank, each in enumerate(is_done)
        ]
        self.bell: str | None = None

    def ask(self, bell: str | None) -> list[dict[str, Any]]:
        self.bell = bell
        return self._answers


def test_a_call_is_answered_when_each_rank_that_was_not_done_has_rung():
    ranks = Ranks(False, True, False)
    late = when_rung(60, ranks.ask)
    assert isinstance(late, Future)
    assert can_ring(ranks.bell)
    ring(ranks.bell)
    assert not late.done()
    ring(ranks.bell)
    assert late.result(60) == [{"rank": rank, "is_done": True} for rank in range(3)]
    # Who comes later fails at nothing, and nothing is left behind.
    assert not can_ring(ranks.bell)
    ring(ranks.bell)
    assert not Path(ranks.bell).parent.exists()


def test_a_ring_before_all_ranks_have_answered_counts():
    ranks = Ranks(False)

    def ask(bell: str | None) -> list[dict[str, Any]]:
        ring(bell)
        return ranks.ask(bell)

    assert when_rung(60, ask).result(60) == [{"rank": 0, "is_done": True}]


def test_a_call_is_answered_in_time_where_a_rank_does_not_ring():
    ranks = Ranks(False, False, True)
    late = when_rung(0.01, ranks.ask)
    ring(ranks.bell)
    assert [each["is_done"] for each in late.result(60)] == [False, False, True]
    assert not Path(ranks.bell).parent.exists()


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [(Ranks(True, True), 60), (Ranks(False, False, num_silent=1), 60), (Ranks(False), 0)],
)
def test_nobody_waits_for_what_is_done_or_for_ranks_that_will_not_ring(ranks, seconds):
    found = when_rung(seconds, ranks.ask)
    assert [each["is_done"] for each in found] == [each["is_done"] for each in ranks.ask(None)]


def test_a_call_is_answered_at_once_where_there_is_no_place_for_a_bell(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert when_rung(60, Ranks(False, num_silent=1).ask) == [{"rank": 0, "is_done": False}]
    # No socket may have a name that is so long.
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    ranks = Ranks(False, num_silent=1)
    assert when_rung(60, ranks.ask) == [{"rank": 0, "is_done": False}]
    assert (ranks.bell, list(folder.iterdir())) == (None, [])


def test_the_bell_is_the_cores_and_never_a_clients():
    core = Core()
    core.collective_rpc("delta_prefetch", args=(1,), kwargs={"bell": "/dev/log"})
    core.collective_rpc("delta_prefetch", args=(1,), kwargs={"bell": "/dev/log", "wait_s": 1})
    (_, first), (_, second) = core.calls
    assert first == {"bell": None}
    assert second.keys() == {"bell"}
    assert second["bell"] != "/dev/log"


@pytest.mark.parametrize("wrong", [-1, 61, math.nan, math.inf, "1", None, [1]])
def test_a_time_that_is_none_reaches_no_rank(wrong):
    core = Core()
    with pytest.raises(UsageError, match=r"^\[usage\] wait_s is a number of seconds up to 60"):
        core.collective_rpc("delta_prefetch", args=(1,), kwargs={"wait_s": wrong})
    assert core.calls == []
