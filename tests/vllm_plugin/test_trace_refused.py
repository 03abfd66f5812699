"""Loaders that cannot be traced, or refuse a schema: what is said, and that the model stays as it was."""

from collections.abc import Callable, Iterator

import pytest
import torch
from trace_scene import check, checkpoint, makes_anew, model_of, schema_of

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.tensors.bits import bits
from vllm_plugin.trace import trace

pytestmark = pytest.mark.vllm


def test_a_parameter_that_only_loading_makes_is_refused_by_name() -> None:
    model = model_of(p=(4,))
    model.bias = None
    with pytest.raises(UsageError, match=r"does not have 'bias' before its loader makes it"):
        trace([model], schema_of(checkpoint(w=(3,))), makes_anew)
    assert model.bias is None


REFUSED = {
    "decides": lambda model, w: model.p.data.zero_() if (w > 0).any() else None,
    "compares": lambda model, w: torch.equal(w, w),
    "reads": lambda model, w: w.tolist(),
    "rebinds": lambda model, w: setattr(model.p, "data", w),
    "replaces": lambda model, w: setattr(model, "p", torch.nn.Parameter(w, requires_grad=False)),
    "keeps": lambda model, w: setattr(model, "kept", w),
    "resizes": lambda model, w: model.p.data.resize_(40),
    "sets": lambda model, w: model.p.data.set_(w),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_loader_that_cannot_be_traced_is_refused_and_leaves_the_model_alone(kind: str) -> None:
    model = model_of(p=(4,))
    parameter, before, attributes = model.p, bits(model.p).clone(), dict(vars(model))

    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in given:
            model.p.data.copy_(tensor)
            REFUSED[kind](model, tensor)

    with pytest.raises(UsageError) as refused:
        trace([model], schema_of(checkpoint(w=(4,))), load)
    assert refused.value.kind == "usage"
    assert model.p is parameter
    assert torch.equal(bits(model.p), before)
    assert vars(model) == attributes


@pytest.mark.parametrize("error", [KeyError, ValueError, AssertionError])
def test_a_loader_that_refuses_a_schema_leaves_the_model_alone(error: type[Exception]) -> None:
    model = model_of(p=(4,))
    before = bits(model.p).clone()

    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in given:
            model.p.data.copy_(tensor)
            raise error("no such parameter")

    with pytest.raises(SchemaMismatch) as refused:
        trace([model], schema_of(checkpoint(w=(4,))), load)
    assert refused.value.kind == "schema-mismatch"
    assert "'w'" in str(refused.value)
    assert torch.equal(bits(model.p), before)


def refusing(error: Exception) -> Callable[..., None]:
    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _ in given:
            raise error

    return load


def test_a_run_of_a_wrapped_model_is_explained_instead_of_listing_every_parameter() -> None:
    every = {f"layers.{number}.weight" for number in range(1000)}
    given = schema_of(checkpoint(**{"module.w": (4,), "module.b": (2,)}))
    with pytest.raises(SchemaMismatch) as refused:
        trace([model_of(p=(4,))], given, refusing(ValueError(f"no 'module' in Model, which has {every}")))
    assert "published from a wrapped model: its names have 'module.'" in str(refused.value)
    assert "Publish model.module" in str(refused.value)
    assert "layers." not in str(refused.value)


def test_of_a_loaders_long_list_of_names_a_few_are_shown() -> None:
    every = {f"layers.{number}.weight" for number in range(1000)}
    given = schema_of(checkpoint(w=(4,), b=(2,)))
    with pytest.raises(SchemaMismatch, match=r"of 2 names: ValueError: no 'b' in Model") as refused:
        trace([model_of(p=(4,))], given, refusing(ValueError(f"no 'b' in Model, which has {every}")))
    assert len(str(refused.value)) < 500


def test_shapes_that_do_not_fit_are_the_schemas_fault() -> None:
    with pytest.raises(SchemaMismatch):
        check(model_of(p=(4,)), lambda model, name, w: model.p.data.copy_(w), checkpoint(w=(5,)))
