"""Load a version into memory: as new tensors, or into those of a model or a dict, in place."""

from collections.abc import Mapping
from itertools import pairwise

import torch

from patchstore.bucket.records import Plan, Schema, TensorSpec
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.read.rebuild import Progress, rebuild
from patchstore.read.run import Run
from patchstore.support import host
from patchstore.tensors.bits import bits, spec_of

Tensors = dict[str, torch.Tensor]
Into = torch.nn.Module | Mapping[str, torch.Tensor]
"""What a version may be loaded into: a model, or tensors by checkpoint name."""

_WITHOUT = "load() without into= returns the tensors as they were published"


# Tensors that are made in inference mode cannot be written to outside of it.
@torch.inference_mode(mode=False)
@host.asked("rebuilding a version", kinds=host.SHORT_OF_MEMORY)
def load(run: Run, version: int | str | None, into: Into | None, progress: Progress | None) -> Tensors:
    """As `Run.load`."""
    targets = None if into is None else _targets(run, into)

    def rebuilt(route: Plan) -> Tensors:
        files = rebuild(run, route, progress=progress)
        return {
            spec.name: tensor
            for _, specs, tensors in files
            for spec, tensor in zip(specs, tensors, strict=True)
        }

    found = run.reach(run.named(version), rebuilt)
    if targets is None:
        return found
    with writing_to(targets):
        for name, tensor in found.items():
            bits(targets[name]).copy_(bits(tensor))
    return {name: targets[name] for name in found}


def writing_to(tensors: Mapping[str, torch.Tensor]) -> torch.inference_mode:
    """Tensors that were made in inference mode can only be written to in it."""
    return torch.inference_mode(any(map(torch.Tensor.is_inference, tensors.values())))


def _targets(run: Run, into: Into) -> Tensors:
    """Return the tensors to write to, by checkpoint name, which are those of the run."""
    if isinstance(into, torch.nn.Module):
        found = _of_model(run, into)
    elif isinstance(into, Mapping):
        found = dict(into)
    else:
        raise UsageError(
            f"into must be a model, or a dict of names to tensors, not {type(into).__name__}; {_WITHOUT}"
        )
    for name, tensor in found.items():
        if type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
            raise UsageError(
                f"{name!r:.100} is a {type(tensor).__name__}, which cannot be written in place; {_WITHOUT}"
            )
    check_tensors(run.schema, found)
    return found


def _of_model(run: Run, model: torch.nn.Module) -> Tensors:
    """Return a model's own tensors under the names under which a publisher would publish them."""
    from patchstore.publish.sources.weights import Weights

    if run.header.adapter is not None:
        raise UsageError(
            "this run is of adapters, which are not written into a model: hand what load() returns to "
            "peft.set_peft_model_state_dict"
        )
    weights = Weights(model, run.schema.by_name())
    given = None if weights.is_stream else weights.read()
    held = [*model.parameters(), *model.buffers()]
    own = {
        each.untyped_storage().data_ptr() for each in held if type(each) in {torch.Tensor, torch.nn.Parameter}
    }
    if (
        given is None
        or given.places
        or any(each.untyped_storage().data_ptr() not in own for each in given.tensors.values())
    ):
        raise UsageError(
            f"{type(model).__name__} has tensors that are sharded, adapted, quantized or computed, which "
            f"cannot be written in place; {_WITHOUT}"
        )
    return given.tensors


def check_tensor(name: str, tensor: torch.Tensor, wanted: TensorSpec) -> None:
    """Raises SchemaMismatch unless a tensor is as it is in a run, and can be written in place."""
    if not isinstance(tensor, torch.Tensor):
        raise SchemaMismatch(f"tensor {name!r} is a {type(tensor).__name__}")
    _check_kind(name, spec_of(name, tensor), wanted)
    _check_in_place(name, tensor)


def _check_kind(name: str, found: TensorSpec | None, wanted: TensorSpec | None) -> None:
    if found != wanted:
        here, there = ("missing" if each is None else each.kind for each in (found, wanted))
        raise SchemaMismatch(f"tensor {name!r} is {here}, but in the run it is {there}")


def _check_in_place(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta or tensor.is_neg() or not tensor.is_contiguous():
        what = "on the meta device" if tensor.is_meta else "negated" if tensor.is_neg() else "not contiguous"
        raise SchemaMismatch(f"tensor {name!r} is {what}, so it cannot be written in place")


def check_tensors(schema: Schema, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises SchemaMismatch unless tensors are those of a run, and each can be written in place."""
    for name in tensors:
        if not isinstance(name, str):
            raise SchemaMismatch(f"names of tensors must be strings, but one is {name!r:.100}")
    found = {name: spec_of(name, tensor) for name, tensor in tensors.items()}
    for alias, name in schema.tied.items():
        # The further name of a tied tensor is no tensor of its own, as long as it really is the same.
        if alias in found and name in found and tensors[alias].data_ptr() == tensors[name].data_ptr():
            del found[alias]
    wanted = schema.by_name()
    for name in sorted(found.keys() | wanted.keys()):
        _check_kind(name, found.get(name), wanted.get(name))
        _check_in_place(name, tensors[name])
    check_apart({name: tensors[name] for name in found})


def check_apart(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises SchemaMismatch if any of these share memory."""
    places = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in tensors.items()
        if tensor.numel()
    )
    for (device, _, end, name), (other_device, start, _, other) in pairwise(places):
        if device == other_device and start < end:
            raise SchemaMismatch(f"tensors {name!r} and {other!r} share memory, but are two in this run")
