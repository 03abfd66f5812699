"""What ranks do with PEFT's adapters of models that FSDP2 shards."""

import copy
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from jobs import Bits, serve_bits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from patchstore import Publisher, as_saved
from patchstore.errors import SchemaMismatch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 23), nn.Linear(23, 10, bias=False)


class Net(nn.Module):
    """Sides that no number of ranks divides."""

    _tied_weights_keys = ("lm_head.weight",)

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.config = {"model_type": "custom", "tie_word_embeddings": tied}
        self.embed_tokens = nn.Embedding(31, 10)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.experts = nn.Parameter(torch.randn(3, 10, 7))
        self.lm_head = nn.Linear(10, 31, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens


def adapted(kind: str, dtype: torch.dtype) -> Any:
    import peft

    options: dict[str, list[dict[str, Any]]] = {
        "linear": [{"target_modules": ["up", "down"]}],
        "dora": [{"target_modules": ["up", "down"], "use_dora": True}],
        "saved": [{"target_modules": ["up"], "modules_to_save": ["lm_head"]}],
        "several": [{"target_modules": ["up"]}, {"target_modules": ["up", "down"], "lora_alpha": 3}],
        "embedding": [{"target_modules": ["embed_tokens", "down"]}],
        "bias": [{"target_modules": ["up"], "lora_bias": True, "use_rslora": True}],
        "tied": [{"target_modules": ["up"], "trainable_token_indices": {"embed_tokens": [3, 5, 30]}}],
        "tied, head alone": [{"target_modules": ["lm_head", "up"]}],
        "injected": [{"target_modules": ["up", "down"]}],
        "nothing else": [{"target_modules": ["up", "down", "embed_tokens", "lm_head"]}],
    }
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, *others = [peft.LoraConfig(r=4, **each) for each in options[kind]]
        model = peft.get_peft_model(Net(kind.startswith("tied")).to(dtype), first)
        for number, config in enumerate(others):
            model.add_adapter(f"other{number}", config)
        if others:
            model.base_model.set_adapter(["default", *(f"other{number}" for number in range(len(others)))])
    with torch.no_grad():
        # Adapters begin as zeros.
        for name, parameter in model.named_parameters():
            if "base_layer" not in name and parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def publish(rank: int, url: str, kind: str, dtype: torch.dtype, num_steps: int) -> list[tuple[int, Bits]]:
    """Publish steps; return the versions, and what PEFT merges of the same model without shards."""
    model = adapted(kind, dtype)
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
            published.append((version, serve_bits(merged)))
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


def fused_experts(rank: int, url: str, folder: str) -> list[tuple[int, Bits]]:
    """Publish an adapted and sharded model of transformers, as it is saved."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import peft
    from safetensors.torch import load_file
    from small_models import experts

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
        return [(publisher.publish_patch(0).result().version, serve_bits(saved))]


def quantised(rank: int, url: str, folder: str) -> list[tuple[int, Bits]]:
    """Publish steps of QLoRA, of a model that FSDP2 shards; return versions, and what PEFT merges of it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from pathlib import Path

    import test_quantised_models as models

    if rank == 0:
        models.unquantised().save_pretrained(folder)
    dist.barrier()
    base = models.load(Path(folder), "fp4 stored as bf16", save=False)
    dequantised = models.dequantised(base)
    torch.manual_seed(0)
    # FSDP2 wants one dtype in a group of parameters.
    model = models.adapted(base, models.lora(), autocast_adapter_dtype=False)
    expected = models.merged(dequantised, model, models.lora(), autocast_adapter_dtype=False)
    model.train()
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    published = []
    with Publisher(url, model, rank_timeout_s=60) as publisher:
        for step in range(2):
            published.append((publisher.publish_patch(step).result().version, serve_bits(expected)))
            model(models.TOKENS).logits.mean().backward()
    return published
