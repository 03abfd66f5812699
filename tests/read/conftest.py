"""Fixtures for readers of a store."""

from pathlib import Path

import pytest
from cache_host import Host

from tests.support.commands import patchstore  # noqa: F401 -- fixtures


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)
