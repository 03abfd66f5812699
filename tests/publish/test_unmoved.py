"""A publisher finds tensors where they were, and sees what else was done to them since the last call."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from patchstore import Publisher
from patchstore.errors import SchemaMismatch
from patchstore.publish.sources import Weights
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits
from tests.support.weights import newest

State = dict[str, torch.Tensor]


def weights() -> State:
    torch.manual_seed(0)
    state = {name: torch.randn(6, 6).to(torch.bfloat16) for name in "abcd"}
    # Published once, and by two names.
    return state | {"tied": state["a"]}


@pytest.fixture
def published() -> Iterator[tuple[State, Callable[[], State]]]:
    """A source, and what publishes it and returns what a reader then has."""
    state, store = weights(), MemoryStore()
    with Publisher(store, state) as publisher:
        steps = iter(range(10**6))

        def publish() -> State:
            publisher.publish_patch(next(steps)).result()
            return newest(store)

        publish()
        publish()
        yield state, publish


def check(found: State, state: State) -> None:
    assert found.keys() == state.keys() - {"tied"}
    for name, tensor in found.items():
        assert torch.equal(bits(tensor), bits(state[name].detach())), name


def moved(state: State) -> None:
    state["b"] = state["b"] + 1


def moved_in_place(state: State) -> None:
    state["b"].data = state["b"] + 1


def transposed_in_place(state: State) -> None:
    """The same address, shape and dtype."""
    state["b"].data = state["b"].t()


def swapped(state: State) -> None:
    state["b"], state["c"] = state["c"], state["b"]


def reordered(state: State) -> None:
    first = state.pop("b")
    state["b"] = first
    first += 1


def parameters_now(state: State) -> None:
    state["b"] = nn.Parameter(state["b"] + 1)


def trained(state: State) -> None:
    for name in "abcd":
        state[name][2:] *= 3


CHANGES = [moved, moved_in_place, transposed_in_place, swapped, reordered, parameters_now, trained]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_published_are_the_tensors_of_now(
    published: tuple[State, Callable[[], State]], change: Callable[[State], None]
) -> None:
    state, publish = published
    for _ in range(3):
        change(state)
        check(publish(), state)


def untied(state: State) -> None:
    state["tied"] = state["tied"].clone()


def tied_otherwise(state: State) -> None:
    state["c"] = state["d"]


def retyped(state: State) -> None:
    state["b"] = (state["b"] * 100).to(torch.int16)


def reshaped(state: State) -> None:
    state["b"] = state["b"].view(4, 9)


def left_out(state: State) -> None:
    del state["b"]


def added(state: State) -> None:
    state["e"] = torch.zeros(3)


def without_memory(state: State) -> None:
    state["b"] = state["b"].clone()
    state["b"].untyped_storage().resize_(0)


def on_meta(state: State) -> None:
    state["b"] = state["b"].to("meta")


REFUSED = [untied, tied_otherwise, retyped, reshaped, left_out, added, without_memory, on_meta]


@pytest.mark.parametrize("change", REFUSED)
def test_other_tensors_are_refused_again_and_again_until_they_are_back(
    published: tuple[State, Callable[[], State]], change: Callable[[State], None]
) -> None:
    state, publish = published
    before = dict(state)
    kept = state["b"].clone()
    change(state)
    for _ in range(3):
        with pytest.raises(SchemaMismatch):
            publish()
    state.clear()
    state.update(before)
    state["b"] = kept + 1
    check(publish(), state)


def test_nothing_is_kept_alive() -> None:
    state = weights()
    del state["tied"]
    source = Weights(state)
    source.read()
    assert source.read().is_unmoved
    freed: list[Any] = []
    weakref.finalize(state["b"], freed.append, "tensor")
    state["b"] = torch.zeros(6, 6, dtype=torch.bfloat16)
    assert freed == ["tensor"]
    assert not source.read().is_unmoved
    assert source.read().is_unmoved
