"""Models with PEFT's adapters, merged layer by layer. The trainer's weights stay as they are.

PEFT itself merges, into a copy of one layer at a time. So any adapter that PEFT can merge is merged exactly
as `merge_and_unload` would: in the same dtypes, and in the same order where several are active.

Of a sharded model the ranks gather one adapted layer at a time, and each publishes its part of what PEFT
leaves. A product of matrices may have other bits where it is computed of fewer rows, and so may a norm. So a
rank cannot merge its own rows alone.
"""

import copy
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from patchstore.errors import SchemaMismatch
from patchstore.publish.sources.dtensors import Layout, is_sharded, local_of, ranks_of
from patchstore.publish.sources.pieces import LocalPart, Piece, whole
from patchstore.publish.sources.plain import plain
from patchstore.publish.sources.ties import Saved, each_once, storage_of

_INSTEAD = (
    "publish a mapping of merged tensors under the base model's names, such as "
    "copy.deepcopy(model).merge_and_unload().state_dict(), which is updated before each call"
)


class _Adapted(NamedTuple):
    """A module that PEFT put in place of one of the model's."""

    path: str
    wrapper: Any
    tensors: dict[str, torch.Tensor]
    """What it adapts, by the model's names, before it is merged."""
    is_merged_here: bool
    """Whether there is anything to merge."""


def is_adapted(model: torch.nn.Module) -> bool:
    """Whether this is a PeftModel."""
    return any(
        each.__name__ == "PeftModel" and each.__module__.partition(".")[0] == "peft"
        for each in type(model).__mro__
    )


class Merged:
    """A model with adapters, of which each pass yields the merged tensors under the base model's names.

    What is published is what the model computes with: active adapters, and none where they are disabled.
    """

    def __init__(self, model: Any, stored: Collection[str]) -> None:
        self._model, self._stored = model, stored
        self.tied: dict[str, str] = {}
        """Further names of tensors -> the ones that they are under, as the last pass found them."""

    def ranks(self) -> set[int]:
        """Return the ranks among which the model is sharded; none if it is not."""
        found = [ranks_of(each) for each in self._model.parameters() if is_sharded(each)]
        return set[int]().union(*found)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | list[LocalPart]]]:
        """Yield tensors; those that adapters change are computed one layer at a time.

        Of a sharded model all ranks of its mesh must take the same steps: a layer is gathered between them.

        Raises:
            SchemaMismatch: DeepSpeed shards the model, or PEFT cannot merge an adapter.
        """
        self._check()
        base = self._model.get_base_model()
        adapted = _adapted(base)
        paths = tuple(f"{each.path}." for each in adapted)
        state = base.state_dict(keep_vars=True)
        found = {name: each for name, each in state.items() if not name.startswith(paths)}
        for each in adapted:
            found |= each.tensors
        pieces = {name: _pieces(name, each) for name, each in found.items()}
        once, self.tied = each_once(pieces, self._stored, Saved(base).leaves_out)
        merged = [each for each in adapted if each.is_merged_here]
        changed = {key for each in merged for key in _keys(each)}
        for name in once:
            if _key(name, found[name]) not in changed:
                yield name, found[name].detach()
        for group in _sharing(merged):
            yielded = set[str]()
            for name, tensor in _merge(group):
                kept = self.tied.get(name, name)
                if kept not in yielded:
                    yielded.add(kept)
                    yield kept, _part(name, tensor, found[name]) if is_sharded(found[name]) else tensor

    def _check(self) -> None:
        """Raises SchemaMismatch where there are no merged weights of the model."""
        configs = getattr(self._model, "peft_config", {}).values()
        if any(getattr(config, "is_prompt_learning", False) for config in configs):
            raise SchemaMismatch(
                "the model learns a prompt, which is no part of its weights and cannot be merged; servers "
                "load such an adapter themselves"
            )
        for name, parameter in self._model.named_parameters():
            if hasattr(parameter, "ds_id"):
                raise SchemaMismatch(
                    f"{name!r} is sharded by DeepSpeed, and adapters are merged of whole tensors; {_INSTEAD}"
                )
        check = getattr(self._model.base_model, "_check_merge_allowed", None)
        try:
            if check is not None:
                check()
        except ValueError as exc:
            raise SchemaMismatch(f"PEFT cannot merge these adapters: {exc}") from exc


def _adapted(base: torch.nn.Module) -> list[_Adapted]:
    """Return what PEFT put into a model, outermost modules alone, in the order in which PEFT merges them."""
    found: list[_Adapted] = []
    for path, module in base.named_modules():
        if found and path.startswith(f"{found[-1].path}."):
            continue
        if hasattr(module, "unload_and_optionally_merge_module") or (
            hasattr(module, "base_layer") and hasattr(module, "merge")
        ):
            inner, merges = _inside(module)
            state = inner.state_dict(keep_vars=True)
            tensors = {f"{path}.{name}": tensor for name, tensor in state.items()}
            found.append(_Adapted(path, module, tensors, merges))
    return found


def _inside(wrapper: Any) -> tuple[Any, bool]:
    """Return the module that is left when PEFT is gone, and whether something is merged into it."""
    disabled = bool(getattr(wrapper, "disable_adapters", False))
    if hasattr(wrapper, "modules_to_save"):
        if disabled or not wrapper.active_adapters:
            return wrapper.original_module, False
        saved = wrapper.modules_to_save[wrapper.active_adapters[0]]
        return (saved.get_base_layer(), True) if hasattr(saved, "base_layer") else (saved, False)
    if hasattr(wrapper, "token_adapter"):
        return wrapper.token_adapter.get_base_layer(), not disabled or wrapper.token_adapter.merged
    # Merged already and disabled: it is unmerged in the next forward pass.
    return wrapper.get_base_layer(), not disabled or wrapper.merged


def _sharing(adapted: Sequence[_Adapted]) -> list[list[_Adapted]]:
    """Group modules that adapt the same tensor: tied ones are merged one after the other."""
    groups: list[tuple[set[object], list[_Adapted]]] = []
    for each in adapted:
        keys = _keys(each)
        group = next((group for group in groups if group[0] & keys), None)
        if group is None:
            groups.append((keys, [each]))
        else:
            group[0].update(keys)
            group[1].append(each)
    return [group for _, group in groups]


def _merge(group: Sequence[_Adapted]) -> Iterator[tuple[str, torch.Tensor]]:
    """Merge copies of modules that share tensors, and yield the tensors by the model's names.

    Raises:
        SchemaMismatch: PEFT cannot merge an adapter, or leaves other tensors than there were.
    """
    with torch.no_grad(), warnings.catch_warnings():
        # PEFT says so where an adapter is merged already.
        warnings.simplefilter("ignore")
        # One memo for all, so that what they share is shared by the copies too.
        memo: dict[int, Any] = {}
        gathered = [_gather(each.wrapper, memo) for each in group]
        copies = [copy.deepcopy(each.wrapper, memo) for each in group]
        del gathered
        left = []
        for each, wrapper in zip(group, copies, strict=True):
            try:
                left.append(_left_of(wrapper))
            except (NotImplementedError, RuntimeError, ValueError) as exc:
                raise SchemaMismatch(f"PEFT cannot merge the adapter of {each.path!r}: {exc}") from exc
    for each, module in zip(group, left, strict=True):
        tensors = {f"{each.path}.{name}": tensor for name, tensor in module.state_dict().items()}
        if tensors.keys() != each.tensors.keys():
            odd = min(tensors.keys() ^ each.tensors.keys())
            raise SchemaMismatch(f"PEFT renames {odd!r} when it merges, which is not known here; {_INSTEAD}")
        yield from tensors.items()


def _gather(wrapper: Any, memo: dict[int, Any]) -> list[Any]:
    """Have a copy of a module get whole tensors in place of sharded ones; all ranks of their mesh take part.

    Returns:
        The sharded tensors, which must live as long as the memo, where they are known by their ids.

    Raises:
        SchemaMismatch: FSDP shards the module by itself, and then forbids copies of it.
    """
    if any(each.__name__ == "FSDPModule" for each in type(wrapper).__mro__):
        raise SchemaMismatch(
            f"fully_shard was called for the {type(wrapper).__name__} that PEFT put in, of which FSDP allows "
            "no copy; call it for the layer around it"
        )
    sharded = [each for each in (*wrapper.parameters(), *wrapper.buffers()) if is_sharded(each)]
    for each in sharded:
        full: torch.Tensor = each.full_tensor().detach()
        memo[id(each)] = (
            torch.nn.Parameter(full, each.requires_grad) if isinstance(each, torch.nn.Parameter) else full
        )
    return sharded


def _pieces(name: str, tensor: Any) -> list[Piece]:
    if not is_sharded(tensor):
        return [whole(plain(name, tensor))]
    local = plain(name, local_of(tensor))
    return Layout.of(name, tensor, local.shape).pieces(local)


def _part(name: str, merged: torch.Tensor, tensor: Any) -> list[LocalPart]:
    """Return what this rank has of a merged tensor: what it has of the one that was merged into."""
    found = []
    for box in _pieces(name, tensor):
        start = box.start or (0,) * merged.dim()
        side = tuple(slice(at, at + size) for at, size in zip(start, box.local.shape, strict=True))
        found.append(LocalPart(merged[side], box.shape, start=start))
    return found


def _key(name: str, tensor: Any) -> object:
    """Return what tied tensors share: the same on all ranks, also on those that have no element of it."""
    if is_sharded(tensor):
        return id(tensor)
    return storage_of(name, tensor) if tensor.numel() else name


def _keys(adapted: _Adapted) -> set[object]:
    return {_key(name, tensor) for name, tensor in adapted.tensors.items()}


def _left_of(wrapper: Any) -> Any:
    """Merge a module of PEFT, or undo that where adapters are disabled, and return what is left of it."""
    if getattr(wrapper, "disable_adapters", False):
        inner = getattr(wrapper, "token_adapter", wrapper)
        inner.unmerge()
        return inner.get_base_layer()
    if hasattr(wrapper, "unload_and_optionally_merge_module"):
        return wrapper.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    wrapper.merge(safe_merge=False, adapter_names=None)
    return wrapper.get_base_layer()
