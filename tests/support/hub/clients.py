"""How the real clients of the Hub are told to behave in tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def quick_clients(folder: Path) -> Iterator[None]:
    """Have huggingface_hub and hf-xet give up soon, keep to a folder of their own, and say little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder))
        patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        patch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "20ms")
        patch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "2")
        patch.delenv("HF_TOKEN", raising=False)
        yield
