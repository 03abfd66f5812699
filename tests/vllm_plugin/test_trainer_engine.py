"""vLLM's factory of trainer engines makes ours: every rank publishes, and a real server applies."""

from collections.abc import Iterator
from pathlib import Path

import factory_job
import pytest

from patchstore.serve.verify import verify_server
from patchstore.serve.vllm_server import VllmServer
from patchstore.stores import opened
from tests.support.ranks import Ranks

pytest.importorskip("vllm.distributed.weight_transfer.clients", reason="needs vLLM 0.28 or newer")

# Ranks and a server, which take minutes to start on a busy machine.
pytestmark = [pytest.mark.vllm, pytest.mark.exhaustive, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.close()


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> str:
    return str(model / "model.safetensors")


@pytest.mark.parametrize("kind", ["ours", "vllm's"])
def test_a_server_serves_each_version_that_is_sent(
    server: VllmServer, ranks: Ranks, checkpoint: str, tmp_path: Path, kind: str
) -> None:
    url = str(tmp_path / "store")
    ranks.run(factory_job.begin, checkpoint, url, server.url, kind)
    for number in range(3):
        assert ranks.run(factory_job.step, number) == [number, number]
        with opened(url) as store:
            proof = verify_server(store, server, number, num_elements=5000)
            assert proof.manifest.step == number
    ranks.run(factory_job.end)
    assert not server.is_paused()


def test_without_a_client_versions_are_stored(ranks: Ranks, checkpoint: str, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    ranks.run(factory_job.begin, checkpoint, url, None, "")
    assert [ranks.run(factory_job.step, number) for number in range(2)] == [[0, 0], [1, 1]]
    ranks.run(factory_job.end)
    # Version 2 claims the run: no version has the weights of the checkpoint.
    ranks.run(factory_job.begin, checkpoint, url, None, "")
    assert ranks.run(factory_job.step, 7) == [3, 3]
    ranks.run(factory_job.end)


def test_a_server_that_refuses_leaves_the_version_stored(
    server: VllmServer, ranks: Ranks, checkpoint: str, tmp_path: Path
) -> None:
    url = str(tmp_path / "store")
    ranks.run(factory_job.begin, checkpoint, url, server.url, "vllm's")
    assert ranks.run(factory_job.step, 0) == [0, 0]
    server._http.post("/collective_rpc", {"method": "delta_fail_writes", "args": [1]})
    with pytest.raises(AssertionError, match=r"version 1 is stored at .*; the server says: "):
        ranks.run(factory_job.step, 1)
    assert server.status().serving == 0
    assert ranks.run(factory_job.step, 2) == [2, 2]
    with opened(url) as store:
        assert verify_server(store, server, 2, num_elements=5000).manifest.version == 2
    ranks.run(factory_job.end)


def test_impossible_arguments_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for found in ranks.run(factory_job.refused, str(store)):
        assert len(found) == 3
        assert all(each.startswith("UsageError") for each in found)
        assert "needs source=" in found[0]
        assert "ranks of a WeightSource" in found[1]
        assert "'http://server'" in found[2]
    assert not store.exists()
