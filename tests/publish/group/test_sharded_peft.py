"""Adapters of sharded models: each rank publishes its part of what PEFT merges of the whole model."""

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from patchstore import Publisher, as_saved
from patchstore.errors import SchemaMismatch
from tests.support.adapted_models import adapted
from tests.support.model_bits import Versions, bits_of
from tests.support.ranks import Published, RanksOf

pytest.importorskip("peft")

pytestmark = pytest.mark.timeout(600)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def publish(rank: int, url: str, kind: str, dtype: torch.dtype, num_steps: int) -> Versions:
    """Publish steps; return the versions, and what PEFT merges of the same model without shards."""
    model = adapted("linear" if kind == "injected" else kind, dtype)
    whole = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in model.get_base_model().blocks:
            fully_shard(block)
        fully_shard(model)
    # What adapters are injected into has no PeftModel around it.
    source = model.get_base_model() if kind == "injected" else model
    published = []
    with Publisher(url, source, rank_timeout_s=60, resume="auto") as publisher:
        for step in range(num_steps):
            before = {name: local(each).clone() for name, each in model.named_parameters()}
            version = publisher.publish_patch(step).result().version
            for name, each in model.named_parameters():
                assert torch.equal(local(each), before[name]), name
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                merged = copy.deepcopy(whole).merge_and_unload().state_dict()
            published.append((version, bits_of(merged)))
            for each in (*model.parameters(), *whole.parameters()):
                if each.requires_grad:
                    local(each.data).mul_(1.5)
    return published


def refused(rank: int, url: str, kind: str) -> str:
    """Publish what is refused; return why."""
    model = adapted(kind, torch.float32)
    if kind == "linear":
        # A layer that PEFT put in, by itself.
        fully_shard(model.get_base_model().blocks[0].up)
    fully_shard(model)
    try:
        Publisher(url, model, rank_timeout_s=60)
    except SchemaMismatch as exc:
        return str(exc)
    return "published"


def fused_experts(rank: int, url: str, folder: str) -> Versions:
    """Publish an adapted and sharded model of transformers, as it is saved."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import peft
    from safetensors.torch import load_file

    from tests.support.small_models import experts

    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(experts(), config)
    if rank == 0:
        copy.deepcopy(model).merge_and_unload().save_pretrained(folder)
    dist.barrier()
    saved = load_file(f"{folder}/model.safetensors")
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    with Publisher(url, as_saved(model), rank_timeout_s=60) as publisher:
        return [(publisher.publish_patch(0).result().version, bits_of(saved))]


def quantized(rank: int, url: str, folder: str) -> Versions:
    """Publish steps of QLoRA, of a model that FSDP2 shards; return versions, and what PEFT merges of it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from pathlib import Path

    import test_quantized_models as models

    if rank == 0:
        models.unquantized().save_pretrained(folder)
    dist.barrier()
    base = models.load(Path(folder), "fp4 stored as bf16", save=False)
    dequantized = models.dequantized(base)
    torch.manual_seed(0)
    # FSDP2 wants one dtype in a group of parameters.
    model = models.adapted(base, models.lora(), autocast_adapter_dtype=False)
    expected = models.merged(dequantized, model, models.lora(), autocast_adapter_dtype=False)
    model.train()
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    published = []
    with Publisher(url, model, rank_timeout_s=60) as publisher:
        for step in range(2):
            published.append((publisher.publish_patch(step).result().version, bits_of(expected)))
            model(models.TOKENS).logits.mean().backward()
    return published


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("kind", "num", "dtype"),
    [
        ("linear", 2, torch.bfloat16),
        ("dora", 3, torch.bfloat16),
        ("modules to save", 2, torch.bfloat16),
        ("several", 3, torch.float32),
        ("tied, tokens", 2, torch.bfloat16),
        ("linear", 3, torch.float32),
        ("dora", 2, torch.float32),
        ("modules to save", 3, torch.float32),
        ("several", 2, torch.bfloat16),
        ("embedding", 3, torch.bfloat16),
        ("rank-stabilised, with bias", 2, torch.bfloat16),
        ("tied, tokens", 3, torch.float32),
        ("injected", 2, torch.bfloat16),
        ("nothing else", 2, torch.bfloat16),
    ],
)
def test_each_version_is_what_peft_merges_of_the_whole_model(
    published: Published, kind: str, num: int, dtype: torch.dtype
) -> None:
    published(num, publish, kind, dtype, 3)


def test_a_run_of_adapters_goes_on_with_another_number_of_ranks(published: Published) -> None:
    published(2, publish, "linear", torch.bfloat16, 2)
    assert published(3, publish, "linear", torch.bfloat16, 3)[0].version >= 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("linear", "call it for the layer around it"),
        ("tied, head alone", "are one tensor, and only the first has an adapter"),
    ],
    ids=["a layer sharded by itself", "a tied head alone"],
)
def test_what_cannot_be_merged_of_a_sharded_model_is_refused_on_all_ranks(
    ranks_of: RanksOf, url: str, kind: str, reason: str
) -> None:
    found = ranks_of(2).run(refused, url, kind)
    assert [reason in each for each in found] == [True, True]


@pytest.mark.parametrize(
    ("package", "job"),
    [("transformers", fused_experts), ("bitsandbytes", quantized)],
)
def test_adapters_of_sharded_models_of_transformers_are_merged_into_what_is_saved_or_computed_with(
    published: Published, tmp_path: Path, package: str, job: Any
) -> None:
    pytest.importorskip("transformers", minversion="5")
    pytest.importorskip(package)
    published(2, job, str(tmp_path / "folder"))
