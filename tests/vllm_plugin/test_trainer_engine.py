"""vLLM's factory of trainer engines makes ours: each of three ranks publishes, and a real server applies.

The server has two tensor-parallel ranks, so the trainer's shards fit no slice of it.
"""

from collections.abc import Iterator
from pathlib import Path

import factory_job
import pytest
from server_process import call

from patchstore.follow.verify import verify_server
from patchstore.stores import opened
from tests.support.ranks import Ranks

pytest.importorskip("vllm.distributed.weight_transfer.clients", reason="needs vLLM 0.28 or newer")

pytestmark = pytest.mark.exhaustive

SERVER_ARGUMENTS = ("--tensor-parallel-size", "2")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(3)
    yield started
    started.close()


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> str:
    return str(model / "model.safetensors")


@pytest.mark.parametrize(("kind", "encoding"), [("ours", "gap"), ("vllm's", "context")])
def test_a_server_serves_each_version_that_is_sent(server, ranks, checkpoint, tmp_path, kind, encoding):
    url = str(tmp_path / "store")
    ranks.run(factory_job.begin, checkpoint, url, server.url, kind, encoding)
    for number in range(4):
        assert ranks.run(factory_job.step, number) == [number] * 3
        with opened(url) as store:
            proof = verify_server(store, server, number, num_elements=5000)
            assert proof.manifest.step == number
            assert number == 0 or len(proof.manifest.delta.payloads) == 3
    ranks.run(factory_job.end)
    assert not server.is_paused()


def test_without_a_client_versions_are_stored(ranks: Ranks, checkpoint: str, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    ranks.run(factory_job.begin, checkpoint, url, None)
    assert [ranks.run(factory_job.step, number) for number in range(2)] == [[0] * 3, [1] * 3]
    ranks.run(factory_job.end)
    # Version 2 claims the run: no version has the weights of the checkpoint.
    ranks.run(factory_job.begin, checkpoint, url, None)
    assert ranks.run(factory_job.step, 7) == [3] * 3
    ranks.run(factory_job.end)
    # Version 4 has these weights, as no shard has an element of so large a number.
    ranks.run(factory_job.begin, None, url, None)
    assert [ranks.run(factory_job.step, number) for number in (10**9, 8)] == [[4] * 3, [5] * 3]
    ranks.run(factory_job.end)


def test_a_server_that_refuses_leaves_the_version_stored(server, ranks, checkpoint, tmp_path):
    url = str(tmp_path / "store")
    ranks.run(factory_job.begin, checkpoint, url, server.url, "vllm's")
    assert ranks.run(factory_job.step, 0) == [0] * 3
    call(server, "delta_fail_writes", 1)
    with pytest.raises(AssertionError, match=r"version 1 is stored at .*; the server says: "):
        ranks.run(factory_job.step, 1)
    assert server.status().serving == 0
    assert ranks.run(factory_job.step, 2) == [2] * 3
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
