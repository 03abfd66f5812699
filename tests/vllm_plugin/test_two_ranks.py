"""Two tensor-parallel ranks fail as one, and their replies stay in step with the calls."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from server_process import call, connection

from patchstore import PatchstoreError
from patchstore.errors import ServerUnavailable, StateMismatch
from patchstore.follow.settings import PrefixCache
from patchstore.follow.verify import verify_server
from patchstore.follow.vllm_server import VllmServer

SERVER_ARGUMENTS = ("--tensor-parallel-size", "2")


def fail_writes(server, num_failures: int, rank: int) -> None:
    call(server, "delta_fail_writes", num_failures, rank)


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

    assert ranks(server, "serving") == [0, 0]
    assert ranks(server, "update_open") == [False, False]
    assert server.fingerprint() == before
    server.apply(1)
    assert ranks(server, "serving") == [1, 1]
    assert server.fingerprint() != before


def test_a_call_that_waits_is_answered_when_both_ranks_have_staged(server, trainer, tmp_path):
    trainer.step(density=0.5)
    marker = tmp_path / "go"
    call(server, "delta_hold_staging", str(marker))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connection(server).every_rank, "delta_prefetch", 1, wait_s=60)
        try:
            assert ranks(server, "serving") == [0, 0]
            is_waiting = not waiting.done()
        finally:
            marker.touch()
        # After 60 s it would say that they are not done.
        assert [each["is_done"] for each in waiting.result()] == [True, True]
    assert is_waiting
    server.apply(1)
    assert ranks(server, "serving") == [1, 1]


def test_an_update_that_tells_prefixes_apart_fails_and_succeeds_as_others_do(server, trainer):
    trainer.step(density=0.5)
    with VllmServer(server.url, timeout_s=120, prefix_cache=PrefixCache.VERSION) as driver:
        fail_writes(driver, 1, 0)
        with pytest.raises(PatchstoreError, match="made to fail"):
            driver.apply(1)
        assert ranks(driver, "serving") == [0, 0]
        assert not driver.is_paused()
        driver.apply(1)
        assert ranks(driver, "serving") == [1, 1]
    verify_server(trainer.store, server, 1)


def test_a_half_applied_rank_makes_a_half_applied_server_until_an_anchor_is_applied(server, trainer):
    trainer.step(density=0.5)
    fail_writes(server, 2, 0)
    with pytest.raises(PatchstoreError) as caught:
        server.apply(1)
    assert caught.value.kind == "half-applied"
    # Rank 1 put its weights back, but must not go on from there alone.
    assert ranks(server, "half_applied") == [True, True]
    assert ranks(server, "serving") == [None, None]

    server.apply(1)

    assert ranks(server, "half_applied") == [False, False]
    assert ranks(server, "serving") == [1, 1]
    assert verify_server(trainer.store, server).num_verified == len(trainer.tensors)


def test_live_weights_are_proved_over_both_ranks(server, trainer):
    trainer.step()
    server.apply(1)

    proof = verify_server(trainer.store, server, 1, num_elements=5000)

    assert (proof.manifest.version, proof.num_verified) == (1, len(trainer.tensors))
    assert (proof.computed, proof.unverified) == ((), ())


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.gate_up_proj.weight"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_bit_that_changed_in_one_rank_is_noticed_and_replaced(server, trainer, name, rank):
    # The one is a copy of what the other rank has too, the other a slice that only this rank has.
    call(server, "delta_write_behind", name, rank)

    with pytest.raises(StateMismatch):
        verify_server(trainer.store, server)
    trainer.step(density=1.0)
    with pytest.raises(StateMismatch):
        server.apply(1)
    assert ranks(server, "half_applied") == [True, True]
    server.apply(1)
    assert verify_server(trainer.store, server).manifest.version == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["worker", "core"])
def test_a_process_killed_while_staging_leaves_whole_versions_behind(
    server, trainer, process, model, tmp_path, victim
):
    trainer.step()
    call(server, "delta_die_while_staging", 1, victim)
    with pytest.raises(ServerUnavailable, match="Read its log" if victim == "core" else "HTTP 500"):
        server.apply(1)

    process.stop()
    process.start(model)
    server.init_weight_transfer(trainer.url, scratch=str(tmp_path / "scratch"))
    assert ranks(server, "serving") == [0, 0]
    server.apply(1)
    assert verify_server(trainer.store, server).manifest.version == 1


def refused(server, path: str, body: dict) -> str:
    """Make a call that must fail, and return what the server says."""
    response = connection(server).request("POST", path, json=body)
    is_answer = response.status_code < 400
    assert not is_answer or all("error" in each for each in response.json()["results"]), response.text
    return response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/collective_rpc", {"method": "delta_sums", "args": ["a", 1]}),
        ("/collective_rpc", {"method": "delta_prefetch", "args": []}),
        ("/collective_rpc", {"method": "delta_status", "args": [1, 2, 3]}),
        ("/collective_rpc", {"method": "delta_switch", "args": [5]}),
        ("/collective_rpc", {"method": "no_such_method"}),
        # Each worker answers with something that cannot be unpickled.
        ("/collective_rpc", {"method": "__class__", "args": [0, 10]}),
        ("/collective_rpc", {"method": "delta_answer_late", "args": [2.0], "timeout": 0.0}),
        ("/collective_rpc", {"method": "delta_fail", "args": [0]}),
        ("/collective_rpc", {"method": "delta_fail", "args": [1]}),
        ("/start_draft_weight_update", {}),
        ("/update_weights", {"update_info": {"version": 99}}),
        # One for each rank, which vLLM would hand out.
        ("/update_weights", {"update_info": [{"version": 1}]}),
        ("/finish_weight_update", {"weight_version": "1"}),
        ("/init_weight_transfer_engine", {"init_info": {"store": "/nowhere"}}),
    ],
)
def test_a_call_that_fails_in_any_rank_leaves_later_answers_in_step(server, trainer, path, body):
    refused(server, path, body)

    server.start_weight_update()
    assert "version-not-found" in refused(server, "/update_weights", {"update_info": {"version": 99}})
    assert ranks(server, "serving") == [0, 0]


def test_the_store_can_be_closed_and_opened_again_after_an_update_that_failed(server, trainer):
    trainer.step()
    server.start_weight_update()
    with pytest.raises(PatchstoreError):
        server.update_weights(99)
    response = connection(server).request("POST", "/shutdown_weight_transfer_engine", json={})
    assert response.status_code == 200, response.text
    assert ranks(server, "initialised") == [False, False]
    assert ranks(server, "serving") == [0, 0]
    server.init_weight_transfer(trainer.url)
    server.apply(1)
    assert ranks(server, "serving") == [1, 1]
