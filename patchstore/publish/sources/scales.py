"""Scales of weights that the trainer has quantised already: rounded to bf16, they would be other scales."""

import math
import re
from collections.abc import Mapping

import torch

from patchstore.errors import UsageError

_SCALE = re.compile(r"(\w+_)?scales?(_inv|_2)?")


def holds_codes(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a dtype in which quantised weights are stored, alone or several in one number."""
    return tensor.dtype == torch.int32 or (tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool)


def is_scale(name: str) -> bool:
    """Whether the last part of a name is one that libraries give to scales."""
    return _SCALE.fullmatch(name) is not None


def check_scales(tensors: Mapping[str, torch.Tensor], served: Mapping[str, torch.dtype]) -> None:
    """Refuse to convert what belongs to quantised weights: scales, offsets and tables of any name.

    They lie beside the codes of a module and have fewer elements, as `layer.SCB`. So a counter beside a gain
    makes no codes of it. Or they lie below them, as `layer.weight.absmax`, where plain weights have nothing;
    then the codes may have any dtype.

    Args:
        tensors: of a source, by name, or by a piece's key.
        served: the dtypes in which they are served, by the same keys.

    Raises:
        UsageError: a number that belongs to codes would be served in another dtype than it has.
    """
    names = {key.partition("\t")[0] for key in tensors}
    scaled = {_module(name) for name in names if is_scale(name.rpartition(".")[2])}
    codes = {module: (module, math.inf) for module in map(_module, names) if module and module in names}
    for key, tensor in tensors.items():
        name = key.partition("\t")[0]
        module = _module(name)
        # Positions and counts are integers of 32 bits too; codes have scales beside them.
        is_coded = holds_codes(tensor) and (tensor.dtype.itemsize == 1 or module in scaled)
        if module and is_coded and codes.get(module, ("", 0))[1] < tensor.numel():
            codes[module] = name, tensor.numel()
    for key, tensor in tensors.items() if codes else ():
        name = key.partition("\t")[0]
        found, size = codes.get(name) or codes.get(_module(name)) or ("", 0)
        is_converted = tensor.dtype != served[key]
        if is_converted and tensor.numel() < size:
            role = "is a scale of" if is_scale(name.rpartition(".")[2]) else "belongs to"
            raise UsageError(
                f"{name!r} {role} the quantised weights {found!r}, and would be rounded from {tensor.dtype} "
                f"to {served[key]}; give dtype=None, so that each tensor is published in its own dtype, or "
                "publish dequantised tensors by name"
            )


def _module(name: str) -> str:
    return name.rpartition(".")[0]
