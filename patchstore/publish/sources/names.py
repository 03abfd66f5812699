"""Names of tensors as servers know them: without what wrappers of models add."""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch

from patchstore.errors import SchemaMismatch
from patchstore.publish.sources.plain import DISTRIBUTED, class_of

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts of a name that torch.compile, activation checkpointing and FSDP add, and nothing else."""
EXTRA_STATE = "_extra_state"
"""Last part of the name of what `get_extra_state` of a module returns."""
_FAKE_QUANTISED = frozenset({"weight_fake_quant", "activation_post_process", "fake_quant_enabled"})
"""Parts of names that torch's quantisation-aware training adds."""
_PEFT = (
    "an adapter's wrapper names them so; pass the model itself, which is published merged, or a mapping "
    "from copy.deepcopy(model).merge_and_unload().state_dict()"
)


class Names:
    """What the source calls tensors -> what they are published as."""

    def __init__(self, source: object) -> None:
        """Look at a source.

        Raises:
            SchemaMismatch: a wrapper around the model, of which no weights can be taken.
        """
        self._known: dict[object, str] = {}
        self._wrappers = look_into(source) if isinstance(source, torch.nn.Module) else []
        """Beginnings of names, down to what a wrapper calls the model in it, and without that."""

    def of(self, given: object) -> str:
        """Return what a tensor is published as.

        Raises:
            SchemaMismatch: this is no name that servers know.
        """
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
        *parts, last = name.split(".")
        if last == EXTRA_STATE:
            raise SchemaMismatch(f"{given!r} is what a module keeps beside its weights; leave it out")
        if last in {"_flat_param", "flat_param"}:
            raise SchemaMismatch(f"{given!r} is a flat parameter of FSDP; {DISTRIBUTED}")
        # PEFT has an embedding for each adapter there; models of images have a module of that name too.
        is_prompt = parts[:1] == ["prompt_encoder"] and parts[2:] == ["embedding"]
        if "base_layer" in parts or is_prompt:
            raise SchemaMismatch(f"{given!r} is no name that servers know: {_PEFT}")
        if not _FAKE_QUANTISED.isdisjoint(name.split(".")):
            raise SchemaMismatch(
                f"{given!r} is of quantisation-aware training, and servers do not know it; pass the weights "
                "alone, in a mapping by name"
            )
        self._known[given] = ".".join([*(part for part in parts if part not in _WRAPPERS), last])
        return self._known[given]


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

    Raises:
        SchemaMismatch: the model is wrapped by something of which no whole weights can be taken.
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
    """Return the model inside of DeepSpeed's engine; other models as they are."""
    while any(each.__name__ == "DeepSpeedEngine" for each in type(model).__mro__):
        model = model.module  # type: ignore[assignment]
    return model


class Found(NamedTuple):
    """A model of transformers, perhaps in another one or in wrappers."""

    path: str
    """Of the module in the source."""
    start: str
    """What names that are published of it begin with."""
    model: Any


def models_of_transformers(model: torch.nn.Module) -> Iterator[Found]:
    """Yield models of transformers, the outer ones before those in them."""
    names = Names(model)
    for path, module in model.named_modules():
        if any(each.__name__ == "PreTrainedModel" for each in type(module).__mro__):
            # With one more part, as no name ends in that of a wrapper.
            yield Found(path, names.of(f"{path}.x" if path else "x").removesuffix("x"), module)


def is_of_peft(module: torch.nn.Module) -> bool:
    """Whether PEFT put this module into a model, or around it."""
    return any(each.__module__.partition(".")[0] == "peft" for each in type(module).__mro__)


def child_of_peft(module: torch.nn.Module) -> str | None:
    """Return what a wrapper of PEFT around a model calls it; None for other modules."""
    if not is_of_peft(module):
        return None
    name = "model" if any(each.__name__ == "BaseTuner" for each in type(module).__mro__) else "base_model"
    return name if name in module._modules else None
