"""Ranks for the tests of this folder, and a trainer of transformers that takes steps in milliseconds."""

from collections.abc import Iterator

import huggingface_hub.constants
import pytest

from tests.publish.group.conftest import ranks_of

__all__ = ["ranks_of"]


@pytest.fixture(scope="module", autouse=True)
def _no_hub() -> Iterator[None]:
    """Keep trainers from asking the Hub about their model, here and in the processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield
