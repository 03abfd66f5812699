"""Layers that a trainer's library has quantised: as the weights that they compute with.

bitsandbytes, torchao, HQQ and quanto keep codes and scales in the place of weights, and train what lies
around them. Servers of the model know its weights alone. So the library that made the codes decodes them
here, one layer at a time, in the dtype in which the layer computes.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch

from patchstore.errors import SchemaMismatch
from patchstore.publish.sources.dtensors import is_sharded
from patchstore.publish.sources.plain import DEQUANTISED, class_of, plain
from patchstore.publish.sources.scales import holds_codes, is_scale


def is_coded(module: torch.nn.Module) -> bool:
    """Whether the module itself keeps codes that its library can decode."""
    if callable(getattr(type(module), "dequantize", None)) and not module._modules and module._parameters:
        # A whole model of transformers has such a method too, which changes it.
        return True
    return any(_decoder(module, name) is not None for name in module._parameters)


def decoded(path: str, module: Any) -> dict[str, torch.Tensor]:
    """Return what a module that keeps codes would keep if it did not, by its own names.

    Of sharded codes all ranks of their mesh must take part: they are gathered.

    Args:
        path: of the module, with a dot.

    Raises:
        SchemaMismatch: DeepSpeed shards the codes, the module stores its weights transposed, or its library
            cannot decode here.
    """
    if getattr(getattr(module, "source_cls", None), "__name__", "") == "Conv1D":
        raise SchemaMismatch(
            f"{path[:-1]!r} is a quantised Conv1D, and its checkpoint has the weights transposed; publish a "
            "mapping of dequantised tensors under the checkpoint's names, in its layout"
        )
    if any(hasattr(each, "ds_id") for each in module.parameters(recurse=False)):
        raise SchemaMismatch(
            f"DeepSpeed shards the codes of {path[:-1]!r}, a {class_of(module)}, and whole ones alone are "
            "decoded; publish a mapping of dequantised tensors"
        )
    found: dict[str, Any] = {}
    try:
        with torch.no_grad():
            if callable(getattr(type(module), "dequantize", None)):
                found = {"weight": module.dequantize(), "bias": getattr(module, "bias", None)}
            else:
                kept = module._buffers.keys() - module._non_persistent_buffers_set
                found = {name: module._buffers[name] for name in kept if not is_scale(name)}
                for name, parameter in module._parameters.items():
                    decode = _decoder(module, name)
                    found[name] = _whole(parameter) if decode is None else decode()
    except (ImportError, NotImplementedError) as exc:
        raise SchemaMismatch(
            f"the codes of {path[:-1]!r}, a {class_of(module)}, cannot be decoded here ({exc}); {DEQUANTISED}"
        ) from exc
    return {name: plain(path + name, each.detach()) for name, each in found.items() if each is not None}


def without_codes(path: str, module: Any) -> torch.nn.Module:
    """Return a plain layer that computes what a layer with codes does.

    Raises:
        SchemaMismatch: as `decoded`, or the module is neither a linear layer nor an embedding.
    """
    tensors = decoded(path, module)
    is_leaf = tensors.keys() <= {"weight", "bias"} and tensors["weight"].dim() == 2 and not module._modules
    rows, columns = tensors["weight"].shape if is_leaf else (0, 0)
    layer: torch.nn.Module
    if isinstance(module, torch.nn.Embedding) and is_leaf:
        layer = torch.nn.Embedding(rows, columns, module.padding_idx, device="meta")
    elif hasattr(module, "in_features") and is_leaf:
        layer = torch.nn.Linear(columns, rows, "bias" in tensors, device="meta")
    else:
        raise SchemaMismatch(
            f"{path[:-1]!r} is a quantised {class_of(module)}, and adapters are merged into no other "
            "quantised layers than linear ones and embeddings; publish a mapping of merged tensors"
        )
    for name, each in tensors.items():
        layer.register_parameter(name, torch.nn.Parameter(each.clone(), requires_grad=False))
    return layer


def check_decodable(path: str, module: torch.nn.Module) -> None:
    """Raises SchemaMismatch where a module keeps codes that nothing here can decode."""
    for name, each in module._parameters.items():
        if each is not None and holds_codes(each) and each.dtype.itemsize == 1 and not is_coded(module):
            raise SchemaMismatch(
                f"{path + name!r} has codes of {each.dtype} in a {class_of(module)}, which nothing here can "
                f"decode; {DEQUANTISED}; or give dtype=None to publish codes and scales as they are, for "
                "servers of this form"
            )


def _decoder(module: Any, name: str) -> Callable[[], torch.Tensor] | None:
    """Return what decodes a parameter; None where it has no codes."""
    parameter = module._parameters[name]
    if parameter is None:
        return None
    state = getattr(parameter, "quant_state", None)
    if state is None and name == "weight":
        # FSDP makes another parameter of it, and the module remembers.
        state = getattr(module, "quant_state", None)
    if state is not None:
        return lambda: _of_four_bits(module, parameter, state)
    # The first forward pass moves them.
    scales = getattr(parameter, "SCB", None)
    scales = getattr(getattr(module, "state", None), "SCB", None) if scales is None else scales
    if scales is not None and parameter.dtype == torch.int8:
        return lambda: _of_eight_bits(parameter, scales)
    if type(parameter).dequantize is torch.Tensor.dequantize:
        return None
    try:
        if not holds_codes(plain(name, parameter)):
            return None
    except SchemaMismatch:
        # No plain tensor lies in it, and its class says how to decode it.
        pass
    decode: Callable[[], torch.Tensor] = parameter.dequantize
    return decode


def _of_four_bits(module: Any, codes: torch.Tensor, state: Any) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    if getattr(state, "packing_format_for_cpu", False):
        if is_sharded(codes):
            raise NotImplementedError("inference on a CPU has packed codes that are sharded")
        # Inference on a CPU has packed them otherwise, with scales in bf16, [blocks of a row, rows]. Saving
        # undoes that, here in a copy; but 0.50.2 leaves the scales so, or rounds them again.
        scales = state.absmax.T.reshape(-1).float()
        module = copy.deepcopy(module)
        module.state_dict()
        codes, state = module.weight, module.weight.quant_state
        state.absmax, state.nested = scales, False
    found: torch.Tensor = dequantize_4bit(_whole(codes).data, state)
    computed = getattr(module, "compute_dtype", None)
    # The layer casts them so before it multiplies.
    return found if computed is None else found.to(computed)


def _of_eight_bits(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    from bitsandbytes.functional import int8_vectorwise_dequant

    found: torch.Tensor = int8_vectorwise_dequant(_whole(codes).data, scales.to(codes.device))
    return found


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if is_sharded(tensor) else tensor
