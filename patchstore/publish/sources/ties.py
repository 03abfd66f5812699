"""Tied tensors: which names are of one tensor.

An address does not say which tensor this is: a tensor subclass may have no memory of its own, and then
its address is 0, like that of all others of its class. So a tensor is first unwrapped, and two names are
one tensor only if they are the same view of the same storage.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import torch

from patchstore.errors import SchemaMismatch
from patchstore.publish.sources.pieces import Piece
from patchstore.publish.sources.plain import DISTRIBUTED


class Saved:
    """Which of a tensor's names `save_pretrained` of transformers writes, where a model says it.

    A model of transformers has patterns of those names that it leaves out, because loading ties them again.
    Another model may have one inside. The patterns are of the class, so all ranks and restarts have the same.
    """

    def __init__(self, source: object, named: Callable[[str], str] = str) -> None:
        """Look for patterns; what is no model has none.

        Args:
            named: returns what a name of the model's is called here.
        """
        self._patterns: list[re.Pattern[str]] = []
        heads = set[int]()
        self.heads = set[str]()
        """Names of the weights of output layers."""
        modules = dict(source.named_modules()) if isinstance(source, torch.nn.Module) else {}
        for module in modules.values():
            if callable(getattr(type(module), "get_output_embeddings", None)):
                with suppress(AttributeError, NotImplementedError):
                    heads.add(id(module.get_output_embeddings()))
        for path, module in modules.items():
            if id(module) in heads:
                self.heads.add(named(f"{path}.weight"))
            given = getattr(module, "_tied_weights_keys", None)
            # transformers 4 has a list of them, and later releases a mapping to the names that are kept.
            for pattern in given if isinstance(given, Mapping | list | tuple | set) else ():
                self._patterns.append(re.compile(named(f"{path}.{pattern}" if path else pattern)))

    def leaves_out(self, name: str) -> bool:
        """Whether a name is left out if the tensor has another one."""
        return any(pattern.search(name) for pattern in self._patterns)


def each_once(
    found: Mapping[str, Sequence[Piece]], stored: Collection[str], leaves_out: Callable[[str], bool]
) -> tuple[dict[str, Sequence[Piece]], dict[str, str]]:
    """Return each tensor's pieces under one of its names, and its further names -> that one.

    A tensor of which this process has no element is not known to be tied.

    Args:
        stored: names that are preferred before all others.
        leaves_out: see `Saved`.
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
                kept = _kept(alike, stored, leaves_out)
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


def _kept(names: Collection[str], stored: Collection[str], leaves_out: Callable[[str], bool]) -> str:
    """Return the name under which a tied tensor is stored."""
    known = [name for name in names if name in stored]
    if known:
        return min(known, key=_preference)
    left = [name for name in names if not leaves_out(name)]
    # Of names that are all left out transformers writes the last one.
    return min(left, key=_preference) if left else max(names)


def _preference(name: str) -> tuple[bool, bool, bool, str]:
    """Order the names of a tied tensor where nothing else says which is stored; the first is.

    By name alone, so that neither a restart nor another order of the mapping changes it. The embedding
    comes before the head: that is what Hugging Face checkpoints keep and what loaders look for.
    """
    is_embedding = "embed" in name or "wte" in name
    return "head" in name, "shared" not in name, not is_embedding, name
