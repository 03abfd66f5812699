"""Ranks for the tests of this folder: started once for each number."""

from pathlib import Path

import pytest

from tests.support.model_bits import check
from tests.support.ranks import Published, RanksByNumber, RanksOf

_RANKS = RanksByNumber()


@pytest.fixture(scope="session")
def ranks_of() -> RanksOf:
    """Returns some ranks of a job."""
    return _RANKS


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks after the last test of this folder: idle they take gigabytes, and a part of a core."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _RANKS.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def published(ranks_of: RanksOf, url: str) -> Published:
    return lambda num, job, *args: check(url, ranks_of(num).run(job, url, *args))
