"""Traces against what real loads do, bit for bit: random loaders, and those that models are known to have."""

import random
import time
from collections.abc import Iterator

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

from patchstore.format.records import Schema
from patchstore.tensors.bits import bits
from vllm_plugin.provenance import Node
from vllm_plugin.regions import Region, View, positions
from vllm_plugin.trace import same_parameters, trace

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("seed", range(60))
def test_a_random_loader_does_what_its_trace_says(seed: int) -> None:
    loader = RandomLoader(seed)
    assert_exact(Scene(loader.model, loader, loader.weights))


def test_a_row_gather_by_a_known_index_is_followed() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        model.p.data.copy_(w[torch.tensor([5, 0, 1, 7])].transpose(-1, -2).contiguous())

    assert_copied(check(model_of(p=(4, 3, 2)), write, checkpoint(w=(8, 2, 3))), "w")


def test_indices_that_are_moved_to_where_the_weights_are_stay_known() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        expert_map = torch.tensor([-1, 0, 1, -1])
        mine = (expert_map != -1).nonzero().flatten().to(w.device)
        first = mine[0].item()
        for e, rows in enumerate(w[mine]):
            model.p.data[first - 1 + e].copy_(rows)

    assert_copied(check(model_of(p=(2, 3)), write, checkpoint(w=(4, 3))), "w")


def test_a_transposed_and_halved_stack_of_experts_is_followed() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        gate, up = w.transpose(-1, -2).contiguous().chunk(2, dim=-2)
        for e, (g, u) in enumerate(zip(gate, up, strict=True)):
            model.p.data[e, :3].copy_(g)
            model.p.data[e, 3:].copy_(u)

    assert_copied(check(model_of(p=(4, 6, 5)), write, checkpoint(w=(4, 5, 6))), "w")


def test_a_padded_slice_of_a_permutation_is_followed() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        part = w.permute(0, 2, 1).contiguous().narrow(1, 4, 4)
        model.p.data.zero_()
        model.p.data[:, : part.shape[1]].copy_(functional.pad(part, (0, 1)))

    assert_copied(check(model_of(p=(2, 6, 4)), write, checkpoint(w=(2, 3, 8))), "w")


def test_interleaved_heads_are_followed_through_a_view_and_a_concatenation() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        q, k, v = (each.reshape(-1, 5) for each in w.view(4, 3, 2, 5).unbind(1))
        model.p.data.copy_(torch.cat([q, k, v])[4:20])

    assert_copied(check(model_of(p=(16, 5)), write, checkpoint(w=(24, 5))), "w")


def test_replicated_heads_are_followed() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        model.p.data.copy_(w.view(2, 3, 4).repeat_interleave(2, dim=0).reshape(12, 4))

    assert_copied(check(model_of(p=(12, 4)), write, checkpoint(w=(6, 4))), "w")


def test_a_convolution_that_gains_a_dimension_is_followed() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        model.p.data.copy_(w.unsqueeze(1))

    assert_copied(check(model_of(p=(6, 1, 4)), write, checkpoint(w=(6, 4))), "w")


def test_gate_and_up_may_interleave() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        model.p.data[int(name == "up") :: 2].copy_(w)

    assert_copied(check(model_of(p=(8, 3)), write, checkpoint(gate=(4, 3), up=(4, 3))), "gate", "up")


def test_a_tied_name_leads_to_the_same_elements() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        getattr(model, name).data.copy_(w)

    weights = checkpoint(embed=(4, 3))
    assert_copied(check(model_of(embed=(4, 3), head=(4, 3)), write, weights, {"head": "embed"}), "embed")


def test_parameters_that_share_memory_are_covered_each_by_its_own() -> None:
    model = model_of(whole=(8, 3))
    model.lower = torch.nn.Parameter(model.whole.data[4:], requires_grad=False)

    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        model.whole.data[:4].copy_(w)

    assert check(model, write, checkpoint(w=(4, 3))).uncovered == {"whole": 12, "lower": 12}


def test_calculated_names_are_listed_with_what_they_are_written_to() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        if name == "a":
            model.a.data.copy_(-torch.exp(w))
        else:
            model.b.data.copy_(w)

    found = check(model_of(b=(3,), a=(4,)), write, checkpoint(a=(4,), b=(3,)))
    assert found.computed == ((frozenset({"a"}), frozenset({1})),)
    assert sorted(found.regions) == ["b"]


def test_what_is_written_over_in_part_is_loaded_together() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        model.p.data[:3].copy_(w) if name == "a" else model.p.data[2:].copy_(w)

    found = check(model_of(p=(5,)), write, checkpoint(a=(3,), b=(3,)))
    assert [names for names, _ in found.computed] == [{"a", "b"}]


def test_a_calculated_name_that_clears_others_is_loaded_with_them() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        if name == "a":
            model.p.data.zero_()
        model.p.data[int(name == "b")] = w + 1 if name == "a" else w

    found = check(model_of(p=(2, 3)), write, checkpoint(a=(3,), b=(3,)))
    assert [names for names, _ in found.computed] == [{"a", "b"}]


def test_a_buffer_of_the_loaders_own_is_followed_from_its_first_element() -> None:
    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        buffer = torch.empty(3, 4)
        for i, (_, tensor) in enumerate(given):
            buffer[i].copy_(tensor)
        model.p.data.copy_(buffer)

    scene = Scene(model_of(p=(3, 4)), load, checkpoint(a=(4,), b=(4,), c=(4,)))
    assert_exact(scene)
    assert_copied(scene.trace, "a", "b", "c")


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


def test_a_sum_in_a_buffer_names_all_that_went_in() -> None:
    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        buffer = torch.zeros(4)
        for _, tensor in given:
            buffer.add_(tensor.to(torch.float64).float())
        model.p.data.copy_(buffer)

    scene = Scene(model_of(p=(4,)), load, checkpoint(a=(4,), b=(4,), c=(4,)))
    assert [names for names, _ in scene.trace.computed] == [{"a", "b", "c"}]


def test_numbers_that_a_loader_keeps_are_listed_when_it_uses_them() -> None:
    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        scales = {name: tensor.item() for name, tensor in given}
        model.a.data.fill_(scales["a"])
        model.b.data.copy_(torch.tensor([scales["b"]]))

    scene = Scene(model_of(a=(1,), b=(1,)), load, checkpoint(a=(1,), b=()))
    assert {name for names, _ in scene.trace.computed for name in names} == {"a", "b"}


def test_a_copy_from_another_parameter_names_where_that_came_from() -> None:
    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        read = dict(given)
        if "b" in read:
            model.q.data.copy_(read["b"])
        if "a" in read:
            model.p.data.copy_(read["a"])
            model.r.data.copy_(model.p.data)

    scene = Scene(model_of(p=(4,), q=(4,), r=(4,)), load, checkpoint(a=(4,), b=(4,)))
    assert_exact(scene)
    assert [names for names, _ in scene.trace.computed] == [{"a"}]
    assert sorted(scene.trace.regions) == ["b"]


def test_a_loader_may_stop_early() -> None:
    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        model.p.data.copy_(next(given)[1])

    scene = Scene(model_of(p=(4,)), load, checkpoint(a=(4,), b=(4,)))
    assert scene.trace.unread == {"b"}
    assert_copied(scene.trace, "a")


def test_tensors_of_no_elements_and_of_no_dimensions_are_followed() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        getattr(model, name).data.copy_(w)

    found = check(model_of(none=(0, 4), one=()), write, checkpoint(none=(0, 4), one=()))
    assert found.regions["one"][0][1].num_elements == 1
    assert not found.uncovered


def test_elements_that_nothing_reaches_are_counted() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        model.p.data[:3].copy_(w)
        model.p.data[3].zero_()

    assert check(model_of(p=(6, 2)), write, checkpoint(w=(3, 2))).uncovered == {"p": 4}


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

    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
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

    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in given:
            model.p.data.copy_(tensor)

    found = trace(iter(models), schema_of(checkpoint(w=(4,))), load)
    assert [index for index, _ in found.regions["w"]] == [0, 1]


@pytest.mark.exhaustive
def test_twenty_thousand_names_are_traced_in_seconds() -> None:
    experts, layers = 50, 400
    model = model_of(**{f"p{layer}": (experts, 2, 3) for layer in range(layers)})
    weights = {f"{layer}.{expert}": torch.empty(2, 3) for layer in range(layers) for expert in range(experts)}
    parameters = dict(model.named_parameters())

    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in given:
            layer, expert = name.split(".")
            parameters[f"p{layer}"].data[int(expert)].copy_(tensor)

    schema = schema_of(weights)
    trace([model_of()], Schema(tensors=()), load)  # imports what torch imports late
    begin = time.perf_counter()
    found = trace([model], schema, load)
    # 3 s on one busy core; what is quadratic takes minutes.
    assert time.perf_counter() - begin < 60
    assert len(found.regions) == experts * layers
    assert not found.uncovered
