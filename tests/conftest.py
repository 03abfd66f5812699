"""Fixtures for all tests: stores and small models that change like trained ones."""

from collections.abc import Iterator

import pytest
import torch

from patchstore.stores.memory import MemoryStore
from tests import interpreted  # noqa: F401 -- before anything imports Triton
from tests.weights import Run


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
