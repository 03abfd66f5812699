"""Fixtures of runs and buckets to examine."""

import pytest

from patchstore.stores.memory import MemoryStore
from tests.stores.conftest import s3_options, s3_session, s3_url  # noqa: F401 - fixtures
from tests.support.commands import patchstore  # noqa: F401 -- fixtures
from tests.support.weights import Run


@pytest.fixture
def run(store: MemoryStore) -> Run:
    """A run of six versions, with anchors at 0 and 4."""
    run = Run(store)
    run.publish_versions(6)
    run.close()
    return run
