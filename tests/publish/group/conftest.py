"""Ranks for the tests of this folder: started once for each module and number."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """Returns some ranks of a job."""
    started: dict[int, Ranks] = {}

    def ranks(num: int) -> Ranks:
        if num not in started:
            started[num] = Ranks(num)
        return started[num]

    yield ranks
    for each in started.values():
        each.close()
