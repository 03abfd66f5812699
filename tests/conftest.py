"""Fixtures for all tests: stores and small models that change like trained ones."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from patchstore.stores.memory import MemoryStore
from tests.support import interpreted  # noqa: F401 -- before anything imports Triton
from tests.support.trainers import RUNNER
from tests.support.weights import Run

# On a busy machine any example may take long; pytest's own timeout ends one that hangs.
hypothesis.settings.register_profile("patient", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("patient")


@pytest.fixture
def store() -> MemoryStore:
    """An empty store of its own."""
    return MemoryStore()


@pytest.fixture
def run(store: MemoryStore) -> Iterator[Run]:
    """A small run on `store`, not yet begun."""
    run = Run(store)
    yield run
    run.close()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def runner() -> Iterator["subprocess.Popen[str]"]:
    """Where `tests.support.trainers` run."""
    with subprocess.Popen(
        [sys.executable, "-c", RUNNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
