"""Two tensor-parallel ranks fail as one, and their replies stay in step with the calls."""

import pytest

from patchstore import PatchstoreError

# A server may take minutes to start on a busy machine.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SERVER_ARGUMENTS = ("--tensor-parallel-size", "2")


def fail_writes(server, num_failures: int, rank: int) -> None:
    server._post("/collective_rpc", {"method": "delta_fail_writes", "args": [num_failures, rank]})


def ranks(server, key: str) -> list:
    """Each rank's own answer, which shows that the replies are in step."""
    status = server.status()
    assert [rank["rank"] for rank in status.ranks] == [0, 1]
    return [rank[key] for rank in status.ranks]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_in_one_rank_leaves_both_as_they_were(server, trainer, rank):
    trainer.step(density=0.5)
    before = server.fingerprint()
    fail_writes(server, 1, rank)

    with pytest.raises(PatchstoreError, match="made to fail"):
        server.apply(1)

    assert ranks(server, "held") == [0, 0]
    assert ranks(server, "update_open") == [False, False]
    assert server.fingerprint() == before
    server.apply(1)
    assert ranks(server, "held") == [1, 1]
    assert server.fingerprint() != before


def test_a_refusal_by_all_ranks_is_one_error(server, trainer):
    with pytest.raises(PatchstoreError) as caught:
        server.apply(77)
    assert caught.value.kind == "unknown-version"
    assert ranks(server, "held") == [0, 0]
    with pytest.raises(PatchstoreError) as caught:
        server.init_weight_transfer(trainer.url + "-of-nobody")
    assert caught.value.kind == "unknown-version"
    assert ranks(server, "held") == [0, 0]


def test_a_torn_rank_makes_a_torn_server_and_an_anchor_mends_it(server, trainer):
    trainer.step(density=0.5)
    fail_writes(server, 2, 0)
    with pytest.raises(PatchstoreError) as caught:
        server.apply(1)
    assert caught.value.kind == "torn"
    assert ranks(server, "torn") == [True, False]
    assert server.status().held is None

    server.apply(1)

    assert ranks(server, "torn") == [False, False]
    assert server.status().held == 1
