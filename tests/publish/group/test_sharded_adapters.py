"""Adapters of sharded models: each rank publishes its part of what PEFT would save of the whole."""

import copy
import warnings

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from patchstore import Publisher
from tests.support.adapted_models import adapted
from tests.support.model_bits import Versions, bits_of
from tests.support.ranks import Published

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.timeout(600)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fsdp2(rank: int, url: str, kind: str, num_steps: int) -> Versions:
    """Publish steps; return the versions, and what PEFT saves of the same model without shards."""
    model = adapted(kind, torch.float32)
    whole = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in model.get_base_model().blocks:
            fully_shard(block)
        fully_shard(model)
    published = []
    with Publisher(url, model, adapter="default", rank_timeout_s=60, resume="auto") as publisher:
        for step in range(num_steps):
            version = publisher.publish_patch(step).result().version
            state = peft.get_peft_model_state_dict(whole, save_embedding_layers=False)
            published.append((version, bits_of(state, None)))
            for each in (*model.parameters(), *whole.parameters()):
                if each.requires_grad:
                    local(each.data).mul_(1.5)
    return published


def zero3(rank: int, url: str, kind: str, num_steps: int) -> Versions:
    """The same with DeepSpeed's ZeRO-3, which trains the adapter."""
    import deepspeed
    from test_deepspeed import engine_of

    engine = engine_of(rank, 3, lambda: adapted(kind, torch.bfloat16))
    published = []
    with Publisher(url, engine, adapter="default", rank_timeout_s=60) as publisher:
        for step in range(num_steps):
            version = publisher.publish_patch(step).result().version
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                state = peft.get_peft_model_state_dict(engine.module, save_embedding_layers=False)
                published.append(
                    (version, bits_of({name: each.clone() for name, each in state.items()}, None))
                )
            tokens = torch.randint(0, 31, (4, 5), generator=torch.Generator().manual_seed(step))
            engine.backward(engine(tokens).float().square().mean())
            engine.step()
    return published


@pytest.mark.parametrize(("kind", "num"), [("linear", 2), ("modules to save", 3), ("parameters", 2)])
def test_ranks_of_fsdp2_publish_what_peft_saves_of_the_whole(
    published: Published, kind: str, num: int
) -> None:
    found = published(num, fsdp2, kind, 3)
    assert all(
        [payload.key.rpartition("/")[2] for payload in each.anchor.payloads] == ["adapter_model.safetensors"]
        for each in found
        if each.anchor is not None
    )


def test_a_run_of_adapters_goes_on_with_another_number_of_ranks(published: Published) -> None:
    published(2, fsdp2, "linear", 2)
    assert published(3, fsdp2, "linear", 2)[0].version >= 2


def test_ranks_of_zero3_publish_what_peft_saves_of_the_whole(published: Published) -> None:
    pytest.importorskip("deepspeed")
    found = published(2, zero3, "linear", 3)
    assert len({each.state.total for each in found}) == 3
