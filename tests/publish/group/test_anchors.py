"""Ranks that publish together agree on anchors, and one of them has a process beside it."""

from collections.abc import Callable
from pathlib import Path

import jobs
import pytest

from tests.support.ranks import Ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.exhaustive]


def test_ranks_agree_on_anchors_whose_distance_is_auto(
    ranks_of: Callable[[int], Ranks], tmp_path: Path
) -> None:
    (first, _), (second, _) = ranks_of(2).run(jobs.auto, str(tmp_path / "bucket"))
    assert first == second
    assert 2 < first.count("anchor") < 20


def test_one_rank_has_the_process_that_adds_anchors(ranks_of: Callable[[int], Ranks], tmp_path: Path) -> None:
    bucket = str(tmp_path / "bucket")
    (first, leads), (second, follows) = ranks_of(2).run(jobs.beside, bucket)
    assert first == second == ["anchor", *["delta"] * 5]
    assert (leads, follows) == (True, False)
