"""A source that a publisher wrote."""

import pytest

from patchstore.stores import tries
from patchstore.stores.memory import MemoryStore
from tests.stores.conftest import s3_options, s3_session, s3_url  # noqa: F401 - fixtures
from tests.support.commands import patchstore, started  # noqa: F401 -- fixtures
from tests.support.weights import Run


@pytest.fixture
def source(run: Run) -> MemoryStore:
    """Six versions: anchors at 0 and 4, a claim with its parent's sums, and remains of failed attempts."""
    run.publish_versions(5)
    run.close()
    run.model.update(
        {name: tensor.float() for name, tensor in run.history[4].items() if tensor.is_floating_point()}
    )
    run.model["head.weight"] = run.model["embed.weight"]
    run.open(resume=True)
    run.close()
    run.store.put("deltas/00000003-0123456789abcdef/00001-of-00001.safetensors", b"of a killed publisher")
    run.store.put("pieces/00000003-0123456789abcdef/00000.safetensors", b"of a killed rank")
    run.store.put("probes/x/turn", b"first")
    return run.store


@pytest.fixture
def target() -> MemoryStore:
    return MemoryStore("memory://target")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "FIRST_PAUSE_S", 0.0)
