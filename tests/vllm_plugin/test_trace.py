"""Traces against what real loads do, bit for bit: random loaders, and those that models are known to have.

Also loaders that cannot be traced, or refuse a schema: what is said, and that the model stays as it was.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from random_loader import RandomLoader
from torch.nn import functional
from trace_scene import (
    Scene,
    assert_copied,
    assert_exact,
    check,
    checkpoint,
    makes_anew,
    model_of,
    schema_of,
)

from patchstore.errors import PatchstoreError, SchemaMismatch, UsageError
from patchstore.tensors.bits import bits
from vllm_plugin.map.provenance import Node
from vllm_plugin.map.regions import Region, View, positions
from vllm_plugin.map.trace import same_parameters, trace

Given = Iterator[tuple[str, torch.Tensor]]


@pytest.mark.parametrize("seed", range(60))
def test_a_random_loader_does_what_its_trace_says(seed: int) -> None:
    loader = RandomLoader(seed)
    assert_exact(Scene(loader.model, loader, loader.weights))


# What loaders of models write of one tensor.


def moved_indices(p: torch.Tensor, w: torch.Tensor) -> None:
    """Indices that are moved to where the weights are stay known."""
    expert_map = torch.tensor([-1, 0, 1, -1])
    mine = (expert_map != -1).nonzero().flatten().to(w.device)
    first = mine[0].item()
    for e, rows in enumerate(w[mine]):
        p[first - 1 + e].copy_(rows)


def halved_experts(p: torch.Tensor, w: torch.Tensor) -> None:
    gate, up = w.transpose(-1, -2).contiguous().chunk(2, dim=-2)
    for e, (g, u) in enumerate(zip(gate, up, strict=True)):
        p[e, :3].copy_(g)
        p[e, 3:].copy_(u)


def padded_permutation(p: torch.Tensor, w: torch.Tensor) -> None:
    part = w.permute(0, 2, 1).contiguous().narrow(1, 4, 4)
    p.zero_()
    p[:, : part.shape[1]].copy_(functional.pad(part, (0, 1)))


def interleaved_heads(p: torch.Tensor, w: torch.Tensor) -> None:
    q, k, v = (each.reshape(-1, 5) for each in w.view(4, 3, 2, 5).unbind(1))
    p.copy_(torch.cat([q, k, v])[4:20])


ROWS = [5, 0, 1, 7]
COPIED: list[tuple[tuple[int, ...], tuple[int, ...], Callable[..., object]]] = [
    ((4, 3, 2), (8, 2, 3), lambda p, w: p.copy_(w[torch.tensor(ROWS)].transpose(-1, -2).contiguous())),
    ((2, 3), (4, 3), moved_indices),
    ((4, 6, 5), (4, 5, 6), halved_experts),
    ((2, 6, 4), (2, 3, 8), padded_permutation),
    ((16, 5), (24, 5), interleaved_heads),
    ((12, 4), (6, 4), lambda p, w: p.copy_(w.view(2, 3, 4).repeat_interleave(2, dim=0).reshape(12, 4))),
    ((6, 1, 4), (6, 4), lambda p, w: p.copy_(w.unsqueeze(1))),
    ((), (), lambda p, w: p.copy_(w)),
]


@pytest.mark.parametrize(("shape", "given", "write"), COPIED)
def test_what_loaders_of_models_do_with_a_tensor_is_followed(shape, given, write) -> None:
    found = check(model_of(p=shape), lambda model, _, w: write(model.p.data, w), checkpoint(w=given))
    assert_copied(found, "w")
    assert not found.uncovered


# Loaders of several tensors.


def interleaved(model: Any, given: Given) -> None:
    for name, w in given:
        model.p.data[int(name == "b") :: 2].copy_(w)


def buffered(model: Any, given: Given) -> None:
    """In memory of its own, from its first element on."""
    buffer = torch.empty(2, 4)
    for i, (_, w) in enumerate(given):
        buffer[i].copy_(w)
    model.p.data.copy_(buffer)


def summed(model: Any, given: Given) -> None:
    buffer = torch.zeros(4)
    for _, w in given:
        buffer.add_(w.to(torch.float64).float())
    model.p.data[0].copy_(buffer)


def overlapping(model: Any, given: Given) -> None:
    for name, w in given:
        model.p.data.view(-1)[2 * (name == "b") :][:4].copy_(w)


def clearing(model: Any, given: Given) -> None:
    """The one that is calculated clears the other."""
    for name, w in given:
        if name == "a":
            model.p.data.zero_()
        model.p.data[int(name == "b")] = w + 1 if name == "a" else w


def calculated(model: Any, given: Given) -> None:
    for name, w in given:
        model.q.data.copy_(-torch.exp(w)) if name == "a" else model.p.data[0].copy_(w)


def numbers(model: Any, given: Given) -> None:
    """They are used when all tensors were read."""
    kept = {name: w[0].item() for name, w in given}
    model.p.data.fill_(kept.get("a", 0))
    model.q.data.copy_(torch.tensor([kept.get("b", 0)] * 4))


def through_a_parameter(model: Any, given: Given) -> None:
    for name, w in given:
        if name == "b":
            model.q.data.copy_(w)
        else:
            model.p.data[0].copy_(w)
            model.p.data[1].copy_(model.p.data[0])


def stopping_early(model: Any, given: Given) -> None:
    """It has no use for the other."""
    model.q.data.copy_(next(given)[1])


SEVERAL: list[tuple[Callable[[Any, Given], None], list[tuple[str, set[int]]], list[str]]] = [
    (interleaved, [], ["a", "b"]),
    (buffered, [], ["a", "b"]),
    (stopping_early, [], ["a"]),
    (summed, [("ab", {0})], []),
    (overlapping, [("ab", {0})], []),
    (clearing, [("ab", {0})], []),
    (calculated, [("a", {1})], ["b"]),
    (numbers, [("ab", {0, 1})], []),
    (through_a_parameter, [("a", {0})], ["b"]),
]
"""Names that are calculated together and the parameters that they are written to; names that are copied."""


@pytest.mark.parametrize(("load", "computed", "copied"), SEVERAL)
def test_names_are_copied_or_calculated_with_those_that_are_loaded_with_them(load, computed, copied) -> None:
    scene = Scene(model_of(p=(2, 4), q=(4,)), load, checkpoint(a=(4,), b=(4,)))
    assert_exact(scene)
    assert list(scene.trace.computed) == [(frozenset(names), indices) for names, indices in computed]
    assert sorted(scene.trace.regions) == copied


def test_a_tied_name_leads_to_the_same_elements() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        getattr(model, name).data.copy_(w)

    weights = checkpoint(embed=(4, 3))
    assert_copied(check(model_of(embed=(4, 3), head=(4, 3)), write, weights, {"head": "embed"}), "embed")


def test_elements_that_nothing_reaches_are_counted_and_shared_memory_for_each_parameter() -> None:
    model = model_of(p=(6, 2), whole=(8, 3), none=(0, 4))
    model.lower = torch.nn.Parameter(model.whole.data[4:], requires_grad=False)

    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        getattr(model, name).data[: len(w)].copy_(w)
        model.p.data[3].zero_()

    found = check(model, write, checkpoint(p=(3, 2), whole=(4, 3), none=(0, 4)))
    assert found.uncovered == {"p": 4, "whole": 12, "lower": 12}


@pytest.mark.parametrize("seed", range(20))
def test_memory_that_is_put_together_in_any_order_holds_what_was_put_last(seed: int) -> None:
    chosen = random.Random(seed)
    node, memory = Node(shape=(90, 10), dtype=torch.float32), torch.arange(900).view(90, 10)
    held: dict[int, str] = {}
    for i in range(60):
        row, column, first = chosen.randrange(88), chosen.randrange(8), chosen.randrange(860)
        rows, columns, run = memory[row], memory[row : row + 3, column : column + 3], memory.view(-1)
        part = chosen.choice([rows, columns, run[first : first + chosen.randrange(1, 40)]])
        where = View.of(part)
        assert node.put(where, [(f"w{i}", Region(source=where, target=where))])
        held |= dict.fromkeys(part.flatten().tolist(), f"w{i}")
    found = [
        (position, name)
        for name, region in node.parts
        for position in positions(region.target, memory.device).tolist()
    ]
    assert len(found) == len(held)
    assert dict(found) == held


def test_values_of_the_models_own_buffers_may_steer_a_loader() -> None:
    model = model_of(p=(2, 3))
    model.register_buffer("rows", torch.tensor([3, 1]))

    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        if (model.rows >= 0).all():
            model.p.data.copy_(w[model.rows])

    assert_copied(check(model, write, checkpoint(w=(4, 3))), "w")


def test_a_tensor_that_is_no_parameter_is_followed_too() -> None:
    model = model_of(p=(3,))
    model.plain = torch.ones(3)

    def load(model: torch.nn.Module, given: Given) -> None:
        for _, tensor in given:
            model.plain.copy_(tensor)
            model.plain[0].fill_(2)

    found = trace([model], schema_of(checkpoint(w=(3,))), load)
    assert torch.equal(model.plain, torch.ones(3))
    assert [found.runtimes[i].names for _, indices in found.computed for i in indices] == [("plain",)]


def test_a_parameter_that_is_made_anew_is_followed_into_the_one_that_was_there() -> None:
    model, weights = model_of(bias=(4,)), checkpoint(w=(3,))
    parameter = model.bias
    found = trace([model], schema_of(weights), makes_anew)
    assert_copied(found, "w")
    assert found.runtimes[0].storage.data_ptr() == parameter.data_ptr()
    with same_parameters(model):
        makes_anew(model, iter(weights.items()))
    assert model.bias is parameter
    assert torch.equal(bits(parameter[:3]), bits(weights["w"]))
    assert parameter[3] == 0


def test_models_may_be_given_as_an_iterator() -> None:
    models = [model_of(p=(4,)), model_of(p=(4,))]

    def load(model: torch.nn.Module, given: Given) -> None:
        for _, tensor in given:
            model.p.data.copy_(tensor)

    found = trace(iter(models), schema_of(checkpoint(w=(4,))), load)
    assert [index for index, _ in found.regions["w"]] == [0, 1]


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_twenty_thousand_names_are_traced_in_seconds() -> None:
    # 3 s on one busy core; what is quadratic takes minutes.
    experts, layers = 50, 400
    model = model_of(**{f"p{layer}": (experts, 2, 3) for layer in range(layers)})
    weights = {f"{layer}.{expert}": torch.empty(2, 3) for layer in range(layers) for expert in range(experts)}
    parameters = dict(model.named_parameters())

    def load(model: torch.nn.Module, given: Given) -> None:
        for name, tensor in given:
            layer, expert = name.split(".")
            parameters[f"p{layer}"].data[int(expert)].copy_(tensor)

    found = trace([model], schema_of(weights), load)
    assert len(found.regions) == experts * layers
    assert not found.uncovered


# Loaders that are refused.


def test_a_parameter_that_only_loading_makes_is_refused_by_name() -> None:
    model = model_of(p=(4,))
    model.bias = None
    with pytest.raises(UsageError, match=r"does not have 'bias' before its loader makes it"):
        trace([model], schema_of(checkpoint(w=(3,))), makes_anew)
    assert model.bias is None


def refusing(error: Exception) -> Callable[..., None]:
    """What a loader does that raises."""

    def refuse(*_: object) -> None:
        raise error

    return refuse


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], object], type[PatchstoreError]]] = {
    "decides": (lambda model, w: model.p.data.zero_() if (w > 0).any() else None, UsageError),
    "compares": (lambda model, w: torch.equal(w, w), UsageError),
    "reads": (lambda model, w: w.tolist(), UsageError),
    "rebinds": (lambda model, w: setattr(model.p, "data", w), UsageError),
    "replaces": (lambda model, w: setattr(model, "p", torch.nn.Parameter(w, False)), UsageError),
    "keeps": (lambda model, w: setattr(model, "kept", w), UsageError),
    "resizes": (lambda model, w: model.p.data.resize_(40), UsageError),
    "sets": (lambda model, w: model.p.data.set_(w), UsageError),
    "lacks": (refusing(KeyError("w")), SchemaMismatch),
    "refuses": (refusing(ValueError("no such parameter")), SchemaMismatch),
    "asserts": (refusing(AssertionError("no such parameter")), SchemaMismatch),
    "has another shape": (lambda model, w: model.p.data[:3].copy_(w), SchemaMismatch),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_loader_that_cannot_be_traced_or_refuses_a_schema_leaves_the_model_alone(kind: str) -> None:
    model, (act, error) = model_of(p=(4,)), REFUSED[kind]
    parameter, before, attributes = model.p, bits(model.p).clone(), dict(vars(model))

    def load(model: torch.nn.Module, given: Given) -> None:
        for _, tensor in given:
            model.p.data.copy_(tensor)
            act(model, tensor)

    with pytest.raises(error) as refused:
        trace([model], schema_of(checkpoint(w=(4,))), load)
    assert error is UsageError or "'w'" in str(refused.value)
    assert model.p is parameter
    assert torch.equal(bits(model.p), before)
    assert vars(model) == attributes


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
