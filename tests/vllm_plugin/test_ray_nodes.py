"""A server of two tensor-parallel ranks on two Ray nodes is updated, loses a node, and is brought back."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs Ray")

from ray_nodes import Nodes
from server_process import ServerProcess

from examples.serving import FollowCommand
from patchstore.errors import ServerUnavailable
from patchstore.follow.verify import verify_server
from patchstore.follow.vllm_server import VllmServer

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        nodes.start_head()
        nodes.start_other()
        yield nodes
    finally:
        nodes.stop()


@pytest.fixture
def process(nodes: Nodes, model: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(
        tmp_path / "vllm.log",
        *("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray"),
        environment=nodes.environment,
    )
    with process.serving(model):
        yield process


def proved(server: VllmServer, trainer) -> int:
    """Compare all live weights of both nodes with the version they serve, and return it."""
    proof = verify_server(trainer.store, server)
    assert (proof.num_verified, proof.computed, proof.unverified) == (len(trainer.tensors), (), ())
    return proof.manifest.version


def test_a_server_over_two_nodes_is_updated_and_brought_back_after_a_node_was_killed(
    nodes, process, server, new_trainer, model, tmp_path
):
    assert nodes.workers() == [1, 1]
    trainer = new_trainer()
    trainer.publish()
    with FollowCommand(trainer.url, {}, process.url, tmp_path / "follow.log") as follow:
        follow.wait_for(0)
        trainer.step()
        follow.wait_for(1)
        assert proved(server, trainer) == 1
        assert [rank["rank"] for rank in server.status().ranks] == [0, 1]

        nodes.kill_other()
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                # Half a server must not answer for the whole.
                assert server.status().serving == 1
            except ServerUnavailable:
                break
            time.sleep(0.2)
        else:
            pytest.fail("a server without one of its nodes still answers")
        trainer.step()
        trainer.step()

        process.stop()
        nodes.start_other()
        process.start(model)
        assert nodes.workers() == [1, 1]
        follow.wait_for(3)
        assert proved(server, trainer) == 3
