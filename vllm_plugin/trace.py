"""Find where a model's own loader puts each element of a checkpoint, without loading anything.

`load_weights` runs once on meta tensors, which have shapes and no elements. `tracer` follows what it does
with them, `provenance` records where elements come from, and `resolve` says what that comes to. What is
calculated instead of copied has no place of its own, and is listed as such.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.format import mismatch
from patchstore.format.records import Schema
from vllm_plugin.provenance import Provenance, memory, tensors_of
from vllm_plugin.resolve import Runtime, Trace
from vllm_plugin.tracer import KnownIndices, Tracer

_REGISTERED = ("_parameters", "_buffers", "_modules")


def trace(
    models: Iterable[torch.nn.Module],
    schema: Schema,
    load: Callable[[torch.nn.Module, Iterator[tuple[str, torch.Tensor]]], object],
) -> Trace:
    """Trace the loaders of models that are loaded from one checkpoint. Nothing is written to them.

    Args:
        models: in the order in which they are loaded; what they share keeps what the last one puts there.
        load: calls a model's loader; here so that the caller can set up what loaders expect around them.

    Raises:
        SchemaMismatch: a loader does not take this schema's names or shapes.
        UsageError: a loader looks at elements, or gives parameters other memory, so it cannot be traced.
    """
    models = list(models)
    provenance = Provenance(models, schema)
    tracer = Tracer(provenance)
    for model in models:
        before = Attributes(model)
        try:
            with torch.no_grad(), tracer, KnownIndices(), same_parameters(model):
                load(model, provenance.checkpoint())
            before.check()
        except (KeyError, ValueError, AttributeError, AssertionError, TypeError) as exc:
            # What vLLM's loaders raise for names and shapes that their model does not have.
            raise SchemaMismatch(
                mismatch.explain(
                    schema,
                    f"the model's loader failed {provenance.at}, of {len(schema.tensors):,} names: "
                    f"{type(exc).__name__}: {mismatch.brief(str(exc))}",
                )
            ) from exc
        except (RuntimeError, NotImplementedError, IndexError) as exc:
            raise UsageError(
                f"the model's loader cannot be traced; it failed {provenance.at}: "
                f"{type(exc).__name__}: {mismatch.brief(str(exc))}"
            ) from exc
        finally:
            before.restore()
    return provenance.result()


def untraced(models: Iterable[torch.nn.Module], schema: Schema) -> Trace:
    """Say that every name is calculated, those of a layer together, and may be written anywhere.

    For models of which vLLM loads layers as a whole, because it quantises them on the way.
    """
    runtimes: dict[int, tuple[list[str], torch.Tensor]] = {}
    for model in models:
        parameters = model.named_parameters(remove_duplicate=False)
        for name, tensor in (*parameters, *model.named_buffers()):
            runtimes.setdefault(memory(tensor), ([], tensor))[0].append(name)
    layers: dict[str, set[str]] = {}
    for spec in schema.tensors:
        layers.setdefault(_layer(spec.name), set()).add(spec.name)
    everything = frozenset(range(len(runtimes)))
    return Trace(
        runtimes=tuple(
            Runtime(names=tuple(names), storage=tensor.untyped_storage(), dtype=tensor.dtype)
            for names, tensor in runtimes.values()
        ),
        regions={},
        computed=tuple((frozenset(names), everything) for names in layers.values()),
        unread=frozenset(),
        uncovered={},
    )


def _layer(name: str) -> str:
    """The part of a name up to its first number. Names without one are a layer too, as they may be fused."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else ""


@contextmanager
def same_parameters(model: torch.nn.Module) -> Iterator[None]:
    """Put back parameters that a loader replaces inside of the block, with what it put into the new ones.

    vLLM's backend for models of transformers makes the bias of an output layer anew each time it loads one.
    """
    held = [(module, dict(module._parameters)) for module in model.modules()]
    try:
        yield
    finally:
        for module, before in held:
            for name, then in before.items():
                now = module._parameters.get(name)
                if now is None or then is None or now is then:
                    continue
                if (now.shape, now.dtype, now.device) == (then.shape, then.dtype, then.device):
                    then.data.copy_(now.data)
                    module._parameters[name] = then


class Attributes:
    """What a model's modules hold, to put it back after a loader replaced it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [
            (path, module, dict(vars(module)), [dict(vars(module)[kind]) for kind in _REGISTERED])
            for path, module in model.named_modules()
        ]
        self._tensors = [(name, tensor, tensor.data) for name, tensor in tensors_of(model)]

    def check(self) -> None:
        """Refuse a loader that a trace says too little of.

        Raises:
            UsageError: parameters have other memory, or modules hold tensors of the checkpoint themselves.
        """
        moved: list[str] = []
        made: list[str] = []
        for name, tensor, data in self._tensors:
            if tensor.data_ptr() != data.data_ptr() or tensor.device != data.device:
                moved.append(name)
        for path, module, values, registered in self._modules:
            for kind, then in zip(_REGISTERED, registered, strict=True):
                for name, value in vars(module)[kind].items():
                    if value is not then.get(name):
                        (moved if then.get(name) is not None else made).append(_joined(path, name))
            for name, value in vars(module).items():
                if value is not values.get(name) and _is_unknown(value):
                    moved.append(_joined(path, name))
        if moved:
            raise UsageError(
                f"the model's loader gives {len(moved)} parameters or attributes other memory instead of "
                f"writing to them, such as {moved[0]!r}, so it cannot be traced"
            )
        if made:
            raise UsageError(
                f"the model does not have {made[0]!r} before its loader makes it: start vllm from a "
                "checkpoint that has it, without --load-format dummy"
            )

    def restore(self) -> None:
        for _, module, values, registered in self._modules:
            vars(module).clear()
            vars(module).update(values)
            for kind, then in zip(_REGISTERED, registered, strict=True):
                values[kind].clear()
                values[kind].update(then)
        for _, tensor, data in self._tensors:
            if _place(tensor) != _place(data):
                tensor.data = data


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_unknown(value: object) -> bool:
    """Whether an attribute can only be a checkpoint's, as a trace gives it to loaders."""
    return (isinstance(value, torch.Tensor) and value.is_meta) or (
        isinstance(value, float) and math.isnan(value)
    )


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


__all__ = ["Attributes", "Runtime", "Trace", "same_parameters", "trace", "untraced"]
