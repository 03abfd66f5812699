"""Two data-parallel engines: one of them answers questions, both are asked whether that is true of them, and
both are updated.
"""

import httpx
import pytest
from asking import ask, question
from server_process import call, connection

from patchstore.errors import LoadFailed, StateMismatch
from patchstore.follow.reconcile import Reconciler
from patchstore.follow.settings import PrefixCache, Settings
from patchstore.follow.verify import verify_server
from patchstore.follow.vllm_server import VllmServer
from tests.support.tiny_qwen import served

pytestmark = pytest.mark.exhaustive

SERVER_ARGUMENTS = (
    *("--data-parallel-size", "2", "--api-server-count", "2"),
    *("--worker-extension-cls", "failing_extension.OneEngineExtension"),
)


def answers(server) -> set[tuple[int, ...]]:
    """What enough requests to reach both engines are answered."""
    return {tuple(ask(server.url, [5, 6, 7, 8], max_tokens=12).tokens) for _ in range(6)}


def in_engine(server, index: int, method: str, *args: object) -> None:
    body = {"method": "delta_in_engine", "args": [index, method, list(args)]}
    connection(server).post("/collective_rpc", body)


def test_both_engines_serve_each_version(server, trainer):
    first = answers(server)
    trainer.step(density=0.5)
    server.apply(1)

    assert server.status().num_engines == 2
    assert verify_server(trainer.store, server, 1).num_engines == 2
    assert len(answers(server)) == 1
    assert answers(server) != first


def test_every_engine_refuses_requests_for_another_version_through_every_api_server(server, trainer):
    trainer.step(density=0.5)
    server.apply(1)
    for _ in range(8):
        right, wrong = (
            httpx.post(
                f"{server.url}/v1/completions",
                json=question([5, 6, 7, 8]),
                headers={"X-Patchstore-Version": wanted},
                timeout=120,
            )
            for wanted in ("=1", "=0")
        )
        assert right.json()["patchstore"] == {"begin": 1, "end": 1, "mixed": False}
        assert (wrong.status_code, wrong.json()["patchstore"]) == (409, {"serving": 1})


@pytest.mark.parametrize("failing", [0, 1])
def test_engines_of_which_one_failed_wait_until_follow_has_brought_them_to_one_version(
    server, trainer, failing
):
    follow = Reconciler(trainer.store, server)
    trainer.step(density=0.5)
    in_engine(server, failing, "delta_fail_writes", 1)

    failed = follow.step()

    assert failed.error is not None and failed.error.kind == LoadFailed.kind
    status = server.status()
    assert (status.engines_differ, status.serving, status.half_applied) == (True, None, False)
    # The one that answers failed, or the other one did.
    assert status.ranks[0]["serving"] == (0 if failing == 0 else 1)
    assert server.is_paused()

    assert [follow.step().outcome for _ in range(2)] == ["applied", "nothing"]

    status = server.status()
    assert (status.engines_differ, status.serving, server.is_paused()) == (False, 1, False)
    assert len(answers(server)) == 1
    (fingerprint,) = server.fingerprint()
    expected = served(trainer.history[1])
    assert {name: fingerprint[name] for name in expected} == expected
    assert verify_server(trainer.store, server, 1).num_engines == 2


def test_engines_that_both_failed_go_on_with_what_they_had(server, trainer):
    trainer.step(density=0.5)
    before = answers(server)
    call(server, "delta_fail_writes", 1)
    with pytest.raises(LoadFailed, match="made to fail"):
        server.apply(1)
    assert (server.status().serving, server.is_paused()) == (0, False)
    assert answers(server) == before


def test_the_engine_that_never_answers_is_proved_too(server, trainer):
    verify_server(trainer.store, server, 0)
    in_engine(server, 1, "delta_write_behind", "model.norm.weight")

    with pytest.raises(StateMismatch, match="2 engines"):
        verify_server(trainer.store, server, 0)

    follow = Reconciler(trainer.store, server, Settings(verify_every_s=1e-9))
    assert [follow.step().outcome for _ in range(3)] == ["diverged", "applied", "verified"]


def test_later_requests_of_both_engines_meet_nothing_that_older_weights_computed(server, trainer):
    trainer.step(density=0.5)

    def num_cached() -> list[int]:
        """Of enough requests to reach both engines."""
        return [ask(server.url, list(range(1, 101)), max_tokens=4).num_cached for _ in range(6)]

    num_cached()
    assert num_cached() == [96] * 6
    with VllmServer(server.url, timeout_s=120, prefix_cache=PrefixCache.VERSION) as driver:
        driver.apply(1)
        status = driver.status()
    assert (status.serving, status.engines_differ, server.is_paused()) == (1, False, False)
    # Each engine computes it once.
    assert sorted(num_cached()) == [0, 0, 96, 96, 96, 96]
