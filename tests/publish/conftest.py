"""Fixtures for publishers."""

import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(str(tmp_path / "group"), 1),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def torchao() -> ModuleType:
    """The real library, which warns a lot while it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchao", exc_type=ImportError)
