"""Ranks for the tests of this folder, and a trainer of transformers that takes steps in milliseconds."""

import importlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from tests.publish.group.conftest import url
from tests.support import tiny_qwen
from tests.support.ranks import RanksByNumber, RanksOf

__all__ = ["url"]


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[RanksOf]:
    """Returns some ranks of a job."""
    with closing(RanksByNumber()) as ranks:
        yield ranks


@pytest.fixture(scope="module", autouse=True)
def _no_hub() -> Iterator[None]:
    """Keep trainers from asking the Hub about their model, here and in the processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def grpo() -> Any:
    """The module of that name."""
    return importlib.import_module("grpo")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen.save(tiny_qwen.build(), tmp_path_factory.mktemp("models") / "base")
