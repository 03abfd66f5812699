"""Ranks for the tests of this folder: started once for each number."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """Returns some ranks of a job."""
    started: dict[int, Ranks] = {}

    def ranks(num: int) -> Ranks:
        if num in started and started[num].has_failed:
            # One of them may still be in the midst of something.
            started.pop(num).close()
        if num not in started:
            started[num] = Ranks(num)
        return started[num]

    yield ranks
    for each in started.values():
        each.close()
