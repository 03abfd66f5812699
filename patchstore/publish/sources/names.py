"""Under which name each tensor is published: without what wrappers of models add, and tied tensors once.

An address does not say which tensor this is: a tensor subclass may have no memory of its own, and then
its address is 0, like that of all others of its class. So a tensor is first unwrapped, and two names are
one tensor only if they are the same view of the same storage.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from patchstore.errors import SchemaMismatch
from patchstore.publish.sources.pieces import DISTRIBUTED, Piece, class_of

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts of a name that torch.compile, activation checkpointing and FSDP add, and nothing else."""
EXTRA_STATE = "_extra_state"
"""Last part of the name of what `get_extra_state` of a module returns."""
_FAKE_QUANTIZED = frozenset({"weight_fake_quant", "activation_post_process", "fake_quant_enabled"})
"""Parts of names that torch's quantization-aware training adds."""
_PEFT = (
    "an adapter's wrapper names them so; pass the model itself, which is published merged, or a mapping "
    "from copy.deepcopy(model).merge_and_unload().state_dict()"
)


class Names:
    """What the source calls tensors -> what they are published as."""

    def __init__(self, source: object, *, of_adapter: bool = False) -> None:
        """`of_adapter`: they are the names under which PEFT saves an adapter."""
        self._of_adapter = of_adapter
        self._known: dict[object, str] = {}
        self._wrappers = look_into(source) if isinstance(source, torch.nn.Module) else []
        """Beginnings of names, down to what a wrapper calls the model in it, and without that."""

    def of(self, given: object) -> str:
        known = self._known.get(given)
        if known is not None:
            return known
        if not isinstance(given, str):
            raise SchemaMismatch(
                f"names of tensors must be strings, but one is {given!r} ({class_of(given)})"
            )
        name = given
        for prefix, kept in self._wrappers:
            if name.startswith(prefix):
                name = kept + name.removeprefix(prefix)
        parts = name.split(".")
        last = parts[-1]
        if last == EXTRA_STATE:
            raise SchemaMismatch(f"{given!r} is what a module keeps beside its weights; leave it out")
        if last in {"_flat_param", "flat_param"}:
            raise SchemaMismatch(f"{given!r} is a flat parameter of FSDP; {DISTRIBUTED}")
        # PEFT has an embedding for each adapter there; models of images have a module of that name too.
        is_prompt = parts[:1] == ["prompt_encoder"] and parts[2:-1] == ["embedding"]
        if ("base_layer" in parts[:-1] or is_prompt) and not self._of_adapter:
            raise SchemaMismatch(f"{given!r} is no name that servers know: {_PEFT}")
        if not _FAKE_QUANTIZED.isdisjoint(parts):
            raise SchemaMismatch(
                f"{given!r} is of quantization-aware training, and servers do not know it; pass the weights "
                "alone, in a mapping by name"
            )
        if not _WRAPPERS.isdisjoint(parts):
            name = ".".join([*(part for part in parts[:-1] if part not in _WRAPPERS), last])
        self._known[given] = name
        return name


_OF_LORA = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"})
_SAVED_BY_PEFT = (
    "pass the PEFT model itself, or what peft.get_peft_model_state_dict(model) returns of it at each call"
)


def check_adapter(names: Collection[str]) -> None:
    """Raises SchemaMismatch where names as a whole are not those that PEFT saves of an adapter."""
    if not names:
        raise SchemaMismatch(f"the adapter has no tensors; {_SAVED_BY_PEFT}")
    found = False
    for name in names:
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part in _OF_LORA), None)
        is_saved = place is None or parts[place + 1 :] in ([], ["weight"])
        if parts[:2] != ["base_model", "model"] or not is_saved:
            raise SchemaMismatch(f"PEFT saves no tensor of an adapter as {name!r}; {_SAVED_BY_PEFT}")
        found = found or place is not None
    if not found:
        raise SchemaMismatch(f"none of the {len(names):,} tensors is of a LoRA adapter; {_SAVED_BY_PEFT}")


def check_all(names: Collection[str]) -> None:
    """Raises SchemaMismatch where names as a whole are not those of a model's weights."""
    if not names:
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
        if all(name.startswith(prefix) for name in names):
            raise SchemaMismatch(f"all names begin with {prefix!r}, as in {next(iter(names))!r}: {advice}")
    for name in names:
        if name.endswith("_orig") and f"{name.removesuffix('_orig')}_mask" in names:
            raise SchemaMismatch(
                f"{name!r} is what torch.nn.utils.prune keeps of a weight, with its mask beside it, and "
                f"servers know {name.removesuffix('_orig')!r} alone; call prune.remove, or pass a mapping"
            )


def look_into(model: torch.nn.Module) -> list[tuple[str, str]]:
    """Return beginnings of names, down to what a wrapper calls the model in it, and without that.

    Innermost first. Wrappers are DistributedDataParallel, DataParallel and those of PEFT.
    """
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        inner = "module" if isinstance(module, parallel) else child_of_peft(module)
        if inner is not None:
            start = f"{path}." if path else ""
            found.append((f"{start}{inner}.", start))
        elif type(module).__name__ == "FullyShardedDataParallel":
            raise SchemaMismatch(f"{path or 'the model'!r} is wrapped by FSDP; {DISTRIBUTED}")
    names = [name for name, _ in model.named_parameters()]
    wrapped = getattr(model, "module", None)
    is_wrapper = isinstance(wrapped, torch.nn.Module) and not isinstance(model, parallel)
    if is_wrapper and names and all(name.startswith("module.") for name in names):
        raise SchemaMismatch(
            f"{class_of(model)} wraps a model, whose names all begin with 'module.' there; pass its .module"
        )
    return sorted(found, key=lambda each: len(each[0]), reverse=True)


def without_engine(model: torch.nn.Module) -> torch.nn.Module:
    while any(each.__name__ == "DeepSpeedEngine" for each in type(model).__mro__):
        model = model.module  # type: ignore[assignment]
    return model


class TransformersModel(NamedTuple):
    """A model of transformers, perhaps in another one or in wrappers."""

    path: str
    """Of the module in the source."""
    start: str
    """What names that are published of it begin with."""
    model: Any


def models_of_transformers(model: torch.nn.Module) -> Iterator[TransformersModel]:
    """Yield models of transformers, the outer ones before those in them."""
    names = Names(model)
    for path, module in model.named_modules():
        if any(each.__name__ == "PreTrainedModel" for each in type(module).__mro__):
            # With one more part, as no name ends in that of a wrapper.
            yield TransformersModel(path, names.of(f"{path}.x" if path else "x").removesuffix("x"), module)


def is_of_peft(module: torch.nn.Module) -> bool:
    """Whether PEFT put this module into a model, or around it."""
    return any(each.__module__.partition(".")[0] == "peft" for each in type(module).__mro__)


def child_of_peft(module: torch.nn.Module) -> str | None:
    """Return what a wrapper of PEFT around a model calls it; None for other modules."""
    if not is_of_peft(module):
        return None
    name = "model" if any(each.__name__ == "BaseTuner" for each in type(module).__mro__) else "base_model"
    return name if name in module._modules else None


class Saved:
    """Which of a tensor's names `save_pretrained` of transformers writes, where a model says it.

    A model of transformers has patterns of those names that it leaves out, because loading ties them again.
    Another model may have one inside. The patterns are of the class, so all ranks and restarts have the same.
    """

    def __init__(self, source: object, named: Callable[[str], str] = str) -> None:
        """Look for patterns; `named` returns what a name of the model's is called here."""
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

    A tensor of which this process has no element is not known to be tied. Names in `stored` go before all
    others.
    """
    sharing: dict[int, list[str]] = {}
    for name, pieces in found.items():
        storages = [storage_of(name, each.local) for each in pieces if each.local.numel()]
        if storages:
            sharing.setdefault(storages[0], []).append(name)
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
    """Return what tells the storage of a tensor with elements from all others that exist now.

    Raises:
        SchemaMismatch: it has no storage, or one that ends before the tensor does.
    """
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError) as exc:
        raise SchemaMismatch(
            f"{name!r} has no memory, as inside of torch.func.vmap; publish outside of that: {exc}"
        ) from exc
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if (num_bytes := storage.nbytes()) < (tensor.storage_offset() + last + 1) * tensor.itemsize:
        has = f"only {num_bytes:,} bytes of its" if num_bytes else "no"
        raise SchemaMismatch(
            f"{name!r} has {has} memory at present, as parameters that FSDP has sharded; {DISTRIBUTED}"
        )
    return int(storage._cdata)


def _view(piece: Piece) -> tuple[object, ...]:
    local = piece.local
    return piece.place, local.dtype, local.stride(), local.storage_offset()


def _kept(names: Collection[str], stored: Collection[str], leaves_out: Callable[[str], bool]) -> str:
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
