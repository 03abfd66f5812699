"""Fixtures for publishers."""

import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that a store fails are made again at once."""
    monkeypatch.setattr("patchstore.stores.tries.FIRST_PAUSE_S", 0.001)


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
