"""Whether what a worker computes an adapter's answers from is what the adapter's folder gives.

vLLM copies an adapter from its folder to host memory, packs it, and writes it into a slot of each layer.
There is no digest of the result. So the folder, which is verified, is loaded once more and written into the
same slot, and the bits before and after are compared.
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.lora.request import LoRARequest

from patchstore.errors import UsageError
from patchstore.tensors.bits import bits


def managers(worker: Any) -> tuple[Any, Any]:
    """Return what a worker loads adapters with, and what has their slots; UsageError if it has none."""
    manager = getattr(getattr(worker, "model_runner", None), "lora_manager", None)
    if manager is None:
        raise UsageError("this server has no adapters: start it with --enable-lora")
    return manager, manager._adapter_manager


@torch.inference_mode()
def compare(worker: Any, lora_int_id: int, path: str) -> dict[str, Any]:
    """Compare a worker's slot of an adapter with what a folder gives. All slots stay as they are.

    Returns:
        `is_held`: whether the worker has the adapter; otherwise it loads it from its folder when it needs it.
        `num_bytes`: of its slot. `differing`: the modules of which the slot has other bits.
    """
    manager, held = managers(worker)
    if lora_int_id not in held.list_adapters():
        return {"is_held": False, "num_bytes": 0, "differing": []}
    held.activate_adapter(lora_int_id)
    slot = held.lora_index_to_id.index(lora_int_id)
    request = LoRARequest("check", lora_int_id, path)
    if getattr(held.get_adapter(lora_int_id), "is_3d_lora_weight", False):
        # Of releases of vLLM that have it.
        request.is_3d_lora_weight = True
    fresh = manager._load_adapter(request)
    held._create_merged_loras_inplace(fresh)
    num_bytes, differing = 0, []
    for name, module in held.modules.items():
        there = list(_slot(module, slot, held.lora_slots))
        before = [each.clone() for each in there]
        weights = held._get_lora_layer_weights(fresh, name)
        if weights is None:
            module.reset_lora(slot)
        else:
            module.set_lora(slot, weights.lora_a, weights.lora_b)
        if not all(torch.equal(bits(a), bits(b)) for a, b in zip(before, there, strict=True)):
            differing.append(name)
            for each, was in zip(there, before, strict=True):
                each.copy_(was)
        num_bytes += sum(each.nbytes for each in before)
    return {"is_held": True, "num_bytes": num_bytes, "differing": differing}


def _slot(module: Any, slot: int, num_slots: int) -> Iterator[torch.Tensor]:
    """Yield what a layer has of one slot. Experts also list views of these by slot and expert."""
    for name, found in vars(module).items():
        if name.endswith("_stacked"):
            for each in found if isinstance(found, list | tuple) else [found]:
                if isinstance(each, torch.Tensor) and each.dim() > 2 and len(each) == num_slots:
                    yield each[slot]
