"""Plain tensors: a subclass's tensor without its wrappers, with its elements in its memory."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from patchstore.errors import SchemaMismatch
from patchstore.publish.sources.scales import holds_codes

DISTRIBUTED = (
    "on all ranks, gather whole tensors with torch.distributed.checkpoint.state_dict.get_model_state_dict("
    "model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)); publish them from rank 0, as "
    "a dict that is updated with them before each call"
)
DEQUANTISED = (
    "publish what the model computes with: a model that was loaded without quantisation, or a mapping or a "
    "stream of dequantised tensors by name"
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types whose memory holds their elements."""


def plain(name: str, tensor: Any) -> torch.Tensor:
    """Return a tensor without its wrappers, which has its elements in its memory.

    Raises:
        SchemaMismatch: there is no such tensor.
    """
    if type(tensor) in _PLAIN and _is_dense(tensor):
        return tensor  # type: ignore[no-any-return]
    whole = tensor
    while type(whole) not in _PLAIN:
        whole = _unwrapped(name, whole)
    if _is_dense(whole):
        return whole  # type: ignore[no-any-return]
    if whole.is_meta:
        raise SchemaMismatch(
            f"{name!r} is on the meta device, where tensors have no elements; load the weights first"
        )
    if whole.layout is not torch.strided or whole.is_quantized or whole.is_nested:
        kind = "quantised" if whole.is_quantized else "nested" if whole.is_nested else str(whole.layout)
        raise SchemaMismatch(
            f"{name!r} is a {kind} tensor, not a dense one; pass it converted, with "
            f"{'dequantize()' if whole.is_quantized else 'to_dense()'}, in a mapping by name"
        )
    # A view whose memory has the opposite signs.
    return whole.resolve_neg()  # type: ignore[no-any-return]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements are in the tensor's memory as they read."""
    return not (
        tensor.is_meta
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_neg()
    )


def _unwrapped(name: str, tensor: Any) -> torch.Tensor:
    """Return the one tensor that a subclass's tensor is made of.

    Raises:
        SchemaMismatch: it is made of others, or is not a tensor at all.
    """
    if not isinstance(tensor, torch.Tensor):
        if name.rpartition(".")[2] in {"_packed_params", "dtype"} and "_packed_params" in name:
            advice = "torch quantised this module; publish the weights from before that"
        elif isinstance(tensor, Mapping):
            advice = f"pass the tensors of one model by name, perhaps source[{name!r}]"
        else:
            advice = "pass tensors by name"
        raise SchemaMismatch(f"{name!r} is not a tensor but {class_of(tensor)}; {advice}")
    if hasattr(tensor, "full_tensor"):
        raise SchemaMismatch(
            f"{name!r} is a {class_of(tensor)}, of which each rank has a part that is not known here; "
            f"{DISTRIBUTED}"
        )
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise SchemaMismatch(f"{name!r} has no shape yet; run a batch through the model first")
    if hasattr(tensor, "trigger_wait"):
        # The result of a collective that may still be under way.
        return tensor.trigger_wait()  # type: ignore[no-any-return]
    kind = type(tensor)
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        # The subclass changes what Python sees, and its memory is its own.
        with torch._C.DisableTorchFunctionSubclass():
            inner = tensor.as_subclass(torch.Tensor)
        if holds_codes(inner) or getattr(tensor, "quant_state", None) is not None:
            raise SchemaMismatch(
                f"{name!r} is a {class_of(tensor)} of codes, {inner.dtype}, and its scales are elsewhere; "
                f"pass the module itself, which is published dequantised, or {DEQUANTISED}"
            )
        return inner
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, part) for part in tensor.__tensor_flatten__()[0]]
        if len(parts) == 1 and isinstance(parts[0], torch.Tensor) and _is_alike(parts[0], tensor):
            return parts[0]
    raise SchemaMismatch(
        f"{name!r} is a {class_of(tensor)}, whose elements are not in one tensor of its shape and dtype; "
        "pass the module itself, or plain tensors in a mapping by name, such as what its dequantize() returns"
    )


def _is_alike(inner: torch.Tensor, outer: torch.Tensor) -> bool:
    return (
        inner.shape == outer.shape
        and inner.dtype == outer.dtype
        and inner.device == outer.device
        and inner.stride() == outer.stride()
    )


def class_of(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
