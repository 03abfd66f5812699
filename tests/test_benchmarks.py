"""What benchmarks compute from what they measured. That they measure is seen by running them."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import latency, plots, serving
from benchmarks.cases import CASES
from benchmarks.latency import Gap, Request, Span
from benchmarks.serving import PARTS, Episode, Update

RECORDED = Path(__file__).parents[1] / "benchmarks" / "results"


def update(called: float, *, pause_s: float = 0.25) -> Update:
    """A version whose every part but the pause took a second."""
    pausing = called + 5
    return Update(
        version=1,
        num_changed=10,
        payload_bytes=20,
        called=called,
        compared=called + 1,
        published=called + 2,
        noticed=called + 3,
        prefetched=called + 4,
        pausing=pausing,
        resumed=pausing + pause_s,
        applied=pausing + pause_s + 1,
        answered=pausing + pause_s + 2,
        calls={"hold": 0.0625, "finish": 0.125, "reset": 0.03125, "resume": 0.03125},
        timings={"fetch": 0.5, "stage": 0.25, "commit": 0.125},
    )


def streamed(*times: float, client: int = 0) -> Request:
    return Request(client=client, times=times, counts=[1] * len(times))


def gap(began: float, ended: float, client: int = 0) -> Gap:
    return Gap(client=client, began=began, ended=ended)


def test_quantiles_are_of_the_gaps_and_none_without_any():
    found = latency.quantiles([gap(0, seconds) for seconds in range(1, 102)])

    assert found == {"p50_s": 51, "p95_s": 96, "p99_s": 100, "max_s": 101}
    assert set(latency.quantiles([]).values()) == {None}


def test_tokens_that_came_together_are_one_arrival():
    found = latency.gaps([streamed(1.0, 1.0001, 1.0002, 1.5, 1.5001), streamed(7.0, 8.0, client=1)])

    assert found == [gap(1.0, 1.5), gap(7.0, 8.0, client=1)]


def test_a_gap_belongs_to_the_strongest_window_that_it_touches():
    spans = [
        Span(window="quiet", began=0, ended=10),
        Span(window="publishing", began=10, ended=12),
        Span(window="staging", began=12, ended=14),
        Span(window="commit", began=14, ended=15),
    ]
    within, across, publishing, staging, over, after = (
        gap(1, 2),
        gap(9.5, 10),
        gap(9.5, 10.5),
        gap(11, 13),
        gap(11, 16),
        gap(15, 16),
    )

    windows = latency.sort_gaps([within, across, publishing, staging, over, after], spans)

    assert windows == {
        "quiet": [within, across],
        "publishing": [publishing],
        "staging": [staging],
        "commit": [over],
    }
    assert latency.longest([within, staging, over], spans[-1]) == 5
    assert latency.longest([within], spans[-1]) is None


def test_a_series_keeps_the_longest_gap_of_each_stretch():
    found = [gap(0, at / 100) for at in range(1, 1000)]

    points = latency.series(found, zero=5, began=0, ended=10, num_points=20)

    assert len(points) == 20
    assert points[0] == [-4.51, 0.49]
    assert points[-1] == [4.99, 9.99]


def test_the_parts_of_an_update_are_all_of_its_time():
    one = update(100.0)

    assert sum(one.parts().values()) == one.answered - one.called
    assert one.parts() == dict.fromkeys(PARTS, 1.0) | {"pause_s": 0.25}


def path_row() -> dict:
    return serving.path([update(0, pause_s=0.25), update(0, pause_s=0.5), update(0, pause_s=1)])


def test_a_path_row_has_medians_and_what_they_lie_between():
    row = path_row()

    assert (row["total_min_s"], row["total_s"], row["total_max_s"]) == (7.25, 7.5, 8)
    assert (row["pause_min_s"], row["pause_s"], row["pause_max_s"]) == (0.25, 0.5, 1)
    assert row.keys() >= PARTS.keys() | {"num_changed", "payload_bytes", "engine_commit_s", "repeats"}
    json.dumps(row)


def episode() -> tuple[Episode, list[Request]]:
    quiet = [Span(window="quiet", began=0, ended=10)]
    times = [at / 4 for at in range(61)]
    # Nothing comes while weights are written, and for half a second after.
    late = [at for at in times if not 15 <= at <= 15.75]
    return Episode(density=0.01, updates=[update(10)], quiet=quiet), [streamed(*late, 16), streamed(1, 2)]


def test_a_latency_row_has_the_stall_of_the_answers_under_way():
    found, row = serving.analyse(*episode())

    assert (row["stall_s"], row["in_flight"], row["commit_gaps"]) == (1.25, 1, 1)
    assert row["quiet_max_s"] == 1.0
    assert row["quiet_p50_s"] == 0.25
    assert row["staging_max_s"] == 0.25
    assert row["quiet_tokens_per_s"] == 4.2
    json.dumps(row)

    around = serving.around(found, episode()[0])
    assert (around["marks"]["called"], around["stall_s"]) == (-5, 1.25)
    assert max(seconds for _, seconds in around["points"]) == 1.25
    json.dumps(around)


def test_an_update_that_nobody_waited_for_has_no_stall():
    _, row = serving.analyse(episode()[0], [streamed(1, 2, 3)])

    assert (row["stall_s"], row["stall_max_s"], row["in_flight"]) == (None, None, 0)


def test_rows_become_pictures(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `bench`")
    found, row = serving.analyse(*episode())
    about = {"case": "serving", "shape": "tiny", "device": "a device", "density": 0.01}
    rows = plots.read(sorted(RECORDED.glob("apply-*.jsonl")))
    rows += [
        about | {"row": "path", "concurrency": 0} | path_row(),
        about | {"row": "path", "concurrency": 8} | path_row(),
        about | {"row": "latency", "concurrency": 8} | row,
        about | {"row": "series", "concurrency": 8} | serving.around(found, episode()[0]),
    ]

    drawn = plots.draw(rows, tmp_path / "pictures")

    assert [path.name for path in drawn] == ["pause.png", "publish-to-serving.png", "latency-tiny.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_rows_that_no_picture_is_of_are_left_out(tmp_path):
    rows = plots.read([RECORDED / "replay-cpu.jsonl", RECORDED / "encodings-cpu.jsonl"])

    assert plots.draw(rows, tmp_path) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_has_arguments_and_a_test_that_gates_it(case):
    case.arguments(argparse.ArgumentParser())

    assert (Path(__file__).parents[1] / case.gate).exists()
