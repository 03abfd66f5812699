"""Engines of more kinds start at a version as from its replay, and go on by deltas."""

from typing import Any

import pytest
from programs import found_by

pytestmark = pytest.mark.exhaustive

CASES = ("dense", "two", "experts", "experts-two", "fp8-channel", "draft", "draft-elsewhere")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the engines of all cases held: see `boot_engines`."""
    return found_by("boot_engines.py", tmp_path_factory.mktemp("engines"), *CASES)


@pytest.mark.parametrize("name", CASES)
def test_an_engine_that_starts_at_a_version_is_one_of_its_replay(found, name):
    case = found[name]
    assert "failed" not in case, case["failed"]
    assert case["started"]["fingerprints"] == case["fresh"]["fingerprints"]
    # As text, since a number that is none differs from itself.
    assert str(case["started"]["answers"]) == str(case["fresh"]["answers"])
    ranks = len(case["fresh"]["fingerprints"])
    assert case["serving"] == [2] * ranks
    assert (case["refused"], case["updated"]) == (None, [3] * ranks)


def test_vllms_own_reload_does_not_read_another_checkpoint(found):
    for case in found.values():
        assert "does not reload weights by itself" in case["reload"]
