"""A server of two tensor-parallel ranks follows a trainer of three ranks, whose shards fit no slice of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sharded_job

from patchstore import replay
from patchstore.serve.verify import verify_server
from patchstore.serve.vllm_server import VllmServer
from patchstore.stores import opened
from tests.support.ranks import Ranks

# A server may take minutes to start on a busy machine.
pytestmark = [pytest.mark.vllm, pytest.mark.exhaustive, pytest.mark.timeout(1200)]

SERVER_ARGUMENTS = ("--tensor-parallel-size", "2")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(3)
    yield started
    started.close()


@pytest.mark.parametrize("encoding", ["gap", "context"])
def test_a_server_serves_each_version_of_a_sharded_trainer(
    server: VllmServer, ranks: Ranks, tmp_path: Path, encoding: str
) -> None:
    url = str(tmp_path / "store")
    results = ranks.run(sharded_job.publish, url, 3, encoding)
    assert results[0] == results[1] == results[2]
    assert all(results[0])

    server.init_weight_transfer(url)
    server.apply(0)
    for version in (1, 2, 3):
        server.apply(version)
        with opened(url) as store:
            proof = verify_server(store, server, version, num_elements=5000)
            assert proof.manifest.version == version
            assert len(proof.manifest.delta.payloads if proof.manifest.delta else ()) == 3
    with opened(url) as store:
        assert replay(store, 3, out=tmp_path / "replayed").version == 3
