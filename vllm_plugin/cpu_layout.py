"""Keep weights on the CPU as they are loaded, which is how GPUs have them.

By default vLLM packs Linear weights for oneDNN or AMX and leaves an empty parameter, and reorders experts and
convolutions in place: nothing could be written into them afterwards. Here Linear layers multiply unpacked
weights, and the kernels that insist on packed ones get them packed anew in each forward pass. That is slower;
the CPU is for trying things out.
"""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from vllm.platforms import current_platform


def keep_load_layout() -> None:
    """Set this up in a process that will load a model. Does nothing elsewhere than on CPUs, or again."""
    if not current_platform.is_cpu():
        return
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_, **__: False
    if hasattr(torch.cpu, "_is_amx_tile_supported"):
        # Latent attention would keep packed copies of its projections, and drop the parameter.
        torch.cpu._is_amx_tile_supported = lambda: False
    _keep_experts()
    _keep_convolutions(_custom_ops)


def _keep_experts() -> None:
    try:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe

        pack = cpu_moe.cpu_prepack_moe_weight
    except (ImportError, AttributeError):
        from vllm.model_executor.layers.fused_moe import cpu_fused_moe as cpu_moe  # before 0.28

        pack = cpu_moe.cpu_prepack_moe_weight

    def packed(given: inspect.BoundArguments) -> None:
        for name in ("w13", "w2"):
            given.arguments[name] = pack(given.arguments[name], given.arguments["isa"])

    if _wrap(cpu_moe, "cpu_fused_moe", packed):
        cpu_moe.cpu_prepack_moe_weight = lambda weight, isa: weight  # noqa: ARG005  (its callers name it)


def _keep_convolutions(ops: ModuleType) -> None:
    pack = vars(ops).get("causal_conv1d_weight_pack")
    if pack is None:
        return
    # Weights are packed after loading only where this is found.
    del ops.causal_conv1d_weight_pack

    def packed(given: inspect.BoundArguments) -> None:
        given.arguments["weight"] = pack(given.arguments["weight"].squeeze(1))

    for name in ("causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu"):
        _wrap(ops, name, packed)


def _wrap(module: ModuleType, name: str, change: Callable[[inspect.BoundArguments], None]) -> bool:
    """Change the arguments of a function before each call; returns whether that is new."""
    function = getattr(module, name)
    if hasattr(function, "__wrapped__"):
        return False
    signature = inspect.signature(function)

    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        change(given)
        return function(*given.args, **given.kwargs)

    setattr(module, name, changed)
    return True
