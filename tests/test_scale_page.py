"""What docs/scale.md calculates and cites is what its code gives, and what the recorded results have."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import blocks, code_of

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "scale.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def test_the_calculation_prints_what_the_page_shows() -> None:
    (code,) = code_of("docs/scale.md", "Calculated")
    (shown,) = (block.code for block in blocks("docs/scale.md", "text"))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {})
    assert said.getvalue() == shown


def test_the_calculation_begins_with_the_measured_sizes() -> None:
    found = {row["row"]: row for row in rows("serving-h200.jsonl") if row["row"] == "anchor"}
    (path,) = [row for row in rows("serving-h200.jsonl") if row["row"] == "path" and not row["concurrency"]]
    assert f"{path['payload_bytes']:_}, {found['anchor']['num_bytes']:_}, 64" in PAGE
    assert f"| {path['total_s']:.2f} s |" in PAGE


@pytest.mark.parametrize("every_s", [5.0, 2.0])
def test_the_figures_of_a_fleet_are_the_recorded_ones(every_s: float) -> None:
    (row,) = [
        row for row in rows("fleet-cpu.jsonl") if row["kind"] == "all" and row.get("every_s") == every_s
    ]
    assert f"{row['follower_cores']:.2f} " in PAGE
    assert f"{row['lag_p50_s']:.1f} s" in PAGE
    assert f"{row['lag_p95_s']:.1f} s" in PAGE


def test_the_figures_of_replicas_and_mirrors_are_the_recorded_ones() -> None:
    (far,) = [row for row in rows("replicate-cpu.jsonl") if row["latency_ms"] == 80]
    assert f"arrives {far['single_s']:.2f} s after" in PAGE
    assert f"{far['versions_per_s']:.0f} versions per second" in PAGE
    assert f"{far['source_requests_per_version']:.1f} requests to the source" in PAGE
    assert f"and {far['target_requests_per_version']:.1f} to the target" in PAGE
    assert f"reads {far['read_over_needed']:.2f} bytes" in PAGE
    assert f"{far['cpu_ms_per_version']:.0f} ms of CPU" in PAGE
    (mirror,) = [row for row in rows("mirror-cpu.jsonl") if row["density"] == 0.01]
    assert f"{mirror['fetched_bytes'] / 1e6:.1f} MB fetched, {mirror['cpu_s']:.1f} s of CPU" in PAGE
