"""Two data-parallel engines: one of them answers questions, both are updated, and they go on together."""

import httpx
import pytest
from server_process import MODEL_NAME
from trainer import served

from patchstore.errors import LoadFailed
from patchstore.integrations.proof import prove

# A server may take minutes to start on a busy machine.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SERVER_ARGUMENTS = ("--data-parallel-size", "2")


def answers(server) -> set[tuple[int, ...]]:
    """What enough requests to reach both engines are answered."""
    question = {"model": MODEL_NAME, "prompt": [5, 6, 7, 8], "max_tokens": 12, "temperature": 0}
    question |= {"ignore_eos": True, "return_token_ids": True}
    found = set()
    for _ in range(6):
        response = httpx.post(f"{server.url}/v1/completions", json=question, timeout=60).raise_for_status()
        found.add(tuple(response.json()["choices"][0]["token_ids"]))
    return found


def test_both_engines_serve_each_version(server, trainer):
    first = answers(server)
    trainer.step(density=0.5)
    server.apply(1)

    assert server.status().num_engines == 2
    assert prove(trainer.store, server, 1).num_engines == 2
    assert len(answers(server)) == 1
    assert answers(server) != first


def test_engines_of_which_one_failed_wait_until_both_have_one_version(server, trainer):
    trainer.step(density=0.5)
    server._post("/collective_rpc", {"method": "delta_fail_writes", "args": [1]})
    with pytest.raises(LoadFailed, match="made to fail"):
        server.apply(1)
    # One has version 0 and the other version 1, and nobody can tell which.
    assert server.is_paused()

    server.apply(1)

    assert not server.is_paused()
    assert server.status().held == 1
    assert len(answers(server)) == 1
    (fingerprint,) = server.fingerprint()
    expected = served(trainer.history[1])
    assert {name: fingerprint[name] for name in expected} == expected
