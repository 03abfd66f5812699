"""Find every tensor that a model's modules hold, wherever they keep it: in lists, objects, closures."""

import functools
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

Step = tuple[Literal["attribute", "item"], Any]
"""From a value to one that it holds: an attribute's name, or a key or index."""

_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "triton"})
"""Packages whose objects are not looked into: they hold no weights, or those that they were called with."""

_APART = ("vllm.config", "vllm.compilation", "vllm.distributed")
"""Parts of vLLM that modules refer to and that lead to other models, or to nothing."""

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})

NO_WEIGHTS = frozenset(
    {
        *("kv_cache", "_q_scale", "_k_scale", "_v_scale", "_prob_scale", "_k_scale_cpu", "_v_scale_cpu"),
        # Constants that vLLM 0.26 makes anew in the hook of each attention layer.
        *("q_range", "k_range", "v_range"),
    }
)
"""What vLLM gives attention layers beside their weights: a cache, and scales of what is in it. If these were
taken for weights, each update would call the hooks of all attention layers while generation is paused."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One place that holds a tensor."""

    path: str
    """From the model, as one would write it in Python."""
    module: torch.nn.Module
    """The registered module that it was found in."""
    way: tuple[Step, ...]
    """From there to the tensor. Followed anew each time, since what lies between may be replaced."""

    @property
    def is_parameter(self) -> bool:
        """Whether it is one of the module's own parameters."""
        return self.way[0] == ("attribute", "_parameters")

    def get(self) -> torch.Tensor | None:
        """Return the tensor that is there now, if one is."""
        found = self._follow(self.way)
        return found if isinstance(found, torch.Tensor) else None

    def put(self, tensor: torch.Tensor) -> None:
        """Put a tensor there. What is in a tuple stays."""
        holder, (kind, key) = self._follow(self.way[:-1]), self.way[-1]
        if kind == "attribute":
            object.__setattr__(holder, key, tensor)
        elif isinstance(holder, dict | list):
            holder[key] = tensor

    def _follow(self, way: tuple[Step, ...]) -> Any:
        found: Any = self.module
        for kind, key in way:
            try:
                found = object.__getattribute__(found, key) if kind == "attribute" else found[key]
            except (AttributeError, LookupError, TypeError):
                return None
        return found


def slots(model: torch.nn.Module) -> Iterator[Slot]:
    """Yield what the modules of a model hold; each object is looked into once."""
    registered = {id(module) for module in model.modules()}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            for name, tensor in vars(module)[kind].items():
                if tensor is not None and name not in NO_WEIGHTS:
                    yield Slot(_joined(path, name), module, (("attribute", kind), ("item", name)))
        # A list of what is ahead, so that a chain of objects is no chain of calls.
        ahead: list[tuple[str, tuple[Step, ...], Any]] = [
            (_joined(path, name), (("attribute", name),), value)
            for name, value in vars(module).items()
            if name not in {"_parameters", "_buffers", "_modules"}
        ]
        while ahead:
            where, way, value = ahead.pop()
            if way[-1][1] in NO_WEIGHTS:
                continue
            if isinstance(value, torch.Tensor):
                yield Slot(where, module, way)
            elif type(value) not in _PLAIN and id(value) not in seen and id(value) not in registered:
                seen.add(id(value))
                ahead += [(where + text, (*way, *steps), each) for text, steps, each in _inside(value)]


def _inside(value: Any) -> Iterator[tuple[str, tuple[Step, ...], Any]]:
    """Yield what an object holds: how one writes that, how to get there, and the value."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", (("item", key),), each) for key, each in list(value.items()))
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", (("item", number),), each) for number, each in enumerate(value))
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield f".{name}", (("attribute", name),), getattr(value, name)
    elif isinstance(value, types.MethodType):
        yield ".__self__", (("attribute", "__self__"),), value.__self__
    elif isinstance(value, types.FunctionType):
        for number, cell in enumerate(value.__closure__ or ()):
            way: tuple[Step, ...] = (
                ("attribute", "__closure__"),
                ("item", number),
                ("attribute", "cell_contents"),
            )
            try:
                yield f".{value.__code__.co_freevars[number]}", way, cell.cell_contents
            except ValueError:
                continue  # not bound yet
    elif isinstance(value, torch.nn.Module) or (not isinstance(value, type) and _is_of_model(type(value))):
        for name in {*getattr(value, "__dict__", ()), *_slot_names(type(value))}:
            try:
                # As it is stored: a config of transformers does not say itself what its layers differ in.
                held = object.__getattribute__(value, name)
            except AttributeError:
                continue
            yield f".{name}", (("attribute", name),), held


def _is_of_model(kind: type) -> bool:
    name = kind.__module__
    return name.partition(".")[0] not in _FOREIGN and not name.startswith(_APART)


def _slot_names(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        yield from (names,) if isinstance(names, str) else names


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
