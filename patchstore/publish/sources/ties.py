"""Tied tensors: which names are of one tensor.

An address does not say which tensor this is: a tensor subclass may have no memory of its own, and then
its address is 0, like that of all others of its class. So a tensor is first unwrapped, and two names are
one tensor only if they are the same view of the same storage.
"""

from collections.abc import Collection, Mapping, Sequence

import torch

from patchstore.errors import SchemaMismatch
from patchstore.publish.sources.pieces import Piece
from patchstore.publish.sources.plain import DISTRIBUTED


def each_once(
    found: Mapping[str, Sequence[Piece]], stored: Collection[str]
) -> tuple[dict[str, Sequence[Piece]], dict[str, str]]:
    """Return each tensor's pieces under one of its names, and its further names -> that one.

    A tensor of which this process has no element is not known to be tied.
    """
    sharing: dict[int, list[str]] = {}
    for name, pieces in found.items():
        for each in pieces:
            if each.local.numel():
                sharing.setdefault(storage_of(name, each.local), []).append(name)
                break
    tied: dict[str, str] = {}
    for names in sharing.values():
        if len(names) > 1:
            same: dict[tuple[object, ...], list[str]] = {}
            for name in names:
                same.setdefault(tuple(map(_view, found[name])), []).append(name)
            for alike in same.values():
                kept = min(alike, key=lambda name: (name not in stored, *_preference(name)))
                tied |= dict.fromkeys(sorted(set(alike) - {kept}), kept)
    return {name: pieces for name, pieces in found.items() if name not in tied}, tied


def storage_of(name: str, tensor: torch.Tensor) -> int:
    """Return what tells a tensor's storage from all others that exist now."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError) as exc:
        raise SchemaMismatch(
            f"{name!r} has no memory, as inside of torch.func.vmap; publish outside of that: {exc}"
        ) from exc
    if not storage.nbytes():
        raise SchemaMismatch(
            f"{name!r} has no memory at present, as parameters that FSDP has sharded; {DISTRIBUTED}"
        )
    return int(storage._cdata)


def _view(piece: Piece) -> tuple[object, ...]:
    local = piece.local
    return piece.place, local.dtype, local.stride(), local.storage_offset()


def _preference(name: str) -> tuple[bool, bool, bool, str]:
    """Order the names of a tied tensor; the first is stored.

    By name alone, so that neither a restart nor another order of the mapping changes it. The embedding
    comes before the head: that is what Hugging Face checkpoints keep and what loaders look for.
    """
    is_embedding = "embed" in name or "wte" in name
    return "head" in name, "shared" not in name, not is_embedding, name
