"""Scales of weights that the trainer has quantised already: rounded to bf16, they would be other scales."""

import re
from collections.abc import Mapping

import torch

from patchstore.errors import UsageError

_SCALE = re.compile(r"(\w+_)?scales?(_inv|_2)?")
_CODES = frozenset({torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2})
"""Dtypes in which quantised weights are stored, alone or several in one number."""


def check_scales(tensors: Mapping[str, torch.Tensor], served: Mapping[str, torch.dtype]) -> None:
    """Refuse to convert the scales of quantised weights.

    Args:
        tensors: of a source, by name, or by a piece's key.
        served: the dtypes in which they are served, by the same keys.

    Raises:
        UsageError: a scale would be served in another dtype than it has.
    """
    coded = {
        _module(key): key
        for key, tensor in tensors.items()
        if tensor.dtype in _CODES and "weight" in _last(key) and not _SCALE.fullmatch(_last(key))
    }
    for key, tensor in tensors.items():
        codes = coded.get(_module(key))
        is_converted = tensor.dtype != served[key]
        if codes is not None and is_converted and _SCALE.fullmatch(_last(key)):
            name, weights = (each.partition("\t")[0] for each in (key, codes))
            raise UsageError(
                f"{name!r} is a scale of the quantised weights {weights!r}, and would be "
                f"rounded from {tensor.dtype} to {served[key]}; give dtype=None, so that each tensor is "
                "published in its own dtype"
            )


def _module(key: str) -> str:
    return key.partition("\t")[0].rpartition(".")[0]


def _last(key: str) -> str:
    return key.partition("\t")[0].rpartition(".")[2]
