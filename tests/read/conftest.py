"""Fixtures for readers of a store."""

from pathlib import Path

import pytest
from cache_host import Host


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)
