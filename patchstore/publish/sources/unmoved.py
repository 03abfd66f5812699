"""Find tensors again where they were at the last call.

A trainer changes weights in place, so nearly every call finds the same tensors in the same memory. To see
that takes a fifth of the time of working out again what each of them is, and who shares memory with whom.
"""

from collections.abc import Mapping
from typing import Any

import torch

from patchstore.publish.sources.dtensors import is_sharded

_Seen = tuple[Any, ...]


class Unmoved:
    """What the tensors of a mapping were at the last call. It keeps none of them alive."""

    def __init__(self) -> None:
        self._known: list[tuple[str, _Seen, str | None]] | None = None

    def remember(self, items: Mapping[str, Any], keys: Mapping[str, str | None]) -> None:
        """Take note of tensors that were just read.

        Args:
            keys: by the names of the items, under which key each is published as one piece; None for a
                further name of a tied tensor.
        """
        self._known = []
        for name, value in items.items():
            seen = None if name not in keys else _seen(value)
            if seen is None:
                # Of another kind, or in several pieces.
                self._known = None
                return
            self._known.append((name, seen[1:], keys[name]))

    def again(self, items: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
        """Return the tensors of this process by key, if all is as it was; otherwise None.

        Equal addresses, shapes and strides are equal elements, so ties are what they were too.
        """
        if self._known is None or len(items) != len(self._known):
            return None
        found = {}
        for (name, value), (known, before, key) in zip(items.items(), self._known, strict=True):
            seen = _seen(value)
            if seen is None or name != known or seen[1:] != before:
                return None
            if key is not None:
                found[key] = seen[0]
        return found


def _seen(value: Any) -> _Seen | None:
    """Return the elements that this process has, and all that tells whether they are the same tomorrow."""
    kind, placed = type(value), None
    if kind is torch.Tensor or (kind is torch.nn.Parameter and not vars(value)):
        local = value
    elif is_sharded(value):
        local = value._local_tensor
        if type(local) is not torch.Tensor:
            return None
        placed = value.placements, value.device_mesh, value.shape
    else:
        return None
    try:
        address = local.data_ptr()
    except RuntimeError:
        # It has no memory, or not one of its own.
        return None
    memory = address, local.shape, local.stride(), local.dtype, local.device, local.is_neg()
    return local.detach() if local.requires_grad else local, kind, memory, placed
