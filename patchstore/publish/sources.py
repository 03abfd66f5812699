"""What a trainer hands over, as whole tensors by the names that servers know, each once, and their ties.

An address does not say which tensor this is: a tensor subclass may have no memory of its own, and then
its address is 0, like that of all others of its class. So a tensor is first unwrapped, and two names are
one tensor only if they are the same view of the same storage.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from patchstore.errors import SchemaMismatch, UsageError

Source = torch.nn.Module | Mapping[str, torch.Tensor]
"""A model, whose `state_dict` is published, or its tensors by checkpoint name."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types whose memory holds their elements."""

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts of a name that torch.compile, activation checkpointing and FSDP add, and nothing else."""

_DISTRIBUTED = (
    "on all ranks, gather whole tensors with torch.distributed.checkpoint.state_dict.get_model_state_dict("
    "model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)); publish them from rank 0, as "
    "a dict that is updated with them before each call"
)
_ZERO_3 = (
    "DeepSpeed ZeRO-3 keeps parameters apart: copy them inside deepspeed.zero.GatheredParameters("
    "model.parameters()), and publish the mapping of copies from rank 0"
)
_FAKE_QUANTISED = frozenset({"weight_fake_quant", "activation_post_process", "fake_quant_enabled"})
"""Parts of names that torch's quantisation-aware training adds."""
_PEFT = (
    "an adapter's wrapper names them so; publish merged weights under the base model's names, as a dict that "
    "is updated from copy.deepcopy(model).merge_and_unload().state_dict() before each call"
)


class Weights:
    """The tensors of a source, as they are at each call of `read`."""

    def __init__(self, source: Source, stored: Collection[str] = ()) -> None:
        """Look at a source; nothing is copied.

        Args:
            stored: names under which an existing run stores tensors; preferred among tied ones.

        Raises:
            UsageError: this is neither a model nor a mapping.
            SchemaMismatch: a wrapper around the model, of which no weights can be taken.
        """
        self._source, self._stored = source, stored
        self._names: dict[object, str] = {}
        """What the source calls a tensor -> what it is published as."""
        self._parallel: list[str] = []
        """Beginnings of names, down to the `module.` of a DistributedDataParallel or DataParallel."""
        if isinstance(source, torch.nn.Module):
            self._parallel = _look_into(source)
        elif not isinstance(source, Mapping):
            raise UsageError(
                f"the source must be a model or a mapping of names to tensors, not {_class(source)}; "
                "pass the model itself, or dict(model.named_parameters())"
            )

    def read(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the tensors, plain and each once, and further names of a tensor -> the one it is under.

        Raises:
            SchemaMismatch: one is not a whole tensor in memory, or a name is none that servers know.
        """
        source = self._source
        found: dict[str, torch.Tensor] = {}
        for given, tensor in (source.state_dict() if isinstance(source, torch.nn.Module) else source).items():
            name = self._names.get(given) or self._name(given)
            if name in found:
                raise SchemaMismatch(
                    f"two tensors would be published as {name!r}, one of them given as {given!r}; "
                    "prefixes such as '_orig_mod.' are taken off names"
                )
            found[name] = tensor if type(tensor) in _PLAIN and _is_dense(tensor) else _whole(name, tensor)
        self._check(found)
        return _each_once(found, self._stored)

    def _name(self, given: object) -> str:
        if not isinstance(given, str):
            raise SchemaMismatch(f"names of tensors must be strings, but one is {given!r} ({_class(given)})")
        name = given
        for prefix in self._parallel:
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name.removeprefix(prefix)
        *parts, last = name.split(".")
        if last in {"_flat_param", "flat_param"}:
            raise SchemaMismatch(f"{given!r} is a flat parameter of FSDP; {_DISTRIBUTED}")
        if "base_layer" in parts or parts[:1] == ["prompt_encoder"]:
            raise SchemaMismatch(f"{given!r} is no name that servers know: {_PEFT}")
        if not _FAKE_QUANTISED.isdisjoint(name.split(".")):
            raise SchemaMismatch(
                f"{given!r} is of quantisation-aware training, and servers do not know it; pass the weights "
                "alone, in a mapping by name"
            )
        self._names[given] = ".".join([*(part for part in parts if part not in _WRAPPERS), last])
        return self._names[given]

    def _check(self, found: Mapping[str, torch.Tensor]) -> None:
        """Raises SchemaMismatch where the tensors as a whole are not a model's weights."""
        if not found:
            raise SchemaMismatch(
                "the source has no tensors; get_model_state_dict(full_state_dict=True, cpu_offload=True) "
                "returns them on rank 0 only, from where to publish"
            )
        for prefix, advice in (
            (
                "module.",
                "a wrapper names them so; pass the wrapped model, often wrapper.module, or its state dict",
            ),
            ("base_model.", _PEFT),
        ):
            if all(name.startswith(prefix) for name in found):
                raise SchemaMismatch(
                    f"all names begin with {prefix!r}, as in {next(iter(found))!r}: {advice}"
                )
        for name in found:
            if name.endswith("_orig") and f"{name.removesuffix('_orig')}_mask" in found:
                raise SchemaMismatch(
                    f"{name!r} is what torch.nn.utils.prune keeps of a weight, with its mask beside it, and "
                    f"servers know {name.removesuffix('_orig')!r} alone; call prune.remove, or pass a mapping"
                )
        empty = [name for name, tensor in found.items() if 0 in tensor.shape]
        if empty:
            source = self._source
            # A state dict has other tensor objects than the model, without what DeepSpeed wrote on them.
            given = dict(source.named_parameters()) if isinstance(source, torch.nn.Module) else source
            for name, tensor in given.items():
                if _is_placeholder(tensor):
                    raise SchemaMismatch(f"{name!r} is a placeholder without elements; {_ZERO_3}")
        if len(empty) == len(found):
            raise SchemaMismatch(
                f"none of the {len(found)} tensors has an element, such as {empty[0]!r}; is this a model "
                "whose weights are elsewhere? " + _ZERO_3
            )


def _look_into(model: torch.nn.Module) -> list[str]:
    """Return beginnings of names that end in a wrapper's `module.`, innermost first.

    Raises:
        SchemaMismatch: the model is wrapped by something of which no whole weights can be taken.
    """
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, parallel):
            found.append(f"{path}.module." if path else "module.")
        elif type(module).__name__ == "FullyShardedDataParallel":
            raise SchemaMismatch(f"{path or 'the model'!r} is wrapped by FSDP; {_DISTRIBUTED}")
    names = [name for name, _ in model.named_parameters()]
    wrapped = getattr(model, "module", None)
    is_wrapper = isinstance(wrapped, torch.nn.Module) and not isinstance(model, parallel)
    if is_wrapper and names and all(name.startswith("module.") for name in names):
        raise SchemaMismatch(
            f"{_class(model)} wraps a model, whose names all begin with 'module.' there; pass its .module"
        )
    return sorted(found, key=len, reverse=True)


def _is_placeholder(tensor: Any) -> bool:
    """Whether DeepSpeed ZeRO-3 keeps this tensor's elements elsewhere."""
    return hasattr(tensor, "ds_id") and not tensor.numel() and bool(getattr(tensor, "ds_numel", 1))


def _whole(name: str, tensor: Any) -> torch.Tensor:
    """Return a tensor without its wrappers, which has its elements in its memory.

    Raises:
        SchemaMismatch: there is no such tensor.
    """
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
        last = name.rpartition(".")[2]
        if last == "_extra_state":
            advice = "it is not a weight: leave it out, in a mapping of names to tensors"
        elif last in {"_packed_params", "dtype"} and "_packed_params" in name:
            advice = "torch quantised this module; publish the weights from before that"
        elif isinstance(tensor, Mapping):
            advice = f"pass the tensors of one model by name, perhaps source[{name!r}]"
        else:
            advice = "pass tensors by name"
        raise SchemaMismatch(f"{name!r} is not a tensor but {_class(tensor)}; {advice}")
    if hasattr(tensor, "full_tensor"):
        raise SchemaMismatch(f"{name!r} is a {_class(tensor)}, of which each rank has a part; {_DISTRIBUTED}")
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise SchemaMismatch(f"{name!r} has no shape yet; run a batch through the model first")
    if hasattr(tensor, "trigger_wait"):
        # The result of a collective that may still be under way.
        return tensor.trigger_wait()  # type: ignore[no-any-return]
    kind = type(tensor)
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        # The subclass changes what Python sees, and its memory is its own.
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.as_subclass(torch.Tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, part) for part in tensor.__tensor_flatten__()[0]]
        if len(inner) == 1 and isinstance(inner[0], torch.Tensor) and _is_alike(inner[0], tensor):
            return inner[0]
    raise SchemaMismatch(
        f"{name!r} is a {_class(tensor)}, whose elements are not in one tensor of its shape and dtype; "
        "pass plain tensors in a mapping by name, such as what its dequantize() returns"
    )


def _is_alike(inner: torch.Tensor, outer: torch.Tensor) -> bool:
    return (
        inner.shape == outer.shape
        and inner.dtype == outer.dtype
        and inner.device == outer.device
        and inner.stride() == outer.stride()
    )


def _each_once(
    found: Mapping[str, torch.Tensor], stored: Collection[str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return each tensor under one of its names, and its further names -> that one."""
    sharing: dict[int, list[str]] = {}
    for name, tensor in found.items():
        if tensor.numel():
            sharing.setdefault(_storage(name, tensor), []).append(name)
    tied: dict[str, str] = {}
    for names in sharing.values():
        if len(names) > 1:
            same: dict[tuple[object, ...], list[str]] = {}
            for name in names:
                same.setdefault(_view(found[name]), []).append(name)
            for each in same.values():
                kept = min(each, key=lambda name: (name not in stored, *_preference(name)))
                tied |= dict.fromkeys(sorted(set(each) - {kept}), kept)
    return {name: tensor for name, tensor in found.items() if name not in tied}, tied


def _storage(name: str, tensor: torch.Tensor) -> int:
    """Return what tells a tensor's storage from all others that exist now."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError) as exc:
        raise SchemaMismatch(
            f"{name!r} has no memory, as inside of torch.func.vmap; publish outside of that: {exc}"
        ) from exc
    if not storage.nbytes():
        raise SchemaMismatch(
            f"{name!r} has no memory at present, as parameters that FSDP has sharded; {_DISTRIBUTED}"
        )
    return int(storage._cdata)


def _view(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _preference(name: str) -> tuple[bool, bool, bool, str]:
    """Order the names of a tied tensor; the first is stored.

    By name alone, so that neither a restart nor another order of the mapping changes it. The embedding
    comes before the head: that is what Hugging Face checkpoints keep and what loaders look for.
    """
    is_embedding = "embed" in name or "wte" in name
    return "head" in name, "shared" not in name, not is_embedding, name


def _class(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
