"""Models of transformers in the names and layouts that `save_pretrained` writes.

From version 5 on, transformers fuses tensors when it loads a model, such as all experts of a layer into one.
It takes them apart again when it saves. What it would do is found by letting it convert tensors without
elements.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.publish.sources.mapped import Mapped, Rule
from patchstore.publish.sources.names import models_of_transformers, without_engine
from patchstore.publish.sources.pieces import LocalPart
from patchstore.publish.sources.plain import class_of
from patchstore.publish.sources.weights import Given, Weights

_COPIES: frozenset[Callable[..., Any]] = frozenset({torch.Tensor.contiguous, torch.Tensor.clone})


class _Said(NamedTuple):
    """A checkpoint tensor that has something of a model's tensor."""

    name: str
    view: torch.Tensor
    """Of the model's tensor."""
    shape: tuple[int, ...]
    """Of the checkpoint tensor."""
    start: tuple[int, ...]
    """Where the view begins there."""


def as_saved(model: torch.nn.Module) -> Mapped | torch.nn.Module:
    """Return a source that publishes a model of transformers under the names that `save_pretrained` writes.

    Args:
        model: a PreTrainedModel, perhaps wrapped, sharded, or with adapters of PEFT.

    Returns:
        The model itself where it has these names already: it is read faster than through a rule.

    Raises:
        UsageError: this is no model of transformers.
        SchemaMismatch: transformers computes a tensor, and does not only take others apart or join them.
    """
    inner = of_transformers(model)
    if inner is None:
        raise UsageError(f"as_saved takes a model of transformers, not {class_of(model)}")
    rule = rule_as_saved(model, Weights(model).read())
    return model if rule is None else Mapped(model, rule)


def rule_as_saved(model: torch.nn.Module, read: Given) -> Rule | None:
    """Return what becomes of a model's tensors when transformers saves it; None if they keep their names.

    Args:
        model: perhaps none of transformers, which keeps its names.
        read: what `Weights` read of it.

    Raises:
        SchemaMismatch: see `as_saved`.
    """
    given = {}
    for key, tensor in read.tensors.items():
        place = read.places.get(key)
        name, shape = (key, tuple(tensor.shape)) if place is None else (place.name, place.shape)
        given[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
    given |= {alias: torch.empty_like(given[name]) for alias, name in read.tied.items() if name in given}
    found: dict[str, list[_Said]] = {}
    outer: list[str] = []
    for path, start, inner in models_of_transformers(without_engine(model)):
        if not path.startswith(tuple(outer)):
            outer.append(f"{path}." if path else "")
            own = {n.removeprefix(start): each for n, each in given.items() if n.startswith(start)}
            for name, said in _converted(inner, own).items():
                found[start + name] = [each._replace(name=start + each.name) for each in said]
    if not found:
        return None

    def rule(name: str, whole: torch.Tensor) -> Any:
        if name not in found:
            return name
        return [
            (new, LocalPart(whole.as_strided(view.shape, view.stride(), view.storage_offset()), shape, start))
            for new, view, shape, start in found[name]
        ]

    return rule


def of_transformers(model: torch.nn.Module) -> Any:
    """Return the outermost model of transformers in a model; None if there is none."""
    return next((each.model for each in models_of_transformers(without_engine(model))), None)


class _Views(TorchFunctionMode):
    """Copies are views here, and what tensors are joined to is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: dict[int, tuple[torch.Tensor, list[tuple[torch.Tensor, tuple[int, ...]]]]] = {}
        """By storage, the joined tensor, and what it was joined of with the first index of each dimension."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES:
            return args[0]
        found = func(*args, **kwargs)
        if func in {torch.cat, torch.concat, torch.stack}:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % found.dim()
            parts, first = [], 0
            for each in args[0] if args else kwargs["tensors"]:
                part = each.unsqueeze(dim) if func is torch.stack else each
                start = tuple(first if at == dim else 0 for at in range(found.dim()))
                parts.append((part, start))
                first += part.shape[dim]
            self.joined[_storage(found)] = found, parts
        return found


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _converted(model: Any, given: Mapping[str, torch.Tensor]) -> dict[str, list[_Said]]:
    """Have transformers convert tensors without elements.

    Returns:
        By the name of a given tensor, the checkpoint tensors that have something of it. A tensor that keeps
        its name and shape is left out.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        # Versions before 5 keep the names of checkpoints.
        return {}
    with _Views() as seen:
        converted = revert_weight_conversion(model, dict(given))
    names = {_storage(tensor): name for name, tensor in given.items()}
    found: dict[str, list[_Said]] = {}

    def add(new: str, view: torch.Tensor, shape: tuple[int, ...], start: tuple[int, ...]) -> None:
        storage = _storage(view)
        if storage in names:
            found.setdefault(names[storage], []).append(_Said(new, view, shape, start))
            return
        whole, parts = seen.joined.get(storage, (None, []))
        if whole is None or (whole.shape, whole.stride()) != (view.shape, view.stride()):
            raise SchemaMismatch(
                f"transformers computes {new!r} when it saves {class_of(model)}, so a part of it cannot be "
                "published as it is; publish model.save_pretrained's tensors, as a mapping by name"
            )
        for part, at in parts:
            add(new, part, shape, tuple(a + b for a, b in zip(start, at, strict=True)))

    for new, tensor in converted.items():
        add(new, tensor, tuple(tensor.shape), (0,) * tensor.dim())
    return {
        name: said
        for name, said in found.items()
        if [(each.name, each.shape) for each in said] != [(name, tuple(given[name].shape))]
    }
