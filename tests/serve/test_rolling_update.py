"""Servers that are slow, fail and restart while versions keep coming."""

import pytest

from benchmarks.cases.fleet import Fleet, Measured, measure, quantiles


@pytest.mark.exhaustive
def test_every_server_comes_to_the_head_however_unwell_it_is():
    found = measure(12, num_unwell=2, versions=6, every_s=0.5)

    assert (found.late, found.fleet.left) == (set(), set())
    held = {url: [held for _, held in events] for url, events in found.fleet.events.items()}
    assert all(6 in each for each in held.values())
    # What makes them unwell did happen.
    slow = [held[url] for url, kind in found.fleet.kinds.items() if kind == "slow"]
    assert all(each != list(range(7)) for each in slow)


@pytest.fixture
def measured() -> Measured:
    fleet = Fleet(
        kinds={"a": "well", "b": "restarting"},
        events={
            "a": [(1.0, 0), (10.5, 1), (20.5, 2)],
            # It skips version 1, and forgets version 2 for a while.
            "b": [(1.0, 0), (23.0, 2), (25.0, None), (31.0, 3)],
        },
    )
    return Measured(fleet=fleet, created=[0.0, 10.0, 20.0, 30.0], late={"a"}, follower={"every_s": 10.0})


def test_lag_counts_until_a_server_holds_a_version_or_a_later_one(measured: Measured):
    assert list(measured.lags_s("a")) == [0.5, 0.5]
    assert list(measured.lags_s("b")) == [13.0, 3.0, 1.0]


def test_versions_behind_are_seen_at_every_moment_at_which_a_server_holds_one(measured: Measured):
    behind = list(measured.versions_behind("a"))
    assert (behind[0], behind[10], max(behind)) == (1, 0, 1)
    assert len(list(measured.versions_behind("b"))) < len(behind)


def test_a_row_is_of_one_kind_or_of_all(measured: Measured):
    row = measured.row("all")
    assert (row["servers"], row["at_head"], row["versions"], row["every_s"]) == (2, 1, 3, 10.0)
    assert (row["lag_p50_s"], row["lag_max_s"]) == (1.0, 13.0)
    assert measured.row("slow") is None
    well = measured.row("well")
    assert well is not None and "every_s" not in well


def test_quantiles_are_of_the_values_and_none_without_any():
    assert quantiles(range(101)) == {"p50": 50, "p95": 95, "max": 100}
    assert set(quantiles([]).values()) == {None}
