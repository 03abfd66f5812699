"""Whatever the plugin refuses has the same kind for a client."""

from contextlib import closing

import httpx
import pytest
import torch
from bare_engine import Plain, bare_engine
from trainer import Trainer

from patchstore import errors
from patchstore.errors import PatchstoreError
from patchstore.follow.vllm_protocol import Connection, refusal
from patchstore.read.host_cache import HostCache
from tests.support.vllm_stub import StubServer, serving
from vllm_plugin import DeltaWorkerExtension
from vllm_plugin.ranks import Failure, describe

pytestmark = pytest.mark.vllm

KINDS = sorted(
    each.kind
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, PatchstoreError) and each is not PatchstoreError
)
SENTENCE = "layers.0 [rank 1] is 'not' what was expected: see [1] and [usage] of the page"
"""Has what might be taken for a kind."""

IN_VLLM = {
    "in its own process": "Call to collective_rpc method failed: {}",
    "in another process": "Worker failed with error '{}', please check the stack trace above for the cause",
}
"""Where a worker runs -> what vLLM's front makes of an error that it raised."""


def raising(kind: str):
    def method(*_: object, **__: object) -> None:
        raise errors.of_kind(kind)(SENTENCE)

    return method


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Has opened a store, and holds no version."""
    folder = tmp_path_factory.mktemp("kinds")
    trainer = Trainer(folder / "store", {"a": torch.zeros(8, dtype=torch.bfloat16)})
    yield bare_engine(trainer.store, Plain(a=8), HostCache(folder / "scratch"))
    trainer.close()


@pytest.fixture(scope="module")
def stub():
    with serving(StubServer()) as stub:
        yield stub


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", IN_VLLM)
def test_a_step_that_ranks_refuse_names_its_kind_to_the_client(engine, kind, place):
    engine.updater.stage = raising(kind)
    engine.start_weight_update()
    with pytest.raises(RuntimeError) as caught:
        engine.update_weights({"version": 0})
    answer = httpx.Response(500, json={"error": {"message": IN_VLLM[place].format(caught.value)}})
    found = refusal("POST /update_weights", answer)
    assert (type(found), str(found)) == (errors.of_kind(kind), f"POST /update_weights: {SENTENCE}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_answers_why_it_refuses_names_its_kind_to_the_client(engine, stub, kind, monkeypatch):
    worker = object.__new__(DeltaWorkerExtension)
    worker.weight_transfer_engine = engine
    engine.sums = raising(kind)
    monkeypatch.setattr(stub, "answer", lambda *_: {"results": [worker.delta_sums(0, 1)]})
    with closing(Connection(stub.url, timeout_s=30)) as client, pytest.raises(PatchstoreError) as caught:
        client.every_rank("delta_sums", 0, 1)
    assert caught.type is errors.of_kind(kind)
    assert str(caught.value) == f"{stub.url} answered delta_sums: {SENTENCE}"


@pytest.mark.parametrize("kind", KINDS)
def test_of_ranks_that_refuse_for_several_reasons_the_first_names_the_kind(kind):
    failures = [Failure.of(number, errors.of_kind(each)("no")) for number, each in enumerate([kind, "usage"])]
    found = refusal("POST", httpx.Response(500, json={"error": {"message": describe(failures)}}))
    assert found.kind == kind
