"""A server whose engine core did not load patchstore's plugin, as `VLLM_PLUGINS` can have it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import RUNNING, ServerProcess

from patchstore.errors import ServerUnavailable
from patchstore.serve.reconcile import Reconciler
from patchstore.serve.settings import PrefixCache
from patchstore.serve.vllm_server import VllmServer

# A server may take minutes to start on a busy machine.
pytestmark = [pytest.mark.vllm, pytest.mark.exhaustive, pytest.mark.timeout(1200)]


@pytest.fixture
def bare(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of such a server."""
    monkeypatch.setenv("VLLM_PLUGINS", "none_of_ours")
    process = ServerProcess(tmp_path / "vllm.log")
    RUNNING.append(process)
    try:
        process.start(model)
        yield process.url
    finally:
        process.stop()
        RUNNING.remove(process)


def test_prefixes_are_not_told_apart_and_every_way_to_an_update_says_so(bare, new_trainer):
    trainer = new_trainer()
    trainer.publish()
    trainer.step()
    with VllmServer(bare, timeout_s=120) as server:
        server.init_weight_transfer(trainer.url)
        server.apply(0)
    with VllmServer(bare, timeout_s=120, prefix_cache=PrefixCache.VERSION) as server:
        failed = Reconciler(trainer.store, server).step()
        assert failed.error is not None and failed.error.kind == ServerUnavailable.kind
        assert "did not load patchstore's plugin" in str(failed.error)
        # Also a driver that does not ask first.
        server.prefetch(1)
        server.start_weight_update()
        with pytest.raises(Exception, match="did not load patchstore's plugin"):
            server.update_weights(1)
        # A pause does not depend on the plugin.
        server.pause()
        assert server.is_paused()
        server.resume()
    with VllmServer(bare, timeout_s=120) as server:
        assert server.status().serving == 0
        server.apply(1)
        assert server.status().serving == 1
