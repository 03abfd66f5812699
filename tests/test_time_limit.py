"""CI's limit of time: exhaustive tests that would begin after it are skipped, and counted."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("left_s", "outcome"), [(-1, "2 skipped"), (600, "2 passed")])
def test_an_exhaustive_test_does_not_begin_after_the_limit(left_s: int, outcome: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "exhaustive"]
    done = subprocess.run(
        [*command, "tests/test_time_limit.py"],
        cwd=ROOT,
        env=os.environ | {"PATCHSTORE_TESTS_UNTIL": str(time.time() + left_s)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert outcome in done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [1, 2])
def test_one_that_passes(number: int) -> None:
    assert number
